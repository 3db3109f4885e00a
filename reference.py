"""Inputs, quantisers, the contest's reference and check, and ground truths for MLA decode.

Works with and without aiter, on a GPU and on a CPU:

    generate_input       the contest's recipe: one seed -> q and one cache in bf16, fp8 and MXFP4
    quantize_* / dequantize_*   the two compressed formats, to the bit
    ref_kernel           the contest's reference: fp8 queries over the fp8 cache
    check_implementation the contest's tolerance against ref_kernel
    attention_truth      float64 / float32 attention over any of the three caches
    relative_l2          error per (query token, head)
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Iterable
from typing import Any

import torch

from task import input_t, output_t
from utils import get_device, make_match_reference

NUM_HEADS = 16
NUM_KV_HEADS = 1
KV_LORA_RANK = 512
QK_ROPE_HEAD_DIM = 64
QK_HEAD_DIM = KV_LORA_RANK + QK_ROPE_HEAD_DIM
V_HEAD_DIM = KV_LORA_RANK
SM_SCALE = 1.0 / math.sqrt(QK_HEAD_DIM)

MX_BLOCK = 32
CACHES = ("bf16", "fp8", "mxfp4")
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

# The contest's own tolerance. Its inputs make it nearly blind: zeros pass at kv 8192.
CONTEST_RTOL = 0.1
CONTEST_ATOL = 0.1
CONTEST_MISS_RATIO = 0.05

# aiter's persistent decode kernel: settings of the contest's reference call.
AITER_SPLITS = 32
AITER_GRANULARITY = 16
# Below this its metadata kernel divides by zero.
AITER_MIN_TOKENS = 196

# Rows handled at once by the element-wise conversions: bounds the float32 temporaries to about 600 MB.
_CHUNK_ROWS = 1 << 18
# Tokens of one sequence handled at once by the ground truth.
_CHUNK_TOKENS = 1 << 16


def device_arch(device: torch.device) -> str:
    """`"gfx950"`, `"sm_90"`, ... or `"cpu"`."""
    if device.type != "cuda":
        return device.type
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def fp8_dtype(device: torch.device) -> torch.dtype:
    """e4m3fnuz (max 240) on gfx942, e4m3fn (max 448) everywhere else."""
    return torch.float8_e4m3fnuz if device_arch(device) == "gfx942" else torch.float8_e4m3fn


# ---------------------------------------------------------------------------------------------------------------------
# fp8: one scale for the whole tensor


def quantize_fp8(x: torch.Tensor, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise with one scale, amax / max; on a bf16 tensor amax, scale and quotient are all bf16 first.

    Args:
        x: bf16 or float32 [rows, ...]
        dtype: the fp8 type; by default the one of x's device.
    Returns:
        (fp8 tensor of x's shape, float32 [1])
    """
    dtype = dtype or fp8_dtype(x.device)
    limit = torch.finfo(dtype).max
    # Piece by piece: the magnitudes of the largest cache alone would be another 2.4 GB.
    amax = torch.stack([part.abs().amax() for part in x.split(_CHUNK_ROWS)]).amax() if x.numel() else x.new_zeros(())
    scale = amax.clamp(min=1e-12) / limit
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    for start in range(0, x.shape[0], _CHUNK_ROWS):
        part = slice(start, start + _CHUNK_ROWS)
        out[part] = (x[part] / scale).clamp(-limit, limit).to(dtype)
    return out, scale.to(torch.float32).reshape(1)


