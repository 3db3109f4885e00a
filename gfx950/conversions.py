"""Conversions to and from fp8, fp6 and fp4: the scaled ones of gfx950 (v_cvt_scalef32_*) and the plain fp8 ones.

The scale of a scaled conversion is a float32 of which only the exponent field counts: it is read as an E8M0 byte, so
field 0 means 2^-127 and field 255 means NaN. The source or destination part of a register is picked by op_sel.
"""

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from .decoder import Instruction
from .errors import UnsupportedInstructionError
from .formats import (
    BF8_VALUES,
    E8M0_VALUES,
    FP4_VALUES,
    FP8_VALUES,
    Array,
    bf16_bits,
    bf16_values,
    encode_fp4,
    encode_fp8,
    f16_bits,
)
from .wave import MASK32, Reader, Step, Wave, float_reader, vector_reader

_EXPAND = re.compile(r"V_CVT_SCALEF32_PK_(F32|F16|BF16)_(FP4|FP8|BF8)")
_SHRINK = re.compile(r"V_CVT_SCALEF32_PK_(FP4|FP8|BF8)_(F32|F16|BF16)")
_CODE_VALUES = {"FP4": FP4_VALUES, "FP8": FP8_VALUES, "BF8": BF8_VALUES}
_CODE_BITS = {"FP4": 4, "FP8": 8, "BF8": 8}


_RESULT_BITS: dict[str, Callable[[Any], Array]] = {
    "F32": lambda values: values.astype(np.float32).view(np.uint32),
    "F16": f16_bits,
    "BF16": bf16_bits,
}


@cache
def _expanded_bits(source: str, kind: str) -> Array:
    """Bits of every code under every scale byte: uint32 [256 scales * codes], code fastest."""
    with np.errstate(all="ignore"):
        return _RESULT_BITS[kind](np.outer(E8M0_VALUES, _CODE_VALUES[source])).ravel()


def build_scaled_conversion(inst: Instruction) -> Step:
    expand = _EXPAND.fullmatch(inst.name)
    if expand:
        return _build_expand(inst, *expand.groups())
    shrink = _SHRINK.fullmatch(inst.name)
    if shrink:
        return _build_shrink(inst, *shrink.groups())
    raise UnsupportedInstructionError(inst.opcode)


def _build_expand(inst: Instruction, kind: str, source: str) -> Step:
    """Two codes of one source byte (fp4) or half (fp8) to two wider values, by a table over scales and codes."""
    fields = inst.fields
    codes, scale, dst = vector_reader(fields.src0), vector_reader(fields.src1), fields.vdst
    width = _CODE_BITS[source]
    shift = (fields.opsel & 3) * 8 if source == "FP4" else (fields.opsel & 1) * 16
    code_mask = (1 << width) - 1
    table = _expanded_bits(source, kind)
    packed_result = kind != "F32"

    def run(wave: Wave) -> None:
        packed = codes(wave) >> shift
        row = ((scale(wave) >> 23) & 0xFF) << width
        low, high = table[row | (packed & code_mask)], table[row | ((packed >> width) & code_mask)]
        if packed_result:
            wave.write_vgpr(dst, low | (high << 16))
        else:
            wave.write_vgpr(dst, low)
            wave.write_vgpr(dst + 1, high)

    return run


def _build_shrink(inst: Instruction, target: str, kind: str) -> Step:
    """Two wider values, divided by the scale, to two codes in one byte (fp4) or half (fp8) of the destination."""
    fields = inst.fields
    dst = fields.vdst
    scale = vector_reader(fields.src2 if kind == "F32" else fields.src1)
    width = _CODE_BITS[target]
    shift = ((fields.opsel >> 2) & 3) * 8 if target == "FP4" else ((fields.opsel >> 3) & 1) * 16
    keep = ~(((1 << 2 * width) - 1) << shift) & MASK32

    if kind == "F32":
        first = float_reader(fields.src0, 0, fields.neg & 1, fields.abs & 1)
        second = float_reader(fields.src1, 0, fields.neg & 2, fields.abs & 2)
    else:
        packed = vector_reader(fields.src0)
        widen = bf16_values if kind == "BF16" else _f16_values

        def first(wave: Wave) -> Array:
            return widen(packed(wave) & 0xFFFF)

        def second(wave: Wave) -> Array:
            return widen(packed(wave) >> 16)

    def encode(values: Any, factor: Array) -> Array:
        scaled = np.asarray(values, np.float64) / factor
        return encode_fp4(scaled) if target == "FP4" else encode_fp8(scaled, target)

    def run(wave: Wave) -> None:
        factor = E8M0_VALUES[(scale(wave) >> 23) & 0xFF]
        codes = encode(first(wave), factor) | (encode(second(wave), factor) << width)
        wave.write_vgpr(dst, (wave.vgpr[dst] & keep) | (codes << shift))

    return run


def _f16_values(bits: Any) -> Array:
    return np.asarray(bits).astype(np.uint16).view(np.float16)


def build_pack_fp8(inst: Instruction) -> Step:
    """v_cvt_pk_{fp8,bf8}_f32: two floats to two codes in one half of the destination; the other half stays."""
    fields = inst.fields
    dst, kind = fields.vdst, inst.name.split("_")[3]
    first = float_reader(fields.src0, 0, fields.neg & 1, fields.abs & 1)
    second = float_reader(fields.src1, 0, fields.neg & 2, fields.abs & 2)
    shift = 16 if fields.opsel & 8 else 0
    keep = 0xFFFF0000 >> shift

    def run(wave: Wave) -> None:
        low, high = (encode_fp8(np.asarray(read(wave), np.float64), kind) for read in (first, second))
        wave.write_vgpr(dst, (wave.vgpr[dst] & keep) | ((low | (high << 8)) << shift))

    return run


def build_unpack_fp8(inst: Instruction, source: Reader, select: int) -> Step:
    """v_cvt_f32_{fp8,bf8} (byte `select`) and v_cvt_pk_f32_{fp8,bf8} (half `select`)."""
    dst = inst.fields.vdst
    values = _CODE_VALUES[inst.name.split("_")[-1]]
    if "_PK_" not in inst.name:

        def one(wave: Wave) -> None:
            wave.write_vgpr(dst, values[(source(wave) >> (8 * select)) & 0xFF].astype(np.float32).view(np.uint32))

        return one

    def pair(wave: Wave) -> None:
        half = source(wave) >> (16 * (select & 1))
        low, high = (values[part & 0xFF].astype(np.float32).view(np.uint32) for part in (half, half >> 8))
        wave.write_vgpr(dst, low)
        wave.write_vgpr(dst + 1, high)

    return pair
