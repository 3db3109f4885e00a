"""The timed path, walked through on a machine without a GPU: worker operations in this process, host clock for events.

What only a GPU can show (queues, caches, credible times) is checked there by `python eval.py benchmark` and `audit`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import ClassVar

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
GALLERY = ROOT / "tests" / "gallery"
sys.path.insert(0, str(ROOT))

import eval as harness  # noqa: E402
import reference  # noqa: E402
from evalkit import audit, running, timing  # noqa: E402
from evalkit import worker as worker_side  # noqa: E402
from evalkit.cases import parse_cases  # noqa: E402
from evalkit.judge import Judge  # noqa: E402
from evalkit.running import Run  # noqa: E402
from evalkit.supervisor import Nursery, WorkerFailure  # noqa: E402
from evalkit.timing import clock_error, timed_answer  # noqa: E402
from evalkit.transport import call, give_input  # noqa: E402

CASES = "batchsize: 2; qseqlen: 1; kvseqlen: 33; seed: 7\n"


class HostEvent:
    """Stands in for a device event."""

    def __init__(self, enable_timing: bool) -> None:
        self.at = 0.0


class DirectWorker:
    """Answers like a worker, without a process; `log` is the order of what surrounds the call."""

    log: ClassVar[list[str]] = []
    seeds: ClassVar[list[int]] = []

    def __init__(self, nursery, deadline=0.0) -> None:
        self.side = worker_side.Worker(None)
        self.pid = os.getpid()

    def request(self, op, fds=None, limit_s=0.0, **fields):
        fields = json.loads(json.dumps(fields))
        if op == "setup":
            self._setup()
            return {}
        try:
            return json.loads(json.dumps(getattr(self.side, "op_" + op)(fields, fds or [])))
        except worker_side.Refusal as error:
            raise WorkerFailure(str(error), "submission") from error

    def processor_s(self):
        return 0.0  # this one is the test's own process, which never rests

    def _setup(self) -> None:
        side, log = self.side, DirectWorker.log

        def generate(**args):
            log.append("generate")
            DirectWorker.seeds.append(args["seed"])
            return reference.generate_input(**args, device="cpu")

        def record(event, queue):
            log.append("record")
            event.at = time.perf_counter()

        side.generate = generate
        side.flush = lambda: log.append("flush")
        side.device_synchronize = lambda: log.append("synchronize")
        side.event_type, side.event_record = HostEvent, record
        side.event_elapsed = lambda start, end: 1e3 * (end.at - start.at)
        side.current_queue = lambda: None
        side._remember()

    def printed_tail(self) -> str:
        return ""

    def close(self) -> int:
        return 0

    def __enter__(self):
        return self

    def __exit__(self, *exc) -> None:
        pass


@pytest.fixture
def direct(monkeypatch, tmp_path):
    monkeypatch.setattr(running, "Worker", DirectWorker)
    monkeypatch.setattr(reference, "get_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(harness, "choose_device", lambda wanted: "cuda")
    monkeypatch.setattr(Run, "card", "a pretended card")
    monkeypatch.setattr(Run, "release_memory", lambda self: None)
    monkeypatch.setattr(running, "LEADERBOARD_REPEATS", 7)
    monkeypatch.setattr(running, "BENCHMARK_REPEATS", 9)
    monkeypatch.setattr(running, "ROUND_RUNS", 4)
    # Times of the host vary too much for the stop rule to be predictable otherwise.
    monkeypatch.setattr(running, "enough_runs", lambda *args: False)
    monkeypatch.setattr(worker_side, "_enough", lambda *args: False)
    # A reader as large as a cache, which a host's clock cannot hope to match, is not what is tested here.
    monkeypatch.setattr(timing, "INCLUSIVE_SLACK_NS", 1e9)
    monkeypatch.setattr(timing, "OWN_CLOCK_SLACK_NS", 1e10)
    monkeypatch.setattr(sys, "path", [str(GALLERY), *sys.path])
    monkeypatch.setattr(sys, "argv", sys.argv)
    DirectWorker.log.clear()
    DirectWorker.seeds.clear()
    (tmp_path / "cases.txt").write_text(CASES)

    def run(mode, submission):
        read, write = os.pipe()
        monkeypatch.setenv("POPCORN_FD", str(write))
        code = harness.main([mode, str(tmp_path / "cases.txt"), "--submission", str(submission)])
        os.close(write)
        with os.fdopen(read) as file:
            return code, dict(line.rstrip("\n").split(": ", 1) for line in file)

    return run


@pytest.mark.parametrize(("mode", "runs"), [("benchmark", 9), ("leaderboard", 7)])
def test_timed_modes_speak_the_protocol(direct, mode, runs):
    code, result = direct(mode, GALLERY / "honest_bf16.py")
    assert code == 0, result
    names = ("spec", "runs", "mean", "std", "err", "best", "worst")
    assert set(result) == {"benchmark-count", "check", *(f"benchmark.0.{name}" for name in names)}
    assert (result["benchmark-count"], result["check"], result["benchmark.0.runs"]) == ("1", "pass", str(runs))
    best, mean, worst = (float(result[f"benchmark.0.{name}"]) for name in ("best", "mean", "worst"))
    assert 0 < best <= mean <= worst


def test_benchmark_uses_one_input_in_the_contests_order(direct):
    direct("benchmark", GALLERY / "honest_bf16.py")
    # The second one is the new content at the end.
    assert len(DirectWorker.seeds) == 2
    assert DirectWorker.seeds[0] == 7
    first = DirectWorker.log.index("flush")
    timed = ["synchronize", "flush", "record", "record", "synchronize"]
    # Warm-up and timed runs: nothing waits between the flush and the first event, or inside the call.
    assert DirectWorker.log[first - 1 : first - 1 + 5 * (3 + 9)] == timed * (3 + 9)


def test_leaderboard_takes_fresh_seeds_that_tell_nothing(direct):
    direct("leaderboard", GALLERY / "honest_bf16.py")
    assert DirectWorker.seeds[0] == 7
    assert len(set(DirectWorker.seeds)) == 8
    steps = {b - a for a, b in zip(DirectWorker.seeds, DirectWorker.seeds[1:], strict=False)}
    assert len(steps) == 7
    again = list(DirectWorker.seeds)
    DirectWorker.seeds.clear()
    direct("leaderboard", GALLERY / "honest_bf16.py")
    assert set(again) & set(DirectWorker.seeds) == {7}
    at = DirectWorker.log.index("generate", 2)
    assert DirectWorker.log[at : at + 6] == ["generate", "synchronize", "flush", "record", "record", "synchronize"]


@pytest.mark.parametrize(
    ("mode", "body", "reason"),
    [
        ("leaderboard", "return results.setdefault(q.shape, honest(data)).clone()", "in a timed run: contest check"),
        (
            "benchmark",
            "calls.append(1)\n    return honest(data) if len(calls) < 9 else q[..., :512] / 24",
            "in a timed run",
        ),
        (
            "benchmark",
            "calls.append(1)\n    return honest(data) if len(calls) < 6 else honest(data).float()",
            "bfloat16",
        ),
        ("benchmark", "calls.append(1)\n    return honest(data) if len(calls) < 6 else None", "got NoneType"),
    ],
)
def test_every_timed_output_is_judged(direct, tmp_path, mode, body, reason):
    path = tmp_path / "submission.py"
    path.write_text(
        "from mla import honest\n\nresults, calls = {}, []\n\n\n"
        f"def custom_kernel(data):\n    q = data[0]\n    {body}\n"
    )
    code, result = direct(mode, path)
    assert (code, result["check"], result["benchmark.0.status"]) == (112, "fail", "fail")
    assert reason in result["benchmark.0.error"]


def test_new_content_in_the_storage_that_was_timed_so_long(direct, tmp_path):
    path = tmp_path / "submission.py"
    path.write_text(
        "from mla import honest\n\nresults = {}\n\n\ndef custom_kernel(data):\n    q = data[0]\n"
        "    return results.setdefault((q.data_ptr(), q._version), honest(data)).clone()\n"
    )
    code, result = direct("benchmark", path)
    assert (code, result["check"]) == (112, "fail")
    assert "on new content in the same storage" in result["benchmark.0.error"]


def test_an_output_written_after_the_second_event_is_late(direct, monkeypatch, tmp_path):
    late = []

    def synchronize():
        # Where a thread would act: the second event is recorded, the output not read yet.
        for out, data in late:
            out.copy_(attention(data))
        late.clear()

    from mla import honest as attention

    path = tmp_path / "submission.py"
    path.write_text(
        "import torch\nfrom mla import honest\n\nlate, calls = [], []\n\n\ndef custom_kernel(data):\n"
        "    calls.append(1)\n    if len(calls) < 6:\n        return honest(data)\n"
        "    out = torch.zeros(*data[0].shape[:2], 512, dtype=torch.bfloat16)\n    late.append((out, data))\n"
        "    return out\n"
    )
    setup = DirectWorker._setup

    def linked(self):
        setup(self)
        self.side.device_synchronize = synchronize
        load = self.side.op_load

        def op_load(request, fds):
            answer = load(request, fds)
            self.side.module.late = late
            return answer

        self.side.op_load = op_load

    monkeypatch.setattr(DirectWorker, "_setup", linked)
    code, result = direct("benchmark", path)
    assert (code, result["check"]) == (112, "fail")
    assert "written after the clock had stopped" in result["benchmark.0.error"]


def timed_audit(monkeypatch, name):
    """The audit's GPU checks with operations in this process, on small shapes: (verdict, checks by name)."""
    small = parse_cases(CASES + "batchsize: 3; qseqlen: 1; kvseqlen: 40; seed: 8\n")
    monkeypatch.setattr(audit, "manifest_cases", lambda section: small)
    monkeypatch.setattr(audit, "TIMED_RUNS", 4)
    monkeypatch.setattr(audit, "MANY_CALLS", 5)
    monkeypatch.setattr(audit, "LATER_CALLS", 5)
    monkeypatch.setattr(audit, "ROWS", 2)
    monkeypatch.setattr(audit, "ROW_CALLS", 4)
    run = Run("audit", GALLERY / f"{name}.py", "cuda", None, False, shared_nursery=Nursery("cpu"))
    performed = audit.Audit(run)
    performed.device, performed.shapes = torch.device("cpu"), audit.CPU_SHAPES
    verdict = performed.perform()
    return verdict, {check.name: check for check in performed.checks}


