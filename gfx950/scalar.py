"""Scalar instructions: integer arithmetic on SGPRs, compares, branches, scalar loads.

Each `build_*` turns one decoded instruction into a function of the wave that carries it out.
"""

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .decoder import Instruction
from .errors import UnsupportedInstructionError
from .wave import MASK32, MASK64, VCC, Step, Wave, scalar_reader, scalar_reader64, sign_extend

if TYPE_CHECKING:
    from .machine import Machine

COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "LT": operator.lt,
    "EQ": operator.eq,
    "LE": operator.le,
    "GT": operator.gt,
    "LG": operator.ne,
    "GE": operator.ge,
}
_NO_EFFECT = ("S_NOP", "S_SETPRIO", "S_SLEEP", "S_SETHALT", "S_INST_PREFETCH", "S_TTRACEDATA")
_NO_VMCNT, _NO_LGKMCNT = 63, 15


def _nothing(wave: Wave) -> None:
    """For instructions that only steer the hardware's scheduling or caches."""


def build_sopp(inst: Instruction, address: int, machine: "Machine") -> Step:
    name = inst.opcode
    target = address + 4 + 4 * sign_extend(inst.fields.simm16, 16)
    if name == "S_ENDPGM":

        def end(wave: Wave) -> None:
            wave.done = True

        return end
    if name == "S_BARRIER":

        def barrier(wave: Wave) -> None:
            wave.at_barrier = True

        return barrier
    if name == "S_WAITCNT":
        return _wait(inst.fields.simm16)
    if name == "S_BRANCH":

        def jump(wave: Wave) -> None:
            wave.pc = target

        return jump
    conditions: dict[str, Callable[[Wave], bool]] = {
        "S_CBRANCH_SCC0": lambda wave: not wave.scc,
        "S_CBRANCH_SCC1": lambda wave: bool(wave.scc),
        "S_CBRANCH_VCCZ": lambda wave: wave.sgpr64(VCC) == 0,
        "S_CBRANCH_VCCNZ": lambda wave: wave.sgpr64(VCC) != 0,
        "S_CBRANCH_EXECZ": lambda wave: wave.exec_mask == 0,
        "S_CBRANCH_EXECNZ": lambda wave: wave.exec_mask != 0,
    }
    if name in conditions:
        holds = conditions[name]

        def branch(wave: Wave) -> None:
            if holds(wave):
                wave.pc = target

        return branch
    if name in _NO_EFFECT:
        return _nothing
    raise UnsupportedInstructionError(name)


def _wait(simm16: int) -> Step:
    """Memory operations complete at once here; the counts only matter to the check of pending reads (see lds.py)."""
    # gfx9 splits the vector-memory count: bits 3:0 and 15:14. All ones do not wait.
    vector = (simm16 & 0xF) | ((simm16 >> 14) & 3) << 4
    scalar_or_lds = (simm16 >> 8) & 0xF
    waits_vector, waits_lds = vector != _NO_VMCNT, scalar_or_lds != _NO_LGKMCNT

    def wait(wave: Wave) -> None:
        if waits_vector:
            wave.vm_completed = max(wave.vm_completed, wave.vm_issued - vector)
        if waits_lds:
            wave.lgkm_completed = max(wave.lgkm_completed, wave.lgkm_issued - scalar_or_lds)

    return wait


def build_sopk(inst: Instruction, address: int, machine: "Machine") -> Step:
    name, dst = inst.opcode, inst.fields.sdst
    unsigned = inst.fields.simm16
    signed = sign_extend(unsigned, 16)
    if name == "S_MOVK_I32":
        return lambda wave: wave.write_sgpr(dst, signed)
    if name == "S_CMOVK_I32":

        def conditional_move(wave: Wave) -> None:
            if wave.scc:
                wave.write_sgpr(dst, signed)

        return conditional_move
    if name == "S_ADDK_I32":

        def add(wave: Wave) -> None:
            total = sign_extend(int(wave.sgpr[dst]), 32) + signed
            wave.scc = int(not -(2**31) <= total < 2**31)
            wave.write_sgpr(dst, total)

        return add
    if name == "S_MULK_I32":
        return lambda wave: wave.write_sgpr(dst, sign_extend(int(wave.sgpr[dst]), 32) * signed)
    if name.startswith("S_CMPK_"):
        _, _, condition, kind = name.split("_")
        compare = COMPARISONS[condition]
        if kind == "I32":

            def compare_signed(wave: Wave) -> None:
                wave.scc = int(compare(sign_extend(int(wave.sgpr[dst]), 32), signed))

            return compare_signed

        def compare_unsigned(wave: Wave) -> None:
            wave.scc = int(compare(int(wave.sgpr[dst]), unsigned))

        return compare_unsigned
    if name.startswith("S_SETREG"):
        return _nothing
    raise UnsupportedInstructionError(name)


