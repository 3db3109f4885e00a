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
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define __device__
#define __global__
#define __forceinline__ inline
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
struct Fiber {
  ucontext_t context;
  std::vector<u8> stack;
  Cta* cta;
  u32 thread;
  u64 cluster_round;
  bool done = false;
};
inline Fiber* current;
inline ucontext_t scheduler;
inline u32 grid_size;
inline u64 idle_turns;

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
inline u32 __byte_perm(u32 a, u32 b, u32 s) {
  const u64 x = (u64)b << 32 | a;
  u32 r = 0;
  for (int i = 0; i < 4; i++) r |= (u32)((x >> (8 * ((s >> (4 * i)) & 7))) & 255) << (8 * i);
  return r;
}
template <class T> inline T __ldg(const T* p) { return *p; }
template <class T> inline T __ldcg(const T* p) { return *p; }

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
template <int OFFSET> inline u32 lds32(u32 at) { return load<u32>(at + OFFSET); }
template <int OFFSET> inline int lds8(u32 at) { return load<u8>(at + OFFSET); }
template <int OFFSET> inline void lds64(u32 at, u32* r) { uint2 x = load<uint2>(at + OFFSET); std::memcpy(r, &x, 8); }
template <int OFFSET> inline float2 lds_float2(u32 at) { return load<float2>(at + OFFSET); }
template <int OFFSET> inline void lds128(u32 at, u32* r) { uint4 x = load<uint4>(at + OFFSET); std::memcpy(r, &x, 16); }
template <int OFFSET> inline void sts32(u32 at, u32 x) { load<u32>(at + OFFSET); std::memcpy(own(at + OFFSET), &x, 4); }
template <int OFFSET> inline void sts_float2(u32 at, float x, float y) {
  load<float2>(at + OFFSET);
  float2 v = {x, y};
  std::memcpy(own(at + OFFSET), &v, 8);
}
template <int OFFSET> inline void ldmatrix4(u32 at, u32 (&r)[4]) {
  u32 address = at + OFFSET;
  auto all = exchange(&address, 1);
  for (int m = 0; m < 4; m++) r[m] = load<u32>(all[8 * m + lane() / 4][0] + 4 * (lane() % 4));
}

inline float exp2_approx(float x) { return std::exp2(x); }
inline u32 pack_bf16(float lo, float hi) { return to_bf16(hi) << 16 | to_bf16(lo); }
inline u32 mul_bf16x2(u32 a, u32 b) {
  return pack_bf16(from_bf16(a & 0xFFFF) * from_bf16(b & 0xFFFF), from_bf16(a >> 16) * from_bf16(b >> 16));
}
inline void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  const u32 words[6] = {a[0], a[1], a[2], a[3], b0, b1};
  auto all = exchange(words, 6);
  const int n = lane() / 4, c = lane() % 4;
  for (int i = 0; i < 4; i++) {
    const int row = n + 8 * (i / 2), col = 2 * c + i % 2;
    float sum = d[i];
    for (int k = 0; k < 16; k++) {
      const u32 x = all[(row % 8) * 4 + (k % 8) / 2][row / 8 + 2 * (k / 8)] >> (16 * (k % 2));
      const u32 y = all[col * 4 + (k % 8) / 2][4 + k / 8] >> (16 * (k % 2));
      sum += from_bf16(x & 0xFFFF) * from_bf16(y & 0xFFFF);
    }
    d[i] = sum;
  }
}
inline u32 transpose8x8(u32 a) {
  auto all = exchange(&a, 1);
  const int n = lane() / 4, c = lane() % 4;
  auto at = [&](int row, int col) { return (all[row * 4 + col / 2][0] >> (16 * (col % 2))) & 0xFFFF; };
  return at(2 * c, n) | at(2 * c + 1, n) << 16;
}

// An mbarrier here: pending bytes in the low word, completed phases in the high one. Copies are done when issued.
inline void mbarrier_init(u32 bar, u32) { std::memset(own(bar), 0, 8); }
inline void mbarrier_expect(u32 bar, u32 bytes) { *(u32*)own(bar) += bytes; }
inline void mbarrier_wait(u32 bar, u32 parity) {
  while ((((u32*)own(bar))[1] & 1) == parity) yield_fiber();
}
inline void bulk_load(u32 dst, const u8* src, u32 bytes, u32 bar) {
  if (dst % 16 || bytes % 16 || (u64)src % 16 || dst + bytes > SHARED_BYTES) {
    std::fprintf(stderr, "hopper_cpu: bulk copy of %u bytes from ..%llu to %u\n", bytes, (u64)src % 16, dst);
    std::exit(5);
  }
  std::memcpy(own(dst), src, bytes);
  u32* state = (u32*)own(bar);
  state[0] -= bytes;
  if (!state[0]) state[1]++;
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
