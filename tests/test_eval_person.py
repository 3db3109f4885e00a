"""What a person sees: 100 columns, plain when piped, nothing that moves a terminal's cursor."""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import eval as harness  # noqa: E402
from evalkit import person  # noqa: E402
from evalkit.cases import Case, SpecError  # noqa: E402
from evalkit.running import CaseResult, Run, exit_code  # noqa: E402
from evalkit.timing import Stats  # noqa: E402

PICK = {
    "backend": "triton",
    "plan": "Plan(block_n=64, num_splits=16)",
    "compile_s": 3.21,
    "pick_s": 7.5,
    "candidates": [
        {"backend": "torch", "plan": "float32", "time_us": 90.0, "dropped": None},
        {"backend": "triton", "plan": "Plan(block_n=64, num_splits=16)", "time_us": 30.0, "dropped": None},
        {"backend": "triton", "plan": "bad", "time_us": 1.0, "dropped": "wrong"},
    ],
}


def timed_result(mean_ns: float, **changes) -> CaseResult:
    stats = Stats(100, mean_ns, 50.0, 5.0, mean_ns - 100, mean_ns + 100)
    values = {"stats": stats, "gb_per_s": 3000.0, "limit_share": 0.6, "pick": PICK, "passed": True}
    return CaseResult("batchsize: 4; seed: 1", "4x1024", **(values | changes))


def show(results, old=None, mode="benchmark", device="cuda", explain=False) -> str:
    out = io.StringIO()
    reporter = person.PersonReporter(person.Screen(out), explain, old)
    run = Run(mode, Path("submission.py"), device, None, False)
    reporter.run = run
    for i, result in enumerate(results):
        reporter.cases = [Case(r.spec, {"batchsize": 4, "kvseqlen": 1024}) for r in results]
        reporter.label = f"[{i + 1}/{len(results)}] {result.shape}"
        reporter.case_done(i, result)
    reporter.finish(run, results, exit_code(results))
    return out.getvalue()


def test_benchmark_table_has_everything_in_100_columns():
    text = show([timed_result(30_000.0), timed_result(120_000.0)])
    assert max(map(len, text.splitlines())) <= 100
    assert "geometric mean: 60.00 us" in text
    row = next(line for line in text.splitlines() if line.startswith("4x1024") and "3.00" in line)
    assert row.split()[:10] == ["4x1024", "30.0", "0.0", "29.9", "100", "3000", "60", "3.00", "3.2", "7.5"]
    assert "Plan(block_n=64, num_splits=16)" in text


def test_a_failed_case_has_no_mean():
    failed = CaseResult("x", "4x8192", message="worst relative L2 0.7 " * 20)
    text = show([timed_result(30_000.0), failed])
    assert "geometric mean: none" in text
    assert "next: `python eval.py audit" in text
    assert max(map(len, text.splitlines())) <= 100


def test_comparison_shows_the_ratio_with_its_band():
    old = {"cases": [{"spec": "batchsize: 4; seed: 1", "stats": asdict(timed_result(60_000.0).stats)}]}
    assert person.compared(old, timed_result(30_000.0)) == "0.500+-0.000"
    assert person.compared(old, timed_result(60_001.0)).endswith("=")
    assert person.compared({"cases": []}, timed_result(1.0)) == "-"
    assert "vs old" in show([timed_result(30_000.0)], old)


def test_comparison_file_must_be_one_of_ours(tmp_path):
    path = tmp_path / "old.json"
    for content in ("{", "[]", "{}"):
        path.write_text(content)
        with pytest.raises(SpecError, match="expected a file that --json wrote"):
            person.read_comparison(path)
    path.write_text(json.dumps({"cases": []}))
    assert person.make_reporter(argparse.Namespace(compare=path, explain=False)).compare == {"cases": []}


def test_fallback_ratio_needs_both_times():
    assert person.over_fallback(timed_result(1.0)) == "3.00"
    assert person.over_fallback(timed_result(1.0, pick=None)) == "-"
    assert person.over_fallback(timed_result(1.0, pick={"candidates": ["nonsense", {"time_us": "x"}]})) == "-"


def test_explain_lists_candidates_and_what_was_printed():
    text = show([timed_result(30_000.0, printed="one\ntwo")], explain=True)
    assert "dropped wrong" in text
    assert "| two" in text


def test_text_of_a_submission_cannot_move_the_cursor():
    text = show([CaseResult("x", "4x1", message="\x1b[2J\rpass \u2028")])
    assert "\x1b" not in text
    assert "\r" not in text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_shows_on_a_terminal_only():
    plain, terminal = io.StringIO(), Terminal()
    for out in (plain, terminal):
        screen = person.Screen(out)
        screen.transient("working")
        screen.line("done")
    assert plain.getvalue() == "done\n"
    assert "working" in terminal.getvalue()
    assert "done" in terminal.getvalue()


