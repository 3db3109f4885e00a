"""The host side of the submission: plans, input checks, overrides, backends and the pick, without a GPU."""

from __future__ import annotations

import gc
import math
import multiprocessing
import types
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import Case, build
from stand_ins import least_growth

import reference
import submission

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def forget_picks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(submission, "_extra_backends", tuple)
    submission._picks.clear()
    yield
    submission._picks.clear()


def problem(arch: str = "gfx950", batch: int = 4, kv: int = 1024, **fields: Any) -> submission.Problem:
    num_cus = {"gfx950": 256, "gfx942": 304, "sm_90": 132, "cpu": 8}[arch]
    values = {"total_q": batch, "heads": 16, "total_kv": batch * kv, "kv_len_min": kv, "device": CPU, **fields}
    return submission.Problem(batch=batch, kv_len_max=kv, arch=arch, num_cus=num_cus, **values)


def contest_data(batch: int = 2, kv: int = 40, seed: int = 3) -> Any:
    return reference.generate_input(batch, 1, kv, seed)


# Plans


@pytest.mark.parametrize("arch", ["gfx950", "gfx942", "sm_90", "cpu"])
@pytest.mark.parametrize("batch", [1, 4, 32, 64, 256, 4096])
@pytest.mark.parametrize("kv", [0, 1, 64, 1024, 8192, 1 << 20])
def test_choose_plan_fills_the_card_without_tiny_splits(arch: str, batch: int, kv: int) -> None:
    p = problem(arch, batch, kv)
    plan = submission.choose_plan(p)
    assert plan == submission.choose_plan(p), "pure"
    if arch == "gfx950" and (batch, kv) in submission.RANKED_GFX950:
        return  # by the predictor's choice, docs/gfx950.md
    programs = batch * plan.num_splits
    tiles = math.ceil(kv / plan.block_n)
    assert plan.num_splits == 1 or tiles // plan.num_splits >= 2, "splits under two tiles"
    assert programs <= max(2 * p.num_cus, batch), "more programs than fit twice"
    could_split = plan.num_splits < min(tiles // 2, submission.MAX_SPLITS)
    assert not could_split or 2 * programs > p.num_cus, "idle compute units"


@pytest.mark.parametrize("arch", ["gfx950", "sm_90"])
def test_candidate_plans_start_with_the_chosen_one_and_do_not_repeat(arch: str) -> None:
    plans = submission.candidate_plans(problem(arch))
    assert plans[0] == submission.choose_plan(problem(arch))
    assert len(plans) == len(set(plans)) <= 6


def test_gfx950_offers_gluon_then_scaled_then_portable(monkeypatch: pytest.MonkeyPatch) -> None:
    def offered(**fields: Any) -> list[str]:
        plans = submission.candidate_plans(problem(device=torch.device("cuda"), **fields))
        return list(dict.fromkeys(plan.body for plan in plans))

    assert offered() == ["gfx950", "scaled", "portable"]
    for unfit in ({"heads": 32}, {"total_q": 8}, {"kv_row_bytes": 304}, {"scale_strides": (24, 2)}):
        assert offered(**unfit) == ["scaled", "portable"]
    assert offered(arch="gfx942") == offered(arch="sm_90") == ["portable"]
    monkeypatch.setattr(submission, "GLUON", False)
    assert offered() == ["scaled", "portable"]


@pytest.mark.parametrize(
    "field", [{"block_n": 48}, {"num_splits": 0}, {"num_splits": 65}, {"body": "other"}, {"num_warps": 3}]
)
def test_plan_refuses_bad_field(field: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"Plan.{next(iter(field))}: expected"):
        submission.Plan(**field)


# Input checks


def _inputs(**change: Any) -> submission.Inputs:
    t = build(Case((5, 9)))
    values = {"q": t.q, "kv_fp4": t.codes, "kv_scale": t.scales, "kv_indptr": t.indptr, "sm_scale": 1 / 24, **change}
    return submission.Inputs(**values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 16, 576)}, "q: expected bf16"),
        ({"q": torch.zeros(2, 16, 512, dtype=torch.bfloat16)}, "q: expected bf16"),
        ({"q": torch.zeros(2, dtype=torch.bfloat16)}, "q: expected bf16"),
        ({"q": torch.zeros(2, 12, 576, dtype=torch.bfloat16)}, "q: expected .*heads among"),
        ({"q": torch.zeros(3, 16, 576, dtype=torch.bfloat16)}, "q: expected total_q a multiple of batch 2"),
        ({"kv_fp4": torch.zeros(17, 287, dtype=torch.uint8)}, "mxfp4 cache: expected"),
        ({"kv_fp4": torch.zeros(288, 17, dtype=torch.uint8).T}, "mxfp4 cache: expected"),
        ({"kv_scale": torch.zeros(16, 18, dtype=torch.uint8)}, "mxfp4 scale: expected"),
        ({"kv_scale": torch.zeros(17, 17, dtype=torch.uint8)}, "mxfp4 scale: expected"),
        ({"kv_indptr": torch.tensor([0.0, 5, 14])}, "kv_indptr: expected"),
        ({"kv_indptr": torch.tensor([0])}, "kv_indptr: expected"),
        ({"sm_scale": math.nan}, "sm_scale: expected"),
        ({"kv_indptr": torch.zeros(3, dtype=torch.int32, device="meta")}, "kv_indptr: expected a tensor on q's device"),
    ],
)
def test_inputs_name_what_is_wrong(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _inputs(**change).describe({})


def test_custom_kernel_refuses_config_that_contradicts_the_tensors() -> None:
    q, kv, qo, ki, config = contest_data()
    for field in ("batch_size", "num_heads", "q_seq_len"):
        with pytest.raises(ValueError, match=field):
            submission.custom_kernel((q, kv, qo, ki, {**config, field: 3}))


@pytest.mark.parametrize("indptr", [[0, 9, 5], [0, 5, 90], [-1, 5, 14]])
def test_pick_refuses_kv_indptr_outside_the_cache(indptr: list[int]) -> None:
    q, kv, qo, _, config = contest_data()
    with pytest.raises(ValueError, match="kv_indptr"):
        submission.custom_kernel((q, kv, qo, torch.tensor(indptr, dtype=torch.int32), config))


def test_custom_kernel_takes_native_dtypes_int64_indptr_strided_q_and_ignores_kv_seq_len() -> None:
    q, kv, qo, ki, config = contest_data(3, 70)
    want, _ = reference.attention_truth((q, kv, qo, ki, config), cache="mxfp4")
    codes, scales = kv["mxfp4"]
    native = (codes.view(torch.uint8).view(torch.float4_e2m1fn_x2), scales.view(torch.uint8).view(torch.float8_e8m0fnu))
    wide = torch.zeros(3, 16, 600, dtype=torch.bfloat16)
    wide[:, :, :576] = q
    out = submission.custom_kernel(
        (wide[:, :, :576], {**kv, "mxfp4": native}, qo, ki.long(), {**config, "kv_seq_len": 8})
    )
    assert out.dtype == torch.bfloat16 and out.shape == (3, 16, 512)
    assert float(reference.relative_l2(out, want).max()) < 5e-3


# Overrides


@pytest.mark.parametrize(
    ("name", "value", "valid"),
    [
        ("MLA_BACKEND", "cuda", "auto, triton, aiter, torch"),
        ("MLA_FALLBACK_Q", "int8", "auto, fp8, bf16"),
        ("MLA_LOG", "loud", "WARNING, DEBUG, INFO, ERROR"),
        ("MLA_PLAN", "blockn=64", "body, num_splits, num_warps, block_n"),
        ("MLA_PLAN", "block_n=many", "Plan.block_n: expected one of .*, got 'many'"),
        ("MLA_PLAN", "num_splits=65", "num_splits"),
    ],
)
def test_override_refuses_bad_value(monkeypatch: pytest.MonkeyPatch, name: str, value: str, valid: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=valid):
        submission.custom_kernel(contest_data())


def test_override_of_the_body_brings_that_bodys_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_PLAN", "body=scaled,num_splits=3")
    (plan,) = submission.TritonBackend().plans(problem())
    assert (plan.body, plan.num_splits, plan.block_n) == ("scaled", 3, 128)


@pytest.mark.parametrize(
    ("forced", "facts"),
    [
        ("num_warps=1,block_n=32", {}),  # its waves work in pairs; the compiler would end the process
        ("num_warps=4", {}),
        ("block_n=64", {}),
        ("body=gfx950", {"arch": "gfx942"}),
        ("body=scaled", {"arch": "sm_90"}),
        ("body=gfx950", {"heads": 32}),
    ],
)
def test_override_that_cannot_run_here_is_refused(
    monkeypatch: pytest.MonkeyPatch, forced: str, facts: dict[str, Any]
) -> None:
    monkeypatch.setenv("MLA_PLAN", forced)
    with pytest.raises(
        ValueError, match=r"plan: expected one for Problem.* 2, 4 or 8 warps of 32 tokens each, got Plan"
    ):
        submission.TritonBackend().plans(problem(batch=256, **facts))


def test_override_of_the_waves_brings_their_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_PLAN", "body=gfx950,num_warps=4,block_n=128")
    (plan,) = submission.TritonBackend().plans(problem(batch=256))
    assert (plan.body, plan.num_warps, plan.block_n) == ("gfx950", 4, 128)


def test_override_that_leaves_no_backend_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_BACKEND", "aiter")
    with pytest.raises(RuntimeError, match="for gfx942 and gfx950"):
        submission.custom_kernel(contest_data())


# Pick, with backends made up


class Fake:
    """A backend that answers rightly, or as `act` says."""

    name = "fake"

    def __init__(self, name: str = "fake", act: Callable[[torch.Tensor, int], torch.Tensor] | None = None) -> None:
        self.name, self.act, self.calls = name, act, 0

    def supports(self, problem: submission.Problem) -> str | None:
        return None

    def plans(self, problem: submission.Problem) -> list[str]:
        return ["only"]

    def run(self, plan: str, inputs: submission.Inputs) -> torch.Tensor:
        self.calls += 1
        out = submission.torch_attention(inputs)[0].to(torch.bfloat16)
        return out if self.act is None else self.act(out, self.calls)


def _raise(error: Exception) -> torch.Tensor:
    raise error


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (lambda out, call: out * 1.05, "relative L2"),
        (lambda out, call: torch.zeros_like(out), "relative L2"),
        (lambda out, call: out.float(), "float32"),
        (lambda out, call: out[:, :8], "expected bfloat16"),
        (lambda out, call: torch.full_like(out, math.nan), "relative L2 inf"),
        (lambda out, call: out if call == 1 else out * 2, "relative L2"),
        (lambda out, call: torch.cat([out[:1], out[1:2] * 3, out[2:]]), "row 1: relative L2"),
        (lambda out, call: _raise(RuntimeError("PassManager::run failed")), "PassManager::run failed"),
        (lambda out, call: _raise(torch.OutOfMemoryError("no room")), "no room"),
        (lambda out, call: _raise(TypeError("unexpected keyword")), "unexpected keyword"),
    ],
    ids=[
        "5 % off",
        "zeros",
        "dtype",
        "shape",
        "NaN",
        "second call wrong",
        "unsampled row",
        "compile",
        "memory",
        "drift",
    ],
)
def test_pick_drops_wrong_candidate_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, act: Callable[[torch.Tensor, int], torch.Tensor], reason: str
) -> None:
    bad, good = Fake("bad", act), Fake("good")
    monkeypatch.setattr(submission, "_extra_backends", lambda: (bad, good))
    data = contest_data(5, 40)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = submission.custom_kernel(data)
        calls = bad.calls
        submission.custom_kernel(data)
    assert bad.calls == calls, "a dropped candidate was tried again"
    messages = [str(w.message) for w in caught]
    assert len(messages) == 1 and messages[0].startswith("dropped bad only: ") and reason in messages[0]
    pick = submission.last_pick()
    assert pick is not None and pick["backend"] == "good"
    assert reason in next(c["dropped"] for c in pick["candidates"] if c["backend"] == "bad")
    want, _ = reference.attention_truth(data, cache="mxfp4")
    assert float(reference.relative_l2(out, want).max()) < 5e-3