def dequantize_fp8(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """fp8 [...] times its scale, in `dtype`."""
    return x.to(dtype) * scale.to(dtype)


# ---------------------------------------------------------------------------------------------------------------------
# MXFP4: e2m1 codes, two a byte, one E8M0 scale per 32 values


@functools.lru_cache(maxsize=8)
def _e2m1_bounds(ties: str, device: torch.device) -> torch.Tensor:
    """float32 [7]: code = how many of these are <= |x|."""
    middles = [(low + high) / 2 for low, high in itertools.pairwise(E2M1_VALUES)]
    bounds = torch.tensor(middles, dtype=torch.float32)
    if ties == "even":
        # The tie between an even code and the next one stays below, so that bound moves up by one float.
        bounds[::2] = torch.nextafter(bounds[::2], torch.tensor(math.inf))
    return bounds.to(device)


def mxfp4_scale_bytes(amax: torch.Tensor) -> torch.Tensor:
    """E8M0 byte of blocks whose largest magnitude is `amax`: float32 [...] -> uint8 [...].

    Rounds amax's mantissa at 1.75 up to the next power of two, then takes its exponent minus 2 (e2m1's largest).
    """
    rounded = amax.contiguous().view(torch.int32).to(torch.int64) + 0x200000
    field = (rounded >> 23) & 0xFF
    # Field 0 is log2(0) = -inf, field 255 is log2(inf) = inf: both are clamped.
    exponent = torch.where(field == 0, -127, torch.where(field == 255, 127, field - 129)).clamp(-127, 127)
    return (exponent + 127).to(torch.uint8)


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent, int32 in -126..127 -> float32, from its bits: a device's exp2 need not be exact."""
    return ((exponent + 127) << 23).view(torch.float32)


def quantize_mxfp4(
    x: torch.Tensor, ties: str = "away", padded: bool = True, native_types: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows to MXFP4 as aiter's `dynamic_mxfp4_quant` does.

    Args:
        x: bf16 or float32 [rows, n], n a multiple of 32.
        ties: "away" from zero (aiter before 0.1.12, the contest's) or to "even" (from 0.1.12).
        padded: scales of shape [rows up to 256, n / 32 up to 8], as with ties "away" in aiter, or [rows, n / 32].
        native_types: float4_e2m1fn_x2 and float8_e8m0fnu where torch has them, else uint8.
    Returns:
        (codes [rows, n / 2], even index in the low nibble; scales). Padding is 255 (NaN): reading it must show.
    """
    if x.ndim != 2 or x.shape[1] % MX_BLOCK:
        raise ValueError(f"x: expected [rows, multiple of {MX_BLOCK}], got {tuple(x.shape)}")
    if ties not in ("away", "even"):
        raise ValueError(f"ties: expected 'away' or 'even', got {ties!r}")
    rows, n = x.shape
    blocks = n // MX_BLOCK
    bounds = _e2m1_bounds(ties, x.device)
    packed = torch.empty((rows, n // 2), dtype=torch.uint8, device=x.device)
    scale_shape = (-(-rows // 256) * 256, -(-blocks // 8) * 8) if padded else (rows, blocks)
    scales = torch.full(scale_shape, 255, dtype=torch.uint8, device=x.device)
    for start in range(0, rows, _CHUNK_ROWS):
        part = slice(start, min(start + _CHUNK_ROWS, rows))
        values = x[part].to(torch.float32).reshape(-1, blocks, MX_BLOCK)
        scale = mxfp4_scale_bytes(values.abs().amax(-1))
        # x / 2^e as two exact multiplications: 2^-e alone can be denormal.
        exponent = scale.to(torch.int32)[..., None] - 127
        half = exponent // 2
        scaled = values * _power_of_two(-half) * _power_of_two(half - exponent)
        codes = torch.bucketize(scaled.abs(), bounds, out_int32=True, right=True).to(torch.uint8)
        codes |= torch.signbit(scaled).to(torch.uint8) << 3
        codes = codes.reshape(-1, n)
        packed[part] = codes[:, ::2] | (codes[:, 1::2] << 4)
        scales[part, :blocks] = scale
    if native_types and hasattr(torch, "float4_e2m1fn_x2") and hasattr(torch, "float8_e8m0fnu"):
        return packed.view(torch.float4_e2m1fn_x2), scales.view(torch.float8_e8m0fnu)
    return packed, scales


@functools.lru_cache(maxsize=8)
def _e2m1_pairs(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """[256, 2]: both values of every byte, low nibble first."""
    values = torch.tensor(E2M1_VALUES + tuple(-v for v in E2M1_VALUES), dtype=dtype)
    byte = torch.arange(256)
    return torch.stack((values[byte & 15], values[byte >> 4]), -1).to(device)


@functools.lru_cache(maxsize=8)
def _e8m0_values(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """[256]: 2^(byte - 127), and NaN for 255."""
    values = [math.ldexp(1.0, byte - 127) for byte in range(255)] + [math.nan]
    return torch.tensor(values, dtype=torch.float64).to(dtype).to(device)


def dequantize_mxfp4(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of MXFP4 rows.

    Args:
        codes: fp4x2 or uint8 [rows, ..., n / 2]
        scales: e8m0 or uint8 [>= rows, >= n / 32], any strides
        dtype: float32 (6 * 2^127 is infinite there) or float64
    Returns:
        dtype [rows, n]
    """
    rows = codes.shape[0]
    raw = codes.view(torch.uint8).reshape(rows, -1)
    n = 2 * raw.shape[1]
    scale_bytes = scales.view(torch.uint8)[:rows, : n // MX_BLOCK]
    pairs, powers = _e2m1_pairs(raw.device, dtype), _e8m0_values(raw.device, dtype)
    out = torch.empty((rows, n), dtype=dtype, device=raw.device)
    for start in range(0, rows, _CHUNK_ROWS):
        part = slice(start, start + _CHUNK_ROWS)
        values = pairs[raw[part].to(torch.int32)].reshape(-1, n // MX_BLOCK, MX_BLOCK)
        out[part] = (values * powers[scale_bytes[part].to(torch.int32)][..., None]).reshape(-1, n)
    return out


# ---------------------------------------------------------------------------------------------------------------------
# aiter


@functools.lru_cache(maxsize=1)
def _aiter_quantizer() -> Any | None:
    """aiter's own MXFP4 quantiser, or None where aiter is not installed."""
    try:
        from aiter.utility.fp4_utils import dynamic_mxfp4_quant
    except ImportError:
        return None
    return dynamic_mxfp4_quant


def _aiter_decode_reason(data: input_t) -> str | None:
    """Why the contest's own reference kernel cannot take this input, or None."""
    q, _, _, kv_indptr, config = data
    if device_arch(q.device) != "gfx950":
        return f"needs gfx950, this is {device_arch(q.device)}"
    try:
        from aiter import get_mla_metadata_info_v1, get_mla_metadata_v1  # noqa: F401
        from aiter.mla import mla_decode_fwd  # noqa: F401
    except ImportError as error:
        return f"aiter cannot be imported: {error}"
    if config["q_seq_len"] != 1:
        return f"q_seq_len: expected 1, got {config['q_seq_len']}"
    shortest = int((kv_indptr[1:] - kv_indptr[:-1]).min())
    if shortest < AITER_MIN_TOKENS:
        return f"a sequence has {shortest} tokens, expected {AITER_MIN_TOKENS} or more"
    return None


def _aiter_decode(data: input_t) -> output_t:
    """fp8 queries over the fp8 cache with aiter's persistent kernel, as the contest's reference calls it."""
    from aiter import get_mla_metadata_info_v1, get_mla_metadata_v1
    from aiter.mla import mla_decode_fwd

    q, kv_data, qo_indptr, kv_indptr, config = data
    kv, kv_scale = kv_data["fp8"]
    q_fp8, q_scale = quantize_fp8(q, kv.dtype)
    batch, heads = qo_indptr.numel() - 1, q.shape[1]

    info_args = (batch, 1, heads, q_fp8.dtype, kv.dtype)
    sizes = get_mla_metadata_info_v1(
        *info_args, is_sparse=False, fast_mode=False, num_kv_splits=AITER_SPLITS, intra_batch_mode=True
    )
    work = [torch.empty(shape, dtype=dtype, device=q.device) for shape, dtype in sizes]
    work_metadata, work_indptr, work_info, reduce_indptr, reduce_final, reduce_partial = work
    lengths = (kv_indptr[1:] - kv_indptr[:-1]).to(torch.int32)

    parameters = inspect.signature(get_mla_metadata_v1).parameters
    if "kv_granularity" not in parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        raise RuntimeError(f"aiter: get_mla_metadata_v1 has an unknown signature: {list(parameters)}")
    get_mla_metadata_v1(
        qo_indptr,
        kv_indptr,
        lengths,
        heads,
        1,
        True,
        work_metadata,
        work_info,
        work_indptr,
        reduce_indptr,
        reduce_final,
        reduce_partial,
        page_size=1,
        kv_granularity=AITER_GRANULARITY,
        max_seqlen_qo=1,
        uni_seqlen_qo=1,
        fast_mode=False,
        max_split_per_batch=AITER_SPLITS,
        intra_batch_mode=True,
        dtype_q=q_fp8.dtype,
        dtype_kv=kv.dtype,
    )
    out = torch.empty((q.shape[0], heads, V_HEAD_DIM), dtype=torch.bfloat16, device=q.device)
    mla_decode_fwd(
        q_fp8,
        kv.view(kv.shape[0], 1, 1, kv.shape[-1]),
        out,
        qo_indptr,
        kv_indptr,
        torch.arange(kv.shape[0], dtype=torch.int32, device=q.device),
        lengths,
        1,
        page_size=1,
        nhead_kv=1,
        sm_scale=config["sm_scale"],
        logit_cap=0.0,
        num_kv_splits=AITER_SPLITS,
        q_scale=q_scale,
        kv_scale=kv_scale,
        intra_batch_mode=True,
        work_meta_data=work_metadata,
        work_indptr=work_indptr,
        work_info_set=work_info,
        reduce_indptr=reduce_indptr,
        reduce_final_map=reduce_final,
        reduce_partial_map=reduce_partial,
    )
    return out


# ---------------------------------------------------------------------------------------------------------------------
# Inputs


def quantize_caches(kv: torch.Tensor) -> dict[str, Any]:
    """The three caches of a bf16 cache [total_kv, 1, 576]; aiter's quantiser makes the MXFP4 one where it is there."""
    flat = kv.view(kv.shape[0], -1)
    native = _aiter_quantizer()
    if native is not None and kv.is_cuda and kv.shape[0]:
        codes, scales = native(flat)
    else:
        codes, scales = quantize_mxfp4(flat)
    return {"bf16": kv, "fp8": quantize_fp8(kv), "mxfp4": (codes.view(kv.shape[0], 1, -1), scales)}


def assemble_input(q: torch.Tensor, kv: torch.Tensor, lengths: list[int], kv_seq_len: int | None = None) -> input_t:
    """The contest's tuple from queries and a bf16 cache.

    Args:
        q: bf16 [total_q, heads, 576], total_q a multiple of the number of sequences.
        kv: bf16 [sum(lengths), 1, 576]
        lengths: tokens of each sequence.
        kv_seq_len: what the config says; the longest length by default.
    """
    batch = len(lengths)
    q_len = q.shape[0] // batch
    kv_indptr = torch.zeros(batch + 1, dtype=torch.int32)
    kv_indptr[1:] = torch.tensor(lengths, dtype=torch.int64).cumsum(0)
    config = {
        "batch_size": batch,
        "num_heads": q.shape[1],
        "num_kv_heads": NUM_KV_HEADS,
        "qk_head_dim": QK_HEAD_DIM,
        "kv_lora_rank": KV_LORA_RANK,
        "qk_rope_head_dim": QK_ROPE_HEAD_DIM,
        "v_head_dim": V_HEAD_DIM,
        "q_seq_len": q_len,
        "kv_seq_len": max(lengths) if kv_seq_len is None else kv_seq_len,
        "sm_scale": SM_SCALE,
    }
    qo_indptr = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * q_len
    return q, quantize_caches(kv), qo_indptr, kv_indptr.to(q.device), config


def generate_input(
    batchsize: int, qseqlen: int, kvseqlen: int, seed: int, device: torch.device | str | None = None
) -> input_t:
    """One case of the contest: q, then the cache, both N(0, 1) in bf16 from one generator.

    Args:
        batchsize, qseqlen, kvseqlen: sequences, queries and tokens per sequence.
        seed: of the generator.
        device: the GPU where there is one, by default. The numbers of one seed differ between kinds of device.
    """
    for name, value in (("batchsize", batchsize), ("qseqlen", qseqlen), ("kvseqlen", kvseqlen)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}: expected an integer of 1 or more, got {value!r}")
    where = get_device() if device is None else torch.device(device)
    generator = torch.Generator(device=where)
    generator.manual_seed(seed)
    q = torch.randn(
        (batchsize * qseqlen, NUM_HEADS, QK_HEAD_DIM), dtype=torch.bfloat16, device=where, generator=generator
    )
    kv = torch.randn(
        (batchsize * kvseqlen, NUM_KV_HEADS, QK_HEAD_DIM), dtype=torch.bfloat16, device=where, generator=generator
    )
    return assemble_input(q, kv, [kvseqlen] * batchsize)


def output_shape(data: input_t) -> tuple[int, int, int]:
    """(total_q, heads, dims) of the output for this input."""
    return (data[0].shape[0], data[0].shape[1], data[4]["v_head_dim"])


# ---------------------------------------------------------------------------------------------------------------------
# Ground truth


def _cache_rows(kv_data: dict[str, Any], cache: str, begin: int, end: int, dtype: torch.dtype) -> torch.Tensor:
    """Tokens begin..end of one cache as dtype [end - begin, 576]."""
    if cache == "bf16":
        return kv_data["bf16"][begin:end].reshape(end - begin, -1).to(dtype)
    values, scale = kv_data[cache]
    if cache == "fp8":
        return dequantize_fp8(values[begin:end].reshape(end - begin, -1), scale, dtype)
    return dequantize_mxfp4(values[begin:end], scale[begin:end], dtype)


@torch.no_grad()
def attention_truth(
    data: input_t,
    cache: str = "mxfp4",
    dtype: torch.dtype = torch.float64,
    q: str = "bf16",
    rows: Iterable[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over one of the three caches in high precision, sequence by sequence.

    Args:
        data: the contest's tuple; lengths may differ and may be 0.
        cache: "bf16", "fp8" or "mxfp4"; the latter two are dequantised exactly.
        dtype: float64, or float32 where speed matters.
        q: "bf16" as given, or "fp8" quantised with one scale first.
        rows: the sequences to compute, all by default.
    Returns:
        out: dtype [queries of these sequences, heads, 512]; zeros for an empty sequence.
        lse: dtype [queries of these sequences, heads], natural log of the sum of exponentials; -inf for an empty one.
    """
    if cache not in CACHES:
        raise ValueError(f"cache: expected one of {CACHES}, got {cache!r}")
    if q not in ("bf16", "fp8"):
        raise ValueError(f"q: expected 'bf16' or 'fp8', got {q!r}")
    queries, kv_data, qo_indptr, kv_indptr, config = data
    heads, v_dim = queries.shape[1], config["v_head_dim"]
    exact_q = queries.to(dtype)
    if q == "fp8":
        exact_q = dequantize_fp8(*quantize_fp8(queries), dtype)
    exact_q = exact_q * config["sm_scale"]
    qo, kv = qo_indptr.tolist(), kv_indptr.tolist()
    sequences = range(len(qo) - 1) if rows is None else list(rows)
    total = sum(qo[i + 1] - qo[i] for i in sequences)
    out = torch.zeros((total, heads, v_dim), dtype=dtype, device=queries.device)
    lse = torch.full((total, heads), -math.inf, dtype=dtype, device=queries.device)
    at = 0
    for i in sequences:
        count = qo[i + 1] - qo[i]
        part = exact_q[qo[i] : qo[i + 1]].reshape(count * heads, -1)
        acc: torch.Tensor | None = None
        norm = peak = torch.empty(0)
        for begin in range(kv[i], kv[i + 1], _CHUNK_TOKENS):
            tokens = _cache_rows(kv_data, cache, begin, min(begin + _CHUNK_TOKENS, kv[i + 1]), dtype)
            scores = part @ tokens.T
            top = scores.amax(-1, keepdim=True)
            if acc is not None:
                top = torch.maximum(top, peak)
            weights = torch.exp(scores - top)
            new_acc, new_norm = weights @ tokens[:, :v_dim], weights.sum(-1, keepdim=True)
            if acc is not None:
                keep = torch.exp(peak - top)
                new_acc, new_norm = new_acc + acc * keep, new_norm + norm * keep
            acc, norm, peak = new_acc, new_norm, top
        if acc is not None:
            out[at : at + count] = (acc / norm).view(count, heads, v_dim)
            lse[at : at + count] = (norm.log() + peak).view(count, heads)
        at += count
    return out, lse


def relative_l2(out: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """|out - truth| / |truth| per (query token, head): [..., dims] twice -> float64 [...].

    0 where both are all zeros, infinite where the error is not finite.
    """
    want = truth.to(torch.float64)
    error = torch.linalg.vector_norm(out.to(torch.float64) - want, dim=-1)
    size = torch.linalg.vector_norm(want, dim=-1)
    ratio = torch.where(error == 0, 0.0, error / size)
    return torch.where(ratio.isnan(), math.inf, ratio)


# ---------------------------------------------------------------------------------------------------------------------
# The contest's reference and check


def reference_backend(data: input_t) -> str:
    """What `ref_kernel` uses for this input: "aiter-fp8", or "torch-fp8" with the reason."""
    reason = _aiter_decode_reason(data)
    return "aiter-fp8" if reason is None else f"torch-fp8 ({reason})"


def ref_kernel(data: input_t) -> output_t:
    """The contest's reference: fp8 queries over the fp8 cache, bf16 [total_q, heads, 512].

    aiter's kernel where aiter and a gfx950 are there, else the same attention in float32.
    """
    if _aiter_decode_reason(data) is None:
        return _aiter_decode(data)
    return attention_truth(data, "fp8", torch.float32, q="fp8")[0].to(torch.bfloat16)


check_implementation = make_match_reference(
    ref_kernel, rtol=CONTEST_RTOL, atol=CONTEST_ATOL, max_error_ratio=CONTEST_MISS_RATIO
)
