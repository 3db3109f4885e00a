"""Local data share (LDS): the memory of a workgroup, its instructions, and the checks on how waves share it.

Three faults are counted rather than raised, so that one run reports all of them:
- races: two waves touch a byte between the same two barriers and at least one changes it;
- uninitialised reads: a byte is read before any write;
- pending reads: a byte is read whose asynchronous copy, or store by another wave, may still be under way, because no
  s_waitcnt covers it in time: before the read in the same wave, before a barrier in another.
"""

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .decoder import Instruction
from .errors import MemoryFault, UnsupportedInstructionError
from .formats import Array
from .memory import BYTE_RANKS
from .wave import LANES, M0, Reader, Step, Wave, read_rows, write_rows

if TYPE_CHECKING:
    from .machine import Machine

_FILL = 0xA5
# A byte's tag is epoch * 32 + (wave + 1); waves are at most 16 and the last number stands for several readers.
_TAG_WAVES = 32
_SEVERAL = _TAG_WAVES - 1


class LocalMemory:
    """The LDS allocation of the workgroup that runs.

    Args:
        size: bytes allocated; an access beyond faults.
        check: track races, uninitialised and pending reads.
    """

    def __init__(self, size: int, *, check: bool = True) -> None:
        self.size = size
        self.check = check
        self.bytes = np.full(max(size, 16), _FILL, np.uint8)
        self.races: Counter[tuple[str, int]] = Counter()
        self.uninitialised_reads: Counter[int] = Counter()
        self.pending_reads: Counter[int] = Counter()
        self.reset()

    def reset(self) -> None:
        """Forget the contents: a new workgroup starts."""
        self.bytes[:] = _FILL
        count = len(self.bytes)
        self._write_tags = np.zeros(count, np.int32)
        self._read_tags = np.zeros(count, np.int32)
        # What wrote a byte: n for the n-th vector-memory operation of the wave, an asynchronous copy; -n for its n-th
        # LDS or scalar-memory operation.
        self._write_numbers = np.zeros(count, np.int32)
        self._has_copies = False
        # Per wave: operations known complete when it last passed a barrier. That is what other waves may rely on.
        self._copies_done = np.zeros(_TAG_WAVES, np.int32)
        self._stores_done = np.zeros(_TAG_WAVES, np.int32)
        self._epoch = 1

    def barrier(self, waves: list[Wave]) -> None:
        """All waves have arrived (or ended): what was written before may be read after."""
        self._epoch += 1
        for wave in waves:
            self._copies_done[wave.index] = wave.vm_completed
            self._stores_done[wave.index] = wave.lgkm_completed

    def _indices(self, addresses: Array, nbytes: int) -> Array:
        if addresses.size and (int(addresses.min()) < 0 or int(addresses.max()) + nbytes > self.size):
            raise MemoryFault(
                f"LDS access of {nbytes} bytes at {int(addresses.max()):#x}: only {self.size:#x} allocated"
            )
        return addresses[:, None] + BYTE_RANKS[nbytes]

    def _check_read(self, wave: Wave, index: Array, site: int) -> None:
        own, now = wave.index + 1, self._epoch * _TAG_WAVES
        written = self._write_tags[index]
        if ((written > now) & (written != now + own)).any():
            self.races["RAW", site] += 1
        if (written == 0).any():
            self.uninitialised_reads[site] += 1
        seen = self._read_tags[index]
        others = (seen > now) & (seen != now + own)
        self._read_tags[index] = np.where(others, now + _SEVERAL, now + own)
        by_others = (written & (_TAG_WAVES - 1)) != own
        if self._is_pending(wave, self._write_numbers[index], (written & (_TAG_WAVES - 1)) - 1, by_others):
            self.pending_reads[site] += 1

    def _is_pending(self, wave: Wave, numbers: Array, writers: Array, by_others: Array) -> bool:
        """Whether what wrote one of these bytes may still be under way. A wave sees its own stores in order."""
        if self._has_copies and (numbers[~by_others] > wave.vm_completed).any():
            return True
        if not by_others.any():
            return False
        numbers, writers = numbers[by_others], writers[by_others]
        return bool(((numbers > self._copies_done[writers]) | (-numbers > self._stores_done[writers])).any())

    def _check_write(self, wave: Wave, index: Array, site: int, data: Array, copy_number: int) -> None:
        own, now = wave.index + 1, self._epoch * _TAG_WAVES
        # Several waves storing what is there already is harmless: layouts that replicate data do it.
        changes = self.bytes[index] != data
        seen, written = self._read_tags[index], self._write_tags[index]
        if ((seen > now) & (seen != now + own) & changes).any():
            self.races["WAR", site] += 1
        if ((written > now) & (written != now + own) & changes).any():
            self.races["WAW", site] += 1
        self._write_tags[index] = now + own
        self._has_copies |= bool(copy_number)
        self._write_numbers[index] = copy_number or -wave.lgkm_issued

    def load(self, wave: Wave, addresses: Array, nbytes: int, site: int) -> Array:
        """Read `nbytes` per lane that is on. Returns uint32 [64, words]; narrow reads zero-extend."""
        where = addresses if wave.exec_full else addresses[wave.exec_lanes]
        index = self._indices(where.astype(np.int64), nbytes)
        if self.check:
            self._check_read(wave, index, site)
        raw = self.bytes[index]
        if nbytes >= 4:
            words = raw.view(np.uint32)
        else:
            words = raw[:, :1].astype(np.uint32)
            if nbytes == 2:
                words |= raw[:, 1:].astype(np.uint32) << np.uint32(8)
        if wave.exec_full:
            return words
        result = np.zeros((64, words.shape[1]), np.uint32)
        result[wave.exec_lanes] = words
        return result

    def store(self, wave: Wave, addresses: Array, data: Array, nbytes: int, site: int, copy_number: int = 0) -> None:
        """Write the first `nbytes` of each active lane's row of `data`: uint32 [64, words].

        Args:
            copy_number: the wave's vector-memory operation that brings the data, 0 for an ordinary store.
        """
        where, rows = addresses, data
        if not wave.exec_full:
            where, rows = addresses[wave.exec_lanes], data[wave.exec_lanes]
        if not where.size:
            return
        content = np.ascontiguousarray(rows).view(np.uint8)[:, :nbytes]
        index = self._indices(where.astype(np.int64), nbytes)
        if self.check:
            self._check_write(wave, index, site, content, copy_number)
        self.bytes[index] = content

    def copy_from_global(self, wave: Wave, offset: int, data: Array, nbytes: int, site: int) -> None:
        """Asynchronous copy: lanes write side by side from M0 + offset; counts as a vector-memory operation."""
        width = max(nbytes, 4)
        base = int(wave.sgpr[M0]) & (0xFFFF if self.size <= 0x10000 else 0x3FFFF)
        self.store(wave, base + offset + LANES * width, data, width, site, wave.vm_issued)


