"""Faults put into machine code, one at a time, must be noticed by the test that runs the kernel.

Each mutation changes one instruction that is executed. The kernels and kinds are chosen so that no mutant is equivalent
to the original: whatever survives is a hole in the emulator or in the kernel's test.
"""

import struct
from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import pytest
from test_kernels import compiled_case, run_case

import gfx950
from gfx950.code_object import CodeObject
from gfx950.decoder import Instruction, disassemble

S_NOP = 0xBF800000
# VOP2 opcodes by which an opcode is replaced.
OTHER_VOP2 = {
    "V_ADD_U32": "V_SUB_U32",
    "V_LSHLREV_B32": "V_LSHRREV_B32",
    "V_LSHRREV_B32": "V_LSHLREV_B32",
    "V_AND_B32": "V_OR_B32",
    "V_OR_B32": "V_AND_B32",
    "V_XOR_B32": "V_AND_B32",
    "V_ADD_F32": "V_SUB_F32",
    "V_MUL_F32": "V_ADD_F32",
}
VOP2_CODES = {
    "V_ADD_F32": 1, "V_SUB_F32": 2, "V_LSHRREV_B32": 16, "V_LSHLREV_B32": 18, "V_AND_B32": 19, "V_OR_B32": 20,
    "V_SUB_U32": 53,
}  # fmt: skip
# How a wrong program may end early; any other exception would be a fault of the emulator itself.
STOPPED = (gfx950.MemoryFault, gfx950.UnsupportedInstructionError, RuntimeError)

Mutation = Callable[[Instruction, int], Iterator[int]]


def drop_barrier(instruction: Instruction, raw: int) -> Iterator[int]:
    if instruction.opcode == "S_BARRIER":
        yield S_NOP


def move_lds_access(instruction: Instruction, raw: int) -> Iterator[int]:
    """Change the offset by one element of a paired access, by 4 bytes otherwise."""
    if instruction.format == "DS" and "PERM" not in instruction.opcode:
        yield raw ^ (1 if instruction.opcode.split("_")[1] in ("READ2", "WRITE2", "READ2ST64", "WRITE2ST64") else 4)


def move_memory_access(instruction: Instruction, raw: int) -> Iterator[int]:
    if instruction.format in ("GLOBAL", "MUBUF") and instruction.opcode.split("_")[1] in ("LOAD", "STORE"):
        yield raw ^ 4


def change_op_sel(instruction: Instruction, raw: int) -> Iterator[int]:
    if instruction.name.startswith(("V_CVT_SCALEF32", "V_MFMA_SCALE")):
        yield raw ^ 1 << 11
    if instruction.name.startswith("V_CVT_SCALEF32"):
        yield raw ^ 1 << 12


def change_matrix_format(instruction: Instruction, raw: int) -> Iterator[int]:
    """Read A as fp8 instead of fp4, or the other way round; read bfloat16 as float16."""
    if instruction.format == "VOP3PX2":
        yield raw ^ 4 << 72
    elif instruction.name == "V_MFMA_F32_16X16X32_BF16":
        yield raw & ~(0x7F << 16) | 0x54 << 16
    elif instruction.name == "V_MFMA_F32_32X32X16_BF16":
        yield raw & ~(0x7F << 16) | 0x55 << 16


def change_opcode(instruction: Instruction, raw: int) -> Iterator[int]:
    if instruction.format == "VOP2" and instruction.name in OTHER_VOP2:
        yield raw & ~(0x3F << 25) | VOP2_CODES[OTHER_VOP2[instruction.name]] << 25


def change_source_register(instruction: Instruction, raw: int) -> Iterator[int]:
    """Left out are AND and OR: of a register with few bits set, another one often has the same."""
    if instruction.format == "VOP2" and instruction.name not in ("V_AND_B32", "V_OR_B32"):
        yield raw ^ 1 << 9


def change_destination_register(instruction: Instruction, raw: int) -> Iterator[int]:
    if instruction.format == "VOP2":
        yield raw ^ 1 << 17


