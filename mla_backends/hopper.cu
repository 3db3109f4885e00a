// MLA decode over an MXFP4 cache for Hopper (sm_90): one query token, 16 heads, 576 dims of K, 512 of V.
//
//   packed cache --bulk copy--> ring in shared memory --one scale block (or half of it) a lane-->
//   nibbles -> bf16 registers K^T [dims x 8 tokens]  --mma--> partial scores (this warp's dims)
//        |                                                     | summed over the warps in shared memory
//        +--movmatrix--> V [16 tokens x dims] --mma--> acc     +--> weights P --ldmatrix--> A operand of the second mma
//
// Warp w owns latent dims DIMS w .. DIMS w + DIMS - 1 of every token, for K and for V: nothing is dequantised twice.
// Heads are the rows (M = 16) of both products. In a warp lane = 4 n + c: token slot n of a group of 8, and the c-th
// quarter of the warp's dims. Compiled at run time; the host defines WARPS, CTAS_PER_SM, STAGES, SCALE_PITCH (bytes from
// one token's scales to the next) and SHARED_BYTES.

#include "ptx.cuh"

constexpr int HEADS = 16;
constexpr int LATENT = 512;
constexpr int QK_DIM = 576;
constexpr int TOKEN_BYTES = 288;
constexpr int ROPE_BYTE = 256;            // offset of the RoPE codes in a token's 288 bytes
constexpr int ROPE_BLOCK = 16;            // first scale block of RoPE
constexpr int THREADS = 32 * WARPS;
constexpr int GROUPS = WARPS / 2;         // groups of 8 tokens per step; two warps share the RoPE dims of one group
constexpr int STEP = 8 * GROUPS;          // tokens of one pass through both products, and of one stage of the ring
constexpr int DIMS = LATENT / WARPS;      // latent dims of a warp
constexpr int WORDS = DIMS / 32;          // 8-code words of a lane, per token
constexpr int TILES = DIMS / 8;           // n-tiles of the second product: accumulators are 16 heads x 8 dims
constexpr int QUADS = 4 * WORDS;          // float4 of accumulators per thread
constexpr int STAGE_BYTES = STEP * (TOKEN_BYTES + SCALE_PITCH) + 16; // packed codes, then scales cut at 16 bytes
constexpr int MAX_CLUSTER = 16;
constexpr float NO_MAX = -3.402823466e38f;
// Weights may grow to 2^12 above the running maximum before it moves: bf16 and float32 have the range, so
// precision is untouched, and in practice the maximum is settled after the first step.
constexpr float WEIGHT_LIMIT = 4096.0f;

static_assert(WARPS == 4 || WARPS == 8, "a lane holds a scale block or half of one");
static_assert(STEP % 16 == 0, "one k-step of the second product is 16 tokens; keeps copies of scales 16-byte aligned");

struct Shared {
  // Stores of 8 bytes a lane take a third pass where they begin between two lines of 128 bytes.
  union __align__(128) Tiles {
    u8 ring[STAGES][STAGE_BYTES];
    float4 acc[QUADS][THREADS]; // this CTA's accumulators, for the merge
  } tiles;
  // [fragment 2 group + row half][source][lane]: sources are the warps, then the two warps with the group's RoPE scores.
  float2 partial[2 * GROUPS][WARPS + 2][32];
  u32 weights[2 * GROUPS][32];           // P, fragments in the same order: registers of A operands
  uint4 q_rope[2][THREADS];              // [k-step][thread]: A operands of this thread's RoPE word
  float2 stats[MAX_CLUSTER][HEADS];      // maximum and sum of weights of each CTA of the cluster
  float tile_max[GROUPS][HEADS];
  float tile_sum[GROUPS][HEADS];
  float running_max[HEADS];
  float sum[HEADS];
  u64 full[STAGES];
  u32 over;        // set by a thread whose weights exceed WEIGHT_LIMIT
  u32 last;
};
// Offsets for the helpers that take addresses.
constexpr int PARTIAL = sizeof(Shared::Tiles);
constexpr int SOURCE = sizeof(float2) * 32;
constexpr int FRAGMENT = SOURCE * (WARPS + 2);
constexpr int WEIGHTS = PARTIAL + 2 * GROUPS * FRAGMENT;
constexpr int Q_ROPE = WEIGHTS + 2 * GROUPS * 128;
constexpr int STATS = Q_ROPE + 2 * 16 * THREADS;
constexpr int FULL = STATS + MAX_CLUSTER * HEADS * 8 + (2 * GROUPS + 2) * HEADS * 4;
constexpr int OVER = FULL + 8 * STAGES;
static_assert(sizeof(Shared) == SHARED_BYTES, "the host launches with another size");

