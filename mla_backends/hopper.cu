// MLA decode over an MXFP4 cache for Hopper (sm_90a): one query token, 16 heads, 576 dims of K, 512 of V.
//
//   packed cache --bulk copy--> 16 tokens a warp in shared memory --> a lane's words of two tokens
//   nibbles -> bf16 registers K [64 tokens x dims] --wgmma (A from registers)--> S^T [64 tokens x 16 heads]
//        |                                                                       | exp2
//        +--> V [64 tokens x 512] in shared memory --wgmma (A transposed)        +--> P [16 heads x 64 tokens]
//                                                   O^T [512 dims x 16 heads] <--+
//
// A CTA is one warpgroup and takes 64 tokens a step; warp w dequantises tokens 16 w .. 16 w + 15, once, for K and V alike.
// Heads are the columns (N = 16) of both products, so no part of the tensor cores' work is padding. Lane = 4 g + t: token
// slots g and g + 8 of the warp's 16, and the t-th quarter of each 128 dims. Compiled at run time; the host defines
// SCALE_PITCH (bytes from one token's scales to the next), SHARED_BYTES, and SHARED_BASE, the shared address at which a
// kernel's own memory begins: operands of products are then constants, which saves a move for each.

#include "ptx.cuh"

constexpr int HEADS = 16;
constexpr int LATENT = 512;
constexpr int QK_DIM = 576;
constexpr int TOKEN_BYTES = 288;
constexpr int ROPE_BYTE = 256;  // offset of the RoPE codes in a token's 288 bytes
constexpr int ROPE_BLOCK = 16;  // first scale block of RoPE
constexpr int WARPS = 4;
constexpr int THREADS = 128;
constexpr int STEP = 64;        // tokens of one pass through both products: the M of wgmma
constexpr int WARP_TOKENS = 16;
constexpr int CHUNKS = LATENT / 64;  // 64 dims are 128 bytes, the width of the swizzle
constexpr int CHUNK_BYTES = STEP * 128;
constexpr int Q_BYTES = HEADS * QK_DIM * 2; // of a sequence
constexpr int Q_CHUNK_BYTES = HEADS * 128;
constexpr int PACKED_BYTES = WARP_TOKENS * (TOKEN_BYTES + SCALE_PITCH) + 16; // codes, then scales cut at 16 bytes
constexpr int HEAD_QUADS = LATENT / 4, QUADS = HEADS * HEAD_QUADS; // what a thread holds of two chunks and a head is a quad
static_assert(HEAD_QUADS == THREADS, "in a merge, a thread has one quad of each head");
constexpr int ACC_HEAD = HEAD_QUADS + 1; // quads from head to head: a store's eight lanes of a phase then meet no bank twice
constexpr int MAX_CLUSTER = 16;
constexpr float NO_MAX = -3.402823466e38f;
// Weights may grow to 2^12 above the running maximum before it moves: bf16 and float32 have the range, so
// precision is untouched, and in practice the maximum is settled after the first step.
constexpr float WEIGHT_LIMIT = 4096.0f;
// A part whose sums pass this, where those of all parts might leave float32's range, is read again with weights of 2^-32
// at most: so few of the largest value's size cannot leave it.
constexpr float SUM_LIMIT = 3e35f;
constexpr float LOG2_SHIFT = 12 + 32; // the running maximum may lag by the weights' limit

struct Args {
  const u8* q;           // bf16 [batch, 16, 576]
  const u8* kv;          // [tokens, 288], 16-byte aligned
  const u8* scale;       // [tokens, 18], rows SCALE_PITCH bytes apart
  const int* kv_indptr;  // [batch + 1]
  u8* out;               // bf16 [batch, 16, 512]
  float4* parts;         // [2 clusters, 16, 512 / 4]: unnormalised sums of clusters that share a sequence
  float2* part_stats;    // [2 clusters, 16 ranks, 16]: maximum of the scores before their scale, sum of weights
  u32* arrivals;         // [batch, 16 ranks], zero between launches
  float log2_scale;      // sm_scale * log2(e)
  int batch;
};

// Clusters take equal shares of all tokens, cut at multiples of `grain` tokens, crossing sequences. Tokens are counted
// from the first sequence's first.
struct Schedule {
  u32 grain, share, longer; // the first `longer` clusters take share + 1 grains, the others share
  int base, total;          // the first sequence's first token in the cache; tokens of all sequences
  __device__ int begin(u32 cluster) const { return (int)min((u32)total, (cluster * share + min(cluster, longer)) * grain); }
  __device__ u32 owner(u32 token) const {
    const u32 unit = token / grain, head = longer * (share + 1);
    return unit < head ? unit / (share + 1) : longer + (unit - head) / share;
  }
};

// What a cluster takes of one sequence.
struct Segment {
  int b, begin, end; // the sequence and its bounds
  int from, stop;    // the cluster's part
  int first, count;  // this CTA's part of that
};

struct Shared {
  union Tiles {
    u8 v[CHUNKS][CHUNK_BYTES];         // [chunk of 64 dims][token][128 bytes, swizzled]
    float4 acc[HEADS][ACC_HEAD];       // this CTA's accumulators, for the merge
  } tiles;
  u8 q[QK_DIM / 64][Q_CHUNK_BYTES];    // [chunk of 64 dims][head][128 bytes, swizzled], dims in the order of K's registers
  u8 weights[HEADS * 128];             // P: [head][64 tokens, swizzled]
  u8 packed[WARPS][PACKED_BYTES];
  float2 stats[MAX_CLUSTER][HEADS];    // maximum and sum of weights of each CTA of the cluster
  float warp_max[WARPS][HEADS];
  float warp_sum[WARPS][HEADS];
  float running_max[HEADS];
  float sum[HEADS];
  u64 full[WARPS];
  Schedule schedule; // kept here and not in registers while the loop runs, which needs them all
  Segment segment, next;
  u32 last;
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "the host launches with less");
#define SHARED_AT(field) (SHARED_BASE + (u32)(u64)&((Shared*)0)->field)
static_assert(PACKED_BYTES % 16 == 0, "bulk copies go to 16-byte addresses");

