"""Fixtures shared by all tests. The repository's folder is importable; Triton itself stays compiled in this process."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
for folder in (ROOT, ROOT / "tests"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


@pytest.fixture(scope="session")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    """A worker in which Triton interprets: it decides at import, so it needs a process of its own."""
    import interpreted

    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=interpreted.start) as pool:
        yield pool


@pytest.fixture(scope="session")
def cpu_compiler() -> None:
    """A test that compiles a kernel's text for the CPU asks for it."""
    if shutil.which("g++") is None:
        pytest.skip("reason: no g++ to compile the kernel's text for the CPU")


@pytest.fixture(scope="session")
def cuda_compiler() -> None:
    """A test that compiles CUDA for a GPU asks for it; no GPU is needed."""
    from mla_backends import nvrtc

    try:
        nvrtc.load_nvrtc()
    except OSError as error:
        pytest.skip(f"reason: NVRTC cannot be loaded: {error}")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No override of the caller's shell reaches a test."""
    for name in [name for name in os.environ if name.startswith(("MLA_", "POPCORN_"))]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def same_submission() -> Iterator[None]:
    """A test that loads another file under the contest's module name leaves ours in place for the next."""
    ours = sys.modules.get("submission")
    if ours is not None:
        ours._dropped.clear()  # what a test drops for the life of the process stays out of the next
    yield
    if ours is not None:
        sys.modules["submission"] = ours
    elif getattr(sys.modules.get("submission"), "__file__", None) != str(ROOT / "submission.py"):
        sys.modules.pop("submission", None)
