"""What others met in public, one test for each, and what the kernels that this project replaces did silently wrong.

Rows that no test here can try: a cache over 4 GiB that is wholly read (13, 20) and the time limit on the contest's own
machine (6). The first has its tests on a GPU (tests/test_gpu.py, tests/test_hopper.py) and is tried here at one end of
such a cache; of the second, what bounds the time is tested.
"""

from __future__ import annotations

import ast
import json
import math
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
import yaml
from cases import ROOT, Case, Guarded, Layout, build, complaints, dequantise
from test_eval_protocol import run_eval
from test_properties import contest_call, emulated, one_thread, portable
from test_submission_host import Fake, _aiter, _aiter_backend, contest_data, problem

import reference
import submission
from evalkit import lint

__all__ = ["emulated", "one_thread"]  # fixtures

PLAN = {"num_splits": 2}
Engine = Callable[[Case], list[str]]


@pytest.fixture(autouse=True)
def no_picks() -> Iterator[None]:
    submission._picks.clear()
    yield
    submission._picks.clear()


@pytest.fixture(params=["torch", "portable", "gfx950"])
def engine(request: pytest.FixtureRequest, interpreter: ProcessPoolExecutor) -> Engine:
    """Complaints about a case's answer: of the torch backend, of the interpreted kernels, of gfx950's machine code."""
    if request.param == "portable":
        return lambda case: interpreter.submit(portable, case, Layout(), PLAN).result()
    if request.param == "torch":
        return lambda case: contest_call(case, Layout())[0]
    request.getfixturevalue("emulated")

    def machine_code(case: Case) -> list[str]:
        t = build(case)
        plan = submission.Plan("gfx950", num_warps=2, num_splits=3)
        out, lse = submission.mla_decode(t.q, t.codes, t.scales, t.indptr, case.sm_scale, plan)
        return complaints(out, lse, case, t, lse_off=1e-2)

    return machine_code


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What `eval.py test` prints on a machine without a GPU and without the contest's pipe."""
    path = tmp_path_factory.mktemp("cases") / "cases.txt"
    path.write_text("batchsize: 2; qseqlen: 1; kvseqlen: 33; seed: 7\n")
    done, _ = run_eval("test", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# The contest's software


def test_bug_01_popcorn_fd_unset_prints_for_a_person(printed: str) -> None:
    """The contest's eval.py: without POPCORN_FD it leaves with code 111 and says nothing."""
    assert "1 of 1 cases pass" in printed


def test_bug_02_helper_files_stand_beside_the_submission() -> None:
    """The contest's task.yml takes helpers from the folder above, so a copied folder cannot be imported."""
    sources = [entry["source"] for entry in yaml.safe_load((ROOT / "task.yml").read_text())["files"]]
    assert all(".." not in source for source in sources)
    assert all((ROOT / source).is_file() for source in sources if not source.startswith("@"))
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import submission, reference, utils, task, eval"
    subprocess.run([sys.executable, "-I", "-c", code], cwd="/", check=True, timeout=120)


def test_bug_03_local_run_is_labelled_unofficial(printed: str) -> None:
    """popcorn-cli, pull request 78: nothing could be run locally."""
    assert "unofficial" in printed and "card: none (CPU)" in printed


def test_bug_04_banned_word_is_found_with_its_line() -> None:
    """kernelbot, issues 373 and 374: the word, even in a comment, is answered with HTTP 500."""
    text = (ROOT / "submission.py").read_text()
    assert not [f for f in lint.lint_bytes(text.encode()) if f.rule == "banned word"]
    found = lint.lint_bytes(f"{text}# one {lint.BANNED_WORD.upper()}\n".encode())
    assert (found[0].rule, found[0].severity, found[0].line) == ("banned word", "refused", len(text.splitlines()) + 1)


@pytest.mark.parametrize(
    ("content", "rule"),
    [(b"", "empty"), (b"# \xff\n", "encoding"), (b"#" * 1_000_001, "size")],
    ids=["empty", "not UTF-8", "over 1 MB"],
)
def test_bug_05_file_that_the_server_refuses_is_refused_before(content: bytes, rule: str) -> None:
    """kernelbot's api_utils takes no file that is empty, over a megabyte or not UTF-8, and says so only there."""
    assert (rule, "refused") in [(f.rule, f.severity) for f in lint.lint_bytes(content)]
    assert not [f for f in lint.lint_bytes((ROOT / "submission.py").read_bytes()) if f.severity == "refused"]


def test_bug_06_compile_time_is_apart_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """reference-kernels, issue 165: kernels that compile inside the timed run meet the time limit."""
    for arch in ("gfx950", "sm_90"):
        for batch in (4, 32, 64, 256):
            assert len(submission.candidate_plans(problem(arch, batch, 8192))) <= 3

    slow = [Fake(f"slow{i}", lambda out, call: (time.sleep(0.1), out)[1]) for i in range(20)]
    monkeypatch.setattr(submission, "_extra_backends", lambda: tuple(slow))
    monkeypatch.setattr(submission, "PICK_BUDGET_S", 0.5)
    submission.custom_kernel(contest_data())
    pick = submission.last_pick()
    assert pick is not None and 0.5 < pick["compile_s"] <= pick["pick_s"] < 2
    skipped = [c["backend"] for c in pick["candidates"] if c["dropped"] and c["backend"].startswith("slow")]
    assert 10 <= len(skipped) < 20, "each takes 0.2 s"


def test_bug_07_active_tolerances_are_printed(printed: str) -> None:
    """reference-kernels, issue 137: the README names another tolerance than the code uses."""
    assert f"rtol = atol = {reference.CONTEST_RTOL}, {reference.CONTEST_MISS_RATIO:.0%} of the elements may" in printed


# aiter


def test_bug_08_page_size_is_one_and_reading_a_part_is_caught(tmp_path: Any) -> None:
    """aiter, issues 2996 and 3095: with a page size over 1 its kernel reads one token of each page: "170x faster"."""
    module = _aiter()
    _aiter_backend(module).run(("fp8", 8), submission._unpack(contest_data(2, 200)))
    assert [arguments["page_size"] for _, arguments in module.calls] == [1, 1]
    assert module.calls[1][1]["kv_indices"].tolist() == list(range(400)), "every token is a page"
    report = tmp_path / "report.json"
    pages = str(ROOT / "tests" / "gallery" / "dishonest_pages.py")
    done, _ = run_eval("audit", "--submission", pages, "--json", str(report), timeout=120)
    assert done.returncode == 112 and json.loads(report.read_text())["verdict"] == "refused"


@pytest.mark.parametrize("call", [1, 2])
def test_bug_09_split_count_that_gives_nan_once_is_dropped(monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """aiter, issue 4350: at 16 splits its kernel answers NaN now and then."""
    random = Fake("random", lambda out, now: out.index_fill(0, torch.tensor([1]), math.nan) if now == call else out)
    monkeypatch.setattr(submission, "_extra_backends", lambda: (random,))
    data = contest_data(3, 40)
    with pytest.warns(RuntimeWarning, match="dropped random"):
        out = submission.custom_kernel(data)
    assert out.isfinite().all() and submission.last_pick()["backend"] == "torch"  # type: ignore[index]


def test_bug_10_empty_split_weighs_nothing_and_nan_stays_where_it_came_in(engine: Engine) -> None:
    """aiter, issues 4420 and 3641: one NaN, or a split without tokens, poisons the merge of all splits."""
    assert engine(Case((1, 0, 3, 2))) == []
    assert engine(Case((70, 0, 70), planted=(("scale", 75, 17, 255),))) == []
    assert engine(Case((70, 70), planted=(("q", 1, 3, 570, math.nan),))) == []


@pytest.mark.parametrize("lengths", [(1, 15, 17, 33), (65, 1), (3, 0, 64)], ids=str)
def test_bug_11_ragged_stores_stay_in_their_rows(interpreter: ProcessPoolExecutor, lengths: tuple[int, ...]) -> None:
    """aiter, issue 3391: the last rows of a ragged batch are stored over their neighbours."""
    # Canaries lie around all outputs and scratch, which begin as NaN.
    assert interpreter.submit(portable, Case(lengths, heads=8), Layout(), PLAN).result() == []


@pytest.mark.parametrize("lengths", [(1, 2, 3, 5), (63, 31, 7), (64,)], ids=str)
def test_bug_12_short_and_ragged_lengths_are_exact(engine: Engine, lengths: tuple[int, ...]) -> None:
    """aiter, issue 3188: lengths under 64, or not a multiple, lose precision."""
    assert engine(Case(lengths)) == []


def far_portable(case: Case) -> list[str]:
    """The case's tokens are the last of a cache of 4.5 GiB, nearly all of it memory that nobody touches."""
    t = build(case)
    rows = (9 << 29) // 288
    codes = torch.empty(rows, 288, dtype=torch.uint8)
    scales = torch.empty(rows, 160, dtype=torch.uint8)[:, :18]  # the scales' offsets pass 2^31 as well
    codes[-len(t.codes) :] = t.codes
    scales[-len(t.codes) :] = t.scales[: len(t.codes), :18]
    indptr = t.indptr + (rows - len(t.codes))
    out, lse = submission.mla_decode(t.q, codes, scales, indptr, case.sm_scale, submission.Plan(**PLAN))
    return complaints(out, lse, case, t)


def test_bug_13_cache_over_4_gib(interpreter: ProcessPoolExecutor) -> None:
    """aiter, issues 4474 and 5765: a cache of more than 2 or 4 GiB crashes or reads as zeros."""
    assert interpreter.submit(far_portable, Case((40, 9))).result() == []


def test_bug_14_splits_come_from_the_real_lengths() -> None:
    """aiter, issue 4507: a length hint of 1 gave one split, and 3 % of the card was used."""
    q, kv, qo, ki, config = contest_data(1, 4000)
    hinted = submission._unpack((q, kv, qo, ki, config)).describe({**config, "kv_seq_len": 1})
    assert hinted.kv_len_max == 4000
    card = replace(hinted, arch="gfx950", num_cus=256)
    assert submission.choose_plan(card).num_splits * submission.choose_plan(card).block_n * 2 > 4000 - 512


def test_bug_15_changed_signature_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """aiter, issue 4227: get_mla_metadata_v1 gains and loses arguments between versions."""

    def renamed(seqlens_qo_indptr: Any, seqlens_kv_indptr: Any, kv_last_page_lens: Any, split_max: Any = 1) -> None:
        raise AssertionError("called")

    stand_in = _aiter(__version__="0.9.9", __path__=[str(ROOT / "aiter")], get_mla_metadata_v1=renamed)
    monkeypatch.setitem(sys.modules, "aiter", stand_in)
    monkeypatch.setitem(sys.modules, "aiter.mla", stand_in.mla)
    reason = submission.AiterBackend().supports(problem())
    assert reason is not None and "get_mla_metadata_v1 has" in reason and "split_max" in reason and "dtype_kv" in reason


# Triton


def test_bug_16_native_dtypes_reach_triton_as_bytes(emulated: Any) -> None:
    """triton, issues 10008 and 10696: float8_e8m0fnu and float4_e2m1fn_x2 tensors raise KeyError at launch."""
    case = Case((40, 9))
    t = build(case)
    g = Guarded(t, Layout(native=True))
    assert (g.codes.dtype, g.scales.dtype) == (torch.float4_e2m1fn_x2, torch.float8_e8m0fnu)
    out, _ = submission.mla_decode(g.q, g.codes, g.scales, g.indptr, case.sm_scale)
    assert complaints(out, None, case, t) == [] and emulated.launches


def test_bug_17_dot_scaled_option_that_crashes_the_compiler_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """triton, issue 11613: bf16 x fp4 with rhs_k_pack=False takes the compiler down."""
    tree = ast.parse((ROOT / "submission.py").read_text())
    names = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    keywords = {n.arg for n in ast.walk(tree) if isinstance(n, ast.keyword)}
    assert {"mfma_scaled", "dot_scaled"} <= names and "rhs_k_pack" not in keywords
    # A plan whose compilation fails is dropped, once.
    crash = Fake("crash", lambda out, call: (_ for _ in ()).throw(RuntimeError("PassManager::run failed")))
    monkeypatch.setattr(submission, "_extra_backends", lambda: (crash,))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outs = [submission.custom_kernel(contest_data(2, 20)) for _ in range(2)]
    assert crash.calls == 1 and len([w for w in caught if "PassManager" in str(w.message)]) == 1
    assert torch.equal(*outs)


# Scale bytes, one token each: the answer is the token's own values


def single_tokens(scale_bytes: tuple[int, ...]) -> Case:
    return Case((1,) * len(scale_bytes), heads=8, q_factor=0.0, scale_bytes=(127,))


def decoded(scale_bytes: tuple[int, ...]) -> list[bool]:
    """For each byte: is what attention over one token with it answers the token's own values, exactly?"""
    case = single_tokens(scale_bytes)
    t = build(case)
    t.scales[: len(scale_bytes), :18] = torch.tensor(scale_bytes, dtype=torch.uint8)[:, None]
    t.codes[:, :] = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], dtype=torch.uint8).repeat(36)
    plan = submission.Plan() if submission.INTERPRETED else None
    out, _ = submission.mla_decode(t.q, t.codes, t.scales, t.indptr, 1.0, plan)
    n = len(scale_bytes)
    want = dequantise(t.codes[:n], t.scales[:n])[:, None, :512].expand(out.shape).to(torch.bfloat16)
    return [torch.equal(got.nan_to_num(7.0), row.nan_to_num(7.0)) for got, row in zip(out, want, strict=True)]


