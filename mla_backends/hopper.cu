// MLA decode over an MXFP4 cache for Hopper (sm_90): one query token, 16 heads, 576 dims of K, 512 of V.
//
//   packed cache --bulk copy--> ring in shared memory --ld 16 bytes (one scale block) a lane-->
//   nibbles -> bf16 registers K^T [dims x 8 tokens]  --mma--> partial scores (this warp's 128 dims)
//        |                                                     | summed over the warps in shared memory
//        +--movmatrix--> V [16 tokens x dims] --mma--> acc     +--> weights P --ldmatrix--> A operand of the second mma
//
// Warp w owns latent dims 128 w .. 128 w + 127 of every token, for K and for V: nothing is dequantised twice.
// Heads are the rows (M = 16) of both products. Inside a warp lane = 4 n + c: token slot n, scale block 4 w + c.
// Compiled at run time; the host defines CTAS_PER_SM and STAGES.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#ifndef CTAS_PER_SM
#define CTAS_PER_SM 3
#endif
#ifndef STAGES
#define STAGES 2
#endif

constexpr int HEADS = 16;
constexpr int LATENT = 512;
constexpr int QK_DIM = 576;
constexpr int TOKEN_BYTES = 288;
constexpr int ROPE_BYTE = 256;   // offset of the RoPE codes in a token's 288 bytes
constexpr int ROPE_BLOCK = 16;   // first scale block of RoPE
constexpr int WARPS = 4;
constexpr int THREADS = 32 * WARPS;
constexpr int STEP = 16;         // tokens of one pass through both products
constexpr int STAGE_TOKENS = 64; // tokens of one bulk copy
constexpr float NO_MAX = -3.402823466e38f;
// Weights may grow to 2^12 above the running maximum before it moves: bf16 and float32 have the range, so
// precision is untouched, and in practice the maximum is settled after the first step.
constexpr float WEIGHT_LIMIT = 4096.0f;

struct __align__(128) Shared {
  union {
    u8 packed[STAGES][STAGE_TOKENS * TOKEN_BYTES];
    float4 acc[16][THREADS]; // this CTA's accumulators while its cluster merges
  };
  float2 partial[WARPS][4][32]; // [source warp][fragment 2 group + row half][lane]
  u32 weights[4][32];           // P as the four registers of an A operand
  uint4 q_rope[2][THREADS];     // [row half][thread]: Q operands of this thread's RoPE word
  float tile_max[2][HEADS];
  float tile_sum[2][HEADS];
  float running_max[HEADS];
  float sum[HEADS];
  float part_scale[HEADS];
  u32 last;
  u64 full[STAGES];
};

struct Args {
  const u8* q;           // bf16 [batch, 16, 576]
  const u8* kv;          // [tokens, 288]
  const u8* scale;       // [tokens, 18], any strides
  const int* kv_indptr;  // [batch + 1]
  u8* out;               // bf16 [batch, 16, 512]
  float4* parts;         // [2 clusters, 16, 128]: unnormalised sums of clusters that share a sequence
  float* part_stats;     // [2 clusters, 2, 16]: maximum (log2), sum of weights
  u32* arrivals;         // [batch, 16], zero between launches
  int scale_row_stride; // the whole scale tensor spans less than 2 GiB
  int scale_col_stride;
  float log2_scale; // sm_scale * log2(e)
  int batch;
};

