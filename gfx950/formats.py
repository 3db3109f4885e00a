"""Number formats of the CDNA4 matrix and conversion instructions: value tables, encoders, bfloat16."""

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def _small_float_values(exponent_bits: int, mantissa_bits: int, bias: int) -> Array:
    """Values of every code of a sign + exponent + mantissa format without special values: float64 [2^bits]."""
    code = np.arange(1 << (1 + exponent_bits + mantissa_bits))
    sign = np.where(code >> (exponent_bits + mantissa_bits), -1.0, 1.0)
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    fraction = (code & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    subnormal = fraction * 2.0 ** (1 - bias)
    normal = (1.0 + fraction) * 2.0 ** (exponent - bias)
    return np.asarray(sign * np.where(exponent == 0, subnormal, normal))


def _e4m3fn_values() -> Array:
    values = _small_float_values(4, 3, 7)
    values[[0x7F, 0xFF]] = np.nan
    return values


def _e5m2_values() -> Array:
    values = _small_float_values(5, 2, 15)
    values[[0x7C, 0xFC]] = np.inf, -np.inf
    values[[0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]] = np.nan
    return values


FP4_VALUES = _small_float_values(2, 1, 1)
FP6_VALUES = _small_float_values(2, 3, 1)
BF6_VALUES = _small_float_values(3, 2, 3)
FP8_VALUES = _e4m3fn_values()
BF8_VALUES = _e5m2_values()
# Scale bytes: 2^(b - 127), NaN for 255.
E8M0_VALUES = np.append(np.exp2(np.arange(255) - 127.0), np.nan)


def bf16_bits(values: Any) -> Array:
    """Round float32 to bfloat16, ties to even; the bits in the low half of a uint32."""
    single = np.asarray(values, np.float32)
    bits = single.view(np.uint32)
    # Only a NaN can overflow here, and it is replaced.
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(single), np.uint32(0x7FFF), rounded)


def bf16_values(bits: Any) -> Array:
    """float32 values of bfloat16 bits (any unsigned integer type, low 16 bits used)."""
    return (np.asarray(bits).astype(np.uint32) << 16).view(np.float32)


def f16_bits(values: Any) -> Array:
    """Round to float16; the bits in the low half of a uint32."""
    return np.asarray(values, np.float16).view(np.uint16).astype(np.uint32)


def _encode_nearest(values: Array, positive: Array) -> Array:
    """Index of the nearest entry of `positive` (ascending, from 0) to |value|: ties to the even code, saturating."""
    magnitude = np.minimum(np.abs(values), positive[-1])
    upper = np.clip(np.searchsorted(positive, magnitude), 1, len(positive) - 1)
    below, above = magnitude - positive[upper - 1], positive[upper] - magnitude
    take_lower = (below < above) | ((below == above) & ((upper - 1) % 2 == 0))
    return np.where(take_lower, upper - 1, upper)


def encode_fp4(values: Array) -> Array:
    """float64 -> e2m1 codes as uint32, saturating at 6."""
    code = _encode_nearest(values, FP4_VALUES[:8])
    return (code | (np.signbit(values).astype(np.int64) << 3)).astype(np.uint32)


def encode_fp8(values: Array, kind: str = "FP8") -> Array:
    """float64 -> e4m3fn ("FP8") or e5m2 ("BF8") codes as uint32, saturating at the largest finite value."""
    positive = FP8_VALUES[:0x7F] if kind == "FP8" else BF8_VALUES[:0x7C]
    code = np.where(np.isnan(values), 0x7F, _encode_nearest(values, positive))
    return (code | (np.signbit(values).astype(np.int64) << 7)).astype(np.uint32)
