"""Check and time a submission: `python eval.py MODE [CASES] [--submission FILE] [--device auto|cuda|cpu]`.

With POPCORN_FD in the environment it speaks the contest's protocol, without it it prints for a person.

    this process                                    worker, one per case (evalkit/worker.py)
    seeds, cases, reference values, checks,  -->    imports the submission, calls it, times it on a GPU
    verdicts, the result pipe, exit codes    <--    output bytes through a memory file, never a verdict

A case passes when the contest's own check passes and every (sequence, head) row is close to honest attention over one
of the three caches (`Judge`). Whatever the worker does, the run goes on with the next case.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import importlib.util
import math
import os
import re
import signal
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import NoReturn


def _interrupted_early(number: int, frame: object) -> None:
    """Nothing runs yet, and imports would answer an interruption with a traceback."""
    os.write(2, b"eval.py: interrupted; nothing was left running\n")
    os._exit(130)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, _interrupted_early)
HERE = Path(__file__).resolve().parent
if importlib.util.find_spec("torch") is None:
    sys.exit("eval.py: torch is missing; `sh do.sh run` sets up what this machine lacks")
if not (HERE / "evalkit").is_dir():
    # The contest's server lays all files of task.yml out in one folder: that folder is the package then.
    sys.modules["evalkit"] = types.ModuleType("evalkit")
    sys.modules["evalkit"].__path__ = [str(HERE)]

from evalkit.cases import SpecError, manifest_cases, parse_cases, reduced_case  # noqa: E402
from evalkit.judge import STRICT_REL_L2  # noqa: E402
from evalkit.protocol import (  # noqa: E402
    EXIT_CHECK,
    EXIT_DEVICE,
    EXIT_PASS,
    EXIT_PIPE,
    EXIT_SPEC,
    EXIT_USAGE,
    ResultPipe,
    log_results,
)
from evalkit.running import FIRST_CALL_LIMIT_S, CaseResult, Reporter, Run, exit_code  # noqa: E402
from evalkit.supervisor import Nursery, hide_from_workers  # noqa: E402

MODES = ("test", "benchmark", "leaderboard", "profile")
EXTRA_MODES = ("audit", "inspect")
SUBMISSION = HERE / "submission.py"
DEVICES = ("auto", "cuda", "cpu", "gfx950")
# On a CPU, inputs with more tokens than this are worth several threads.
MANY_TOKENS = 1 << 16


def hide_command_line(names: tuple[str, ...] = ("POPCORN_SEED", "POPCORN_FD")) -> None:
    """Blank this process's arguments and secret variables in the memory that /proc shows to the worker.

    A submission that looks at its parent's command line must not learn the mode; the environment block of a process
    keeps its first content for as long as nobody writes over it.
    """
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        # Fields 48 to 51 of proc(5), counted from the state, which is field 3.
        arg_start, arg_end, env_start, env_end = (int(fields[n - 3]) for n in (48, 49, 50, 51))
    except (OSError, ValueError, IndexError):
        return
    if 0 < arg_start < arg_end:
        words = ctypes.string_at(arg_start, arg_end - arg_start).split(b"\0")
        # The interpreter and the script stay: they are what `ps` is good for.
        kept = len(b"\0".join(words[:2])) + 1
        if kept < arg_end - arg_start:
            ctypes.memset(arg_start + kept, 0, arg_end - arg_start - kept)
    if 0 < env_start < env_end:
        block = ctypes.string_at(env_start, env_end - env_start)
        for name in names:
            for found in re.finditer(rb"(?:^|\0)" + name.encode() + rb"=([^\0]*)", block):
                ctypes.memset(env_start + found.start(1), ord("0"), found.end(1) - found.start(1))


EPILOG = """\
modes, each with a help of its own (eval.py test --help):
  test         is it right? every case of task.yml, or of CASES
  benchmark    how fast is it? one input per case, timed in the contest's order
  leaderboard  the same with fresh inputs each run, as the ranking is made
  profile      where does the time go? torch's profiler, one call per case
  audit        does it honestly compute attention over the whole cache?
  inspect      gfx950 code of the kernels, without the card

CASES: one case a line, `batchsize: 4; qseqlen: 1; kvseqlen: 1024; seed: 4217`.
exit: 0 pass, 2 usage, 110 device failure, 111 result pipe, 112 check failed, 113 bad case, 114 time limit.
"""


# What `eval.py MODE --help` says beside the options: what the mode does, and what comes next.
MODE_HELP = {
    "test": """\
