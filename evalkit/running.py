"""One evaluation: the modes `test`, `benchmark`, `leaderboard` and `profile`, case by case."""

from __future__ import annotations

import contextlib
import hashlib
import math
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import reference
from evalkit.cases import Case, combine_seeds, hidden_seed
from evalkit.judge import STRICT_REL_L2, Judge
from evalkit.protocol import EXIT_CHECK, EXIT_DEVICE, EXIT_PASS, EXIT_TIMEOUT, escape
from evalkit.supervisor import REQUEST_LIMIT_S, Nursery, Worker, WorkerFailure, memory_files, reading_answer
from evalkit.timing import (
    MAX_CASE_WALL_S,
    Stats,
    calculate_stats,
    enough_runs,
    late_error,
    paper_bandwidth,
    time_error,
    timed_answer,
)
from evalkit.transport import call, give_input, output_error, read_output

# Time limits in seconds: importing the file, and its first call, which compiles and picks. Without a GPU there is less
# to compile, nothing to time, and somebody who waits.
LOAD_LIMIT_S = {"cuda": 120.0, "gfx950": 60.0, "cpu": 60.0}
FIRST_CALL_LIMIT_S = {"cuda": 300.0, "gfx950": 300.0, "cpu": 100.0}
# The contest kills a run after these; ours ends a little earlier, with a report. The audit has a limit of its own.
MODE_LIMIT_S = {"test": 880.0, "benchmark": 880.0, "profile": 880.0, "leaderboard": 1170.0, "audit": 880.0}
# After so many time limits in a row the next case would only be one more.
MAX_TIMEOUTS = 2

# Repeats and total time per case, as in the contest; runs between two validations of the outputs.
BENCHMARK_REPEATS, BENCHMARK_TIME_NS = 1000, 50e9
LEADERBOARD_REPEATS, LEADERBOARD_TIME_NS = 100, 30e9
ROUND_RUNS = 25
SEED_STEP = 13
WARM_UP_RUNS = 3
INCLUSIVE_RUNS = 5
RENEWED_RUNS = 3


@dataclass
class CaseResult:
    """Everything known about one case; also an entry of the JSON file."""

    spec: str
    shape: str
    device: str = ""
    passed: bool = False
    message: str = ""
    kind: str = ""
    cache: str = ""
    worst_rel_l2: float | None = None
    contest_passed: bool | None = None
    contest_message: str = ""
    load_s: float | None = None
    first_call_s: float | None = None
    elapsed_s: float = 0.0
    stats: Stats | None = None
    inclusive_best_ns: float | None = None
    gb_per_s: float | None = None
    limit_share: float | None = None
    pick: dict[str, Any] | None = None
    report: str | None = None
    printed: str = ""


class Reporter:
    """What a person sees; this one is silent, evalkit.person has the one that prints."""

    def start(self, run: Run, cases: list[Case]) -> None: ...

    def case_started(self, index: int, case: Case) -> None: ...

    def progress(self, text: str) -> None: ...

    def tick(self) -> None:
        """Called several times a second while a worker is waited for."""

    def case_done(self, index: int, result: CaseResult) -> None: ...

    def finish(self, run: Run, results: list[CaseResult], code: int) -> None: ...


