// The PTX instructions that hopper.cu uses, one function each; it holds no inline assembly itself, so that the tests can
// run it on a CPU over another implementation of this file.
#pragma once

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

__device__ __forceinline__ u32 smem_u32(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// A value that the compiler cannot compute again, so that it keeps it in a register.
__device__ __forceinline__ u32 keep(u32 x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Shared memory by 32-bit address: the compiler then neither rebuilds generic addresses nor reloads the window's base.
template <int OFFSET> __device__ __forceinline__ int lds8(u32 at) {
  int r;
  asm volatile("ld.shared.u8 %0, [%1+%2];" : "=r"(r) : "r"(at), "n"(OFFSET) : "memory");
  return r;
}

template <int OFFSET> __device__ __forceinline__ void lds64(u32 at, u32* r) {
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2+%3];" : "=r"(r[0]), "=r"(r[1]) : "r"(at), "n"(OFFSET) : "memory");
}

template <int OFFSET> __device__ __forceinline__ void lds128(u32 at, u32* r) {
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4+%5];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(at), "n"(OFFSET)
               : "memory");
}

// Four 8 x 8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
template <int OFFSET> __device__ __forceinline__ void stmatrix4(u32 at, const u32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0+%1], {%2,%3,%4,%5};" ::"r"(at), "n"(OFFSET), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

__device__ __forceinline__ void stmatrix4_trans(u32 at, const u32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Within one unit in the last place.
__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ u32 pack_bf16(float lo, float hi) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}

__device__ __forceinline__ u32 mul_bf16x2(u32 a, u32 b) {
  u32 r;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

// Warpgroup products, m64n16k16 of bf16 into float32. Operands in shared memory are 128-byte rows whose 16-byte segments
// are swizzled by the row's index modulo 8; groups of eight rows lie 1,024 bytes apart. The low half of an operand's descriptor
// is its address in units of 16 bytes; the high half says the above.
#define SWIZZLED 0x40000040u
__device__ __forceinline__ u32 swizzled_operand(u32 address) { return ((address & 0x3FFFF) >> 4) | (1u << 16); }

// d [64 x 16] = A [64 x 16, registers as in mma] B, or added to d. B is [16 columns][k].
__device__ __forceinline__ void wgmma_registers(float (&d)[8], u32 a0, u32 a1, u32 a2, u32 a3, u32 b, bool add) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %14, 0;\nmov.b64 b, {%12, %13};\n"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9,%10,%11}, b, p, 1, 1, 0;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b), "r"(SWIZZLED), "r"((int)add));
}

// d [64 x 16] += A B with A stored as [k][64 rows] and B as [16 columns][k].
__device__ __forceinline__ void wgmma_transposed(float (&d)[8], u32 a, u32 b) {
  asm volatile(
      "{\n.reg .b64 a, b;\nmov.b64 a, {%8, %10};\nmov.b64 b, {%9, %10};\n"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7}, a, b, 1, 1, 1, 1, 0;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
      : "r"(a), "r"(b), "r"(SWIZZLED));
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// A barrier of the CTA that tells every thread whether any came with `x`.
__device__ __forceinline__ bool barrier_any(bool x) { return __syncthreads_or(x); }

__device__ __forceinline__ void mbarrier_init(u32 bar, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}

__device__ __forceinline__ void mbarrier_wait(u32 bar, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(bar), "r"(parity) : "memory");
}

__device__ __forceinline__ void mbarrier_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}

__device__ __forceinline__ void bulk_load(u32 dst, const u8* src, u32 bytes, u32 bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst),
      "l"(src), "r"(bytes), "r"(bar)
      : "memory");
}

// Into L2. 16-byte addresses and sizes.
__device__ __forceinline__ void bulk_prefetch(const u8* src, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(src), "r"(bytes) : "memory");
}

__device__ __forceinline__ bool elect_one() {
  u32 chosen;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xFFFFFFFF;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(chosen));
  return chosen;
}

__device__ __forceinline__ u32 cluster_rank() {
  u32 r;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}

__device__ __forceinline__ u32 cluster_size() {
  u32 r;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(r));
  return r;
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Orders nothing but the CTAs themselves: no memory fence.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

__device__ __forceinline__ u32 peer_address(const void* p, u32 rank) {
  u32 a;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(a) : "r"(smem_u32(p)), "r"(rank));
  return a;
}

__device__ __forceinline__ float peer_float(u32 address) {
  float v;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ float4 peer_float4(u32 address) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// Makes initialised mbarriers known to the cluster and to the copy engine.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Ordinary writes to shared memory before it, bulk copies after it.
__device__ __forceinline__ void fence_before_bulk() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Counts 0, 1, .., last, 0, ..; releases what the CTA wrote before, acquires what earlier arrivals released.
__device__ __forceinline__ u32 arrive_counter(u32* counter, u32 last) {
  u32 old;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(old) : "l"(counter), "r"(last) : "memory");
  return old;
}

#define SHARED_MEMORY(name) extern __shared__ __align__(1024) u8 name[]
