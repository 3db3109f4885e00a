"""What breaks under the submission is answered by the next backend with one warning, or refused with advice.

Each fault is injected below `custom_kernel`; each test counts warnings and attempts, and judges every answer.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from stand_ins import Backend, all_warnings, call, contest_data, on_device, raises, use
from triton.runtime.errors import OutOfResources

import submission

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(submission, "_extra_backends", tuple)
    submission._picks.clear()
    yield
    submission._picks.clear()


def candidates(name: str) -> list[dict[str, Any]]:
    return [c for report in submission.status() for c in report["candidates"] if c["backend"] == name]


class Unheard(Exception):
    """An error of a library's own kind."""


ERRORS = {
    "compile": triton.CompilationError("src", None, "tile too large"),
    "resources": OutOfResources(300000, 232448, "shared memory"),
    "launch": RuntimeError("CUDA error: invalid configuration argument"),
    "device memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "host memory": MemoryError(),
    "assembler": subprocess.CalledProcessError(255, "ptxas"),
    "full disk": OSError(28, "No space left on device"),
    "exit": SystemExit(3),
    "its own": Unheard("gone"),
    "interface": TypeError("unexpected keyword argument 'page_size'"),
    "value": ValueError("q must be fp8"),
    "missing": NotImplementedError(),
    "interpreter": StopIteration(),
}


# The first and second runs are the pick's checks, the third answers the first call.
@pytest.mark.parametrize("first", [1, 2, 3, 5])
@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
def test_backend_that_raises_is_replaced_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, first: int
) -> None:
    bad, good = Backend("bad", raises(error, first)), Backend("good")
    use(monkeypatch, bad, good)
    data = contest_data()
    with all_warnings() as told:
        for _ in range(6):
            call(data)
    assert bad.runs == {"only": first}, "tried again after it was dropped"
    assert len(told) == 1 and told[0].startswith(f"dropped bad only: {type(error).__name__}")
    assert str(error)[:100] in told[0]
    (row,) = candidates("bad")
    assert row["dropped"] in told[0] and type(error).__name__ in row["dropped"]
    assert submission.last_pick()["backend"] == "good"


def test_backend_that_raises_once_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    moody = Backend("moody", raises(RuntimeError("launch failed"), 4, 4))
    use(monkeypatch, moody)
    with all_warnings() as told:
        for kv in (30, 31, 32):
            for _ in range(4):
                call(contest_data(2, kv))
    assert moody.runs == {"only": 4} and len(told) == 1


def test_interrupt_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Backend("bad", raises(KeyboardInterrupt())))
    with pytest.raises(KeyboardInterrupt):
        submission.custom_kernel(contest_data())


@pytest.mark.parametrize("when", [1, 2])
def test_nan_once_at_one_split_count_drops_that_plan_alone(monkeypatch: pytest.MonkeyPatch, when: int) -> None:
    def act(out: torch.Tensor, number: int, plan: int) -> torch.Tensor:
        return torch.full_like(out, math.nan) if (plan, number) == (16, when) else out

    splits = Backend("splits", act, (16, 8))
    use(monkeypatch, splits)
    with all_warnings() as told:
        for kv in (30, 31, 32):
            call(contest_data(2, kv))
            assert submission.last_pick()["plan"] == "8"
    assert splits.runs == {16: when, 8: 9}, "two checks and one answer a shape; the other plan never again"
    assert len(told) == 1 and told[0].startswith("dropped splits 16: ") and "L2 inf" in told[0]


def test_dropped_backend_stays_dropped_for_the_process_whatever_the_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "MAX_PICKS", 3)  # what a shape learnt is forgotten long before the end
    bad = Backend("bad", raises(RuntimeError("no kernel image")))
    use(monkeypatch, bad)
    with all_warnings() as told:
        for kv in [*range(20, 32)] * 2:
            call(contest_data(1, kv))
    assert bad.runs == {"only": 1} and len(told) == 1
    assert [c["dropped"] for c in candidates("bad")] == ["RuntimeError: no kernel image"] * 3