def test_bug_18_e8m0_byte_0_is_exact(interpreter: ProcessPoolExecutor) -> None:
    """triton, issue 11624, as below: to the bit."""
    assert interpreter.submit(decoded, (0, 1, 2)).result() == [True] * 3
    assert decoded((0, 1, 2)) == [True] * 3


def test_bug_18_e8m0_byte_0_is_2_to_minus_127(engine: Engine) -> None:
    """triton, issue 11624: scale byte 0 was decoded as 0, not as 2^-127."""
    assert engine(Case((40, 5), scale_bytes=(0,), q_factor=2.0**126)) == []


def test_bug_19_every_other_scale_byte_is_exact(interpreter: ProcessPoolExecutor) -> None:
    """sglang, issue 25519, as below: to the bit."""
    usual = (127, 133, 134, 135, 140, 141, 200, 252, 255)
    assert interpreter.submit(decoded, usual).result() == [True] * len(usual)
    # Every byte but 253 and 254, with which codes from 4 on, and 2 on, are infinite in float32
    assert decoded((*range(253), 255)) == [True] * 254


def test_bug_19_scale_byte_255_alone_is_nan(engine: Engine) -> None:
    """sglang, issue 25519: the scale 128 (byte 134) became NaN, and 255 became infinity."""
    assert engine(Case((40, 5), scale_bytes=(134,), planted=(("scale", 3, 0, 255),))) == []