Is the submission right? Every case of task.yml (or of CASES) runs once in a process of its own.
The output must pass the contest's check and be close to honest attention over one of the three
caches, per sequence and head.
On a CPU: Triton kernels in its interpreter on reduced shapes, then their gfx950 code in the
emulator.""",
    "benchmark": """\
How fast is it? One input per ranked shape, timed in the contest's order with a cold cache; all
outputs are checked.
--json FILE keeps the times, --compare FILE shows ratios to them, --plot FILE draws them.
On a CPU nothing can be timed: the outputs are checked and the prediction of `inspect` is shown.""",
    "leaderboard": """\
How fast is it, with fresh inputs in every run, as the ranking is made? Otherwise like benchmark.""",
    "profile": """\
Where does the time go? One call of every ranked shape under torch's profiler.""",
    "audit": """\
Does the submission honestly compute attention over the whole cache? Adversarial inputs, replay,
late and shared outputs, many calls, other shapes, on a GPU the clocks: a table of checks with their
evidence, then HONEST or REFUSED.
exit: 0 honest, 112 refused, 2 the file cannot be loaded.""",
    "inspect": """\
What does the machine code of the ranked plans cost? gfx950 code is executed in an emulator, priced
by unit, and a time is predicted. --plot FILE draws the cycle budget; --arch sm_90 shows the
assembler's figures for the portable kernel.""",
}
NEXT_MODE = {
    "test": "next: `python eval.py audit`, then `benchmark` on a GPU",
    "benchmark": "next: `python eval.py leaderboard`",
    "leaderboard": "next: `sh do.sh submit-check`, then upload (README.md)",
    "profile": "next: `python eval.py benchmark --explain` shows what the submission's picker tried",
    "audit": "next: `python -m evalkit.lint FILE` shows what the contest's server refuses",
    "inspect": "next: docs/gfx950.md tells how to read the figures",
}


class Parser(argparse.ArgumentParser):
    """Says in an error what to do next."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"eval.py: {message}\nnext: `python eval.py --help` lists modes and options\n")


def positive(text: str) -> float:
    value = float(text)
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"expected a finite number above 0, got {text}")
    return value


def build_parser(mode: str | None = None) -> argparse.ArgumentParser:
    """The parser; with a mode its help is about that one."""
    parser = Parser(
        prog="eval.py",
        description=MODE_HELP[mode]
        if mode
        else "Check and time a submission; without a GPU in Triton's interpreter, on reduced shapes.",
        epilog=NEXT_MODE[mode] if mode else EPILOG,
        usage=f"eval.py {mode or 'MODE'} [CASES] [options]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("mode", choices=(*MODES, *EXTRA_MODES), help="what to do, see below")
    parser.add_argument("cases", nargs="?", type=Path, help="file with cases (default: those of task.yml)")
    parser.add_argument("--submission", type=Path, default=SUBMISSION, help="default: submission.py")
    parser.add_argument("--device", choices=DEVICES, default="auto", help="default: a GPU if there is one")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything to FILE too")
    parser.add_argument("--seed", type=int, help="work this number into every seed (default: POPCORN_SEED, if set)")
    parser.add_argument(
        "--tolerance", type=positive, default=STRICT_REL_L2, help=f"of the strict check (default: {STRICT_REL_L2})"
    )
    limits = ", ".join(f"{seconds:.0f} on {device}" for device, seconds in FIRST_CALL_LIMIT_S.items())
    parser.add_argument(
        "--timeout", type=positive, metavar="S", help=f"limit of a case's first call in seconds (default: {limits})"
    )
    parser.add_argument(
        "--compare", type=Path, metavar="OLD.json", help="compare the times with an earlier --json file"
    )
    parser.add_argument("--arch", choices=("gfx950", "sm_90"), default="gfx950", help="of inspect (default: gfx950)")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw times or, of inspect, cycles (.png, .svg, .html)"
    )
    parser.add_argument(
        "--explain", action="store_true", help="show what the submission's picker tried, and what it printed"
    )
    return parser


def fail(code: int, message: str) -> int:
    print(f"eval.py: {message}", file=sys.stderr)
    return code


def choose_device(wanted: str) -> str | None:
    """The device to use, never "auto"; None when a GPU is asked for and there is none."""
    import torch

    if wanted in ("cpu", "gfx950"):
        return wanted
    if torch.cuda.is_available():
        return "cuda"
    return None if wanted == "cuda" else "cpu"


def emulator_missing() -> str | None:
    """What the gfx950 emulator lacks on this machine, and how to get it; None when it can run."""
    if not (HERE / "gfx950").is_dir():
        return "the gfx950 package is not beside eval.py"
    for name, package in (("triton", "triton==3.6.0"), ("tinygrad", "tinygrad==0.14.0")):
        if importlib.util.find_spec(name) is None:
            how = f"pip install {package}"
            if name == "tinygrad" and sys.version_info < (3, 11):
                how = f"{package}, which needs Python 3.11; this is {sys.version.split()[0]}"
            return f"the gfx950 emulator needs {name}: {how}"
    return None


def output_problem(options: argparse.Namespace) -> str | None:
    """Why what is asked for beside the verdict cannot be given, said before the work and not after it; or None."""
    for name, path in (("--json", options.json), ("--plot", options.plot)):
        if path is not None and (path.is_dir() or not os.access(path.resolve().parent, os.W_OK)):
            return f"{name}: {path}: expected a file in a folder that exists and can be written to"
    timed = ("benchmark", "leaderboard")
    if options.compare is not None and options.mode not in timed:
        return f"--compare: goes with {' and '.join(timed)}, which have times; this is {options.mode}"
    if options.plot is None:
        return None
    if options.mode not in (*timed, "inspect"):
        return f"--plot: goes with {', '.join(timed)} and inspect, which have something to draw; this is {options.mode}"
    from evalkit import plot

    try:
        plot.check_name(options.plot)
    except ValueError as error:
        return f"--{error}"
    if importlib.util.find_spec("matplotlib") is None:
        return "--plot needs matplotlib: pip install matplotlib"
    return None


def torch_threads(count: int) -> None:
    import torch

    torch.set_num_threads(count)


def open_pipe() -> ResultPipe | None:
    """The contest's result pipe when POPCORN_FD names one. Raises OSError or ValueError when it cannot be used."""
    text = os.environ.pop("POPCORN_FD", None)
    return ResultPipe(int(text)) if text else None


