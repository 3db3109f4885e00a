"""aiter by contract: stand-ins with the signatures of its releases record what they are called with.

v0.1.7, v0.1.10.post2, the contest's pin (f3be04a12), v0.1.17 and v0.1.20. A stand-in computes attention from its
arguments as aiter does, so that a wrong argument shows in the answer; the strict one ends its process, as aiter does
from v0.1.12, when a check in its stage 1 fails.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from stand_ins import all_warnings, contest_data, on_device, worst

import submission

ROOT = Path(__file__).resolve().parent.parent

# Parameters in their order; one with "=" has a default.
INFO = "batch_size max_seqlen_qo num_head_qo q_dtype kv_dtype is_sparse fast_mode= num_kv_splits= intra_batch_mode="
METADATA = (
    "seqlens_qo_indptr seqlens_kv_indptr kv_last_page_lens num_heads_per_head_k num_heads_k is_causal"
    " work_metadata_ptrs work_info_set work_indptr reduce_indptr reduce_final_map reduce_partial_map page_size="
    " kv_granularity= max_seqlen_qo= uni_seqlen_qo= fast_mode= topk= max_split_per_batch= intra_batch_mode="
)
DECODE = (
    "q kv_buffer o qo_indptr kv_indptr kv_indices kv_last_page_lens max_seqlen_q page_size= nhead_kv= sm_scale="
    " logit_cap= num_kv_splits= num_kv_splits_indptr= work_meta_data= work_indptr= work_info_set= reduce_indptr="
    " reduce_final_map= reduce_partial_map= q_scale= kv_scale= intra_batch_mode="
)
LATE = " is_cp_round_robin= mla_version= dtype_q_nope= dtype_q_rope= dtype_kv_nope= dtype_kv_rope= dtype_q= dtype_kv="
RELEASES = {
    "0.1.10.post2": (INFO, METADATA + " dtype_q= dtype_kv=", DECODE),
    "pin": (INFO, METADATA + " dtype_q= dtype_kv=", DECODE + " return_logits= return_lse="),
    "0.1.17": (
        INFO + " max_split_per_batch=",
        METADATA + " dtype_q= dtype_kv= is_cp_round_robin=",
        DECODE + " return_logits= return_lse= g_kv_indptr= cp_world_size= cp_rank=",
    ),
    "0.1.20": (
        INFO + " max_split_per_batch=",
        METADATA + LATE,
        DECODE + " return_logits= return_lse= g_kv_indptr= cp_world_size= cp_rank= causal=",
    ),
}
OLD_METADATA = (
    "seqlens_qo_indptr seqlens_kv_indptr num_heads_per_head_k num_heads_k is_causal work_metadata_ptrs work_indptr"
    " work_info reduce_indptr reduce_final_map reduce_partial_map kv_granularity= max_seqlen_qo= uni_seqlen_qo="
    " fast_mode= topk= max_split_per_batch= intra_batch_mode= dtype_q= dtype_kv="
)
SWAPPED = METADATA.replace("work_info_set work_indptr", "work_indptr work_info_set") + " dtype_q= dtype_kv="
REFUSED = {
    "0.1.7": (INFO, OLD_METADATA, DECODE.replace(" page_size= nhead_kv=", "")),
    "no metadata": (INFO, None, DECODE),
    "swapped": (INFO, SWAPPED, DECODE),
    "renamed": (INFO, METADATA + LATE.replace(" dtype_q= dtype_kv=", ""), DECODE),
    "no splits": (INFO.replace(" num_kv_splits=", ""), METADATA + " dtype_q= dtype_kv=", DECODE),
    "no scale": (INFO, METADATA + " dtype_q= dtype_kv=", DECODE.replace(" kv_scale=", "")),
    "hidden": (INFO, "*args **kwargs", DECODE),
}


def attend(q: Any, kv_buffer: Any, o: Any, kv_indptr: Any, kv_indices: Any, sm_scale: Any, **rest: Any) -> None:
    """What mla_decode_fwd computes, into o."""
    keys = kv_buffer.float().reshape(-1, 576)[kv_indices.long()] * rest["kv_scale"]
    queries = q.float() * (1.0 if rest["q_scale"] is None else rest["q_scale"])
    for i in range(len(kv_indptr) - 1):
        k = keys[int(kv_indptr[i]) : int(kv_indptr[i + 1])]
        o[i] = (torch.softmax(queries[i] @ k.T * sm_scale, -1) @ k[:, :512]).to(o.dtype)


def function(name: str, parameters: str, body: Any) -> Any:
    """A function with these parameters that hands its bound arguments to `body`, as aiter's wrapped ones do."""

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return body(bound.arguments)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    stars = {"*args": inspect.Parameter.VAR_POSITIONAL, "**kwargs": inspect.Parameter.VAR_KEYWORD}
    signature = inspect.Signature(
        [
            inspect.Parameter(
                p.strip("*="), stars.get(p, kind), default=None if p.endswith("=") else inspect.Parameter.empty
            )
            for p in parameters.split()
        ]
    )
    call.__name__, call.__signature__ = name, signature  # type: ignore[attr-defined]
    return call