// Four e2m1 codes, i and i + 4 of a word's eight for i = FIRST and FIRST + 1 -> two bf16 pairs. A code `s eem` moved to bits 15
// and 8..6 of a bf16 is its value times 2^-126 (a subnormal where e = 0), so one exact multiply by 2^126 times the scale
// finishes it.
template <int FIRST> __device__ __forceinline__ void dequant_pairs(u32 word, u32 factor, u32* r) {
  if (FIRST == 2) word >>= 8;
  r[0] = mul_bf16x2(((word & 0x000F000Fu) * 0x1040u) & 0x81C081C0u, factor);
  r[1] = mul_bf16x2(((word & 0x00F000F0u) * 0x0104u) & 0x81C081C0u, factor);
}

// Scale byte b -> bf16 2^(b - 1), twice: the 2^126 above included. Right for b <= 128; NO_TOKEN gives zero.
constexpr int NO_TOKEN = -126;
__device__ __forceinline__ u32 scale_factor(int b) { return (u32)(b + 126) * 0x00800080u; }

// What is left of bytes 129..255 after `min(b, 128)`: 2^(b - 128); NaN for 255.
__device__ __forceinline__ u32 wide_factor(int b) {
  u32 f = b <= 128 ? 0x3F80u : (b == 255 ? 0x7FC0u : (u32)(b - 1) << 7);
  return f * 0x00010001u;
}

// Token of slot g inside its group of 8. With this order the eight lanes of a shared-memory phase read two tokens
// whose 288-byte rows are 16 banks apart, so 16-byte loads do not conflict.
__device__ __forceinline__ int slot_token(int g) { return (g & 4) | ((g & 1) << 1) | ((g >> 1) & 1); }

struct Thread {
  int lane, warp, g, t;
  float acc[CHUNKS][8]; // O^T: dims 16 warp + g and + 8 of each chunk; heads as below
  float sum[4];         // weights of heads 2 t, 2 t + 1, 2 t + 8, 2 t + 9 seen so far, this lane's tokens
};

// Q into the order of K's registers. Word m of four in scale block 4 k + t becomes four pairs (d_i, d_{i+4}): in k-step k, the
// halves of chunk 2 m (i = 0, 1) and of chunk 2 m + 1 (i = 2, 3). Eight threads share a head, and a thread's blocks are eight
// apart. RoPE is a chunk of its own, eight words of which two make a k-step.
__device__ __forceinline__ void load_q(Shared& sh, const u8* q) {
  const int head = threadIdx.x / 8, part = threadIdx.x % 8, turn = head % 8;
  const uint4* from = (const uint4*)q + head * (QK_DIM / 8);
  uint4 x[9];
#pragma unroll
  for (int i = 0; i < 8; i++) x[i] = __ldg(from + 4 * part + i / 4 * 32 + i % 4);
  x[8] = __ldg(from + LATENT / 8 + part);
  u8* latent = sh.q[0] + head * 128 + 4 * (part % 4);
  u8* rope = sh.q[CHUNKS] + head * 128 + 4 * (part / 2);
#pragma unroll
  for (int i = 0; i < 9; i++) {
    const u32 pair[4] = {__byte_perm(x[i].x, x[i].z, 0x5410), __byte_perm(x[i].x, x[i].z, 0x7632),
                         __byte_perm(x[i].y, x[i].w, 0x5410), __byte_perm(x[i].y, x[i].w, 0x7632)};
    const int k = part / 4 + i / 4 * 2;
#pragma unroll
    for (int n = 0; n < 4; n++) {
      if (i < 8) *(u32*)(latent + (i % 4 * 2 + n / 2) * Q_CHUNK_BYTES + ((2 * k + n % 2) ^ turn) * 16) = pair[n];
      else *(u32*)(rope + ((part % 2 * 4 + n) ^ turn) * 16) = pair[n];
    }
  }
  fence_before_bulk();
}

// One warp's 16 tokens of one step, two of them a lane: blocks t, 4 + t, 8 + t, 12 + t and half of a RoPE block.
struct Packed {
  u32 word[2][4][4];
  u32 rope[2][2];
  int scale[2][4];
  int rope_scale[2];
};

__device__ __forceinline__ void load_packed(Packed& x, u32 data, u32 scale, u32 rope, u32 rope_scale) {
  constexpr int ROW = 8 * TOKEN_BYTES, SCALE_ROW = 8 * SCALE_PITCH;
  x.rope_scale[0] = lds8<0>(rope_scale);
  x.rope_scale[1] = lds8<SCALE_ROW>(rope_scale);
  x.scale[0][0] = lds8<0>(scale);
  x.scale[1][0] = lds8<SCALE_ROW>(scale);
  x.scale[0][1] = lds8<4>(scale);
  x.scale[1][1] = lds8<SCALE_ROW + 4>(scale);
  x.scale[0][2] = lds8<8>(scale);
  x.scale[1][2] = lds8<SCALE_ROW + 8>(scale);
  x.scale[0][3] = lds8<12>(scale);
  x.scale[1][3] = lds8<SCALE_ROW + 12>(scale);
  lds64<0>(rope, x.rope[0]);
  lds64<ROW>(rope, x.rope[1]);
  lds128<0>(data, x.word[0][0]);
  lds128<ROW>(data, x.word[1][0]);
  lds128<64>(data, x.word[0][1]);
  lds128<ROW + 64>(data, x.word[1][1]);
  lds128<128>(data, x.word[0][2]);
  lds128<ROW + 128>(data, x.word[1][2]);
  lds128<192>(data, x.word[0][3]);
  lds128<ROW + 192>(data, x.word[1][3]);
}

