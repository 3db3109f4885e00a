"""Vector (VALU) instructions: encodings, operand modifiers, SDWA and DPP around the functions of vector_ops.py.

Each `build_*` turns one decoded instruction into a function of the wave that carries it out.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .conversions import build_pack_fp8, build_scaled_conversion, build_unpack_fp8
from .decoder import Fields, Instruction
from .errors import UnsupportedInstructionError
from .formats import Array, f16_bits
from .vector_ops import COMPARISONS, VECTOR_OPS, float_class, fused_multiply_add
from .wave import (
    INLINE_CONSTANTS,
    LANES,
    MASK32,
    VCC,
    Reader,
    Step,
    Wave,
    first_active_lane,
    float_reader,
    lanes_to_mask,
    mask_to_lanes,
    modified,
    scalar_reader,
    vector_reader,
    vector_reader64,
)

if TYPE_CHECKING:
    from .machine import Machine

_FIRST_VGPR = 256
_SDWA_WHOLE_REGISTER = 6
_OUTPUT_MULTIPLIERS = (1.0, 2.0, 4.0, 0.5)
_UNPACK_FP8 = ("V_CVT_F32_FP8", "V_CVT_F32_BF8", "V_CVT_PK_F32_FP8", "V_CVT_PK_F32_BF8")


@dataclass(frozen=True, slots=True)
class Modifiers:
    """Operand modifiers; bit i of a mask belongs to source i."""

    negate: int = 0
    absolute: int = 0
    op_sel: int = 0
    output_multiplier: int = 0
    clamp: int = 0


_NO_MODIFIERS = Modifiers()


def _half_reader(code: int, reader: Reader, modifiers: Modifiers, index: int) -> Reader:
    """Reader of a float16 operand: the half that op_sel picks, with its input modifiers."""
    source = _packed_constant(code) or reader
    shift = 16 if (modifiers.op_sel >> index) & 1 else 0
    bits = modified(
        lambda wave: (source(wave) >> shift) & 0xFFFF,
        (modifiers.negate >> index) & 1,
        (modifiers.absolute >> index) & 1,
        sign_bit=0x8000,
    )
    return lambda wave: np.asarray(bits(wave)).astype(np.uint16).view(np.float16)


def _packed_constant(code: int) -> Reader | None:
    """Inline float constants of 16-bit operations: float16 in the low half; None for any other operand."""
    if not 240 <= code <= 248:
        return None
    constant = np.uint32(f16_bits(np.uint32(INLINE_CONSTANTS[code]).view(np.float32)))
    return lambda wave: constant


def _source_readers(
    codes: list[int], kinds: str, literal: int, modifiers: Modifiers, replaced: list[Reader | None] | None = None
) -> list[Reader]:
    """Readers of an instruction's sources in the kinds that its function takes.

    `replaced` holds raw uint32 readers that stand in for a register (SDWA, DPP).
    """
    readers: list[Reader] = []
    for index, (code, kind) in enumerate(zip(codes, kinds, strict=False)):
        if kind == "U":
            readers.append(vector_reader64(code, literal))
            continue
        substitute = replaced[index] if replaced else None
        raw = substitute or vector_reader(code, literal)
        negate, absolute = (modifiers.negate >> index) & 1, (modifiers.absolute >> index) & 1
        if kind == "f":
            if substitute is None:
                readers.append(float_reader(code, literal, negate, absolute))
            else:
                readers.append(_viewed(modified(raw, negate, absolute), np.float32))
        elif kind == "i":
            readers.append(_viewed(raw, np.int32))
        elif kind == "h":
            readers.append(_half_reader(code, raw, modifiers, index))
        else:
            readers.append(raw)
    return readers


def _viewed(reader: Reader, dtype: Any) -> Reader:
    return lambda wave: reader(wave).view(dtype)


def _applied(function: Callable[..., Any], readers: list[Reader]) -> Reader:
    """function(*sources) without the cost of building an argument list."""
    if len(readers) == 1:
        (a,) = readers
        return lambda wave: function(a(wave))
    if len(readers) == 2:
        a, b = readers
        return lambda wave: function(a(wave), b(wave))
    a, b, c = readers
    return lambda wave: function(a(wave), b(wave), c(wave))


def _as_bits(result: Any, kind: str) -> Any:
    """A result of kind u, i or f as uint32."""
    if kind == "f":
        return np.asarray(result, np.float32).view(np.uint32)
    if kind == "i":
        return np.asarray(result, np.int32).view(np.uint32)
    return np.asarray(result, np.uint32)


def _build_regular(
    inst: Instruction,
    codes: list[int],
    modifiers: Modifiers = _NO_MODIFIERS,
    replaced: list[Reader | None] | None = None,
    finish: Callable[[Wave, Any], Any] | None = None,
    write_lanes: Array | None = None,
) -> Step:
    """An instruction of the table.

    Args:
        finish: turns the 32-bit result into what is written (SDWA destination select).
        write_lanes: lanes that may be written besides EXEC (DPP row and bank masks).
    """
    if inst.name not in VECTOR_OPS:
        raise UnsupportedInstructionError(inst.opcode)
    if modifiers.op_sel & 8:
        raise UnsupportedInstructionError(f"{inst.opcode} with op_sel on the destination")
    op, dst = VECTOR_OPS[inst.name], inst.fields.vdst
    readers = _source_readers(codes, op.sources, inst.literal, modifiers, replaced)
    compute = _applied(op.function, readers)
    if op.result == "U":
        return lambda wave: wave.write_vgpr64(dst, compute(wave))

    is_float = op.result == "f"
    if is_float and (modifiers.output_multiplier or modifiers.clamp):
        compute = _scaled_output(compute, modifiers)
    if finish is None and write_lanes is None:
        return _plain_write(dst, compute, op.result)

    kind = op.result

    def run(wave: Wave) -> None:
        bits = _as_bits(compute(wave), kind)
        if finish is not None:
            bits = finish(wave, bits)
        if write_lanes is None:
            wave.write_vgpr(dst, bits)
        else:
            np.copyto(wave.vgpr[dst], bits, where=wave.exec_lanes & write_lanes)

    return run


def _scaled_output(compute: Reader, modifiers: Modifiers) -> Reader:
    factor, clamp = np.float32(_OUTPUT_MULTIPLIERS[modifiers.output_multiplier]), modifiers.clamp

    def scaled(wave: Wave) -> Any:
        value = np.asarray(compute(wave), np.float32) * factor
        return np.fmin(np.fmax(value, np.float32(0)), np.float32(1)) if clamp else value

    return scaled


def _plain_write(dst: int, compute: Reader, kind: str) -> Step:
    """The common case, kept short: write through the view that has the result's type."""
    if kind == "f":

        def write_float(wave: Wave) -> None:
            if wave.exec_full:
                wave.vgpr_f32[dst] = compute(wave)
            else:
                np.copyto(wave.vgpr_f32[dst], compute(wave), where=wave.exec_lanes, casting="same_kind")

        return write_float
    if kind == "i":

        def write_signed(wave: Wave) -> None:
            if wave.exec_full:
                wave.vgpr_i32[dst] = compute(wave)
            else:
                np.copyto(wave.vgpr_i32[dst], compute(wave), where=wave.exec_lanes)

        return write_signed

    def write_unsigned(wave: Wave) -> None:
        if wave.exec_full:
            wave.vgpr[dst] = compute(wave)
        else:
            np.copyto(wave.vgpr[dst], compute(wave), where=wave.exec_lanes)

    return write_unsigned


