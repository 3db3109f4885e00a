"""Lengths, head counts, memory layouts: right on every engine, or refused by the name of the field."""

from __future__ import annotations

import itertools
import math
import types
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import Case, Guarded, Layout, Tensors, build, complaints, dequantise, guarded_allocations
from test_properties import contest_call, emulated, one_thread, portable

import submission
from mla_backends import backends

__all__ = ["emulated", "one_thread"]  # fixtures

CASE = Case((33, 0, 70), lead=5)
LAYOUTS = [
    Layout(),
    Layout("trimmed"),
    Layout("columns"),
    Layout("spread"),
    Layout(row_bytes=304),
    Layout(row_bytes=306),  # codes and scales of a token side by side
    Layout(row_bytes=321),
    Layout(q_pitch=640),
    Layout(native=True, singleton=True, long_indptr=True),
    Layout("columns", 306, 600, True, True, True),
]


@pytest.fixture(autouse=True)
def no_picks() -> Iterator[None]:
    submission._picks.clear()
    yield
    submission._picks.clear()


# Layouts


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layout_portable_body(interpreter: ProcessPoolExecutor, layout: Layout) -> None:
    assert interpreter.submit(portable, replace(CASE, heads=8), layout, {"num_splits": 2}).result() == []


@pytest.mark.parametrize(
    "layout",
    [
        Layout(scales, row_bytes, q_pitch, native, singleton, long_indptr)
        for (scales, row_bytes), (q_pitch, native, singleton, long_indptr) in zip(
            itertools.product(("padded", "trimmed", "columns", "spread"), (288, 304, 306, 321)),
            itertools.product((576, 600), (False, True), (False, True), (False, True)),
            strict=True,
        )
    ],
    ids=str,
)
def test_layout_torch_backend(layout: Layout) -> None:
    assert contest_call(replace(CASE, q_len=2), layout) == ([], "torch", [])


@pytest.mark.parametrize(
    ("layout", "kernel"),
    [
        (Layout(), "_attend_gfx950_kernel"),
        (Layout("trimmed", q_pitch=640, native=True, singleton=True, long_indptr=True), "_attend_gfx950_kernel"),
        (Layout("columns"), "_attend_kernel"),
        (Layout("spread", 304, native=True), "_attend_kernel"),
        (Layout(row_bytes=306, singleton=True), "_attend_kernel"),
    ],
    ids=str,
)
def test_layout_machine_code(emulated: Any, layout: Layout, kernel: str) -> None:
    """The gfx950 plan that is chosen for a layout reads it; Triton itself specialises and launches here."""
    t = build(CASE)
    g = Guarded(t, layout)
    launched = len(emulated.launches)
    with guarded_allocations() as made:
        out, lse = submission.mla_decode(g.q, g.codes, g.scales, g.indptr, CASE.sm_scale)
    assert emulated.launches[launched].name == kernel
    assert complaints(out, lse, CASE, t, lse_off=1e-2) == []
    assert (g.changed(), made.overrun(), emulated.findings()) == ([], False, [])


def shifted(codes: torch.Tensor, by: int) -> torch.Tensor:
    room = torch.zeros(codes.numel() + by, dtype=torch.uint8)
    room[by:] = codes.flatten()
    return room[by:].view(codes.shape)


@pytest.mark.parametrize("by", [1, 4])
def test_cache_off_16_bytes_machine_code(emulated: Any, by: int) -> None:
    """The gfx950 body copies 16 bytes at a time: such a cache is for the other one."""
    case = Case((33, 20))
    t = build(case)
    launched = len(emulated.launches)
    out, lse = submission.mla_decode(t.q, shifted(t.codes, by), t.scales, t.indptr, case.sm_scale)
    assert emulated.launches[launched].name == "_attend_kernel"
    assert complaints(out, lse, case, t) == []


def test_cache_off_16_bytes_has_a_pick_of_its_own() -> None:
    t = build(CASE)
    qo = torch.arange(4, dtype=torch.int32)
    datas = [(t.q, {"mxfp4": (shifted(t.codes, by), t.scales)}, qo, t.indptr, {}) for by in (0, 16, 4)]
    aligned, also, off = (submission._shape_key(data) for data in datas)  # type: ignore[arg-type]
    assert aligned == also != off
    rows = [submission._unpack(data).describe({}).kv_row_bytes for data in datas]  # type: ignore[arg-type]
    assert rows == [288, 288, 0]
    (hopper,) = (b for b in backends() if b.name == "hopper")
    problem = types.SimpleNamespace(arch="sm_90", heads=16, total_q=3, batch=3, kv_row_bytes=0)
    assert "aligned" in str(hopper.supports(problem))