// Depends on every load of x: what uses it waits until they are done. A barrier does not: while products read shared memory,
// loads issued long before it were seen to return what a bulk copy issued behind it had brought.
__device__ __forceinline__ u32 words_of(const Packed& x) {
  u32 r = 0;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    r |= x.rope[h][0] | x.rope_scale[h];
#pragma unroll
    for (int j = 0; j < 4; j++) r |= x.word[h][j][0] | x.scale[h][j];
  }
  return r;
}

// What the codes of a scale block are multiplied by: once, or twice where a scale may be over 128.
struct Factor {
  u32 once, extra;
};

template <bool WIDE> __device__ __forceinline__ Factor make_factor(int scale) {
  return WIDE ? Factor{scale_factor(min(scale, 128)), wide_factor(scale)} : Factor{scale_factor(scale), 0};
}

template <bool WIDE, int FIRST> __device__ __forceinline__ void dequant_scaled(u32 word, Factor factor, u32* r) {
  dequant_pairs<FIRST>(word, factor.once, r);
  if (WIDE) {
    r[0] = mul_bf16x2(r[0], factor.extra);
    r[1] = mul_bf16x2(r[1], factor.extra);
  }
}

// 64 dims of this warp's tokens, in the order of the products' k-steps.
struct Fragment {
  u32 lo[8], hi[8]; // token slots g and g + 8
};

template <bool WIDE, int C>
__device__ __forceinline__ void dequant_chunk(const Packed& x, const Factor (&factor)[2][4], Fragment& f) {
#pragma unroll
  for (int k = 0; k < 4; k++) {
    dequant_scaled<WIDE, C % 2 * 2>(x.word[0][k][C / 2], factor[0][k], f.lo + 2 * k);
    dequant_scaled<WIDE, C % 2 * 2>(x.word[1][k][C / 2], factor[1][k], f.hi + 2 * k);
  }
}

template <bool WIDE>
__device__ __forceinline__ void dequant_rope(const Packed& x, Fragment& f) {
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const Factor factor = make_factor<WIDE>(x.rope_scale[h]);
    u32* r = h ? f.hi : f.lo;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      dequant_scaled<WIDE, 0>(x.rope[h][i], factor, r + 4 * i);
      dequant_scaled<WIDE, 2>(x.rope[h][i], factor, r + 4 * i + 2);
    }
  }
}

// Scores of 64 dims: `first` where they are the first ones.
__device__ __forceinline__ void score_chunk(float (&s)[8], const Fragment& f, u32 q, bool first) {
#pragma unroll
  for (int k = 0; k < 4; k++)
    wgmma_registers(s, f.lo[2 * k], f.hi[2 * k], f.lo[2 * k + 1], f.hi[2 * k + 1], q + 32 * k / 16, !first || k > 0);
}

// Addresses and operands of a thread, the same in every step.
struct Places {
  u32 data, rope, scale, rope_scale; // in this warp's packed tokens
  u32 v_row[4];                      // the row that this lane gives to stmatrix in each k-step
  u32 p_row;
};

// The same registers, as 128-byte rows [token][64 dims] whose 16-byte segments are swizzled by the row: operand V.
template <int CHUNK>
__device__ __forceinline__ void store_chunk(const Places& at, const Fragment& f) {
#pragma unroll
  for (int k = 0; k < 4; k++) {
    const u32 quad[4] = {f.lo[2 * k], f.hi[2 * k], f.lo[2 * k + 1], f.hi[2 * k + 1]};
    stmatrix4<CHUNK * CHUNK_BYTES>(at.v_row[k], quad);
  }
}

// Chunk C of a step, or RoPE, the last one: into V before its products are issued, which was found to be faster than after.
template <bool WIDE, int C>
__device__ __forceinline__ void take_chunk(const Packed& x, const Factor (&factor)[2][4], const Places& at, float (&s)[8],
                                           Fragment& f, u32 q) {
  if constexpr (C < CHUNKS) {
    dequant_chunk<WIDE, C>(x, factor, f);
    store_chunk<C>(at, f);
  } else {
    dequant_rope<WIDE>(x, f);
  }
  wgmma_fence();
  score_chunk(s, f, q + C * Q_CHUNK_BYTES / 16, false);
  wgmma_commit();
  if (C < CHUNKS) wgmma_wait<1>(); // the chunk before, whose registers the next one may take
}

// Dequantises this warp's tokens once: products with Q into s, V into shared memory. The products with V of the step before
// may be under way; the first products with Q queue behind them.
template <bool WIDE>
__device__ __forceinline__ void score_step(const Packed& x, const Places& at, float (&s)[8]) {
  const u32 q = swizzled_operand(SHARED_AT(q));
  Factor factor[2][4];
#pragma unroll
  for (int k = 0; k < 4; k++) {
    factor[0][k] = make_factor<WIDE>(x.scale[0][k]);
    factor[1][k] = make_factor<WIDE>(x.scale[1][k]);
  }
  Fragment even, odd;
  dequant_chunk<WIDE, 0>(x, factor, even);
  dequant_chunk<WIDE, 1>(x, factor, odd);
  wgmma_fence();
  score_chunk(s, even, q, true);
  score_chunk(s, odd, q + Q_CHUNK_BYTES / 16, false);
  wgmma_commit();
  wgmma_wait<1>(); // the products with V
  __syncthreads(); // in every warp
  store_chunk<0>(at, even);
  store_chunk<1>(at, odd);
  take_chunk<WIDE, 2>(x, factor, at, s, even, q);
  take_chunk<WIDE, 3>(x, factor, at, s, odd, q);
  take_chunk<WIDE, 4>(x, factor, at, s, even, q);
  take_chunk<WIDE, 5>(x, factor, at, s, odd, q);
  take_chunk<WIDE, 6>(x, factor, at, s, even, q);
  take_chunk<WIDE, 7>(x, factor, at, s, odd, q);
  take_chunk<WIDE, CHUNKS>(x, factor, at, s, even, q);
}