def build_sopc(inst: Instruction, address: int, machine: "Machine") -> Step:
    name = inst.opcode
    parts = name.split("_")
    if parts[1] in ("BITCMP0", "BITCMP1"):
        wide = parts[2] == "B64"
        value = (scalar_reader64 if wide else scalar_reader)(inst.fields.ssrc0, inst.literal)
        bit = scalar_reader(inst.fields.ssrc1, inst.literal)
        expected, bit_mask = int(parts[1][-1]), 63 if wide else 31

        def compare_bit(wave: Wave) -> None:
            wave.scc = int(((value(wave) >> (bit(wave) & bit_mask)) & 1) == expected)

        return compare_bit
    compare, kind = COMPARISONS[parts[2]], parts[3]
    read = scalar_reader64 if kind == "U64" else scalar_reader
    left, right = read(inst.fields.ssrc0, inst.literal), read(inst.fields.ssrc1, inst.literal)
    if kind == "I32":

        def compare_signed(wave: Wave) -> None:
            wave.scc = int(compare(sign_extend(left(wave), 32), sign_extend(right(wave), 32)))

        return compare_signed

    def compare_unsigned(wave: Wave) -> None:
        wave.scc = int(compare(left(wave), right(wave)))

    return compare_unsigned


_SAVEEXEC: dict[str, Callable[[int, int], int]] = {
    "AND": lambda source, mask: source & mask,
    "OR": lambda source, mask: source | mask,
    "XOR": lambda source, mask: source ^ mask,
    "ANDN1": lambda source, mask: ~source & mask,
    "ANDN2": lambda source, mask: source & ~mask,
    "ORN1": lambda source, mask: ~source | mask,
    "ORN2": lambda source, mask: source | ~mask,
}


def build_sop1(inst: Instruction, address: int, machine: "Machine") -> Step:
    name, dst, code = inst.opcode, inst.fields.sdst, inst.fields.ssrc0
    wide = "B64" in name.split("_")[-1] or name.endswith("I64")
    source = (scalar_reader64 if wide else scalar_reader)(code, inst.literal)

    if name == "S_MOV_B32":
        return lambda wave: wave.write_sgpr(dst, source(wave))
    if name == "S_MOV_B64":
        return lambda wave: wave.write_sgpr64(dst, source(wave))
    if name in ("S_CMOV_B32", "S_CMOV_B64"):

        def conditional_move(wave: Wave) -> None:
            if wave.scc:
                (wave.write_sgpr64 if wide else wave.write_sgpr)(dst, source(wave))

        return conditional_move
    if name in ("S_NOT_B32", "S_NOT_B64"):

        def invert(wave: Wave) -> None:
            result = ~source(wave) & (MASK64 if wide else MASK32)
            wave.scc = int(result != 0)
            (wave.write_sgpr64 if wide else wave.write_sgpr)(dst, result)

        return invert
    if "SAVEEXEC" in name:
        combine = _SAVEEXEC[name.split("_")[1]]

        def save_exec(wave: Wave) -> None:
            operand, before = source(wave), wave.exec_mask
            wave.write_sgpr64(dst, before)
            after = combine(operand, before) & MASK64
            wave.set_exec(after)
            wave.scc = int(after != 0)

        return save_exec
    if "BCNT1" in name:

        def count_ones(wave: Wave) -> None:
            result = source(wave).bit_count()
            wave.write_sgpr(dst, result)
            wave.scc = int(result != 0)

        return count_ones
    if "FF1" in name:
        return lambda wave: wave.write_sgpr(dst, _find_lowest(source(wave)))
    if name in ("S_FLBIT_I32_B32", "S_FLBIT_I32_B64"):
        width = 64 if wide else 32
        return lambda wave: wave.write_sgpr(dst, width - source(wave).bit_length() if source(wave) else MASK32)
    if name == "S_BREV_B32":
        return lambda wave: wave.write_sgpr(dst, int(f"{source(wave):032b}"[::-1], 2))
    if name in ("S_SEXT_I32_I8", "S_SEXT_I32_I16"):
        bits = 8 if name.endswith("I8") else 16
        return lambda wave: wave.write_sgpr(dst, sign_extend(source(wave), bits))
    if name == "S_ABS_I32":

        def absolute(wave: Wave) -> None:
            result = abs(sign_extend(source(wave), 32))
            wave.write_sgpr(dst, result)
            wave.scc = int(result != 0)

        return absolute
    return _program_counter(inst, address)