class StandIn:
    """The two modules of one release and what they were called with."""

    def __init__(self, parameters: tuple[str | None, ...]) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.aiter, self.mla = types.ModuleType("aiter"), types.ModuleType("aiter.mla")
        self.aiter.__path__ = []  # type: ignore[attr-defined]
        self.aiter.mla = self.mla  # type: ignore[attr-defined]
        info, metadata, decode = parameters
        self._add(self.aiter, "get_mla_metadata_info_v1", info, self._info)
        self._add(self.aiter, "get_mla_metadata_v1", metadata, lambda given: None)
        self._add(self.mla, "mla_decode_fwd", decode, lambda given: attend(**given))

    def _add(self, module: Any, name: str, parameters: str | None, body: Any) -> None:
        def record(given: dict[str, Any]) -> Any:
            self.calls.append((name, dict(given)))
            return body(given)

        if parameters is not None:
            setattr(module, name, function(name, parameters, record))

    def _info(self, given: dict[str, Any]) -> Any:
        # Sizes that tell the buffers apart.
        tiles = given["batch_size"] * (given["num_kv_splits"] or 1)
        kinds = ((2, torch.uint64), (257, torch.int32), ((tiles, 8), torch.int32))
        return (*kinds, (tiles + 1, torch.int32), ((tiles, 2), torch.int32), (tiles, torch.int32))


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An AMD machine that has met no aiter yet, and no Triton."""
    on_device(monkeypatch, arch="gfx950", num_cus=256)
    monkeypatch.setattr(submission, "_extra_backends", tuple)
    monkeypatch.setattr(submission.TritonBackend, "supports", lambda self, problem: "left out")
    backends = (submission.AiterBackend(), submission.TORCH, submission.TritonBackend())
    monkeypatch.setattr(submission, "OWN_BACKENDS", backends)
    submission._picks.clear()
    yield
    submission._picks.clear()


def install(monkeypatch: pytest.MonkeyPatch, parameters: tuple[str | None, ...]) -> StandIn:
    module = StandIn(parameters)
    monkeypatch.setitem(sys.modules, "aiter", module.aiter)
    monkeypatch.setitem(sys.modules, "aiter.mla", module.mla)
    return module


@pytest.mark.parametrize("release", RELEASES)
def test_release_is_called_as_it_wants(monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    module = install(monkeypatch, RELEASES[release])
    data = contest_data(2, 200)
    with all_warnings() as told:
        out = submission.custom_kernel(data)
    assert told == [] and submission.last_pick()["backend"] == "aiter"
    assert worst(data, out, cache="fp8") < 0.05
    _, kv, qo_indptr, kv_indptr, config = data
    fp8, fp8_scale = kv["fp8"]
    tried = set()
    assert [name for name, _ in module.calls] == [
        "get_mla_metadata_info_v1", "get_mla_metadata_v1", "mla_decode_fwd",
    ] * (len(module.calls) // 3)  # fmt: skip
    for at in range(0, len(module.calls), 3):
        info, metadata, decode = (given for _, given in module.calls[at : at + 3])
        splits = decode["num_kv_splits"]
        tried.add((decode["q"].dtype, splits))
        # Info
        assert (info["batch_size"], info["max_seqlen_qo"], info["num_head_qo"]) == (2, 1, 16)
        assert info["num_kv_splits"] == splits and not info["is_sparse"] and not info["fast_mode"]
        assert info["intra_batch_mode"] is True and info.get("max_split_per_batch") is None
        # Metadata: each of the six buffers in its place
        tiles = 2 * splits
        sizes = {
            "work_metadata_ptrs": (2,),
            "work_indptr": (257,),
            "work_info_set": (tiles, 8),
            "reduce_indptr": (tiles + 1,),
            "reduce_final_map": (tiles, 2),
            "reduce_partial_map": (tiles,),
        }
        assert {name: tuple(metadata[name].shape) for name in sizes} == sizes
        assert torch.equal(metadata["seqlens_qo_indptr"], qo_indptr)
        assert torch.equal(metadata["seqlens_kv_indptr"], kv_indptr)
        assert metadata["kv_last_page_lens"].tolist() == [200, 200]
        assert (metadata["num_heads_per_head_k"], metadata["num_heads_k"], metadata["is_causal"]) == (16, 1, True)
        assert (metadata["page_size"], metadata["kv_granularity"]) == (1, 16)
        assert (metadata["max_seqlen_qo"], metadata["uni_seqlen_qo"]) == (1, 1)
        assert metadata["max_split_per_batch"] == splits > 0 and metadata["intra_batch_mode"] is True
        assert metadata["fast_mode"] is False and metadata["topk"] is None
        assert metadata["dtype_q"] == info["q_dtype"] == decode["q"].dtype
        assert metadata["dtype_kv"] == info["kv_dtype"] == fp8.dtype
        # Decode
        for ours, theirs in (("work_meta_data", "work_metadata_ptrs"), *((name, name) for name in [*sizes][1:])):
            assert decode[ours] is metadata[theirs], ours
        assert decode["q"].shape == (2, 16, 576) and decode["o"].shape == (2, 16, 512)
        assert decode["kv_buffer"].shape == (400, 1, 1, 576) and decode["kv_indices"].tolist() == list(range(400))
        assert (decode["max_seqlen_q"], decode["page_size"], decode["nhead_kv"], decode["logit_cap"]) == (1, 1, 1, 0.0)
        assert decode["sm_scale"] == config["sm_scale"] and decode["intra_batch_mode"] is True
        assert torch.equal(decode["kv_scale"], fp8_scale.reshape(1))
        assert (decode["q_scale"] is None) == (decode["q"].dtype == torch.bfloat16)
        later = ("return_logits", "return_lse", "g_kv_indptr", "cp_world_size", "cp_rank", "causal")
        assert all(decode.get(name) is None for name in later), "what older releases lack is left at its default"
    assert tried == {(dtype, 32) for dtype in (torch.bfloat16, fp8.dtype)}


@pytest.mark.parametrize("release", REFUSED)
@pytest.mark.parametrize("said_by", ["metadata", "module"])
def test_other_signature_is_refused_with_its_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, release: str, said_by: str
) -> None:
    module = install(monkeypatch, REFUSED[release])
    (tmp_path / ("amd_aiter-0.1.7+rocm.dist-info" if said_by == "metadata" else "other")).mkdir()
    module.aiter.__path__ = [str(tmp_path / "aiter")]
    if said_by == "module":
        module.aiter.__version__ = "0.1.7+rocm"  # type: ignore[attr-defined]
    with all_warnings() as told:
        for kv in (200, 201):
            data = contest_data(1, kv)
            assert worst(data, submission.custom_kernel(data)) < 5e-3
    assert module.calls == [], "called with arguments that it may take for others"
    assert len(told) == 1 and told[0].startswith("aiter cannot be used: ")
    assert "0.1.7+rocm" in told[0] or release == "no metadata"
    assert {report["refused"]["aiter"] for report in submission.status()} == {told[0]}


def test_new_argument_that_is_demanded_is_an_error_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    module = install(
        monkeypatch, (INFO, METADATA.replace(" page_size=", " novelty page_size=") + " dtype_q= dtype_kv=", DECODE)
    )
    data = contest_data(1, 200)
    with all_warnings() as told:
        out = submission.custom_kernel(data)
    assert worst(data, out) < 5e-3 and {name for name, _ in module.calls} == {"get_mla_metadata_info_v1"}
    assert len(told) == 2 and all("novelty" in text for text in told), "one for each plan"


def test_nan_at_one_split_count_leaves_the_other_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    module = install(monkeypatch, RELEASES["pin"])
    decode = module.mla.mla_decode_fwd

    def flaky(*args: Any, **kwargs: Any) -> None:
        decode(*args, **kwargs)
        if kwargs["num_kv_splits"] == 32:
            args[2][0, 3] = torch.nan

    flaky.__signature__ = decode.__signature__  # type: ignore[attr-defined]
    module.mla.mla_decode_fwd = flaky  # type: ignore[attr-defined]
    data = contest_data(64, 200)
    with all_warnings() as told:
        out = submission.custom_kernel(data)
    assert worst(data, out, cache="fp8") < 0.05 and submission.last_pick()["plan"].endswith(", 8)")
    assert len(told) == 2 and all(", 32)" in text and "L2 inf" in text for text in told)


# A release that ends the process: strict_aiter.py


@pytest.fixture(scope="module")
def strict_outcomes() -> dict[str, str]:
    """What became of each input of strict_aiter.CHANGES, each in a process of its own."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "tests/strict_aiter.py"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(line.split("|") for line in done.stdout.splitlines())


