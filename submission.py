#!POPCORN leaderboard amd-mixed-mla
#!POPCORN gpu MI355X
"""MXFP4 MLA decode: every query token attends to every token of its sequence, each call, whatever the mode.

q    bf16 [total_q, heads, 576]    kv codes  e2m1 x 2 [total_kv, 288]      kv_indptr int [batch + 1]
out  bf16 [total_q, heads, 512]    kv scales E8M0 [>= total_kv, >= 18]     lse       f32 [total_q, heads]
custom_kernel(data) -> unpack -> pick (once per shape) -> run
run:   codes, scales --16 B a lane--> tile [BLOCK_N, 576] --decode--> K
       S = K q^T * scale     running max m, sum l     P = exp2(S - m)     O = K[:, :512]^T P  (V is the tile just used)
       splits 0 .. n-1, each (O / l, lse) --log-sum-exp merge--> out, lse
pick:  candidates (Triton plans, aiter, modules beside this file) -> check against float32 and the fallback -> time cold
python eval.py test | benchmark: check this file, or time it, on whatever this machine has
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import logging
import math
import os
import threading
import time
import types
import warnings
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from task import input_t, output_t

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.amd import AMDMFMALayout, cdna4
    from triton.experimental.gluon.language.amd.cdna4 import async_copy
except ImportError:
    gluon = gl = None
_MEMORY: Any = getattr(gl, "shared_memory_descriptor", None)
_view: Any = getattr(_MEMORY, "reinterpret", None) or getattr(_MEMORY, "_reinterpret", None)  # renamed in Triton 3.9
# 3.9 would keep sums in accumulation registers: more moves, and hazards that it does not see at inline assembly.
GLUON_OPTIONS = {"llvm_fn_attrs": "amdgpu-agpr-alloc=0"} if hasattr(_MEMORY, "reinterpret") else {}
GLUON = _view is not None  # else the plain bodies remain
gluon_jit, constexpr_function = (gluon.jit, gluon.constexpr_function) if GLUON else (lambda f: f, lambda f: f)

LATENT_DIM, QK_DIM = 512, 576  # dims 0..511: K and V; dims 512..575, the RoPE part: K only
ROW_BYTES, ROW_SCALES = QK_DIM // 2, QK_DIM // 32  # of a token: two codes a byte, one E8M0 byte per 32 values
HEAD_COUNTS, MAX_SPLITS = (8, 16, 32, 64, 128), 64
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

REL_L2_LIMIT = {"mxfp4": 1e-2, "fp8": 0.10}  # per sequence, against float32 attention over the cache that was read
PICK_BUDGET_S, TIMED_RUNS, TIE, MAX_PICKS = 20.0, 7, 0.02, 512  # TIE: by this share the fallback must be beaten
log = logging.getLogger("mla")


def _expect(condition: bool, name: str, expected: str, got: object) -> None:
    if not condition:
        if isinstance(got, Tensor):
            got = f"{got.dtype} {list(got.shape)} strides {got.stride()} on {got.device}"
        raise ValueError(f"{name}: expected {expected}, got {got}")


@dataclass(frozen=True, slots=True)
class Plan:
    """How the Triton kernels cut one shape."""

    body: str = "portable"  # any GPU, interpreter | on gfx950 "scaled" (dot_scaled reads FP4) | "gfx950" (Gluon, too)
    num_splits: int = 1  # programs that share one sequence
    num_warps: int = 4  # warps (waves) per program; "gfx950" gives each 32 tokens of a tile
    block_n: int = 64  # tokens per tile

    def __post_init__(self) -> None:
        for name, allowed in (("body", ("portable", "scaled", "gfx950")), ("num_splits", range(1, MAX_SPLITS + 1)),
                              ("num_warps", (1, 2, 4, 8)), ("block_n", (16, 32, 64, 128, 256))):  # fmt: skip
            _expect(getattr(self, name) in allowed, f"Plan.{name}", f"one of {allowed}", repr(getattr(self, name)))


@dataclass(frozen=True, slots=True)
class Problem:
    """One shape on one device. The lengths are those seen at the pick: a hint for speed, never for correctness."""

    batch: int
    total_q: int
    heads: int
    total_kv: int  # rows of the cache
    kv_len_max: int
    kv_len_min: int
    arch: str  # "gfx950", "gfx942", "sm_90", ..., "cpu"
    num_cus: int  # compute units
    device: torch.device
    kv_row_bytes: int = ROW_BYTES  # stride of the codes; 0 if they do not begin at a multiple of 16 bytes
    scale_strides: tuple[int, ...] = (ROW_SCALES, 1)
    has_fp8: bool = True
    kv_first: int = 0  # token at which the first sequence begins

    def bodies(self) -> list[str]:
        """The kernel bodies that can read what lies here, the most promising first."""
        fits = (self.heads, self.total_q, self.kv_row_bytes, self.scale_strides[1]) == (16, self.batch, ROW_BYTES, 1)
        own = ["gfx950", "scaled"] if GLUON and fits else ["scaled"]
        return [*own, "portable"] if self.arch == "gfx950" else ["portable"]

    def fitting(self, plan: Plan) -> Plan:
        """The plan itself; a ValueError if its body cannot run here."""
        fits = plan.body in self.bodies() and (plan.body != "gfx950" or 32 < plan.block_n == 32 * plan.num_warps)
        _expect(fits, "plan", f"one for {self}; with body gfx950 2, 4 or 8 warps of 32 tokens each", plan)
        return plan


# gfx950, ranked (batch, kv): waves, splits; `eval.py inspect` predicts the us (docs/gfx950.md), no card has timed them.
RANKED_GFX950 = {(4, 1024): (2, 16), (32, 1024): (8, 4), (64, 1024): (8, 4), (256, 1024): (8, 1),
                 (4, 8192): (8, 32), (32, 8192): (8, 8), (64, 8192): (8, 4), (256, 8192): (8, 1)}  # fmt: skip


def choose_plan(problem: Problem, body: str | None = None) -> Plan:
    """A ranked plan, or one that gives every compute unit work and no split under two tiles; pure."""
    body = body or problem.bodies()[0]
    if body == "gfx950":
        waves, splits = RANKED_GFX950.get((problem.batch, problem.kv_len_max), (8, 0))
        plan = Plan(body, num_warps=waves, block_n=32 * waves, num_splits=max(1, splits))
        if splits:
            return plan
        wanted = problem.num_cus // problem.batch  # one workgroup of 8 waves fills a compute unit's LDS
    else:
        warps = 8 if problem.arch.startswith("sm_") else 4  # on NVIDIA 4 spill at 64 tokens
        plan = Plan(body, num_warps=warps, block_n=128 if body == "scaled" else 64)
        # Two resident programs a compute unit hide each other's barriers and exponentials.
        wanted = 2 * problem.num_cus // (problem.total_q * triton.cdiv(problem.heads, 16))
    tiles = triton.cdiv(problem.kv_len_max, plan.block_n)
    return replace(plan, num_splits=max(1, min(wanted, tiles // 2, MAX_SPLITS)))


def candidate_plans(problem: Problem) -> list[Plan]:
    """The chosen plan first, then the few others worth a measurement."""
    plan, *others = (choose_plan(problem, body) for body in problem.bodies())
    if problem.device.type == "cpu":  # nothing can be timed there
        return [plan]
    half = replace(plan, num_splits=max(1, plan.num_splits // 2))
    return list(dict.fromkeys((plan, half, *(others or [replace(plan, block_n=32, num_warps=4)]))))


@triton.jit
def _load_tile(
    kv_row, scale_row, valid,  # [BLOCK_N, 1]: uint8 pointers to the tokens' codes and scales, bool
    scale_col_stride, FIRST: tl.constexpr, SPAN: tl.constexpr, DIMS: tl.constexpr):  # fmt: skip
    """Codes [BLOCK_N, DIMS / 2] and scales [BLOCK_N, DIMS / 32] of dims FIRST + i % SPAN, zeros where not valid."""
    byte = FIRST // 2 + tl.arange(0, DIMS // 2)[None, :] % (SPAN // 2)
    block = FIRST // 32 + tl.arange(0, DIMS // 32)[None, :] % (SPAN // 32)
    codes = tl.load(kv_row + byte, mask=valid, other=0)
    return codes, tl.load(scale_row + block * scale_col_stride, mask=valid, other=0)


@triton.jit
def _decode_tile(codes, scales, SCALED: tl.constexpr, DTYPE: tl.constexpr):
    """DTYPE [BLOCK_N, DIMS]: with _load_tile the cache format's only home."""
    BLOCK_N: tl.constexpr = codes.shape[0]
    BLOCKS: tl.constexpr = scales.shape[1]
    exponent = scales.to(tl.int32)
    if SCALED:
        # gfx950 makes two bf16 of a byte; of the float32 scale it takes the exponent bits as E8M0. In the byte's own
        # register: blind to hazards of inline assembly, the compiler might take one that a product still reads.
        scale = tl.broadcast_to((exponent << 23).to(tl.float32, bitcast=True)[:, :, None], (BLOCK_N, BLOCKS, 16))
        pair = tl.inline_asm_elementwise("v_cvt_scalef32_pk_bf16_fp4 $0, $1, $2", "=v,0,v", [
            codes.to(tl.int32), tl.reshape(scale, codes.shape)], tl.int32, is_pure=True, pack=1)  # fmt: skip
        value = tl.join(pair.to(tl.int16), (pair >> 16).to(tl.int16)).to(tl.bfloat16, bitcast=True)
    else:
        # 2^(byte - 127): byte 0 is the denormal 2^-127 and 255 is NaN, so both carry a mantissa bit.
        special = (((exponent + 1) & 0xFE) == 0).to(tl.int32)
        scale = ((exponent << 23) | (special << 22)).to(tl.float32, bitcast=True)
        nibble = tl.join(codes & 0xF, codes >> 4).to(tl.int32)  # [BLOCK_N, DIMS / 2, 2], the even dim's code is low
        # The sign goes to bit 31, exponent and mantissa to bits 24..22: as float32 that is the value times 2^-126.
        value = (((nibble & 8) << 28) | ((nibble & 7) << 22)).to(tl.float32, bitcast=True) * 8.507059173023462e37
        value = tl.reshape(value, (BLOCK_N, BLOCKS, 32)) * scale[:, :, None]
    return tl.reshape(value, (BLOCK_N, BLOCKS * 32)).to(DTYPE)


