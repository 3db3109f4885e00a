"""What a person sees: a header, a progress line per case, one table. Plain text when the output is not a terminal."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from evalkit.cases import Case, SpecError
from evalkit.judge import tolerances
from evalkit.protocol import EXIT_PASS
from evalkit.report import environment
from evalkit.running import CaseResult, Reporter, Run
from evalkit.timing import geometric_mean

WIDTH = 100
# Backends that a pick holds the others against.
FALLBACKS = ("aiter", "torch")


def printable(text: str) -> str:
    """Text of a submission without anything that moves a terminal's cursor."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def shorten(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def wrap(text: str, width: int, indent: str) -> str:
    """Break at spaces, for long reasons under a table."""
    lines, line = [], ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > width - len(indent):
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}".strip()
    return "\n".join(indent + part for part in [*lines, line] if part)


class Screen:
    """Prints to a terminal with rich where it is installed, else plainly."""

    def __init__(self, out: TextIO | None = None) -> None:
        self.out = out or sys.stdout
        self.terminal = self.out.isatty()
        self.width = min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns) if self.terminal else WIDTH
        self.console: Any = None
        self._on_line = 0
        if self.terminal:
            try:
                from rich.console import Console
            except ImportError:
                return
            self.console = Console(file=self.out, width=self.width, highlight=False)

    def line(self, text: str = "", style: str = "") -> None:
        """One or more whole lines."""
        self.clear()
        text = printable(text)
        if self.console is not None:
            # What is wider than the screen, such as a profiler's table, is left to the terminal and stays selectable.
            self.console.print(text, style=style or None, markup=False, soft_wrap=True)
        else:
            print(text, file=self.out, flush=True)

    def transient(self, text: str) -> None:
        """A line that the next one replaces; nothing when the output is not a terminal."""
        if not self.terminal:
            return
        self.clear()
        text = shorten(printable(text), self.width - 1)
        self._on_line = len(text)
        print(text, end="", file=self.out, flush=True)

    def clear(self) -> None:
        if self._on_line:
            print("\r" + " " * self._on_line + "\r", end="", file=self.out)
            self._on_line = 0

    def table(self, columns: list[str], rows: list[list[str]], right: set[int], title: str = "") -> None:
        """A table; `right` holds the indices of right-aligned columns. The last column takes what room is left."""
        rows = [[printable(cell) for cell in row] for row in rows]
        if self.console is not None:
            from rich.table import Table
            from rich.text import Text

            table = Table(title=title or None, title_justify="left", box=None, pad_edge=False, header_style="bold")
            for i, name in enumerate(columns):
                table.add_column(name, justify="right" if i in right else "left", overflow="fold")
            for row in rows:
                table.add_row(*(Text(cell, style=_cell_style(cell)) for cell in row))
            self.clear()
            self.console.print(table)
            return
        if title:
            self.line(title)
        widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
        used = sum(widths[:-1]) + 2 * (len(widths) - 1)
        widths[-1] = max(16, min(widths[-1], self.width - used))
        for row in [columns, *rows]:
            cells = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
            last = wrap(row[-1], widths[-1], "").split("\n")
            head = "  ".join(cells[:-1])
            self.line((head + "  " + (last[0] if last else "")).rstrip() if -1 not in right else head)
            for more in last[1:]:
                self.line(" " * used + more)


def _cell_style(cell: str) -> str:
    return {"pass": "green", "ok": "green", "FAIL": "bold red", "note": "yellow"}.get(cell, "")


def microseconds(ns: float | None) -> str:
    if ns is None:
        return "-"
    us = ns / 1e3
    return f"{us:.1f}" if us < 1000 else f"{us:.0f}"


def seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def header_lines(device: str, tolerance: float) -> list[str]:
    """Card, versions and the active tolerances."""
    found = environment(device)
    limits = tolerances(tolerance)
    versions = [
        f"{name} {found[name]}" for name in ("torch", "triton", "aiter", "amd-aiter", "python") if name in found
    ]
    lines = [f"card: {found['card']}" + (f", {found['runtime']}" if "runtime" in found else "")]
    if device == "cuda":
        clocks = card_clocks()
        if clocks:
            lines[0] += f", {clocks}"
    lines.append("versions: " + ", ".join(versions))
    lines.append(
        f"contest check: rtol = atol = {limits['contest_rtol']},"
        f" {limits['contest_miss_ratio']:.0%} of the elements may miss"
    )
    lines.append(
        f"strict check: relative L2 per (sequence, head) <= {limits['strict_rel_l2']} to the nearest honest truth,"
        f" or <= {limits['fp8_slack']} x\n              an honest fp8 computation's own error on that row"
    )
    return lines


def card_clocks() -> str:
    """Current clocks as the driver's tool reports them; empty where there is no such tool."""
    import subprocess

    command = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,power.limit", "--format=csv,noheader"]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    parts = [part.strip() for part in shown.splitlines()[0].split(",")] if shown else []
    return f"SM {parts[0]}, memory {parts[1]}, power limit {parts[2]}" if len(parts) == 3 else ""


