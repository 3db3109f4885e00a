"""What the regular vector instructions compute, as numpy functions without any notion of a wave.

The kinds of a source or result: u uint32, i int32, f float32, h float16 (low or high half of a register), U uint64.
A function whose result kind is "f" may return float64; it is rounded when written.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .formats import Array, bf16_bits, f16_bits

U32, U64, I32, I64 = np.uint32, np.uint64, np.int32, np.int64
F32, F64 = np.float32, np.float64


@dataclass(frozen=True, slots=True)
class VectorOp:
    """Kinds of the sources, the function, kind of the result."""

    sources: str
    function: Callable[..., Any]
    result: str


def fused_multiply_add(a: Any, b: Any, c: Any) -> Any:
    """a * b + c with one rounding to float32 (the product is exact in float64)."""
    return (a.astype(F64) * b.astype(F64) + c.astype(F64)).astype(F32)


def _signed24(x: Any) -> Any:
    return (x.view(I32) << 8) >> 8


def _bit_reverse(x: Any) -> Any:
    for shift, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF), (16, 0x0000FFFF)):
        x = ((x >> shift) & mask) | ((x & mask) << shift)
    return x


def _to_integer(x: Any, low: int, high: int, dtype: Any) -> Any:
    """Float to integer: truncates, clamps, NaN becomes 0."""
    return np.where(np.isnan(x), 0, np.clip(np.trunc(x.astype(F64)), low, high)).astype(I64).astype(dtype)


def _median3(a: Any, b: Any, c: Any) -> Any:
    return np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))


def _extract_unsigned(value: Any, offset: Any, length: Any) -> Any:
    return (value >> (offset & 31)) & ((U32(1) << (length & 31)) - 1)


def _extract_signed(value: Any, offset: Any, length: Any) -> Any:
    offset, length = (offset & 31).astype(I64), (length & 31).astype(I64)
    shift = 64 - np.maximum(length, 1)
    field = (value.astype(I64) >> offset) & ((I64(1) << length) - 1)
    return np.where(length == 0, 0, (field << shift) >> shift).astype(I32).view(U32)


def _permute_bytes(high: Any, low: Any, selector: Any) -> Any:
    """v_perm_b32: each selector byte picks a byte of {high, low}, a replicated sign bit (8..11), 0x00 or 0xff."""
    if np.ndim(selector) == 0:
        return _permute_bytes_alike(high, low, int(selector))
    result = np.zeros(np.broadcast_shapes(np.shape(high), np.shape(low), np.shape(selector)), U32)
    for choices in np.unique(selector):
        alike = selector == choices
        np.copyto(result, _permute_bytes_alike(high, low, int(choices)), where=alike)
    return result


def _permute_bytes_alike(high: Any, low: Any, selector: int) -> Any:
    """The same for a selector that all lanes share."""
    result: Any = U32(0)
    for position in range(4):
        choice = (selector >> (8 * position)) & 0xFF
        if choice < 8:
            picked = ((high if choice >= 4 else low) >> (8 * (choice & 3))) & 0xFF
        elif choice < 12:
            # Bit 15 or 31 of the low or the high word.
            picked = (((high if choice >= 10 else low) >> (16 * (choice & 1) + 15)) & 1) * U32(0xFF)
        else:
            picked = U32(0 if choice == 12 else 0xFF)
        result = result | (picked << (8 * position))
    return result


def _align(high: Any, low: Any, shift: Any) -> Any:
    """The low word of the 64-bit value {high, low} shifted right."""
    return (((high.astype(U64) << 32) | low.astype(U64)) >> shift.astype(U64)).astype(U32)


def _exponent_field(x: Any) -> Any:
    return ((x.view(U32) >> 23) & 0xFF).astype(I32)


def _division_fixup(quotient: Any, denominator: Any, numerator: Any) -> Any:
    """v_div_fixup_f32: the special cases of numerator / denominator."""
    negative = np.signbit(denominator) ^ np.signbit(numerator)
    infinity = np.where(negative, F32(-np.inf), F32(np.inf))
    zero = np.where(negative, F32(-0.0), F32(0.0))
    underflow = _exponent_field(numerator) - _exponent_field(denominator) < -150
    result = np.where(negative, -np.abs(quotient), np.abs(quotient))
    # A quotient that overflows leaves inf - inf in the refinement steps before.
    result = np.where(np.isnan(quotient), infinity, result)
    result = np.where(underflow | np.isinf(denominator) | (numerator == 0), zero, result)
    result = np.where((denominator == 0) | np.isinf(numerator), infinity, result)
    invalid = ((denominator == 0) & (numerator == 0)) | (np.isinf(denominator) & np.isinf(numerator))
    invalid |= np.isnan(denominator) | np.isnan(numerator)
    return np.where(invalid, F32(np.nan), result).astype(F32)


def _frexp_exponent(a: Any) -> Any:
    return np.where(np.isfinite(a), np.frexp(a)[1], 0).astype(I32).view(U32)


def _multiply_high(a: Any, b: Any) -> Any:
    return ((a.astype(U64) * b.astype(U64)) >> 32).astype(U32)


def _multiply_high_signed(a: Any, b: Any) -> Any:
    return ((a.astype(I64) * b.astype(I64)) >> 32).astype(I32).view(U32)


def _pack_halves(low: Any, high: Any) -> Any:
    return low | (high << 16)


def _pack_bf16(a: Any, b: Any) -> Any:
    return _pack_halves(bf16_bits(a), bf16_bits(b))


def _pack_f16(a: Any, b: Any) -> Any:
    return _pack_halves(f16_bits(a), f16_bits(b))


def _f16_toward_zero(x: Any) -> Any:
    nearest = np.asarray(x.astype(np.float16))
    return np.where(np.abs(nearest.astype(F32)) > np.abs(x), np.nextafter(nearest, np.float16(0)), nearest)


def _pack_f16_toward_zero(a: Any, b: Any) -> Any:
    return _pack_f16(_f16_toward_zero(a), _f16_toward_zero(b))


def _leading_zeros(x: Any) -> Any:
    exponent = np.frexp(x.astype(F64))[1]
    return np.where(x == 0, -1, 32 - exponent).astype(I32).view(U32)


def _trailing_zeros(x: Any) -> Any:
    return np.where(x == 0, U32(0xFFFFFFFF), np.bitwise_count((x & (~x + 1)) - 1).astype(U32))


def _unsigned_byte(position: int) -> Callable[[Any], Any]:
    return lambda a: ((a >> (8 * position)) & 0xFF).astype(F32)


def _low16(a: Any) -> Any:
    return a & 0xFFFF


VECTOR_OPS: dict[str, VectorOp] = {
    # Moves and bits.
    "V_MOV_B32": VectorOp("u", lambda a: a, "u"),
    "V_MOV_B64": VectorOp("U", lambda a: a, "U"),
    "V_NOT_B32": VectorOp("u", lambda a: ~a, "u"),
    "V_BFREV_B32": VectorOp("u", _bit_reverse, "u"),
    "V_FFBH_U32": VectorOp("u", _leading_zeros, "u"),
    "V_FFBL_B32": VectorOp("u", _trailing_zeros, "u"),
    "V_BCNT_U32_B32": VectorOp("uu", lambda a, b: np.bitwise_count(a).astype(U32) + b, "u"),
    "V_AND_B32": VectorOp("uu", lambda a, b: a & b, "u"),
    "V_OR_B32": VectorOp("uu", lambda a, b: a | b, "u"),
    "V_XOR_B32": VectorOp("uu", lambda a, b: a ^ b, "u"),
    "V_XNOR_B32": VectorOp("uu", lambda a, b: ~(a ^ b), "u"),
    "V_AND_OR_B32": VectorOp("uuu", lambda a, b, c: (a & b) | c, "u"),
    "V_OR3_B32": VectorOp("uuu", lambda a, b, c: a | b | c, "u"),
    "V_BFE_U32": VectorOp("uuu", _extract_unsigned, "u"),
    "V_BFE_I32": VectorOp("iuu", _extract_signed, "u"),
    "V_BFI_B32": VectorOp("uuu", lambda a, b, c: (a & b) | (~a & c), "u"),
    "V_BFM_B32": VectorOp("uu", lambda a, b: ((U32(1) << (a & 31)) - 1) << (b & 31), "u"),
    "V_ALIGNBIT_B32": VectorOp("uuu", lambda a, b, c: _align(a, b, c & 31), "u"),
    "V_ALIGNBYTE_B32": VectorOp("uuu", lambda a, b, c: _align(a, b, (c & 3) * 8), "u"),
    "V_PERM_B32": VectorOp("uuu", _permute_bytes, "u"),
    "V_LSHLREV_B32": VectorOp("uu", lambda a, b: b << (a & 31), "u"),
    "V_LSHRREV_B32": VectorOp("uu", lambda a, b: b >> (a & 31), "u"),
    "V_ASHRREV_I32": VectorOp("uu", lambda a, b: (b.view(I32) >> (a & 31).view(I32)).view(U32), "u"),
    "V_LSHLREV_B64": VectorOp("uU", lambda a, b: b << (a & 63).astype(U64), "U"),
    "V_LSHRREV_B64": VectorOp("uU", lambda a, b: b >> (a & 63).astype(U64), "U"),
    "V_ASHRREV_I64": VectorOp("uU", lambda a, b: (b.view(I64) >> (a & 63).astype(I64)).view(U64), "U"),
    "V_LSHLREV_B16": VectorOp("uu", lambda a, b: (_low16(b) << (a & 15)) & 0xFFFF, "u"),
    "V_LSHRREV_B16": VectorOp("uu", lambda a, b: _low16(b) >> (a & 15), "u"),
    # Integer arithmetic.
    "V_ADD_U32": VectorOp("uu", lambda a, b: a + b, "u"),
    "V_SUB_U32": VectorOp("uu", lambda a, b: a - b, "u"),
    "V_SUBREV_U32": VectorOp("uu", lambda a, b: b - a, "u"),
    "V_ADD_U16": VectorOp("uu", lambda a, b: (a + b) & 0xFFFF, "u"),
    "V_SUB_U16": VectorOp("uu", lambda a, b: (a - b) & 0xFFFF, "u"),
    "V_MUL_LO_U16": VectorOp("uu", lambda a, b: (_low16(a) * _low16(b)) & 0xFFFF, "u"),
    "V_MUL_U32_U24": VectorOp("uu", lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF), "u"),
    "V_MUL_I32_I24": VectorOp("uu", lambda a, b: (_signed24(a) * _signed24(b)).view(U32), "u"),
    "V_MUL_LO_U32": VectorOp("uu", lambda a, b: a * b, "u"),
    "V_MUL_HI_U32": VectorOp("uu", _multiply_high, "u"),
    "V_MUL_HI_I32": VectorOp("ii", _multiply_high_signed, "u"),
    "V_MAX_I32": VectorOp("ii", np.maximum, "i"),
    "V_MIN_I32": VectorOp("ii", np.minimum, "i"),
    "V_MAX_U32": VectorOp("uu", np.maximum, "u"),
    "V_MIN_U32": VectorOp("uu", np.minimum, "u"),
    "V_MAX3_I32": VectorOp("iii", lambda a, b, c: np.maximum(np.maximum(a, b), c), "i"),
    "V_MIN3_I32": VectorOp("iii", lambda a, b, c: np.minimum(np.minimum(a, b), c), "i"),
    "V_MED3_I32": VectorOp("iii", _median3, "i"),
    "V_MAX3_U32": VectorOp("uuu", lambda a, b, c: np.maximum(np.maximum(a, b), c), "u"),
    "V_MIN3_U32": VectorOp("uuu", lambda a, b, c: np.minimum(np.minimum(a, b), c), "u"),
    "V_MAD_U32_U24": VectorOp("uuu", lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF) + c, "u"),
    "V_MAD_I32_I24": VectorOp("uuu", lambda a, b, c: (_signed24(a) * _signed24(b)).view(U32) + c, "u"),
    "V_ADD3_U32": VectorOp("uuu", lambda a, b, c: a + b + c, "u"),
    "V_LSHL_ADD_U32": VectorOp("uuu", lambda a, b, c: (a << (b & 31)) + c, "u"),
    "V_ADD_LSHL_U32": VectorOp("uuu", lambda a, b, c: (a + b) << (c & 31), "u"),
    "V_LSHL_OR_B32": VectorOp("uuu", lambda a, b, c: (a << (b & 31)) | c, "u"),
    "V_XAD_U32": VectorOp("uuu", lambda a, b, c: (a ^ b) + c, "u"),
    "V_LSHL_ADD_U64": VectorOp("UuU", lambda a, b, c: (a << (b & 7).astype(U64)) + c, "U"),
    # Float arithmetic.
    "V_ADD_F32": VectorOp("ff", lambda a, b: a + b, "f"),
    "V_SUB_F32": VectorOp("ff", lambda a, b: a - b, "f"),
    "V_SUBREV_F32": VectorOp("ff", lambda a, b: b - a, "f"),
    "V_MUL_F32": VectorOp("ff", lambda a, b: a * b, "f"),
    "V_MAX_F32": VectorOp("ff", np.fmax, "f"),
    "V_MIN_F32": VectorOp("ff", np.fmin, "f"),
    "V_FMA_F32": VectorOp("fff", fused_multiply_add, "f"),
    "V_MAX3_F32": VectorOp("fff", lambda a, b, c: np.fmax(np.fmax(a, b), c), "f"),
    "V_MIN3_F32": VectorOp("fff", lambda a, b, c: np.fmin(np.fmin(a, b), c), "f"),
    "V_MED3_F32": VectorOp("fff", _median3, "f"),
    "V_MAXIMUM3_F32": VectorOp("fff", lambda a, b, c: np.maximum(np.maximum(a, b), c), "f"),
    "V_MINIMUM3_F32": VectorOp("fff", lambda a, b, c: np.minimum(np.minimum(a, b), c), "f"),
    "V_LDEXP_F32": VectorOp("fi", lambda a, b: np.ldexp(a.astype(F64), np.clip(b, -2000, 2000)).astype(F32), "f"),
    "V_FLOOR_F32": VectorOp("f", np.floor, "f"),
    "V_CEIL_F32": VectorOp("f", np.ceil, "f"),
    "V_TRUNC_F32": VectorOp("f", np.trunc, "f"),
    "V_RNDNE_F32": VectorOp("f", np.rint, "f"),
    "V_FRACT_F32": VectorOp("f", lambda a: a - np.floor(a), "f"),
    "V_FREXP_EXP_I32_F32": VectorOp("f", _frexp_exponent, "u"),
    "V_FREXP_MANT_F32": VectorOp("f", lambda a: np.frexp(a)[0].astype(F32), "f"),
    "V_EXP_F32": VectorOp("f", lambda a: np.exp2(a.astype(F64)).astype(F32), "f"),
    "V_LOG_F32": VectorOp("f", lambda a: np.log2(a.astype(F64)).astype(F32), "f"),
    "V_RCP_F32": VectorOp("f", lambda a: F32(1) / a, "f"),
    "V_RCP_IFLAG_F32": VectorOp("f", lambda a: F32(1) / a, "f"),
    "V_RSQ_F32": VectorOp("f", lambda a: (1 / np.sqrt(a.astype(F64))).astype(F32), "f"),
    "V_SQRT_F32": VectorOp("f", np.sqrt, "f"),
    "V_DIV_FIXUP_F32": VectorOp("fff", _division_fixup, "f"),
    "V_ADD_F16": VectorOp("hh", lambda a, b: f16_bits(a + b), "u"),
    "V_SUB_F16": VectorOp("hh", lambda a, b: f16_bits(a - b), "u"),
    "V_MUL_F16": VectorOp("hh", lambda a, b: f16_bits(a * b), "u"),
    "V_MAX_F16": VectorOp("hh", lambda a, b: f16_bits(np.fmax(a, b)), "u"),
    "V_MIN_F16": VectorOp("hh", lambda a, b: f16_bits(np.fmin(a, b)), "u"),
    # Conversions.
    "V_CVT_F32_I32": VectorOp("i", lambda a: a.astype(F32), "f"),
    "V_CVT_F32_U32": VectorOp("u", lambda a: a.astype(F32), "f"),
    "V_CVT_U32_F32": VectorOp("f", lambda a: _to_integer(a, 0, 2**32 - 1, U32), "u"),
    "V_CVT_I32_F32": VectorOp("f", lambda a: _to_integer(a, -(2**31), 2**31 - 1, I32).view(U32), "u"),
    "V_CVT_F16_F32": VectorOp("f", f16_bits, "u"),
    "V_CVT_F32_F16": VectorOp("h", lambda a: a.astype(F32), "f"),
    "V_CVT_F32_BF16": VectorOp("u", lambda a: (_low16(a) << 16).view(F32), "f"),
    "V_CVT_F32_UBYTE0": VectorOp("u", _unsigned_byte(0), "f"),
    "V_CVT_F32_UBYTE1": VectorOp("u", _unsigned_byte(1), "f"),
    "V_CVT_F32_UBYTE2": VectorOp("u", _unsigned_byte(2), "f"),
    "V_CVT_F32_UBYTE3": VectorOp("u", _unsigned_byte(3), "f"),
    "V_CVT_PK_BF16_F32": VectorOp("ff", _pack_bf16, "u"),
    "V_CVT_PKRTZ_F16_F32": VectorOp("ff", _pack_f16_toward_zero, "u"),
    "V_PACK_B32_F16": VectorOp("uu", lambda a, b: _low16(a) | (b << 16), "u"),
}


def _unordered(a: Any, b: Any) -> Any:
    return np.isnan(a) | np.isnan(b)


COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "LT": lambda a, b: a < b,
    "EQ": lambda a, b: a == b,
    "LE": lambda a, b: a <= b,
    "GT": lambda a, b: a > b,
    "LG": lambda a, b: (a < b) | (a > b),
    "NE": lambda a, b: a != b,
    "GE": lambda a, b: a >= b,
    "O": lambda a, b: ~_unordered(a, b),
    "U": _unordered,
    "NGE": lambda a, b: ~(a >= b),
    "NLG": lambda a, b: ~((a < b) | (a > b)),
    "NGT": lambda a, b: ~(a > b),
    "NLE": lambda a, b: ~(a <= b),
    "NEQ": lambda a, b: ~(a == b),
    "NLT": lambda a, b: ~(a < b),
}


def float_class(value: Any, mask: Any) -> Array:
    """v_cmp_class_f32: whether the value belongs to one of the classes whose bits are set in the mask."""
    bits = value.view(U32)
    exponent, fraction, negative = (bits >> 23) & 0xFF, bits & 0x7FFFFF, (bits >> 31).astype(bool)
    special, subnormal = exponent == 255, exponent == 0
    nan, infinite = special & (fraction != 0), special & (fraction == 0)
    normal, denormal, zero = ~special & ~subnormal, subnormal & (fraction != 0), subnormal & (fraction == 0)
    quiet = fraction >> 22 != 0
    by_sign = (infinite, normal, denormal, zero)
    # Bits 0 to 9: signalling NaN, quiet NaN, -inf, -normal, -denormal, -0, +0, +denormal, +normal, +inf.
    classes = [nan & ~quiet, nan & quiet, *(c & negative for c in by_sign), *(c & ~negative for c in by_sign[::-1])]
    mask = np.broadcast_to(mask, np.shape(value))
    result = np.zeros(np.shape(value), np.bool_)
    for bit, member in enumerate(classes):
        result |= member & (((mask >> bit) & 1) != 0)
    return result