__device__ __forceinline__ u32 smem_u32(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
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

__device__ __forceinline__ void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u32 transpose8x8(u32 a) {
  u32 d;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
  return d;
}

// Eight e2m1 codes -> four bf16 pairs (n_i, n_{i+4}). A code `s eem` moved to bits 15 and 8..6 of a bf16 is its value
// times 2^-126 (a subnormal where e = 0), so one exact multiply by 2^126 times the scale finishes it.
__device__ __forceinline__ void dequant_word(u32 word, u32 factor, u32* r) {
  u32 high = word >> 8;
  r[0] = mul_bf16x2(((word & 0x000F000Fu) * 0x1040u) & 0x81C081C0u, factor);
  r[1] = mul_bf16x2(((word & 0x00F000F0u) * 0x0104u) & 0x81C081C0u, factor);
  r[2] = mul_bf16x2(((high & 0x000F000Fu) * 0x1040u) & 0x81C081C0u, factor);
  r[3] = mul_bf16x2(((high & 0x00F000F0u) * 0x0104u) & 0x81C081C0u, factor);
}

// Scale byte b -> bf16 2^(b - 1), twice: the 2^126 above included. Right for b <= 128; NO_TOKEN gives zero.
constexpr int NO_TOKEN = -126;
__device__ __forceinline__ u32 scale_factor(int b) { return (u32)(b + 126) * 0x00800080u; }

// What is left of bytes 129..255 after `min(b, 128)`: 2^(b - 128); NaN for 255.
__device__ __forceinline__ u32 wide_factor(int b) {
  u32 f = b <= 128 ? 0x3F80u : (b == 255 ? 0x7FC0u : (u32)(b - 1) << 7);
  return f * 0x00010001u;
}

__device__ __forceinline__ void mbarrier_init(u64* bar, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_u32(bar)), "r"(count) : "memory");
}

__device__ __forceinline__ void mbarrier_wait(u64* bar, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(smem_u32(bar)), "r"(parity) : "memory");
}

__device__ __forceinline__ void bulk_load(void* dst, const u8* src, u32 bytes, u64* bar) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_u32(bar)), "r"(bytes) : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(smem_u32(dst)),
      "l"(src), "r"(bytes), "r"(smem_u32(bar))
      : "memory");
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

// Token of slot n inside its group of 8. With this order the eight lanes of a shared-memory phase read two tokens
// whose 288-byte rows are 16 banks apart, so 16-byte loads do not conflict.
__device__ __forceinline__ int slot_token(int n) { return (n & 4) | ((n & 1) << 1) | ((n >> 1) & 1); }

struct ScaleBytes {
  int group[2];
  int rope;
};

// State of one thread for one segment: everything that lives in registers across steps.
struct Thread {
  int lane, warp, n, c;
  u32 q_lo[16], q_hi[16]; // Q of heads n and n + 8, scale block 4 warp + c, as pairs (i, i + 4) of each word
  float acc[16][4];
  float max; // running maximum (log2) of head n + 8 (warp & 1)
  float sum; // weights seen so far of that head, this thread's tokens
};

__device__ __forceinline__ void load_q(Shared& sh, Thread& t, const u8* q) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const u8* row = q + (t.n + 8 * half) * (QK_DIM * 2);
    const uint4* latent = (const uint4*)(row + (128 * t.warp + 32 * t.c) * 2);
    u32* dst = half ? t.q_hi : t.q_lo;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      uint4 x = __ldg(latent + j);
      dst[4 * j + 0] = __byte_perm(x.x, x.z, 0x5410);
      dst[4 * j + 1] = __byte_perm(x.x, x.z, 0x7632);
      dst[4 * j + 2] = __byte_perm(x.y, x.w, 0x5410);
      dst[4 * j + 3] = __byte_perm(x.y, x.w, 0x7632);
    }
    uint4 x = __ldg((const uint4*)(row + (LATENT + 16 * t.c + 8 * (t.warp & 1)) * 2));
    sh.q_rope[half][threadIdx.x] = {__byte_perm(x.x, x.z, 0x5410), __byte_perm(x.x, x.z, 0x7632),
                                    __byte_perm(x.y, x.w, 0x5410), __byte_perm(x.y, x.w, 0x7632)};
  }
}

