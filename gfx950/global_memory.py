"""Vector-memory instructions: global, flat, buffer and scratch loads, stores, atomics, asynchronous copies to LDS.

Every one of them counts towards vmcnt, which the check of asynchronous copies relies on.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .decoder import Instruction
from .errors import MemoryFault, UnsupportedInstructionError
from .formats import Array
from .lds import merged_half, sign_extended
from .memory import Arena
from .wave import LANES, MASK32, Step, Wave, read_rows, scalar_reader, sign_extend, write_rows

if TYPE_CHECKING:
    from .machine import Machine

_NO_SGPR = 0x7F
WIDTH_BYTES = {
    "UBYTE": 1,
    "SBYTE": 1,
    "BYTE": 1,
    "USHORT": 2,
    "SSHORT": 2,
    "SHORT": 2,
    "DWORD": 4,
    "DWORDX2": 8,
    "DWORDX3": 12,
    "DWORDX4": 16,
}

# Addresses (int64 [64], absolute) and the lanes that take part.
Access = Callable[[Wave, int], tuple[Array, Array, bool]]


def build_global(inst: Instruction, address: int, machine: "Machine") -> Step:
    """Global and flat instructions: 64-bit addresses, or an SGPR base with a 32-bit offset per lane."""
    fields = inst.fields
    register, base = fields.addr, fields.saddr
    offset = sign_extend(fields.offset, 13)

    def access(wave: Wave, nbytes: int) -> tuple[Array, Array, bool]:
        if base != _NO_SGPR:
            addresses = wave.vgpr[register].astype(np.int64) + (sign_extend(wave.sgpr64(base), 64) + offset)
        else:
            high = wave.vgpr[register + 1].astype(np.int64) << 32
            addresses = (wave.vgpr[register].astype(np.int64) | high) + offset
        return addresses, wave.exec_lanes, wave.exec_full

    if "LOAD_LDS" in inst.opcode:
        return _build_copy_to_lds(inst, access, offset, address, machine)
    if "ATOMIC" in inst.opcode:
        return _build_atomic(inst, access, fields.data, fields.vdst, machine.arena)
    if inst.opcode.split("_")[1] == "LOAD":
        return _build_load(inst, access, fields.vdst, machine.arena)
    return _build_store(inst, access, fields.data, machine.arena)


def build_buffer(inst: Instruction, address: int, machine: "Machine") -> Step:
    """Buffer instructions: a resource in four SGPRs; lanes beyond its size read 0 and write nothing."""
    fields, name = inst.fields, inst.opcode
    if name in ("BUFFER_WBL2", "BUFFER_INV", "BUFFER_WBINVL1", "BUFFER_WBINVL1_VOL"):
        return lambda wave: None
    if fields.idxen:
        raise UnsupportedInstructionError(f"{name} with idxen")
    resource, offset = fields.srsrc * 4, fields.offset
    scalar_offset = scalar_reader(fields.soffset)
    lane_offset = fields.vaddr if fields.offen else None

    def access(wave: Wave, nbytes: int) -> tuple[Array, Array, bool]:
        base = wave.sgpr64(resource) & 0xFFFFFFFFFFFF
        moved = scalar_offset(wave)
        size = int(wave.sgpr[resource + 2]) - moved
        lanes = wave.vgpr[lane_offset].astype(np.int64) + offset if lane_offset is not None else np.full(64, offset)
        inside = lanes + nbytes <= size
        if inside.all():
            return lanes + (base + moved), wave.exec_lanes, wave.exec_full
        return lanes + (base + moved), wave.exec_lanes & inside, False

    if "ATOMIC" in name:
        return _build_atomic(inst, access, fields.vdata, fields.vdata, machine.arena)
    if fields.lds:
        return _build_copy_to_lds(inst, access, offset, address, machine)
    if name.split("_")[1] == "LOAD":
        return _build_load(inst, access, fields.vdata, machine.arena)
    return _build_store(inst, access, fields.vdata, machine.arena)


def build_scratch(inst: Instruction, address: int, machine: "Machine") -> Step:
    """Scratch: private memory of each lane, where spilled registers go."""
    fields = inst.fields
    base, register, has_lane_offset = fields.saddr, fields.addr, fields.sve
    offset = sign_extend(fields.offset, 13)

    def access(wave: Wave, nbytes: int) -> tuple[Array, Array, bool]:
        start = offset + (int(wave.sgpr[base]) if base != _NO_SGPR else 0)
        within = np.full(64, start, np.int64)
        if has_lane_offset:
            within += wave.vgpr[register].astype(np.int64)
        active = within[wave.exec_lanes]
        if (active < 0).any() or (active + nbytes > wave.scratch_bytes).any():
            raise MemoryFault(f"scratch access of {nbytes} bytes: outside the {wave.scratch_bytes} of a lane")
        return wave.scratch_base + LANES * wave.scratch_bytes + within, wave.exec_lanes, wave.exec_full

    if inst.opcode.split("_")[1] == "LOAD":
        return _build_load(inst, access, fields.vdst, machine.arena)
    return _build_store(inst, access, fields.data, machine.arena)


def _width(inst: Instruction) -> str:
    width = inst.opcode.split("_")[2]
    if width not in WIDTH_BYTES:
        raise UnsupportedInstructionError(inst.opcode)
    return width


def _build_load(inst: Instruction, access: Access, dst: int, arena: Arena) -> Step:
    width, use_agpr = _width(inst), inst.fields.acc
    nbytes, write = WIDTH_BYTES[width], write_rows(use_agpr)
    signed, half, high = width in ("SBYTE", "SSHORT"), "D16" in inst.opcode, "D16_HI" in inst.opcode

    def run(wave: Wave) -> None:
        wave.vm_issued += 1
        words = arena.load(*_gather_arguments(access(wave, nbytes), nbytes))
        if signed:
            words = sign_extended(words, nbytes)
        if half:
            words = merged_half((wave.agpr if use_agpr else wave.vgpr)[dst], words, high=high)
        write(wave, dst, words)

    return run


def _gather_arguments(where: tuple[Array, Array, bool], nbytes: int) -> tuple[Array, int, Array, bool]:
    addresses, active, all_active = where
    return addresses, nbytes, active, all_active


def _build_store(inst: Instruction, access: Access, data: int, arena: Arena) -> Step:
    nbytes = WIDTH_BYTES[_width(inst)]
    rows = read_rows(inst.fields.acc, data, max(nbytes // 4, 1))
    shift = 16 if "D16_HI" in inst.opcode else 0

    def run(wave: Wave) -> None:
        wave.vm_issued += 1
        addresses, active, _ = access(wave, nbytes)
        words = rows(wave)
        arena.store(addresses, words >> shift if shift else words, nbytes, active)

    return run


def _build_copy_to_lds(inst: Instruction, access: Access, offset: int, address: int, machine: "Machine") -> Step:
    """Asynchronous copy. The instruction's offset moves the LDS address as well as the global one."""
    width = inst.opcode.split("_")[-1]
    if width not in WIDTH_BYTES:
        raise UnsupportedInstructionError(inst.opcode)
    nbytes, site = WIDTH_BYTES[width], machine.site(address)
    signed = width in ("SBYTE", "SSHORT")
    arena, lds = machine.arena, machine.lds

    def run(wave: Wave) -> None:
        wave.vm_issued += 1
        words = arena.load(*_gather_arguments(access(wave, nbytes), nbytes))
        if signed:
            words = sign_extended(words, nbytes)
        lds.copy_from_global(wave, offset, words, nbytes, site)

    return run