_WIDTH_BYTES = {"B8": 1, "U8": 1, "I8": 1, "B16": 2, "U16": 2, "I16": 2, "B32": 4, "B64": 8, "B96": 12, "B128": 16}


def sign_extended(words: Array, nbytes: int) -> Array:
    """Sign-extend a narrow load held in uint32."""
    shift = 32 - 8 * nbytes
    return ((words << shift).view(np.int32) >> shift).view(np.uint32)


def merged_half(old: Array, words: Array, *, high: bool) -> Array:
    """d16 loads: replace one half of a register and keep the other. Returns uint32 [64, 1]."""
    value = words[:, 0] & 0xFFFF
    merged = (old & 0xFFFF) | (value << 16) if high else (old & 0xFFFF0000) | value
    return merged[:, None]


def build_ds(inst: Instruction, address: int, machine: "Machine") -> Step:
    step = _build(inst, machine.lds, machine.site(address))

    def run(wave: Wave) -> None:
        wave.lgkm_issued += 1
        step(wave)

    return run


def _build(inst: Instruction, lds: LocalMemory, site: int) -> Step:
    name = inst.opcode
    operation = name.split("_")[1]
    if name in ("DS_BPERMUTE_B32", "DS_PERMUTE_B32"):
        return _build_permute(inst)
    if name == "DS_SWIZZLE_B32":
        return _build_swizzle(inst)
    if operation in ("READ2", "READ2ST64", "WRITE2", "WRITE2ST64"):
        return _build_pair(inst, lds, site)
    if "_TR_" in name:
        return _build_transposed_read(inst, lds, site)
    if operation == "READ":
        return _build_read(inst, lds, site)
    if operation == "WRITE":
        return _build_write(inst, lds, site)
    if operation in ("ADD", "MAX", "MIN") and name.split("_")[-1] in ("U32", "F32", "I32"):
        return _build_atomic(inst, lds, site)
    raise UnsupportedInstructionError(name)


