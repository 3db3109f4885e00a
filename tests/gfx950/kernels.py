"""Small Triton and Gluon kernels that between them use every part of the machine."""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import AMDMFMALayout, cdna4


@triton.jit
def masked_axpy(x, y, out, n, alpha, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < n
    value = alpha * tl.load(x + index, mask=inside) + tl.load(y + index, mask=inside)
    tl.store(out + index, value, mask=inside)


@triton.jit
def softmax_rows(x, out, COLUMNS: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, COLUMNS)
    value = tl.load(x + row * COLUMNS + column)
    weight = tl.exp(value - tl.max(value, 0))
    tl.store(out + row * COLUMNS + column, weight / tl.sum(weight, 0))


@triton.jit
def reduce_both_ways(x, row_sum, column_max, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    value = tl.load(x + row[:, None] * COLUMNS + column[None, :])
    tl.store(row_sum + row, tl.sum(value, 1))
    tl.store(column_max + column, tl.max(value, 0))


@triton.jit
def squared_exponential(x, out, BLOCK: tl.constexpr):
    # Nothing pads the second instruction, which reads the transcendental's result at once.
    index = tl.arange(0, BLOCK)
    value = tl.inline_asm_elementwise(
        "v_exp_f32 $0, $1\nv_mul_f32 $0, $0, $0", "=&v,v", [tl.load(x + index)], dtype=tl.float32, is_pure=True, pack=1
    )
    tl.store(out + index, value)


@triton.jit
def transpose(x, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    value = tl.load(x + row[:, None] * COLUMNS + column[None, :])
    tl.store(out + column[:, None] * ROWS + row[None, :], tl.trans(value))


@triton.jit
def matmul(a, b, out, M: tl.constexpr, N: tl.constexpr, K, BLOCK_K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, BLOCK_K)
    total = tl.zeros((M, N), tl.float32)
    for start in range(0, K, BLOCK_K):
        left = tl.load(a + m[:, None] * K + (start + k)[None, :])
        right = tl.load(b + (start + k)[:, None] * N + n[None, :])
        total = tl.dot(left, right, total)
    tl.store(out + m[:, None] * N + n[None, :], total)


@triton.jit
def scaled_matmul(
    a, a_scale, b, b_scale, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    FORMAT_A: tl.constexpr, FORMAT_B: tl.constexpr,
):  # fmt: skip
    BYTES_A: tl.constexpr = K // 2 if FORMAT_A == "e2m1" else K
    BYTES_B: tl.constexpr = K // 2 if FORMAT_B == "e2m1" else K
    m, n, block = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K // 32)
    left = tl.load(a + m[:, None] * BYTES_A + tl.arange(0, BYTES_A)[None, :])
    right = tl.load(b + n[None, :] * BYTES_B + tl.arange(0, BYTES_B)[:, None])
    left_scale = tl.load(a_scale + m[:, None] * (K // 32) + block[None, :])
    right_scale = tl.load(b_scale + n[:, None] * (K // 32) + block[None, :])
    total = tl.dot_scaled(left, left_scale, FORMAT_A, right, right_scale, FORMAT_B)
    tl.store(out + m[:, None] * N + n[None, :], total)


@triton.jit
def weighted_fp4_sum(weight, codes, out, N: tl.constexpr, D: tl.constexpr):
    # fp8 weights [16, N] times fp4 codes [N, D], packed along D: the transposing LDS read.
    h, n, d = tl.arange(0, 16), tl.arange(0, N), tl.arange(0, D)
    left = tl.load(weight + h[:, None] * N + n[None, :])
    right = tl.load(codes + n[:, None] * (D // 2) + tl.arange(0, D // 2)[None, :])
    total = tl.dot_scaled(left, None, "e4m3", right, None, "e2m1", rhs_k_pack=False)
    tl.store(out + h[:, None] * D + d[None, :], total)


@triton.jit
def sum_by_the_last_block(x, partial, count, out, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    block = tl.program_id(0)
    tl.store(partial + block, tl.sum(tl.load(x + block * BLOCK + tl.arange(0, BLOCK)), 0))
    before = tl.atomic_add(count, 1, sem="acq_rel")
    if before == BLOCKS - 1:
        total = tl.sum(tl.load(partial + tl.arange(0, BLOCKS), cache_modifier=".cg"), 0)
        tl.store(out, total)
        tl.store(count, 0)


@gluon.jit
def fp4_scores_and_values(codes, scales, queries, scores, values, TOKENS: gl.constexpr, WARPS: gl.constexpr):
    """One step of attention over packed fp4: an asynchronous copy of the codes [TOKENS, 64 bytes] into LDS, scores by
    the scaled matrix core against fp8 queries [16, 128], and the codes as bfloat16 through the scaled conversion."""
    SCORE: gl.constexpr = AMDMFMALayout(
        version=4, instr_shape=[16, 16, 128], transposed=False, warps_per_cta=[WARPS, 1]
    )
    KEY: gl.constexpr = gl.DotOperandLayout(0, SCORE, 16)
    QUERY: gl.constexpr = gl.DotOperandLayout(1, SCORE, 16)
    COPY: gl.constexpr = gl.BlockedLayout([1, 4], [16, 4], [WARPS, 1], [1, 0])
    SHARED: gl.constexpr = gl.PaddedSharedLayout.with_identity_for([[256, 4]], [TOKENS, 16], [1, 0])
    WORDS: gl.constexpr = gl.BlockedLayout([1, 1], [4, 16], [WARPS, 1], [1, 0])

    tile = gl.allocate_shared_memory(gl.int32, [TOKENS, 16], SHARED)
    token = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, COPY))
    word = gl.arange(0, 16, layout=gl.SliceLayout(0, COPY))
    cdna4.async_copy.buffer_load_to_shared(tile, codes, token[:, None] * 16 + word[None, :])
    cdna4.async_copy.commit_group()

    head = gl.arange(0, 16, layout=gl.SliceLayout(0, QUERY))
    dim = gl.arange(0, 128, layout=gl.SliceLayout(1, QUERY))
    query = gl.load(queries + head[None, :] * 128 + dim[:, None])
    KEY_SCALE: gl.constexpr = cdna4.get_mfma_scale_layout(KEY, [TOKENS, 4])
    QUERY_SCALE: gl.constexpr = cdna4.get_mfma_scale_layout(QUERY, [16, 4])
    row = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, KEY_SCALE))
    block = gl.arange(0, 4, layout=gl.SliceLayout(0, KEY_SCALE))
    key_scale = gl.load(scales + row[:, None] * 4 + block[None, :])
    query_scale = gl.full([16, 4], 127, gl.uint8, QUERY_SCALE)

    cdna4.async_copy.wait_group(0)
    packed = tile.load(WORDS)
    t = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, WORDS))
    w = gl.arange(0, 16, layout=gl.SliceLayout(0, WORDS))
    factor = gl.load(scales + t[:, None] * 4 + (w // 4)[None, :]).to(gl.int32) << 23
    factor = factor.to(gl.float32, bitcast=True)
    out = values + t[:, None] * 64 + w[None, :] * 4
    gl.store(out, convert(packed, factor, ""))
    gl.store(out + 1, convert(packed, factor, " op_sel:[1,0,0]"))
    gl.store(out + 2, convert(packed, factor, " op_sel:[0,1,0]"))
    gl.store(out + 3, convert(packed, factor, " op_sel:[1,1,0]"))

    key = gl.convert_layout(unpack_bytes(packed), KEY)
    zero = gl.zeros([TOKENS, 16], gl.float32, SCORE)
    product = cdna4.mfma_scaled(key, key_scale, "e2m1", query, query_scale, "e4m3", zero)
    m = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, SCORE))
    h = gl.arange(0, 16, layout=gl.SliceLayout(0, SCORE))
    gl.store(scores + m[:, None] * 16 + h[None, :], product)


@gluon.jit
def convert(packed, factor, SELECT: gl.constexpr):
    return gl.inline_asm_elementwise(
        "v_cvt_scalef32_pk_bf16_fp4 $0, $1, $2" + SELECT, "=v,v,v", [packed, factor], gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def unpack_bytes(words):
    even = gl.join(words & 255, (words >> 16) & 255)
    odd = gl.join((words >> 8) & 255, (words >> 24) & 255)
    return gl.join(even, odd).reshape([words.shape[0], 4 * words.shape[1]]).to(gl.uint8)