@dataclass
class Run:
    """One invocation: what to run, where, and under which limits.

    `also_emulated` announces a second run in the emulator, `not_emulated` says why there is none; an `optional` run
    ends without a fault where a file launches no kernel there.
    """

    mode: str
    submission: Path
    device: str
    secret: int | None
    reduced: bool
    tolerance: float = STRICT_REL_L2
    timeout_s: float | None = None
    reporter: Reporter = field(default_factory=Reporter)
    key: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    shared_nursery: Nursery | None = None
    own_process: bool = False
    also_emulated: bool = False
    not_emulated: str = ""
    optional: bool = False

    def __post_init__(self) -> None:
        self.nursery = self.shared_nursery or Nursery(self.device, exclusive=self.own_process)
        self.deadline = time.monotonic() + MODE_LIMIT_S.get(self.mode, math.inf)
        self.timeouts = 0
        self.files = self._files()
        if self.secret is not None:
            self.key = hashlib.blake2b(str(self.secret).encode()).digest()

    @property
    def first_call_limit_s(self) -> float:
        """Limit of a case's first call: `timeout_s`, or what is usual on this device."""
        return FIRST_CALL_LIMIT_S[self.device] if self.timeout_s is None else self.timeout_s

    @property
    def card(self) -> str:
        if self.device != "cuda":
            return {"cpu": "CPU", "gfx950": "gfx950, emulated"}[self.device]
        import torch

        return torch.cuda.get_device_name()

    def case_args(self, case: Case) -> dict[str, Any]:
        """Arguments of `generate_input`, with the secret worked into the seed."""
        args: dict[str, Any] = dict(case.args)
        if self.secret is not None:
            args["seed"] = combine_seeds(args["seed"], self.secret)
            if self.device == "cuda":
                # The worker generates this one itself and must not learn the secret from it.
                args["seed"] = hidden_seed(self.key, args["seed"])
        args["seed"] %= 1 << 63
        return args

    def close(self) -> None:
        """Leave no process behind; a nursery that others use too stays."""
        if self.shared_nursery is None:
            self.nursery.close()

    # -- steps shared by the modes

    @contextlib.contextmanager
    def worker(self) -> Iterator[Worker]:
        """A fresh worker, ready to load a file."""
        with Worker(self.nursery, self.deadline) as worker:
            worker.on_wait = self.reporter.tick
            folder, ours = str(self.submission.parent), str(Path(reference.__file__).parent)
            worker.request("setup", limit_s=120.0, device=self.device, folder=folder, harness=ours)
            yield worker
        files = self._files()
        changed = sorted(path.name for path, content in self.files.items() if files.get(path) != content)
        if changed:
            raise WorkerFailure(f"files were changed meanwhile: {escape(', '.join(changed), 200)}", "check")

    def _files(self) -> dict[Path, bytes]:
        """Digests of the submission and of the evaluator's own files, which a worker could write to."""
        ours = Path(reference.__file__).parent
        found = {}
        for path in {self.submission, *ours.glob("*.py"), *ours.glob("evalkit/*.py"), *ours.glob("gfx950/*.py")}:
            with contextlib.suppress(OSError):
                found[path] = hashlib.blake2b(path.read_bytes()).digest()
        return found

    def load(self, worker: Worker) -> float:
        answer = worker.request("load", path=str(self.submission), limit_s=LOAD_LIMIT_S[self.device])
        with reading_answer():
            return float(answer.get("load_s", 0.0))

    def prepare(self, worker: Worker, slot: int, args: dict[str, Any]) -> Any:
        """The same input here and in the worker."""
        import reference

        if self.device == "cuda":
            worker.request("generate", slot=slot, args=args)
            return reference.generate_input(**args)
        data = reference.generate_input(**args, device="cpu")
        give_input(worker, slot, data)
        return data

    def first_call(self, worker: Worker, case: Case, result: CaseResult) -> tuple[Any, Judge, Any]:
        """Load, generate, call once and judge in full: (input, judge, output)."""
        result.load_s = self.load(worker)
        data = self.prepare(worker, 0, self.case_args(case))
        self.reporter.progress("first call: compiling and picking")
        (first,) = call(worker, [0], [data], check_inputs=True, poison=True, limit_s=self.first_call_limit_s)
        result.first_call_s = first.call_s
        judge = Judge(data, self.tolerance)
        if first.error:
            raise WorkerFailure(first.error, "check")
        verdict = judge.verdict(first.output)
        result.passed, result.message, result.cache = verdict.passed, verdict.message, verdict.cache
        result.worst_rel_l2 = verdict.worst_rel_l2
        result.contest_passed, result.contest_message = verdict.contest_passed, verdict.contest_message
        if not verdict.passed:
            raise WorkerFailure(verdict.message, "check")
        if first.changed:
            raise WorkerFailure(f"the call changed its inputs: {', '.join(first.changed)}", "check")
        if first.aliases_input:
            raise WorkerFailure("the output shares memory with an input", "check")
        return data, judge, first.output

    def inspect(self, worker: Worker, result: CaseResult) -> None:
        """Refuse a worker whose submission replaced or closed what the evaluator relies on."""
        found = worker.request("inspect", limit_s=60.0)
        result.pick = found.get("pick") if isinstance(found.get("pick"), dict) else None
        error = inspection_error(found)
        if error:
            raise WorkerFailure(error, "check")
        if self.device == "gfx950" and not found.get("launches"):
            raise WorkerFailure("no kernel was launched, so nothing ran as gfx950 code", "unused")

    # -- modes

    def test_case(self, case: Case, result: CaseResult) -> None:
        with self.worker() as worker:
            try:
                self.first_call(worker, case, result)
                self.inspect(worker, result)
            finally:
                result.printed = worker.printed_tail()

    def timed_case(self, case: Case, result: CaseResult) -> None:
        fresh = self.mode == "leaderboard"
        repeats = LEADERBOARD_REPEATS if fresh else BENCHMARK_REPEATS
        max_time_ns = LEADERBOARD_TIME_NS if fresh else BENCHMARK_TIME_NS
        with self.worker() as worker:
            try:
                data, judge, output = self.first_call(worker, case, result)
                self._time(worker, WARM_UP_RUNS, max_time_ns, [data], None, 0.0, save=False, reset=True)
                durations: list[float] = []
                started = time.monotonic()
                while len(durations) < repeats:
                    count = min(ROUND_RUNS, repeats - len(durations))
                    seeds: list[int] | None = None
                    if fresh:
                        base = len(durations)
                        seeds = [self._iteration_seed(case, base + i) for i in range(count)]
                    self.reporter.progress(f"timing: {len(durations)} runs")
                    times, outputs, _ = self._time(
                        worker,
                        count,
                        max_time_ns,
                        [data],
                        (case, seeds),
                        time.monotonic() - started,
                        True,
                        not durations,
                    )
                    durations += times
                    self._validate(case, seeds, judge, output, outputs, result)
                    if enough_runs(durations, max_time_ns, time.monotonic() - started) or not times:
                        break
                if not fresh:
                    self._renewed_round(worker, case, result)
                inclusive, _, walls = self._time(
                    worker, INCLUSIVE_RUNS, math.inf, [data], None, 0.0, save=False, reset=True, inclusive=True
                )
                error = time_error(case, durations, inclusive, walls, self.card)
                if error:
                    raise WorkerFailure(error, "check")
                self.inspect(worker, result)
            finally:
                result.printed = worker.printed_tail()
        result.stats = calculate_stats(durations)
        result.inclusive_best_ns = min(inclusive)
        result.gb_per_s = case.min_bytes / result.stats.mean
        bandwidth = paper_bandwidth(self.card)
        result.limit_share = result.gb_per_s * 1e9 / bandwidth if bandwidth else None

    def _renewed_round(self, worker: Worker, case: Case, result: CaseResult) -> None:
        """New content in the storage that was timed so long: nothing that the many calls before it left may show."""
        self.reporter.progress("timed runs on new content in the same storage")
        args = {**self.case_args(case), "seed": hidden_seed(self.key, case.args["seed"], RENEWED_RUNS)}
        worker.request("renew", slot=0, args=args)
        data = reference.generate_input(**args)
        _, outputs, _ = self._time(worker, RENEWED_RUNS, math.inf, [data], (case, None), 0.0, save=True, reset=True)
        judge = Judge(data, self.tolerance)
        for output in outputs:
            verdict = judge.verdict(output, result.cache, complete=False)
            if not verdict.passed:
                raise WorkerFailure(f"in a timed run on new content in the same storage: {verdict.message}", "check")

    def _iteration_seed(self, case: Case, iteration: int) -> int:
        """Moves by 13 an iteration like the contest's, but what the worker sees tells nothing about the next one."""
        return hidden_seed(self.key, case.args["seed"] + SEED_STEP * (iteration + 1))

    def _time(
        self,
        worker: Worker,
        count: int,
        max_time_ns: float,
        datas: list[Any],
        fresh: tuple[Case, list[int] | None] | None,
        spent_s: float,
        save: bool,
        reset: bool,
        inclusive: bool = False,
    ) -> tuple[list[float], list[Any], list[float]]:
        """Some timed runs: (ns between the events, outputs, ns by the host's clock).

        The host's own time in an inclusive run is taken off: launching from Python may well take longer than the
        kernel, which the contest's order hides behind the flush.
        """
        shape = reference.output_shape(datas[0])
        size = 2 * math.prod(shape)
        args = {k: v for k, v in fresh[0].args.items() if k != "seed"} if fresh else {}
        with memory_files(size * count if save else 1) as (fd,):
            answer = worker.request(
                "time",
                [fd],
                MAX_CASE_WALL_S + REQUEST_LIMIT_S,
                slot=0,
                seeds=fresh[1] if fresh else None,
                args=args,
                count=count,
                save=save,
                reset=reset,
                inclusive=inclusive,
                max_time_ns=max_time_ns if math.isfinite(max_time_ns) else 1e18,
                max_wall_s=MAX_CASE_WALL_S,
                spent_s=spent_s,
            )
            if answer.get("problem"):
                error = output_error(answer["problem"], shape, self.device)
                raise WorkerFailure(f"in a timed run: {error}", "check")
            error = late_error(answer)
            if error:
                raise WorkerFailure(error, "check")
            times, walls = timed_answer(answer, inclusive)
            if len(times) > count:
                raise WorkerFailure("wrote to the evaluator's control channel", "protocol")
            outputs = [read_output(fd, i * size, shape, datas[0][0].device) for i in range(len(times))] if save else []
        return times, outputs, walls

    def _validate(
        self, case: Case, seeds: list[int] | None, judge: Judge, first: Any, outputs: list[Any], result: CaseResult
    ) -> None:
        """Judge every output of a timed round; one that equals the judged first output needs no second look."""
        import torch

        import reference

        for i, output in enumerate(outputs):
            if seeds is not None:
                args: dict[str, Any] = {**case.args, "seed": seeds[i]}
                judge = Judge(reference.generate_input(**args), self.tolerance)
            elif torch.equal(output.view(torch.int16), first.view(torch.int16)):
                continue
            verdict = judge.verdict(output, result.cache, complete=False)
            if not verdict.passed:
                raise WorkerFailure(f"in a timed run: {verdict.message}", "check")
            result.worst_rel_l2 = max(result.worst_rel_l2 or 0.0, verdict.worst_rel_l2)

    def profile_case(self, case: Case, result: CaseResult) -> None:
        with self.worker() as worker:
            try:
                self.first_call(worker, case, result)
                answer = worker.request("profile", slot=0)
                result.report = str(answer.get("report", ""))
                self.inspect(worker, result)
            finally:
                result.printed = worker.printed_tail()

    def case(self, index: int, case: Case) -> CaseResult:
        """Run one case; whatever happens to the worker ends up in the result."""
        result = CaseResult(case.spec, case.shape, self.device)
        self.reporter.case_started(index, case)
        started = time.monotonic()
        steps = {"test": self.test_case, "profile": self.profile_case}
        step = steps.get(self.mode, self.timed_case)
        if self.device != "cuda" and self.mode in ("benchmark", "leaderboard"):
            step = self.test_case
        try:
            if time.monotonic() > self.deadline:
                raise WorkerFailure("not run: the time limit of the whole run is reached", "timeout")
            if self.timeouts >= MAX_TIMEOUTS:
                raise WorkerFailure(f"not run after {self.timeouts} time limits in a row", "timeout")
            step(case, result)
        except WorkerFailure as failure:
            result.passed, result.message, result.kind = False, str(failure), failure.kind
        except Exception as error:
            # Out of memory or a lost device on this side: this case has no verdict, the next may have one.
            result.passed, result.message = False, f"the evaluator could not judge: {type(error).__name__}: {error}"
            result.kind = "device"
        if _is_device_failure(result):
            result.kind = "device"
        if self.device == "cuda":
            self.release_memory()
        self.timeouts = self.timeouts + 1 if result.kind == "timeout" else 0
        result.elapsed_s = time.monotonic() - started
        self.reporter.case_done(index, result)
        return result

    @staticmethod
    def release_memory() -> None:
        """Give this process's share of the GPU back before the next worker asks for its own."""
        import gc

        import torch

        gc.collect()
        torch.cuda.empty_cache()

    def all_cases(self, cases: list[Case]) -> tuple[list[CaseResult], int]:
        """Run every case: (results, exit code)."""
        self.reporter.start(self, cases)
        try:
            results = []
            for i, case in enumerate(cases):
                result = self.case(i, case)
                if result.kind == "unused" and self.optional:
                    break
                results.append(result)
        finally:
            self.close()
        return results, exit_code(results)


DEVICE_WORDS = ("CUDA error", "HIP error", "device-side assert", "illegal memory access", "no GPU is visible")


def _is_device_failure(result: CaseResult) -> bool:
    return not result.passed and any(words in result.message for words in DEVICE_WORDS)


def inspection_error(found: dict[str, Any]) -> str | None:
    """What an inspection of the worker found that no honest submission does, or None."""
    with reading_answer():
        if found.get("replaced"):
            return f"the submission replaced {escape(', '.join(map(str, found['replaced'])), 200)}"
        if found.get("findings"):
            return f"the emulator found: {escape('; '.join(map(str, found['findings'])), 400)}"
        if found.get("closed"):
            return f"the submission closed or replaced {escape(', '.join(map(str, found['closed'])), 100)}"
    return None


def exit_code(results: list[CaseResult]) -> int:
    """0, or 114 / 110 when every failure is a time limit / a device failure, else 112."""
    kinds = {result.kind for result in results if not result.passed}
    if not kinds:
        return EXIT_PASS
    if kinds == {"timeout"}:
        return EXIT_TIMEOUT
    if kinds == {"device"}:
        return EXIT_DEVICE
    return EXIT_CHECK
