"""The portable kernels, interpreted, against float64 over the same dequantised cache."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor

import interpreted
import numpy as np
import pytest
import torch
from cases import E2M1, Case

REL_L2 = 5e-3
LSE = 1e-4

LENGTHS = (1, 31, 32, 33, 1000, 1024, 1025, 4096)


@pytest.mark.parametrize("num_splits", [1, 7, 32])
@pytest.mark.parametrize("length", LENGTHS)
def test_decode_length_and_splits(interpreter: ProcessPoolExecutor, length: int, num_splits: int) -> None:
    case = Case((length,), seed=length)
    rel, lse = interpreter.submit(interpreted.decode, case, {"num_splits": num_splits, "block_n": 64}).result()
    assert rel <= REL_L2 and lse <= LSE


@pytest.mark.parametrize(
    "case",
    [
        Case((0, 1, 63, 64, 65, 0, 200)),
        Case((5, 129), heads=32),
        Case((5, 70), heads=8),
        Case((40, 3, 0), q_len=3),
        Case((33, 64), lead=17, scale_pad=0),
        Case((100, 30), sm_scale=0.3),
        Case((64, 65), scale_bytes=(0, 100, 127, 150, 200), q_factor=1e-6),
        Case((150,), scale_bytes=(100, 127), q_factor=1000.0),
    ],
    ids=str,
)
@pytest.mark.parametrize("plan", [{}, {"num_splits": 4, "block_n": 32}, {"num_splits": 3}], ids=str)
def test_decode_ragged(interpreter: ProcessPoolExecutor, case: Case, plan: dict[str, int]) -> None:
    rel, intact = interpreter.submit(interpreted.decode_into_canaries, case, plan).result()
    assert intact, "wrote outside its outputs"
    assert rel <= REL_L2


def test_load_tile_every_code_and_scale_byte(interpreter: ProcessPoolExecutor) -> None:
    got = interpreter.submit(interpreted.decode_table).result()
    exponent = np.arange(256, dtype=np.float64) - 127
    want = np.repeat(np.array(E2M1), 2)[None, :] * np.exp2(exponent)[:, None]
    with np.errstate(over="ignore"):
        want = want.astype(np.float32)
    assert np.isnan(got[255]).all(), "byte 255 is NaN for every code"
    np.testing.assert_array_equal(got[:255], want[:255])
    assert (np.signbit(got[:255]) == np.signbit(want[:255])).all(), "-0 keeps its sign"


@pytest.mark.parametrize("factor", [1.0, 2.0**-100, 2.0**100])
def test_two_fp8_terms_hold_a_bf16_query_of_any_magnitude(interpreter: ProcessPoolExecutor, factor: float) -> None:
    q, held = interpreter.submit(interpreted.split_queries, factor).result()
    largest = np.abs(q).reshape(2, 32, 16).max(1).repeat(32, 0)
    # Not 2^-8: the interpreter of Triton 3.6 loses a carry into the exponent; the second term takes up most of that.
    assert (np.abs(held - q) <= largest * 2.0**-6).all()
    assert np.linalg.norm(held - q) <= 2e-3 * np.linalg.norm(q)


@pytest.mark.parametrize("shape", [(2, 33), (3, 200)], ids=str)
def test_custom_kernel_on_contest_input(interpreter: ProcessPoolExecutor, shape: tuple[int, int]) -> None:
    rel, pick = interpreter.submit(interpreted.contest_call, *shape).result()
    assert rel <= REL_L2
    assert pick["backend"] == "triton" and all(c["dropped"] is None for c in pick["candidates"])


@pytest.mark.parametrize(
    "case",
    [
        Case((70, 33), scale_bytes=(127,), q_factor=0.0),  # all scores equal
        Case((70, 33), scale_bytes=(134,), q_factor=3.0),  # scores beyond 1e4
        Case((70, 33), scale_bytes=(60,), q_factor=2.0**66),
        Case((70, 33), scale_bytes=(0, 1, 2), q_factor=2.0**120),
        Case((9,) * 40, seed=4),
    ],
    ids=["equal", "large", "small scales", "denormal scales", "many"],
)
def test_decode_values(interpreter: ProcessPoolExecutor, case: Case) -> None:
    rel, lse = interpreter.submit(interpreted.decode, case, {"num_splits": 2}).result()
    assert rel <= REL_L2 and lse <= LSE


def test_infinite_query_touches_its_head_alone(interpreter: ProcessPoolExecutor) -> None:
    finite = interpreter.submit(_finite_heads, Case((40,), scale_bytes=(127,)), float("inf")).result()
    assert finite == [head != 4 for head in range(16)]


def _finite_heads(case: Case, value: float) -> list[bool]:
    from cases import build

    import submission

    t = build(case)
    t.q[0, 4, 100] = value
    out, _ = submission.mla_decode(t.q, t.codes, t.scales, t.indptr, case.sm_scale, submission.Plan())
    return [bool(head.isfinite().all()) for head in out[0]]


def test_nan_scale_touches_its_sequence_alone(interpreter: ProcessPoolExecutor) -> None:
    case = Case((40, 40), scale_bytes=(127,))
    finite = interpreter.submit(_nan_rows, case).result()
    assert finite == [False, True]


def _nan_rows(case: Case) -> list[bool]:
    from cases import build

    import submission

    t = build(case)
    t.scales[5, 3] = 255
    out, _ = submission.mla_decode(t.q, t.codes, t.scales, t.indptr, case.sm_scale, submission.Plan())
    return [bool(torch.isfinite(row).all()) for row in out]