@triton.jit
def _quantize_q(x, AXIS: tl.constexpr):
    """float32 [.., 32, ..], 32 along AXIS -> two fp8 terms, together all 8 bits of a bf16, and E8M0 [.., ..]."""
    # A block with an infinity or a NaN gets the NaN scale, which reaches its own head only.
    exponent = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=AXIS) >> 23
    scale = tl.where(exponent == 255, 255, tl.maximum(exponent - 7, 0))
    x *= tl.expand_dims(((254 - scale) << 23).to(tl.float32, bitcast=True), AXIS)
    first = x.to(tl.float8e4nv)
    return first, (x - first.to(tl.float32)).to(tl.float8e4nv), scale.to(tl.uint8)


@triton.jit
def _split_q(q):
    """bf16 [DIMS, 16] -> two fp8 terms [DIMS, 16] and their scales [16, DIMS / 32]."""
    first, second, scale = _quantize_q(tl.reshape(q.to(tl.float32), (q.shape[0] // 32, 32, 16)), 1)
    return tl.reshape(first, q.shape), tl.reshape(second, q.shape), tl.trans(scale)


@triton.jit
def _attend_kernel(
    q_ptr, kv_ptr,  # bf16 [total_q, heads, 576], uint8 [total_kv, 288]
    scale_ptr, kv_indptr_ptr,  # uint8 [>= total_kv, >= 18], int32 | int64 [batch + 1]
    out_ptr, lse_ptr,  # bf16 | float32 [total_q, num_splits, heads, 512], float32 [.., heads], natural log, or None
    kv_row_stride, scale_row_stride, scale_col_stride, num_splits, q_len, qk_scale,  # sm_scale * log2(e)
    HEADS: tl.constexpr, BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr, SCALED: tl.constexpr,  # latent dims at a time; matrix cores take K as FP4, Q as two fp8 terms
    DTYPE: tl.constexpr,  # bfloat16; float32 in the interpreter, which computes bf16 on raw bits
):  # fmt: skip
    # Axis 0 runs fastest, over sequences: with batch % 8 == 0 the splits of one share one of 8 dies and its L2.
    row, split = tl.program_id(0), tl.program_id(1)  # query token, split
    first_token = tl.load(kv_indptr_ptr + row // q_len).to(tl.int64)
    # Query token j of q_len sees the cache up to and including its own position.
    length = tl.load(kv_indptr_ptr + row // q_len + 1).to(tl.int64) - first_token - (q_len - 1 - row % q_len)
    length = tl.maximum(length, 0).to(tl.int32)
    tiles = tl.cdiv(length, BLOCK_N)
    begin = (tiles * split) // num_splits * BLOCK_N
    end = tl.minimum((tiles * (split + 1)) // num_splits * BLOCK_N, length)
    head = tl.program_id(2) * 16 + tl.arange(0, 16)  # 16 are what matrix units want
    is_head = head < HEADS
    q_base = q_ptr + row.to(tl.int64) * (HEADS * 576) + head[None, :] * 576
    dim = tl.arange(0, CHUNK)[:, None]
    q_latent, acc = (), ()
    for c in tl.static_range(512 // CHUNK):
        q = tl.load(q_base + c * CHUNK + dim, mask=is_head[None, :], other=0.0)
        q_latent += (_split_q(q) if SCALED else q.to(DTYPE),)  # type: ignore[assignment]
        acc += (tl.zeros([CHUNK, 16], tl.float32),)  # type: ignore[assignment]
    ROPE: tl.constexpr = 128 if SCALED else 64  # one step of the matrix cores takes the 64 dims against both terms
    rope_dim = tl.arange(0, ROPE)[:, None]
    q_rope = tl.load(q_base + 512 + rope_dim % 64, mask=is_head[None, :], other=0.0).to(DTYPE)  # [ROPE, 16]
    if SCALED:
        first, second, q_scale = _split_q(q_rope)
        q_rope = tl.where(rope_dim < 64, first.to(tl.float32), second.to(tl.float32)).to(tl.float8e4nv)
    m = tl.full([16], -float("inf"), tl.float32)
    l = tl.zeros([16], tl.float32)
    for start in range(begin, end, BLOCK_N):
        token = first_token + start + tl.arange(0, BLOCK_N)[:, None]  # int64
        valid = token < first_token + end
        kv_row = kv_ptr + token * kv_row_stride
        scale_row = scale_ptr + token * scale_row_stride
        # Tokens are the rows of both products, so that the warps share the work: 16 heads alone would not fill them.
        k, e = _load_tile(kv_row, scale_row, valid, scale_col_stride, 512, 64, ROPE)
        if SCALED:
            s = tl.dot_scaled(k, e, "e2m1", q_rope, q_scale, "e4m3")
        else:
            s = tl.dot(_decode_tile(k, e, SCALED, DTYPE), q_rope)
        latent = ()
        for c in tl.static_range(512 // CHUNK):
            k, e = _load_tile(kv_row, scale_row, valid, scale_col_stride, c * CHUNK, CHUNK, CHUNK)
            latent += (_decode_tile(k, e, SCALED, DTYPE),)  # type: ignore[assignment]
            if SCALED:
                s = tl.dot_scaled(k, e, "e2m1", q_latent[c][0], q_latent[c][2], "e4m3", s)
                s = tl.dot_scaled(k, e, "e2m1", q_latent[c][1], q_latent[c][2], "e4m3", s)
            else:
                s = tl.dot(latent[c], q_latent[c], s)
        s = tl.where(valid, s, -float("inf"))  # [BLOCK_N, 16], subtracted before it is scaled: that is exact at the top
        m_next = tl.maximum(m, tl.max(s, 0))
        p = tl.exp2((s - m_next[None, :]) * qk_scale)  # NaN if every score so far is -inf, as softmax has it
        kept = l * tl.exp2((m - m_next) * qk_scale)
        l, m = kept + tl.sum(p, 0), m_next
        inverse = 1.0 / l  # acc is a mean of V at all times: no sum can overflow
        p, kept, acc_next = p * inverse[None, :], kept * inverse, ()
        for c in tl.static_range(512 // CHUNK):
            acc_next += (tl.dot(tl.trans(latent[c]), p.to(DTYPE), acc[c] * kept[None, :]),)  # type: ignore[assignment]
        acc = acc_next
    slot = (row.to(tl.int64) * num_splits + split) * HEADS + head
    if lse_ptr is not None:
        tl.store(lse_ptr + slot, m * (qk_scale * 0.6931471805599453) + tl.log2(l) * 0.6931471805599453, mask=is_head)
    # An empty split stores its lse alone: at weight 0 the merge does not read the rest.
    mask = (head < tl.where((begin < end) | (num_splits == 1), HEADS, 0))[None, :]
    for c in tl.static_range(512 // CHUNK):
        tl.store(out_ptr + slot[None, :] * 512 + c * CHUNK + dim, acc[c].to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _merge_kernel(
    partial_out_ptr, partial_lse_ptr,  # float32, as _attend_kernel leaves them
    out_ptr, lse_ptr,  # bf16 [total_q, heads, 512], float32 [total_q, heads] or None
    num_splits, HEADS: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr,  # SPLITS: up to a power of two
):  # fmt: skip
    """Merge one (query token, head), all splits of BLOCK_D dims at once; an empty one weighs 0, NaN stays NaN."""
    out_slot = tl.program_id(0).to(tl.int64)
    dim = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    split = tl.arange(0, SPLITS)
    slot = (out_slot // HEADS * num_splits + split) * HEADS + out_slot % HEADS
    lse = tl.load(partial_lse_ptr + slot, mask=split < num_splits, other=-float("inf"))
    peak = tl.maximum(tl.max(lse, 0), -3.4028234e38)  # finite
    weight = tl.exp(lse - peak)
    total = tl.sum(weight, 0)
    partial = tl.load(partial_out_ptr + slot[:, None] * 512 + dim, mask=(weight != 0.0)[:, None], other=0.0)
    out = tl.sum(partial * (weight / tl.where(total == 0.0, 1.0, total))[:, None], 0)
    tl.store(out_ptr + out_slot * 512 + dim, out.to(out_ptr.dtype.element_ty))
    if lse_ptr is not None and tl.program_id(1) == 0:
        tl.store(lse_ptr + out_slot, peak + tl.log(total))


# docs/gfx950.md tells how this maps to the hardware. wave = 2 pair + half. A tile's rows in LDS are 64 pair + 4 unit +
# 2 half + j for row `unit` = 4 g + r of matrix tile j. Block 4 g + step of a row lies at position 4 step + g: a lane's
# four scales are neighbours.


@constexpr_function
def _fields(shape, *places):
    """Layout in which each axis lies wholly in registers, lanes or waves: three lists of axes, fastest first."""
    n = range(len(shape))
    bases = [[[(a == x) << bit for a in n] for x in axes for bit in range(9) if 1 << bit < shape[x]] for axes in places]
    return gl.DistributedLinearLayout(*bases, [], list(shape))


@constexpr_function
def _keep(layout, rank, *axes):
    """Layout of what is left when slices or reductions remove all but these axes."""
    for axis in reversed(range(rank)):
        layout = layout if axis in axes else gl.SliceLayout(axis, layout)
    return layout


@constexpr_function
def _rows(shape, interval, padding):
    return gl.PaddedSharedLayout.with_identity_for([[interval, padding]], list(shape), list(range(len(shape)))[::-1])


@constexpr_function
def _q_rows(columns):
    """fp8 [16, columns]: the 1 KiB that a wave loads with one instruction (64 columns of all heads) is contiguous."""
    column = [[0, 1 << bit] for bit in range(columns.bit_length() - 1)]
    bases = column[:6] + [[1 << bit, 0] for bit in range(4)] + column[6:]
    return gl.PaddedSharedLayout([[1024, 16]], bases, [], [16, columns])


@gluon_jit
def _index(shape: gl.constexpr, layout: gl.constexpr, terms: gl.constexpr, start=0):
    """start + the sum of index * stride over terms (axis, stride); stride 0 just broadcasts."""
    x = start
    for t in gl.static_range(len(terms)):
        i = gl.arange(0, shape[terms[t][0]], layout=_keep(layout, len(shape), terms[t][0]))
        for a in gl.static_range(len(shape)):
            i = gl.expand_dims(i, a) if a != terms[t][0] else i
        x += i * terms[t][1]
    return x


@gluon_jit
def _same(x, layout: gl.constexpr):
    """x under another layout that moves nothing."""
    return gl.convert_layout(x, layout, assert_trivial=True)


@gluon_jit
def _token(row, WAVES: gl.constexpr):
    """Token of the tile in this row of LDS: four rows are one copy instruction, number unit // WAVES of its wave."""
    return row // 4 % WAVES * 32 + row // 4 // WAVES * 4 + row % 4


@gluon_jit
def _copy_tile(tile, kv_ptr, row, WAVES: gl.constexpr):
    # int32 [tokens, 64] of LDS <- latent words of the tokens, 16 bytes a lane
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [4, 16], [WAVES, 1], [1, 0])
    token = _token(gl.arange(0, WAVES * 32, layout=gl.SliceLayout(1, LAYOUT)), WAVES)
    word = gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
    word = word // 4 % 4 * 16 + word // 16 * 4 + word % 4
    async_copy.buffer_load_to_shared(tile, kv_ptr + row.to(gl.int64) * 72, token[:, None] * 72 + word[None, :])
    async_copy.commit_group()


@gluon_jit
def _load_bytes(ptr, row, PITCH: gl.constexpr, FIRST: gl.constexpr, FIELD: gl.constexpr, WAVES: gl.constexpr):
    """Bytes from FIRST on of the tile's rows: [pair, half, j, unit, *FIELD], where FIELD is (copies, lanes, bytes)."""
    SHAPE: gl.constexpr = (WAVES // 2, 2, 2, 16, FIELD[0], FIELD[1], FIELD[2])
    LAYOUT: gl.constexpr = _fields(SHAPE, [6, 2], [3, 5, 4], [1, 0])
    token = _token(_index(SHAPE, LAYOUT, ((0, 64), (1, 2), (3, 4))), WAVES)
    lanes = token * PITCH + _index(SHAPE, LAYOUT, ((4, 0), (5, FIELD[2])), FIRST)
    # The empty instruction keeps the sum next to its load, where what registers add becomes an immediate offset.
    lanes = gl.inline_asm_elementwise("", "=v,0", [lanes], dtype=gl.int32, is_pure=False, pack=1)
    offsets = lanes + _index(SHAPE, LAYOUT, ((2, PITCH), (6, 1)))
    VECTOR: gl.constexpr = FIELD[2] if PITCH % FIELD[2] == 0 else 2 if PITCH % 2 == 0 else 1
    offsets = gl.multiple_of(offsets, [1, 1, 1, 1, 1, 1, VECTOR])
    offsets = gl.max_contiguous(offsets, [1, 1, 1, 1, 1, 1, VECTOR])
    return cdna4.buffer_load(ptr + row.to(gl.int64) * PITCH, offsets)


@gluon_jit
def _attend_gfx950_kernel(
    q_ptr, kv_ptr, scale_ptr, kv_indptr_ptr, out_ptr, lse_ptr,  # as in _attend_kernel
    qk_scale,  # kv_ptr: int32 [>= 32 * WAVES, 72], 16-byte aligned
    SCALE_STRIDE: gl.constexpr, NUM_SPLITS: gl.constexpr, WAVES: gl.constexpr,
    NUM_DIES: gl.constexpr,  # workgroups go round-robin over so many dies; it divides the batch
):  # fmt: skip
    H: gl.constexpr = 16
    BN: gl.constexpr = WAVES * 32
    PAIRS: gl.constexpr = WAVES // 2
    S_LAYOUT: gl.constexpr = AMDMFMALayout(4, [16, 16, 128], False, [WAVES, 1], tiles_per_warp=[2, 1])
    K_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, S_LAYOUT, 16)
    Q_LAYOUT: gl.constexpr = gl.DotOperandLayout(1, S_LAYOUT, 16)
    O_LAYOUT: gl.constexpr = AMDMFMALayout(4, [16, 16, 32], False, [WAVES, 1, 1])
    V_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 8)
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(1, O_LAYOUT, 8)
    M_LAYOUT: gl.constexpr = _keep(O_LAYOUT, 3, 2)
    LOAD_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [16, 4], [1, WAVES], [1, 0])
    K_SHAPE: gl.constexpr = (PAIRS, 16, 2, 2, 4, 4, 16)  # pair, unit, half, j, step, g, byte
    K_FIELDS: gl.constexpr = _fields(K_SHAPE, [6, 4, 3], [1, 5], [2, 0])
    MAX_FIELDS: gl.constexpr = _fields([PAIRS, 2, 4, H], [], [3, 2], [1, 0])  # pair, half, g, head
    P_SHAPE: gl.constexpr = (PAIRS, 2, 2, H, 4, 8)  # pair, half of the dims, half of the tokens, head, g, (j, r)
    P_FIELDS: gl.constexpr = _fields(P_SHAPE, [5, 2], [3, 4], [1, 0])
    V_SHAPE: gl.constexpr = (PAIRS, 4, 4, 2, 2, 2, 8, 2, 2)  # pair, g, r, half, j, half of dims, position, part, word
    V_FIELDS: gl.constexpr = _fields(V_SHAPE, [8, 2, 4, 3], [7, 6, 1], [5, 0])
    VS_SHAPE: gl.constexpr = (PAIRS, 2, 8, 2, 4, 2, 2)  # pair, half of the dims, position, part, g, half, j
    VS_FIELDS: gl.constexpr = _fields(VS_SHAPE, [6, 5], [3, 2, 4], [1, 0])
    VS_BYTES: gl.constexpr = (PAIRS, 4, 4, 4, 2, 2, 4)  # pair, step, block % 4, g, half, j, r
    pid = gl.program_id(0)
    seq = pid % NUM_DIES + pid // (NUM_DIES * NUM_SPLITS) * NUM_DIES
    split = pid // NUM_DIES % NUM_SPLITS
    begin, end = gl.load(kv_indptr_ptr + seq), gl.load(kv_indptr_ptr + seq + 1)
    chunk = gl.cdiv(gl.cdiv(end - begin, BN), NUM_SPLITS) * BN
    begin = gl.minimum(begin + split * chunk, end)
    end = gl.minimum(begin + chunk, end)
    lds = gl.allocate_shared_memory(gl.int32, [2, BN, 64], _rows([BN, 64], 256, 4))  # two tiles
    q_lds = gl.allocate_shared_memory(gl.float8e4nv, [2, H, 512], _q_rows(512))  # two terms of latent Q
    qr_lds = gl.allocate_shared_memory(gl.float8e4nv, [H, 128], _q_rows(128))
    q_ptr += seq.to(gl.int64) * (H * 576)
    kv8_ptr = kv_ptr.to(gl.pointer_type(gl.uint8), bitcast=True)
    head = gl.arange(0, H, layout=gl.SliceLayout(1, LOAD_LAYOUT))[:, None] * 576
    latent = cdna4.buffer_load(q_ptr, head + gl.arange(0, 512, layout=gl.SliceLayout(0, LOAD_LAYOUT))[None, :])
    rope = cdna4.buffer_load(q_ptr, head + 512 + gl.arange(0, 128, layout=gl.SliceLayout(0, LOAD_LAYOUT))[None, :] % 64)
    latent = latent.reshape([H, 4, 4, 32]).permute([0, 2, 1, 3]).reshape([H, 16, 32])
    q1, q2, q_scale = _quantize_q(latent.to(gl.float32), 2)
    r1, r2, r_scale = _quantize_q(rope.to(gl.float32).reshape([H, 4, 32]), 2)
    q_lds.index(0).store(q1.reshape([H, 512]))
    q_lds.index(1).store(q2.reshape([H, 512]))
    is_second = gl.arange(0, 4, layout=_keep(r1.type.layout, 3, 1))[None, :, None] >= 2
    qr_lds.store(gl.where(is_second, r2.to(gl.float32), r1.to(gl.float32)).to(gl.float8e4nv).reshape([H, 128]))
    qr = qr_lds.permute([1, 0]).load(Q_LAYOUT)
    q_scale = gl.convert_layout(q_scale, cdna4.get_mfma_scale_layout(Q_LAYOUT, [H, 16]))
    r_scale = gl.convert_layout(r_scale, cdna4.get_mfma_scale_layout(Q_LAYOUT, [H, 4]))
    p_lds = gl.allocate_shared_memory(
        gl.bfloat16, [PAIRS, 2, H, 4, 8], gl.SwizzledSharedLayout(1, 1, 1, [4, 3, 2, 1, 0])
    )
    vs_lds = gl.allocate_shared_memory(gl.uint8, VS_BYTES, gl.SwizzledSharedLayout(1, 1, 1, [6, 5, 4, 3, 2, 1, 0]))
    zero = gl.zeros([WAVES, 32, H], gl.float32, O_LAYOUT)  # O for each of 8 codes of a word, after the sum of P
    start = (gl.zeros([WAVES, 16, H], gl.float32, O_LAYOUT), zero, zero, zero, zero, zero, zero, zero, zero)
    acc = start
    m = gl.full([H], -3.4028234e38, gl.float32, M_LAYOUT)
    again, first_pass = begin < end, True
    while again:
        acc = start
        peak = gl.full([PAIRS, 2, 4, H], -3.4028234e38, gl.float32, MAX_FIELDS)
        # The last tile is moved back to end where the segment ends (its first tokens are masked): no masked loads
        next_row = gl.maximum(gl.minimum(begin, end - BN), 0)
        _copy_tile(lds.index(0), kv_ptr, next_row, WAVES)
        kr = _load_bytes(kv8_ptr, next_row, 288, 256, (2, 2, 16), WAVES)  # twice: a step takes both terms of Q
        rs = _load_bytes(scale_ptr, next_row, SCALE_STRIDE, 16, (2, 2, 1), WAVES)
        ks = _load_bytes(scale_ptr, next_row, SCALE_STRIDE, 0, (1, 4, 4), WAVES)
        slot = 0
        for t in range(begin, end, BN):
            row, next_row = next_row, gl.maximum(gl.minimum(t + BN, end - BN), 0)
            tile, slot = lds.index(slot), 1 - slot
            async_copy.wait_group(0)
            k = async_copy.load_shared_relaxed(_view(tile, gl.uint8, K_SHAPE, _rows(K_SHAPE, 1024, 16)), K_FIELDS)
            k = _same(k.permute([0, 2, 3, 1, 4, 5, 6]).reshape([BN, 256]), K_LAYOUT)
            kr = _same(kr.reshape([BN, 64]), K_LAYOUT)
            k_scale = ks.permute([0, 1, 2, 3, 4, 6, 5]).reshape([BN, 16])
            k_scale = _same(k_scale, cdna4.get_mfma_scale_layout(K_LAYOUT, [BN, 16]))
            kr_scale = _same(rs.reshape([BN, 4]), cdna4.get_mfma_scale_layout(K_LAYOUT, [BN, 4]))
            s = gl.zeros([BN, H], gl.float32, S_LAYOUT)
            for term in gl.static_range(2):
                q = async_copy.load_shared_relaxed(q_lds.index(term).permute([1, 0]), Q_LAYOUT)
                s = cdna4.mfma_scaled(k, k_scale, "e2m1", q, q_scale, "e4m3", s)
            s = cdna4.mfma_scaled(kr, kr_scale, "e2m1", qr, r_scale, "e4m3", s)
            s = _same(s.reshape([WAVES, 32, H]), O_LAYOUT)
            if (row != t) | (row + BN > end) | (t == begin):
                token = gl.arange(0, BN, layout=gl.SliceLayout(1, S_LAYOUT))
                token = _token(token // 64 * 64 + token % 16 * 4 + token // 16 % 4, WAVES)
                valid = ((token >= t - row) & (token < end - row))[:, None].broadcast_to([BN, H])
                s = gl.where(_same(valid.reshape([WAVES, 32, H]), O_LAYOUT), s, -float("inf"))
                SCALES: gl.constexpr = ks.type.layout
                token = _token(_index(ks.shape, SCALES, ((0, 64), (1, 2), (2, 1), (3, 4))), WAVES)
                ks = gl.where((token >= t - row) & (token < end - row), ks, 127)  # P = 0 would not silence a NaN
                if (t == begin) & first_pass:
                    m = gl.maximum(m, gl.max(gl.max(s, axis=1), axis=0))
            vs_lds.store(ks.reshape([PAIRS, 2, 2, 4, 4, 4, 4]).permute([0, 6, 5, 3, 1, 2, 4]))
            kr = _load_bytes(kv8_ptr, next_row, 288, 256, (2, 2, 16), WAVES)  # twice: a step takes both terms of Q
            rs = _load_bytes(scale_ptr, next_row, SCALE_STRIDE, 16, (2, 2, 1), WAVES)
            ks = _load_bytes(scale_ptr, next_row, SCALE_STRIDE, 0, (1, 4, 4), WAVES)
            p = gl.exp2((s - m[None, None, :]) * qk_scale)  # subtracted first: that is exact at the top
            p = p.to(gl.bfloat16).reshape([PAIRS, 2, 2, 4, 4, H]).permute([0, 1, 5, 3, 2, 4])
            p_lds.store(p.reshape([PAIRS, 2, H, 4, 8]))
            s = gl.max(gl.max(s.reshape([PAIRS, 2, 2, 4, 4, H]), axis=4), axis=2)
            peak = gl.maximum(peak, _same(s, MAX_FIELDS))
            p = async_copy.load_shared_relaxed(p_lds, gl.SliceLayout(1, P_FIELDS))
            _copy_tile(lds.index(slot), kv_ptr, next_row, WAVES)  # the barrier before that load freed this tile
            # The empty instruction keeps the loads of the next tile ahead of what follows.
            p = gl.inline_asm_elementwise("", "=v,0", [p], dtype=gl.bfloat16, is_pure=False, pack=2)
            p = gl.expand_dims(p, 1).broadcast_to(P_SHAPE).permute([0, 1, 2, 4, 5, 3]).reshape([WAVES, 64, H])
            v = async_copy.load_shared_relaxed(_view(tile, gl.int32, V_SHAPE, _rows(V_SHAPE, 256, 4)), V_FIELDS)
            v = v.permute([0, 5, 3, 1, 4, 2, 6, 7, 8]).reshape([WAVES, 64, 16, 2])
            f = _view(vs_lds, gl.int32, [PAIRS, 2, 8, 4, 2, 2], gl.SwizzledSharedLayout(1, 1, 1, [5, 4, 3, 2, 1, 0]))
            f = async_copy.load_shared_relaxed(f, gl.SliceLayout(3, VS_FIELDS))
            # The scales of tokens r = 0 to 3 are the bytes of a word: shifted to the exponent bits
            f = gl.expand_dims(f, 3).broadcast_to(VS_SHAPE)
            f = gl.join(gl.join(f << 23, f << 7), gl.join(f << 15, f >> 1)).to(gl.float32, bitcast=True)
            f = f.reshape([PAIRS, 2, 8, 2, 4, 2, 2, 4]).permute([0, 1, 5, 4, 6, 7, 2, 3]).reshape([WAVES, 64, 16])
            f = _same(f, gl.SliceLayout(3, v.type.layout))[:, :, :, None].broadcast_to(v.shape)
            p = _same(p, P_LAYOUT)
            out = (cdna4.mfma(gl.full([WAVES, 16, 64], 1.0, gl.bfloat16, V_LAYOUT), p, acc[0]),)
            for i in gl.static_range(8):
                # Two scaled bf16 of a byte. Of the scale it takes the exponent bits as E8M0: 0 is 2^-127.
                w = gl.inline_asm_elementwise(f"v_cvt_scalef32_pk_bf16_fp4 $0, $1, $2 op_sel:[{i // 2 % 2},{i // 4},0]",
                                              "=v,v,v", [v, f], gl.int32, is_pure=True, pack=1)  # fmt: skip
                w = w.permute([0, 3, 2, 1]).reshape([WAVES, 32, 64])
                value = (w >> i % 2 * 16).to(gl.int16).to(gl.bfloat16, bitcast=True)
                out += (cdna4.mfma(_same(value, V_LAYOUT), p, acc[1 + i]),)  # type: ignore[assignment]
            acc = out  # type: ignore[assignment]
        async_copy.wait_group(0)
        # P is relative to the first tile's maximum. Scores that outgrow it by 2^24 are read again with the true one; so
        # are sums that left float32's range, with weights of 2^-32 at most: no sum of theirs passes the largest value.
        size = acc[1] + acc[2] + acc[3] + acc[4] + acc[5] + acc[6] + acc[7] + acc[8]
        vast = gl.where(gl.abs(size) < float("inf"), 0.0, 1.0).reshape([PAIRS, 2, 2, 4, 4, H])  # NaN is vast too
        vast = _same(gl.max(gl.max(vast, axis=4), axis=2), MAX_FIELDS)
        top, vast = gl.split(gl.max(gl.join(peak, vast).reshape([PAIRS * 8, H, 2]), axis=0))
        top, vast = gl.convert_layout(top, M_LAYOUT), gl.convert_layout(vast, M_LAYOUT)
        again = (gl.max(gl.maximum((top - m) * qk_scale, 25 * vast), axis=0) > 24) & first_pass
        m, first_pass = gl.where(again, top + vast * (32 / qk_scale), m), False

    # Sum over pairs, a quarter of the dims each: pair, block bit 1, word, bit 0, block // 4, part, wave, head, parity
    SUM_SHAPE: gl.constexpr = (PAIRS, 2, 2, 2, 4, 2, WAVES, H // WAVES, 2)
    SUM_FIELDS: gl.constexpr = _fields(SUM_SHAPE, [8, 0, 7], [2, 5, 3, 1, 4], [6])
    SUM_ROWS: gl.constexpr = gl.PaddedSharedLayout.with_identity_for([[128, 8]], SUM_SHAPE, [8, 5, 4, 3, 2, 1, 7, 6, 0])
    OUT_SHAPE: gl.constexpr = (2, 2, 2, 4, 2, WAVES, H // WAVES, 8)
    OUT_FIELDS: gl.constexpr = _fields(OUT_SHAPE, [7, 6], [1, 4, 2, 0, 3], [5])
    total = gl.sum(gl.max(acc[0], axis=1), axis=0) * 0.5  # its rows are equal, and so are the waves of a pair
    weight = gl.where(total == 0, 0.0, 1.0 / total)[None, None, :]  # before the sums, which then are means
    memory = gl.allocate_shared_memory(gl.float32, SUM_SHAPE, SUM_ROWS)
    sums = ()
    for byte in gl.static_range(4):
        memory.store(gl.join(acc[1 + 2 * byte] * weight, acc[2 + 2 * byte] * weight).reshape(SUM_SHAPE))
        sums += (gl.sum(memory.load(SUM_FIELDS), axis=0),)  # type: ignore[assignment]
    x = gl.join(gl.join(sums[0], sums[2]), gl.join(sums[1], sums[3]))  # type: ignore[misc]
    x = _same(x.permute([0, 1, 2, 3, 4, 5, 6, 8, 9, 7]).reshape(OUT_SHAPE), OUT_FIELDS)
    TERMS: gl.constexpr = ((0, 64), (1, 8), (2, 32), (3, 128), (4, 16), (5, 512 * H // WAVES), (6, 512), (7, 1))
    part = (seq * NUM_SPLITS + split).to(gl.int64)
    cdna4.buffer_store(x.to(out_ptr.dtype.element_ty), out_ptr + part * (H * 512), _index(OUT_SHAPE, OUT_FIELDS, TERMS))
    if lse_ptr is not None:
        lse = m * (qk_scale * 0.6931471805599453) + gl.log2(total) * 0.6931471805599453
        cdna4.buffer_store(lse, lse_ptr + part * H, gl.arange(0, H, layout=M_LAYOUT))


@dataclass(frozen=True, slots=True)
class Inputs:
    """One call's tensors as the kernels want them; `describe` says whether they fit."""

    q: Tensor  # bf16 [total_q, heads, 576], contiguous; total_q / batch tokens per sequence, causal among themselves
    kv_fp4: Tensor  # uint8 [total_kv, 288], two codes a byte, even dim in the low nibble; rows contiguous
    kv_scale: Tensor  # uint8 [>= total_kv, >= 18], any strides; byte b scales by 2^(b - 127), 255 is NaN
    kv_indptr: Tensor  # int32 | int64 [batch + 1]; sequence i owns tokens kv_indptr[i] .. kv_indptr[i + 1] - 1
    sm_scale: float  # factor on the scores
    qo_indptr: Any = None  # int32 [batch + 1], if any
    kv_fp8: Any = None  # e4m3fn | e4m3fnuz [total_kv, 1, 576], if any
    kv_fp8_scale: Any = None  # float32, one element

    @property
    def q_len(self) -> int:
        return len(self.q) // (len(self.kv_indptr) - 1)

    def keys(self, rows: slice, cache: str) -> Tensor:
        """float32 [n, 576]: these rows of the "mxfp4" or the "fp8" cache."""
        if cache == "fp8":
            return self.kv_fp8[rows].reshape(-1, QK_DIM).float() * self.kv_fp8_scale.float()
        codes, byte = self.kv_fp4[rows], self.kv_scale[rows, :ROW_SCALES].to(torch.int32)
        magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=codes.device)
        nibbles = torch.stack((codes & 0xF, codes >> 4), dim=-1).reshape(-1, ROW_SCALES, 32).long()
        scale = ((byte << 23) | (((byte + 1) & 0xFE == 0).int() << 22)).view(torch.float32)  # as in _decode_tile
        return (torch.cat((magnitudes, -magnitudes))[nibbles] * scale[:, :, None]).reshape(-1, QK_DIM)

    def lengths(self) -> list[int]:
        """Tokens of each sequence, checked against the cache; waits for the device."""
        bounds, total = self.kv_indptr.tolist(), len(self.kv_fp4)
        _expect([0, *bounds, total] == sorted([0, *bounds, total]), "kv_indptr", f"rising within 0..{total}", bounds)
        return self.kv_indptr.diff().tolist()

    def describe(self, config: dict[str, Any]) -> Problem:
        """Check shapes, dtypes, devices and lengths; waits for the device, so it belongs to the pick."""
        q, kv, sc, ki, sm_scale, qo, fp8, fp8_scale = (getattr(self, f.name) for f in fields(self))
        fits = q.dtype == torch.bfloat16 and q.ndim == 3 and q.shape[-1] == QK_DIM and q.shape[1] in HEAD_COUNTS
        _expect(fits, "q", f"bf16 [total_q, heads, 576], heads among {HEAD_COUNTS}", q)
        integer = ki.dtype in (torch.int32, torch.int64)
        _expect(integer and ki.ndim == 1 and len(ki) > 1, "kv_indptr", "int32 or int64 [batch + 1], batch >= 1", ki)
        batch = len(ki) - 1
        _expect(len(q) > 0 and len(q) % batch == 0, "q", f"total_q a multiple of batch {batch}", q)
        _expect(kv.ndim == 2 and kv.shape[1] == ROW_BYTES and kv.stride(1) == 1, "mxfp4 cache", "rows of 288 bytes", kv)
        fits = sc.ndim == 2 and len(sc) >= len(kv) and sc.shape[1] >= ROW_SCALES
        _expect(fits, "mxfp4 scale", f"bytes [>= {len(kv)}, >= {ROW_SCALES}]", sc)
        fits = fp8 is None or ("e4m3" in str(fp8.dtype) and fp8.numel() == len(kv) * QK_DIM)
        _expect(fits, "fp8 cache", f"e4m3fn or e4m3fnuz [{len(kv)}, 1, 576]", fp8)
        fits = fp8 is None or (fp8_scale is not None and fp8_scale.numel() == 1)
        _expect(fits, "fp8 scale", "one element", fp8_scale)
        named = {"mxfp4 cache": kv, "mxfp4 scale": sc, "kv_indptr": ki, "fp8": fp8, "fp8 scale": fp8_scale}
        for name, t in named.items():
            _expect(t is None or t.device == q.device, name, f"a tensor on q's device {q.device}", t)
        _expect(0 < sm_scale < math.inf, "sm_scale", "finite and positive", sm_scale)
        for key, got in (("batch_size", batch), ("num_heads", q.shape[1]), ("q_seq_len", self.q_len)):
            _expect(config.get(key, got) == got, f"config[{key!r}]", f"{got}, as the tensors say", config.get(key))
        if qo is not None:
            _expect(qo.tolist() == list(range(0, len(q) + 1, self.q_len)), "qo_indptr", f"steps of {self.q_len}", qo)
        lengths, facts, pitch = self.lengths(), _device_facts(q.device), 0 if kv.storage_offset() % 16 else kv.stride(0)
        native = torch.float8_e4m3fnuz if facts[0] == "gfx942" else torch.float8_e4m3fn
        return Problem(batch, len(q), q.shape[1], len(kv), max(lengths), min(lengths), *facts, q.device,
                       pitch, sc.stride(), fp8 is not None and fp8.dtype == native, int(ki[0]))  # fmt: skip


def _unpack(data: input_t) -> Inputs:
    """The contest's tuple (q, kv_data, qo_indptr, kv_indptr, config) -> Inputs."""
    q, kv_data, qo_indptr, kv_indptr, config = data
    _expect("mxfp4" in kv_data, "kv_data", "the keys bf16, fp8 and mxfp4", list(kv_data))
    for t in kv_data["mxfp4"]:
        _expect(t.element_size() == 1, "mxfp4 cache and scale", "one-byte dtypes", t)
    # Triton knows no float4_e2m1fn_x2 or float8_e8m0fnu.
    codes, scales = ((t.squeeze(1) if t.ndim == 3 else t).view(torch.uint8) for t in kv_data["mxfp4"])
    sm_scale, fp8 = float(config.get("sm_scale", QK_DIM**-0.5)), kv_data.get("fp8", (None, None))
    return Inputs(q.contiguous(), codes, scales, kv_indptr.contiguous(), sm_scale, qo_indptr, *fp8)


def _device_facts(device: torch.device) -> tuple[str, int]:
    """(arch, compute units)."""
    if device.type != "cuda":
        with contextlib.suppress(RuntimeError):  # no driver at all
            active = triton.runtime.driver.active
            if not INTERPRETED and active.get_active_torch_device().type == "cpu":  # emulated
                return active.get_current_target().arch, 256
        return "cpu", 8
    p = torch.cuda.get_device_properties(device)
    return p.gcnArchName.split(":")[0] if torch.version.hip else f"sm_{p.major}{p.minor}", p.multi_processor_count


def run_decode(inputs: Inputs, plan: Plan, out: Tensor, lse: Tensor | None = None) -> Tensor:
    """Fill out bf16 [total_q, heads, 512], which it returns, and lse float32 [total_q, heads]; right for any length."""
    q, kv, scale, indptr, splits = inputs.q, inputs.kv_fp4, inputs.kv_scale, inputs.kv_indptr, plan.num_splits
    (total_q, heads), qk_scale = q.shape[:2], inputs.sm_scale * math.log2(math.e)
    # The interpreter truncates float32 to bf16; torch rounds to nearest even, as the hardware does.
    stored = torch.empty_like(out, dtype=torch.float32) if INTERPRETED else out
    attended: tuple[Tensor, Tensor | None] = stored, lse
    if splits > 1:
        # The caching allocator alone keeps calls on different queues and in captured graphs apart; freed on return.
        rows = total_q * splits * heads
        scratch = torch.empty(rows * (LATENT_DIM + 1), dtype=torch.float32, device=out.device)
        attended = scratch[: rows * LATENT_DIM], scratch[rows * LATENT_DIM :]
    if plan.body == "gfx950":  # its loads are not masked: a cache shorter than a tile is padded
        if (lacking := 32 * plan.num_warps - len(kv)) > 0:
            kv, scale = (torch.nn.functional.pad(x[: len(kv)], (0, 0, 0, lacking)) for x in (kv, scale))
        _attend_gfx950_kernel[(total_q * splits,)](
            q, kv.view(torch.int32), scale, indptr, *attended, qk_scale, SCALE_STRIDE=scale.stride(0),
            NUM_SPLITS=splits, NUM_DIES=8 if total_q % 8 == 0 else 1, WAVES=plan.num_warps, num_warps=plan.num_warps,
            waves_per_eu=2, **GLUON_OPTIONS)  # fmt: skip
    else:
        _attend_kernel[(total_q, splits, triton.cdiv(heads, 16))](
            q, kv, scale, indptr, *attended, kv.stride(0), *scale.stride(), splits, inputs.q_len, qk_scale,
            HEADS=heads, BLOCK_N=plan.block_n, CHUNK=512 if INTERPRETED else 128, SCALED=plan.body == "scaled",
            DTYPE=tl.float32 if INTERPRETED else tl.bfloat16, num_warps=plan.num_warps, num_stages=1)  # fmt: skip
    if splits > 1:  # the last program to arrive would read alone what all wrote: 140 us for 34, worklog
        _merge_kernel[(total_q * heads, 4)](
            *attended, stored, lse, splits, HEADS=heads, BLOCK_D=128, SPLITS=triton.next_power_of_2(splits),
            num_warps=4)  # fmt: skip
    return out if stored is out else out.copy_(stored)


# A backend: name; supports(problem) -> why it cannot take it, or None; plans(problem) -> hashable, the most promising
# first; run(plan, inputs) -> bf16 [total_q, heads, 512], fresh, right for any lengths, without waiting for the device.
class TritonBackend:
    """The kernels of this file, over the MXFP4 cache."""

    name = "triton"

    def supports(self, problem: Problem) -> str | None:
        lacking = problem.arch[:4] in ("sm_5", "sm_6", "sm_7") or (problem.arch == "cpu" and not INTERPRETED)
        return "needs sm_80, an AMD GPU or TRITON_INTERPRET=1" if lacking else None

    def plans(self, problem: Problem) -> list[Plan]:
        forced = overrides()["MLA_PLAN"]
        chosen = choose_plan(problem, forced.get("body"))
        return [problem.fitting(replace(chosen, **forced))] if forced else candidate_plans(problem)

    def run(self, plan: Plan, inputs: Inputs) -> Tensor:
        return run_decode(inputs, plan, inputs.q.new_empty((*inputs.q.shape[:2], LATENT_DIM)))


AITER_ORDER = {  # of arguments from 0.1.10.post2 to 0.1.20, of those that others lack or order otherwise
    "get_mla_metadata_info_v1": "q_dtype kv_dtype is_sparse fast_mode num_kv_splits intra_batch_mode",
    "get_mla_metadata_v1": "seqlens_qo_indptr seqlens_kv_indptr kv_last_page_lens is_causal work_metadata_ptrs "
    "work_info_set work_indptr reduce_indptr reduce_final_map reduce_partial_map page_size dtype_q dtype_kv",
    "mla_decode_fwd": "q kv_buffer o qo_indptr kv_indptr kv_indices kv_last_page_lens max_seqlen_q page_size nhead_kv "
    "work_meta_data reduce_partial_map q_scale kv_scale intra_batch_mode"}  # fmt: skip


class AiterBackend:
    """aiter's fp8 persistent-mode kernel, called as the contest's reference does where it neither aborts nor errs."""

    name = "aiter"
    min_kv_len = 196  # below, its metadata kernel divides by zero; an empty sequence spoils its neighbour too
    max_total_kv = 7_456_541  # page ids from here on wrap before aiter 0.1.19

    @functools.cached_property
    def api(self) -> Any:
        """The aiter module with a known interface, or the reason (a string) why there is none, told once."""
        try:
            import aiter
            import aiter.mla

            for name, needed in AITER_ORDER.items():
                has = inspect.signature(getattr(aiter, name, None) or getattr(aiter.mla, name)).parameters
                if [n for n in has if n in needed.split()] != needed.split():
                    near = os.listdir(os.path.dirname(aiter.__path__[0]))  # amd_aiter-0.1.7.dist-info
                    version = getattr(aiter, "__version__", None) or [n for n in near if "aiter-" in n]
                    raise ImportError(f"version {version}: {name} has {list(has)}, not in this order {needed}")
        except CANDIDATE_ERRORS as error:
            reason = f"aiter cannot be used: {type(error).__name__}: {error}"
            warnings.warn(reason, RuntimeWarning, stacklevel=2)
            return reason
        return aiter

    def supports(self, problem: Problem) -> str | None:
        p, least, most = problem, self.min_kv_len, self.max_total_kv
        fits = p.arch in ("gfx950", "gfx942") and p.has_fp8 and (p.heads, p.total_q) == (16, p.batch)
        if not fits or p.kv_len_min < least or p.total_kv > most or p.kv_first:
            return f"for gfx942 and gfx950, fp8, 16 heads, one query token, {least}..{most} tokens from 0 on: not {p}"
        return self.api if isinstance(self.api, str) else None

    def plans(self, problem: Problem) -> list[tuple[str, int]]:
        """(dtype of the queries, splits): the contest's own 32, and fewer to merge where the batch fills the card."""
        splits = dict.fromkeys((32, min(32, max(1, 2 * problem.num_cus // problem.batch))))
        q_dtype = overrides()["MLA_FALLBACK_Q"]
        return [(q, n) for n in splits for q in ("fp8", "bf16") if q_dtype in ("auto", q)]

    def run(self, plan: tuple[str, int], inputs: Inputs) -> Tensor:
        if min(inputs.lengths()) < self.min_kv_len or int(inputs.kv_indptr[0]) != 0:  # since the pick
            return torch_attention(inputs)[0].to(torch.bfloat16)
        (q_dtype, splits), modes = plan, {"fast_mode": False, "intra_batch_mode": True}
        q, q_scale, kv, kv_indptr = inputs.q, None, inputs.kv_fp8.contiguous(), inputs.kv_indptr.to(torch.int32)
        qo_indptr, last_page_len = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device), kv_indptr.diff()
        out = q.new_empty((*q.shape[:2], LATENT_DIM))
        if q_dtype == "fp8":  # per tensor as the contest's reference: amax, scale and quotient in bf16
            limit = torch.finfo(kv.dtype).max
            factor = q.abs().amax().clamp(min=1e-12) / limit
            q, q_scale = (q / factor).clamp(-limit, limit).to(kv.dtype), factor.to(torch.float32).reshape(1)
        info = self.api.get_mla_metadata_info_v1(
            len(last_page_len), 1, q.shape[1], q.dtype, kv.dtype, False, num_kv_splits=splits, **modes)  # fmt: skip
        meta, work_indptr, work_info, *reduce = (torch.empty(s, dtype=t, device=q.device) for s, t in info)
        self.api.get_mla_metadata_v1(
            qo_indptr, kv_indptr, last_page_len, q.shape[1], 1, True, meta, work_info, work_indptr, *reduce,
            page_size=1, kv_granularity=16, max_seqlen_qo=1, uni_seqlen_qo=1, max_split_per_batch=splits,
            dtype_q=q.dtype, dtype_kv=kv.dtype, **modes)  # fmt: skip
        pages = torch.arange(kv.shape[0], dtype=torch.int32, device=q.device)
        self.api.mla.mla_decode_fwd(
            q, kv.view(-1, 1, 1, QK_DIM), out, qo_indptr, kv_indptr, pages, last_page_len, 1, page_size=1, nhead_kv=1,
            sm_scale=inputs.sm_scale, logit_cap=0.0, num_kv_splits=splits, q_scale=q_scale,
            kv_scale=inputs.kv_fp8_scale.reshape(1).float(), intra_batch_mode=True, work_meta_data=meta,
            work_indptr=work_indptr, work_info_set=work_info, reduce_indptr=reduce[0], reduce_final_map=reduce[1],
            reduce_partial_map=reduce[2])  # fmt: skip
        return out


def torch_attention(inputs: Inputs, sequences: Any = None, cache: str = "mxfp4") -> tuple[Tensor, Tensor]:
    """float32 out [rows, heads, 512] and natural-log lse [rows, heads] of all or some sequences over one cache."""
    bounds, q_len, results = inputs.kv_indptr.tolist(), inputs.q_len, []
    for i, j in itertools.product(range(len(bounds) - 1) if sequences is None else sequences, range(q_len)):
        q, end = inputs.q[i * q_len + j].float() * inputs.sm_scale, bounds[i + 1] - (q_len - 1 - j)
        out, lse = q.new_zeros(len(q), LATENT_DIM), q.new_full((len(q),), -math.inf)
        for start in range(bounds[i], end, 1 << 16):
            keys = inputs.keys(slice(start, min(end, start + (1 << 16))), cache)
            scores = q @ keys.T
            part, part_lse = torch.softmax(scores, -1) @ keys[:, :LATENT_DIM], torch.logsumexp(scores, -1)
            share = torch.sigmoid(part_lse - lse)[:, None]  # exp(score - lse) would be off by lse's last bit
            out, lse = out * (1 - share) + part * share, torch.logaddexp(lse, part_lse)
        results.append((out, lse))
    return tuple(map(torch.stack, zip(*results, strict=True)))  # type: ignore[return-value]


TORCH = types.SimpleNamespace(  # slow, and right on any machine: one sequence at a time
    name="torch", supports=lambda problem: None, plans=lambda problem: ["float32"],
    run=lambda plan, inputs: torch_attention(inputs)[0].to(torch.bfloat16))  # fmt: skip
CANDIDATE_ERRORS = (Exception, SystemExit)  # compiler, launch, memory, changed interface; at import anything
OWN_BACKENDS = (AiterBackend(), TORCH, TritonBackend())  # as long as the process: aiter is imported once


@functools.cache
def _extra_backends() -> tuple[Any, ...]:
    """What a module `mla_backends` beside this file offers."""
    try:
        import mla_backends

        return tuple(mla_backends.backends())
    except CANDIDATE_ERRORS as error:
        if getattr(error, "name", None) != "mla_backends":
            warnings.warn(f"mla_backends cannot be used: {type(error).__name__}: {error}", RuntimeWarning, stacklevel=2)
        return ()


def overrides() -> dict[str, Any]:
    """The documented environment overrides, parsed here and nowhere else; a ValueError lists what is valid."""
    choices = {"MLA_BACKEND": ("auto", "triton", "aiter", "torch", *(b.name for b in _extra_backends())),
               "MLA_FALLBACK_Q": ("auto", "fp8", "bf16"),  # the query dtype of aiter's kernel
               "MLA_LOG": ("WARNING", "DEBUG", "INFO", "ERROR")}  # fmt: skip
    values = {name: os.environ.get(name, allowed[0]) for name, allowed in choices.items()}
    for name, value in values.items():
        _expect(value in choices[name], name, f"one of {', '.join(choices[name])}", repr(value))
    items = [item.strip().partition("=") for item in filter(None, os.environ.get("MLA_PLAN", "").split(","))]
    for key, _, value in items:  # such as "block_n=64,num_splits=8"
        _expect(key in Plan.__slots__, "MLA_PLAN", f"field=value among {', '.join(Plan.__slots__)}", f"{key}={value}")
    plan: dict[str, Any] = {key: int(value) if value.isdecimal() else value for key, _, value in items}
    Plan(**plan)  # refuses bad values
    return {**values, "MLA_PLAN": plan}


@dataclass
class Candidate:
    """One backend with one plan, and what the pick found out about it."""

    backend: Any
    plan: Any
    rel_l2: float = math.nan  # worst sequence against float32
    time_us: float = math.nan  # cold, trimmed mean
    dropped: str | None = None  # why it is out

    def __str__(self) -> str:
        return f"{self.backend.name} {self.plan}"

    def out(self) -> str | None:
        """Why it is not to be run, if so: dropped for this shape or, by any, for the process."""
        return self.dropped or (_dropped.get(str(self)) if _dropped else None)

    def drop(self, why: str | BaseException) -> None:
        """Put it out, for want of memory at this shape alone; the first thread that does warns."""
        self.dropped = reason = why if isinstance(why, str) else f"{type(why).__name__}: {str(why)[:300]}"
        if "out of memory" in reason or "MemoryError" in reason or _dropped.setdefault(str(self), reason) is reason:
            warnings.warn(f"dropped {self}: {reason}", RuntimeWarning, stacklevel=3)


def _relative_l2(got: Tensor, want: Tensor) -> Tensor:
    """||got - want|| / ||want|| per leading index; 0 where both agree, also on zeros."""
    gap = (got.float() - want.float()).flatten(1).norm(dim=1)
    return torch.where(gap == 0, gap, gap / want.float().flatten(1).norm(dim=1))


def _probe(c: Candidate, inputs: Inputs, truths: dict[str, Tensor], fallback: Tensor | None) -> Any:
    """Run a candidate twice; its output if both are right, else what is wrong. Sets its rel_l2."""
    cache = "fp8" if c.backend.name == "aiter" else "mxfp4"
    truth, limit = truths[cache], REL_L2_LIMIT[cache]
    format_gap = _relative_l2(truths["mxfp4"], truths.get("fp8", truth))  # what the data make the two caches differ by
    try:
        for _ in range(2):
            out = c.backend.run(c.plan, inputs)
            if out.dtype != torch.bfloat16 or out.shape != truth.shape:
                return f"output is {out.dtype} {list(out.shape)}, expected bfloat16 {list(truth.shape)}"
            alike = bool((out.isfinite() == truth.isfinite()).all())  # NaN only where the inputs demand it
            errors = _relative_l2(out, truth).nan_to_num(0.0 if alike else math.inf)
            c.rel_l2, row = float(errors.max()), int(errors.argmax())
            if not c.rel_l2 <= limit:
                return f"row {row}: relative L2 {c.rel_l2:.1e} against float32 over {cache}, limit {limit:.0e}"
            if fallback is not None:
                gap = _relative_l2(out, fallback)
                cosine = torch.cosine_similarity(out.float().flatten(1), fallback.float().flatten(1))
                far = ((gap > 0.20) | (cosine < 0.98)) & (gap > 1.5 * format_gap)
                if bool(far.any()):
                    return f"row {int(far.nonzero()[0])} is off the fallback: relative L2 {float(gap[far].max()):.1e}"
    except CANDIDATE_ERRORS as error:
        return error
    return out


def _time_cold_us(candidate: Candidate, inputs: Inputs, deadline: float) -> float:
    """Trimmed mean over 5 to TIMED_RUNS runs in the contest's order: flush (2x the largest cache), start, call, end."""
    times, device = list[float](), inputs.q.device
    flush = torch.empty(min(512 << 20, torch.cuda.mem_get_info(device)[0] // 2), dtype=torch.int8, device=device)
    while len(times) < 5 or (len(times) < TIMED_RUNS and time.perf_counter() < deadline):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        for _ in range(4):  # nothing waits for it: the call's launches hide behind the flush, as in the contest
            flush.fill_(len(times))
        start.record()
        candidate.backend.run(candidate.plan, inputs)
        end.record()
        torch.cuda.synchronize(device)
        times.append(start.elapsed_time(end) * 1e3)
    return sum(sorted(times)[1:-1]) / (len(times) - 2)


class Pick:
    """Every candidate for one shape, checked and timed when this is made, and the ranking of those found right."""

    def __init__(self, inputs: Inputs, config: dict[str, Any]) -> None:
        started, forced, problem = time.perf_counter(), overrides(), inputs.describe(config)
        log.setLevel(forced["MLA_LOG"])
        # The fallbacks come first: the others are held against the first of them that is right.
        backends = [*OWN_BACKENDS[:2], *_extra_backends(), *OWN_BACKENDS[2:]]
        backends = [b for b in backends if forced["MLA_BACKEND"] in ("auto", b.name)]
        refused = {b.name: reason for b in backends if (reason := b.supports(problem)) is not None}
        candidates = [Candidate(b, plan) for b in backends if b.name not in refused for plan in b.plans(problem)]
        self.problem, self.candidates, self.ranking, self.refused = problem, candidates, list[Candidate](), refused
        truths = {c: torch_attention(inputs, cache=c)[0] for c in ("mxfp4", "fp8")[: 1 + problem.has_fp8]}
        fallback, fallback_out, deadline = None, None, started + PICK_BUDGET_S
        for c in candidates:
            if (fallback and c.backend.name == "torch") or (self.ranking and time.perf_counter() > deadline):
                c.dropped = "not tried: no need of it, or no time left"
            if c.out():
                continue
            if not isinstance(outcome := _probe(c, inputs, truths, fallback_out), Tensor):
                c.drop(outcome)
                continue
            self.ranking.append(c)
            if fallback is None and c.backend.name in ("aiter", "torch"):
                fallback, fallback_out = c, outcome
        self.compile_s = time.perf_counter() - started  # first calls, which compile, and checks
        timed = problem.device.type == "cuda"  # nothing can be on a CPU: the order of preference, the fallback last
        for c in self.ranking if timed else ():
            try:
                c.time_us = _time_cold_us(c, inputs, deadline)
            except CANDIDATE_ERRORS as error:
                c.time_us = math.inf
                c.drop(error)
        self.ranking.sort(key=lambda c: c.time_us * (1 - TIE * (c is fallback)) if timed else c is fallback)
        self.pick_s = time.perf_counter() - started
        for c in candidates:
            log.info("%s: relative L2 %.1e, %.1f us, %s", c, c.rel_l2, c.time_us, c.out() or "right")

    def run(self, inputs: Inputs) -> Tensor:
        """The fastest candidate that still stands; one that raises is dropped for good and the next answers."""
        for c in self.ranking:
            if not c.out():
                try:
                    return c.backend.run(c.plan, inputs)
                except CANDIDATE_ERRORS as error:
                    inputs.lengths()  # lengths out of bounds are the caller's fault
                    c.drop(error)
        told = self.refused | {str(c): c.out() for c in self.candidates}
        for c in self.ranking:
            c.dropped = None  # if memory lacked, the next call may find some; what the process dropped stays out
        raise RuntimeError(f"no backend answered: {told}; free memory, unset MLA_BACKEND, or start a new process")

    def report(self) -> dict[str, Any]:
        """Shape, winner, seconds and every candidate with its error, time and the reason if it was dropped."""
        told = [vars(c) | {"backend": c.backend.name, "plan": str(c.plan), "dropped": c.out()} for c in self.candidates]
        winner = next((c for c in self.ranking if not c.out()), None)
        return {"batch": self.problem.batch, "kv_len_max": self.problem.kv_len_max, "candidates": told,
                "backend": winner and winner.backend.name, "plan": winner and str(winner.plan), "pick_s": self.pick_s,
                "compile_s": self.compile_s, "refused": self.refused}  # fmt: skip


_picks: dict[tuple, Any] = {}  # Pick, the latest used last
_dropped: dict[str, str] = {}  # "backend plan" -> why, for the life of the process
_picks_lock = threading.Lock()
if hasattr(os, "register_at_fork"):  # a pick in another thread of the parent never ends in the child
    os.register_at_fork(after_in_child=lambda: globals().update(_picks_lock=threading.Lock()))


def last_pick() -> dict[str, Any] | None:
    """Pick.report() of the last call's shape; None before any call."""
    return next(reversed(_picks.values())).report() if _picks else None


def status() -> list[dict[str, Any]]:
    """Pick.report() of every shape that this process remembers."""
    return [pick.report() for pick in _picks.values()]


def _shape_key(data: input_t) -> tuple:
    """All that checks and pick depend on and that a call tells without looking at values."""
    q, kv_data, qo_indptr, kv_indptr, config = data
    tensors = (q, *kv_data["mxfp4"], *kv_data.get("fp8", ()), kv_indptr, qo_indptr)
    settings = (kv_data["mxfp4"][0].storage_offset() % 16, *map(config.get, ("batch_size", "num_heads", "q_seq_len")))
    return (*((t.dtype, t.shape, t.stride(), t.device) for t in tensors if t is not None), *settings)


def mla_decode(
    q: Tensor, kv_fp4: Tensor, kv_scale: Tensor, kv_indptr: Tensor, sm_scale: float, plan: Plan | None = None
) -> tuple[Tensor, Tensor]:
    """MLA decode over an MXFP4 cache (OCP MX v1.0: e2m1 codes, one E8M0 scale per 32 values).

    Args: as in Inputs; any one-byte dtypes, the cache also [total_kv, 1, 288]. plan: choose_plan's by default.
    Returns: out bf16 [total_q, heads, 512], lse float32 [total_q, heads], natural log; 0, -inf for an empty sequence.
    Raises: ValueError names the tensor or plan that does not fit, what was expected and what came.
    """
    inputs = _unpack((q, {"mxfp4": (kv_fp4, kv_scale)}, None, kv_indptr, {"sm_scale": sm_scale}))  # type: ignore[arg-type]
    problem = inputs.describe({})
    if TritonBackend().supports(problem) is not None:
        result, lse = torch_attention(inputs)
        return result.to(torch.bfloat16), lse
    plan, out = problem.fitting(plan or choose_plan(problem)), q.new_empty((*q.shape[:2], LATENT_DIM))
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    with torch.cuda.device_of(q):
        return run_decode(inputs, plan, out, lse), lse


def custom_kernel(data: input_t) -> output_t:
    """The contest's entry point: (q, kv_data, qo_indptr, kv_indptr, config) -> bf16 [total_q, heads, 512], fresh."""
    inputs, key = _unpack(data), _shape_key(data)
    with torch.cuda.device_of(inputs.q):  # Triton launches on the current device
        with _picks_lock:
            pick = _picks[key] = _picks.pop(key, None) or Pick(inputs, data[4])
            while len(_picks) > MAX_PICKS:
                _picks.pop(next(iter(_picks)))
        return pick.run(inputs)
