"""Whole Triton and Gluon kernels, compiled for gfx950 and executed, against float64.

`CASES` also feeds the mutation tests: a case compiles a kernel and tells a right result from a wrong one.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import kernels
import numpy as np
import pytest
import torch

import gfx950
from gfx950.compile import compile_kernel

FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
Arrays = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A kernel with its data and the expected outputs.

    `tolerance` is the largest error allowed, relative to the largest expected magnitude; 0 asks for equal values.
    """

    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    data: Callable[[], tuple[Arrays, Arrays]]
    tolerance: float = 0.0
    grid: tuple[int, int, int] = (1, 1, 1)
    options: dict[str, Any] = field(default_factory=dict)


def bf16(values: np.ndarray) -> np.ndarray:
    return torch.from_numpy(np.asarray(values, np.float32)).to(torch.bfloat16).view(torch.uint16).numpy()


def bf16_values(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def fp8_values(codes: np.ndarray) -> np.ndarray:
    return torch.from_numpy(codes).view(torch.float8_e4m3fn).double().numpy()


def fp4_values(packed: np.ndarray) -> np.ndarray:
    return FP4[np.stack([packed & 15, packed >> 4], -1)].reshape(*packed.shape[:-1], -1)


def random_fp8(rng: np.random.Generator, *shape: int) -> np.ndarray:
    codes = rng.integers(0, 256, shape).astype(np.uint8)
    return np.where(codes & 0x7F == 0x7F, 0x30, codes).astype(np.uint8)


def empty(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    """An output that nobody has written: NaN, or a pattern."""
    return np.full(shape, np.nan if np.issubdtype(dtype, np.floating) else 0x55, dtype)


def axpy_data() -> tuple[Arrays, Arrays]:
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((2, 700)).astype(np.float32)
    expected = (0.5 * x.astype(np.float64) + y).astype(np.float32)
    return {"x": x, "y": y, "out": empty(700), "n": 700, "alpha": 0.5}, {"out": expected}


def softmax_data() -> tuple[Arrays, Arrays]:
    x = np.random.default_rng(2).standard_normal((3, 1024)).astype(np.float32) * 3
    weight = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    return {"x": x, "out": empty(3, 1024)}, {"out": weight / weight.sum(1, keepdims=True)}


def reduction_data() -> tuple[Arrays, Arrays]:
    x = np.random.default_rng(3).standard_normal((32, 64)).astype(np.float32)
    expected = {"row_sum": x.astype(np.float64).sum(1), "column_max": x.max(0)}
    return {"x": x, "row_sum": empty(32), "column_max": empty(64)}, expected


def transpose_data() -> tuple[Arrays, Arrays]:
    x = np.random.default_rng(4).integers(0, 2**16, (64, 64)).astype(np.int16)
    return {"x": x, "out": empty(64, 64, dtype=np.int16)}, {"out": x.T}


def matmul_data(m: int, k: int) -> Callable[[], tuple[Arrays, Arrays]]:
    def data() -> tuple[Arrays, Arrays]:
        rng = np.random.default_rng(5)
        a, b = bf16(rng.standard_normal((m, k))), bf16(rng.standard_normal((k, m)))
        return {"a": a, "b": b, "out": empty(m, m), "K": k}, {"out": bf16_values(a) @ bf16_values(b)}

    return data


def scaled_data(format_a: str, format_b: str, m: int, n: int, k: int) -> Callable[[], tuple[Arrays, Arrays]]:
    def operand(rng: np.random.Generator, kind: str, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        scale = rng.integers(120, 134, (rows, k // 32)).astype(np.uint8)
        if kind == "e2m1":
            codes = rng.integers(0, 256, (rows, k // 2)).astype(np.uint8)
            values = fp4_values(codes)
        else:
            codes = random_fp8(rng, rows, k)
            values = fp8_values(codes)
        return codes, scale, values * np.repeat(2.0 ** (scale.astype(np.float64) - 127), 32, 1)

    def data() -> tuple[Arrays, Arrays]:
        rng = np.random.default_rng(6)
        a, a_scale, left = operand(rng, format_a, m)
        b, b_scale, right = operand(rng, format_b, n)
        arguments = {"a": a, "a_scale": a_scale, "b": b, "b_scale": b_scale, "out": empty(m, n)}
        return arguments, {"out": left @ right.T}

    return data


def weighted_data() -> tuple[Arrays, Arrays]:
    rng = np.random.default_rng(7)
    weight, codes = random_fp8(rng, 16, 128), rng.integers(0, 256, (128, 64)).astype(np.uint8)
    expected = fp8_values(weight) @ fp4_values(codes)
    return {"weight": weight, "codes": codes, "out": empty(16, 128)}, {"out": expected}


def last_block_data() -> tuple[Arrays, Arrays]:
    x = np.random.default_rng(8).standard_normal(1024).astype(np.float32)
    arguments = {"x": x, "partial": empty(4), "count": np.zeros(1, np.int32), "out": empty(1)}
    return arguments, {"out": np.array([x.astype(np.float64).sum()]), "count": np.zeros(1)}


def fp4_step_data() -> tuple[Arrays, Arrays]:
    rng = np.random.default_rng(9)
    codes = rng.integers(0, 256, (64, 64)).astype(np.uint8)
    scales = rng.integers(120, 134, (64, 4)).astype(np.uint8)
    queries = random_fp8(rng, 16, 128)
    keys = fp4_values(codes) * np.repeat(2.0 ** (scales.astype(np.float64) - 127), 32, 1)
    arguments = {"codes": codes.view(np.int32), "scales": scales, "queries": queries}
    arguments |= {"scores": empty(64, 16), "values": empty(64, 64, dtype=np.int32)}
    values = bf16(keys).view(np.int32).reshape(64, 64)
    return arguments, {"scores": keys @ fp8_values(queries).T, "values": values}


def _scaled(format_a: str, format_b: str, m: int, n: int, k: int) -> Case:
    kind = {"e4m3": "*fp8e4nv", "e2m1": "*u8"}
    return Case(
        kernels.scaled_matmul,
        {"a": kind[format_a], "a_scale": "*u8", "b": kind[format_b], "b_scale": "*u8", "out": "*fp32"},
        {"M": m, "N": n, "K": k, "FORMAT_A": format_a, "FORMAT_B": format_b},
        scaled_data(format_a, format_b, m, n, k),
        tolerance=2e-7,
    )


MATMUL = {"a": "*bf16", "b": "*bf16", "out": "*fp32", "K": "i32"}
CASES: dict[str, Case] = {
    "axpy": Case(
        kernels.masked_axpy,
        {"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32", "alpha": "fp32"},
        {"BLOCK": 256},
        axpy_data,
        grid=(3, 1, 1),
    ),
    "softmax": Case(
        kernels.softmax_rows, {"x": "*fp32", "out": "*fp32"}, {"COLUMNS": 1024}, softmax_data, 1e-6, (3, 1, 1)
    ),
    "reductions": Case(
        kernels.reduce_both_ways,
        {"x": "*fp32", "row_sum": "*fp32", "column_max": "*fp32"},
        {"ROWS": 32, "COLUMNS": 64},
        reduction_data,
        1e-6,
    ),
    "transpose": Case(kernels.transpose, {"x": "*i16", "out": "*i16"}, {"ROWS": 64, "COLUMNS": 64}, transpose_data),
    "matmul": Case(kernels.matmul, MATMUL, {"M": 64, "N": 64, "BLOCK_K": 64}, matmul_data(64, 256), 1e-6),
    "matmul-pipelined": Case(
        kernels.matmul, MATMUL, {"M": 64, "N": 64, "BLOCK_K": 32}, matmul_data(64, 192), 1e-6, options={"num_stages": 3}
    ),
    "scaled-fp8-fp4-16": _scaled("e4m3", "e2m1", 16, 64, 256),
    "scaled-fp8-fp4-64": _scaled("e4m3", "e2m1", 64, 64, 128),
    "scaled-fp4-fp4-16": _scaled("e2m1", "e2m1", 16, 64, 256),
    "scaled-fp8-fp8-64": _scaled("e4m3", "e4m3", 64, 64, 128),
    "fp4-packed-along-n": Case(
        kernels.weighted_fp4_sum,
        {"weight": "*fp8e4nv", "codes": "*u8", "out": "*fp32"},
        {"N": 128, "D": 128},
        weighted_data,
        2e-7,
    ),
    "last-block": Case(
        kernels.sum_by_the_last_block,
        {"x": "*fp32", "partial": "*fp32", "count": "*i32", "out": "*fp32"},
        {"BLOCK": 256, "BLOCKS": 4},
        last_block_data,
        1e-6,
        (4, 1, 1),
    ),
    "gluon-fp4-step": Case(
        kernels.fp4_scores_and_values,
        {"codes": "*i32", "scales": "*u8", "queries": "*fp8e4nv", "scores": "*fp32", "values": "*i32"},
        {"TOKENS": 64, "WARPS": 4},
        fp4_step_data,
        2e-7,
    ),
}


@cache
def compiled_case(name: str) -> Any:
    case = CASES[name]
    return compile_kernel(case.kernel, case.signature, case.constexprs, num_warps=4, **case.options)


def run_case(name: str, hsaco: bytes | None = None, **options: Any) -> tuple[list[str], gfx950.RunStats]:
    """Run a case, with other machine code if given. Returns what is wrong with the result, and the statistics."""
    case, compiled = CASES[name], compiled_case(name)
    arguments, expected = case.data()
    args = [arguments[key] for key in case.signature]
    metadata = compiled.metadata
    stats = gfx950.run(
        hsaco or compiled.asm["hsaco"], args, case.grid, shared=metadata.shared, num_warps=metadata.num_warps, **options
    )
    problems = gfx950.findings(stats)
    for key, value in expected.items():
        error = np.abs(arguments[key].astype(np.float64) - value)
        allowed = case.tolerance * np.abs(value).max()
        if not (error <= allowed).all():
            problems.append(f"{key}: error {error.max():.3g}, allowed {allowed:.3g}")
    return problems, stats


@pytest.mark.parametrize("name", CASES)
def test_kernel_computes_the_right_thing_without_findings(name: str) -> None:
    problems, _ = run_case(name)
    assert problems == []


@pytest.mark.parametrize("name", ["axpy", "gluon-fp4-step"])
def test_entry_behind_the_preload_prologue_is_equivalent(name: str) -> None:
    problems, stats = run_case(name, via_preload=True)
    assert problems == []
    assert stats["instructions"] < run_case(name)[1]["instructions"]


def test_groups_may_run_in_any_order_and_alone() -> None:
    assert run_case("last-block", groups=[(2, 0, 0), (0, 0, 0), (3, 0, 0), (1, 0, 0)])[0] == []
    problems, stats = run_case("last-block", groups=[(0, 0, 0)])
    assert problems and stats["groups"] == 1


def test_the_kernels_cover_the_special_instructions() -> None:
    seen: set[str] = set()
    for name in CASES:
        seen |= {opcode for opcode, count in run_case(name)[1]["executed"].values() if count}
    for part in ("MFMA_SCALE_F32_16X16X128", "MFMA_SCALE_F32_32X32X64", "CVT_SCALEF32_PK_BF16_FP4", "_TR_B4",
                 "ATOMIC_ADD", "_DPP", "DS_READ", "S_BARRIER", "BUFFER_LOAD"):  # fmt: skip
        assert any(part in opcode for opcode in seen), part


def test_trace_sees_every_executed_instruction() -> None:
    trace: list[tuple[int, int, str]] = []
    _, stats = run_case("axpy", trace=lambda wave, site, opcode: trace.append((wave.index, site, opcode)))
    assert len(trace) == stats["instructions"] == sum(count for _, count in stats["executed"].values())
    assert {index for index, _, _ in trace} == {0, 1, 2, 3}
    for _, site, opcode in trace:
        assert stats["executed"][site][0] == opcode