def _build_carry(inst: Instruction, codes: list[int], carry_out: int, carry_in: int | None) -> Step:
    """Additions and subtractions that produce, and may consume, a carry mask in an SGPR pair."""
    first, second = vector_reader(codes[0], inst.literal), vector_reader(codes[1], inst.literal)
    dst = inst.fields.vdst
    adds = "ADD" in inst.name
    if "SUBREV" in inst.name or "SUBBREV" in inst.name:
        first, second = second, first

    def run(wave: Wave) -> None:
        a, b = np.asarray(first(wave)).astype(np.int64), np.asarray(second(wave)).astype(np.int64)
        carry = mask_to_lanes(wave.sgpr64(carry_in)) if carry_in is not None else False
        total = a + b + carry if adds else a - b - carry
        overflow = np.broadcast_to((total < 0) | (total > MASK32), (64,)) & wave.exec_lanes
        wave.write_vgpr(dst, (total & MASK32).astype(np.uint32))
        wave.write_sgpr64(carry_out, lanes_to_mask(overflow))

    return run


def _build_compare(
    inst: Instruction,
    codes: list[int],
    mask_register: int,
    modifiers: Modifiers = _NO_MODIFIERS,
    replaced: list[Reader | None] | None = None,
) -> Step:
    """v_cmp writes a mask with a 0 for lanes that are off; v_cmpx also makes it the new EXEC."""
    parts = inst.name.split("_")
    sets_exec = parts[1] == "CMPX"
    kinds, function = ("fu", float_class) if parts[2] == "CLASS" else _comparison(inst, parts[2], parts[3])
    compute = _applied(function, _source_readers(codes, kinds, inst.literal, modifiers, replaced))

    def run(wave: Wave) -> None:
        mask = lanes_to_mask(np.broadcast_to(compute(wave), (64,)) & wave.exec_lanes)
        wave.write_sgpr64(mask_register, mask)
        if sets_exec:
            wave.set_exec(mask)

    return run