def _find_lowest(value: int) -> int:
    """Position of the lowest set bit; all ones when there is none."""
    return ((value & -value).bit_length() - 1) & MASK32


def _program_counter(inst: Instruction, address: int) -> Step:
    name, dst = inst.opcode, inst.fields.sdst
    following = address + 4
    if name == "S_GETPC_B64":
        return lambda wave: wave.write_sgpr64(dst, following)
    target = scalar_reader64(inst.fields.ssrc0)
    if name == "S_SETPC_B64":

        def set_pc(wave: Wave) -> None:
            wave.pc = target(wave)

        return set_pc
    if name == "S_SWAPPC_B64":

        def swap_pc(wave: Wave) -> None:
            destination = target(wave)
            wave.write_sgpr64(dst, following)
            wave.pc = destination

        return swap_pc
    raise UnsupportedInstructionError(name)


# Bitwise and shift operations that set SCC to "result is not zero"; arguments: a, b, width in bits.
_LOGIC: dict[str, Callable[[int, int, int], int]] = {
    "AND": lambda a, b, width: a & b,
    "OR": lambda a, b, width: a | b,
    "XOR": lambda a, b, width: a ^ b,
    "ANDN2": lambda a, b, width: a & ~b,
    "ORN2": lambda a, b, width: a | ~b,
    "NAND": lambda a, b, width: ~(a & b),
    "NOR": lambda a, b, width: ~(a | b),
    "XNOR": lambda a, b, width: ~(a ^ b),
    "LSHL": lambda a, b, width: a << (b & (width - 1)),
    "LSHR": lambda a, b, width: a >> (b & (width - 1)),
    "ASHR": lambda a, b, width: sign_extend(a, width) >> (b & (width - 1)),
}
_SHIFTS = ("LSHL", "LSHR", "ASHR", "BFE", "BFM")
_PACK: dict[str, Callable[[int, int], int]] = {
    "LL": lambda a, b: (a & 0xFFFF) | (b & 0xFFFF) << 16,
    "LH": lambda a, b: (a & 0xFFFF) | (b & 0xFFFF0000),
    "HH": lambda a, b: (a >> 16) | (b & 0xFFFF0000),
}


