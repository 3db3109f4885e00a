"""MFMA instructions against float64 products, with the register layout written out element by element.

Layout: lane l holds row l % M of A and column l % M of B. With G = 64 / M lane groups, group g holds elements
g * K/G ... of K, except 8-bit operands of f8f6f4: there its 32 elements are two runs of 16, K/2 apart.
"""

import numpy as np
import pytest
import torch
from assembly import execute

FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
BITS = {"f32": 32, "f16": 16, "bf16": 16, "fp8": 8, "bf8": 8, "i8": 8, "fp6": 6, "bf6": 6, "fp4": 4}
FORMAT_CODE = {"fp8": 0, "bf8": 1, "fp6": 2, "bf6": 3, "fp4": 4}


def small_float(code: int, exponent_bits: int, mantissa_bits: int, bias: int) -> float:
    sign = -1.0 if code >> (exponent_bits + mantissa_bits) else 1.0
    exponent, mantissa = code >> mantissa_bits & ((1 << exponent_bits) - 1), code & ((1 << mantissa_bits) - 1)
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)


def random_codes(kind: str, rows: int, columns: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Codes (unsigned integers of the format's width) and their values."""
    if kind in ("f32", "f16", "bf16"):
        dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[kind]
        values = torch.from_numpy(rng.standard_normal((rows, columns))).to(dtype)
        codes = values.view(torch.int32 if kind == "f32" else torch.int16).numpy().astype(np.int64)
        return codes & ((1 << BITS[kind]) - 1), values.double().numpy()
    codes = rng.integers(0, 1 << BITS[kind], (rows, columns))
    if kind == "i8":
        return codes, codes.astype(np.int8).astype(np.float64)
    if kind == "fp4":
        return codes, FP4[codes]
    if kind in ("fp6", "bf6"):
        shape = (2, 3, 1) if kind == "fp6" else (3, 2, 3)
        return codes, np.vectorize(lambda code: small_float(int(code), *shape))(codes)
    codes = np.where(codes & 0x7F >= (0x7F if kind == "fp8" else 0x7C), 0x30, codes)
    dtype = torch.float8_e4m3fn if kind == "fp8" else torch.float8_e5m2
    return codes, torch.from_numpy(codes.astype(np.uint8)).view(dtype).double().numpy()


def to_registers(codes: np.ndarray, kind: str, *, split: bool) -> np.ndarray:
    """Spread the codes [M, K] over the lanes: uint32 [registers, 64]."""
    m, k = codes.shape
    groups = 64 // m
    share = k // groups
    words = np.zeros((64, share * BITS[kind] // 32), np.uint32)
    for lane in range(64):
        row, group = lane % m, lane // m
        bits = 0
        for element in range(share):
            column = group * share + element
            if split:
                column = (element // 16) * (k // 2) + group * 16 + element % 16
            bits |= int(codes[row, column]) << (BITS[kind] * element)
        words[lane] = np.frombuffer(bits.to_bytes(words.shape[1] * 4, "little"), np.uint32)
    return words.T


def from_registers(registers: np.ndarray, m: int) -> np.ndarray:
    """Collect D [M, N]: rows in runs of 4, one run per lane group, then the next 8 rows of a 32x32 tile."""
    result = np.zeros((m, m), registers.dtype)
    for lane in range(64):
        for register in range(m * m // 64):
            row = 4 * (lane // m) + register % 4 + (8 * (register // 4) if m == 32 else 0)
            result[row, lane % m] = registers[register, lane]
    return result


def to_result_registers(matrix: np.ndarray) -> np.ndarray:
    m = matrix.shape[0]
    registers = np.zeros((m * m // 64, 64), matrix.dtype)
    for lane in range(64):
        for register in range(m * m // 64):
            row = 4 * (lane // m) + register % 4 + (8 * (register // 4) if m == 32 else 0)
            registers[register, lane] = matrix[row, lane % m]
    return registers


DENSE = [
    ("f32_16x16x32_bf16", 16, 32, "bf16", "bf16"),
    ("f32_16x16x32_f16", 16, 32, "f16", "f16"),
    ("f32_16x16x16_bf16", 16, 16, "bf16", "bf16"),
    ("f32_16x16x16_f16", 16, 16, "f16", "f16"),
    ("f32_32x32x16_bf16", 32, 16, "bf16", "bf16"),
    ("f32_32x32x8_f16", 32, 8, "f16", "f16"),
    ("f32_16x16x4_f32", 16, 4, "f32", "f32"),
    ("f32_32x32x2_f32", 32, 2, "f32", "f32"),
    ("f32_16x16x32_fp8_fp8", 16, 32, "fp8", "fp8"),
    ("f32_16x16x32_fp8_bf8", 16, 32, "fp8", "bf8"),
    ("f32_32x32x16_fp8_fp8", 32, 16, "fp8", "fp8"),
    ("i32_16x16x64_i8", 16, 64, "i8", "i8"),
    ("i32_32x32x32_i8", 32, 32, "i8", "i8"),
]


def multiply(
    instruction: str, m: int, a: np.ndarray, b: np.ndarray, c: np.ndarray, extra: str = "", scales: object = None
) -> np.ndarray:
    """Run one MFMA with A from v, B from v, C and D in the same registers."""
    inputs = [*a, *b, *c] + ([] if scales is None else list(scales))  # type: ignore[call-overload]
    first = 8
    spans = []
    for rows in (a, b, c):
        spans.append(f"v[{first}:{first + len(rows) - 1}]" if len(rows) > 1 else f"v{first}")
        first += len(rows)
    operands = f"{spans[2]}, {spans[0]}, {spans[1]}, {spans[2]}"
    if scales is not None:
        operands += f", v{first}, v{first + 1}"
    outputs = [f"v{8 + len(a) + len(b) + i}" for i in range(len(c))]
    result, _ = execute(f"v_mfma_{instruction} {operands} {extra}", inputs, outputs)
    return result


@pytest.mark.parametrize(("instruction", "m", "k", "kind_a", "kind_b"), DENSE, ids=[row[0] for row in DENSE])
def test_dense_mfma(instruction: str, m: int, k: int, kind_a: str, kind_b: str) -> None:
    rng = np.random.default_rng(k)
    (codes_a, a), (codes_b, b) = random_codes(kind_a, m, k, rng), random_codes(kind_b, m, k, rng)
    integer = instruction.startswith("i32")
    c = rng.integers(-1000, 1000, (m, m)).astype(np.int32 if integer else np.float32)
    registers = multiply(
        instruction,
        m,
        to_registers(codes_a, kind_a, split=False),
        to_registers(codes_b, kind_b, split=False),
        to_result_registers(c.view(np.uint32)),
    )
    result = from_registers(registers, m).view(c.dtype)
    expected = a @ b.T + c
    if integer:
        np.testing.assert_array_equal(result, expected)
    else:
        np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("kind_a", FORMAT_CODE)
@pytest.mark.parametrize("kind_b", FORMAT_CODE)
@pytest.mark.parametrize(("m", "k"), [(16, 128), (32, 64)])
def test_scaled_mfma_of_every_pair_of_formats(m: int, k: int, kind_a: str, kind_b: str) -> None:
    rng = np.random.default_rng(FORMAT_CODE[kind_a] * 8 + FORMAT_CODE[kind_b])
    (codes_a, a), (codes_b, b) = random_codes(kind_a, m, k, rng), random_codes(kind_b, m, k, rng)
    scale_a, scale_b = (rng.integers(0, 2**32, (64,), dtype=np.uint32) for _ in range(2))
    byte_a, byte_b = int(rng.integers(4)), int(rng.integers(4))
    blocks = k // 32

    def scaled(values: np.ndarray, scale: np.ndarray, byte: int) -> np.ndarray:
        factor = np.zeros((m, blocks))
        for lane in range(64):
            factor[lane % m, lane // m] = 2.0 ** (int(scale[lane] >> (8 * byte) & 0xFF) - 127)
        return values * np.repeat(factor, 32, axis=1)

    # Scales near 1, so that float32 holds every product.
    scale_a, scale_b = (np.asarray((s & 0x07070707) + 0x7C7C7C7C, np.uint32) for s in (scale_a, scale_b))
    op_sel = f"op_sel:[{byte_a & 1},{byte_b & 1},0] op_sel_hi:[{byte_a >> 1},{byte_b >> 1},0]"
    registers = multiply(
        f"scale_f32_{m}x{m}x{k}_f8f6f4",
        m,
        to_registers(codes_a, kind_a, split=kind_a in ("fp8", "bf8")),
        to_registers(codes_b, kind_b, split=kind_b in ("fp8", "bf8")),
        np.zeros((m * m // 64, 64), np.uint32),
        f"{op_sel} cbsz:{FORMAT_CODE[kind_a]} blgp:{FORMAT_CODE[kind_b]}",
        (scale_a, scale_b),
    )
    expected = scaled(a, scale_a, byte_a) @ scaled(b, scale_b, byte_b).T
    result = from_registers(registers.view(np.float32), m)
    np.testing.assert_allclose(result, expected, rtol=2e-7, atol=2e-7 * np.abs(expected).max())


def test_scale_bytes_at_the_ends_of_the_range() -> None:
    ones = to_registers(np.full((16, 128), 2), "fp4", split=False)
    scales = np.resize(np.array([0, 1, 254, 255], np.uint32), 64)
    registers = multiply(
        "scale_f32_16x16x128_f8f6f4",
        16,
        ones,
        ones,
        np.zeros((4, 64), np.uint32),
        "cbsz:4 blgp:4",
        (scales, np.full(64, 127, np.uint32)),
    )
    result = from_registers(registers.view(np.float32), 16)
    for row in range(16):
        expected = {0: 128 * 2.0**-127, 1: 128 * 2.0**-126, 2: np.inf, 3: np.nan}[row % 4]
        np.testing.assert_array_equal(result[row], np.float32(expected))


def test_unscaled_f8f6f4_and_accumulators_in_agprs() -> None:
    rng = np.random.default_rng(5)
    (codes_a, a), (codes_b, b) = random_codes("fp8", 16, 128, rng), random_codes("fp4", 16, 128, rng)
    inputs = [*to_registers(codes_a, "fp8", split=True), *to_registers(codes_b, "fp4", split=False)]
    body = """
        v_accvgpr_write_b32 a0, 0
        v_accvgpr_write_b32 a1, 0
        v_accvgpr_write_b32 a2, 0
        v_accvgpr_write_b32 a3, 0
        v_mfma_f32_16x16x128_f8f6f4 a[0:3], v[8:15], v[16:19], a[0:3] blgp:4
        v_accvgpr_mov_b32 a4, a0
        v_mfma_f32_16x16x128_f8f6f4 v[20:23], v[8:15], v[16:19], 1.0 blgp:4
    """
    result, _ = execute(body, inputs, ("a4", "a1", "a2", "a3", "v20", "v21", "v22", "v23"))
    expected = a @ b.T
    tolerance = 2e-7 * np.abs(expected).max()
    np.testing.assert_allclose(from_registers(result[:4].view(np.float32), 16), expected, rtol=2e-7, atol=tolerance)
    np.testing.assert_allclose(from_registers(result[4:].view(np.float32), 16), expected + 1, rtol=2e-7, atol=tolerance)


def test_mfma_ignores_the_lane_mask() -> None:
    rng = np.random.default_rng(6)
    codes, values = random_codes("bf16", 16, 32, rng)
    operand = to_registers(codes, "bf16", split=False)
    body = "s_mov_b64 exec, 1\nv_mfma_f32_16x16x32_bf16 v[16:19], v[8:11], v[12:15], 0"
    result, _ = execute(body, [*operand, *operand], ("v16", "v17", "v18", "v19"))
    np.testing.assert_allclose(from_registers(result.view(np.float32), 16), values @ values.T, rtol=1e-5, atol=1e-5)
