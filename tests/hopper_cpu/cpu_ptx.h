// mla_backends/ptx.cuh for a CPU: the same functions over fibers, one per GPU thread, so that tests run hopper.cu's own
// text without a GPU. A fiber that waits (for its warp, CTA, cluster or an mbarrier) yields to the next one.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct dim3 { u32 x, y, z; };
using std::max;
using std::min;
inline u32 min(u32 a, int b) { return std::min(a, (u32)b); }

struct Meet { // where `need` fibers wait for each other
  int need = 0, count = 0;
  u64 round = 0;
  bool any[2] = {false, false}; // of the round at hand and the one before
};
struct Warp {
  Meet meet;
  u32 slot[2][32][8];
};
struct Cta {
  std::vector<u8> memory;
  u8* shared; // 1024-byte aligned
  Meet barrier;
  std::vector<Warp> warps;
  u32 index, rank;
  struct Cluster* cluster;
};
struct Cluster {
  std::vector<std::unique_ptr<Cta>> ctas;
  Meet barrier;
};
struct Product { // of a warpgroup, not yet done
  float* d;
  bool add, registers;
  u32 a, b;
  u32 rows[2][8]; // bf16 pairs of A's rows lane / 4 and + 8, where it comes from registers
};
struct Fiber {
  ucontext_t context;
  std::vector<u8> stack;
  Cta* cta;
  u32 thread;
  u64 cluster_round;
  std::vector<Product> open;
  std::vector<std::vector<Product>> committed;
  bool done = false;
};
inline Fiber* current;
inline ucontext_t scheduler;
inline u32 grid_size;
inline u64 idle_turns;
inline u64 progress; // meetings that took place

inline void yield_fiber() {
  if (++idle_turns > 200000000ull) {
    std::fprintf(stderr, "hopper_cpu: no fiber can go on\n");
    std::exit(3);
  }
  swapcontext(&current->context, &scheduler);
}
inline u64 arrive(Meet& m) {
  const u64 round = m.round;
  if (++m.count == m.need) {
    m.count = 0;
    m.round++;
    progress++;
    idle_turns = 0;
  }
  return round;
}
inline void wait(const Meet& m, u64 round) {
  while (m.round == round) yield_fiber();
}

struct Index {
  int kind;
  operator u32() const {
    if (kind == 0) return current->thread;
    return kind == 1 ? current->cta->index : grid_size;
  }
};
struct Indices { Index x; };
inline const Indices threadIdx{{0}}, blockIdx{{1}}, gridDim{{2}};
inline Warp& warp() { return current->cta->warps[current->thread / 32]; }
inline u32 lane() { return current->thread % 32; }

// All lanes hand in `n` words and see everybody's.
inline u32 (*exchange(const u32* words, int n))[8] {
  Warp& w = warp();
  const u64 round = w.meet.round;
  std::memcpy(w.slot[round & 1][lane()], words, 4 * n);
  wait(w.meet, arrive(w.meet));
  return w.slot[round & 1];
}
inline u32 bits(float x) { u32 r; std::memcpy(&r, &x, 4); return r; }
inline float number(u32 x) { float r; std::memcpy(&r, &x, 4); return r; }
inline float from_bf16(u32 x) { return number(x << 16); }
inline u32 to_bf16(float x) {
  if (x != x) return 0x7FFF;
  const u32 b = bits(x);
  return (b + 0x7FFF + ((b >> 16) & 1)) >> 16;
}

inline void __syncthreads() { Meet& m = current->cta->barrier; wait(m, arrive(m)); }
inline bool barrier_any(bool x) {
  Meet& m = current->cta->barrier;
  bool& any = m.any[m.round & 1];
  if (m.count == 0) any = false;
  any |= x;
  wait(m, arrive(m));
  return any;
}
inline void __syncwarp() { Warp& w = warp(); wait(w.meet, arrive(w.meet)); }
inline float __shfl_xor_sync(u32, float x, int mask) { u32 b = bits(x); return number(exchange(&b, 1)[lane() ^ mask][0]); }
inline u32 __shfl_sync(u32, u32 x, int from) { return exchange(&x, 1)[from][0]; }
inline u32 __ballot_sync(u32, bool x) {
  u32 b = x, r = 0;
  auto all = exchange(&b, 1);
  for (int i = 0; i < 32; i++) r |= all[i][0] << i;
  return r;
}
inline bool __any_sync(u32 m, bool x) { return __ballot_sync(m, x); }
inline int __popc(u32 x) { return __builtin_popcount(x); }
inline float __int_as_float(int x) { return number(x); }
inline float __uint_as_float(u32 x) { return number(x); }
inline u32 __byte_perm(u32 a, u32 b, u32 s) {
  const u64 x = (u64)b << 32 | a;
  u32 r = 0;
  for (int i = 0; i < 4; i++) r |= (u32)((x >> (8 * ((s >> (4 * i)) & 7))) & 255) << (8 * i);
  return r;
}
template <class T> inline T __ldg(const T* p) { return *p; }
template <class T> inline T __ldcg(const T* p) { return *p; }

