"""Every engine against float64 on lengths, cuts, layouts and values that hypothesis draws.

Each answer is held per (query token, head): relative L2, log-sum-exp, and NaN in exactly the rows where float64 has it.
What is not output or scratch must come out as it went in; outputs and scratch begin as NaN and lie between canaries.

CI draws the same few examples each time. To look longer, at new ones: PROPERTY_FACTOR=50 python -m pytest
tests/test_properties.py
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import (
    FAR_ENDS,
    MAX_VALUE_BYTE,
    Case,
    Guarded,
    Layout,
    Tensors,
    answer,
    build,
    complaints,
    far_end,
    guarded_allocations,
)
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

import submission

FACTOR = int(os.environ.get("PROPERTY_FACTOR", "1"))


def examples(count: int) -> settings:
    """`count` examples, always the same; PROPERTY_FACTOR times as many, drawn anew, if that is set."""
    return settings(
        max_examples=count * FACTOR,
        derandomize=FACTOR == 1,
        database=None,
        deadline=None,
        print_blob=True,
        # Making an example smaller takes minutes here: only for those who look longer.
        phases=[Phase.generate] if FACTOR == 1 else [Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Small products, several test processes: threads that wait for each other cost thirty times the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# Around the tiles of the kernels: 16 and 32 tokens (Hopper), 16 to 128 (portable), 64 and 256 (gfx950)
EDGES = (0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)


@st.composite
def cases(
    draw: st.DrawFn,
    heads: tuple[int, ...] = (8, 16, 32),
    q_lens: tuple[int, ...] = (1, 2, 3, 4),
    max_tokens: int = 260,
    min_power: int = -126,
) -> Case:
    """Lengths first, then a class of values whose scores float32 can hold to a part in a thousand."""
    length = st.one_of(st.sampled_from(EDGES), st.integers(0, 150))
    lengths = draw(st.lists(length, min_size=1, max_size=4).filter(lambda x: sum(x) <= max_tokens))
    q_len, lead = draw(st.sampled_from(q_lens)), draw(st.sampled_from((0, 1, 5, 16)))
    size = draw(st.sampled_from(("equal", "flat", "usual", "peaked", "over 1e4", "largest q")))
    if size == "largest q":
        scale_bytes, q_factor = (0, 1), 2.0**127  # clamped at bf16's largest
    else:
        low = draw(st.one_of(st.integers(110, 140), st.integers(0, MAX_VALUE_BYTE)))
        width = draw(st.sampled_from((1, 2, 7)))
        scale_bytes = tuple(range(low, min(low + width, MAX_VALUE_BYTE + 1)))
        power = {"equal": 0, "flat": -4, "usual": 0, "peaked": 4, "over 1e4": 12}[size] - len(scale_bytes) + 1
        q_factor = 0.0 if size == "equal" else 2.0 ** min(126, max(min_power, power + 127 - low))
    sm_scale = draw(st.sampled_from((576**-0.5, 0.3, 0.01))) if size in ("flat", "usual") else 576**-0.5
    case = Case(
        tuple(lengths),
        heads=draw(st.sampled_from(heads)),
        q_len=q_len,
        seed=draw(st.integers(0, 99)),
        scale_bytes=scale_bytes,
        q_factor=q_factor,
        lead=lead,
        sm_scale=sm_scale,
    )
    kind = draw(st.sampled_from(("none", "none", "q", "scale")))
    if kind == "q":
        at = [draw(st.integers(0, n - 1)) for n in (len(lengths) * q_len, case.heads, 576)]
        planted: tuple[Any, ...] = ("q", *at, draw(st.sampled_from((math.inf, -math.inf, math.nan))))
    elif kind == "scale" and sum(lengths):
        token = lead + draw(st.integers(0, sum(lengths) - 1))
        planted = ("scale", token, draw(st.integers(0, 17)), 255)
    else:
        return case
    return replace(case, planted=(planted,))


layouts = st.builds(
    Layout,
    scales=st.sampled_from(("padded", "trimmed", "columns", "spread")),
    row_bytes=st.sampled_from((288, 304, 306, 321)),
    q_pitch=st.sampled_from((576, 600)),
    native=st.booleans(),
    singleton=st.booleans(),
    long_indptr=st.booleans(),
)
plans = st.fixed_dictionaries(
    {
        "num_splits": st.one_of(st.integers(1, 5), st.sampled_from((9, 64))),
        "block_n": st.sampled_from((16, 32, 64, 128)),
    }
)


# The portable body, interpreted

# The interpreter misreads bf16's denormals (it does not normalise them), so there are none of weight among its queries.
INTERPRETED = {"min_power": -117}


def portable(case: Case, layout: Layout, plan: dict[str, int]) -> list[str]:
    """In the interpreter's process: what is wrong with mla_decode."""
    t = build(case)
    g = Guarded(t, layout)
    with guarded_allocations() as made:
        out, lse = submission.mla_decode(g.q, g.codes, g.scales, g.indptr, case.sm_scale, submission.Plan(**plan))
    found = complaints(out, lse, case, t)
    return found + [f"changed {name}" for name in g.changed()] + ["wrote outside its buffers"] * made.overrun()


