"""Global memory: one arena that holds code, arguments, buffers and scratch, with a map of the bytes allocated.

Every allocation is followed by a guard gap that is never valid, so an access that runs over the end of a buffer faults.
"""

import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import MemoryFault

Array = npt.NDArray[Any]

GUARD_BYTES = 4096
# Byte ranks of one lane's access, so that the hot path builds no index vector.
BYTE_RANKS = {size: np.arange(size) for size in (1, 2, 4, 8, 12, 16)}
WORD_RANKS = {size: np.arange(size // 4) for size in (4, 8, 12, 16)}


class Arena:
    """Byte-addressed memory of the emulated device.

    Args:
        size: bytes to reserve; pages are only backed once touched.
    """

    def __init__(self, size: int) -> None:
        self._mapping = mmap.mmap(-1, size)
        self.bytes = np.frombuffer(self._mapping, np.uint8)
        self.words = self.bytes.view(np.uint32)
        self.base = int(self.bytes.ctypes.data)
        self.valid = np.zeros(size, np.bool_)
        self.size = size
        # How often vector loads have read each byte; counted only if asked for.
        self.read_counts: Array | None = None
        self._top = GUARD_BYTES

    def allocate(self, nbytes: int, align: int = 256, shift: int = 0) -> int:
        """Reserve bytes and return their offset in the arena, which is `shift` modulo `align`."""
        offset = -(-self._top // align) * align + shift
        if offset + nbytes + GUARD_BYTES > self.size:
            raise ValueError(f"arena: {nbytes} bytes more than fit in {self.size}; pass a larger arena")
        self._top = offset + nbytes + GUARD_BYTES
        self.valid[offset : offset + nbytes] = True
        return offset

    def write(self, offset: int, data: Any) -> None:
        """Copy bytes-like data into the arena."""
        content = np.frombuffer(data, np.uint8)
        self.bytes[offset : offset + content.size] = content

    def offsets(self, addresses: Array, nbytes: int) -> Array:
        """Arena offsets of absolute int64 addresses, each the start of `nbytes`; faults unless all are valid."""
        offsets = addresses - self.base
        if offsets.size:
            inside = int(offsets.min()) >= 0 and int(offsets.max()) + nbytes <= self.size
            if not inside or not (self.valid[offsets].all() and self.valid[offsets + (nbytes - 1)].all()):
                self._fault(offsets, nbytes)
        return offsets

    def _fault(self, offsets: Array, nbytes: int) -> None:
        bad = (offsets < 0) | (offsets + nbytes > self.size)
        if not bad.any():
            bad = ~(self.valid[offsets] & self.valid[offsets + nbytes - 1])
        lane = int(np.nonzero(bad)[0][0])
        raise MemoryFault(f"{nbytes} bytes at arena offset {int(offsets[lane]):#x} (active lane {lane}): out of bounds")

    def load(self, addresses: Array, nbytes: int, active: Array, all_active: bool) -> Array:
        """Gather `nbytes` per lane. Returns uint32 [64, words]; lanes that are off read 0; narrow loads zero-extend."""
        if all_active:
            return self._gather(self.offsets(addresses, nbytes), nbytes)
        result = np.zeros((64, max(nbytes // 4, 1)), np.uint32)
        result[active] = self._gather(self.offsets(addresses[active], nbytes), nbytes)
        return result

    def count_reads(self) -> None:
        """From now on, count how often vector loads read each byte."""
        self.read_counts = np.zeros(self.size, np.uint16)

    def _gather(self, offsets: Array, nbytes: int) -> Array:
        if self.read_counts is not None:
            np.add.at(self.read_counts, offsets[:, None] + BYTE_RANKS[nbytes], 1)
        if nbytes >= 4:
            if not (offsets & 3).any():
                return self.words[(offsets >> 2)[:, None] + WORD_RANKS[nbytes]]
            return self.bytes[offsets[:, None] + BYTE_RANKS[nbytes]].view(np.uint32)
        low = self.bytes[offsets].astype(np.uint32)
        if nbytes == 2:
            low |= self.bytes[offsets + 1].astype(np.uint32) << 8
        return low[:, None]

    def store(self, addresses: Array, data: Array, nbytes: int, active: Array) -> None:
        """Scatter the first `nbytes` of each active lane's row of `data`: uint32 [64, words]."""
        offsets = self.offsets(addresses[active], nbytes)
        if offsets.size:
            rows = np.ascontiguousarray(data[active]).view(np.uint8)
            self.bytes[offsets[:, None] + BYTE_RANKS[nbytes]] = rows[:, :nbytes]

    def load_words(self, address: int, count: int) -> list[int]:
        """Scalar load of `count` aligned words."""
        offset = address - self.base
        if not (offset >= 0 and offset + 4 * count <= self.size):
            raise MemoryFault(f"scalar load of {count} words at arena offset {offset:#x}: out of bounds")
        if not (self.valid[offset] and self.valid[offset + 4 * count - 1]):
            raise MemoryFault(f"scalar load of {count} words at arena offset {offset:#x}: out of bounds")
        return [int(word) for word in self.words[offset >> 2 : (offset >> 2) + count]]