struct Args {
  const u8* q;           // bf16 [batch, 16, 576]
  const u8* kv;          // [tokens, 288], 16-byte aligned
  const u8* scale;       // [tokens, 18], rows SCALE_PITCH bytes apart
  const int* kv_indptr;  // [batch + 1]
  u8* out;               // bf16 [batch, 16, 512]
  float4* parts;         // [2 clusters, QUADS, THREADS]: unnormalised sums of clusters that share a sequence
  float2* part_stats;    // [2 clusters, 16 ranks, 16]: maximum (log2), sum of weights
  u32* arrivals;         // [batch, 16 ranks], zero between launches
  float log2_scale; // sm_scale * log2(e)
  int batch;
};

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

// Token of slot n inside its group of 8. With this order the eight lanes of a shared-memory phase read two tokens
// whose 288-byte rows are 16 banks apart, so 16-byte loads do not conflict.
__device__ __forceinline__ int slot_token(int n) { return (n & 4) | ((n & 1) << 1) | ((n >> 1) & 1); }

// State of one thread for one segment: everything that lives in registers across steps.
struct Thread {
  int lane, warp, n, c;
  u32 shared; // address of Shared
  u32 store;  // address of this warp's partial scores in fragment 0
  u32 gather; // address of source 0 in the fragment that this warp sums
  u32 q[2 * WORDS][4]; // A operands of the first product: heads n and n + 8, this lane's dims
  float acc[TILES][4];
  float max; // running maximum (log2) of head n + 8 (warp & 1)
  float sum; // weights seen so far of that head, this thread's tokens
};

// Eight bf16 dims d0..d7 of two heads -> the A operands of two k-steps, in the pairs (d_i, d_{i+4}) of dequant_word.
__device__ __forceinline__ void pair_dims(uint4 lo, uint4 hi, u32 (&first)[4], u32 (&second)[4]) {
  first[0] = __byte_perm(lo.x, lo.z, 0x5410);
  first[1] = __byte_perm(hi.x, hi.z, 0x5410);
  first[2] = __byte_perm(lo.x, lo.z, 0x7632);
  first[3] = __byte_perm(hi.x, hi.z, 0x7632);
  second[0] = __byte_perm(lo.y, lo.w, 0x5410);
  second[1] = __byte_perm(hi.y, hi.w, 0x5410);
  second[2] = __byte_perm(lo.y, lo.w, 0x7632);
  second[3] = __byte_perm(hi.y, hi.w, 0x7632);
}

__device__ __forceinline__ void load_q(Shared& sh, Thread& t, const u8* q) {
  const u8* lo = q + t.n * (QK_DIM * 2);
  const u8* hi = lo + 8 * (QK_DIM * 2);
  const int latent = (DIMS * t.warp + DIMS / 4 * t.c) * 2;
#pragma unroll
  for (int j = 0; j < WORDS; j++) {
    pair_dims(__ldg((const uint4*)(lo + latent) + j), __ldg((const uint4*)(hi + latent) + j), t.q[2 * j],
              t.q[2 * j + 1]);
  }
  const int rope = (LATENT + 16 * t.c + 8 * (t.warp & 1)) * 2;
  u32 first[4], second[4];
  pair_dims(__ldg((const uint4*)(lo + rope)), __ldg((const uint4*)(hi + rope)), first, second);
  sh.q_rope[0][threadIdx.x] = {first[0], first[1], first[2], first[3]};
  sh.q_rope[1][threadIdx.x] = {second[0], second[1], second[2], second[3]};
}