// Dequantises this warp's dims of 16 tokens, adds up partial scores, leaves V's B operands in v. Index 0 is the group
// of 8 tokens whose RoPE scores this warp adds: warps 2 and 3 take the groups in reverse.
template <bool WIDE>
__device__ __forceinline__ void score_step(const Shared& sh, const Thread& t, const uint4 (&x)[2], u32 rope_word, const ScaleBytes& b,
                                           u32 (&v)[2][16], float (&s)[2][4]) {
  u32 factor[2], extra[2];
#pragma unroll
  for (int g = 0; g < 2; g++) {
    factor[g] = scale_factor(WIDE ? min(b.group[g], 128) : b.group[g]);
    extra[g] = WIDE ? wide_factor(b.group[g]) : 0;
#pragma unroll
    for (int i = 0; i < 4; i++) s[g][i] = 0.0f;
  }
#pragma unroll
  for (int j = 0; j < 4; j++) {
#pragma unroll
    for (int g = 0; g < 2; g++) {
      u32 k[4];
      u32 word = j == 0 ? x[g].x : j == 1 ? x[g].y : j == 2 ? x[g].z : x[g].w;
      dequant_word(word, factor[g], k);
      if (WIDE) {
#pragma unroll
        for (int i = 0; i < 4; i++) k[i] = mul_bf16x2(k[i], extra[g]);
      }
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        int r = 4 * j + i;
        mma(s[g], t.q_lo[r], t.q_hi[r], t.q_lo[r + 1], t.q_hi[r + 1], k[i], k[i + 1]);
        v[g][r] = transpose8x8(k[i]);
        v[g][r + 1] = transpose8x8(k[i + 1]);
      }
    }
  }
  u32 k[4];
  dequant_word(rope_word, scale_factor(WIDE ? min(b.rope, 128) : b.rope), k);
  if (WIDE) {
#pragma unroll
    for (int i = 0; i < 4; i++) k[i] = mul_bf16x2(k[i], wide_factor(b.rope));
  }
  uint4 lo = sh.q_rope[0][threadIdx.x], hi = sh.q_rope[1][threadIdx.x];
  mma(s[0], lo.x, hi.x, lo.y, hi.y, k[0], k[1]);
  mma(s[0], lo.z, hi.z, lo.w, hi.w, k[2], k[3]);
}

// Scores of this thread's head and two tokens: the sum over the four warps' dims, in q.k.
__device__ __forceinline__ float2 gather_scores(const Shared& sh, const Thread& t, int left) {
  const float2* source = &sh.partial[0][t.warp][t.lane];
  float2 s = source[0];
#pragma unroll
  for (int w = 1; w < WARPS; w++) {
    float2 p = source[w * 128];
    s.x += p.x;
    s.y += p.y;
  }
  if (left < STEP) {
    asm volatile(""); // a branch, not selects: only the last step of a segment pays
    int first = 8 * (t.warp >> 1);
    if (first + slot_token(2 * t.c) >= left) s.x = -__int_as_float(0x7F800000);
    if (first + slot_token(2 * t.c + 1) >= left) s.y = -__int_as_float(0x7F800000);
  }
  return s;
}

// Moves the running maximum to this step's and rescales what was summed so far. All threads of the CTA.

__device__ __forceinline__ float2 raise_max(Shared& sh, Thread& t, float log2_scale, int left) {
  float2 s = gather_scores(sh, t, left);
  s.x *= log2_scale;
  s.y *= log2_scale;
  float top = fmaxf(s.x, s.y);
  top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, 1));
  top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, 2));
  int head = t.n + 8 * (t.warp & 1);
  if (t.c == 0) sh.tile_max[t.warp >> 1][head] = top;
  __syncthreads();
  float old_lo = sh.running_max[t.n], old_hi = sh.running_max[t.n + 8];
  float new_lo = fmaxf(old_lo, fmaxf(sh.tile_max[0][t.n], sh.tile_max[1][t.n]));
  float new_hi = fmaxf(old_hi, fmaxf(sh.tile_max[0][t.n + 8], sh.tile_max[1][t.n + 8]));
  __syncthreads();
  if (t.c == 0 && t.warp < 2) sh.running_max[head] = (t.warp & 1) ? new_hi : new_lo;
  float shrink_lo = exp2_approx(old_lo - new_lo), shrink_hi = exp2_approx(old_hi - new_hi);
