"""Reads a gfx950 code object (hsaco): ELF segments, relocations, kernel metadata and the kernel descriptor."""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

# ELF constants (System V ABI): segment types, section types, machine flags.
_PT_LOAD, _PT_NOTE = 1, 4
_SHT_SYMTAB, _SHT_RELA, _SHT_DYNSYM = 2, 4, 11
# AMDGPU code-object conventions (LLVM "User Guide for AMDGPU Backend").
_NT_AMDGPU_METADATA = 32
_EF_AMDGPU_MACH_MASK = 0xFF
EF_AMDGPU_MACH_GFX950 = 0x4F
R_AMDGPU_RELATIVE64 = 13
# Prologue of a kernel with preloaded arguments: 256 bytes that load them on old firmware and are skipped on new.
KERNARG_PRELOAD_PROLOGUE_BYTES = 256

# User SGPRs in the order the hardware fills them: (bit in kernel_code_properties, registers).
_USER_SGPRS = (
    ("private_segment_buffer", 0, 4),
    ("dispatch_ptr", 1, 2),
    ("queue_ptr", 2, 2),
    ("kernarg_segment_ptr", 3, 2),
    ("dispatch_id", 4, 2),
    ("flat_scratch_init", 5, 2),
    ("private_segment_size", 6, 1),
)


def parse_msgpack(data: bytes, offset: int = 0) -> tuple[Any, int]:
    """Decode one msgpack value (the subset that code-object metadata uses); returns it and the offset behind it."""
    tag = data[offset]
    offset += 1

    def sized(width: int, *, signed: bool = False) -> tuple[int, int]:
        return int.from_bytes(data[offset : offset + width], "big", signed=signed), offset + width

    def array(count: int, position: int) -> tuple[list[Any], int]:
        items = []
        for _ in range(count):
            item, position = parse_msgpack(data, position)
            items.append(item)
        return items, position

    def mapping(count: int, position: int) -> tuple[dict[Any, Any], int]:
        flat, position = array(2 * count, position)
        return dict(zip(flat[::2], flat[1::2], strict=True)), position

    def text(count: int, position: int) -> tuple[str, int]:
        return data[position : position + count].decode(), position + count

    if tag < 0x80:
        return tag, offset
    if tag < 0x90:
        return mapping(tag & 15, offset)
    if tag < 0xA0:
        return array(tag & 15, offset)
    if tag < 0xC0:
        return text(tag & 31, offset)
    if tag >= 0xE0:
        return tag - 256, offset
    if tag == 0xC0:
        return None, offset
    if tag in (0xC2, 0xC3):
        return tag == 0xC3, offset
    if 0xCC <= tag <= 0xCF:
        return sized(1 << (tag - 0xCC))
    if 0xD0 <= tag <= 0xD3:
        return sized(1 << (tag - 0xD0), signed=True)
    readers: dict[int, tuple[int, Callable[[int, int], tuple[Any, int]]]]
    readers = {0xD9: (1, text), 0xDA: (2, text), 0xDB: (4, text), 0xDC: (2, array), 0xDD: (4, array)}
    readers |= {0xDE: (2, mapping), 0xDF: (4, mapping)}
    if tag not in readers:
        raise ValueError(f"code object metadata: msgpack tag {tag:#x} is not one that AMDGPU metadata uses")
    width, read = readers[tag]
    return read(*sized(width))


@dataclass(frozen=True, slots=True)
class Segment:
    """A loadable ELF segment: where it lies in the file and in the loaded image."""

    file_offset: int
    address: int
    file_bytes: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class KernelArgument:
    """One explicit kernel argument: its place in the kernarg segment, bytes."""

    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class KernelDescriptor:
    """The 64-byte amdhsa kernel descriptor."""

    static_lds_bytes: int
    scratch_bytes_per_lane: int
    kernarg_bytes: int
    entry_offset: int
    rsrc3: int
    rsrc1: int
    rsrc2: int
    properties: int
    preload: int

    @classmethod
    def parse(cls, data: bytes, offset: int) -> "KernelDescriptor":
        lds, scratch, kernarg, _, entry = struct.unpack_from("<IIIIq", data, offset)
        rsrc3, rsrc1, rsrc2, properties, preload = struct.unpack_from("<IIIHH", data, offset + 44)
        return cls(lds, scratch, kernarg, entry, rsrc3, rsrc1, rsrc2, properties, preload)

    @property
    def user_sgprs(self) -> int:
        return (self.rsrc2 >> 1) & 0x1F

    @property
    def workgroup_id_enabled(self) -> tuple[bool, bool, bool]:
        return bool(self.rsrc2 >> 7 & 1), bool(self.rsrc2 >> 8 & 1), bool(self.rsrc2 >> 9 & 1)

    @property
    def kernarg_sgpr(self) -> int | None:
        """First SGPR of the kernarg pointer, if the kernel asks for it."""
        register = 0
        for name, bit, width in _USER_SGPRS:
            if self.properties >> bit & 1:
                if name == "kernarg_segment_ptr":
                    return register
                register += width
        return None

    @property
    def preload_sgpr(self) -> int:
        """First SGPR that receives preloaded kernel arguments."""
        return sum(width for _, bit, width in _USER_SGPRS if self.properties >> bit & 1)

    @property
    def preload_words(self) -> int:
        return self.preload & 0x7F

    @property
    def preload_word_offset(self) -> int:
        return self.preload >> 7