// Moves the running maximum to this step's scores e and rescales what was summed so far. All threads of the CTA; no
// product is under way. The new one is in `max` from here on, in shared memory after the caller's next barrier and settle_max.
__device__ __forceinline__ void raise_max(Shared& sh, Thread& t, const float (&e)[8], float log2_scale, float (&max)[4]) {
  float top[4] = {fmaxf(e[0], e[2]), fmaxf(e[1], e[3]), fmaxf(e[4], e[6]), fmaxf(e[5], e[7])};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    top[i] = fmaxf(top[i], __shfl_xor_sync(0xFFFFFFFFu, top[i], 4));
    top[i] = fmaxf(top[i], __shfl_xor_sync(0xFFFFFFFFu, top[i], 8));
    top[i] = fmaxf(top[i], __shfl_xor_sync(0xFFFFFFFFu, top[i], 16));
    const int head = 2 * t.t + (i & 1) + 8 * (i >> 1);
    if (t.g == 0) sh.warp_max[t.warp][head] = top[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int head = 2 * t.t + (i & 1) + 8 * (i >> 1);
    const float old = sh.running_max[head];
    max[i] = old;
#pragma unroll
    for (int w = 0; w < WARPS; w++) max[i] = fmaxf(max[i], sh.warp_max[w][head]);
    const float shrink = exp2_approx((old - max[i]) * log2_scale);
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
      t.acc[c][(i & 1) + 4 * (i >> 1)] *= shrink;
      t.acc[c][(i & 1) + 4 * (i >> 1) + 2] *= shrink;
    }
    t.sum[i] *= shrink;
  }
}

// After every thread has read the old maximum, and a barrier before the next reads this one.
__device__ __forceinline__ void settle_max(Shared& sh, const Thread& t, const float (&max)[4]) {
  if (t.warp == 0 && t.g == 0) {
#pragma unroll
    for (int i = 0; i < 4; i++) sh.running_max[2 * t.t + (i & 1) + 8 * (i >> 1)] = max[i];
  }
}

__device__ __forceinline__ void running_max(const Shared& sh, int t, float (&max)[4]) {
  const float2 lo = *(const float2*)&sh.running_max[2 * t], hi = *(const float2*)&sh.running_max[2 * t + 8];
  max[0] = lo.x;
  max[1] = lo.y;
  max[2] = hi.x;
  max[3] = hi.y;
}

// Weights of this lane's tokens from scores e and the running maximum: into shared memory as operand P, and added up per
// head. Returns the largest. The maximum is subtracted before the difference is scaled: that is exact at the top.
__device__ __forceinline__ float weigh(const float (&max)[4], u32 p_row, const float (&e)[8], float log2_scale,
                                       float (&added)[4]) {
  float p[8];
#pragma unroll
  for (int i = 0; i < 8; i++) p[i] = exp2_approx((e[i] - max[(i & 1) + 2 * (i >> 2)]) * log2_scale);
  const u32 w[4] = {pack_bf16(p[0], p[1]), pack_bf16(p[2], p[3]), pack_bf16(p[4], p[5]), pack_bf16(p[6], p[7])};
  stmatrix4_trans(p_row, w);
  fence_before_bulk();
  float top = p[0];
#pragma unroll
  for (int i = 1; i < 8; i++) top = fmaxf(top, p[i]);
  // The sum is that of the weights as rounded, so that a lone weight cancels exactly.
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const u32 lo = w[2 * (i >> 1)], hi = w[2 * (i >> 1) + 1];
    added[i] = (i & 1) ? __uint_as_float(lo & 0xFFFF0000u) + __uint_as_float(hi & 0xFFFF0000u)
                       : __uint_as_float(lo << 16) + __uint_as_float(hi << 16);
  }
  return top;
}

// Copies are cut at 16 bytes: so many come before the scales of a token. WARP_TOKENS rows are a multiple of 16 bytes, so a
// segment has one shift.
__device__ __forceinline__ u32 scale_shift(const Args& a, i64 token) {
  return (u32)(u64)(a.scale + token * SCALE_PITCH) & 15;
}

// Copies the 16 tokens that this warp takes of a step, from `first` on, or what is left of them. One lane. Unsigned, so that
// all of it is computed in uniform registers, where copies take it from.
__device__ __forceinline__ void copy_packed(const Args& a, u32 dst, u32 bar, u32 first, int tokens) {
  tokens = min(tokens, WARP_TOKENS);
  const u64 scales = (u64)a.scale + (u64)first * SCALE_PITCH;
  const u32 scale_bytes = (((u32)scales & 15) + tokens * SCALE_PITCH + 15) & ~15u;
  mbarrier_expect(bar, tokens * TOKEN_BYTES + scale_bytes);
  bulk_load(dst, a.kv + (u64)first * TOKEN_BYTES, tokens * TOKEN_BYTES, bar);
  bulk_load(dst + WARP_TOKENS * TOKEN_BYTES, (const u8*)(scales & ~(u64)15), scale_bytes, bar);
}

// This warp's tokens of a step, `own` of them at most 16, from shared memory to registers; whether any scale byte is over 128.
__device__ __forceinline__ bool fetch_packed(Packed& x, const Places& at, u32 full, u32& parity, int own, int token) {
  if (own > 0) {
    mbarrier_wait(full, parity);
    parity ^= 1;
  }
  load_packed(x, at.data, at.scale, at.rope, at.rope_scale);
  if (own < WARP_TOKENS) { // what lies beyond the last token counts as zero
#pragma unroll
    for (int h = 0; h < 2; h++) {
      if (token + 8 * h >= own) {
        x.rope_scale[h] = NO_TOKEN;
#pragma unroll
        for (int j = 0; j < 4; j++) x.scale[h][j] = NO_TOKEN;
      }
    }
  }
  int largest = max(x.rope_scale[0], x.rope_scale[1]);
#pragma unroll
  for (int j = 0; j < 4; j++) largest = max(largest, max(x.scale[0][j], x.scale[1][j]));
  return largest > 128;
}

