"""Every file of the gallery gets the verdict it deserves, for the expected reason, and forges no result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
GALLERY = ROOT / "tests" / "gallery"
sys.path.insert(0, str(ROOT))

import eval as harness  # noqa: E402
from evalkit import audit as audit_module  # noqa: E402
from evalkit.supervisor import Nursery  # noqa: E402

# They need a process of their own: its command line, memory and descriptors are what they look at.
OWN_PROCESS = ("sniffer",)
FILES = sorted(p.stem for p in GALLERY.glob("*.py") if p.stem.startswith(("honest_", "dishonest_")))
GPU_FILES = sorted(p.stem for p in GALLERY.glob("gpu_*.py"))


def expectation(name: str) -> tuple[str, str]:
    """(check that fails or "any", part of its evidence), or ("honest", "")."""
    for line in (GALLERY / f"{name}.py").read_text().splitlines():
        if line.startswith("# expect: "):
            check, _, evidence = line.removeprefix("# expect: ").partition(" | ")
            return check.strip(), evidence.strip()
    raise AssertionError(f"{name}: no `# expect:` line")


def parse_like_server(text: str) -> dict[str, str]:
    """Lines at anything Python takes for a line break, split at the first colon, last key wins."""
    result = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key or value:
            result[key.strip()] = value.strip()
    return result


def shared_nursery(device: str):
    shared = Nursery(device)
    yield shared
    shared.close()


@pytest.fixture(scope="module")
def nursery():
    yield from shared_nursery("cpu")


@pytest.fixture(scope="module")
def gpu_nursery():
    yield from shared_nursery("cuda")


def run_with_pipe(arguments: list[str], monkeypatch, nursery) -> tuple[int, str]:
    """Run the evaluator in this process with a result pipe that nobody reads before the end."""
    read, write = os.pipe()
    monkeypatch.setenv("POPCORN_FD", str(write))
    try:
        code = harness.main(arguments, nursery)
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            data = pipe.read()
    finally:
        monkeypatch.delenv("POPCORN_FD", raising=False)
    assert len(data) < 64 << 10
    return code, data.decode("utf-8")


def audit(name: str, device: str, monkeypatch, nursery, tmp_path) -> tuple[int, dict, dict[str, str]]:
    report = tmp_path / "report.json"
    path = GALLERY / f"{name}.py"
    monkeypatch.setitem(audit_module.OTHER_SHAPES_S, "cpu", 2.0)
    monkeypatch.setitem(audit_module.MANY_CALLS_S, "cpu", 1.0)
    limit = "3" if name == "dishonest_sleeps" else "60"
    arguments = ["audit", "--submission", str(path), "--json", str(report), "--timeout", limit, "--device", device]
    code, text = run_with_pipe(arguments, monkeypatch, nursery)
    return code, json.loads(report.read_text()), parse_like_server(text)


def assert_expected(name: str, code: int, report: dict, result: dict[str, str]) -> None:
    check, evidence = expectation(name)
    failed = {c["name"]: c["evidence"] for c in report["checks"] if c["counts"] and not c["passed"]}
    if check == "honest":
        assert (code, report["verdict"], result["check"]) == (0, "honest", "pass"), failed
        assert report["worst_rel_l2"] <= report["worst_limit"]
        return
    # On a GPU the first call may wait for the libraries it starts, and a race be seen only later.
    seen = list(failed.values()) if check == "any" else [failed.get(check, "")]
    assert any(evidence in text for text in seen) and failed, failed
    assert result["check"] == "fail"
    assert (code, report["verdict"]) == ((2, "unloadable") if check == "load" else (112, "refused"))
    known = ("test-count", "audit.verdict", "audit.cache", "check")
    count = int(result["test-count"])
    extra = [k for k in result if k not in known and not (k.startswith("test.") and int(k.split(".")[1]) < count)]
    assert extra == []


@pytest.mark.parametrize("name", FILES)
def test_audit_gallery_file(name, monkeypatch, nursery, tmp_path):
    code, report, result = audit(name, "cpu", monkeypatch, nursery, tmp_path)
    assert_expected(name, code, report, result)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="reason: these classes of cheating need a GPU")
@pytest.mark.parametrize("name", GPU_FILES)
def test_audit_gallery_gpu_file(name, monkeypatch, gpu_nursery, tmp_path):
    code, report, result = audit(name, "cuda", monkeypatch, gpu_nursery, tmp_path)
    assert_expected(name, code, report, result)


@pytest.mark.parametrize("name", OWN_PROCESS)
def test_audit_gallery_own_process(name, tmp_path):
    report = tmp_path / "report.json"
    command = [
        sys.executable,
        str(ROOT / "eval.py"),
        "audit",
        "--device",
        "cpu",
        "--submission",
        str(GALLERY / f"{name}.py"),
    ]
    environment = {**os.environ, "POPCORN_SEED": "4711"}
    done = subprocess.run(
        [*command, "--json", str(report)], env=environment, capture_output=True, text=True, check=False
    )
    check, evidence = expectation(name)
    failed = {c["name"]: c["evidence"] for c in json.loads(report.read_text())["checks"] if not c["passed"]}
    assert done.returncode == 112, done.stdout
    assert evidence in failed[check]


def test_no_process_of_the_evaluator_can_be_looked_into(tmp_path):
    cases = tmp_path / "cases.txt"
    cases.write_text("batchsize: 2; qseqlen: 1; kvseqlen: 33; seed: 1\n")
    command = [sys.executable, str(ROOT / "eval.py"), "test", str(cases), "--device", "cpu", "--explain"]
    done = subprocess.run(
        [*command, "--submission", str(GALLERY / "intruder.py")], capture_output=True, text=True, check=False
    )
    # It prints every way in that it finds.
    assert "    | " not in done.stdout
    assert done.returncode == 0, done.stdout
