"""Ties the memories to the instruction builders: a program counter in, a function that runs the instruction out."""

from collections.abc import Callable

from .decoder import Instruction, decode
from .errors import UnsupportedInstructionError
from .global_memory import build_buffer, build_global, build_scratch
from .lds import LocalMemory, build_ds
from .matrix import build_mfma, build_scaled_mfma
from .memory import Arena
from .scalar import build_smem, build_sop1, build_sop2, build_sopc, build_sopk, build_sopp
from .vector import build_vop1, build_vop2, build_vop3, build_vop3p, build_vop3sd, build_vopc
from .wave import Step

_LONGEST_ENCODING_BYTES = 16

Builder = Callable[[Instruction, int, "Machine"], Step]

_BUILDERS: dict[str, Builder] = {
    "SOP1": build_sop1,
    "SOP2": build_sop2,
    "SOPC": build_sopc,
    "SOPK": build_sopk,
    "SOPP": build_sopp,
    "SMEM": build_smem,
    "VOP1": build_vop1,
    "VOP1_SDWA": build_vop1,
    "VOP1_DPP16": build_vop1,
    "VOP2": build_vop2,
    "VOP2_SDWA": build_vop2,
    "VOP2_DPP16": build_vop2,
    "VOPC": build_vopc,
    "VOPC_SDWA_SDST": build_vopc,
    "VOP3": build_vop3,
    "VOP3_SDST": build_vop3,
    "VOP3SD": build_vop3sd,
    "VOP3P": build_vop3p,
    "VOP3P_MFMA": build_mfma,
    "VOP3PX2": build_scaled_mfma,
    "DS": build_ds,
    "GLOBAL": build_global,
    "FLAT": build_global,
    "MUBUF": build_buffer,
    "SCRATCH": build_scratch,
}


class Translated:
    """An instruction made runnable, with the number of times that it ran."""

    __slots__ = ("count", "opcode", "size", "step")

    def __init__(self, step: Step, size: int, opcode: str) -> None:
        self.step = step
        self.size = size
        self.opcode = opcode
        self.count = 0


class Machine:
    """What the waves of a workgroup share.

    Args:
        arena: global memory, which also holds the code.
        lds: the workgroup's local memory.
        entry: absolute address of the kernel's first instruction; sites are counted from here.
    """

    def __init__(self, arena: Arena, lds: LocalMemory, entry: int) -> None:
        self.arena = arena
        self.lds = lds
        self.entry = entry
        self.program: dict[int, Translated] = {}

    def site(self, address: int) -> int:
        """Offset of an instruction in the kernel's code."""
        return address - self.entry

    def translate(self, address: int) -> Translated:
        """Decode the instruction at an address and build the function that runs it."""
        start = address - self.arena.base
        instruction = decode(self.arena.bytes[start : start + _LONGEST_ENCODING_BYTES].tobytes())
        builder = _BUILDERS.get(instruction.format)
        try:
            if builder is None:
                raise UnsupportedInstructionError(f"{instruction.opcode} (encoding {instruction.format})")
            step = builder(instruction, address, self)
        except (UnsupportedInstructionError, KeyError) as error:
            raise UnsupportedInstructionError(f"{instruction.opcode} at +{self.site(address):#x}: {error}") from error
        translated = self.program[address] = Translated(step, instruction.size, instruction.opcode)
        return translated