#undef SHARED_BASE
#define SHARED_BASE 0
// A shared address is an offset; the rank of the CTA in bits 24 and up where a peer's memory is meant.
inline u8* own(u32 at) { return current->cta->shared + at; }
inline u8* peer(u32 at) { return current->cta->cluster->ctas[at >> 24]->shared + (at & 0xFFFFFF); }
inline u32 smem_u32(const void* p) { return (u32)((const u8*)p - current->cta->shared); }
inline u32 keep(u32 x) { return x; }
template <class T> inline T load(u32 at) {
  if (at % sizeof(T) || at + sizeof(T) > SHARED_BYTES) {
    std::fprintf(stderr, "hopper_cpu: %zu bytes at shared address %u\n", sizeof(T), at);
    std::exit(4);
  }
  T r;
  std::memcpy(&r, own(at), sizeof(T));
  return r;
}
template <int OFFSET> inline int lds8(u32 at) { return load<u8>(at + OFFSET); }
template <int OFFSET> inline void lds64(u32 at, u32* r) { uint2 x = load<uint2>(at + OFFSET); std::memcpy(r, &x, 8); }
template <int OFFSET> inline void lds128(u32 at, u32* r) { uint4 x = load<uint4>(at + OFFSET); std::memcpy(r, &x, 16); }

template <int OFFSET> inline void stmatrix4(u32 at, const u32 (&r)[4]) {
  auto all = exchange(r, 4);
  u32 out[4]; // row l % 8 of matrix l / 8
  for (int i = 0; i < 4; i++) out[i] = all[lane() % 8 * 4 + i][lane() / 8];
  load<uint4>(at + OFFSET);
  std::memcpy(own(at + OFFSET), out, 16);
}
inline void stmatrix4_trans(u32 at, const u32 (&r)[4]) {
  auto all = exchange(r, 4);
  u32 out[4]; // row l % 8 of matrix l / 8: its column l % 8
  for (int i = 0; i < 8; i++) {
    const u32 x = all[i * 4 + lane() % 8 / 2][lane() / 8] >> (16 * (lane() % 2));
    ((u16*)out)[i] = (u16)x;
  }
  load<uint4>(at);
  std::memcpy(own(at), out, 16);
}

inline float exp2_approx(float x) { return std::exp2(x); }
inline float reciprocal_approx(float x) { return 1.0f / x; }
inline u32 pack_bf16(float lo, float hi) { return to_bf16(hi) << 16 | to_bf16(lo); }
inline u32 mul_bf16x2(u32 a, u32 b) {
  return pack_bf16(from_bf16(a & 0xFFFF) * from_bf16(b & 0xFFFF), from_bf16(a >> 16) * from_bf16(b >> 16));
}