// The segment at hand, whose first step's copies and Q are under way: fills acc, sum and the running maximum.
__device__ __forceinline__ void attend(Shared& sh, Thread& t, const Args& a, u32& parity, bool again) {
#pragma unroll
  for (int i = 0; i < 4; i++) t.sum[i] = 0.0f;
  if (threadIdx.x < HEADS) {
    float* max = &sh.running_max[threadIdx.x];
    *max = again ? *max + LOG2_SHIFT / a.log2_scale : NO_MAX;
  }
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
#pragma unroll
    for (int i = 0; i < 8; i++) t.acc[c][i] = 0.0f;
  }
  const int count = sh.segment.count;
  const u32 shift = scale_shift(a, (i64)sh.schedule.base + sh.segment.first);
  const u32 packed = smem_u32(sh.packed[t.warp]), full = smem_u32(&sh.full[t.warp]);
  const int token = slot_token(t.g);
  Places at;
  at.data = keep(packed + token * TOKEN_BYTES + 16 * t.t);
  at.rope = keep(packed + token * TOKEN_BYTES + ROPE_BYTE + 8 * t.t);
  const u32 scales = packed + WARP_TOKENS * TOKEN_BYTES + shift + token * SCALE_PITCH;
  at.scale = keep(scales + t.t);
  at.rope_scale = keep(scales + ROPE_BLOCK + (t.t >> 1));
  // stmatrix: lane l gives the address of row l % 8 of matrix l / 8. Matrices of V: tokens 0..7 and 8..15 of this warp's,
  // then the same for the next eight dims. Of P: tokens likewise, then the same for the next eight heads.
  const int row = t.lane & 7, second = (t.lane >> 3) & 1, third = t.lane >> 4;
#pragma unroll
  for (int k = 0; k < 4; k++)
    at.v_row[k] =
        keep(smem_u32(sh.tiles.v) + (WARP_TOKENS * t.warp + 8 * second + row) * 128 + ((2 * k + third) ^ row) * 16);
  at.p_row = keep(smem_u32(sh.weights) + (8 * third + row) * 128 + ((2 * t.warp + second) ^ row) * 16);

  Packed x;
  const u32 never = (u32)a.batch >> 31; // zero, which the compiler cannot know
  int own = count - WARP_TOKENS * t.warp; // tokens from this warp's first on
  const u32 following = sh.schedule.base + sh.segment.first + count + STEP;
  auto copy_next = [&] { // the tokens after the step that begins `own` tokens before the end, where those of x were
    if (own > STEP && elect_one()) copy_packed(a, packed + (words_of(x) & never), full, following - own, own - STEP);
  };
  auto add_values = [&] {
    const u32 v = swizzled_operand(SHARED_AT(tiles)), weights = swizzled_operand(SHARED_AT(weights));
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
#pragma unroll
      for (int k = 0; k < 4; k++)
        wgmma_transposed(t.acc[c], v + (c * CHUNK_BYTES + 2048 * k) / 16, weights + 32 * k / 16);
    }
    wgmma_commit();
  };
  if (count <= 0) return;
  bool wide = barrier_any(fetch_packed(x, at, full, parity, own, token)); // and Q is in place
  copy_next();
  int left = count;
  // The inner loop holds the usual step and nothing else that touches the accumulators, so that products run across steps.
  // It begins with the values of the step before.
#pragma unroll 1
  while (true) {
    float e[8], added[4], max[4];
    bool over;
#pragma unroll 1
    do {
      if (left < count) {
        copy_next();
        add_values();
      }
      float s[8]; // not e itself, which outlives the loop: that gives other machine code, which was not timed
      if (wide) score_step<true>(x, at, s);
      else score_step<false>(x, at, s);
      // The next step's tokens, while the last products are under way.
      const bool next_wide = fetch_packed(x, at, full, parity, own - STEP, token);
      running_max(sh, t.t, max); // of no use in the first step
      wgmma_wait<0>();
#pragma unroll
      for (int i = 0; i < 8; i++) e[i] = s[i];
      if (own < WARP_TOKENS) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
          if (token + 8 * ((i >> 1) & 1) >= own) e[i] = -__int_as_float(0x7F800000);
        }
      }
      over = left == count; // the first step has no maximum yet
      if (over) {
        wide = next_wide; // whether anybody's is, the barrier below tells
      } else {
        const bool high = weigh(max, at.p_row, e, a.log2_scale, added) > WEIGHT_LIMIT;
        wide = false;
        if (barrier_any(high || next_wide)) {
          wide = barrier_any(next_wide);
          over = barrier_any(high);
        }
      }
      left -= STEP;
      own -= STEP;
      if (over) break;
#pragma unroll
      for (int i = 0; i < 4; i++) t.sum[i] += added[i];
    } while (left > 0);
    if (!over) break;
    raise_max(sh, t, e, a.log2_scale, max);
    weigh(max, at.p_row, e, a.log2_scale, added);
#pragma unroll
    for (int i = 0; i < 4; i++) t.sum[i] += added[i];
    wide = barrier_any(wide);
    settle_max(sh, t, max);
    if (left <= 0) break;
  }
  add_values();
  parity = keep(parity ^ (words_of(x) & never)); // nothing of this segment is under way where the next one's copies begin
  wgmma_wait<0>();
}

// At least as large as any of this thread's sums.
__device__ __forceinline__ float magnitude(const Thread& t) {
  float sum = 0.0f;
#pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
#pragma unroll
    for (int i = 0; i < 8; i++) sum += fabsf(t.acc[c][i]);
  }
  return sum;
}