# Each comes to an answer of aiter, one in float32 instead, or a refusal by name.
@pytest.mark.skipif(not hasattr(os, "fork"), reason="reason: this system has no fork")
@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        ("none", "aiter right"),
        ("strided q", "aiter right"),
        ("int64 indptr", "aiter right"),
        ("strided indptr", "aiter right"),
        ("int64 qo_indptr", "aiter right"),
        ("strided qo_indptr", "aiter right"),
        ("no qo_indptr", "aiter right"),
        ("short sequence", "torch right"),
        ("empty sequence", "torch right"),
        ("late start", "torch right"),
        ("short sequence later", "aiter right"),
        ("empty sequence later", "aiter right"),
        ("late start later", "aiter right"),
        ("beyond the cache later", "ValueError kv_indptr"),
        ("two query tokens", "torch right"),
        ("32 heads", "torch right"),
        ("no fp8", "torch right"),
        ("scalar scale", "aiter right"),
        ("double scale", "aiter right"),
        ("two scales", "ValueError fp8"),
        ("no scale", "ValueError fp8"),
        ("raw bytes", "ValueError fp8"),
        ("other fp8", "torch right"),
        ("short fp8", "ValueError fp8"),
        ("strided fp8", "aiter right"),
        ("flat fp8", "aiter right"),
    ],
)
def test_release_that_aborts_is_never_given_a_reason(
    strict_outcomes: dict[str, str], change: str, outcome: str
) -> None:
    found = strict_outcomes[change]
    assert found.startswith(outcome) if outcome.startswith("ValueError") else found == outcome