struct Packed {
  u32 word[GROUPS][WORDS];
  u32 rope;
  int scale[GROUPS];
  int rope_scale;
};

template <int GROUP>
__device__ __forceinline__ void store_partial(u32 at, const float (&s)[4]) {
  sts_float2<2 * GROUP * FRAGMENT>(at, s[0], s[1]);
  sts_float2<(2 * GROUP + 1) * FRAGMENT>(at, s[2], s[3]);
}

// Dequantises this warp's dims of one step, hands out partial scores, leaves V's B operands in v. Warps 2 g and 2 g + 1
// compute the RoPE scores of group g, half of the dims each.
template <bool WIDE>
__device__ __forceinline__ void score_step(const Thread& t, const Packed& x, u32 (&v)[GROUPS][TILES]) {
  {
    u32 rope[4], first[4], second[4];
    dequant_word(x.rope, scale_factor(WIDE ? min(x.rope_scale, 128) : x.rope_scale), rope);
    if (WIDE) {
#pragma unroll
      for (int i = 0; i < 4; i++) rope[i] = mul_bf16x2(rope[i], wide_factor(x.rope_scale));
    }
    const u32 q_rope = t.shared + (512 * t.warp + 16 * t.lane);
    lds128<Q_ROPE>(q_rope, first);
    lds128<Q_ROPE + 16 * THREADS>(q_rope, second);
    float s[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    mma(s, first, rope[0], rope[1]);
    mma(s, second, rope[2], rope[3]);
    // Fragments 2 (warp / 2) and the next, source WARPS + (warp & 1).
    const u32 at = t.store + (2 * FRAGMENT * (t.warp >> 1) + SOURCE * (WARPS + (t.warp & 1) - t.warp));
    sts_float2<0>(at, s[0], s[1]);
    sts_float2<FRAGMENT>(at, s[2], s[3]);
  }
#pragma unroll
  for (int g = 0; g < GROUPS; g++) {
    const u32 factor = scale_factor(WIDE ? min(x.scale[g], 128) : x.scale[g]);
    const u32 extra = WIDE ? wide_factor(x.scale[g]) : 0;
    float s[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < WORDS; j++) {
      u32 r[4];
      dequant_word(x.word[g][j], factor, r);
      if (WIDE) {
#pragma unroll
        for (int i = 0; i < 4; i++) r[i] = mul_bf16x2(r[i], extra);
      }
      mma(s, t.q[2 * j], r[0], r[1]);
      mma(s, t.q[2 * j + 1], r[2], r[3]);
#pragma unroll
      for (int i = 0; i < 4; i++) v[g][4 * j + i] = transpose8x8(r[i]);
    }
    if (g == 0) store_partial<0>(t.store, s);
    if (g == 1) store_partial<1>(t.store, s);
    if (g == 2) store_partial<2>(t.store, s);
    if (g == 3) store_partial<3>(t.store, s);
  }
}

// Scores of this thread's head and two tokens: the sum over all warps' dims, in q.k. With TAIL only the first `left`
// tokens of the step exist.
template <bool TAIL>
__device__ __forceinline__ float2 gather_scores(const Thread& t, int left) {
  float2 x[WARPS + 2];
  x[0] = lds_float2<0>(t.gather);
  x[1] = lds_float2<SOURCE>(t.gather);
  x[2] = lds_float2<2 * SOURCE>(t.gather);
  x[3] = lds_float2<3 * SOURCE>(t.gather);
  x[4] = lds_float2<4 * SOURCE>(t.gather);
  x[5] = lds_float2<5 * SOURCE>(t.gather);
  if (WARPS == 8) {
    x[6 % (WARPS + 2)] = lds_float2<6 * SOURCE>(t.gather);
    x[7 % (WARPS + 2)] = lds_float2<7 * SOURCE>(t.gather);
    x[8 % (WARPS + 2)] = lds_float2<8 * SOURCE>(t.gather);
    x[9 % (WARPS + 2)] = lds_float2<9 * SOURCE>(t.gather);
  }
  float2 s = x[0];
#pragma unroll
  for (int w = 1; w < WARPS + 2; w++) {
    s.x += x[w].x;
    s.y += x[w].y;
  }
  if (TAIL) {
    int first = 8 * (t.warp >> 1);
    if (first + slot_token(2 * t.c) >= left) s.x = -__int_as_float(0x7F800000);
    if (first + slot_token(2 * t.c + 1) >= left) s.y = -__int_as_float(0x7F800000);
  }
  return s;
}

// Moves the running maximum to this step's and rescales what was summed so far. All threads of the CTA.
template <bool TAIL>
__device__ __forceinline__ float2 raise_max(Shared& sh, Thread& t, float log2_scale, int left) {
  float2 s = gather_scores<TAIL>(t, left);
  s.x *= log2_scale;
  s.y *= log2_scale;
  float top = fmaxf(s.x, s.y);
  top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, 1));
  top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, 2));
  int head = t.n + 8 * (t.warp & 1);
  if (t.c == 0) sh.tile_max[t.warp >> 1][head] = top;
  __syncthreads();
  float old_lo = sh.running_max[t.n], old_hi = sh.running_max[t.n + 8];
  float new_lo = old_lo, new_hi = old_hi;