def test_pick_ranks_by_time_and_keeps_the_fallback_on_a_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"slow": 50.0, "torch": 40.0, "tied": 39.5, "fast": 30.0}
    monkeypatch.setattr(submission, "_time_cold_us", lambda c, inputs, deadline: times[c.backend.name])
    described = submission.Inputs.describe

    def on_a_gpu(inputs: submission.Inputs, config: dict[str, Any]) -> submission.Problem:
        return replace(described(inputs, config), device=torch.device("cuda"))

    monkeypatch.setattr(submission.Inputs, "describe", on_a_gpu)
    monkeypatch.setattr(submission.TritonBackend, "supports", lambda self, problem: "left out")
    for names, winner in ((("slow", "tied"), "torch"), (("slow", "tied", "fast"), "fast")):
        submission._picks.clear()
        monkeypatch.setattr(submission, "_extra_backends", lambda names=names: tuple(Fake(n) for n in names))
        submission.custom_kernel(contest_data())
        assert submission.last_pick()["backend"] == winner


def test_backend_that_fails_later_is_replaced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    flaky = Fake("flaky", lambda out, call: out if call < 4 else _raise(RuntimeError("launch failed")))
    monkeypatch.setattr(submission, "_extra_backends", lambda: (flaky,))
    data = contest_data()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outs = [submission.custom_kernel(data) for _ in range(5)]
    assert flaky.calls == 4, "2 checks, 1 answer, 1 failure, then never again"
    assert len(caught) == 1 and "launch failed" in str(caught[0].message)
    assert all(torch.equal(outs[0], out) for out in outs[1:])