def _comparison(inst: Instruction, condition: str, kind: str) -> tuple[str, Callable[[Any, Any], Any]]:
    """Source kinds and function of a comparison."""
    compare = COMPARISONS.get(condition)
    if compare is None:
        raise UnsupportedInstructionError(inst.opcode)
    plain = {"F32": "ff", "I32": "ii", "U32": "uu", "F16": "hh", "U64": "UU"}
    if kind in plain:
        return plain[kind], compare
    if kind == "U16":
        return "uu", lambda a, b: compare(a & 0xFFFF, b & 0xFFFF)
    if kind == "I16":
        return "uu", lambda a, b: compare((a << 16).view(np.int32), (b << 16).view(np.int32))
    if kind == "I64":
        return "UU", lambda a, b: compare(a.view(np.int64), b.view(np.int64))
    raise UnsupportedInstructionError(inst.opcode)


def _build_select(dst: int, mask_register: int, if_clear: Reader, if_set: Reader) -> Step:
    def run(wave: Wave) -> None:
        wave.write_vgpr(dst, np.where(mask_to_lanes(wave.sgpr64(mask_register)), if_set(wave), if_clear(wave)))

    return run


def _build_fmac(dst: int, a: Reader, b: Reader) -> Step:
    return _plain_write(dst, lambda wave: fused_multiply_add(a(wave), b(wave), wave.vgpr_f32[dst]), "f")


def build_vop1(inst: Instruction, address: int, machine: "Machine") -> Step:
    name, fields = inst.name, inst.fields
    dst = fields.vdst
    if name == "V_NOP":
        return lambda wave: None
    if "SDWA" in inst.format:
        return _build_sdwa(inst, two_sources=False)
    if "DPP" in inst.format:
        return _build_dpp(inst, two_sources=False)
    code = fields.src0
    source = code - _FIRST_VGPR
    if name == "V_READFIRSTLANE_B32":
        read = vector_reader(code)

        def read_first_lane(wave: Wave) -> None:
            value = read(wave)
            wave.write_sgpr(dst, int(value[first_active_lane(wave)] if np.ndim(value) else value))

        return read_first_lane
    if name in ("V_PERMLANE32_SWAP_B32", "V_PERMLANE16_SWAP_B32"):
        return _build_lane_swap(dst, source, rows=32 if "32_SWAP" in name else 16)
    if name == "V_ACCVGPR_MOV_B32":
        return lambda wave: wave.write_agpr(dst, wave.agpr[source])
    if name == "V_SWAP_B32":

        def swap(wave: Wave) -> None:
            before = wave.vgpr[source].copy()
            wave.write_vgpr(source, wave.vgpr[dst].copy())
            wave.write_vgpr(dst, before)

        return swap
    if name in _UNPACK_FP8:
        return build_unpack_fp8(inst, vector_reader(code, inst.literal), select=0)
    return _build_regular(inst, [code])


def _build_lane_swap(dst: int, source: int, rows: int) -> Step:
    """v_permlane{16,32}_swap: the even rows of the source trade places with the odd rows of the destination."""
    even, odd = LANES[(LANES & rows) == 0], LANES[(LANES & rows) != 0]

    def run(wave: Wave) -> None:
        if not wave.exec_full:
            raise UnsupportedInstructionError("permlane swap with lanes off")
        held = wave.vgpr[source][even].copy()
        wave.vgpr[source][even] = wave.vgpr[dst][odd]
        wave.vgpr[dst][odd] = held

    return run


