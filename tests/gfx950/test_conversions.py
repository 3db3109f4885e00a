"""Conversions between number formats: fp4, fp8, bfloat16, float16, integers, with scales and op_sel."""

import numpy as np
import pytest
import torch
from assembly import execute, f32, floats, pattern

FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
LANES = np.arange(64)


def torch_values(codes: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Values of 8-bit codes by PyTorch's own conversion."""
    return torch.from_numpy(codes.astype(np.uint8)).view(dtype).to(torch.float64).numpy()


def torch_bf16_bits(values: np.ndarray) -> np.ndarray:
    """float64 -> bfloat16 bits by PyTorch, through float32 (exact for what is tested here)."""
    single = torch.from_numpy(values.astype(np.float32))
    return single.to(torch.bfloat16).view(torch.uint16).numpy().astype(np.uint32)


def e8m0(byte: np.ndarray) -> np.ndarray:
    return np.where(byte == 255, np.nan, 2.0 ** (byte.astype(np.float64) - 127))


@pytest.mark.parametrize("byte", range(4))
@pytest.mark.parametrize("kind", ["bf16", "f16", "f32"])
def test_scaled_fp4_conversion_with_every_scale_byte_and_op_sel(byte: int, kind: str) -> None:
    rng = np.random.default_rng(byte)
    packed = rng.integers(0, 2**32, 256, dtype=np.uint32)
    scales = np.arange(256, dtype=np.uint32)
    op_sel = f"op_sel:[{byte & 1},{byte >> 1},0]"
    target = "v[4:5]" if kind == "f32" else "v4"
    result, _ = execute(
        f"v_cvt_scalef32_pk_{kind}_fp4 {target}, v8, v9 {op_sel}", [packed, scales << 23], ("v4", "v5"), waves=4
    )
    code = packed >> (8 * byte) & 0xFF
    with np.errstate(all="ignore"):
        exact = [FP4[code & 15] * e8m0(scales), FP4[code >> 4] * e8m0(scales)]
        if kind == "f32":
            low, high = (result[i].view(np.float32).astype(np.float64) for i in (0, 1))
            exact = [e.astype(np.float32).astype(np.float64) for e in exact]
        elif kind == "bf16":
            low, high = ((half << 16).view(np.float32) for half in (result[0] & 0xFFFF, result[0] >> 16))
            exact = [(torch_bf16_bits(e) << 16).view(np.float32) for e in exact]
        else:
            low, high = (half.astype(np.uint16).view(np.float16) for half in (result[0] & 0xFFFF, result[0] >> 16))
            exact = [e.astype(np.float16) for e in exact]
    np.testing.assert_array_equal(low, exact[0])
    np.testing.assert_array_equal(high, exact[1])


def test_scaled_conversion_reads_only_the_exponent_of_the_scale() -> None:
    packed = np.full(64, 0x21, np.uint32)
    scales = f32(-1.999 * np.exp2(np.arange(64) - 32))
    result, _ = execute("v_cvt_scalef32_pk_f32_fp4 v[4:5], v8, v9", [packed, scales], ("v4", "v5"))
    np.testing.assert_array_equal(result[0].view(np.float32), 0.5 * np.exp2(np.arange(64) - 32))
    np.testing.assert_array_equal(result[1].view(np.float32), np.exp2(np.arange(64) - 32))


@pytest.mark.parametrize(("name", "dtype"), [("fp8", torch.float8_e4m3fn), ("bf8", torch.float8_e5m2)])
def test_eight_bit_floats_expand_to_every_value(name: str, dtype: torch.dtype) -> None:
    low, high = np.arange(256, dtype=np.uint32), np.arange(256, dtype=np.uint32)[::-1]
    packed = low << 16 | high << 24 | 0x1234
    body = f"""
        v_lshrrev_b32 v20, 16, v8
        v_cvt_f32_{name} v4, v20
        v_cvt_f32_{name}_sdwa v5, v8 src0_sel:BYTE_3
        v_cvt_pk_f32_{name}_sdwa v[6:7], v8 src0_sel:WORD_1
        v_mov_b32 v9, 4.0
        v_cvt_scalef32_pk_f32_{name} v[10:11], v8, v9 op_sel:[1,0,0]
        v_cvt_scalef32_pk_bf16_{name} v12, v8, v9 op_sel:[1,0,0]
    """
    result, _ = execute(body, [packed], ("v4", "v5", "v6", "v7", "v10", "v11", "v12"), waves=4)
    expected = torch_values(low, dtype), torch_values(high, dtype)
    for row, values in zip(result[:6], (*expected, *expected, expected[0] * 4, expected[1] * 4), strict=True):
        np.testing.assert_array_equal(row.view(np.float32), values)
    for half, values in zip((result[6] & 0xFFFF, result[6] >> 16), expected, strict=True):
        np.testing.assert_array_equal((half << 16).view(np.float32), values * 4)


@pytest.mark.parametrize("name", ["fp8", "bf8"])
@pytest.mark.parametrize("half", [0, 1])
def test_floats_shrink_to_eight_bits_with_ties_to_even(name: str, half: int) -> None:
    rng = np.random.default_rng(3)
    a, b = (rng.standard_normal(64) * np.exp2(rng.integers(-12, 8, 64)) for _ in range(2))
    ties = np.array([1.0625, 1.1875, 17.0, 19.0, 2.0**-10, 3 * 2.0**-10, 0.0, -0.0])
    a[: len(ties)] = ties
    a, b = a.astype(np.float32), b.astype(np.float32)
    body = f"""
        v_mov_b32 v4, -1
        v_cvt_pk_{name}_f32 v4, v8, v9 op_sel:[0,0,{half}]
        v_mov_b32 v5, -1
        v_mov_b32 v10, 4.0
        v_cvt_scalef32_pk_{name}_f32 v5, v8, v9, v10 op_sel:[0,0,0,{half}]
    """
    result, _ = execute(body, f32([a, b]), ("v4", "v5"))
    dtype = torch.float8_e4m3fn if name == "fp8" else torch.float8_e5m2
    for row, factor in zip(result, (1, 0.25), strict=True):
        low, high = (torch.from_numpy(v * np.float32(factor)).to(dtype).view(torch.uint8).numpy() for v in (a, b))
        expected = low.astype(np.uint32) | high.astype(np.uint32) << 8
        np.testing.assert_array_equal(row, expected << 16 | 0xFFFF if half else expected | 0xFFFF0000)


@pytest.mark.parametrize("byte", range(4))
def test_floats_shrink_to_fp4_by_distance_with_ties_to_even(byte: int) -> None:
    rng = np.random.default_rng(byte)
    a = np.concatenate([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0, -0.25, -100], rng.uniform(-7, 7, 54)])
    b = rng.uniform(-7, 7, 64)
    body = f"""
        v_mov_b32 v4, 0
        v_mov_b32 v10, 2.0
        v_cvt_scalef32_pk_fp4_f32 v4, v8, v9, v10 op_sel:[0,0,{byte & 1},{byte >> 1}]
    """
    result, _ = execute(body, f32([a * 2, b * 2]))
    for values, shift in ((a, 0), (b, 4)):
        codes = result[0] >> (8 * byte + shift) & 15
        distance = np.abs(values.astype(np.float32)[:, None] - FP4[None, :])
        nearest = distance.min(1)
        np.testing.assert_array_equal(distance[LANES, codes], nearest)
        tied = (distance[:, :8] == nearest[:, None]).sum(1) + (distance[:, 9:] == nearest[:, None]).sum(1) > 1
        assert not (codes[tied] & 1).any()
    np.testing.assert_array_equal(result[0] & ~np.uint32(0xFF << 8 * byte), 0)


