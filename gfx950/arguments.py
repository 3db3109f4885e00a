"""Kernel arguments: host buffers become regions of the arena, and the kernarg segment is filled in.

A buffer is a numpy array or a CPU tensor of PyTorch. Buffers that share host memory share arena memory, so that two
views of one allocation stay that; each keeps its address modulo 256, as compiled code may rely on its alignment.
"""

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .code_object import CodeObject
from .formats import Array
from .memory import Arena

ALIGNMENT = 256
_FLOAT_FORMATS = {2: "<e", 4: "<f", 8: "<d"}


@dataclass(frozen=True, slots=True)
class HostRange:
    """Host addresses [start, stop) that a buffer covers, gaps between its rows included."""

    start: int
    stop: int
    writable: bool = True


def host_range(value: Any) -> HostRange | None:
    """The host memory behind an argument; None for a scalar."""
    if isinstance(value, np.ndarray):
        start, stop = np.lib.array_utils.byte_bounds(value)
        return HostRange(start, stop, bool(value.flags.writeable))
    if hasattr(value, "data_ptr"):
        if value.device.type != "cpu":
            raise ValueError(f"args: tensors must be on the CPU, got one on {value.device}")
        reach = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
        elements = reach + 1 if value.numel() else 0
        return HostRange(value.data_ptr(), value.data_ptr() + elements * value.element_size())
    return None


def _merged(ranges: Sequence[HostRange]) -> list[HostRange]:
    """Overlapping ranges joined; ranges that only touch stay apart, so that an overrun still faults."""
    result: list[HostRange] = []
    for item in sorted(ranges, key=lambda r: (r.start, r.stop)):
        last = result[-1] if result else None
        if last is not None and (item.start < last.stop or item.start == last.start):
            result[-1] = HostRange(last.start, max(last.stop, item.stop), last.writable and item.writable)
        else:
            result.append(item)
    return result


def _host_bytes(span: HostRange) -> Array:
    size = span.stop - span.start
    if not size:
        return np.empty(0, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(span.start))


@dataclass(frozen=True, slots=True)
class Region:
    """A host range and its offset in the arena."""

    span: HostRange
    offset: int


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of a buffer that vector loads asked for, how many different ones, and how often the most wanted one."""

    requested: int
    distinct: int
    most: int


class Arguments:
    """The arguments of one launch.

    Args:
        code: the kernel, which says where its arguments lie and how large they are.
        values: arrays, tensors, ints, floats, bools, or None for a null pointer; missing trailing ones are null.

    Raises:
        ValueError: more arguments than the kernel takes.
    """

    def __init__(self, code: CodeObject, values: Sequence[Any]) -> None:
        if len(values) > len(code.arguments):
            raise ValueError(f"args: the kernel {code.name} takes {len(code.arguments)} arguments, got {len(values)}")
        self._code = code
        self._values = [*values, *[None] * (len(code.arguments) - len(values))]
        self._ranges = [host_range(value) for value in self._values]
        self._spans = _merged([item for item in self._ranges if item is not None])
        self._regions: list[Region] = []

    def sizes(self) -> list[int]:
        """Bytes of each allocation that `place` makes."""
        spans = [span.stop - span.start + ALIGNMENT for span in self._spans]
        return [self._code.descriptor.kernarg_bytes, *spans]

    def place(self, arena: Arena) -> int:
        """Copy everything into the arena. Returns the offset of the kernarg segment."""
        for span in self._spans:
            shift = span.start % ALIGNMENT
            offset = arena.allocate(span.stop - span.start, shift=shift)
            arena.write(offset, _host_bytes(span))
            self._regions.append(Region(span, offset))
        kernarg = arena.allocate(max(self._code.descriptor.kernarg_bytes, 8))
        for position, (argument, value) in enumerate(zip(self._code.arguments, self._values, strict=True)):
            encoded = self._encode(arena, position, argument.size)
            if len(encoded) != argument.size:
                raise ValueError(
                    f"args[{position}]: the kernel takes {argument.size} bytes here, "
                    f"got {len(encoded)} ({type(value).__name__})"
                )
            arena.write(kernarg + argument.offset, encoded)
        return kernarg

    def _encode(self, arena: Arena, position: int, size: int) -> bytes:
        value, span = self._values[position], self._ranges[position]
        if span is not None:
            return struct.pack("<Q", arena.base + self._offset(span))
        if value is None:
            return bytes(size)
        if isinstance(value, float | np.floating):
            return struct.pack(_FLOAT_FORMATS.get(size, "<f"), value)
        return int(value).to_bytes(size, "little", signed=int(value) < 0)

    def _offset(self, span: HostRange) -> int:
        """Where in the arena a buffer lies."""
        region = next(r for r in self._regions if r.span.start <= span.start and span.stop <= r.span.stop)
        return region.offset + span.start - region.span.start

    def traffic(self, arena: Arena) -> dict[int, "Traffic"]:
        """What vector loads read of each buffer, by the position of the argument."""
        result = {}
        for position, span in enumerate(self._ranges):
            if span is not None and arena.read_counts is not None:
                start = self._offset(span)
                counts = arena.read_counts[start : start + span.stop - span.start]
                read = int(np.count_nonzero(counts))
                result[position] = Traffic(int(counts.sum()), read, int(counts.max(initial=0)))
        return result

    def write_back(self, arena: Arena) -> None:
        """Copy what the kernel wrote back to the host.

        Raises:
            ValueError: the kernel changed a read-only array.
        """
        for region in self._regions:
            host = _host_bytes(region.span)
            device = arena.bytes[region.offset : region.offset + host.size]
            if region.span.writable:
                host[:] = device
            elif not np.array_equal(host, device):
                raise ValueError("args: the kernel wrote to a read-only array")