class PersonReporter(Reporter):
    """Progress and tables for one run."""

    def __init__(self, screen: Screen, explain: bool, compare: dict[str, Any] | None) -> None:
        self.screen = screen
        self.explain = explain
        self.compare = compare
        self.run: Run | None = None
        self.cases: list[Case] = []
        self.began = 0.0
        self.case_began = 0.0
        self.done_tokens = 0
        self.label = ""
        self.doing = ""
        self.shown_at = 0.0

    def start(self, run: Run, cases: list[Case]) -> None:
        self.run, self.cases, self.began, self.done_tokens = run, cases, time.monotonic(), 0
        line = self.screen.line
        what = {
            "test": "checks",
            "benchmark": "times",
            "leaderboard": "times, with fresh inputs each run,",
            "profile": "profiles",
        }[run.mode]
        if run.device != "cuda" and run.mode in ("benchmark", "leaderboard"):
            what = "checks"
        line(
            f"{run.mode}: {what} {run.submission.name} on {len(cases)} cases"
            " (unofficial: the contest's own run decides)"
        )
        if run.device == "gfx950":
            line("Kernels are compiled for gfx950; the emulator executes their machine code, on reduced shapes:")
            line("  " + ", ".join(case.shape for case in cases) + " (batch x tokens)")
        if run.device == "cpu":
            line(
                "No GPU is used: Triton kernels run in its interpreter"
                + (", on reduced shapes:" if run.reduced else ":")
            )
            line("  " + ", ".join(case.shape for case in cases) + " (batch x tokens)")
            if run.reduced:
                line("  derived from task.yml: log2 of the batch, a 32nd of the tokens plus one")
            if run.also_emulated:
                line("Then the gfx950 code of the same kernels runs in the emulator (--device cpu leaves that out).")
            if run.not_emulated:
                line(f"Their gfx950 code is not run: {run.not_emulated}")
            if run.mode in ("benchmark", "leaderboard"):
                line("Nothing can be timed without a GPU, so the outputs are checked and no time is shown.")
                line("What gfx950 code is predicted to cost comes from `python eval.py inspect`.")
        for text in header_lines(run.device, run.tolerance):
            line(text)
        line()

    def case_started(self, index: int, case: Case) -> None:
        self.case_began = time.monotonic()
        self.label = f"[{index + 1}/{len(self.cases)}] {case.shape}"
        self.progress("starting a worker, importing the file")

    def tick(self) -> None:
        if self.screen.terminal and time.monotonic() - self.shown_at > 1.0:
            self.progress(self.doing)

    def progress(self, text: str) -> None:
        self.doing = text
        now = self.shown_at = time.monotonic()
        expected = ""
        total = sum(case.tokens for case in self.cases)
        # Small cases say nothing about large ones: their time is that of starting and compiling.
        if self.done_tokens > total / 5:
            ahead = total - self.done_tokens
            left_s = (self.case_began - self.began) * ahead / self.done_tokens - (now - self.case_began)
            expected = f", about {max(1.0, left_s):.0f} s to go"
        self.screen.transient(f"{self.label}: {text} ({now - self.began:.0f} s{expected})")

    def case_done(self, index: int, result: CaseResult) -> None:
        self.done_tokens += self.cases[index].tokens
        if result.kind == "unused" and self.run is not None and self.run.optional:
            self.screen.line(f"{self.label}: {result.message}")
            return
        verdict = "pass" if result.passed else "FAIL"
        text = f"{self.label}: {verdict}"
        if result.stats is not None and result.passed:
            text += (
                f"  {microseconds(result.stats.mean)} us +- {microseconds(result.stats.err)} ({result.stats.runs} runs)"
            )
        if result.passed and result.worst_rel_l2 is not None:
            text += f"  worst relative L2 {result.worst_rel_l2:.1e}, cache {result.cache}"
        text += f"  in {result.elapsed_s:.1f} s"
        self.screen.line(text, style="" if result.passed else "red")
        if not result.passed:
            self.screen.line(wrap(result.message, self.screen.width, "    "))
        if self.explain:
            self._explain(result)

    def _explain(self, result: CaseResult) -> None:
        if result.pick:
            for candidate in result.pick.get("candidates") or []:
                self.screen.line("    " + shorten(_candidate_line(candidate), self.screen.width - 4))
        for text in result.printed.splitlines()[-12:]:
            self.screen.line("    | " + shorten(text, self.screen.width - 6))

    def finish(self, run: Run, results: list[CaseResult], code: int) -> None:
        if not results:
            return
        self.screen.line()
        if run.mode in ("benchmark", "leaderboard") and run.device == "cuda":
            self._times(results)
        elif run.mode == "profile":
            for result in results:
                self.screen.line(f"{result.shape}:\n{result.report or '(none)'}")
        else:
            self._checks(results)
        passed = sum(result.passed for result in results)
        self.screen.line()
        self.screen.line(f"{passed} of {len(results)} cases pass, in {time.monotonic() - self.began:.0f} s")
        if run.device == "cpu" and run.mode in ("benchmark", "leaderboard"):
            self.screen.line("No time is shown: this machine has no GPU to time on.")
        if code != EXIT_PASS:
            self.screen.line(
                f"next: `python eval.py audit --submission {run.submission.name}` tells what kind of error it is"
            )

    def _checks(self, results: list[CaseResult]) -> None:
        columns = ["shape", "result", "contest", "worst rel. L2", "cache/q", "first call s", "backend"]
        rows = []
        for r in results:
            contest = "-" if r.contest_passed is None else "pass" if r.contest_passed else "FAIL"
            worst = "-" if r.worst_rel_l2 is None else f"{r.worst_rel_l2:.2e}"
            result = "pass" if r.passed else "FAIL"
            rows.append([r.shape, result, contest, worst, r.cache or "-", seconds(r.first_call_s), backend(r.pick)])
        self.screen.table(columns, rows, {3, 5})
        self._plans(results)

    def _plans(self, results: list[CaseResult]) -> None:
        for r in results:
            if r.pick and r.pick.get("plan") not in (None, ""):
                self.screen.line(shorten(f"  {r.shape} plan: {r.pick['plan']}", self.screen.width))
        dropped: dict[str, list[str]] = {}
        for r in results:
            for candidate in (r.pick or {}).get("candidates") or []:
                if isinstance(candidate, dict) and candidate.get("dropped"):
                    reason = f"{candidate.get('backend')}: {candidate['dropped']}"
                    dropped.setdefault(reason, []).append(r.shape)
        for reason, shapes in dropped.items():
            text = f"the pick dropped {len(shapes)} candidates ({', '.join(dict.fromkeys(shapes))}), {reason}"
            self.screen.line(wrap(shorten(text, 400), self.screen.width, "  "), style="yellow")

    def _times(self, results: list[CaseResult]) -> None:
        columns = ["shape", "mean us", "+-", "best", "runs", "GB/s", "% of card", "x fallback", "compile s", "pick s"]
        if self.compare is not None:
            columns.append("vs old")
        columns.append("backend")
        rows = []
        for r in results:
            if r.stats is None or not r.passed:
                rows.append([r.shape, "FAIL"] + ["-"] * (len(columns) - 3) + [shorten(r.message, 40)])
                continue
            share = "-" if r.limit_share is None else f"{100 * r.limit_share:.0f}"
            row = [r.shape, microseconds(r.stats.mean), microseconds(r.stats.err), microseconds(r.stats.best)]
            row += [str(r.stats.runs), f"{r.gb_per_s:.0f}", share, over_fallback(r)]
            row += [pick_seconds(r, "compile_s"), pick_seconds(r, "pick_s")]
            if self.compare is not None:
                row.append(compared(self.compare, r))
            rows.append([*row, backend(r.pick)])
        self.screen.table(columns, rows, set(range(1, len(columns) - 1)))
        self._plans(results)
        means = [r.stats.mean for r in results if r.stats is not None and r.passed]
        if means and len(means) == len(results):
            self.screen.line(f"geometric mean: {geometric_mean(means) / 1e3:.2f} us", style="bold")
        else:
            self.screen.line("geometric mean: none, a case failed")
        self.screen.line("mean +- its standard error; GB/s counts one reading of the MXFP4 cache, q and the output")
        self.screen.line("x fallback, compile and pick seconds: as the submission's own last_pick() reports them")