def build_vop2(inst: Instruction, address: int, machine: "Machine") -> Step:
    name, fields = inst.name, inst.fields
    if "SDWA" in inst.format:
        return _build_sdwa(inst, two_sources=True)
    if "DPP" in inst.format:
        return _build_dpp(inst, two_sources=True)
    dst, codes, literal = fields.vdst, [fields.src0, _FIRST_VGPR + fields.vsrc1], inst.literal
    if name in ("V_ADD_CO_U32", "V_SUB_CO_U32", "V_SUBREV_CO_U32"):
        return _build_carry(inst, codes, VCC, None)
    if name in ("V_ADDC_CO_U32", "V_SUBB_CO_U32", "V_SUBBREV_CO_U32"):
        return _build_carry(inst, codes, VCC, VCC)
    if name == "V_CNDMASK_B32":
        return _build_select(dst, VCC, vector_reader(codes[0], literal), vector_reader(codes[1]))
    if name in ("V_FMAC_F32", "V_MAC_F32"):
        return _build_fmac(dst, float_reader(codes[0], literal), float_reader(codes[1]))
    if name in ("V_FMAMK_F32", "V_FMAAK_F32"):
        constant = np.uint32(literal).view(np.float32)
        a, b = float_reader(codes[0], literal), float_reader(codes[1])
        if name == "V_FMAMK_F32":
            return _plain_write(dst, lambda wave: fused_multiply_add(a(wave), constant, b(wave)), "f")
        return _plain_write(dst, lambda wave: fused_multiply_add(a(wave), b(wave), constant), "f")
    return _build_regular(inst, codes)


def dpp_source_lanes(control: int) -> tuple[Array, Array]:
    """Lane that each lane reads under a DPP control, and whether that lane exists."""
    row, in_row = LANES & ~15, LANES & 15
    exists: Array = np.ones(64, np.bool_)
    amount = control & 15
    if control <= 0xFF:
        permutation = np.array([(control >> (2 * i)) & 3 for i in range(4)])
        source = (LANES & ~3) + permutation[LANES & 3]
    elif 0x101 <= control <= 0x10F:  # row_shl
        source, exists = LANES + amount, in_row + amount < 16
    elif 0x111 <= control <= 0x11F:  # row_shr
        source, exists = LANES - amount, in_row - amount >= 0
    elif 0x121 <= control <= 0x12F:  # row_ror
        source = row + ((in_row - amount) & 15)
    elif control == 0x130:  # wave_shl
        source, exists = LANES + 1, LANES < 63
    elif control == 0x134:  # wave_rol
        source = (LANES + 1) & 63
    elif control == 0x138:  # wave_shr
        source, exists = LANES - 1, LANES > 0
    elif control == 0x13C:  # wave_ror
        source = (LANES - 1) & 63
    elif control == 0x140:  # row_mirror
        source = row + 15 - in_row
    elif control == 0x141:  # row_half_mirror
        source = (LANES & ~7) + 7 - (LANES & 7)
    elif control == 0x142:  # row_bcast15
        source, exists = row - 1, LANES >= 16
    elif control == 0x143:  # row_bcast31
        source, exists = (LANES & ~31) - 1, LANES >= 32
    elif 0x150 <= control <= 0x15F:  # row_newbcast
        source = row + amount
    else:
        raise UnsupportedInstructionError(f"DPP control {control:#x}")
    return np.where(exists, source, 0), exists


def _source_modifiers(fields: Fields) -> Modifiers:
    return Modifiers(fields.src0_neg | fields.src1_neg << 1, fields.src0_abs | fields.src1_abs << 1)


def _build_dpp(inst: Instruction, *, two_sources: bool) -> Step:
    """Data parallel primitives: source 0 comes from another lane of the wave."""
    fields = inst.fields
    source_lane, exists = dpp_source_lanes(fields.dpp)
    bound_control, register, dst = fields.bc, fields.vsrc0, fields.vdst
    enabled = ((fields.row_mask >> (LANES >> 4)) & (fields.bank_mask >> ((LANES >> 2) & 3)) & 1).astype(np.bool_)

    def moved(wave: Wave) -> Array:
        value = wave.vgpr[register][source_lane]
        return np.where(exists & wave.exec_lanes[source_lane], value, np.uint32(0)) if bound_control else value

    codes = [_FIRST_VGPR + register] + ([_FIRST_VGPR + fields.vsrc1] if two_sources else [])
    modifiers = _source_modifiers(fields)
    if inst.name not in VECTOR_OPS:
        raise UnsupportedInstructionError(inst.opcode)
    if bound_control:
        return _build_regular(inst, codes, modifiers, [moved, None], write_lanes=enabled)

    op = VECTOR_OPS[inst.name]
    compute = _applied(op.function, _source_readers(codes, op.sources, 0, modifiers, [moved, None]))
    kind = op.result
    if kind == "U":
        raise UnsupportedInstructionError(inst.opcode)

    def run(wave: Wave) -> None:
        # A lane whose source lane is missing or off keeps its old value.
        lanes = wave.exec_lanes & enabled & exists & wave.exec_lanes[source_lane]
        np.copyto(wave.vgpr[dst], _as_bits(compute(wave), kind), where=lanes)

    return run


