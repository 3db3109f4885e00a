"""Matrix-core (MFMA) instructions: dense ones of 16x16 and 32x32, and the block-scaled f8f6f4 form of gfx950.

D[M, N] = A[M, K] B[K, N] + C[M, N] over the 64 lanes of a wave. Lanes fall into 64 / M groups. Lane l holds row l % M
of A (column of B); group l // M holds that share of K, except that 8-bit operands of f8f6f4 hold two runs of 16.
Products are summed in float64 and rounded once: the order of summation inside the matrix core is not modelled.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .decoder import Instruction
from .errors import UnsupportedInstructionError
from .formats import BF6_VALUES, BF8_VALUES, E8M0_VALUES, FP4_VALUES, FP6_VALUES, FP8_VALUES, Array
from .wave import LANES, Reader, Step, Wave, vector_reader

if TYPE_CHECKING:
    from .machine import Machine

_FIRST_VGPR = 256
_SHAPE = re.compile(r"_(\d+)X(\d+)X(\d+)(_\d+B)?")
# Operand formats by the codes of the cbsz (A) and blgp (B) fields of f8f6f4.
F8F6F4_FORMATS = ("FP8", "BF8", "FP6", "BF6", "FP4")
_ELEMENT_BITS = {"F32": 32, "F16": 16, "BF16": 16, "I8": 8, "FP8": 8, "BF8": 8, "FP6": 6, "BF6": 6, "FP4": 4}
# Values that share one scale in the block-scaled form.
_SCALE_BLOCK = 32


def _unpack_fp4(words: Array) -> Array:
    codes = words.view(np.uint8)
    values = np.empty((64, 2 * codes.shape[1]))
    values[:, 0::2] = FP4_VALUES[codes & 15]
    values[:, 1::2] = FP4_VALUES[codes >> 4]
    return values


def _unpack_six_bit(words: Array, table: Array) -> Array:
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little").reshape(64, -1, 6)
    return np.asarray(table[(bits * (1 << np.arange(6))).sum(-1)])


_UNPACK: dict[str, Callable[[Array], Array]] = {
    "F32": lambda words: words.view(np.float32).astype(np.float64),
    "F16": lambda words: words.view(np.float16).astype(np.float64),
    "BF16": lambda words: (words.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64),
    "I8": lambda words: words.view(np.int8).astype(np.float64),
    "FP8": lambda words: FP8_VALUES[words.view(np.uint8)],
    "BF8": lambda words: BF8_VALUES[words.view(np.uint8)],
    "FP6": lambda words: _unpack_six_bit(words, FP6_VALUES),
    "BF6": lambda words: _unpack_six_bit(words, BF6_VALUES),
    "FP4": _unpack_fp4,
}


@dataclass(frozen=True, slots=True)
class MatrixShape:
    """Sizes and operand formats of an MFMA instruction."""

    m: int
    n: int
    k: int
    format_a: str
    format_b: str
    is_f8f6f4: bool
    integer: bool

    @property
    def groups(self) -> int:
        """Lane groups, each holding a share of K."""
        return 64 // self.m

    @property
    def k_per_lane(self) -> int:
        return self.k // self.groups


def matrix_shape(inst: Instruction) -> MatrixShape:
    """Sizes and formats from the opcode's name and, for f8f6f4, its format fields."""
    match = _SHAPE.search(inst.opcode)
    if match is None or match.group(4) or "SMFMAC" in inst.opcode or match.group(1) not in ("16", "32"):
        raise UnsupportedInstructionError(inst.opcode)
    m, n, k = (int(size) for size in match.groups()[:3])
    parts = inst.opcode.split("_")
    fields = inst.fields
    is_f8f6f4 = parts[-1] == "F8F6F4"
    if is_f8f6f4:
        if max(fields.cbsz, fields.blgp) >= len(F8F6F4_FORMATS):
            raise UnsupportedInstructionError(f"{inst.opcode} with formats {fields.cbsz}, {fields.blgp}")
        format_a, format_b = F8F6F4_FORMATS[fields.cbsz], F8F6F4_FORMATS[fields.blgp]
    else:
        if fields.cbsz or fields.abid or fields.blgp:
            raise UnsupportedInstructionError(f"{inst.opcode} with broadcast fields")
        mixed = parts[-1] in ("FP8", "BF8")
        format_a, format_b = (parts[-2], parts[-1]) if mixed else (parts[-1], parts[-1])
    return MatrixShape(m, n, k, format_a, format_b, is_f8f6f4, "_I32_" in inst.opcode)


