"""Machine code -> Instruction. The encoding tables are those of the package tinygrad; nothing else of it is used."""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from tinygrad.renderer.amd import detect_format
from tinygrad.runtime.autogen.amd.cdna.operands import OPERANDS

_MODIFIER_SUFFIXES = ("_E32", "_E64", "_SDWA", "_DPP")
_EIGHT_BYTE_FORMATS = frozenset(
    ("VOP3", "VOP3_SDST", "VOP3SD", "VOP3P", "VOP3P_MFMA", "DS", "FLAT", "GLOBAL", "SCRATCH", "MUBUF", "MTBUF", "SMEM")
)
_LITERAL_OPERAND = 255
# Upper half of the first word of v_mfma_scale_*.
_SCALED_MFMA_PREFIX = 0xD3AC
_LITERAL_VOP2 = ("MADMK", "MADAK", "FMAMK", "FMAAK")


@dataclass(frozen=True, eq=False)
class Instruction:
    """One decoded instruction.

    `opcode` is the full name, `name` the same without the suffix of the encoding; encoding fields read as attributes
    of `fields`.
    """

    format: str
    opcode: str
    name: str
    size: int
    literal: int
    fields: "Fields" = field(repr=False)
    # Encoding field of each operand -> its bits and the kind of register or constant that it takes.
    operands: dict[str, tuple[int, str]] = field(repr=False)


class Fields:
    """The bit fields of an encoding, cut out of the raw bits on access."""

    def __init__(self, raw: int, layout: Any) -> None:
        self._raw = raw
        self._layout = layout

    def __getattr__(self, name: str) -> int:
        bits = getattr(self._layout, name)
        return (self._raw >> bits.lo) & ((1 << (bits.hi - bits.lo + 1)) - 1)


def _size_bytes(kind: str, opcode: str, raw: int) -> int:
    if kind == "VOP3PX2":
        return 16
    if kind in _EIGHT_BYTE_FORMATS or "SDWA" in kind or "DPP" in kind:
        return 8
    first, second = raw & 0xFF, (raw >> 8) & 0xFF
    has_literal = (
        (kind in ("VOP1", "VOP2", "VOPC") and raw & 0x1FF == _LITERAL_OPERAND)
        or (kind == "SOP1" and first == _LITERAL_OPERAND)
        or (kind in ("SOP2", "SOPC") and _LITERAL_OPERAND in (first, second))
        or (kind == "VOP2" and any(name in opcode for name in _LITERAL_VOP2))
        or (kind == "SOPK" and "SETREG_IMM32" in opcode)
    )
    return 8 if has_literal else 4


@lru_cache(maxsize=1 << 16)
def decode(code: bytes) -> Instruction:
    """Decode the instruction at the start of `code` (16 bytes, the length of the longest encoding)."""
    raw = int.from_bytes(code, "little")
    # The tables of tinygrad 0.14.0 leave the prefix of the 16-byte encoding open: any 8-byte instruction in front of an
    # f8f6f4 MFMA would match. Seen without the second half it cannot.
    if (raw >> 16) & 0xFFFF != _SCALED_MFMA_PREFIX:
        code = code[:8]
    layout = detect_format(code, "cdna")
    kind = layout.__name__.replace("_LIT", "")
    operation = layout.from_bytes(code).op
    opcode = name = operation.name
    for suffix in _MODIFIER_SUFFIXES:
        name = name.removesuffix(suffix)
    for variant in ("SDWA", "DPP"):
        if variant in kind:
            opcode = f"{name}_{variant}"
    return Instruction(
        format=kind,
        opcode=opcode,
        name=name,
        size=_size_bytes(kind, opcode, raw),
        literal=(raw >> 32) & 0xFFFFFFFF,
        fields=Fields(raw, layout),
        operands={field: (bits, register.name) for field, (_, bits, register) in OPERANDS.get(operation, {}).items()},
    )


def disassemble(code: bytes) -> list[tuple[int, Instruction]]:
    """Decode a whole function. Returns (offset, instruction) pairs."""
    padded = code + bytes(16)
    instructions = []
    offset = 0
    while offset < len(code):
        instruction = decode(padded[offset : offset + 16])
        instructions.append((offset, instruction))
        offset += instruction.size
    return instructions