def _interrupted(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def main(argv: list[str] | None = None, nursery: Nursery | None = None) -> int:
    """Run one mode; returns the exit code.

    Args:
        argv: arguments; those of this process by default, which then also hides them and answers signals.
        nursery: one to start workers from, when the caller runs several evaluations.
    """
    words = sys.argv[1:] if argv is None else argv
    options = build_parser(next((word for word in words if word in MODE_HELP), None)).parse_args(words)
    if argv is None:
        hide_command_line()
        hide_from_workers()
        signal.signal(signal.SIGTERM, _interrupted)
        signal.signal(signal.SIGINT, signal.default_int_handler)
    pipe: ResultPipe | None = None
    code = EXIT_CHECK
    try:
        pipe = open_pipe()
    except (OSError, ValueError) as error:
        return fail(EXIT_PIPE, f"POPCORN_FD does not name an open descriptor: {error}")
    try:
        code = _run_mode(options, pipe, nursery, own_process=argv is None)
    except SpecError as error:
        code = fail(EXIT_SPEC, str(error))
    except BrokenPipeError:
        # Whoever read the output has seen enough; nothing may complain when the interpreter closes it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        code = fail(130, "interrupted; nothing was left running")
    finally:
        if pipe is not None:
            if not any(key == "check" for key, _, _ in pipe.entries):
                pipe.log("check", "fail")
            try:
                pipe.flush()
            except OSError as error:
                code = fail(EXIT_PIPE, f"the result pipe cannot be written: {error}")
    return code


def _run_mode(
    options: argparse.Namespace, pipe: ResultPipe | None, nursery: Nursery | None, own_process: bool = False
) -> int:
    seed_text = os.environ.pop("POPCORN_SEED", None)
    secret = options.seed
    if secret is None and seed_text:
        try:
            secret = int(seed_text)
        except ValueError:
            raise SpecError(f"POPCORN_SEED: expected an integer, got {seed_text!r}") from None
    if not options.submission.is_file():
        return fail(EXIT_USAGE, f"--submission: no file {options.submission}; give the path of a submission")
    problem = output_problem(options)
    if problem is not None:
        return fail(EXIT_USAGE, problem)
    submission = options.submission.resolve()
    device = choose_device(options.device)
    if device is None:
        return fail(EXIT_DEVICE, "no GPU that this torch can use; --device cpu checks the file in the interpreter")
    if str(HERE) not in sys.path:
        sys.path.insert(0, str(HERE))
    if device == "gfx950":
        missing = emulator_missing()
        if missing is not None:
            return fail(EXIT_DEVICE, missing)
        if options.mode not in ("test", "inspect"):
            return fail(EXIT_USAGE, f"{options.mode}: the emulator has no clock; --device gfx950 goes with `test`")
    if device != "cuda":
        # The reduced shapes are too small for more, and spinning threads of two processes are in each other's way.
        torch_threads(1)
    if options.mode == "audit":
        from evalkit import audit

        return audit.main(options, device, submission, secret, pipe, nursery, own_process)
    if options.json is not None or options.plot is not None:
        # Loaded before a submission runs, which could write to the file.
        from evalkit import report  # noqa: F401

    if options.mode == "inspect":
        code = _inspect(options)
        if pipe is not None:
            pipe.log("check", "pass" if code == EXIT_PASS else "fail")
        return code

    if options.cases is not None:
        try:
            text = options.cases.read_text()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise SpecError(
                f"{options.cases}: {reason}; expected a file of cases, see `python eval.py --help`"
            ) from error
        cases = parse_cases(text, options.cases.name)
    else:
        cases = manifest_cases("tests" if options.mode == "test" else "benchmarks")
    reduced = device != "cuda" and options.cases is None
    if reduced:
        cases = [reduced_case(case) for case in cases]
    elif device != "cuda" and max(case.tokens for case in cases) > MANY_TOKENS:
        torch_threads(os.cpu_count() or 1)

    reporter = Reporter()
    if pipe is None:
        from evalkit import person

        reporter = person.make_reporter(options)
    elif device == "cpu" and options.mode in ("benchmark", "leaderboard"):
        pipe.log("check", "fail")
        return fail(
            EXIT_DEVICE, f"{options.mode}: there is no GPU here, so nothing can be timed; `test` works on a CPU"
        )
    run = Run(
        options.mode,
        submission,
        device,
        secret,
        reduced,
        tolerance=options.tolerance,
        timeout_s=options.timeout,
        reporter=reporter,
        shared_nursery=nursery,
        own_process=own_process,
    )
    # What a person asks for without further ado on a machine without a GPU: the interpreter, then the gfx950 code.
    if pipe is None and reduced and (options.mode, options.device) == ("test", "auto"):
        run.not_emulated = emulator_missing() or ""
        run.also_emulated = not run.not_emulated
    results, code = run.all_cases(cases)
    if pipe is not None:
        log_results(pipe, options.mode, results, code)
    reporter.finish(run, results, code)
    if run.also_emulated:
        emulated = replace(run, device="gfx950", shared_nursery=None, also_emulated=False, optional=True)
        more, emulated_code = emulated.all_cases(cases)
        emulated.reporter.finish(emulated, more, emulated_code)
        results += more
        code = exit_code(results)
    write_files(options, run, results, code)
    if pipe is None and device == "cpu" and reduced and options.mode in ("benchmark", "leaderboard"):
        show_prediction(options)
    return code


def write_files(options: argparse.Namespace, run: Run, results: list[CaseResult], code: int) -> None:
    """The JSON file and the picture, where they are asked for."""
    if options.json is not None or options.plot is not None:
        from evalkit.report import report_document, write_json

        document = report_document(run, results, code)
        if options.json is not None:
            write_json(options.json, document)
        if options.plot is not None:
            from evalkit import plot

            try:
                plot.save(document, options.plot)
            except ValueError as error:
                print(f"eval.py: {error}", file=sys.stderr)


def show_prediction(options: argparse.Namespace) -> None:
    """In place of times that nothing here can measure: what `inspect` predicts for the file beside this one."""
    missing = emulator_missing()
    if options.submission.resolve() != SUBMISSION:
        print("No prediction: `python eval.py inspect` knows the plans of the submission.py beside it only.")
        return
    if missing is not None:
        print(f"No prediction by `python eval.py inspect`: {missing}")
        return
    print("\nPREDICTION, not a measurement, from `python eval.py inspect`:", flush=True)
    done = subprocess.run(
        [sys.executable, str(HERE / "eval.py"), "inspect"], stderr=subprocess.PIPE, text=True, check=False
    )
    if done.returncode not in (0, EXIT_CHECK):
        print(f"none: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}")


def _inspect(options: argparse.Namespace) -> int:
    missing = emulator_missing()
    if missing is not None:
        return fail(EXIT_DEVICE, missing)
    return int(importlib.import_module("gfx950.inspect").main(options))


if __name__ == "__main__":
    sys.exit(main())