def test_pick_is_right_for_other_lengths_and_values_of_the_same_shape() -> None:
    q, kv, qo, ki, config = contest_data(3, 50)
    submission.custom_kernel((q, kv, qo, ki, config))
    other = (q.flip(0), kv, qo, torch.tensor([10, 10, 141, 150], dtype=torch.int32), config)
    picks = len(submission._picks)
    want, _ = reference.attention_truth(other, cache="mxfp4")
    out = submission.custom_kernel(other)
    assert len(submission._picks) == picks, "no new pick"
    assert float(reference.relative_l2(out, want).nan_to_num(0).max()) < 5e-3 and not out[0].any()


def test_status_lists_every_shape_and_forgets_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "MAX_PICKS", 2)
    for kv in (3, 4, 5):
        submission.custom_kernel(contest_data(1, kv))
    assert [report["kv_len_max"] for report in submission.status()] == [4, 5]


def test_threads_share_one_pick_and_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Fake("counted")
    monkeypatch.setattr(submission, "_extra_backends", lambda: (counted,))
    data = contest_data(3, 60)
    with ThreadPoolExecutor(8) as pool:
        outs = list(pool.map(lambda _: submission.custom_kernel(data), range(24)))
    assert all(torch.equal(outs[0], out) for out in outs[1:])
    assert counted.calls == 2 + 24, "two checks in one pick, then one run a call"