def test_backend_dropped_at_one_shape_is_left_at_shapes_picked_before(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = Backend("bad", raises(RuntimeError("launch failed"), 8))
    use(monkeypatch, bad)
    first, second = contest_data(2, 30), contest_data(2, 31)
    with all_warnings() as told:
        for data in (first, second, first, second, first, second):
            call(data)
    assert bad.runs == {"only": 8} and len(told) == 1  # 3 runs a shape at first, one more, then the failure
    assert all(c["dropped"] for c in candidates("bad")) and len(candidates("bad")) == 2


def test_want_of_memory_drops_for_its_shape_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    hungry = Backend("hungry", raises(torch.OutOfMemoryError("CUDA out of memory"), 1, 1))
    use(monkeypatch, hungry)
    large, small = contest_data(2, 60), contest_data(2, 20)
    with all_warnings() as told:
        for data in (large, large, small, large):
            call(data)
    assert hungry.runs == {"only": 1 + 3} and len(told) == 1
    assert sorted(c["dropped"] or "" for c in candidates("hungry")) == ["", "OutOfMemoryError: CUDA out of memory"]


def own(monkeypatch: pytest.MonkeyPatch, fallback: Any) -> None:
    """Put a stand-in in the place of the float32 fallback."""
    monkeypatch.setattr(submission, "OWN_BACKENDS", (submission.OWN_BACKENDS[0], fallback, submission.OWN_BACKENDS[2]))


def test_memory_that_all_lack_at_a_later_call_is_one_error_and_can_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    tight = raises(torch.OutOfMemoryError("CUDA out of memory"), 4, 4)
    use(monkeypatch, Backend("one", tight))
    own(monkeypatch, Backend("torch", raises(torch.OutOfMemoryError("CUDA out of memory"), 3, 3)))
    data = contest_data()
    call(data)
    with pytest.raises(RuntimeError, match=r"no backend answered.*torch only.*out of memory.*one only.*free memory"):
        submission.custom_kernel(data)
    call(data)
    assert submission.last_pick()["backend"] == "one"


def test_memory_lacking_for_the_checks_is_told_and_the_next_call_picks(monkeypatch: pytest.MonkeyPatch) -> None:
    honest, calls = submission.torch_attention, []

    def once(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return honest(*args, **kwargs)

    monkeypatch.setattr(submission, "torch_attention", once)
    data = contest_data()
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        submission.custom_kernel(data)
    assert not submission._picks
    call(data)


def test_all_backends_broken_is_one_error_that_names_them_and_no_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    bad, worse = Backend("bad", raises(RuntimeError("launch failed"))), Backend("torch", raises(Unheard("gone")))
    use(monkeypatch, bad)
    own(monkeypatch, worse)
    data = contest_data()
    with all_warnings() as told:
        for _ in range(3):
            with pytest.raises(RuntimeError, match="no backend answered") as caught:
                submission.custom_kernel(data)
    for part in ("bad only", "launch failed", "torch only", "gone", "new process", "aiter"):
        assert part in str(caught.value)
    assert bad.runs == worse.runs == {"only": 1} and len(told) == 2
    assert submission.last_pick()["backend"] is None


@pytest.mark.parametrize("first", [1, 2, 3])
def test_fallback_that_raises_leaves_the_others(monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    broken = Backend("torch", raises(RuntimeError("cublas"), first))
    use(monkeypatch, Backend("good"))
    own(monkeypatch, broken)
    with all_warnings() as told:
        for _ in range(3):
            call(contest_data())
    assert submission.last_pick()["backend"] == "good"
    assert broken.runs["only"] == min(first, 2) and len(told) == (first < 3)


@pytest.mark.parametrize("error", [RuntimeError("launch failed"), torch.OutOfMemoryError("out of memory")], ids=str)
def test_backend_that_raises_while_it_is_timed_is_dropped(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def time(c: Any, inputs: Any, deadline: float) -> float:
        if c.backend.name == "bad":
            raise error
        return {"good": 10.0, "torch": 40.0}[c.backend.name]

    monkeypatch.setattr(submission, "_time_cold_us", time)
    on_device(monkeypatch, device=torch.device("cuda"))
    monkeypatch.setattr(submission.TritonBackend, "supports", lambda self, problem: "left out")
    bad = Backend("bad")
    use(monkeypatch, bad, Backend("good"))
    with all_warnings() as told:
        call(contest_data())
        call(contest_data())
    assert len(told) == 1 and told[0].startswith("dropped bad only: ") and bad.runs == {"only": 2}
    assert submission.last_pick()["backend"] == "good"


def test_timer_flushes_with_what_memory_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        def __init__(self, enable_timing: bool) -> None: ...

        def record(self) -> None: ...

        def elapsed_time(self, other: Any) -> float:
            return 0.5

    sizes, empty = [], torch.empty
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (3000, 1 << 40))
    monkeypatch.setattr(torch, "empty", lambda *size, **kwargs: (sizes.append(size[0]), empty(*size, **kwargs))[1])
    inputs = submission._unpack(contest_data())
    assert submission._time_cold_us(submission.Candidate(Backend(), "only"), inputs, math.inf) == 500.0
    assert sizes[0] == 1500, "half of what is left"


# Modules that break when they are imported


BREAKAGES = {
    "import inside": "import a_module_that_is_not_there",
    "name inside": "from os import a_name_that_is_not_there",
    "library": "raise OSError('libamdhip64.so: cannot open shared object file')",
    "architecture": "raise KeyError('gfx900')",
    "compiler": "import subprocess; raise subprocess.CalledProcessError(1, 'hipcc')",
    "syntax": "def broken(:",
    "assertion": "assert False, 'ROCm 6 needed'",
    "exit": "import sys; sys.exit('no GPU')",
    "its own": "class Odd(Exception): pass\nraise Odd('odd')",
}


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str, str], Any]]:
    """Write a package of this name and text in front of all others; its imports are counted by the result."""
    names: list[str] = []

    def write(name: str, text: str) -> Any:
        (tmp_path / name).mkdir()
        log = tmp_path / f"{name}.log"
        (tmp_path / name / "mla.py").write_text("")
        init = f"with open({str(log)!r}, 'a') as log: log.write('.')\n"
        if text != BREAKAGES["syntax"]:
            init += text
            (tmp_path / name / "__init__.py").write_text(init)
        else:
            (tmp_path / name / "__init__.py").write_text(f"{init}from . import worse\n")
            (tmp_path / name / "worse.py").write_text(text)
        names.append(name)
        for known in [m for m in sys.modules if m.split(".")[0] == name]:
            monkeypatch.delitem(sys.modules, known)
        monkeypatch.syspath_prepend(str(tmp_path))
        return lambda: len(log.read_text()) if log.exists() else 0

    yield write
    for known in [m for m in sys.modules if m.split(".")[0] in names]:
        del sys.modules[known]