def test_bug_20_buffer_offsets_over_2_gib(emulated: Any) -> None:
    """ROCm/triton, issue 944: buffer loads further than 2^31 bytes from their base read zeros."""
    if os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < 10 << 30:
        pytest.skip("reason: less than 10 GiB of free memory: the emulator copies what a kernel is given")
    case = Case((40, 9), scale_pad=0)
    t = build(case)
    rows = (1 << 31) // 288 + 100
    codes, scales = torch.empty(rows, 288, dtype=torch.uint8), torch.empty(rows, 18, dtype=torch.uint8)
    codes[-len(t.codes) :], scales[-len(t.codes) :] = t.codes, t.scales
    plan = submission.Plan("gfx950", num_warps=2)
    out, lse = submission.mla_decode(t.q, codes, scales, t.indptr + (rows - len(t.codes)), case.sm_scale, plan)
    assert complaints(out, lse, case, t, lse_off=1e-2) == [] and emulated.findings() == []


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz], ids=str)
def test_bug_21_fp8_type_comes_from_the_tensor(dtype: torch.dtype) -> None:
    """vllm, issue 45562: fn and fnuz codes taken for each other are wrong by a factor of two."""
    q, kv, qo, ki, config = contest_data(2, 200)
    cache = reference.quantize_fp8(kv["bf16"], dtype)
    inputs = submission._unpack((q, {**kv, "fp8": cache}, qo, ki, config))
    out, _ = submission.torch_attention(inputs, cache="fp8")
    want, _ = reference.attention_truth((q, {**kv, "fp8": cache}, qo, ki, config), cache="fp8")
    assert float(reference.relative_l2(out, want).max()) < 1e-4
    module = _aiter()
    _aiter_backend(module).run(("fp8", 8), inputs)
    decode = module.calls[1][1]
    assert decode["q"].dtype == decode["kv_buffer"].dtype == module.calls[0][1]["dtype_kv"] == dtype
    again = decode["q"].float() * decode["q_scale"]
    assert float(submission._relative_l2(again, q.float()).max()) < 0.05, "quantised for the other type's range"