def test_packed_bfloat16_and_float16_conversions() -> None:
    sources = floats(7, 2)
    body = """
        v_cvt_pk_bf16_f32 v4, v8, v9
        v_cvt_pkrtz_f16_f32 v5, v8, v9
        v_cvt_f16_f32 v6, v8
        v_cvt_f32_f16 v7, v6
    """
    result, _ = execute(body, sources, ("v4", "v5", "v6", "v7"))
    a, b = sources.view(np.float32)
    for half, values in zip((result[0] & 0xFFFF, result[0] >> 16), (a, b), strict=True):
        expected = torch.from_numpy(values.copy()).to(torch.bfloat16).to(torch.float32).numpy()
        np.testing.assert_array_equal((half << 16).view(np.float32), expected)
    with np.errstate(all="ignore"):
        nearest = a.astype(np.float16)
    np.testing.assert_array_equal((result[2] & 0xFFFF).astype(np.uint16).view(np.float16), nearest)
    np.testing.assert_array_equal(result[3].view(np.float32), nearest.astype(np.float32))
    truncated = (result[1] & 0xFFFF).astype(np.uint16).view(np.float16).astype(np.float32)
    finite = np.isfinite(a)
    with np.errstate(all="ignore"):
        assert (np.abs(truncated[finite]) <= np.abs(a[finite])).all()
        away = np.nextafter(truncated[finite].astype(np.float16), np.copysign(np.inf, a[finite]).astype(np.float16))
        assert (np.abs(away.astype(np.float32)) >= np.abs(a[finite])).all()