def test_many_shapes_do_not_grow_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "MAX_PICKS", 10)

    def calls() -> None:
        for kv in range(1, 40):
            submission.custom_kernel(contest_data(1, kv))

    calls()
    assert len(submission._picks) == 10
    (grown,) = least_growth(lambda: (sum(isinstance(o, torch.Tensor) for o in gc.get_objects()),), calls, batches=3)
    assert grown <= 5, f"39 calls left {grown} tensors behind"


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_child_process_works_after_first_use(method: str) -> None:
    data = contest_data(2, 33)
    want = submission.custom_kernel(data)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(method)) as pool:
        got = pool.submit(_call_on_fresh_input, 2, 33).result(timeout=120)
    assert torch.equal(torch.from_numpy(got), want.float())


def _call_on_fresh_input(batch: int, kv: int) -> Any:
    torch.set_num_threads(1)
    return submission.custom_kernel(contest_data(batch, kv)).float().numpy()


# aiter, with a stand-in


def _aiter(**change: Any) -> Any:
    """A module with the pin's signatures that records calls."""
    calls: list[tuple[str, dict[str, Any]]] = []

    def get_mla_metadata_info_v1(
        batch_size, max_seqlen_qo, num_head_qo, q_dtype, kv_dtype, is_sparse, fast_mode, num_kv_splits=32,
        intra_batch_mode=False,
    ):  # fmt: skip
        return [((1,), torch.int64)] + [((4,), torch.int32)] * 5

    def get_mla_metadata_v1(
        seqlens_qo_indptr, seqlens_kv_indptr, kv_last_page_lens, num_heads_per_head_k, num_heads_k, is_causal,
        work_metadata_ptrs, work_info_set, work_indptr, reduce_indptr, reduce_final_map, reduce_partial_map,
        page_size=1, kv_granularity=16, max_seqlen_qo=-1, uni_seqlen_qo=-1, fast_mode=True, topk=-1,
        max_split_per_batch=-1, intra_batch_mode=False, dtype_q=None, dtype_kv=None,
    ):  # fmt: skip
        calls.append(("metadata", dict(locals())))

    def mla_decode_fwd(
        q, kv_buffer, o, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, max_seqlen_q, page_size=1, nhead_kv=1,
        sm_scale=None, logit_cap=0.0, num_kv_splits=None, num_kv_splits_indptr=None, work_meta_data=None,
        work_indptr=None, work_info_set=None, reduce_indptr=None, reduce_final_map=None, reduce_partial_map=None,
        q_scale=None, kv_scale=None, intra_batch_mode=False,
    ):  # fmt: skip
        calls.append(("decode", dict(locals())))
        assert page_size == 1 and nhead_kv == 1 and max_seqlen_q == 1 and logit_cap == 0.0
        assert q.is_contiguous() and o.is_contiguous() and o.dtype == torch.bfloat16
        assert kv_indptr.dtype == qo_indptr.dtype == kv_indices.dtype == torch.int32
        assert kv_scale.dtype == torch.float32 and kv_scale.numel() == 1
        assert (q_scale is None) == (q.dtype == torch.bfloat16)

    module = types.SimpleNamespace(
        __version__="0.1.11", get_mla_metadata_info_v1=get_mla_metadata_info_v1,
        get_mla_metadata_v1=get_mla_metadata_v1, mla=types.SimpleNamespace(mla_decode_fwd=mla_decode_fwd), calls=calls,
    )  # fmt: skip
    module.__dict__.update(change)
    return module


