"""The uploaded file obeys the contest's server."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).resolve().parent.parent / "submission.py"
TEXT = FILE.read_text()


def test_directives_are_lines_one_and_two() -> None:
    assert TEXT.splitlines()[:2] == ["#!POPCORN leaderboard amd-mixed-mla", "#!POPCORN gpu MI355X"]


def test_banned_word_is_nowhere() -> None:
    hits = [f"{i}: {line}" for i, line in enumerate(TEXT.splitlines(), 1) if "stream" in line.lower()]
    assert not hits


def test_size_and_length() -> None:
    assert len(FILE.read_bytes()) <= 1_000_000
    assert len(TEXT.splitlines()) <= 1000


def test_imports_task_and_public_packages_only() -> None:
    names = set()
    for node in ast.walk(ast.parse(TEXT)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0])
    own = names - set(sys.stdlib_module_names)
    assert own <= {"torch", "triton", "task", "aiter", "mla_backends"}


def test_no_look_at_the_run_mode_and_no_broad_except() -> None:
    for needle in ("sys.argv", "POPCORN_", "except:", "except Exception", "except BaseException"):
        assert needle not in TEXT


def test_custom_kernel_is_short() -> None:
    tree = ast.parse(TEXT)
    node = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "custom_kernel")
    assert node.end_lineno is not None and node.end_lineno - node.lineno < 30


def test_kernelguard_says_valid() -> None:
    guard = shutil.which("kernelguard", path=str(Path(sys.executable).parent)) or shutil.which("kernelguard")
    if guard is None:
        pytest.skip("reason: kernelguard is not installed (pip install kernelguard==0.3.2)")
    answer = subprocess.run([guard, "--api-mode"], input=TEXT, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(answer.stdout)["classification"] == "valid"


def test_runs_alone_beside_the_servers_files(tmp_path: Path) -> None:
    for name in ("submission.py", "task.py"):
        shutil.copy(FILE.with_name(name), tmp_path)
    # The server executes the file once before every run.
    subprocess.run([sys.executable, "submission.py"], cwd=tmp_path, timeout=120, check=True)
    code = (
        "import torch, submission as s\n"
        "q = torch.randn(2, 16, 576).bfloat16(); ip = torch.tensor([0, 5, 9], dtype=torch.int32)\n"
        "codes = torch.randint(0, 255, (9, 1, 288), dtype=torch.uint8)\n"
        "kv = {'mxfp4': (codes, torch.full((9, 18), 127, dtype=torch.uint8))}\n"
        "out = s.custom_kernel((q, kv, torch.arange(3, dtype=torch.int32), ip, {'sm_scale': 1 / 24}))\n"
        "assert out.shape == (2, 16, 512) and out.isfinite().all()\n"
        "assert [c['backend'] for c in s.last_pick()['candidates']] == ['torch']\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, timeout=120, check=True)