def _operand_reader(shape: MatrixShape, code: int, use_agpr: int, kind: str, opcode: str) -> Callable[[Wave], Array]:
    """Reader of A (or of B transposed) as float64 [M, K]."""
    if code < _FIRST_VGPR or kind not in _UNPACK:
        raise UnsupportedInstructionError(f"{opcode} with operand code {code}, format {kind}")
    first = code - _FIRST_VGPR
    registers = shape.k_per_lane * _ELEMENT_BITS[kind] // 32
    element = np.arange(shape.k_per_lane)
    group = (LANES // shape.m)[:, None]
    if shape.is_f8f6f4 and kind in ("FP8", "BF8"):
        position = (element // 16) * (shape.k // 2) + 16 * group + element % 16
    else:
        position = group * shape.k_per_lane + element
    flat = (LANES % shape.m)[:, None] * shape.k + position
    # Where each element of the matrix lies among the lanes' elements: one gather instead of a scatter.
    gather = np.argsort(flat, axis=None).reshape(shape.m, shape.k)
    unpack = _UNPACK[kind]

    def read(wave: Wave) -> Array:
        rows = (wave.agpr if use_agpr else wave.vgpr)[first : first + registers]
        return unpack(np.ascontiguousarray(rows.T)).ravel()[gather]

    return read


def _scale_reader(shape: MatrixShape, code: int, byte: int) -> Callable[[Wave], Array]:
    """Reader of an operand's scales as float64 [M, K / 32, 1]: lane l holds row l % M, block l // M."""
    read = vector_reader(code)

    def scales(wave: Wave) -> Array:
        exponents = np.broadcast_to((np.asarray(read(wave)) >> (8 * byte)) & 0xFF, (64,))
        return E8M0_VALUES[exponents].reshape(shape.groups, shape.m).T[:, :, None]

    return scales


def build_mfma(inst: Instruction, address: int, machine: "Machine") -> Step:
    return _build(inst, None)


def build_scaled_mfma(inst: Instruction, address: int, machine: "Machine") -> Step:
    """The 16-byte form: a scale register per operand and, through op_sel, the byte of it that holds the scale."""
    fields = inst.fields
    shape = matrix_shape(inst)
    byte_a = (fields.opsel & 1) | (fields.opsel_hi & 1) << 1
    byte_b = (fields.opsel >> 1 & 1) | (fields.opsel_hi >> 1 & 1) << 1
    return _build(
        inst, (_scale_reader(shape, fields.scale_src0, byte_a), _scale_reader(shape, fields.scale_src1, byte_b))
    )


def _build(inst: Instruction, scales: tuple[Reader, Reader] | None) -> Step:
    fields = inst.fields
    shape = matrix_shape(inst)
    read_a = _operand_reader(shape, fields.src0, fields.acc & 1, shape.format_a, inst.opcode)
    read_b = _operand_reader(shape, fields.src1, fields.acc >> 1, shape.format_b, inst.opcode)
    dst, in_agpr = fields.vdst, fields.acc_cd

    # Register r of lane l holds D[row, l % N]; rows go in runs of 4 per lane group.
    registers = shape.m * shape.n // 64
    rank, group = np.arange(registers)[:, None], (LANES // shape.m)[None, :]
    row = 8 * (rank // 4) + 4 * group + rank % 4 if shape.m == 32 else 4 * group + rank
    gather = row * shape.n + np.broadcast_to(LANES % shape.n, row.shape)

    read_c: Reader
    if fields.src2 >= _FIRST_VGPR:
        first = fields.src2 - _FIRST_VGPR

        def read_c(wave: Wave) -> Array:
            return (wave.agpr if in_agpr else wave.vgpr)[first : first + registers]
    else:
        read_c = vector_reader(fields.src2)

    def run(wave: Wave) -> None:
        a, b = read_a(wave), read_b(wave)
        if scales is not None:
            _apply_scales(a, scales[0](wave))
            _apply_scales(b, scales[1](wave))
        product = (a @ b.T).ravel()[gather]
        addend: Any = read_c(wave)
        if shape.integer:
            result = (product.astype(np.int64) + addend.view(np.int32)).astype(np.int32)
        else:
            result = (product + addend.view(np.float32)).astype(np.float32)
        # The matrix core ignores EXEC.
        (wave.agpr if in_agpr else wave.vgpr)[dst : dst + registers] = result.view(np.uint32)

    return run


def _apply_scales(operand: Array, scales: Array) -> None:
    blocks = operand.reshape(operand.shape[0], -1, _SCALE_BLOCK)
    blocks *= scales