def test_bug_22_vendor_keywords_go_to_their_vendor_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """sglang, issue 20479: a launch keyword of one vendor is a KeyError on another's compiler."""
    keywords: dict[str, set[str]] = {}

    class Recorder:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return lambda *args, **kwargs: keywords.setdefault(self.name, set(kwargs)) and None

    for name in ("_attend_kernel", "_merge_kernel", "_attend_gfx950_kernel"):
        monkeypatch.setattr(submission, name, Recorder(name))
    t = build(Case((300,)))
    inputs = submission.Inputs(t.q, t.codes, t.scales, t.indptr, 1 / 24)
    for plan in (submission.Plan(num_splits=2), submission.Plan("gfx950", num_warps=2)):
        submission.run_decode(inputs, plan, torch.empty(1, 16, 512, dtype=torch.bfloat16))
    for name in ("_attend_kernel", "_merge_kernel"):
        assert {k for k in keywords[name] if not k.isupper()} <= {"num_warps", "num_stages"}, "any vendor's"
    assert "waves_per_eu" in keywords["_attend_gfx950_kernel"]


# What the replaced kernels did silently wrong


def test_replaced_lengths_over_the_configured_one_are_read_to_the_end(engine: Engine) -> None:
    """The tail beyond config["kv_seq_len"] was dropped; contest_call says 7 there."""
    assert engine(Case((8, 130, 6))) == []