def _signed(value: int) -> int:
    return sign_extend(value, 32)


def _float_add(old: int, operand: int) -> int:
    total = np.uint32(old).view(np.float32) + np.uint32(operand).view(np.float32)
    return int(np.float32(total).view(np.uint32))


_ATOMIC: dict[str, Callable[[int, int], int]] = {
    "ADD": lambda old, operand: (old + operand) & MASK32,
    "SUB": lambda old, operand: (old - operand) & MASK32,
    "ADD_F32": _float_add,
    "SMAX": lambda old, operand: max(old, operand, key=_signed),
    "SMIN": lambda old, operand: min(old, operand, key=_signed),
    "UMAX": max,
    "UMIN": min,
    "AND": lambda old, operand: old & operand,
    "OR": lambda old, operand: old | operand,
    "XOR": lambda old, operand: old ^ operand,
    "SWAP": lambda old, operand: operand,
}


def _build_atomic(inst: Instruction, access: Access, data: int, dst: int, arena: Arena) -> Step:
    """Read-modify-write of one word, or compare-and-swap, lane after lane."""
    operation = inst.opcode.split("ATOMIC_")[1]
    compare = operation == "CMPSWAP"
    if operation not in _ATOMIC and not compare:
        raise UnsupportedInstructionError(inst.opcode)
    combine: Any = _ATOMIC.get(operation)
    returns = inst.fields.sc0

    def run(wave: Wave) -> None:
        wave.vm_issued += 1
        addresses, active, _ = access(wave, 4)
        lanes = np.nonzero(active)[0]
        cells = arena.offsets(addresses[active], 4) >> 2
        before = np.zeros(64, np.uint32)
        operands = wave.vgpr[data]
        expected = wave.vgpr[data + 1] if compare else None
        for lane, cell in zip(lanes, cells, strict=True):
            old = int(arena.words[cell])
            before[lane] = old
            if expected is None:
                arena.words[cell] = combine(old, int(operands[lane]))
            elif old == int(expected[lane]):
                arena.words[cell] = operands[lane]
        if returns:
            wave.write_vgpr(dst, before)

    return run