def _offset(inst: Instruction) -> int:
    return inst.fields.offset0 | inst.fields.offset1 << 8


def _addresses(inst: Instruction, offset: int) -> Reader:
    register, constant = inst.fields.addr, np.uint32(offset)
    if not offset:
        return lambda wave: wave.vgpr[register]
    return lambda wave: wave.vgpr[register] + constant


def _build_permute(inst: Instruction) -> Step:
    """Moves between lanes through the LDS crossbar; touches no LDS memory."""
    fields, offset = inst.fields, _offset(inst)
    address, data, dst = fields.addr, fields.data0, fields.vdst

    def lanes(wave: Wave) -> Array:
        return ((wave.vgpr[address] + np.uint32(offset)) >> 2) & 63

    if inst.opcode == "DS_BPERMUTE_B32":

        def pull(wave: Wave) -> None:
            source = lanes(wave)
            wave.write_vgpr(dst, np.where(wave.exec_lanes[source], wave.vgpr[data][source], np.uint32(0)))

        return pull

    def push(wave: Wave) -> None:
        target, active = lanes(wave), wave.exec_lanes
        result = np.zeros(64, np.uint32)
        result[target[active]] = wave.vgpr[data][active]
        wave.write_vgpr(dst, result)

    return push


def _build_swizzle(inst: Instruction) -> Step:
    offset, register, dst = _offset(inst), inst.fields.addr, inst.fields.vdst
    if offset & 0x8000:
        quad = np.array([(offset >> (2 * i)) & 3 for i in range(4)])
        source = (LANES & ~3) + quad[LANES & 3]
    else:
        and_mask, or_mask, xor_mask = offset & 31, (offset >> 5) & 31, (offset >> 10) & 31
        source = (LANES & 32) | ((((LANES & 31) & and_mask) | or_mask) ^ xor_mask)

    def run(wave: Wave) -> None:
        wave.write_vgpr(dst, np.where(wave.exec_lanes[source], wave.vgpr[register][source], np.uint32(0)))

    return run


def _build_pair(inst: Instruction, lds: LocalMemory, site: int) -> Step:
    """Two accesses at two offsets, which count in elements or in 64 elements."""
    fields = inst.fields
    operation, width = inst.opcode.split("_")[1:3]
    nbytes = _WIDTH_BYTES[width]
    stride, words = nbytes * (64 if "ST64" in operation else 1), nbytes // 4
    first, second = _addresses(inst, fields.offset0 * stride), _addresses(inst, fields.offset1 * stride)
    if "READ" in operation:
        write, dst = write_rows(fields.acc), fields.vdst

        def load_two(wave: Wave) -> None:
            low = lds.load(wave, first(wave), nbytes, site)
            high = lds.load(wave, second(wave), nbytes, site)
            write(wave, dst, low)
            write(wave, dst + words, high)

        return load_two
    low_data, high_data = read_rows(fields.acc, fields.data0, words), read_rows(fields.acc, fields.data1, words)

    def store_two(wave: Wave) -> None:
        lds.store(wave, first(wave), low_data(wave), nbytes, site)
        lds.store(wave, second(wave), high_data(wave), nbytes, site)

    return store_two