@pytest.mark.parametrize(
    "problem",
    [{"heads": 32}, {"total_q": 8}, {"kv_row_bytes": 304}, {"scale_strides": (1, 4096)}, {"arch": "gfx942"}],
    ids=str,
)
def test_plan_for_another_problem_is_refused(problem: dict[str, Any]) -> None:
    fitting = {"batch": 4, "total_q": 4, "heads": 16, "total_kv": 4096, "kv_len_max": 1024, "kv_len_min": 1024}
    fitting |= {"arch": "gfx950", "num_cus": 256, "device": torch.device("cuda")}
    assert "gfx950" in submission.Problem(**fitting).bodies() or not submission.GLUON
    assert "gfx950" not in submission.Problem(**{**fitting, **problem}).bodies()


def test_mla_decode_names_a_plan_that_does_not_fit(emulated: Any) -> None:
    t = build(Case((5, 9), heads=32))
    with pytest.raises(ValueError, match="plan: expected one for Problem"):
        submission.mla_decode(t.q, t.codes, t.scales, t.indptr, 1 / 24, submission.Plan("gfx950"))


@pytest.mark.parametrize("kind", ["codes", "scales"])
def test_two_byte_cache_is_refused(kind: str) -> None:
    """Viewed as bytes it would have rows enough, and every second one would be read as a scale."""
    t = build(CASE)
    codes = t.codes.to(torch.int16) if kind == "codes" else t.codes
    scales = t.scales.to(torch.bfloat16) if kind == "scales" else t.scales
    with pytest.raises(ValueError, match="mxfp4 cache and scale: expected one-byte dtypes, got torch"):
        submission.mla_decode(t.q, codes, scales, t.indptr, 1 / 24)


# Heads, query tokens


@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
def test_heads_in_groups(interpreter: ProcessPoolExecutor, heads: int) -> None:
    case = Case((20, 41), heads=heads)
    assert interpreter.submit(portable, case, Layout(), {}).result() == []
    assert contest_call(case, Layout()) == ([], "torch", [])


@pytest.mark.parametrize("heads", [8, 128])
def test_heads_in_groups_machine_code(emulated: Any, heads: int) -> None:
    case = Case((20, 3), heads=heads)
    t = build(case)
    with guarded_allocations() as made:
        out, lse = submission.mla_decode(t.q, t.codes, t.scales, t.indptr, case.sm_scale)
    assert complaints(out, lse, case, t) == [] and not made.overrun() and emulated.findings() == []


@pytest.mark.parametrize("heads", [0, 1, 4, 12, 24, 48, 256])
def test_other_heads_are_refused(heads: int) -> None:
    t = build(CASE)
    q = torch.zeros(3, heads, 576, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"q: expected .*heads among \(8, 16, 32, 64, 128\), got"):
        submission.custom_kernel((q, {"mxfp4": (t.codes, t.scales)}, torch.arange(4), t.indptr, {}))


@pytest.mark.parametrize("q_len", [1, 2, 3, 4])
def test_query_tokens_are_causal_among_themselves(interpreter: ProcessPoolExecutor, q_len: int) -> None:
    """Down to sequences shorter than the query: their first tokens see nothing and answer 0."""
    case = Case((0, 1, 2, 3, 4, 40), heads=8, q_len=q_len, lead=2)
    assert contest_call(case, Layout()) == ([], "torch", [])
    small = replace(case, lengths=(1, 3, 40))
    assert interpreter.submit(portable, small, Layout(), {"num_splits": 2}).result() == []


@pytest.mark.parametrize("qo", [[0, 1, 4], [1, 3, 5], [0, 4, 2]])
def test_uneven_queries_are_refused(qo: list[int]) -> None:
    t = build(Case((5, 9), q_len=2))
    with pytest.raises(ValueError, match="qo_indptr: expected steps of 2"):
        submission.custom_kernel((t.q, {"mxfp4": (t.codes, t.scales)}, torch.tensor(qo), t.indptr, {}))


