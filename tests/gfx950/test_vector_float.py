"""Floating-point vector instructions against numpy."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from assembly import execute, f32, floats, pattern

Array = np.ndarray


def as_float(bits: Array) -> Array:
    return bits.view(np.float32)


def fused(a: Array, b: Array, c: Array) -> Array:
    return (a.astype(np.longdouble) * b.astype(np.longdouble) + c.astype(np.longdouble)).astype(np.float32)


def no_nan(function: Callable[..., Any], *values: Array) -> Array:
    """Minimum or maximum over the values that are numbers."""
    stacked = np.array([np.broadcast_to(v, values[0].shape) for v in values])
    return np.asarray(function(stacked, axis=0))


EXACT: dict[str, tuple[int, Callable[..., Any]]] = {
    "v_add_f32": (2, lambda a, b: a + b),
    "v_sub_f32": (2, lambda a, b: a - b),
    "v_subrev_f32": (2, lambda a, b: b - a),
    "v_mul_f32": (2, lambda a, b: a * b),
    "v_max_f32": (2, lambda a, b: no_nan(np.nanmax, a, b)),
    "v_min_f32": (2, lambda a, b: no_nan(np.nanmin, a, b)),
    "v_fma_f32": (3, fused),
    "v_max3_f32": (3, lambda a, b, c: no_nan(np.nanmax, a, b, c)),
    "v_min3_f32": (3, lambda a, b, c: no_nan(np.nanmin, a, b, c)),
    "v_maximum3_f32": (3, lambda a, b, c: np.max([a, b, c], axis=0)),
    "v_minimum3_f32": (3, lambda a, b, c: np.min([a, b, c], axis=0)),
    "v_floor_f32": (1, np.floor),
    "v_ceil_f32": (1, np.ceil),
    "v_trunc_f32": (1, np.trunc),
    "v_rndne_f32": (1, np.round),
    "v_fract_f32": (1, lambda a: np.where(np.isinf(a), np.nan, a - np.floor(a))),
    "v_sqrt_f32": (1, np.sqrt),
}
# name -> (function in float64, relative error allowed).
TRANSCENDENTAL: dict[str, Callable[[Array], Array]] = {
    "v_exp_f32": np.exp2,
    "v_log_f32": np.log2,
    "v_rcp_f32": lambda a: 1 / a,
    "v_rsq_f32": lambda a: a**-0.5,
    "v_sqrt_f32": np.sqrt,
}


@pytest.mark.parametrize("name", EXACT)
@np.errstate(all="ignore")
def test_float_instruction_matches_numpy(name: str) -> None:
    count, function = EXACT[name]
    sources = floats(len(name), count)
    operands = ", ".join(f"v{8 + i}" for i in range(count))
    result, _ = execute(f"{name} v4, {operands}", sources)
    with pytest.warns(RuntimeWarning) if "nan" in name else np.errstate(all="ignore"):
        expected = np.asarray(function(*as_float(sources)), np.float32)
    np.testing.assert_array_equal(as_float(result[0]), expected)


@pytest.mark.parametrize("name", TRANSCENDENTAL)
def test_transcendental_matches_numpy(name: str) -> None:
    values = np.abs(as_float(floats(5, 1, special=False)[0]))
    values = np.minimum(values, 100) if name == "v_exp_f32" else values
    result, _ = execute(f"{name} v4, v8", f32(values)[None])
    np.testing.assert_allclose(as_float(result[0]), TRANSCENDENTAL[name](values.astype(np.float64)), rtol=3e-7)


def test_median_is_the_middle_one() -> None:
    sources = floats(9, 3, special=False)
    result, _ = execute("v_med3_f32 v4, v8, v9, v10", sources)
    np.testing.assert_array_equal(as_float(result[0]), np.sort(as_float(sources), axis=0)[1])


def test_modifiers_negate_take_the_absolute_value_scale_and_clamp() -> None:
    sources = floats(11, 2, special=False)
    a, b = as_float(sources)
    body = """
        v_add_f32 v4, -v8, |v9|
        v_mul_f32 v5, -|v8|, v9 mul:4
        v_add_f32 v6, v8, v9 clamp
        v_fma_f32 v7, v8, -v9, 1.0 div:2
    """
    result, _ = execute(body, sources, ("v4", "v5", "v6", "v7"))
    np.testing.assert_array_equal(as_float(result[0]), np.abs(b) - a)
    np.testing.assert_array_equal(as_float(result[1]), -np.abs(a) * b * np.float32(4))
    np.testing.assert_array_equal(as_float(result[2]), np.clip(a + b, 0, 1))
    np.testing.assert_array_equal(as_float(result[3]), fused(a, -b, np.ones_like(a)) * np.float32(0.5))


def test_inline_constants_and_literals() -> None:
    sources = f32(np.arange(64))[None]
    body = """
        v_mul_f32 v4, 0.5, v8
        v_mul_f32 v5, -4.0, v8
        v_mul_f32 v6, 0.15915494, v8
        v_mul_f32 v7, 0x40490fdb, v8
    """
    result, _ = execute(body, sources, ("v4", "v5", "v6", "v7"))
    for row, factor in zip(result, (0.5, -4.0, 0.15915494, 3.14159274), strict=True):
        np.testing.assert_array_equal(as_float(row), np.arange(64, dtype=np.float32) * np.float32(factor))


def test_fused_accumulate_and_constant_forms() -> None:
    sources = floats(13, 3, special=False)
    a, b, c = as_float(sources)
    constant = np.float32(3.5)
    body = """
        v_mov_b32 v4, v10
        v_fmac_f32 v4, v8, v9
        v_fmamk_f32 v5, v8, 0x40600000, v9
        v_fmaak_f32 v6, v8, v9, 0x40600000
        v_mov_b32 v7, v10
        v_fmac_f32_e64 v7, -v8, v9
    """
    result, _ = execute(body, sources, ("v4", "v5", "v6", "v7"))
    np.testing.assert_array_equal(as_float(result[0]), fused(a, b, c))
    np.testing.assert_array_equal(as_float(result[1]), fused(a, np.full_like(a, constant), b))
    np.testing.assert_array_equal(as_float(result[2]), fused(a, b, np.full_like(a, constant)))
    np.testing.assert_array_equal(as_float(result[3]), fused(-a, b, c))


PACKED_F32: dict[str, Callable[..., Array]] = {
    "v_pk_add_f32": lambda a, b: a + b,
    "v_pk_mul_f32": lambda a, b: a * b,
    "v_pk_fma_f32": fused,
}


@pytest.mark.parametrize("name", PACKED_F32)
def test_packed_float32_works_on_register_pairs(name: str) -> None:
    sources = floats(15, 6, special=False)
    values = as_float(sources)
    count = 3 if "fma" in name else 2
    operands = ", ".join(f"v[{8 + 2 * i}:{9 + 2 * i}]" for i in range(count))
    swap = (
        f"op_sel:[{','.join('1' * count)}] op_sel_hi:[{','.join('0' * count)}] neg_lo:[1,{','.join('0' * (count - 1))}]"
    )
    body = f"{name} v[4:5], {operands}\n{name} v[6:7], {operands} {swap}"
    result, _ = execute(body, sources, ("v4", "v5", "v6", "v7"))
    low, high = values[0 : 2 * count : 2], values[1 : 2 * count : 2]
    function = PACKED_F32[name]
    np.testing.assert_array_equal(as_float(result[0]), function(*low))
    np.testing.assert_array_equal(as_float(result[1]), function(*high))
    np.testing.assert_array_equal(as_float(result[2]), function(-high[0], *high[1:]))
    np.testing.assert_array_equal(as_float(result[3]), function(*low))


def test_packed_move_picks_words() -> None:
    sources = pattern(17, 4)
    result, _ = execute("v_pk_mov_b32 v[4:5], v[8:9], v[10:11] op_sel:[1,0]", sources, ("v4", "v5"))
    np.testing.assert_array_equal(result, sources[1:3])


HALF: dict[str, Callable[[Array, Array], Array]] = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "max": np.fmax,
    "min": np.fmin,
}


@pytest.mark.parametrize("name", HALF)
def test_float16_instructions_match_numpy(name: str) -> None:
    halves = np.random.default_rng(19).standard_normal((4, 64)).astype(np.float16)
    sources = np.array([a.view(np.uint16).astype(np.uint32) | b.view(np.uint16).astype(np.uint32) << 16
                        for a, b in (halves[:2], halves[2:])])  # fmt: skip
    body = f"v_pk_{name}_f16 v4, v8, v9\nv_{name}_f16 v5, v8, v9"
    result, _ = execute(body, sources, ("v4", "v5"))
    low = HALF[name](halves[0], halves[2]).view(np.uint16).astype(np.uint32)
    high = HALF[name](halves[1], halves[3]).view(np.uint16).astype(np.uint32)
    np.testing.assert_array_equal(result[0], low | high << 16)
    np.testing.assert_array_equal(result[1], low)


CONDITIONS: dict[str, Callable[[Array, Array], Array]] = {
    "lt": lambda a, b: a < b,
    "eq": lambda a, b: a == b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "lg": lambda a, b: (a < b) | (a > b),
    "ge": lambda a, b: a >= b,
    "o": lambda a, b: ~np.isnan(a) & ~np.isnan(b),
    "u": lambda a, b: np.isnan(a) | np.isnan(b),
    "nge": lambda a, b: ~(a >= b),
    "nlg": lambda a, b: ~((a < b) | (a > b)),
    "ngt": lambda a, b: ~(a > b),
    "nle": lambda a, b: ~(a <= b),
    "neq": lambda a, b: ~(a == b),
    "nlt": lambda a, b: ~(a < b),
}


@pytest.mark.parametrize("condition", CONDITIONS)
def test_float_compare_sets_the_mask_of_lanes_that_are_on(condition: str) -> None:
    sources = floats(21, 2)
    sources[1, 20:30] = sources[0, 20:30]
    body = f"""
        s_mov_b32 exec_hi, 0x0fffffff
        v_cmp_{condition}_f32 vcc, v8, v9
        v_cmpx_{condition}_f32 s[20:21], v8, v9
        s_mov_b64 s[22:23], exec
    """
    result, _ = execute(body, sources, ("vcc_lo", "vcc_hi", "s20", "s21", "s22", "s23"))
    with np.errstate(all="ignore"):
        expected = CONDITIONS[condition](*as_float(sources)) & (np.arange(64) < 60)
    masks = [int(result[i, 0]) | int(result[i + 1, 0]) << 32 for i in (0, 2, 4)]
    assert masks == [sum(int(bit) << lane for lane, bit in enumerate(expected))] * 3


def test_class_compare_knows_every_class() -> None:
    values = [
        np.uint32(0x7F800001), np.uint32(0x7FC00000), *f32([-np.inf, -1.0, -1e-40, -0.0, 0.0, 1e-40, 1.0, np.inf])
    ]  # fmt: skip
    source = np.resize(np.array(values, np.uint32), 64)[None]
    for bit in range(10):
        result, _ = execute(f"v_mov_b32 v4, {1 << bit:#x}\nv_cmp_class_f32 vcc, v8, v4", source, ("vcc_lo",))
        assert int(result[0, 0]) & 0x3FF == 1 << bit


def test_division_sequence_divides() -> None:
    """The sequence that LLVM emits for an IEEE division, over ordinary and extreme operands."""
    rng = np.random.default_rng(23)
    numerator = (rng.standard_normal(64) * np.exp2(rng.integers(-120, 120, 64))).astype(np.float32)
    denominator = (rng.standard_normal(64) * np.exp2(rng.integers(-120, 120, 64))).astype(np.float32)
    numerator[:4], denominator[:4] = [0, 1, np.inf, 0], [5, 0, 2, 0]
    body = """
        v_div_scale_f32 v10, s[20:21], v9, v9, v8
        v_div_scale_f32 v11, vcc, v8, v9, v8
        v_rcp_f32 v12, v10
        v_fma_f32 v13, -v10, v12, 1.0
        v_fmac_f32 v12, v13, v12
        v_mul_f32 v13, v11, v12
        v_fma_f32 v14, -v10, v13, v11
        v_fmac_f32 v13, v14, v12
        v_fma_f32 v10, -v10, v13, v11
        v_div_fmas_f32 v10, v10, v12, v13
        v_div_fixup_f32 v4, v10, v9, v8
    """
    result, _ = execute(body, f32([numerator, denominator]))
    with np.errstate(all="ignore"):
        expected = numerator / denominator
    np.testing.assert_allclose(as_float(result[0]), expected, rtol=2e-7)


def test_ldexp_and_frexp() -> None:
    values = as_float(floats(25, 1, special=False)[0])
    exponents = np.random.default_rng(25).integers(-30, 30, 64).astype(np.int32)
    body = "v_ldexp_f32 v4, v8, v9\nv_frexp_exp_i32_f32 v5, v8\nv_frexp_mant_f32 v6, v8"
    result, _ = execute(body, [f32(values), exponents.view(np.uint32)], ("v4", "v5", "v6"))
    np.testing.assert_array_equal(as_float(result[0]), np.ldexp(values, exponents))
    np.testing.assert_array_equal(as_float(result[2]) * np.exp2(result[1].view(np.int32).astype(np.float64)), values)