// The first of the four dims of quad j of a head, which the thread with warp = j / 8 % 4 and g = j % 8 has in rows g and
// g + 8 of the chunks 2 (j / 32) and 2 (j / 32) + 1: warp tells the k-step and with g / 2 the scale block, the chunks the word.
__device__ __forceinline__ u32 quad_dim(u32 j) { return j / 8 % 4 * 128 + j / 2 % 4 * 32 + j / 32 * 8 + j % 2 * 4; }

__device__ __forceinline__ void add_scaled(float4& r, float w, float4 x) {
  r.x += w * x.x;
  r.y += w * x.y;
  r.z += w * x.z;
  r.w += w * x.w;
}

// This CTA's part of what `cluster` takes of sequence b from token `from` on.
__device__ __forceinline__ Segment make_segment(const Schedule& s, u32 cluster, u32 rank, u32 size, int b, int from, int begin,
                                                int end) {
  Segment r;
  r.b = b;
  r.begin = begin;
  r.end = end;
  r.from = from;
  r.stop = min(s.begin(cluster + 1), end);
  const int per_cta = ((r.stop - from + s.grain - 1) / s.grain) * STEP;
  r.first = min(r.stop, from + (int)rank * per_cta);
  r.count = min(r.stop - r.first, per_cta);
  return r;
}

// The first copies of sh.segment, and its Q.
__device__ __forceinline__ void begin_segment(Shared& sh, const Thread& t, const Args& a) {
  const int count = sh.segment.count - WARP_TOKENS * t.warp;
  if (count > 0 && elect_one())
    copy_packed(a, smem_u32(sh.packed[t.warp]), smem_u32(&sh.full[t.warp]),
                sh.schedule.base + sh.segment.first + WARP_TOKENS * t.warp, count);
  load_q(sh, a.q + (i64)sh.segment.b * Q_BYTES);
}

// Asks L2 for the Q of the sequence that this cluster begins with if all are as long: which one it is has to come from memory
// first. A hint; nothing but time depends on it.
__device__ __forceinline__ void prefetch_likely_q(const Args& a, u32 cluster, u32 rank, u32 size, u32 clusters) {
  const u32 b = (u64)cluster * a.batch / clusters, bytes = Q_BYTES / size;
  bulk_prefetch(a.q + (i64)b * Q_BYTES + rank * bytes, bytes);
}

// Sums over a cluster's CTAs [16 heads, 512] of a quad each in BATCH heads a thread, and over UNROLL CTAs at once, so that
// many loads are in flight together. stat(part, head): maximum and sum of weights; quad(part, head): its numbers;
// done(head, numbers, sum of weights).
template <u32 BATCH, u32 UNROLL, class Stat, class Quad, class Done>
__device__ __forceinline__ void merge_quads(u32 parts, u32 head, float log2_scale, Stat&& stat, Quad&& quad, Done&& done) {
  float top[BATCH], sum[BATCH];
  float4 r[BATCH];
#pragma unroll
  for (u32 i = 0; i < BATCH; i++) {
    top[i] = NO_MAX;
    sum[i] = 0.0f;
    r[i] = {0, 0, 0, 0};
  }
#pragma unroll 4
  for (u32 p = 0; p < parts; p++) {
#pragma unroll
    for (u32 i = 0; i < BATCH; i++) top[i] = fmaxf(top[i], stat(p, head + i).x);
  }
#pragma unroll UNROLL
  for (u32 p = 0; p < parts; p++) {
#pragma unroll
    for (u32 i = 0; i < BATCH; i++) {
      const float2 s = stat(p, head + i);
      const float weight = exp2_approx((s.x - top[i]) * log2_scale);
      sum[i] += weight * s.y;
      add_scaled(r[i], weight, quad(p, head + i));
    }
  }
#pragma unroll
  for (u32 i = 0; i < BATCH; i++) done(head + i, r[i], sum[i]);
}

// This CTA's heads, a quad of each a thread.
template <class Stat, class Quad, class Done>
__device__ __forceinline__ void merge_cluster(u32 parts, float log2_scale, Stat&& stat, Quad&& quad, Done&& done) {
  const u32 heads = HEADS / cluster_size(), end = (cluster_rank() + 1) * heads;
  u32 head = end - heads;
  if (heads % 4 == 0) {
#pragma unroll 1
    for (; head < end; head += 4) merge_quads<4, 2>(parts, head, log2_scale, stat, quad, done);
  } else {
#pragma unroll 1
    for (; head < end; head++) merge_quads<1, 8>(parts, head, log2_scale, stat, quad, done);
  }
}

// Statistics of parts (maximum, sum of weights; [parts, 16 heads] in shared memory) -> in place of the maxima, what a part's
// numbers are multiplied by: its weight over the sum of all weights. Eight threads share a head, thread k of them takes the
// parts k, k + 8, ..
__device__ __forceinline__ void weigh_parts(float2* stats, u32 parts, float log2_scale) {
  const u32 first = threadIdx.x % 8;
  stats += threadIdx.x / 8;
  float top = NO_MAX, sum = 0.0f;
#pragma unroll 1
  for (u32 p = first; p < parts; p += 8) top = fmaxf(top, stats[p * HEADS].x);
#pragma unroll
  for (int mask = 1; mask < 8; mask *= 2) top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, mask));
#pragma unroll 1
  for (u32 p = first; p < parts; p += 8) {
    const float2 s = stats[p * HEADS];
    const float weight = exp2_approx((s.x - top) * log2_scale);
    sum += weight * s.y;
    stats[p * HEADS].x = weight;
  }
#pragma unroll
  for (int mask = 1; mask < 8; mask *= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, mask);
  const float inverse = 1.0f / sum;
#pragma unroll 1
  for (u32 p = first; p < parts; p += 8) stats[p * HEADS].x *= inverse;
}