class CodeObject:
    """A parsed hsaco with one kernel.

    Args:
        data: the bytes of the ELF file.

    Raises:
        ValueError: not an ELF file, not gfx950, or not exactly one kernel.
    """

    def __init__(self, data: bytes) -> None:
        if data[:4] != b"\x7fELF":
            raise ValueError(f"hsaco: expected an ELF file, got bytes that start with {data[:4]!r}")
        self.data = data
        self.machine = struct.unpack_from("<I", data, 48)[0] & _EF_AMDGPU_MACH_MASK
        if self.machine != EF_AMDGPU_MACH_GFX950:
            raise ValueError(f"hsaco: expected machine {EF_AMDGPU_MACH_GFX950:#x} (gfx950), got {self.machine:#x}")
        self.segments: list[Segment] = []
        self.metadata: dict[str, Any] = {}
        self._parse_program_headers()
        self.symbols: dict[str, tuple[int, int]] = {}
        self.relocations: list[tuple[int, int, int]] = []
        self._parse_sections()
        kernels = self.metadata.get("amdhsa.kernels", [])
        if len(kernels) != 1:
            raise ValueError(f"hsaco: expected one kernel, got {len(kernels)}")
        self.kernel: dict[str, Any] = kernels[0]
        self.name: str = self.kernel[".name"]
        descriptor_address = self.symbols[self.name + ".kd"][0]
        self.descriptor = KernelDescriptor.parse(data, self.file_offset(descriptor_address))
        self.entry_address = descriptor_address + self.descriptor.entry_offset

    def _parse_program_headers(self) -> None:
        table = struct.unpack_from("<Q", self.data, 32)[0]
        count = struct.unpack_from("<H", self.data, 56)[0]
        for index in range(count):
            kind, _, offset, address, _, file_bytes, memory_bytes, _ = struct.unpack_from(
                "<IIQQQQQQ", self.data, table + 56 * index
            )
            if kind == _PT_LOAD:
                self.segments.append(Segment(offset, address, file_bytes, memory_bytes))
            elif kind == _PT_NOTE:
                self._parse_notes(offset, file_bytes)

    def _parse_notes(self, offset: int, size: int) -> None:
        end = offset + size
        while offset < end:
            name_bytes, body_bytes, kind = struct.unpack_from("<III", self.data, offset)
            body = offset + 12 + (name_bytes + 3 & ~3)
            if kind == _NT_AMDGPU_METADATA:
                self.metadata = parse_msgpack(self.data[body : body + body_bytes])[0]
            offset = body + (body_bytes + 3 & ~3)

    def _parse_sections(self) -> None:
        table = struct.unpack_from("<Q", self.data, 40)[0]
        count = struct.unpack_from("<H", self.data, 60)[0]
        sections = [struct.unpack_from("<IIQQQQIIQQ", self.data, table + 64 * index) for index in range(count)]
        for _, kind, _, _, offset, size, link, *_ in sections:
            if kind in (_SHT_SYMTAB, _SHT_DYNSYM):
                names = sections[link][4]
                for entry in range(offset, offset + size, 24):
                    name_at, _, _, _, value, length = struct.unpack_from("<IBBHQQ", self.data, entry)
                    name = self.data[names + name_at : self.data.index(b"\0", names + name_at)].decode()
                    if name:
                        self.symbols[name] = (value, length)
            elif kind == _SHT_RELA:
                self.relocations += [struct.unpack_from("<QQq", self.data, e) for e in range(offset, offset + size, 24)]

    def file_offset(self, address: int) -> int:
        """Offset in the file of a loaded address."""
        for segment in self.segments:
            if segment.address <= address < segment.address + segment.file_bytes:
                return segment.file_offset + address - segment.address
        raise ValueError(f"hsaco: address {address:#x} lies in no segment of the file")

    @property
    def image_bytes(self) -> int:
        return max(segment.address + segment.memory_bytes for segment in self.segments)

    @property
    def code_range(self) -> tuple[int, int]:
        """Offset in the file and length in bytes of the kernel's machine code."""
        address, size = self.symbols[self.name]
        return self.file_offset(address), size

    @cached_property
    def arguments(self) -> list[KernelArgument]:
        """The explicit arguments in order (what the runtime adds by itself is left out)."""
        entries = self.kernel.get(".args", [])
        return [KernelArgument(e[".offset"], e[".size"]) for e in entries if not e[".value_kind"].startswith("hidden")]

    def load(self, base: int) -> bytearray:
        """The memory image as it looks when loaded at absolute address `base`, relocations applied."""
        image = bytearray(self.image_bytes)
        for segment in self.segments:
            content = self.data[segment.file_offset : segment.file_offset + segment.file_bytes]
            image[segment.address : segment.address + segment.file_bytes] = content
        for offset, info, addend in self.relocations:
            if info & 0xFFFFFFFF != R_AMDGPU_RELATIVE64:
                raise ValueError(f"hsaco: relocation type {info & 0xFFFFFFFF} is not handled")
            struct.pack_into("<q", image, offset, base + addend)
        return image
