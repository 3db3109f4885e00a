"""Finds instructions that follow each other too closely for the hardware, which has no interlock for these pairs.

LLVM pads them for instructions that it knows. It does not look into inline assembly: the result of an instruction there
may be read a wait state too early, which no run in the emulator shows. The rules are those of LLVM's hazard recognizer
for gfx940 and gfx950. A wait state is one issued instruction; s_nop N counts N + 1.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from .decoder import Instruction
from .matrix import matrix_shape
from .pricing import is_transcendental, mfma_cycles
from .profile import Listing, hsaco_of

# Wait states between the first and the second instruction.
VALU_WRITE_TO_MFMA_READ = 2
TRANSCENDENTAL_WRITE_TO_VALU_READ = 1
CYCLES_PER_PASS = 4
# Accumulation registers are numbered behind the vector registers here.
_FIRST_AGPR = 256
_FIRST_VGPR_CODE = 256
_VALU_FORMATS = ("VOP1", "VOP2", "VOPC", "VOP3", "VOP3SD", "VOP3P")
_SIX_BIT_REGISTERS, _FOUR_BIT_REGISTERS, _EIGHT_BIT_REGISTERS = 6, 4, 8

Registers = frozenset[int]


@dataclass(frozen=True, slots=True)
class Hazard:
    """Two instructions, by offset and opcode, that are too close on some path."""

    rule: str
    first: int
    first_opcode: str
    second: int
    second_opcode: str
    wait_states: int
    needed: int

    def __str__(self) -> str:
        return (
            f"{self.rule}: {self.first_opcode} at +{self.first:#x} to {self.second_opcode} at +{self.second:#x}: "
            f"{self.wait_states} wait states, {self.needed} needed"
        )


def is_mfma(instruction: Instruction) -> bool:
    return "MFMA" in instruction.name


def is_valu(instruction: Instruction) -> bool:
    """Vector instructions outside the matrix core."""
    return instruction.format.split("_")[0] in _VALU_FORMATS and not is_mfma(instruction)


def mfma_passes(instruction: Instruction) -> int:
    return mfma_cycles(instruction) // CYCLES_PER_PASS


def _matrix_result_wait(instruction: Instruction) -> int:
    """From a matrix instruction to a vector instruction that reads or writes its result."""
    passes = mfma_passes(instruction)
    if instruction.name.endswith("_F32") and matrix_shape(instruction).format_a == "F32":
        return passes + 2
    return passes + 3 + (passes != 2)


def _span(first: int, bits: int) -> Registers:
    return frozenset(range(first, first + max(1, -(-bits // 32))))


def _matrix_registers(instruction: Instruction) -> tuple[Registers, Registers, Registers]:
    """Registers of A, B and scales; of C; of D."""
    fields, operands = instruction.fields, instruction.operands
    shape = matrix_shape(instruction)

    def operand(code: int, in_agpr: int, kind: str, bits: int) -> Registers:
        if shape.is_f8f6f4:
            code_bits = {"FP4": _FOUR_BIT_REGISTERS, "FP6": _SIX_BIT_REGISTERS, "BF6": _SIX_BIT_REGISTERS}
            bits = 32 * code_bits.get(kind, _EIGHT_BIT_REGISTERS)
        return _span(code - _FIRST_VGPR_CODE + (_FIRST_AGPR if in_agpr else 0), bits)

    sources = operand(fields.src0, fields.acc & 1, shape.format_a, operands["src0"][0])
    sources |= operand(fields.src1, fields.acc >> 1, shape.format_b, operands["src1"][0])
    if instruction.format == "VOP3PX2":
        for code in (fields.scale_src0, fields.scale_src1):
            if code >= _FIRST_VGPR_CODE:
                sources |= _span(code - _FIRST_VGPR_CODE, 32)
    shift = _FIRST_AGPR if fields.acc_cd else 0
    bits = operands["vdst"][0]
    result = _span(fields.vdst + shift, bits)
    is_register = fields.src2 >= _FIRST_VGPR_CODE
    addend = _span(fields.src2 - _FIRST_VGPR_CODE + shift, bits) if is_register else frozenset()
    return sources, addend, result


def _valu_registers(instruction: Instruction) -> tuple[Registers, Registers]:
    """Vector registers that a VALU instruction reads and writes."""
    fields, operands = instruction.fields, instruction.operands
    reads: set[int] = set()
    if "SDWA" in instruction.format or "DPP" in instruction.format:
        # Source 0 lies in a field of its own; SDWA may take it, and source 1, from a scalar register.
        if "DPP" in instruction.format or not fields.s0:
            reads |= _span(fields.vsrc0, operands["src0"][0])
    else:
        shift = _FIRST_AGPR if instruction.name.startswith(("V_ACCVGPR_READ", "V_ACCVGPR_MOV")) else 0
        for name in ("src0", "src1", "src2"):
            if name in operands and getattr(fields, name) >= _FIRST_VGPR_CODE:
                reads |= _span(getattr(fields, name) - _FIRST_VGPR_CODE + shift, operands[name][0])
    if "vsrc1" in operands and not ("SDWA" in instruction.format and fields.s1):
        reads |= _span(fields.vsrc1, operands["vsrc1"][0])
    writes: Registers = frozenset()
    bits, kind = operands.get("vdst", (0, ""))
    if "VGPR" in kind:
        writes_agpr = instruction.name.startswith(("V_ACCVGPR_WRITE", "V_ACCVGPR_MOV"))
        writes = _span(fields.vdst + (_FIRST_AGPR if writes_agpr else 0), bits)
    if "FMAC" in instruction.name or "SWAP" in instruction.name:
        reads |= writes
    if "SWAP" in instruction.name:
        writes |= _span(fields.src0 - _FIRST_VGPR_CODE, 32)
    return frozenset(reads), writes


def wait_states(instruction: Instruction) -> int:
    return instruction.fields.simm16 + 1 if instruction.opcode == "S_NOP" else 1


@dataclass(frozen=True, slots=True)
class _Effects:
    """What the rules need to know of an instruction."""

    instruction: Instruction
    valu: bool
    mfma: bool
    transcendental: bool
    reads: Registers
    addend: Registers  # C of a matrix instruction; not in `reads`
    writes: Registers


def _effects(instruction: Instruction) -> _Effects:
    empty: Registers = frozenset()
    if is_mfma(instruction):
        sources, addend, result = _matrix_registers(instruction)
        return _Effects(instruction, False, True, False, sources, addend, result)
    if is_valu(instruction):
        reads, writes = _valu_registers(instruction)
        return _Effects(instruction, True, False, is_transcendental(instruction), reads, empty, writes)
    return _Effects(instruction, False, False, False, empty, empty, empty)


def _rules(first: _Effects, second: _Effects) -> Iterator[tuple[str, int]]:
    """The rules that a pair falls under, with the wait states needed between the two."""
    if first.valu and second.mfma and first.writes & (second.reads | second.addend):
        yield "vector result read by the matrix core", VALU_WRITE_TO_MFMA_READ
    if first.transcendental and second.valu and not second.transcendental and first.writes & second.reads:
        yield "transcendental result read by a vector instruction", TRANSCENDENTAL_WRITE_TO_VALU_READ
    if first.mfma and second.valu:
        if first.writes & (second.reads | second.writes):
            yield "matrix result read or overwritten by a vector instruction", _matrix_result_wait(first.instruction)
        elif first.addend & second.writes:
            yield "matrix addend overwritten by a vector instruction", mfma_passes(first.instruction) - 1


_LONGEST_WAIT = 20


def find_hazards(code: Any) -> list[Hazard]:
    """Check every pair of instructions, over all paths, of a kernel.

    Args:
        code: a compiled kernel, a launch, or the bytes of a code object.
    """
    return list(_hazards(hsaco_of(code)))


@lru_cache(maxsize=64)
def _hazards(hsaco: bytes) -> tuple[Hazard, ...]:
    listing = Listing(hsaco)
    effects = {offset: _effects(instruction) for offset, instruction in listing.instructions.items()}
    before = _predecessors(listing)
    found: dict[tuple[str, int, int], Hazard] = {}
    for offset, second in effects.items():
        if not (second.valu or second.mfma):
            continue
        limit = _LONGEST_WAIT if second.valu else VALU_WRITE_TO_MFMA_READ
        for earlier, waited in _looking_back(offset, before, listing, limit):
            first = effects[earlier]
            for rule, needed in _rules(first, second):
                key = (rule, earlier, offset)
                if waited < needed and key not in found:
                    found[key] = Hazard(
                        rule, earlier, first.instruction.opcode, offset, second.instruction.opcode, waited, needed
                    )
    return tuple(found.values())


def _predecessors(listing: Listing) -> dict[int, list[int]]:
    """For each instruction the ones that may run just before it."""
    before: dict[int, list[int]] = {offset: [] for offset in listing.instructions}
    for offset, instruction in listing.instructions.items():
        target = listing.branch_target(offset)
        if target in before:
            before[target].append(offset)
        falls_through = not instruction.opcode.startswith(("S_BRANCH", "S_ENDPGM", "S_SETPC"))
        following = offset + instruction.size
        if falls_through and following in before:
            before[following].append(offset)
    return before


def _looking_back(offset: int, before: dict[int, list[int]], listing: Listing, limit: int) -> Iterator[tuple[int, int]]:
    """Earlier instructions with the fewest wait states between them and `offset`, up to a limit."""
    nearest: dict[int, int] = {}
    queue = [(earlier, 0) for earlier in before[offset]]
    while queue:
        earlier, waited = queue.pop()
        if waited >= limit or nearest.get(earlier, limit) <= waited:
            continue
        nearest[earlier] = waited
        between = waited + wait_states(listing.instructions[earlier])
        queue += [(further, between) for further in before[earlier]]
    yield from nearest.items()