// An mbarrier here: pending bytes in the low word, completed phases in the high one. Copies are done when issued.
inline void mbarrier_init(u32 bar, u32) { std::memset(own(bar), 0, 8); }
inline void mbarrier_expect(u32 bar, u32 bytes) { *(u32*)own(bar) += bytes; }
inline void mbarrier_wait(u32 bar, u32 parity) {
  while ((((u32*)own(bar))[1] & 1) == parity) yield_fiber();
}
struct Range { const u8 *begin, *end; };
inline std::vector<Range> inputs; // with what a copy that is cut at 16 bytes may take beside them
inline void check_source(const u8* src, u32 bytes) {
  const bool inside = std::any_of(inputs.begin(), inputs.end(),
                                  [&](Range r) { return src >= r.begin && src + bytes <= r.end; });
  if (inside && bytes % 16 == 0 && (u64)src % 16 == 0) return;
  std::fprintf(stderr, "hopper_cpu: bulk copy of %u bytes from ..%llu, inside the inputs: %d\n", bytes, (u64)src % 16, inside);
  std::exit(5);
}
inline void bulk_prefetch(const u8* src, u32 bytes) { check_source(src, bytes); }
inline void bulk_load(u32 dst, const u8* src, u32 bytes, u32 bar) {
  check_source(src, bytes);
  if (dst % 16 || dst + bytes > SHARED_BYTES) {
    std::fprintf(stderr, "hopper_cpu: bulk copy of %u bytes to %u\n", bytes, dst);
    std::exit(5);
  }
  std::memcpy(own(dst), src, bytes);
  u32* state = (u32*)own(bar);
  state[0] -= bytes;
  if (!state[0]) state[1]++;
}
// The four warps of a group hold their rows of A and D themselves; B, and a transposed A, lie in shared memory, which is read
// when the product is waited for: as late as the GPU may, so that missing waits and barriers show.
inline u32 swizzled_operand(u32 address) { return address >> 4; }
inline float swizzled(u32 operand, u32 row, u32 col) { // element [row][col] of 128-byte rows
  u32 at = (operand << 4) + row / 8 * 1024 + row % 8 * 128 + 2 * col;
  at ^= ((at >> 7) & 7) << 4;
  if (at + 2 > SHARED_BYTES) std::exit(4);
  u16 x;
  std::memcpy(&x, own(at), 2);
  return from_bf16(x);
}
inline void run_product(const Product& p) {
  for (int i = 0; i < 8; i++) {
    const int half = (i >> 1) & 1, col = 2 * (lane() % 4) + (i & 1) + 8 * (i >> 2);
    const int row = current->thread % 128 / 32 * 16 + lane() / 4 + 8 * half;
    float sum = p.add ? p.d[i] : 0.0f;
    for (int k = 0; k < 16; k++) {
      const float x = p.registers ? from_bf16((p.rows[half][k / 2] >> (16 * (k % 2))) & 0xFFFF) : swizzled(p.a, k, row);
      sum += x * swizzled(p.b, col, k);
    }
    p.d[i] = sum;
  }
}
inline void wgmma_registers(float (&d)[8], u32 a0, u32 a1, u32 a2, u32 a3, u32 b, bool add) {
  const u32 words[4] = {a0, a1, a2, a3};
  auto all = exchange(words, 4);
  Product p{d, add, true, 0, b, {}};
  for (int k = 0; k < 8; k++) {
    for (int half = 0; half < 2; half++) p.rows[half][k] = all[lane() / 4 * 4 + k % 4][half + 2 * (k / 4)];
  }
  current->open.push_back(p);
}
inline void wgmma_transposed(float (&d)[8], u32 a, u32 b) { current->open.push_back({d, true, false, a, b, {}}); }
inline void wgmma_fence() {}
inline void wgmma_commit() {
  current->committed.push_back(std::move(current->open));
  current->open.clear();
}
template <int LEFT> inline void wgmma_wait() {
  while (current->committed.size() > LEFT) {
    for (const Product& p : current->committed.front()) run_product(p);
    current->committed.erase(current->committed.begin());
  }
}
inline bool elect_one() { return lane() == 0; }
inline u32 cluster_rank() { return current->cta->rank; }
inline u32 cluster_size() { return current->cta->cluster->ctas.size(); }
inline void cluster_arrive_relaxed() { current->cluster_round = arrive(current->cta->cluster->barrier); }
inline void cluster_wait() { wait(current->cta->cluster->barrier, current->cluster_round); }
inline void cluster_sync() { cluster_arrive_relaxed(); cluster_wait(); }
inline u32 peer_address(const void* p, u32 rank) { return rank << 24 | smem_u32(p); }
inline float peer_float(u32 address) { return *(float*)peer(address); }
inline float4 peer_float4(u32 address) { return *(float4*)peer(address); }
inline void fence_mbarrier_init() {}
inline void fence_before_bulk() {}
inline u32 arrive_counter(u32* counter, u32 last) {
  const u32 old = *counter;
  *counter = old >= last ? 0 : old + 1;
  return old;
}
#define SHARED_MEMORY(name) u8* name = current->cta->shared