#pragma unroll
  for (int g = 0; g < GROUPS; g++) {
    new_lo = fmaxf(new_lo, sh.tile_max[g][t.n]);
    new_hi = fmaxf(new_hi, sh.tile_max[g][t.n + 8]);
  }
  __syncthreads();
  if (t.c == 0 && t.warp < 2) sh.running_max[head] = t.warp ? new_hi : new_lo;
  sh.over = 0;
  float shrink_lo = exp2_approx(old_lo - new_lo), shrink_hi = exp2_approx(old_hi - new_hi);
#pragma unroll
  for (int r = 0; r < TILES; r++) {
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

// Where a thread finds its codes and scales in a stage.
struct Offsets {
  u32 data, scale, rope, rope_scale;
};

__device__ __forceinline__ void load_packed(Packed& x, u32 stage, const Offsets& at) {
  constexpr int DATA_GROUP = 8 * TOKEN_BYTES, SCALE_GROUP = 8 * SCALE_PITCH;
  const u32 data = stage + at.data, scale = stage + at.scale;
  if (WORDS == 4) {
    lds128<0>(data, x.word[0]);
    lds128<DATA_GROUP>(data, x.word[1]);
  } else {
    lds64<0>(data, x.word[0]);
    lds64<DATA_GROUP>(data, x.word[1]);
    lds64<2 * DATA_GROUP>(data, x.word[2 % GROUPS]);
    lds64<3 * DATA_GROUP>(data, x.word[3 % GROUPS]);
  }
  x.scale[0] = lds8<0>(scale);
  x.scale[1] = lds8<SCALE_GROUP>(scale);
  if (GROUPS == 4) {
    x.scale[2 % GROUPS] = lds8<2 * SCALE_GROUP>(scale);
    x.scale[3 % GROUPS] = lds8<3 * SCALE_GROUP>(scale);
  }
  x.rope = lds32<0>(stage + at.rope);
  x.rope_scale = lds8<0>(stage + at.rope_scale);
}

// One step from the stage at offset `stage`: scores, weights, weighted values.
template <bool TAIL>
__device__ __forceinline__ void step(Shared& sh, Thread& t, float log2_scale, u32 stage, const Offsets& at, int left) {
  Packed x;
  load_packed(x, stage, at);
  if (TAIL) { // what lies beyond the last token counts as zero
    const int token = slot_token(t.n);
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
      if (token + 8 * g >= left) x.scale[g] = NO_TOKEN;
    }
    if (token + 8 * (t.warp >> 1) >= left) x.rope_scale = NO_TOKEN;
  }
  int largest = x.rope_scale;
#pragma unroll
  for (int g = 0; g < GROUPS; g++) largest = max(largest, x.scale[g]);
  u32 v[GROUPS][TILES];
  if (__any_sync(0xFFFFFFFFu, largest > 128)) score_step<true>(t, x, v);
  else score_step<false>(t, x, v);
  __syncthreads();
  float2 e = gather_scores<TAIL>(t, left);
  float2 p = {exp2_approx(fmaf(e.x, log2_scale, -t.max)), exp2_approx(fmaf(e.y, log2_scale, -t.max))};
  sts32<WEIGHTS>(t.shared + (128 * t.warp + 4 * t.lane), pack_bf16(p.x, p.y));
  if (p.x + p.y > WEIGHT_LIMIT) sts32<OVER>(t.shared, 1);
  __syncthreads();
  const u32 weights = t.shared + 16 * t.lane;
  u32 w[4];
  ldmatrix4<WEIGHTS>(weights, w);
  if (lds32<OVER>(t.shared)) {
    p = raise_max<TAIL>(sh, t, log2_scale, left);
    ldmatrix4<WEIGHTS>(weights, w);
  }
  t.sum += p.x + p.y;
#pragma unroll
  for (int r = 0; r < TILES; r++) mma(t.acc[r], w, v[0][r], v[1][r]);
  if (GROUPS == 4) {
    ldmatrix4<WEIGHTS + 512>(weights, w);
#pragma unroll
    for (int r = 0; r < TILES; r++) mma(t.acc[r], w, v[2 % GROUPS][r], v[3 % GROUPS][r]);
  }
}