@pytest.mark.parametrize("scale_byte", [102, 101, 60, 141, 142, 200])
def test_replaced_scale_bytes_beyond_fp16_are_right(engine: Engine, scale_byte: int) -> None:
    """From 141 on and up to 102 the values left fp16: zeros or NaN."""
    assert engine(Case((40, 5), scale_bytes=(scale_byte,), q_factor=2.0 ** (127 - scale_byte))) == []


def test_replaced_nan_in_q_is_not_hidden(engine: Engine) -> None:
    """NaN in a query came out as 0. An infinity is no better: every score of its head is infinite or NaN."""
    assert engine(Case((40, 5), planted=(("q", 0, 5, 100, math.nan),))) == []
    for value in (math.inf, -math.inf):
        assert engine(Case((1, 1, 1, 1), planted=tuple(("q", i, 5, 100, value) for i in range(4)))) == []


def test_replaced_queries_over_fp16_are_right(engine: Engine) -> None:
    """|q| over 65,504 was infinite."""
    assert engine(Case((40, 5), scale_bytes=(100,), q_factor=2.0**27)) == []
    assert engine(Case((40, 5), scale_bytes=(0, 1), q_factor=2.0**127)) == []


def test_replaced_partial_sums_do_not_overflow(interpreter: ProcessPoolExecutor) -> None:
    """Sums of weights times values were kept in fp16. Here each split, and their merge, is a mean: 200 values near
    float32's largest."""
    case = Case((200,), scale_bytes=(251, 252), q_factor=0.0)
    assert interpreter.submit(portable, case, Layout(), PLAN).result() == []
    assert contest_call(case, Layout())[0] == []


