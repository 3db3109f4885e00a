"""`--device gfx950`: a submission's Triton kernels run as gfx950 machine code in the emulator, judged as ever."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
GALLERY = ROOT / "tests" / "gallery"
sys.path.insert(0, str(ROOT))

import eval as harness  # noqa: E402

MISSING = harness.emulator_missing()
needs_emulator = pytest.mark.skipif(MISSING is not None, reason=MISSING or "")

# Scores are scaled by a Triton kernel, so that some machine code runs; everything else is torch.
SUBMISSION = """
import torch
import triton
import triton.language as tl


@triton.jit
def _scale_kernel(x_ptr, y_ptr, n, factor, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n) * factor, mask=at < n)


def custom_kernel(data):
    q, kv = data[0].float(), data[1]["bf16"].view(data[0].shape[0], -1, 576).float()
    scores = (q @ kv.mT).contiguous()
    scaled = torch.empty_like(scores)
    _scale_kernel[(triton.cdiv(scores.numel(), 256),)](scores, scaled, scores.numel(), FACTOR, BLOCK=256)
    return (torch.softmax(scaled, -1) @ kv[..., :512]).to(torch.bfloat16)
"""


@pytest.fixture
def cases(tmp_path):
    path = tmp_path / "cases.txt"
    path.write_text("batchsize: 2; qseqlen: 1; kvseqlen: 33; seed: 7\n")
    return str(path)


def run(tmp_path, cases, submission):
    report = tmp_path / "report.json"
    arguments = ["test", cases, "--submission", str(submission), "--device", "gfx950", "--json", str(report)]
    code = harness.main(arguments)
    return code, json.loads(report.read_text())["cases"][0]


@needs_emulator
@pytest.mark.parametrize(("factor", "code"), [("data[4]['sm_scale']", 0), ("0.0", 112)])
def test_machine_code_is_executed_and_judged(tmp_path, cases, factor, code, capsys):
    path = tmp_path / "submission.py"
    path.write_text(SUBMISSION.replace("FACTOR", factor))
    got, case = run(tmp_path, cases, path)
    assert (got, case["passed"]) == (code, code == 0)
    assert "the emulator executes their machine code" in capsys.readouterr().out


@needs_emulator
def test_a_file_that_launches_nothing_is_said_so(tmp_path, cases):
    code, case = run(tmp_path, cases, GALLERY / "honest_bf16.py")
    assert code == 112
    assert "no kernel was launched" in case["message"]


@needs_emulator
def test_the_emulator_has_no_clock(capsys):
    assert harness.main(["benchmark", "--submission", str(GALLERY / "honest_bf16.py"), "--device", "gfx950"]) == 2
    assert "no clock" in capsys.readouterr().err


def test_a_missing_package_is_named(monkeypatch, capsys):
    monkeypatch.setattr(harness.importlib.util, "find_spec", lambda name: None)
    assert harness.main(["test", "--submission", str(GALLERY / "honest_bf16.py"), "--device", "gfx950"]) == 110
    assert "pip install" in capsys.readouterr().err