// Tokens [first, first + count) of one sequence: fills acc, max and sum. `turn` counts stages since the kernel began.
__device__ __forceinline__ void attend(Shared& sh, Thread& t, const Args& a, i64 first, int count, u32& turn) {
  t.max = NO_MAX;
  t.sum = 0.0f;
#pragma unroll
  for (int r = 0; r < TILES; r++) {
#pragma unroll
    for (int i = 0; i < 4; i++) t.acc[r][i] = 0.0f;
  }
  // Bulk copies are cut at 16 bytes; STEP rows of any pitch are a multiple of that, so the shift stays the same.
  const u32 shift = (u32)(u64)(a.scale + first * SCALE_PITCH) & 15;
  auto issue = [&](u32 slot, int done) { // one thread; the stage that begins `done` tokens into the segment
    const int tokens = min(STEP, count - done);
    const u32 scale_bytes = (shift + tokens * SCALE_PITCH + 15) & ~15u;
    const u32 stage = t.shared + slot * STAGE_BYTES, bar = t.shared + FULL + 8 * slot;
    mbarrier_expect(bar, tokens * TOKEN_BYTES + scale_bytes);
    bulk_load(stage, a.kv + (first + done) * TOKEN_BYTES, tokens * TOKEN_BYTES, bar);
    bulk_load(stage + STEP * TOKEN_BYTES, a.scale + (first + done) * SCALE_PITCH - shift, scale_bytes, bar);
  };
  u32 slot = turn % STAGES, parity = (turn / STAGES) & 1;
  if (threadIdx.x == 0) {
#pragma unroll 1
    for (int k = 0; k < STAGES - 1 && k * STEP < count; k++) issue((turn + k) % STAGES, k * STEP);
  }
  turn += (count + STEP - 1) / STEP;
  const int token = slot_token(t.n), own = t.warp >> 1; // own: the group whose RoPE this warp handles
  const Offsets at = {
      keep(t.shared + token * TOKEN_BYTES + DIMS / 8 * t.c + DIMS / 2 * t.warp),
      keep(t.shared + STEP * TOKEN_BYTES + shift + token * SCALE_PITCH + (DIMS / 4 * t.c) / 32 + DIMS / 32 * t.warp),
      keep(t.shared + (token + 8 * own) * TOKEN_BYTES + ROPE_BYTE + 8 * t.c + 4 * (t.warp & 1)),
      keep(t.shared + STEP * TOKEN_BYTES + shift + (token + 8 * own) * SCALE_PITCH + ROPE_BLOCK + (t.c >> 1))};
  int left = count;
#pragma unroll 1
  while (left > 0) {
    // The slot of the stage before is free: all its loads came before the barriers of its step.
    if (t.warp == 0 && left > (STAGES - 1) * STEP && elect_one())
      issue(slot ? slot - 1 : STAGES - 1, count - left + (STAGES - 1) * STEP);
    mbarrier_wait(t.shared + FULL + 8 * slot, parity);
    const u32 stage = slot * STAGE_BYTES;
    if (++slot == STAGES) {
      slot = 0;
      parity ^= 1;
    }
    if (left < STEP) break;
    step<false>(sh, t, a.log2_scale, stage, at, left);
    left -= STEP;
  }
  if (left > 0) step<true>(sh, t, a.log2_scale, (slot ? slot - 1 : STAGES - 1) * STAGE_BYTES, at, left);
}