def _selected(reader: Reader, select: int, sign_extended: int) -> Reader:
    """SDWA source select: byte 0..3 (0..3), half 0..1 (4, 5) or the whole register."""
    if select == _SDWA_WHOLE_REGISTER:
        return reader
    bits, shift = (8, select * 8) if select < 4 else (16, (select - 4) * 16)

    def read(wave: Wave) -> Any:
        part = (reader(wave) >> shift) & ((1 << bits) - 1)
        if sign_extended:
            part = ((part << (32 - bits)).view(np.int32) >> (32 - bits)).view(np.uint32)
        return part

    return read


def _sdwa_sources(inst: Instruction, *, two_sources: bool) -> tuple[list[int], list[Reader | None]]:
    fields = inst.fields
    codes = [fields.vsrc0 + (0 if fields.s0 else _FIRST_VGPR)]
    readers: list[Reader | None] = [_selected(vector_reader(codes[0]), fields.src0_sel, fields.src0_sext)]
    if two_sources:
        second = fields.vsrc1 + (0 if fields.s1 else _FIRST_VGPR)
        codes.append(second)
        readers.append(_selected(vector_reader(second), fields.src1_sel, fields.src1_sext))
    return codes, readers


def _build_sdwa(inst: Instruction, *, two_sources: bool) -> Step:
    """Sub-dword addressing: parts of registers as sources and destination."""
    fields = inst.fields
    dst, select, unused = fields.vdst, fields.dst_sel, fields.dst_unused
    if inst.name in _UNPACK_FP8:
        register = vector_reader(fields.vsrc0 + (0 if fields.s0 else _FIRST_VGPR))
        whole = fields.src0_sel == _SDWA_WHOLE_REGISTER
        return build_unpack_fp8(inst, register, select=0 if whole else fields.src0_sel & 3)
    codes, readers = _sdwa_sources(inst, two_sources=two_sources)
    bits, shift = (8, select * 8) if select < 4 else (16, (select - 4) * 16)
    written = ((1 << bits) - 1) << shift

    def finish(wave: Wave, result: Any) -> Any:
        if select == _SDWA_WHOLE_REGISTER:
            return result
        part = (result << shift) & written
        if unused == 2:  # the rest of the register is preserved
            return part | (wave.vgpr[dst] & (~written & MASK32))
        if unused == 1:  # the part is sign-extended
            top = 32 - bits - shift
            return ((part << top).view(np.int32) >> top).view(np.uint32)
        return part

    if inst.name == "V_CNDMASK_B32":
        if_clear, if_set = readers
        assert if_clear is not None and if_set is not None

        def select_lanes(wave: Wave) -> None:
            chosen = np.where(mask_to_lanes(wave.sgpr64(VCC)), if_set(wave), if_clear(wave))
            wave.write_vgpr(dst, finish(wave, chosen))

        return select_lanes
    source = _source_modifiers(fields)
    modifiers = Modifiers(source.negate, source.absolute, 0, fields.omod, fields.clmp)
    return _build_regular(inst, codes, modifiers, readers, finish=finish)


def build_vopc(inst: Instruction, address: int, machine: "Machine") -> Step:
    fields = inst.fields
    if "SDWA" not in inst.format:
        return _build_compare(inst, [fields.src0, _FIRST_VGPR + fields.vsrc1], VCC)
    codes, readers = _sdwa_sources(inst, two_sources=True)
    return _build_compare(inst, codes, fields.sdst if fields.sd else VCC, _source_modifiers(fields), readers)