__device__ __forceinline__ void store_quad(const Args& a, int b, u32 head, float4 r) {
  u8* at = a.out + (i64)b * (HEADS * LATENT * 2) + (head * LATENT + quad_dim(threadIdx.x)) * 2;
  *(uint2*)at = {pack_bf16(r.x, r.y), pack_bf16(r.z, r.w)};
}

// The last cluster's part of a sequence whose parts lie in memory: merges them, each CTA its heads. Not inlined: the loop over
// steps needs all registers, and would be given fewer.
__device__ __noinline__ void merge_parts(Shared& sh, const Args& a, int b, u32 first, u32 parts, u32 second) {
  // Only the first cluster of a sequence can have begun with another one.
  auto part_slot = [&](u32 p) { return 2 * (first + p) + (p == 0 ? second : 0); };
  // Statistics of the parts go behind acc, which peers may still read. The host's plans keep their number within it.
  const u32 rank = cluster_rank();
  float2* stats = cluster_size() > 1 ? (float2*)(sh.tiles.acc + HEADS) : (float2*)&sh.tiles;
  for (u32 i = threadIdx.x; i < parts * HEADS; i += THREADS)
    stats[i] = __ldcg(a.part_stats + (part_slot(i / HEADS) * MAX_CLUSTER + rank) * HEADS + i % HEADS);
  __syncthreads();
  weigh_parts(stats, parts, a.log2_scale);
  __syncthreads();
  // A quad of each of this CTA's heads a thread. So many loads are in flight at a time, whichever heads they belong to.
  constexpr u32 FLIGHT = 8;
  const u32 heads = HEADS / cluster_size(), all = heads * parts;
  u32 load_head = rank * heads, load_part = 0, head = load_head, part = 0;
  float4 r = {0, 0, 0, 0};
#pragma unroll 1
  for (u32 i = 0; i < all; i += FLIGHT) {
    float4 x[FLIGHT];
#pragma unroll
    for (u32 k = 0; k < FLIGHT; k++) { // the last one again, beyond it
      x[k] = __ldcg(a.parts + (i64)part_slot(load_part) * QUADS + load_head * HEAD_QUADS + threadIdx.x);
      const bool next = load_part + 1 < parts, more = i + k + 1 < all;
      load_head += !next && more;
      load_part = next ? load_part + 1 : more ? 0 : load_part;
    }
#pragma unroll
    for (u32 k = 0; k < FLIGHT; k++) {
      if (i + k < all) {
        add_scaled(r, stats[part * HEADS + head].x, x[k]);
        if (++part == parts) {
          store_quad(a, b, head, r);
          r = {0, 0, 0, 0};
          part = 0;
          head++;
        }
      }
    }
  }
}

// The segment that was attended: merged over the cluster and, where other clusters have parts of the sequence, through
// memory. Begins the next one in between. Whether there is one.
__device__ __forceinline__ bool end_segment(Shared& sh, Thread& t, const Args& a) {
  // Sums of weights: over the lanes of a column, then over the warps.
#pragma unroll
  for (int i = 0; i < 4; i++) {
    t.sum[i] += __shfl_xor_sync(0xFFFFFFFFu, t.sum[i], 4);
    t.sum[i] += __shfl_xor_sync(0xFFFFFFFFu, t.sum[i], 8);
    t.sum[i] += __shfl_xor_sync(0xFFFFFFFFu, t.sum[i], 16);
    if (t.g == 0) sh.warp_sum[t.warp][2 * t.t + (i & 1) + 8 * (i >> 1)] = t.sum[i];
  }
  const Segment seg = sh.segment;
  __syncthreads(); // every warp's products are done: acc takes V's place, and Q and the packed tokens that of the next ones
#pragma unroll
  for (int c = 0; c < CHUNKS; c += 2) {
    float4* at = &sh.tiles.acc[2 * t.t][16 * c + 8 * t.warp + t.g];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int x = (i & 1) + 4 * (i >> 1); // head 2 t + (i & 1) + 8 (i >> 1)
      at[((i & 1) + 8 * (i >> 1)) * ACC_HEAD] = {t.acc[c][x], t.acc[c][x + 2], t.acc[c + 1][x], t.acc[c + 1][x + 2]};
    }
  }
  if (threadIdx.x < HEADS) {
    float sum = 0.0f;
    for (int w = 0; w < WARPS; w++) sum += sh.warp_sum[w][threadIdx.x];
    sh.sum[threadIdx.x] = sum;
  }
  const bool more = sh.next.b >= 0;
  if (threadIdx.x == 0) sh.segment = sh.next;
  const u32 rank = cluster_rank(), size = cluster_size();
  if (size > 1) cluster_sync();
  else __syncthreads();
  if (more) begin_segment(sh, t, a);

  // Each CTA merges its share of the output over the cluster.
  for (u32 i = threadIdx.x; i < size * HEADS; i += THREADS) {
    const u32 peer = i / HEADS, head = i % HEADS;
    sh.stats[peer][head] = {peer_float(peer_address(&sh.running_max[head], peer)),
                            peer_float(peer_address(&sh.sum[head], peer))};
  }
  __syncthreads();
  const Schedule schedule = sh.schedule;
  const u32 cluster = blockIdx.x / size;
  const bool whole = seg.begin >= seg.from && seg.end <= seg.stop;
  const u32 slot = 2 * cluster + (seg.begin > schedule.begin(cluster) ? 1 : 0);
  float4* part = a.parts + (i64)slot * QUADS + threadIdx.x;
  merge_cluster(
      size, a.log2_scale, [&](u32 p, u32 head) { return sh.stats[p][head]; },
      [&](u32 p, u32 head) { return peer_float4(peer_address(&sh.tiles.acc[head][threadIdx.x], p)); },
      [&](u32 head, float4 r, float sum) {
        const float inv = reciprocal_approx(sum);
        if (whole) store_quad(a, seg.b, head, {r.x * inv, r.y * inv, r.z * inv, r.w * inv});
        else part[head * HEAD_QUADS] = r;
      });
  if (size > 1) cluster_arrive_relaxed(); // peers' accumulators are read no more
  if (!whole) {
    // Parts of a sequence meet in memory: the last cluster to arrive merges, each of its CTAs its own quads.
    if (threadIdx.x < HEADS) {
      float2 total = {NO_MAX, 0.0f};
      for (u32 p = 0; p < size; p++) total.x = fmaxf(total.x, sh.stats[p][threadIdx.x].x);
      for (u32 p = 0; p < size; p++)
        total.y += exp2_approx((sh.stats[p][threadIdx.x].x - total.x) * a.log2_scale) * sh.stats[p][threadIdx.x].y;
      a.part_stats[(slot * MAX_CLUSTER + rank) * HEADS + threadIdx.x] = total;
    }
    const u32 c0 = schedule.owner(seg.begin), parts = schedule.owner(seg.end - 1) - c0 + 1;
    __syncthreads();
    if (threadIdx.x == 0) {
      const u32 old = arrive_counter(a.arrivals + (i64)seg.b * MAX_CLUSTER + rank, parts - 1);
      sh.last = old == parts - 1;
    }
    __syncthreads();
    if (sh.last) merge_parts(sh, a, seg.b, c0, parts, seg.begin > schedule.begin(c0) ? 1 : 0);
  }
  if (size > 1) cluster_wait();
  return more;
}