def _build_read(inst: Instruction, lds: LocalMemory, site: int) -> Step:
    fields, name = inst.fields, inst.opcode
    width = name.split("_")[2]
    nbytes, addresses = _WIDTH_BYTES[width], _addresses(inst, _offset(inst))
    write, dst, use_agpr = write_rows(fields.acc), fields.vdst, fields.acc
    signed, half, high = width in ("I8", "I16"), "D16" in name, "D16_HI" in name

    def run(wave: Wave) -> None:
        words = lds.load(wave, addresses(wave), nbytes, site)
        if signed:
            words = sign_extended(words, nbytes)
        if half:
            words = merged_half((wave.agpr if use_agpr else wave.vgpr)[dst], words, high=high)
        write(wave, dst, words)

    return run


def _build_write(inst: Instruction, lds: LocalMemory, site: int) -> Step:
    fields = inst.fields
    nbytes, addresses = _WIDTH_BYTES[inst.opcode.split("_")[2]], _addresses(inst, _offset(inst))
    data = read_rows(fields.acc, fields.data0, max(nbytes // 4, 1))
    shift = 16 if "D16_HI" in inst.opcode else 0

    def run(wave: Wave) -> None:
        rows = data(wave)
        lds.store(wave, addresses(wave), rows >> shift if shift else rows, nbytes, site)

    return run


def _transpose_nibbles(words: Array) -> Array:
    """16 lanes hold 16 rows of 16 nibbles; afterwards lane c holds column c."""
    packed = words.view(np.uint8)
    nibbles = np.stack([packed & 15, packed >> 4], -1).reshape(4, 16, 16).transpose(0, 2, 1).reshape(64, 8, 2)
    return np.ascontiguousarray((nibbles[..., 0] | nibbles[..., 1] << 4).astype(np.uint8)).view(np.uint32)


def _transpose_elements(words: Array, dtype: Any) -> Array:
    """16 lanes hold 64 / bits rows of 16 elements, row-major over lanes; afterwards lane c holds column c."""
    elements = words.view(dtype)
    per_lane = elements.shape[1]
    columns = np.ascontiguousarray(elements.reshape(4, per_lane, 16).transpose(0, 2, 1))
    return columns.reshape(64, per_lane).view(np.uint32)


_TRANSPOSE: dict[str, Callable[[Array], Array]] = {
    "B4": _transpose_nibbles,
    "B8": lambda words: _transpose_elements(words, np.uint8),
    "B16": lambda words: _transpose_elements(words, np.uint16),
}


def _build_transposed_read(inst: Instruction, lds: LocalMemory, site: int) -> Step:
    """ds_read_b64_tr_b{4,8,16}: each block of 16 lanes reads a tile and gets it transposed."""
    fields = inst.fields
    transpose = _TRANSPOSE.get(inst.opcode.split("_")[-1])
    if transpose is None:
        raise UnsupportedInstructionError(inst.opcode)
    addresses, write, dst = _addresses(inst, _offset(inst)), write_rows(fields.acc), fields.vdst

    def run(wave: Wave) -> None:
        if not wave.exec_full:
            raise UnsupportedInstructionError(f"{inst.opcode} with lanes off")
        write(wave, dst, transpose(np.ascontiguousarray(lds.load(wave, addresses(wave), 8, site))))

    return run


_ATOMIC: dict[str, Callable[[Any, Any], Any]] = {"ADD": lambda a, b: a + b, "MAX": max, "MIN": min}


def _build_atomic(inst: Instruction, lds: LocalMemory, site: int) -> Step:
    fields = inst.fields
    parts = inst.opcode.split("_")
    combine = _ATOMIC[parts[1]]
    dtype: Any = {"U32": np.uint32, "I32": np.int32, "F32": np.float32}[parts[-1]]
    addresses, data, dst, returns = _addresses(inst, _offset(inst)), fields.data0, fields.vdst, "RTN" in parts

    def run(wave: Wave) -> None:
        where = addresses(wave)
        before = lds.load(wave, where, 4, site)[:, 0].copy()
        cells, operands = lds.bytes.view(dtype), wave.vgpr[data].view(dtype)
        for lane in np.nonzero(wave.exec_lanes)[0]:
            cell = int(where[lane]) >> 2
            before[lane] = cells[cell].view(np.uint32)
            cells[cell] = combine(cells[cell], operands[lane])
        if returns:
            wave.write_vgpr(dst, before)

    return run