#pragma unroll
  for (int r = 0; r < 16; r++) {
    t.acc[r][0] *= shrink_lo;
    t.acc[r][1] *= shrink_lo;
    t.acc[r][2] *= shrink_hi;
    t.acc[r][3] *= shrink_hi;
  }
  t.sum *= (t.warp & 1) ? shrink_hi : shrink_lo;
  t.max = (t.warp & 1) ? new_hi : new_lo;
  float2 p = {exp2_approx(s.x - t.max), exp2_approx(s.y - t.max)};
  sh.weights[t.warp][t.lane] = pack_bf16(p.x, p.y);
  __syncthreads();
  return p;
}

// Tokens [first, first + count) of one sequence: fills acc, max and sum.
__device__ __forceinline__ void attend(Shared& sh, Thread& t, const Args& a, i64 first, int count, u32& stage_count) {
  t.max = NO_MAX;
  t.sum = 0.0f;
#pragma unroll
  for (int r = 0; r < 16; r++) {
#pragma unroll
    for (int i = 0; i < 4; i++) t.acc[r][i] = 0.0f;
  }
  const u8* kv = a.kv + first * TOKEN_BYTES;
  const int num_stages = (count + STAGE_TOKENS - 1) / STAGE_TOKENS;
  auto issue = [&](int k) {
    int tokens = min(STAGE_TOKENS, count - k * STAGE_TOKENS);
    u32 slot = (stage_count + k) % STAGES;
    bulk_load(sh.packed[slot], kv + (i64)k * (STAGE_TOKENS * TOKEN_BYTES), tokens * TOKEN_BYTES, &sh.full[slot]);
  };
  if (threadIdx.x == 0) {
    for (int k = 0; k < min(STAGES - 1, num_stages); k++) issue(k);
  }
  // Group 0 is this warp's RoPE group (score_step); `other` leads from it to the other one, in tokens.
  const int token = slot_token(t.n) + 8 * (t.warp >> 1);
  const int other = t.warp < 2 ? 8 : -8;
  u32 scale = (u32)(first + token) * a.scale_row_stride + (4 * t.warp + t.c) * a.scale_col_stride;
  const int other_scale = other * a.scale_row_stride;
  const int rope_scale = (ROPE_BLOCK + (t.c >> 1) - 4 * t.warp - t.c) * a.scale_col_stride;
  auto load_scales = [&](ScaleBytes& b, int left) {
    if (left >= STEP) {
      b.group[0] = a.scale[scale];
      b.group[1] = a.scale[scale + other_scale];
      b.rope = a.scale[scale + rope_scale];
    } else {
      b.group[0] = token < left ? a.scale[scale] : NO_TOKEN;
      b.group[1] = token + other < left ? a.scale[scale + other_scale] : NO_TOKEN;
      b.rope = token < left ? a.scale[scale + rope_scale] : NO_TOKEN;
    }
    scale += STEP * a.scale_row_stride;
  };
  ScaleBytes bytes;
  load_scales(bytes, count);

  const u32 lane_offset = token * TOKEN_BYTES + 64 * t.warp + 16 * t.c;
  const u32 rope_offset = token * TOKEN_BYTES + ROPE_BYTE + 8 * t.c + 4 * (t.warp & 1);
  const u32 weights = smem_u32(&sh.weights[0][0]) + ((16 * t.lane) ^ (256 * (t.warp >> 1)));
  const u8* tile = nullptr;
  int left = count;
  for (int k = 0; k < num_stages; k++) {
    // The slot of stage k - 1 is free: all its loads came before the barriers of its last step.
    if (threadIdx.x == 0 && k + STAGES - 1 < num_stages) issue(k + STAGES - 1);
    const u32 turn = stage_count + k;
    mbarrier_wait(&sh.full[turn % STAGES], (turn / STAGES) & 1);
    tile = sh.packed[turn % STAGES];
    const int last = max(0, left - STAGE_TOKENS);
#pragma unroll 1
    for (; left > last; left -= STEP) {
      uint4 x[2];
      x[0] = *(const uint4*)(tile + lane_offset);
      x[1] = *(const uint4*)(tile + lane_offset + other * TOKEN_BYTES);
      u32 rope_word = *(const u32*)(tile + rope_offset);
      tile += STEP * TOKEN_BYTES;

      u32 v[2][16];
      float s[2][4];
      if (__any_sync(0xFFFFFFFFu, max(max(bytes.group[0], bytes.group[1]), bytes.rope) > 128))
        score_step<true>(sh, t, x, rope_word, bytes, v, s);
      else
        score_step<false>(sh, t, x, rope_word, bytes, v, s);
      if (left > STEP) load_scales(bytes, left - STEP);

      float2* partial = &sh.partial[t.warp][t.warp & 2][t.lane];
      float2* partial_other = &sh.partial[t.warp][(t.warp & 2) ^ 2][t.lane];
      partial[0] = {s[0][0], s[0][1]};
      partial[32] = {s[0][2], s[0][3]};
      partial_other[0] = {s[1][0], s[1][1]};
      partial_other[32] = {s[1][2], s[1][3]};
      __syncthreads();
      float2 e = gather_scores(sh, t, left);
      float2 p = {exp2_approx(fmaf(e.x, a.log2_scale, -t.max)), exp2_approx(fmaf(e.y, a.log2_scale, -t.max))};
      sh.weights[t.warp][t.lane] = pack_bf16(p.x, p.y);
      if (__syncthreads_or(p.x + p.y > WEIGHT_LIMIT)) p = raise_max(sh, t, a.log2_scale, left);
      t.sum += p.x + p.y;

      u32 w[4];
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                   : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                   : "r"(weights)
                   : "memory");
#pragma unroll
      for (int r = 0; r < 16; r++) mma(t.acc[r], w[0], w[1], w[2], w[3], v[0][r], v[1][r]);
    }
  }
  stage_count += num_stages;
}