def test_audit_times_fresh_inputs_and_judges_every_output(direct, monkeypatch):
    verdict, checks = timed_audit(monkeypatch, "honest_bf16")
    assert verdict == "honest", [check for check in checks.values() if not check.passed]
    assert checks["time"].evidence.count("4 outputs right") == 2
    assert "2x33" in checks["time"].evidence
    assert "until idle" in checks["time"].evidence


def test_audit_refuses_work_outside_the_timed_queue(direct, monkeypatch):
    monkeypatch.setattr(timing, "INCLUSIVE_SLACK_NS", -1e9)
    verdict, checks = timed_audit(monkeypatch, "honest_bf16")
    assert verdict == "refused"
    assert "left out of the timed queue" in checks["time"].evidence


def test_audit_refuses_times_that_its_own_clock_does_not_bear_out(direct, monkeypatch):
    monkeypatch.setattr(audit.Audit, "_own_ns", lambda self, data: 1e12)
    verdict, checks = timed_audit(monkeypatch, "honest_bf16")
    assert verdict == "refused"
    assert "by the evaluator's own clock" in checks["time"].evidence


def test_own_clock_allows_for_the_host_and_for_noise():
    assert clock_error(400e3, 50e3, 640e3) is None
    assert "400.0 us between the events, 700.0 us a call" in clock_error(400e3, 50e3, 700e3)