@pytest.fixture
def amd(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which aiter would be wanted; its own backends have met nothing yet."""
    on_device(monkeypatch, arch="gfx950", num_cus=256)
    monkeypatch.setattr(submission.TritonBackend, "supports", lambda self, problem: "left out")
    backends = (submission.AiterBackend(), submission.TORCH, submission.TritonBackend())
    monkeypatch.setattr(submission, "OWN_BACKENDS", backends)


@pytest.mark.parametrize("text", BREAKAGES.values(), ids=BREAKAGES)
def test_aiter_that_breaks_at_import_is_left_out_once(amd: None, module: Any, text: str) -> None:
    imports = module("aiter", text)
    with all_warnings() as told:
        for kv in (200, 201):
            call(contest_data(1, kv))
            call(contest_data(1, kv))
    assert imports() == 1, "imported again after it broke"
    assert len(told) == 1 and told[0].startswith("aiter cannot be used: ")
    assert {report["refused"]["aiter"] for report in submission.status()} == {told[0]}
    assert submission.last_pick()["backend"] == "torch"


def test_aiter_that_is_not_there_is_left_out_with_one_warning(amd: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiter", None)
    with all_warnings() as told:
        for kv in (200, 201):
            call(contest_data(1, kv))
    assert len(told) == 1 and told[0].startswith("aiter cannot be used: ModuleNotFoundError")


@pytest.mark.parametrize(
    "text", [*BREAKAGES.values(), "def backends(): raise RuntimeError('no driver')", "backends = 1"]
)
def test_extra_backends_that_break_are_left_out_once(monkeypatch: pytest.MonkeyPatch, module: Any, text: str) -> None:
    monkeypatch.undo()  # the real look for the module
    imports = module("mla_backends", text)
    submission._extra_backends.cache_clear()
    with all_warnings() as told:
        for kv in (20, 21):
            call(contest_data(1, kv))
    submission._extra_backends.cache_clear()
    assert imports() == 1 and len(told) == 1 and told[0].startswith("mla_backends cannot be used: ")


def test_extra_backends_that_are_not_there_are_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "mla_backends", None)
    submission._extra_backends.cache_clear()
    with all_warnings() as told:
        call(contest_data(1, 20))
    submission._extra_backends.cache_clear()
    assert told == []


# Triton's cache on disk: kernels are compiled for gfx950 and run in its emulator


CACHE = """
import errno, os, sys, warnings
import torch, submission
from gfx950.device import emulated_device
from stand_ins import contest_data, worst

def full(*args, **kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(args[0]))

fault = sys.argv[1]
if fault == "full":
    os.replace = full
data = contest_data(1, 33)
with emulated_device() as device, warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(3):
        assert worst(data, submission.custom_kernel(data)) < 5e-3
pick = submission.last_pick()
caught = [w for w in caught if issubclass(w.category, RuntimeWarning)]  # Triton has some of its own
print(pick["backend"], len(caught), len(device.launches), *(str(w.message) for w in caught), sep="|")
"""


@pytest.mark.parametrize("fault", ["none", "under a file", "full"])
def test_triton_cache_that_cannot_be_written(tmp_path: Path, fault: str) -> None:
    """A read-only folder does not stop root, a path below a file does."""
    pytest.importorskip("tinygrad", reason="reason: the gfx950 emulator needs tinygrad")
    (tmp_path / "file").write_text("")
    (tmp_path / "run.py").write_text(CACHE)
    for name in ("submission.py", "task.py"):  # alone: no mla_backends
        shutil.copy(ROOT / name, tmp_path)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TRITON_CACHE_DIR": str(tmp_path / ("file/triton" if fault == "under a file" else "triton")),
        "PYTHONPATH": os.pathsep.join(
            [str(tmp_path), str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
        ),
    }
    done = subprocess.run(
        [sys.executable, "run.py", fault], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-2000:]
    backend, warned, launches, *told = done.stdout.strip().split("|")
    if fault == "none":
        assert (backend, warned) == ("triton", "0") and int(launches) >= 5
    else:
        assert (backend, warned, launches) == ("torch", "1", "0")
        assert told[0].startswith("dropped triton Plan(") and "Error: [Errno" in told[0] and str(tmp_path) in told[0]