def test_bfloat16_rounds_ties_to_even() -> None:
    """Values half way between two bfloat16 numbers, and next to half way."""
    upper = np.arange(64, dtype=np.uint32) + 0x3F80
    for lower in (0x7FFF, 0x8000, 0x8001):
        bits = upper << 16 | lower
        result, _ = execute("v_cvt_pk_bf16_f32 v4, v8, v8", bits[None])
        rounded_up = (lower > 0x8000) | ((lower == 0x8000) & (upper & 1 == 1))
        np.testing.assert_array_equal(result[0] & 0xFFFF, upper + rounded_up)


def test_integer_and_float_conversions_truncate_and_saturate() -> None:
    values = np.resize(np.array([0, -0.5, 1.9, -1.9, 3e9, -3e9, 5e9, np.nan, np.inf, -np.inf, 12345.7], np.float32), 64)
    body = "v_cvt_u32_f32 v4, v8\nv_cvt_i32_f32 v5, v8"
    result, _ = execute(body, f32(values)[None], ("v4", "v5"))
    for lane in range(64):
        value = float(values[lane])
        whole = 0 if np.isnan(value) else int(np.clip(np.trunc(value), -(2.0**63), 2.0**63))
        assert int(result[0, lane]) == min(max(whole, 0), 2**32 - 1)
        assert int(result[1].view(np.int32)[lane]) == min(max(whole, -(2**31)), 2**31 - 1)


def test_integers_convert_to_floats() -> None:
    sources = pattern(9, 1)
    body = "v_cvt_f32_u32 v4, v8\nv_cvt_f32_i32 v5, v8\n" + "\n".join(
        f"v_cvt_f32_ubyte{i} v{10 + i}, v8" for i in range(4)
    )
    result, _ = execute(body, sources, ("v4", "v5", "v10", "v11", "v12", "v13"))
    np.testing.assert_array_equal(result[0].view(np.float32), sources[0].astype(np.float32))
    np.testing.assert_array_equal(result[1].view(np.float32), sources[0].view(np.int32).astype(np.float32))
    for i in range(4):
        np.testing.assert_array_equal(result[2 + i].view(np.float32), sources[0] >> (8 * i) & 255)


def test_half_packing() -> None:
    sources = pattern(11, 2)
    result, _ = execute("v_pack_b32_f16 v4, v8, v9", sources)
    np.testing.assert_array_equal(result[0], sources[0] & 0xFFFF | sources[1] << 16)
