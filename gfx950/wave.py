"""The architectural state of one wave64 and the readers of its operands.

An operand reader is a function of the wave. It returns either a uint32 row [64] (a vector register, not copied) or one
numpy scalar that broadcasts over the lanes.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from .errors import UnsupportedInstructionError
from .formats import Array

LANES = np.arange(64)
MASK32 = 0xFFFFFFFF
MASK64 = 0xFFFFFFFFFFFFFFFF
# Registers start with a pattern that is a NaN as float32, so that a value read before any write shows in the result.
POISON = 0x7FC0DEAD

VCC, M0, EXEC = 106, 124, 126
_VCCZ, _EXECZ, _SCC, _LITERAL, _FIRST_VGPR = 251, 252, 253, 255, 256

# Inline constants: operand code -> 32 bits.
INLINE_CONSTANTS: dict[int, int] = {128 + value: value for value in range(65)}
INLINE_CONSTANTS |= {192 + value: -value & MASK32 for value in range(1, 17)}
_INLINE_FLOATS = (0.5, -0.5, 1.0, -1.0, 2.0, -2.0, 4.0, -4.0, 0.15915494)
INLINE_CONSTANTS |= {240 + i: int(np.float32(value).view(np.uint32)) for i, value in enumerate(_INLINE_FLOATS)}

Reader = Callable[["Wave"], Any]
Step = Callable[["Wave"], None]


def lanes_to_mask(lanes: Array) -> int:
    """bool [64] -> 64-bit mask, lane 0 in bit 0."""
    return int(np.packbits(lanes, bitorder="little").view(np.uint64)[0])


def mask_to_lanes(mask: int) -> Array:
    """64-bit mask -> bool [64]."""
    return np.unpackbits(np.frombuffer(mask.to_bytes(8, "little"), np.uint8), bitorder="little").view(np.bool_)


def sign_extend(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


class Wave:
    """Registers and control state of one wave.

    Args:
        index: position of the wave in its workgroup.
        pc: absolute address of the first instruction.
    """

    __slots__ = (
        "agpr", "at_barrier", "done", "exec_full", "exec_lanes", "exec_mask", "executed", "index", "lgkm_completed",
        "lgkm_issued", "pc", "scc", "scratch_base", "scratch_bytes", "sgpr", "vgpr", "vgpr_f32", "vgpr_i32",
        "vm_completed", "vm_issued",
    )  # fmt: skip

    def __init__(self, index: int, pc: int) -> None:
        self.index = index
        self.pc = pc
        self.sgpr = np.full(128, 0xDEAD, np.uint32)
        self.vgpr = np.full((256, 64), POISON, np.uint32)
        self.agpr = np.full((256, 64), POISON, np.uint32)
        self.vgpr_f32 = self.vgpr.view(np.float32)
        self.vgpr_i32 = self.vgpr.view(np.int32)
        self.scc = 0
        self.done = False
        self.at_barrier = False
        self.executed = 0
        self.scratch_base = 0
        self.scratch_bytes = 0
        # Vector-memory operations issued, and how many of the oldest are known complete (s_waitcnt vmcnt); the same
        # for LDS and scalar-memory operations (lgkmcnt).
        self.vm_issued = self.vm_completed = 0
        self.lgkm_issued = self.lgkm_completed = 0
        self.set_exec(MASK64)

    def set_exec(self, mask: int) -> None:
        self.sgpr[EXEC] = mask & MASK32
        self.sgpr[EXEC + 1] = mask >> 32
        self.exec_mask = mask
        self.exec_full = mask == MASK64
        self.exec_lanes = mask_to_lanes(mask)

    def sgpr64(self, register: int) -> int:
        return int(self.sgpr[register]) | (int(self.sgpr[register + 1]) << 32)

    def write_sgpr(self, register: int, value: int) -> None:
        self.sgpr[register] = value & MASK32
        if register >= EXEC:
            self.set_exec(self.sgpr64(EXEC))

    def write_sgpr64(self, register: int, value: int) -> None:
        self.sgpr[register] = value & MASK32
        self.sgpr[register + 1] = (value >> 32) & MASK32
        if register >= EXEC:
            self.set_exec(value & MASK64)

    def write_vgpr(self, register: int, value: Any) -> None:
        """Write the lanes that are on; `value` is uint32, a row or a scalar."""
        if self.exec_full:
            self.vgpr[register] = value
        else:
            np.copyto(self.vgpr[register], value, where=self.exec_lanes)

    def write_vgpr64(self, register: int, value: Any) -> None:
        """Write a 64-bit value to a register pair."""
        self.write_vgpr(register, (value & MASK32).astype(np.uint32))
        self.write_vgpr(register + 1, (value >> np.uint64(32)).astype(np.uint32))

    def write_agpr(self, register: int, value: Any) -> None:
        if self.exec_full:
            self.agpr[register] = value
        else:
            np.copyto(self.agpr[register], value, where=self.exec_lanes)


def write_rows(use_agpr: int) -> Callable[[Wave, int, Array], None]:
    """A writer of memory results: uint32 [64, words] to consecutive vector or accumulation registers."""

    def write(wave: Wave, register: int, words: Array) -> None:
        rows = (wave.agpr if use_agpr else wave.vgpr)[register : register + words.shape[1]]
        if wave.exec_full:
            rows[...] = words.T
        else:
            np.copyto(rows, words.T, where=wave.exec_lanes)

    return write


def read_rows(use_agpr: int, register: int, count: int) -> Reader:
    """A reader of memory data: uint32 [64, words], contiguous per lane."""

    def read(wave: Wave) -> Array:
        return np.ascontiguousarray((wave.agpr if use_agpr else wave.vgpr)[register : register + count].T)

    return read


def _inline_constant(code: int) -> int:
    if code not in INLINE_CONSTANTS:
        raise UnsupportedInstructionError(f"operand code {code}")
    return INLINE_CONSTANTS[code]


def vector_reader(code: int, literal: int = 0) -> Reader:
    """Reader of a 32-bit operand of a vector instruction."""
    if code >= _FIRST_VGPR:
        register = code - _FIRST_VGPR
        return lambda wave: wave.vgpr[register]
    if code < 128:
        return lambda wave: wave.sgpr[code]
    if code == _SCC:
        return lambda wave: np.uint32(wave.scc)
    constant = np.uint32(literal if code == _LITERAL else _inline_constant(code))
    return lambda wave: constant


def float_reader(code: int, literal: int = 0, negate: int = 0, absolute: int = 0) -> Reader:
    """Reader of a float32 operand with its input modifiers."""
    if code >= _FIRST_VGPR and not negate and not absolute:
        register = code - _FIRST_VGPR
        return lambda wave: wave.vgpr_f32[register]
    bits = modified(vector_reader(code, literal), negate, absolute)
    return lambda wave: bits(wave).view(np.float32)


def modified(reader: Reader, negate: int, absolute: int, sign_bit: int = 0x80000000) -> Reader:
    """Apply |x| and then -x to the bits of a float operand."""
    if not negate and not absolute:
        return reader
    keep = sign_bit - 1 if absolute else MASK32
    flip = sign_bit if negate else 0
    return lambda wave: (reader(wave) & keep) ^ flip


def vector_reader64(code: int, literal: int = 0) -> Reader:
    """Reader of a 64-bit operand of a vector instruction, as uint64."""
    if code >= _FIRST_VGPR:
        register = code - _FIRST_VGPR
        return lambda wave: wave.vgpr[register].astype(np.uint64) | (wave.vgpr[register + 1].astype(np.uint64) << 32)
    if code < 128:
        return lambda wave: np.uint64(wave.sgpr64(code))
    constant = np.uint64(literal if code == _LITERAL else _inline_constant64(code))
    return lambda wave: constant


def _inline_constant64(code: int) -> int:
    """An inline constant widened to 64 bits: integers sign-extend, floats become doubles."""
    value = _inline_constant(code)
    if code >= 240:
        return int(np.float64(np.uint32(value).view(np.float32)).view(np.uint64))
    return value if value <= 64 else value | 0xFFFFFFFF00000000


def scalar_reader(code: int, literal: int = 0) -> Callable[[Wave], int]:
    """Reader of a 32-bit scalar operand as a Python integer."""
    if code < 128:
        return lambda wave: int(wave.sgpr[code])
    if code == _VCCZ:
        return lambda wave: int(wave.sgpr64(VCC) == 0)
    if code == _EXECZ:
        return lambda wave: int(wave.exec_mask == 0)
    if code == _SCC:
        return lambda wave: wave.scc
    constant = literal if code == _LITERAL else _inline_constant(code)
    return lambda wave: constant


def scalar_reader64(code: int, literal: int = 0) -> Callable[[Wave], int]:
    """Reader of a 64-bit scalar operand as a Python integer."""
    if code < 128:
        return lambda wave: wave.sgpr64(code)
    constant = literal if code == _LITERAL else _inline_constant64(code)
    return lambda wave: constant


def first_active_lane(wave: Wave) -> int:
    """The lowest lane that is on; lane 0 when none is."""
    return (wave.exec_mask & -wave.exec_mask).bit_length() - 1 if wave.exec_mask else 0
