"""The gfx950 code of every ranked plan: right in the emulator on awkward data, and as cheap as HBM asks for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import Case, build, errors, far_end

import submission

pytest.importorskip("tinygrad", reason="reason: the emulator needs tinygrad; pip install tinygrad==0.14.0")
REL_L2 = 5e-3


def ranked_builds(body: str) -> list[submission.Plan]:
    """Plans of the ranked shapes that differ in machine code: one split, and several (3 behave like any)."""
    from gfx950.inspect import ranked_problems

    plans = [submission.choose_plan(problem, body) for problem in ranked_problems("gfx950")]
    return list(dict.fromkeys(replace(plan, num_splits=min(3, plan.num_splits)) for plan in plans))


BUILDS = [plan for body in ("gfx950", "scaled") for plan in ranked_builds(body)]
PORTABLE = submission.Plan(num_splits=2)  # what gfx950's compiler makes of the body for any machine


@pytest.fixture(scope="module")
def device() -> Iterator[Any]:
    from gfx950.device import emulated_device

    with emulated_device() as emulated:
        yield emulated


def decode(device: Any, case: Case, plan: submission.Plan) -> tuple[float, float, bool]:
    """(relative L2, lse error, canaries intact), outputs poisoned; fails on any finding of the emulator."""
    t = build(case)
    rows, guard = t.q.shape[0] * case.heads, 256
    flat = torch.full((rows * 512 + 2 * guard,), torch.nan, dtype=torch.bfloat16)
    flat[:guard] = flat[-guard:] = 7.0
    out = flat[guard:-guard].view(t.q.shape[0], case.heads, 512)
    lse = torch.full((t.q.shape[0], case.heads), torch.nan)
    launched = len(device.launches)
    submission.run_decode(submission.Inputs(t.q, t.codes, t.scales, t.indptr, case.sm_scale), plan, out, lse)
    assert len(device.launches) - launched == (2 if plan.num_splits > 1 else 1)
    assert device.findings() == []
    rel, off = errors(out, lse, case, t)
    return rel, off, bool((flat[:guard] == 7).all() and (flat[-guard:] == 7).all())


def lengths_of(plan: submission.Plan) -> tuple[int, ...]:
    tile = plan.block_n
    return (0, 1, tile - 1, tile, tile + 1, 2 * tile * plan.num_splits + 5, 0)


@pytest.mark.parametrize("plan", [*BUILDS, PORTABLE], ids=str)
def test_ragged_lengths(device: Any, plan: submission.Plan) -> None:
    rel, off, intact = decode(device, Case(lengths_of(plan)), plan)
    assert intact and rel <= REL_L2 and off <= 1e-2


@pytest.mark.parametrize("plan", BUILDS, ids=str)
def test_several_tiles_a_split_with_wide_scales(device: Any, plan: submission.Plan) -> None:
    tokens = plan.block_n * plan.num_splits * (5 if plan.num_warps <= 2 else 2) + 7
    case = Case((tokens,), scale_bytes=(0, 100, 127, 150, 200), q_factor=2.0**-76, scale_pad=0, lead=3)
    rel, off, intact = decode(device, case, plan)
    assert intact and rel <= REL_L2 and off <= 1e-2


@pytest.mark.parametrize("plan", BUILDS, ids=str)
def test_large_queries(device: Any, plan: submission.Plan) -> None:
    rel, _, _ = decode(device, Case((70, 40), q_factor=1000.0, scale_bytes=(100, 110)), plan)
    assert rel <= REL_L2


@pytest.mark.parametrize("case", [Case((130, 5), heads=32), Case((70,), heads=8), Case((40, 3, 0), q_len=3)], ids=str)
def test_scaled_body_takes_other_heads_and_several_query_tokens(device: Any, case: Case) -> None:
    rel, off, intact = decode(device, case, replace(ranked_builds("scaled")[0], num_splits=2))
    assert intact and rel <= REL_L2 and off <= 1e-2


@pytest.mark.parametrize("plan", [BUILDS[0], BUILDS[-1]], ids=lambda plan: plan.body)
def test_nan_scale_and_nan_query_touch_what_they_must(device: Any, plan: submission.Plan) -> None:
    case = Case((70, 40, 33), scale_bytes=(127,))
    t = build(case)
    t.scales[5, 3] = 255  # sequence 0
    t.q[1, 4, 17] = torch.nan  # head 4 of sequence 1
    out = torch.empty(3, 16, 512, dtype=torch.bfloat16)
    submission.run_decode(submission.Inputs(t.q, t.codes, t.scales, t.indptr, case.sm_scale), plan, out)
    finite = out.isfinite().all(-1)
    assert not finite[0].any()
    assert finite[1].tolist() == [head != 4 for head in range(16)]
    assert finite[2].all()


def test_growing_maximum_reads_the_segment_again(device: Any) -> None:
    plan = next(p for p in ranked_builds("gfx950") if p.num_splits == 1)
    case = Case((3 * plan.block_n,), scale_bytes=(127,))
    t = build(case)
    tokens = case.lengths[0]
    t.scales[:tokens, :18] = (112 + torch.arange(tokens)[:, None] * 20 // tokens).to(torch.uint8)
    out, lse = torch.empty(1, 16, 512, dtype=torch.bfloat16), torch.empty(1, 16)
    submission.run_decode(submission.Inputs(t.q, t.codes, t.scales, t.indptr, case.sm_scale), plan, out, lse)
    rel, _ = errors(out, lse, case, t)
    assert rel <= REL_L2


FAR = [*ranked_builds("gfx950")[:2], ranked_builds("scaled")[0], PORTABLE]


@pytest.mark.parametrize("plan", FAR, ids=str)
def test_sums_of_rising_weights_stay_in_range(device: Any, plan: submission.Plan) -> None:
    """The largest values that float32 holds under scores that rise, all from RoPE: a mean of them is no larger."""
    case, t = far_end("values 20", (700,))
    out, lse = torch.empty(1, 16, 512, dtype=torch.bfloat16), torch.empty(1, 16)
    submission.run_decode(submission.Inputs(t.q, t.codes, t.scales, t.indptr, case.sm_scale), plan, out, lse)
    rel, off = errors(out, lse, case, t)
    assert rel <= REL_L2 and off <= 1e-2


@pytest.mark.parametrize("plan", FAR, ids=str)
@pytest.mark.parametrize("factor", [1e10, 1e34])
def test_scores_whose_last_place_exceeds_any_exponent(device: Any, plan: submission.Plan, factor: float) -> None:
    rel, _, intact = decode(device, Case((300, 40), q_factor=factor), plan)
    assert intact and rel <= REL_L2


def test_assumptions_are_told_in_words() -> None:
    from gfx950.inspect import readable

    assert readable(2.0) == "2.0"
    assert readable({"A": 16, "B": 32, "C": 16}) == "16 for A, C; 32 for B"


def test_hot_loops_meet_their_targets(capsys: pytest.CaptureFixture[str]) -> None:
    from gfx950.inspect import inspect_gfx950

    report = inspect_gfx950()
    with capsys.disabled():
        print()
        for e in report["plans"]:
            print(
                f"gfx950 {e['batch']}x{e['kv']}: VALU {e['valu_cycles_per_token']:.2f} "
                f"MFMA {e['mfma_cycles_per_token']:.2f} "
                f"LDS {e['lds_cycles_per_token']:.2f} scratch {e['loop_scratch_ops']} waves/CU {e['waves_per_cu']} "
                f"predicted {e['predicted_us']:.1f} us"
            )
    assert {e["missed_targets"] == [] for e in report["plans"]} == {True}, [
        e["missed_targets"] for e in report["plans"]
    ]
    assert all(e["findings"] == [] for e in report["plans"])
    short = next(e["prediction"] for e in report["plans"] if (e["batch"], e["kv"]) == (4, 1024))
    assert short["issue_us"] + short["merge_us"] < 4.0, "4x1024 issues for too long beyond its launches"
    assert all(e["loop"]["loads_by_width"].get("16", 0) >= 10 for e in report["plans"]), "cache bytes not 16 a lane"