def build_sop2(inst: Instruction, address: int, machine: "Machine") -> Step:
    name, dst = inst.opcode, inst.fields.sdst
    parts = name.split("_")
    operation, kind = parts[1], parts[-1]
    wide = kind in ("B64", "I64", "U64")
    width, mask = (64, MASK64) if wide else (32, MASK32)
    # Shift counts and field descriptors stay 32 bits wide in the 64-bit forms.
    read_a = scalar_reader64 if wide and operation != "BFM" else scalar_reader
    read_b = scalar_reader64 if wide and operation not in _SHIFTS else scalar_reader
    a, b = read_a(inst.fields.ssrc0, inst.literal), read_b(inst.fields.ssrc1, inst.literal)

    def write(wave: Wave, value: int) -> None:
        (wave.write_sgpr64 if wide else wave.write_sgpr)(dst, value & mask)

    if operation in _LOGIC:
        combine = _LOGIC[operation]

        def logic(wave: Wave) -> None:
            result = combine(a(wave), b(wave), width) & mask
            wave.scc = int(result != 0)
            write(wave, result)

        return logic
    if name in ("S_ADD_U32", "S_ADDC_U32", "S_SUB_U32", "S_SUBB_U32"):
        subtract, with_carry = "SUB" in operation, operation in ("ADDC", "SUBB")

        def add_unsigned(wave: Wave) -> None:
            carry = wave.scc if with_carry else 0
            result = a(wave) - b(wave) - carry if subtract else a(wave) + b(wave) + carry
            wave.scc = int(not 0 <= result <= MASK32)
            write(wave, result)

        return add_unsigned
    if name in ("S_ADD_I32", "S_SUB_I32"):
        sign = 1 if operation == "ADD" else -1

        def add_signed(wave: Wave) -> None:
            result = sign_extend(a(wave), 32) + sign * sign_extend(b(wave), 32)
            wave.scc = int(not -(2**31) <= result < 2**31)
            write(wave, result)

        return add_signed
    if operation in ("MIN", "MAX"):
        better = operator.lt if operation == "MIN" else operator.gt
        signed = kind == "I32"

        def choose(wave: Wave) -> None:
            x, y = a(wave), b(wave)
            first = better(sign_extend(x, 32), sign_extend(y, 32)) if signed else better(x, y)
            wave.scc = int(first)
            write(wave, x if first else y)

        return choose
    if operation == "CSELECT":
        return lambda wave: write(wave, a(wave) if wave.scc else b(wave))
    if name == "S_MUL_I32":
        return lambda wave: write(wave, sign_extend(a(wave), 32) * sign_extend(b(wave), 32))
    if name == "S_MUL_HI_U32":
        return lambda wave: write(wave, (a(wave) * b(wave)) >> 32)
    if name == "S_MUL_HI_I32":
        return lambda wave: write(wave, (sign_extend(a(wave), 32) * sign_extend(b(wave), 32)) >> 32)
    if operation in ("LSHL1", "LSHL2", "LSHL3", "LSHL4"):
        shift = int(operation[4])

        def shift_add(wave: Wave) -> None:
            result = (a(wave) << shift) + b(wave)
            wave.scc = int(result > MASK32)
            write(wave, result)

        return shift_add
    if operation == "BFE":
        return _bit_field_extract(a, b, write, width, signed=kind.startswith("I"))
    if operation == "BFM":
        return lambda wave: write(wave, ((1 << (a(wave) & (width - 1))) - 1) << (b(wave) & (width - 1)))
    if operation == "PACK":
        pack = _PACK[parts[2]]
        return lambda wave: write(wave, pack(a(wave), b(wave)))
    raise UnsupportedInstructionError(name)


def _bit_field_extract(
    value: Callable[[Wave], int],
    descriptor: Callable[[Wave], int],
    write: Callable[[Wave, int], None],
    width: int,
    *,
    signed: bool,
) -> Step:
    """The field's offset is in the low bits of the descriptor, its length in bits 22:16."""

    def extract(wave: Wave) -> None:
        field = descriptor(wave)
        length = (field >> 16) & 0x7F
        result = (value(wave) >> (field & (width - 1))) & ((1 << length) - 1)
        if signed and length:
            result = sign_extend(result, length) & ((1 << width) - 1)
        wave.scc = int(result != 0)
        write(wave, result)

    return extract


_SCALAR_LOAD_WORDS = {"DWORD": 1, "DWORDX2": 2, "DWORDX4": 4, "DWORDX8": 8, "DWORDX16": 16}


def build_smem(inst: Instruction, address: int, machine: "Machine") -> Step:
    name, fields = inst.opcode, inst.fields
    dst = fields.sdata
    if name.startswith(("S_DCACHE", "S_ICACHE")):
        return _nothing
    if name in ("S_MEMTIME", "S_MEMREALTIME"):
        return lambda wave: wave.write_sgpr64(dst, wave.executed)
    if not name.startswith("S_LOAD"):
        raise UnsupportedInstructionError(name)
    count = _SCALAR_LOAD_WORDS[name.rsplit("_", 1)[-1]]
    base = fields.sbase * 2
    offset = sign_extend(fields.offset, 21) if fields.imm else 0
    offset_register = None
    if fields.soffset_en:
        offset_register = fields.soffset
    elif not fields.imm:
        offset_register = fields.offset & 0x7F
    arena = machine.arena

    def load(wave: Wave) -> None:
        wave.lgkm_issued += 1
        start = wave.sgpr64(base) + offset
        if offset_register is not None:
            start += int(wave.sgpr[offset_register])
        for index, word in enumerate(arena.load_words(start, count)):
            wave.write_sgpr(dst + index, word)

    return load