// Quad k = 2 WORDS half + 2 word + odd of a thread: four consecutive dims of head n + 8 half.
__device__ __forceinline__ float4 acc_quad(const Thread& t, int k) {
  int half = k / (2 * WORDS), j = (k >> 1) % WORDS, e = k & 1;
  return {t.acc[4 * j][2 * half + e], t.acc[4 * j + 1][2 * half + e], t.acc[4 * j + 2][2 * half + e],
          t.acc[4 * j + 3][2 * half + e]};
}

// Writes one quad of the thread `owner` (its lane is this thread's).
__device__ __forceinline__ void store_quad(const Thread& t, u8* out_row, int k, u32 owner, float4 x, float inv) {
  int head = t.n + 8 * (k / (2 * WORDS));
  int dim = DIMS * (owner / 32) + DIMS / 4 * t.c + 4 * (k % (2 * WORDS));
  *(uint2*)(out_row + (head * LATENT + dim) * 2) = {pack_bf16(x.x * inv, x.y * inv), pack_bf16(x.z * inv, x.w * inv)};
}

__device__ __forceinline__ void add_scaled(float4& r, float w, float4 x) {
  r.x += w * x.x;
  r.y += w * x.y;
  r.z += w * x.z;
  r.w += w * x.w;
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM) mla_decode_mxfp4(const __grid_constant__ Args a) {
  SHARED_MEMORY(raw);
  Shared& sh = *(Shared*)raw;
  Thread t;
  t.lane = threadIdx.x & 31;
  t.warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x >> 5, 0);
  t.n = t.lane >> 2;
  t.c = t.lane & 3;
  t.shared = smem_u32(raw);
  t.store = keep(t.shared + PARTIAL + SOURCE * t.warp + 8 * t.lane);
  t.gather = keep(t.shared + PARTIAL + FRAGMENT * t.warp + 8 * t.lane);
  const u32 rank = cluster_rank(), size = cluster_size();
  const u32 cluster = blockIdx.x / size, clusters = gridDim.x / size;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) mbarrier_init(smem_u32(&sh.full[i]), 1);
    fence_mbarrier_init();
    sh.over = 0;
  }

  // The first round of the search below, issued before anything depends on it.
  const int stride0 = (a.batch + 31) / 32;
  const int probe0 = a.kv_indptr[min(t.lane * stride0, a.batch)];
  const int base = a.kv_indptr[0], total = a.kv_indptr[a.batch] - base;

  // Empty sequences belong to no cluster's share.