def _aiter_backend(module: Any) -> submission.AiterBackend:
    backend = submission.AiterBackend()
    backend.__dict__["api"] = module
    return backend


@pytest.mark.parametrize("q_dtype", ["fp8", "bf16"])
def test_aiter_call_keeps_the_contract(q_dtype: str) -> None:
    module = _aiter()
    inputs = submission._unpack(contest_data(2, 200))
    out = _aiter_backend(module).run((q_dtype, 32), inputs)
    assert out.shape == (2, 16, 512) and [name for name, _ in module.calls] == ["metadata", "decode"]
    metadata, decode = (arguments for _, arguments in module.calls)
    assert metadata["max_split_per_batch"] == decode["num_kv_splits"] == 32
    assert metadata["page_size"] == 1 and metadata["kv_granularity"] == 16 and metadata["fast_mode"] is False
    assert metadata["dtype_q"] == decode["q"].dtype and metadata["dtype_kv"] == decode["kv_buffer"].dtype
    assert decode["work_meta_data"] is metadata["work_metadata_ptrs"]
    assert decode["kv_indices"].tolist() == list(range(400))


def test_aiter_never_sees_a_short_sequence_even_after_the_pick() -> None:
    module = _aiter()
    q, kv, qo, _, config = contest_data(2, 200)
    short = submission._unpack((q, kv, qo, torch.tensor([0, 395, 400], dtype=torch.int32), config))
    out = _aiter_backend(module).run(("bf16", 32), short)
    assert module.calls == [] and torch.equal(out, submission.TORCH.run("float32", short))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"kv_len_min": 195}, "kv_len_min=195"),
        ({"heads": 32}, "heads=32"),
        ({"total_q": 8}, "total_q=8"),
        ({"total_kv": 7_456_542}, "total_kv=7456542"),
        ({"has_fp8": False}, "has_fp8=False"),
        ({"kv_first": 2}, "kv_first=2"),
        ({}, None),
    ],
)
def test_aiter_supports(change: dict[str, Any], reason: str | None) -> None:
    got = _aiter_backend(_aiter()).supports(problem(**change))
    assert got is None if reason is None else got is not None and reason in got


# The plain function


def test_mla_decode_without_triton_answers_in_float32() -> None:
    case = Case((0, 1, 90), q_len=2)
    t = build(case)
    out, lse = submission.mla_decode(t.q, t.codes, t.scales, t.indptr, case.sm_scale)
    from cases import errors

    rel, off = errors(out, lse, case, t)
    assert rel < 5e-3 and off < 1e-5