def _candidate_line(candidate: Any) -> str:
    if isinstance(candidate, dict):
        return ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in candidate.items())
    return str(candidate)


def backend(pick: dict[str, Any] | None) -> str:
    """The backend that the file's own `last_pick()` names."""
    return shorten(str(pick.get("backend", "-")), 24) if pick else "-"


def pick_seconds(result: CaseResult, key: str) -> str:
    """Seconds of compiling ("compile_s") or picking ("pick_s"), as the file reports them."""
    value = (result.pick or {}).get(key)
    return f"{value:.1f}" if isinstance(value, int | float) and math.isfinite(value) else "-"


def over_fallback(result: CaseResult) -> str:
    """How many times faster than the fallback, where the file's pick timed both."""
    pick = result.pick or {}
    times: dict[bool, float] = {}
    for candidate in pick.get("candidates") or []:
        if not isinstance(candidate, dict) or candidate.get("dropped") is not None:
            continue
        value = candidate.get("time_us")
        if not isinstance(value, int | float) or not value > 0:
            continue
        if candidate.get("backend") in FALLBACKS:
            times.setdefault(True, value)
        if (candidate.get("backend"), candidate.get("plan")) == (pick.get("backend"), pick.get("plan")):
            times[False] = value
    return f"{times[True] / times[False]:.2f}" if len(times) == 2 else "-"


def compared(old: dict[str, Any], result: CaseResult) -> str:
    """Ratio to an earlier run of the same case, with the band that both errors span."""
    for case in old.get("cases", []):
        stats = case.get("stats")
        if case.get("spec") == result.spec and stats and result.stats is not None:
            ratio = result.stats.mean / stats["mean"]
            band = 2 * ((result.stats.err / result.stats.mean) ** 2 + (stats["err"] / stats["mean"]) ** 2) ** 0.5
            mark = "" if abs(ratio - 1) > band else " ="
            return f"{ratio:.3f}+-{band:.3f}{mark}"
    return "-"


def make_reporter(options: argparse.Namespace) -> PersonReporter:
    """The reporter for these options. Raises SpecError when --compare cannot be read."""
    old = read_comparison(options.compare) if options.compare else None
    return PersonReporter(Screen(), options.explain, old)


def read_comparison(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SpecError(f"--compare: {path}: {reason}; expected a file that --json wrote") from error
    if not isinstance(document, dict) or not isinstance(document.get("cases"), list):
        raise SpecError(f"--compare: {path}: expected a file that --json wrote")
    return document