@examples(30)
@given(case=cases(max_tokens=200, **INTERPRETED), layout=layouts, plan=plans)
def test_portable_body(interpreter: ProcessPoolExecutor, case: Case, layout: Layout, plan: dict[str, int]) -> None:
    rows, splits = len(case.lengths) * case.q_len, plan["num_splits"]
    # An interpreted program takes about 12 ms, one of the merge 3 ms.
    assume(12 * rows * -(-case.heads // 16) * splits + (splits > 1) * 12 * rows * case.heads < 600)
    assert interpreter.submit(portable, case, layout, plan).result() == []


def contest_call(case: Case, layout: Layout) -> tuple[list[str], str, list[str]]:
    """custom_kernel: what is wrong, the winner's name, warnings about candidates."""
    t = build(case)
    g = Guarded(t, layout)
    qo = torch.arange(len(case.lengths) + 1, dtype=torch.int32) * case.q_len
    # What the config says of lengths is a hint that may be wrong.
    config = {"batch_size": len(case.lengths), "q_seq_len": case.q_len, "kv_seq_len": 7, "sm_scale": case.sm_scale}
    submission._picks.clear()
    with warnings.catch_warnings(record=True) as caught, guarded_allocations() as made:
        warnings.simplefilter("always", RuntimeWarning)
        out = submission.custom_kernel((g.q, {"mxfp4": (g.codes, g.scales)}, qo, g.indptr, config))
    found = complaints(out, None, case, t) + [f"changed {name}" for name in g.changed()]
    pick = submission.last_pick()
    assert pick is not None
    dropped = [str(w.message) for w in caught if str(w.message).startswith("dropped")]
    return found + ["wrote outside its buffers"] * made.overrun(), pick["backend"], dropped


@examples(24)
@given(case=cases(q_lens=(1, 2), max_tokens=100, **INTERPRETED), layout=layouts)
def test_pick_keeps_the_kernels_whatever_the_values(
    interpreter: ProcessPoolExecutor, case: Case, layout: Layout
) -> None:
    assert interpreter.submit(contest_call, case, layout).result() == ([], "triton", [])


# The torch backend


@examples(60)
@given(case=cases(heads=(8, 16, 32, 64, 128)), layout=layouts)
def test_torch_backend(case: Case, layout: Layout) -> None:
    assert contest_call(case, layout) == ([], "torch", [])


def at_the_far_end(kind: str, lengths: tuple[int, ...], plan: submission.Plan) -> list[str]:
    case, t = far_end(kind, lengths)
    out, lse = submission.mla_decode(t.q, t.codes, t.scales, t.indptr, case.sm_scale, plan)
    # The emulated exponential is good for 2^-22, which scores that rise by 2^200 multiply.
    return complaints(out, lse, case, t, lse_off=1e-3)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("kind", FAR_ENDS)
def test_portable_body_at_the_far_end(interpreter: ProcessPoolExecutor, kind: str, splits: int) -> None:
    if splits > 1 and kind == "equal scores 1e10":
        pytest.skip("reason: a float32 log-sum-exp cannot weigh equal scores of 1e10 between splits (docs/gfx950.md)")
    plan = submission.Plan(num_splits=splits, block_n=64)
    assert interpreter.submit(at_the_far_end, kind, (1, 150, 0, 333), plan).result() == []


@pytest.mark.parametrize("kind", FAR_ENDS)
def test_torch_backend_at_the_far_end(kind: str) -> None:
    case, t = far_end(kind, (1, 150, 0, 333))
    out, lse = submission.torch_attention(submission.Inputs(t.q, t.codes, t.scales, t.indptr, case.sm_scale))
    assert complaints(out, lse, case, t) == []


@examples(60)
@given(
    lengths=st.lists(st.one_of(st.sampled_from(EDGES), st.integers(0, 150)), min_size=1, max_size=4),
    dtype=st.sampled_from((torch.float8_e4m3fn, torch.float8_e4m3fnuz)),
    q_len=st.integers(1, 4),
    scale=st.sampled_from((2.0**-20, 0.01, 1.0, 3e4)),
    lead=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_fp8_truth_of_either_type(
    lengths: list[int], dtype: torch.dtype, q_len: int, scale: float, lead: int, seed: int
) -> None:
    gen = torch.Generator().manual_seed(seed)
    bounds = torch.tensor([lead, *lengths]).cumsum(0).to(torch.int32)
    # Codes up to the type's largest: 448, 240
    values = (torch.randn(int(bounds[-1]) + 2, 1, 576, generator=gen) * 80).clamp(-240, 240).to(dtype)
    q = (torch.randn(len(lengths) * q_len, 16, 576, generator=gen) / (80 * scale)).bfloat16()
    codes = torch.zeros(len(values), 288, dtype=torch.uint8)
    inputs = submission.Inputs(
        q, codes, codes, bounds, 1 / 24, kv_fp8=values, kv_fp8_scale=torch.tensor([scale], dtype=torch.float32)
    )
    out, lse = submission.torch_attention(inputs, cache="fp8")
    case = Case(tuple(lengths), q_len=q_len)
    keys = values[:, 0].double() * float(inputs.kv_fp8_scale)  # type: ignore[arg-type]
    want, want_lse = answer(case, Tensors(q, codes, codes, bounds), keys)
    size = want.norm(dim=-1)
    assert torch.equal(size == 0, out.norm(dim=-1) == 0)
    assert bool(((out - want).norm(dim=-1) <= 1e-4 * size).all())
    assert torch.allclose(lse.double(), want_lse, rtol=1e-5, atol=1e-4)


# The gfx950 body, its machine code executed


@pytest.fixture
def emulated() -> Iterator[Any]:
    """For one test only: while it lasts, every CPU tensor is taken for one of the emulated device."""
    pytest.importorskip("tinygrad", reason="reason: the emulator needs tinygrad; pip install tinygrad==0.14.0")
    from gfx950.device import emulated_device

    with emulated_device() as device:
        yield device


@examples(12)
@given(
    case=cases(heads=(16,), q_lens=(1,)),
    cut=st.sampled_from(((2, 3), (8, 1))),
    layout=st.sampled_from((Layout(), Layout("trimmed", q_pitch=600, native=True, singleton=True, long_indptr=True))),
)
def test_gfx950_body(emulated: Any, case: Case, cut: tuple[int, int], layout: Layout) -> None:
    waves, splits = cut
    plan = submission.Plan("gfx950", num_warps=waves, block_n=32 * waves, num_splits=splits)
    t = build(case)
    g = Guarded(t, layout)
    launched = len(emulated.launches)
    with guarded_allocations() as made:
        out, lse = submission.mla_decode(g.q, g.codes, g.scales, g.indptr, case.sm_scale, plan)
    assert emulated.launches[launched].name == "_attend_gfx950_kernel"
    assert complaints(out, lse, case, t, lse_off=1e-2) == []
    assert (g.changed(), made.overrun(), emulated.findings()) == ([], False, [])


@pytest.mark.parametrize("plan", [("gfx950", 2, 64, 3), ("scaled", 4, 128, 2)], ids=str)
@pytest.mark.parametrize("kind", ["values 20", "values 200", "largest q", "scores 3e38"])
def test_gfx950_code_at_the_far_end(emulated: Any, kind: str, plan: tuple[str, int, int, int]) -> None:
    body, waves, tile, splits = plan
    found = at_the_far_end(kind, (1, 333), submission.Plan(body, num_warps=waves, block_n=tile, num_splits=splits))
    assert (found, emulated.findings()) == ([], [])


# The Hopper kernel's text, on a CPU


@pytest.fixture(scope="module")
def hopper_kernel(cpu_compiler: None, tmp_path_factory: pytest.TempPathFactory) -> Any:
    from test_hopper import CpuKernel

    return CpuKernel(tmp_path_factory.mktemp("hopper"))


@examples(40)
@given(
    case=cases(heads=(16,), q_lens=(1,)),
    cut=st.sampled_from(((1, 1), (1, 5), (1, 40), (2, 3), (4, 2), (8, 1))),
    order=st.integers(0, 1),
)
def test_hopper_text(hopper_kernel: Any, case: Case, cut: tuple[int, int], order: int) -> None:
    t = build(case)
    x = SimpleNamespace(q=t.q, kv_fp4=t.codes, kv_scale=t.scales, kv_indptr=t.indptr, sm_scale=case.sm_scale)
    out = hopper_kernel(x, *cut, launches=2, order=order)
    assert complaints(out, None, case, t) == []


@pytest.mark.parametrize("cut", [(1, 1), (1, 5), (2, 3)], ids=str)
@pytest.mark.parametrize("kind", FAR_ENDS)
def test_hopper_text_at_the_far_end(hopper_kernel: Any, kind: str, cut: tuple[int, int]) -> None:
    case, t = far_end(kind, (1, 150, 0, 333))
    x = SimpleNamespace(q=t.q, kv_fp4=t.codes, kv_scale=t.scales, kv_indptr=t.indptr, sm_scale=case.sm_scale)
    assert complaints(hopper_kernel(x, *cut), None, case, t) == []


# Plans


@settings(examples(300))
@given(
    arch=st.sampled_from(("gfx950", "gfx942", "sm_80", "sm_90", "sm_100", "cpu")),
    batch=st.integers(1, 5000),
    q_len=st.integers(1, 4),
    heads=st.sampled_from(submission.HEAD_COUNTS),
    longest=st.integers(0, 1 << 21),
    row_bytes=st.sampled_from((0, 288, 304, 306)),
    strides=st.sampled_from(((18, 1), (24, 1), (1, 4096), (36, 2))),
)
def test_every_offered_plan_fits_its_problem(
    arch: str, batch: int, q_len: int, heads: int, longest: int, row_bytes: int, strides: tuple[int, int]
) -> None:
    problem = submission.Problem(
        batch, batch * q_len, heads, longest, longest, 0, arch, 132, torch.device("cuda"), row_bytes, strides
    )
    plans = submission.candidate_plans(problem)
    assert plans[0] == submission.choose_plan(problem) and len(set(plans)) == len(plans) <= 4
    for plan in plans:
        assert plan.body in problem.bodies() and (arch == "gfx950" or plan.body == "portable"), plan
        assert plan.body != "gfx950" or (q_len, heads, row_bytes, strides[1]) == (1, 16, 288, 1)
        # Splits come from the real lengths: none where there is nothing to share, enough where one sequence is long.
        assert plan.num_splits == 1 or plan.num_splits * plan.block_n <= max(longest, plan.block_n)
    if batch * q_len * heads <= 16 and longest >= 1 << 20:
        assert plans[0].num_splits == submission.MAX_SPLITS