def build_vop3sd(inst: Instruction, address: int, machine: "Machine") -> Step:
    name, fields = inst.name, inst.fields
    codes, mask_register = [fields.src0, fields.src1], fields.sdst
    if name in ("V_ADD_CO_U32", "V_SUB_CO_U32", "V_SUBREV_CO_U32"):
        return _build_carry(inst, codes, mask_register, None)
    if name in ("V_ADDC_CO_U32", "V_SUBB_CO_U32", "V_SUBBREV_CO_U32"):
        return _build_carry(inst, codes, mask_register, fields.src2)
    if name in ("V_MAD_U64_U32", "V_MAD_I64_I32"):
        return _build_mad64(inst, signed="I64" in name)
    if name == "V_DIV_SCALE_F32":
        return _build_division_scale(inst)
    raise UnsupportedInstructionError(inst.opcode)


def _build_mad64(inst: Instruction, *, signed: bool) -> Step:
    fields = inst.fields
    dst, mask_register = fields.vdst, fields.sdst
    a, b, addend = vector_reader(fields.src0), vector_reader(fields.src1), vector_reader64(fields.src2)

    def widened(value: Any) -> Any:
        return value.view(np.int32).astype(np.int64).view(np.uint64) if signed else value.astype(np.uint64)

    def run(wave: Wave) -> None:
        # The product of two sign-extended words wraps to the same 64 bits as the signed product.
        total = widened(a(wave)) * widened(b(wave)) + addend(wave)
        wave.write_vgpr64(dst, np.broadcast_to(total, (64,)))
        wave.write_sgpr64(mask_register, 0)

    return run


def _build_division_scale(inst: Instruction) -> Step:
    """v_div_scale_f32: scales a numerator or denominator away from the edges of the range; VCC says what it did."""
    fields = inst.fields
    dst, mask_register = fields.vdst, fields.sdst
    readers = [
        float_reader(code, 0, (fields.neg >> index) & 1)
        for index, code in enumerate((fields.src0, fields.src1, fields.src2))
    ]

    def exponent(x: Array) -> Array:
        return ((x.view(np.uint32) >> 23) & 0xFF).astype(np.int32)

    def is_denormal(x: Array) -> Array:
        return (exponent(x) == 0) & (x != 0)

    def run(wave: Wave) -> None:
        value, denominator, numerator = (np.broadcast_to(r(wave), (64,)).astype(np.float32) for r in readers)
        up, down = np.ldexp(value, 64), np.ldexp(value, -64)
        inverse, quotient = np.float32(1) / denominator, numerator / denominator
        scale_denominator = np.where(value == denominator, up, value)
        conditions = [
            (numerator == 0) | (denominator == 0),
            exponent(numerator) - exponent(denominator) >= 96,
            is_denormal(denominator),
            is_denormal(inverse) & is_denormal(quotient),
            is_denormal(inverse),
            is_denormal(quotient),
            exponent(numerator) <= 23,
        ]
        scale_numerator = np.where(value == numerator, up, value)
        invalid = np.full(64, np.nan, np.float32)
        results = [invalid, scale_denominator, up, scale_denominator, down, scale_numerator, up]
        flags = [0, 1, 0, 1, 0, 1, 0]
        wave.write_vgpr(dst, np.select(conditions, results, value).astype(np.float32).view(np.uint32))
        scaled = np.select(conditions, flags, 0) == 1
        wave.write_sgpr64(mask_register, lanes_to_mask(scaled & wave.exec_lanes))

    return run