// Element k = 8 half + 2 word + odd of a thread: four consecutive dims of head n + 8 half.
__device__ __forceinline__ float4 acc_quad(const Thread& t, int k) {
  int half = k >> 3, j = (k >> 1) & 3, e = k & 1;
  return {t.acc[4 * j][2 * half + e], t.acc[4 * j + 1][2 * half + e], t.acc[4 * j + 2][2 * half + e],
          t.acc[4 * j + 3][2 * half + e]};
}

__device__ __forceinline__ void store_out(const Thread& t, u8* out_row, int k, float4 a, float4 b, float inv) {
  int head = t.n + 8 * (k >> 3);
  int dim = 128 * t.warp + 32 * t.c + 8 * ((k >> 1) & 3);
  uint4 r = {pack_bf16(a.x * inv, a.y * inv), pack_bf16(a.z * inv, a.w * inv), pack_bf16(b.x * inv, b.y * inv),
             pack_bf16(b.z * inv, b.w * inv)};
  *(uint4*)(out_row + (head * LATENT + dim) * 2) = r;
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM) mla_decode_mxfp4(const __grid_constant__ Args a) {
  __shared__ Shared sh;
  Thread t;
  t.lane = threadIdx.x & 31;
  t.warp = threadIdx.x >> 5;
  t.n = t.lane >> 2;
  t.c = t.lane & 3;
  const u32 rank = cluster_rank(), size = cluster_size();
  const u32 cluster = blockIdx.x / size, clusters = gridDim.x / size;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) mbarrier_init(&sh.full[i], 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }

  // Empty sequences belong to no cluster's share.
  for (int b = blockIdx.x; b < a.batch; b += gridDim.x) {
    if (a.kv_indptr[b + 1] <= a.kv_indptr[b]) {
      for (int i = threadIdx.x; i < HEADS * LATENT / 8; i += THREADS)
        *(uint4*)(a.out + ((i64)b * HEADS * LATENT + 8 * i) * 2) = {0, 0, 0, 0};
    }
  }

  // Clusters take equal shares of all tokens, cut at multiples of `grain` tokens, crossing sequences.
  const int base = a.kv_indptr[0], total = a.kv_indptr[a.batch] - base;
  const u32 grain = STEP * size;
  const u32 units = (total + grain - 1) / grain;
  const u32 share = units / clusters, longer = units - share * clusters; // the first `longer` clusters take one more
  auto share_begin = [&](u32 i) { return (int)min((u32)total, (i * share + min(i, longer)) * grain); };
  auto owner = [&](u32 token) {
    u32 unit = token / grain;
    return unit < longer * (share + 1) ? unit / (share + 1) : longer + (unit - longer * (share + 1)) / share;
  };
  int pos = share_begin(cluster);
  const int stop = share_begin(cluster + 1);
  __syncthreads();
  if (pos >= stop) return; // the whole cluster leaves

  // The last sequence that begins at or before pos.
  int b = 0;
  for (int span = a.batch; span > 1;) {
    int stride = (span + 31) / 32;
    int i = t.lane * stride;
    bool before = i < span && a.kv_indptr[b + i] - base <= pos;
    int found = __popc(__ballot_sync(0xFFFFFFFFu, before)) - 1;
    b += found * stride;
    span = min(stride, span - found * stride);
  }

  u32 stage_count = 0;
  while (true) {
    const int begin = a.kv_indptr[b] - base, end = a.kv_indptr[b + 1] - base;
    const int seg_end = min(stop, end);
    // This CTA's part of the cluster's segment.
    const int per_cta = ((seg_end - pos + grain - 1) / grain) * STEP;
    const int first = min(seg_end, pos + (int)rank * per_cta);
    const int count = min(seg_end - first, per_cta);
    load_q(sh, t, a.q + (i64)b * (HEADS * QK_DIM * 2));
    if (threadIdx.x < HEADS) sh.running_max[threadIdx.x] = NO_MAX;
    __syncthreads();
    attend(sh, t, a, (i64)base + first, count, stage_count);

    // Sums of weights: over the quad, then over the two warps that share this head.
    t.sum += __shfl_xor_sync(0xFFFFFFFFu, t.sum, 1);
    t.sum += __shfl_xor_sync(0xFFFFFFFFu, t.sum, 2);
    __syncthreads(); // the ring is read no more: acc may take its place
    if (t.c == 0) sh.tile_sum[t.warp >> 1][t.n + 8 * (t.warp & 1)] = t.sum;
    if (size > 1) {
#pragma unroll
      for (int k = 0; k < 16; k++) sh.acc[k][threadIdx.x] = acc_quad(t, k);
    }
    __syncthreads();
    if (threadIdx.x < HEADS) sh.sum[threadIdx.x] = sh.tile_sum[0][threadIdx.x] + sh.tile_sum[1][threadIdx.x];
    if (size > 1) cluster_sync();
    else __syncthreads();

    // Maximum and sum of the cluster, in each thread for its two heads; the weight of each peer comes from them.
    const bool whole = begin >= share_begin(cluster) && end <= stop;
    float top[2], sum[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      top[h] = NO_MAX;
      sum[h] = 0.0f;
      for (u32 i = 0; i < size; i++) top[h] = fmaxf(top[h], peer_float(peer_address(&sh.running_max[t.n + 8 * h], i)));
      for (u32 i = 0; i < size; i++)
        sum[h] += exp2_approx(peer_float(peer_address(&sh.running_max[t.n + 8 * h], i)) - top[h]) *
                  peer_float(peer_address(&sh.sum[t.n + 8 * h], i));
    }
    u8* out_row = a.out + (i64)b * (HEADS * LATENT * 2);
    const u32 slot = 2 * cluster + (begin > share_begin(cluster) ? 1 : 0);
    float4* part = a.parts + (i64)slot * (16 * THREADS);
    auto merged_quad = [&](int k) {
      int h = k >> 3;
      float4 r = {0, 0, 0, 0};
      for (u32 i = 0; i < size; i++) {
        float w = exp2_approx(peer_float(peer_address(&sh.running_max[t.n + 8 * h], i)) - (h ? top[1] : top[0]));
        float4 x = peer_float4(peer_address(&sh.acc[k][threadIdx.x], i));
        r.x += w * x.x, r.y += w * x.y, r.z += w * x.z, r.w += w * x.w;
      }
      return r;
    };
    const int k_count = 16 / size, k_first = rank * k_count;
    if (size == 1) {
#pragma unroll
      for (int k = 0; k < 16; k += 2) {
        float4 lo = acc_quad(t, k), hi = acc_quad(t, k + 1);
        if (whole) {
          store_out(t, out_row, k, lo, hi, 1.0f / sum[k >> 3]);
        } else {
          part[k * THREADS + threadIdx.x] = lo;
          part[(k + 1) * THREADS + threadIdx.x] = hi;
        }
      }
    } else {
      for (int k = k_first; k < k_first + k_count; k += 2) {
        float4 lo = merged_quad(k), hi = merged_quad(k + 1);
        if (whole) {
          store_out(t, out_row, k, lo, hi, 1.0f / (k >> 3 ? sum[1] : sum[0]));
        } else {
          part[k * THREADS + threadIdx.x] = lo;
          part[(k + 1) * THREADS + threadIdx.x] = hi;
        }
      }
    }
    if (!whole) {
      // Parts of a sequence meet in memory: the last cluster to arrive merges, each of its CTAs its own quads.
      if (rank == 0 && t.warp == 0 && t.c == 0) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
          a.part_stats[slot * 32 + t.n + 8 * h] = top[h];
          a.part_stats[slot * 32 + 16 + t.n + 8 * h] = sum[h];
        }
        __threadfence();
      }
      // Every rank needs rank 0's statistics, so they count towards one number per sequence and rank.
      if (size > 1) cluster_sync();
      else __syncthreads();
      const u32 c0 = owner(begin), c1 = owner(end - 1);
      if (threadIdx.x == 0) {
        u32 old;
        asm volatile("fence.acq_rel.gpu;\natom.inc.relaxed.gpu.global.u32 %0, [%1], %2;\nfence.acq_rel.gpu;"
                     : "=r"(old)
                     : "l"(a.arrivals + (i64)b * 16 + rank), "r"(c1 - c0)
                     : "memory");
        sh.last = old == c1 - c0;
      }
      __syncthreads();
      if (sh.last) {
        auto part_slot = [&](u32 i) { return 2 * i + (begin > share_begin(i) ? 1 : 0); };
        float best[2], all[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
          best[h] = NO_MAX;
          all[h] = 0.0f;
          for (u32 i = c0; i <= c1; i++) best[h] = fmaxf(best[h], __ldcg(a.part_stats + part_slot(i) * 32 + t.n + 8 * h));
          for (u32 i = c0; i <= c1; i++) {
            const float* stats = a.part_stats + part_slot(i) * 32 + t.n + 8 * h;
            all[h] += exp2_approx(__ldcg(stats) - best[h]) * __ldcg(stats + 16);
          }
        }
        for (int k = k_first; k < k_first + k_count; k += 2) {
          float4 lo = {0, 0, 0, 0}, hi = {0, 0, 0, 0};
          int h = k >> 3;
          for (u32 i = c0; i <= c1; i++) {
            u32 s = part_slot(i);
            float w = exp2_approx(__ldcg(a.part_stats + s * 32 + t.n + 8 * h) - (h ? best[1] : best[0]));
            float4 x = __ldcg(a.parts + ((i64)s * 16 + k) * THREADS + threadIdx.x);
            float4 y = __ldcg(a.parts + ((i64)s * 16 + k + 1) * THREADS + threadIdx.x);
            lo.x += w * x.x, lo.y += w * x.y, lo.z += w * x.z, lo.w += w * x.w;
            hi.x += w * y.x, hi.y += w * y.y, hi.z += w * y.z, hi.w += w * y.w;
          }
          store_out(t, out_row, k, lo, hi, 1.0f / (h ? all[1] : all[0]));
        }
      }
    }
    pos = seg_end;
    if (size > 1) {
      // Peers may still read this CTA's accumulators; the ring that takes their place is written by bulk copies.
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      cluster_sync();
    }
    if (pos >= stop) return;
    do b++;
    while (a.kv_indptr[b + 1] - base <= pos);
    __syncthreads();
  }
}