def test_replaced_scores_under_minus_a_billion_are_scores(engine: Engine) -> None:
    """A maximum that starts at -1e9 left nothing of a sequence whose scores all lie below."""
    # Keys of -6 * 2^10 throughout, queries of 2^13: each score is -576 * 6 * 2^23 / 24 = -1.2e9.
    planted = (("q", slice(None), slice(None), slice(None), 2.0**13), ("codes", slice(None), 0xFF))
    assert engine(Case((40, 3), scale_bytes=(137,), planted=planted)) == []


@pytest.mark.parametrize("sm_scale", [0.01, 0.5])
def test_replaced_sm_scale_is_obeyed(engine: Engine, sm_scale: float) -> None:
    """config["sm_scale"] was ignored."""
    assert engine(Case((40, 5), sm_scale=sm_scale, scale_bytes=(125,))) == []


@pytest.mark.parametrize("heads", [8, 32, 128, 20])
def test_replaced_head_counts_other_than_16(interpreter: ProcessPoolExecutor, heads: int) -> None:
    """They were read out of bounds: they are right here, or refused."""
    if heads in submission.HEAD_COUNTS:
        assert interpreter.submit(portable, Case((20,), heads=heads), Layout(), {}).result() == []
    else:
        with pytest.raises(ValueError, match=r"q: expected .*heads among"):
            contest_call(Case((20,), heads=heads), Layout())


def two_batches(first: Case, second: Case) -> list[str]:
    """custom_kernel on one ragged batch, then on another of its shape in the same memory; complaints of the second."""
    submission._picks.clear()
    t, other = build(first), build(second)
    qo = torch.arange(len(first.lengths) + 1, dtype=torch.int32)
    data = (t.q, {"mxfp4": (t.codes, t.scales)}, qo, t.indptr, {"sm_scale": first.sm_scale})
    before = submission.custom_kernel(data)
    kept = before.clone()
    for old, new in ((t.q, other.q), (t.codes, other.codes), (t.scales, other.scales), (t.indptr, other.indptr)):
        old.copy_(new)
    out = submission.custom_kernel(data)
    found = complaints(out, None, second, other)
    found += ["one output for two calls"] * (out.data_ptr() == before.data_ptr())
    found += ["an earlier output changed"] * (not torch.equal(kept, before))
    return found + ["two picks for one shape"] * (len(submission._picks) != 1)


def test_replaced_nothing_of_one_batch_is_kept_for_the_next(interpreter: ProcessPoolExecutor) -> None:
    """Metadata of one ragged batch was reused for another of its shape, one output served all calls, and quantised
    queries were kept by the tensor's identity: a second call in the same memory must answer for what lies there now."""
    first, second = Case((40, 3, 0, 70), seed=1), Case((2, 100, 11, 0), seed=2)
    assert interpreter.submit(two_batches, first, second).result() == []
    assert two_batches(first, second) == []
    module, inputs = _aiter(), submission._unpack(contest_data(2, 200))
    backend = _aiter_backend(module)
    for _ in range(2):
        backend.run(("fp8", 8), inputs)
        inputs.q.mul_(2)
    scales = [arguments["q_scale"] for name, arguments in module.calls if name == "decode"]
    assert float(scales[1]) == 2 * float(scales[0])
    assert [name for name, _ in module.calls] == ["metadata", "decode"] * 2, "made anew in each call"