def build_vop3(inst: Instruction, address: int, machine: "Machine") -> Step:
    name, fields = inst.name, inst.fields
    dst, codes = fields.vdst, [fields.src0, fields.src1, fields.src2]
    modifiers = Modifiers(fields.neg, fields.abs, fields.opsel, fields.omod, fields.clmp)
    if name.startswith("V_CMP"):
        return _build_compare(inst, codes[:2], dst, modifiers)
    if name == "V_READLANE_B32":
        lane, register = scalar_reader(codes[1]), codes[0] - _FIRST_VGPR
        return lambda wave: wave.write_sgpr(dst, int(wave.vgpr[register][lane(wave) & 63]))
    if name == "V_WRITELANE_B32":
        value, lane = scalar_reader(codes[0]), scalar_reader(codes[1])

        def write_lane(wave: Wave) -> None:
            wave.vgpr[dst][lane(wave) & 63] = value(wave)

        return write_lane
    if name in ("V_MBCNT_LO_U32_B32", "V_MBCNT_HI_U32_B32"):
        return _build_masked_bit_count(inst, high="HI" in name)
    if name == "V_CNDMASK_B32":
        if_clear = modified(vector_reader(codes[0]), fields.neg & 1, fields.abs & 1)
        if_set = modified(vector_reader(codes[1]), fields.neg & 2, fields.abs & 2)
        return _build_select(dst, codes[2], if_clear, if_set)
    if name in ("V_BITOP3_B32", "V_BITOP3_B16"):
        return _build_bit_operation3(inst)
    if name in ("V_FMAC_F32", "V_MAC_F32"):
        a, b = _source_readers(codes[:2], "ff", 0, modifiers)
        return _build_fmac(dst, a, b)
    if name == "V_DIV_FMAS_F32":
        return _build_division_fmas(dst, _source_readers(codes, "fff", 0, modifiers))
    if name.startswith("V_CVT_SCALEF32"):
        return build_scaled_conversion(inst)
    if name in ("V_CVT_PK_FP8_F32", "V_CVT_PK_BF8_F32"):
        return build_pack_fp8(inst)
    if name in _UNPACK_FP8:
        if fields.opsel:
            raise UnsupportedInstructionError(f"{inst.opcode} with op_sel")
        return build_unpack_fp8(inst, vector_reader(codes[0]), select=0)
    return _build_regular(inst, codes, modifiers)


def _build_masked_bit_count(inst: Instruction, *, high: bool) -> Step:
    """v_mbcnt: bits of the mask that belong to lower lanes, plus source 1."""
    fields = inst.fields
    dst, mask, addend = fields.vdst, vector_reader(fields.src0), vector_reader(fields.src1)
    below = [(1 << lane) - 1 for lane in range(64)]
    lower_lanes = np.array([bits >> 32 if high else bits & MASK32 for bits in below], np.uint32)
    return lambda wave: wave.write_vgpr(
        dst, np.bitwise_count(mask(wave) & lower_lanes).astype(np.uint32) + addend(wave)
    )


def _build_bit_operation3(inst: Instruction) -> Step:
    """v_bitop3: any boolean function of three operands; its truth table lies in omod, abs and neg."""
    fields = inst.fields
    dst = fields.vdst
    table = fields.omod << 6 | fields.abs << 3 | fields.neg
    narrow = inst.name == "V_BITOP3_B16"
    if narrow and fields.opsel:
        raise UnsupportedInstructionError(f"{inst.opcode} with op_sel")
    a, b, c = (vector_reader(code) for code in (fields.src0, fields.src1, fields.src2))

    def run(wave: Wave) -> None:
        x, y, z = a(wave), b(wave), c(wave)
        result: Any = np.uint32(0)
        for row in range(8):
            if table >> row & 1:
                result = result | ((x if row & 4 else ~x) & (y if row & 2 else ~y) & (z if row & 1 else ~z))
        wave.write_vgpr(dst, result & 0xFFFF if narrow else result)

    return run


def _build_division_fmas(dst: int, readers: list[Reader]) -> Step:
    """v_div_fmas_f32: a fused multiply-add whose result is scaled back by 2^64 or 2^-64 where VCC is set."""

    def run(wave: Wave) -> None:
        a, b, c = (np.broadcast_to(read(wave), (64,)).astype(np.float64) for read in readers)
        exact = a * b + c
        scaled = exact * np.where(np.abs(c) >= 2.0, 2.0**64, 2.0**-64)
        result = np.where(mask_to_lanes(wave.sgpr64(VCC)), scaled, exact)
        wave.write_vgpr(dst, result.astype(np.float32).view(np.uint32))

    return run


_PACKED_F32: dict[str, Callable[..., Any]] = {
    "V_PK_ADD_F32": lambda a, b: a + b,
    "V_PK_MUL_F32": lambda a, b: a * b,
    "V_PK_FMA_F32": fused_multiply_add,
}