def test_a_monitoring_tool_left_active_is_refused():
    class Monitoring:
        tools: ClassVar[list] = [None] * 6

        def get_tool(self, number):
            return self.tools[number]

    side = worker_side.Worker(None)
    side.monitoring = Monitoring()
    side._remember()
    side._refuse_hooks(None)
    Monitoring.tools[3] = "watcher"
    with pytest.raises(worker_side.Refusal, match="monitoring tool"):
        side._refuse_hooks(None)


def test_host_time_is_taken_off_inclusive_runs():
    answer = {"durations": [250.0, 30.0], "walls": [300.0, 40.0], "hosts": [200.0, 90.0]}
    assert timed_answer(answer, inclusive=False) == ([250.0, 30.0], [300.0, 40.0])
    assert timed_answer(answer, inclusive=True) == ([50.0, 1.0], [100.0, 1.0])


def test_inputs_survive_the_transport(nursery_worker):
    worker, data = nursery_worker
    (result,) = call(worker, [0], [data], check_inputs=True)
    assert result.error is None
    assert result.changed == []
    verdict = Judge(data).verdict(result.output)
    assert (verdict.passed, verdict.cache) == (True, "mxfp4/bf16")


@pytest.fixture
def nursery_worker():
    nursery = Nursery("cpu")
    run = Run("test", GALLERY / "honest_mxfp4.py", "cpu", None, False, shared_nursery=nursery)
    data = reference.generate_input(3, 1, 65, 2, device="cpu")
    try:
        with run.worker() as worker:
            run.load(worker)
            give_input(worker, 0, data)
            yield worker, data
    finally:
        nursery.close()


def test_same_storage_is_really_the_same(nursery_worker):
    worker, data = nursery_worker
    (first,) = call(worker, [0], [data])
    other = reference.generate_input(3, 1, 65, 3, device="cpu")
    give_input(worker, 1, other, over=0)
    (second,) = call(worker, [0], [other])
    assert Judge(other).strict(second.output).passed
    assert not torch.equal(first.output, second.output)


def test_judge_names_the_cache_and_the_row():
    data = reference.generate_input(3, 1, 65, 2, device="cpu")
    judge = Judge(data)
    for cache in reference.CACHES:
        assert judge.strict(judge.truth(cache).bfloat16()).cache == f"{cache}/bf16"
    out = judge.truth("fp8").bfloat16()
    out[2, 5] *= 1.5
    verdict = judge.strict(out)
    assert (verdict.passed, verdict.worst_row) == (False, (2, 5))
    assert "1 of 48 rows" in verdict.message
    assert Judge(data, tolerance=0.6).strict(out).passed


def test_poison_fills_the_memory_that_the_output_will_get(tmp_path):
    path = tmp_path / "submission.py"
    path.write_text(
        "import torch\n\n\ndef custom_kernel(data):\n"
        "    return torch.empty(*data[0].shape[:2], 512, dtype=torch.bfloat16)\n"
    )
    nursery = Nursery("cpu")
    run = Run("test", path, "cpu", None, False, shared_nursery=nursery)
    data = reference.generate_input(3, 1, 65, 2, device="cpu")
    try:
        with run.worker() as worker:
            run.load(worker)
            give_input(worker, 0, data)
            shares = [call(worker, [0], [data], poison=True)[0].output.isnan().float().mean() for _ in range(5)]
    finally:
        nursery.close()
    # The allocator owes nobody this memory, and its free list may hold a few bytes of it.
    assert sorted(shares)[2] > 0.9