def test_progress_moves_while_a_worker_is_waited_for(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(person.time, "monotonic", lambda: clock[0])
    out = Terminal()
    reporter = person.PersonReporter(person.Screen(out), False, None)
    cases = [Case("a", {"batchsize": 4, "kvseqlen": 100}), Case("b", {"batchsize": 4, "kvseqlen": 300})]
    run = Run("test", Path("submission.py"), "cpu", None, True)
    for _ in range(2):
        reporter.start(run, cases)
        reporter.case_started(0, cases[0])
        # A second run in the same process knows nothing of the first one's speed.
        assert "to go" not in out.getvalue().rsplit("[1/2]", 1)[1]
        clock[0] += 10
        reporter.case_done(0, CaseResult("a", "4x100", passed=True))
        reporter.case_started(1, cases[1])
        assert "about 30 s to go" in out.getvalue().rsplit("[2/2]", 1)[1]
        reporter.tick()
        clock[0] += 12
        reporter.tick()
        assert "(22 s, about 18 s to go)" in out.getvalue().rsplit("[2/2]", 1)[1]
        clock[0] += 50
        reporter.tick()
        assert "about 1 s to go" in out.getvalue().rsplit("[2/2]", 1)[1]
        reporter.case_done(1, CaseResult("b", "4x300", passed=True))


def test_tables_wrap_their_last_column():
    out = io.StringIO()
    person.Screen(out).table(["check", "evidence"], [["short", "word " * 60]], set())
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 100
    assert len(lines) > 3


def test_limits_that_would_pass_everything_are_refused(capsys):
    for option in ("--tolerance", "--timeout"):
        for value in ("nan", "0", "-1", "inf"):
            with pytest.raises(SystemExit) as ended:
                harness.main(["test", option, value, "--device", "cpu"])
            assert ended.value.code == 2
            message = capsys.readouterr().err
            assert f"{option}: expected a finite number above 0, got {value}" in message
            assert "next: `python eval.py --help`" in message


@pytest.mark.parametrize("mode", (*harness.MODES, *harness.EXTRA_MODES))
def test_every_mode_has_a_help_that_names_the_next_step(mode, capsys):
    with pytest.raises(SystemExit) as ended:
        harness.main([mode, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: eval.py {mode} ")
    assert harness.MODE_HELP[mode] in text
    assert "next: " in text


def test_ctrl_c_during_the_imports_is_no_traceback():
    command = [sys.executable, "-X", "importtime", str(ROOT / "eval.py"), "test", "--device", "cpu"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        # One of the first modules behind the standard library: the imports of eval.py itself have begun.
        if line.rstrip().endswith(" torch._utils_internal") or len(lines) > 2000:
            break
    process.send_signal(signal.SIGINT)
    rest = process.stderr.read()
    process.wait(timeout=60)
    assert process.returncode == 130
    assert "eval.py: interrupted; nothing was left running" in rest
    assert "Traceback" not in rest


@pytest.mark.parametrize(("code", "check"), [(0, "pass"), (112, "fail")])
def test_inspect_writes_the_verdict_that_its_exit_code_has(code, check, monkeypatch):
    monkeypatch.setattr(harness, "_inspect", lambda options: code)
    read, write = os.pipe()
    monkeypatch.setenv("POPCORN_FD", str(write))
    assert harness.main(["inspect", "--device", "cpu"]) == code
    os.close(write)
    with os.fdopen(read) as pipe:
        assert pipe.read() == f"check: {check}\n"


def test_what_is_wider_than_the_screen_is_not_broken_up(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    out = Terminal()
    person.Screen(out).line("word " * 40)
    assert len([line for line in out.getvalue().splitlines() if line.strip()]) == 1


def test_without_the_emulator_both_modes_say_what_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(harness, "emulator_missing", lambda: "the gfx950 emulator needs tinygrad: pip install tinygrad")
    monkeypatch.setattr(harness.Run, "all_cases", lambda self, cases: (self.reporter.start(self, cases), ([], 0))[1])
    monkeypatch.setattr(harness, "choose_device", lambda wanted: "cpu")
    for mode in ("test", "benchmark"):
        assert harness.main([mode]) == 0
    first, second = capsys.readouterr().out.split("benchmark: ")
    assert "Their gfx950 code is not run: the gfx950 emulator needs tinygrad" in first
    assert "No prediction by `python eval.py inspect`: the gfx950 emulator needs tinygrad" in second


def test_another_file_gets_no_prediction_that_is_not_its_own(monkeypatch, capsys, tmp_path):
    other = tmp_path / "other.py"
    other.write_text("")
    monkeypatch.setattr(harness.Run, "all_cases", lambda self, cases: ([], 0))
    assert harness.main(["benchmark", "--device", "cpu", "--submission", str(other)]) == 0
    assert "knows the plans of the submission.py beside it only" in capsys.readouterr().out


@pytest.mark.parametrize(("python", "how"), [((3, 10), "which needs Python 3.11"), ((3, 11), "pip install tinygrad")])
def test_a_python_that_the_decoder_does_not_support_is_not_sent_to_install_it(monkeypatch, capsys, python, how):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tinygrad" else find_spec(name))
    monkeypatch.setattr(sys, "version_info", python)
    assert harness.main(["inspect"]) == harness.main(["test", "--device", "gfx950"]) == harness.EXIT_DEVICE
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2
    assert all("the gfx950 emulator needs tinygrad" in line and how in line for line in told)