#pragma unroll 1
  for (int b = blockIdx.x; b < a.batch; b += gridDim.x) {
    if (a.kv_indptr[b + 1] <= a.kv_indptr[b]) {
#pragma unroll 1
      for (int i = threadIdx.x; i < HEADS * LATENT / 8; i += THREADS)
        *(uint4*)(a.out + ((i64)b * HEADS * LATENT + 8 * i) * 2) = {0, 0, 0, 0};
    }
  }

  // Clusters take equal shares of all tokens, cut at multiples of `grain` tokens, crossing sequences.
  const u32 grain = STEP * size;
  const u32 units = (total + grain - 1) / grain;
  const u32 share = units / clusters, longer = units - share * clusters; // the first `longer` clusters take one more
  auto share_begin = [&](u32 i) { return (int)min((u32)total, (i * share + min(i, longer)) * grain); };
  auto owner = [&](u32 token) {
    u32 unit = token / grain;
    return unit < longer * (share + 1) ? unit / (share + 1) : longer + (unit - longer * (share + 1)) / share;
  };
  const int start = share_begin(cluster), stop = share_begin(cluster + 1);
  __syncthreads();
  if (start >= stop) return; // the whole cluster leaves

  // The last sequence that begins at or before `start`.
  int b = 0;
  int probe = probe0;
#pragma unroll 1
  for (int span = a.batch, stride = stride0;;) {
    const bool before = t.lane * stride < span && probe - base <= start;
    const int found = __popc(__ballot_sync(0xFFFFFFFFu, before)) - 1;
    b += found * stride;
    span = min(stride, span - found * stride);
    if (span <= 1) break;
    stride = (span + 31) / 32;
    probe = a.kv_indptr[min(b + t.lane * stride, a.batch)];
  }

  u32 turn = 0;
  int pos = start;
#pragma unroll 1
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
    attend(sh, t, a, (i64)base + first, count, turn);

    // Sums of weights: over the quad, then over the warps that share this head.
    t.sum += __shfl_xor_sync(0xFFFFFFFFu, t.sum, 1);
    t.sum += __shfl_xor_sync(0xFFFFFFFFu, t.sum, 2);
    if (t.c == 0) sh.tile_sum[t.warp >> 1][t.n + 8 * (t.warp & 1)] = t.sum;
    // The ring is idle (its last loads came before the barriers of the last step): acc takes its place.