// Empty sequences belong to no cluster's share.
__device__ __forceinline__ void zero_empty(const Args& a) {
#pragma unroll 1
  for (int b = blockIdx.x; b < a.batch; b += gridDim.x) {
    if (a.kv_indptr[b + 1] <= a.kv_indptr[b]) {
#pragma unroll 1
      for (int i = threadIdx.x; i < HEADS * LATENT / 8; i += THREADS)
        *(uint4*)(a.out + ((i64)b * HEADS * LATENT + 8 * i) * 2) = {0, 0, 0, 0};
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) mla_decode_mxfp4(const __grid_constant__ Args a) {
  SHARED_MEMORY(raw);
  Shared& sh = *(Shared*)raw;
  if ((smem_u32(raw) & 0xFFFFFF) != SHARED_BASE) { // above that is the rank in the cluster
    // The products would read something else. What nobody can take for an answer:
    for (i64 i = blockIdx.x * THREADS + threadIdx.x; i < (i64)a.batch * HEADS * LATENT; i += gridDim.x * THREADS)
      ((unsigned short*)a.out)[i] = 0x7FC0; // NaN
    return;
  }
  Thread t;
  t.lane = threadIdx.x & 31;
  t.warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x >> 5, 0);
  t.g = t.lane >> 2;
  t.t = t.lane & 3;
  const u32 rank = cluster_rank(), size = cluster_size();
  const u32 cluster = blockIdx.x / size, clusters = gridDim.x / size;
  if (threadIdx.x == 0) {
    for (int i = 0; i < WARPS; i++) mbarrier_init(smem_u32(&sh.full[i]), 1);
    fence_mbarrier_init();
  }

  // The first round of the search below, issued before anything depends on it.
  const int stride0 = (a.batch + 31) / 32;
  const int probe0 = a.kv_indptr[min(t.lane * stride0, a.batch)];
  const int base = a.kv_indptr[0], total = a.kv_indptr[a.batch] - base;

  if (t.warp == 1 && elect_one()) prefetch_likely_q(a, cluster, rank, size, clusters);

  Schedule schedule;
  schedule.grain = STEP * size;
  const u32 units = (total + schedule.grain - 1) / schedule.grain;
  schedule.share = units / clusters;
  schedule.longer = units - schedule.share * clusters;
  schedule.base = base;
  schedule.total = total;
  const int start = schedule.begin(cluster);
  if (start >= schedule.begin(cluster + 1)) { // the whole cluster leaves
    zero_empty(a);
    return;
  }

  // The last sequence that begins at or before `start`, and its bounds, which the last round mostly holds.
  int b = 0, begin, end;
  int probe = probe0;
#pragma unroll 1
  for (int span = a.batch, stride = stride0;;) {
    const bool before = t.lane * stride < span && probe - base <= start;
    const int found = __popc(__ballot_sync(0xFFFFFFFFu, before)) - 1;
    b += found * stride;
    span = min(stride, span - found * stride);
    if (span <= 1) {
      begin = (int)__shfl_sync(0xFFFFFFFFu, probe, found) - base;
      end = (int)__shfl_sync(0xFFFFFFFFu, probe, (found + 1) & 31) - base;
      if (b + 1 == a.batch) end = total;
      else if (stride > 1 || found == 31) end = a.kv_indptr[b + 1] - base;
      break;
    }
    stride = (span + 31) / 32;
    probe = a.kv_indptr[min(b + t.lane * stride, a.batch)];
  }

  u32 parity = 0;
  if (threadIdx.x == 0) {
    sh.schedule = schedule;
    sh.segment = make_segment(schedule, cluster, rank, size, b, start, begin, end);
  }
  __syncthreads();
  begin_segment(sh, t, a);
  zero_empty(a);
#pragma unroll 1
  while (true) {
    if (threadIdx.x == 0) { // the next one: the next sequence that is not empty
      const int stop = sh.segment.stop;
      sh.next.b = -1;
      if (stop < schedule.begin(cluster + 1)) {
        int next = sh.segment.b + 1, end;
        while ((end = a.kv_indptr[next + 1] - base) <= stop) next++;
        sh.next = make_segment(schedule, cluster, rank, size, next, stop, stop, end);
      }
    }
    bool again = false;
#pragma unroll 1
    do {
      attend(sh, t, a, parity, again);
      again = !again && barrier_any(!(magnitude(t) < SUM_LIMIT)); // NaN is out of range, too
      if (again) begin_segment(sh, t, a);
    } while (again);
    if (!end_segment(sh, t, a)) return;
    __syncthreads();
  }
}