@pytest.mark.parametrize("sm_scale", [1e-3, 0.1, 1.7])
def test_sm_scale_of_the_config_is_obeyed(interpreter: ProcessPoolExecutor, sm_scale: float) -> None:
    case = Case((40, 17), sm_scale=sm_scale, scale_bytes=(125,))
    for submit in (contest_call, lambda *x: interpreter.submit(contest_call, *x).result()):
        assert submit(case, Layout())[0] == []


# Lengths


def test_one_sequence_of_a_million_tokens() -> None:
    """1,000 tokens over and over, so that float64 needs them once; the last one alone is another, and matters."""
    total, kinds = 1 << 20, 1000
    few = build(Case((kinds,), scale_bytes=(124, 125), q_factor=0.7, scale_pad=0))
    codes, scales = (x[:kinds].repeat(-(-total // kinds), 1)[:total] for x in (few.codes, few.scales))
    # Its keys lie along the first head's query: for that head it outweighs all the others.
    codes[-1] = torch.where(few.q[0, 0].view(-1, 2) < 0, 0xC, 4).to(torch.uint8) @ torch.tensor(
        [1, 16], dtype=torch.uint8
    )
    scales[-1, :18] = 127
    indptr = torch.tensor([0, total], dtype=torch.int32)
    out, lse = submission.mla_decode(few.q, codes, scales, indptr, 1 / 24)
    keys = dequantise(torch.cat((few.codes[:kinds], codes[-1:])), torch.cat((few.scales[:kinds], scales[-1:])))
    count = torch.bincount(torch.arange(total - 1) % kinds, minlength=kinds + 1).double()
    count[-1] = 1
    scores = few.q[0].double() @ keys.T / 24 + count.log()
    want = torch.softmax(scores, -1) @ keys[:, :512]
    weight = torch.softmax(scores, -1)[:, -1]
    assert weight[0] > 0.5, "the last token must matter"
    assert bool(((out[0].double() - want).norm(dim=-1) <= 5e-3 * want.norm(dim=-1)).all())
    assert torch.allclose(lse[0].double(), scores.logsumexp(-1), atol=1e-3)


def test_batch_of_4096() -> None:
    case = Case(tuple((0, 3, 1, 2, 5)[i % 5] for i in range(4096)), heads=8)
    t = build(case)
    out, lse = submission.mla_decode(t.q, t.codes, t.scales, t.indptr, case.sm_scale)
    assert complaints(out, lse, case, t) == []


@pytest.mark.parametrize("lengths", [(1,), (0,), (0, 0, 0), (200, 1, 1, 1, 1, 1), (1, 1, 1, 200)], ids=str)
@pytest.mark.parametrize("num_splits", [1, 5])
def test_lengths_portable_body(interpreter: ProcessPoolExecutor, lengths: tuple[int, ...], num_splits: int) -> None:
    """Empty sequences answer 0 and -inf, also where nothing else is in the batch."""
    case = Case(lengths[:4], lead=9)
    plan = {"num_splits": num_splits, "block_n": 32}
    assert interpreter.submit(portable, case, Layout(long_indptr=True), plan).result() == []


def test_empty_cache() -> None:
    q = torch.randn(2, 16, 576).bfloat16()
    cache = torch.zeros(0, 288, dtype=torch.uint8), torch.zeros(0, 18, dtype=torch.uint8)
    zeros = torch.zeros(3, dtype=torch.int32)
    out = submission.custom_kernel((q, {"mxfp4": cache}, torch.arange(3), zeros, {"kv_seq_len": 1024}))
    assert not out.any()
    assert bool((submission.mla_decode(q, *cache, zeros, 1 / 24)[1] == -math.inf).all())


def test_every_token_before_and_behind_the_sequences_is_left_out() -> None:
    """Their scales are NaN in every case here: this one shows that they are, and that a bound off by one would tell."""
    case = Case((6, 7), lead=4)
    t = build(case)
    assert bool((t.scales[:4] == 255).all() and (t.scales[17:20, :18] == 255).all())
    for change in ((-1, 0, 0), (0, 0, 1)):
        bounds = t.indptr + torch.tensor(change, dtype=torch.int32)
        out, _ = submission.mla_decode(t.q, t.codes, t.scales, bounds, 1 / 24)
        assert complaints(out, None, case, Tensors(t.q, t.codes, t.scales, t.indptr)) != []