def _as_signed16(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda a, b: function(a.view(np.int16), b.view(np.int16)).view(np.uint16)


_PACKED_16: dict[str, Callable[..., Any]] = {
    "V_PK_ADD_F16": lambda a, b: a + b,
    "V_PK_MUL_F16": lambda a, b: a * b,
    "V_PK_FMA_F16": lambda a, b, c: (a.astype(np.float64) * b + c).astype(np.float16),
    "V_PK_MAX_F16": np.fmax,
    "V_PK_MIN_F16": np.fmin,
    "V_PK_ADD_U16": lambda a, b: a + b,
    "V_PK_SUB_U16": lambda a, b: a - b,
    "V_PK_MUL_LO_U16": lambda a, b: a * b,
    "V_PK_LSHLREV_B16": lambda a, b: b << (a & 15),
    "V_PK_LSHRREV_B16": lambda a, b: b >> (a & 15),
    "V_PK_MAX_U16": np.maximum,
    "V_PK_MIN_U16": np.minimum,
    "V_PK_MAX_I16": _as_signed16(np.maximum),
    "V_PK_MIN_I16": _as_signed16(np.minimum),
}


def build_vop3p(inst: Instruction, address: int, machine: "Machine") -> Step:
    name, fields = inst.name, inst.fields
    dst = fields.vdst
    if name in ("V_ACCVGPR_READ_B32", "V_ACCVGPR_READ"):
        source = fields.src0 - _FIRST_VGPR
        return lambda wave: wave.write_vgpr(dst, wave.agpr[source])
    if name in ("V_ACCVGPR_WRITE_B32", "V_ACCVGPR_WRITE"):
        read = vector_reader(fields.src0)
        return lambda wave: wave.write_agpr(dst, read(wave))
    if name == "V_PK_MOV_B32":
        first = _word_reader(fields.src0, fields.opsel & 1)
        second = _word_reader(fields.src1, fields.opsel >> 1 & 1)

        def move_pair(wave: Wave) -> None:
            low, high = np.array(first(wave)), np.array(second(wave))
            wave.write_vgpr(dst, low)
            wave.write_vgpr(dst + 1, high)

        return move_pair
    if name in _PACKED_F32:
        return _build_packed_f32(inst)
    if name in _PACKED_16:
        return _build_packed_16(inst)
    raise UnsupportedInstructionError(inst.opcode)


def _word_reader(code: int, word: int) -> Reader:
    """Reader of the low or high register of a pair; a constant is the same for both."""
    return vector_reader(code + word if code < 128 or code >= _FIRST_VGPR else code)


def _build_packed_f32(inst: Instruction) -> Step:
    """Two float32 operations on register pairs; op_sel picks the word that each of them reads."""
    fields = inst.fields
    dst, function = fields.vdst, _PACKED_F32[inst.name]
    codes = [fields.src0, fields.src1, fields.src2][: 3 if "FMA" in inst.name else 2]
    op_sel_high = fields.opsel_hi | fields.opsel_hi2 << 2

    def half(op_sel: int, negate: int) -> Reader:
        readers = [
            _viewed(modified(_word_reader(code, op_sel >> i & 1), negate >> i & 1, 0), np.float32)
            for i, code in enumerate(codes)
        ]
        return _applied(function, readers)

    low, high = half(fields.opsel, fields.neg), half(op_sel_high, fields.neg_hi)

    def run(wave: Wave) -> None:
        first, second = np.asarray(low(wave)), np.asarray(high(wave))
        wave.write_vgpr(dst, first.view(np.uint32))
        wave.write_vgpr(dst + 1, second.view(np.uint32))

    return run


def _build_packed_16(inst: Instruction) -> Step:
    """Two 16-bit operations on the halves of 32-bit registers."""
    fields = inst.fields
    dst, function = fields.vdst, _PACKED_16[inst.name]
    codes = [fields.src0, fields.src1, fields.src2][: 3 if "FMA" in inst.name else 2]
    is_float = inst.name.endswith("F16")
    readers = [(_packed_constant(code) if is_float else None) or vector_reader(code) for code in codes]
    halves = ((fields.opsel, fields.neg), (fields.opsel_hi | fields.opsel_hi2 << 2, fields.neg_hi))

    def compute(sources: list[Array], op_sel: int, negate: int) -> Array:
        parts = []
        for i, source in enumerate(sources):
            part = ((source >> (16 if op_sel >> i & 1 else 0)) & 0xFFFF).astype(np.uint16)
            parts.append(part ^ np.uint16(0x8000 if negate >> i & 1 else 0))
        if is_float:
            parts = [part.view(np.float16) for part in parts]
            return np.asarray(function(*parts)).astype(np.float16).view(np.uint16).astype(np.uint32)
        return np.asarray(function(*parts)).astype(np.uint32)

    def run(wave: Wave) -> None:
        sources = [np.broadcast_to(np.asarray(read(wave)), (64,)) for read in readers]
        low, high = (compute(sources, *half) for half in halves)
        wave.write_vgpr(dst, low | (high << 16))

    return run