@cache
def executed_instructions(name: str) -> tuple[int, tuple[tuple[int, Instruction], ...]]:
    """Where the code lies in the file, and the instructions that the case executes."""
    hsaco = compiled_case(name).asm["hsaco"]
    start, size = CodeObject(hsaco).code_range
    executed = run_case(name)[1]["executed"]
    listing = disassemble(hsaco[start : start + size])
    return start, tuple((offset, i) for offset, i in listing if executed.get(offset, ("", 0))[1])


def mutants(name: str, mutation: Mutation) -> Iterator[tuple[str, bytes]]:
    """Description and code object of every mutant of a case."""
    hsaco = compiled_case(name).asm["hsaco"]
    start, instructions = executed_instructions(name)
    for offset, instruction in instructions:
        at = start + offset
        raw = int.from_bytes(hsaco[at : at + instruction.size], "little")
        for changed in mutation(instruction, raw):
            code = changed.to_bytes(instruction.size, "little")
            yield f"{instruction.opcode} at +{offset:#x}", hsaco[:at] + code + hsaco[at + instruction.size :]


def is_caught(name: str, hsaco: bytes) -> bool:
    try:
        with np.errstate(invalid="ignore"):
            return bool(run_case(name, hsaco)[0])
    except STOPPED:
        return True


# Kernel, mutation, and how many mutants there must be at least.
MUTATIONS: list[tuple[str, Mutation, int]] = [
    ("transpose", drop_barrier, 1),
    ("scaled-fp8-fp4-16", drop_barrier, 3),
    ("gluon-fp4-step", drop_barrier, 3),
    ("transpose", move_lds_access, 16),
    ("scaled-fp8-fp4-16", move_lds_access, 6),
    ("fp4-packed-along-n", move_lds_access, 6),
    ("gluon-fp4-step", move_lds_access, 6),
    ("axpy", move_memory_access, 3),
    ("gluon-fp4-step", move_memory_access, 10),
    ("gluon-fp4-step", change_op_sel, 32),
    ("scaled-fp8-fp4-16", change_op_sel, 1),
    ("scaled-fp8-fp4-64", change_op_sel, 1),
    ("scaled-fp8-fp4-16", change_matrix_format, 1),
    ("gluon-fp4-step", change_matrix_format, 1),
    ("matmul", change_matrix_format, 1),
    ("scaled-fp8-fp4-16", change_opcode, 10),
    ("gluon-fp4-step", change_opcode, 10),
    ("gluon-fp4-step", change_source_register, 5),
    ("scaled-fp8-fp4-16", change_destination_register, 20),
    ("fp4-packed-along-n", change_destination_register, 10),
]


@pytest.mark.parametrize(
    ("name", "mutation", "at_least"), MUTATIONS, ids=[f"{name}-{mutation.__name__}" for name, mutation, _ in MUTATIONS]
)
def test_every_mutant_is_caught(name: str, mutation: Mutation, at_least: int) -> None:
    tried = list(mutants(name, mutation))
    assert len(tried) >= at_least
    assert [what for what, hsaco in tried if not is_caught(name, hsaco)] == []


@pytest.mark.parametrize(
    ("name", "no_wait"),
    [("gluon-fp4-step", 0xC00F), ("gluon-fp4-step", 0x0F00), ("transpose", 0x0F00), ("matmul", 0x0F00)],
    ids=["copies", "stores", "transpose", "matmul"],
)
def test_dropping_the_waits_is_caught(name: str, no_wait: int) -> None:
    """Waits for vector memory (asynchronous copies) or for LDS, all of them."""
    hsaco = bytearray(compiled_case(name).asm["hsaco"])
    start, instructions = executed_instructions(name)
    for offset, instruction in instructions:
        if instruction.opcode == "S_WAITCNT":
            raw = struct.unpack_from("<I", hsaco, start + offset)[0]
            struct.pack_into("<I", hsaco, start + offset, raw | no_wait)
    problems, stats = run_case(name, bytes(hsaco))
    assert stats["pending_reads"] and problems


def test_the_original_code_is_not_caught() -> None:
    for name in {name for name, _, _ in MUTATIONS}:
        assert not is_caught(name, compiled_case(name).asm["hsaco"])