#pragma unroll
    for (int k = 0; k < QUADS; k++) sh.tiles.acc[k][threadIdx.x] = acc_quad(t, k);
    __syncthreads();
    if (threadIdx.x < HEADS) {
      float sum = 0.0f;
      for (int g = 0; g < GROUPS; g++) sum += sh.tile_sum[g][threadIdx.x];
      sh.sum[threadIdx.x] = sum;
    }
    if (size > 1) cluster_sync();
    else __syncthreads();

    // Each CTA merges its share of the quads over the cluster: quads k THREADS + thread, of its own from `first_quad` on.
    for (u32 i = threadIdx.x; i < size * HEADS; i += THREADS) {
      const u32 peer = i / HEADS, head = i % HEADS;
      sh.stats[peer][head] = {peer_float(peer_address(&sh.running_max[head], peer)),
                              peer_float(peer_address(&sh.sum[head], peer))};
    }
    __syncthreads();
    const bool whole = begin >= start && end <= stop;
    const u32 slot = 2 * cluster + (begin > start ? 1 : 0);
    u8* out_row = a.out + (i64)b * (HEADS * LATENT * 2);
    const u32 quads = QUADS * THREADS / size, first_quad = rank * quads;
    const u32 k_base = first_quad / THREADS;
    const u32 per_thread = (quads + THREADS - 1) / THREADS;
    const bool active = threadIdx.x < quads;
    const u32 owner_thread = first_quad % THREADS + threadIdx.x; // not this one only where a CTA has under a quad a thread
    auto merge = [&](u32 count, auto&& stat, auto&& quad, auto&& done) {
      float2 total[2]; // maximum and sum of weights, heads n and n + 8
#pragma unroll
      for (int h = 0; h < 2; h++) {
        total[h] = {NO_MAX, 0.0f};
#pragma unroll 4
        for (u32 p = 0; p < count; p++) total[h].x = fmaxf(total[h].x, stat(p, t.n + 8 * h).x);
#pragma unroll 4
        for (u32 p = 0; p < count; p++) {
          const float2 s = stat(p, t.n + 8 * h);
          total[h].y += exp2_approx(s.x - total[h].x) * s.y;
        }
      }
      if (active) {
#pragma unroll 1
        for (u32 k = 0; k < per_thread; k++) {
          const bool half = (k_base + k) / (2 * WORDS);
          const float top = half ? total[1].x : total[0].x;
          float4 r = {0, 0, 0, 0};
#pragma unroll 8
          for (u32 p = 0; p < count; p++) add_scaled(r, exp2_approx(stat(p, t.n + 8 * half).x - top), quad(p, k));
          done(k, r, half ? total[1].y : total[0].y);
        }
      }
    };
    auto store_out = [&](u32 k, float4 r, float sum) {
      store_quad(t, out_row, k_base + k, owner_thread, r, 1.0f / sum);
    };
    float4* part = a.parts + (i64)slot * (QUADS * THREADS) + first_quad + threadIdx.x;
    merge(
        size, [&](u32 p, u32 head) { return sh.stats[p][head]; },
        [&](u32 p, u32 k) { return peer_float4(peer_address(&sh.tiles.acc[k_base + k][owner_thread], p)); },
        [&](u32 k, float4 r, float sum) {
          if (whole) store_out(k, r, sum);
          else part[k * THREADS] = r;
        });
    if (size > 1) cluster_arrive_relaxed(); // peers' accumulators are read no more
    if (!whole) {
      // Parts of a sequence meet in memory: the last cluster to arrive merges, each of its CTAs its own quads.
      if (threadIdx.x < HEADS) {
        float2 total = {NO_MAX, 0.0f};
        for (u32 p = 0; p < size; p++) total.x = fmaxf(total.x, sh.stats[p][threadIdx.x].x);
        for (u32 p = 0; p < size; p++)
          total.y += exp2_approx(sh.stats[p][threadIdx.x].x - total.x) * sh.stats[p][threadIdx.x].y;
        a.part_stats[(slot * MAX_CLUSTER + rank) * HEADS + threadIdx.x] = total;
      }
      const u32 c0 = owner(begin), parts = owner(end - 1) - c0 + 1;
      __syncthreads();
      if (threadIdx.x == 0) {
        const u32 old = arrive_counter(a.arrivals + (i64)b * MAX_CLUSTER + rank, parts - 1);
        sh.last = old == parts - 1;
      }
      __syncthreads();
      if (sh.last) {
        // Only the first cluster of a sequence can have begun with another one.
        auto part_slot = [&](u32 p) { return 2 * (c0 + p) + (begin > share_begin(c0 + p) ? 1 : 0); };
        // Statistics of the parts, up to sh.stats in shared memory that is free by now: peers may still read sh.tiles.
        // The host's plans keep the number of clusters, and so of parts, within it.
        float2* stats = size == 1 ? (float2*)&sh.tiles : (float2*)&sh.partial;
        for (u32 i = threadIdx.x; i < parts * HEADS; i += THREADS)
          stats[i] = __ldcg(a.part_stats + (part_slot(i / HEADS) * MAX_CLUSTER + rank) * HEADS + i % HEADS);
        __syncthreads();
        merge(
            parts, [&](u32 p, u32 head) { return stats[p * HEADS + head]; },
            [&](u32 p, u32 k) {
              return __ldcg(a.parts + (i64)part_slot(p) * (QUADS * THREADS) + first_quad + k * THREADS + threadIdx.x);
            },
            store_out);
      }
    }
    pos = seg_end;
    // The ring that takes acc's place is written by bulk copies.
    fence_before_bulk();
    if (size > 1) cluster_wait();
    if (pos >= stop) return;
    do b++;
    while (a.kv_indptr[b + 1] - base <= pos);
    __syncthreads();
  }
}
