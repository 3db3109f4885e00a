"""The contest's side of eval.py: cases, seeds, escaping, the pipe, exit codes."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
GALLERY = ROOT / "tests" / "gallery"
sys.path.insert(0, str(ROOT))

import eval as harness  # noqa: E402
from evalkit import supervisor  # noqa: E402
from evalkit.cases import SpecError, _value, combine_seeds, hidden_seed, manifest_cases, parse_cases, reduced_case  # noqa: E402
from evalkit.protocol import EXIT_CHECK, MESSAGE_CHARS, PIPE_BYTES, ResultPipe, escape, log_results  # noqa: E402
from evalkit.running import CaseResult  # noqa: E402
from evalkit.supervisor import Nursery, _children  # noqa: E402
from evalkit.timing import calculate_stats, enough_runs, paper_bandwidth, time_error  # noqa: E402

SMALL = "batchsize: 2; qseqlen: 1; kvseqlen: 33; seed: 7\nbatchsize: 3; qseqlen: 1; kvseqlen: 40; seed: 8\n"


def parse_like_server(text: str) -> dict[str, str]:
    result = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key or value:
            result[key.strip()] = value.strip()
    return result


def run_eval(*arguments: str, pipe: bool = False, env: dict[str, str] | None = None, timeout: float = 60):
    """Run the evaluator as its own process, with a result pipe as the contest's server gives it on request."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("POPCORN_")} | (env or {})
    command = [sys.executable, str(ROOT / "eval.py"), *arguments, "--device", "cpu"]
    if not pipe:
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=timeout, check=False
        ), {}
    read, write = os.pipe()
    environment["POPCORN_FD"] = str(write)
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=timeout, pass_fds=[write], check=False
    )
    os.close(write)
    with os.fdopen(read) as file:
        text = file.read()
    assert len(text.encode()) < 64 << 10
    return done, parse_like_server(text)


@pytest.fixture
def cases_file(tmp_path):
    path = tmp_path / "cases.txt"
    path.write_text(SMALL)
    return str(path)


@pytest.fixture(scope="module")
def nursery():
    shared = Nursery("cpu")
    yield shared
    shared.close()


def run_here(arguments, nursery, monkeypatch):
    """Run the evaluator in this process with a pipe: (exit code, parsed results)."""
    read, write = os.pipe()
    monkeypatch.setenv("POPCORN_FD", str(write))
    code = harness.main([*arguments, "--device", "cpu"], nursery)
    os.close(write)
    with os.fdopen(read, "rb") as file:
        data = file.read()
    assert len(data) < 64 << 10
    return code, parse_like_server(data.decode())


# -- cases


def test_manifest_cases_match_a_yaml_reader():
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: the manifest's second reader is missing")
    manifest = yaml.safe_load((ROOT / "task.yml").read_text())
    for section in ("tests", "benchmarks"):
        assert [case.args for case in manifest_cases(section)] == manifest[section]


def test_manifest_has_only_keys_the_server_knows():
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: the manifest cannot be read")
    manifest = yaml.safe_load((ROOT / "task.yml").read_text())
    known = "lang files config libraries tests benchmarks test_timeout benchmark_timeout ranked_timeout ranking_by seed"
    assert set(manifest) <= {*known.split(), "multi_gpu", "description", "templates", "gpus"}
    assert (manifest["test_timeout"], manifest["benchmark_timeout"], manifest["ranked_timeout"]) == (900, 900, 1200)
    assert (manifest["lang"], manifest["ranking_by"], manifest["config"]) == ("py", "geom", {"main": "eval.py"})
    shapes = [(c["batchsize"], c["kvseqlen"], c["seed"]) for c in manifest["benchmarks"]]
    ranked = [(b, k) for b in (4, 32, 64, 256) for k in (1024, 8192)]
    seeds = (4217, 4220, 5412, 5415, 1357, 1360, 9823, 9826)
    assert shapes == [(b, k, s) for (b, k), s in zip(ranked, seeds, strict=True)]
    for entry in manifest["files"]:
        assert "/" not in entry["name"]
        assert entry["source"] == "@SUBMISSION@" or (ROOT / entry["source"]).is_file()


def test_server_folder_runs_without_evalkit(tmp_path, cases_file):
    """The files of the manifest alone, laid out flat as the server does it, are complete."""
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: the manifest cannot be read")
    for entry in yaml.safe_load((ROOT / "task.yml").read_text())["files"]:
        own = GALLERY / "honest_bf16.py" if entry["source"] == "@SUBMISSION@" else ROOT / entry["source"]
        (tmp_path / entry["name"]).write_text(own.read_text())
    (tmp_path / "mla.py").write_text((GALLERY / "mla.py").read_text())
    read, write = os.pipe()
    environment = {**os.environ, "POPCORN_FD": str(write)}
    command = [sys.executable, "eval.py", "test", cases_file]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        pass_fds=[write],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    os.close(write)
    with os.fdopen(read) as file:
        result = parse_like_server(file.read())
    assert (done.returncode, result["check"], result["test-count"]) == (0, "pass", "2"), done.stderr


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "no case in it"),
        ("\n\n", "no case in it"),
        ("batchsize 4", "expected `key: value`"),
        ("batchsize: 4; qseqlen: 1; kvseqlen: 33", "missing: ['seed']"),
        ("batchsize: 4; qseqlen: 1; kvseqlen: 33; seed: 1; tp: 8", "unknown: ['tp']"),
        ("batchsize: 0; qseqlen: 1; kvseqlen: 33; seed: 1", "expected 1 or more"),
        ("batchsize: True; qseqlen: 1; kvseqlen: 33; seed: 1", "expected an integer, got True"),
        ("batchsize: 4.5; qseqlen: 1; kvseqlen: 33; seed: 1", "expected an integer, got 4.5"),
        ("batchsize: many; qseqlen: 1; kvseqlen: 33; seed: 1", "expected an integer, got 'many'"),
        ("seed: 1; seed: 2", "stands twice"),
    ],
)
def test_bad_cases_name_the_line_and_the_field(text, complaint):
    with pytest.raises(SpecError) as error:
        parse_cases(text, "cases")
    assert complaint in str(error.value)


def test_values_keep_their_types():
    assert [_value(v) for v in ("-3", "+4", "True", "false", "1.5", "word")] == [-3, 4, True, False, 1.5, "word"]
    (case,) = parse_cases("batchsize: 4; qseqlen: +1; kvseqlen: 33; seed: -5;\n\n")
    assert case.args == {"batchsize": 4, "qseqlen": 1, "kvseqlen": 33, "seed": -5}


def test_reduced_cases_come_from_the_manifest_and_stay_small():
    cases = [reduced_case(case) for case in manifest_cases("benchmarks")]
    assert [case.shape for case in cases[-2:]] == ["8x33", "8x257"]
    assert sum(case.tokens for case in cases) < 10_000


def test_seeds_combine_like_the_contest():
    # Cantor's pairing, worked out by hand: 3 + (3 + 4) * (3 + 4 + 1) / 2.
    assert combine_seeds(3, 4) == 31
    assert combine_seeds(3, 0) == 9
    seeds = {hidden_seed(b"key", i) for i in range(1000)}
    assert len(seeds) == 1000
    assert max(seeds) < 1 << 63


# -- the pipe


def test_escape_leaves_one_line_whatever_comes():
    breaks = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029\0\x1b"
    text = escape("".join(f"{c}check: pass" for c in breaks) + "\ud800")
    assert len(text.splitlines()) == 1
    text.encode("utf-8")
    assert len(escape("x" * 10_000)) <= MESSAGE_CHARS


@pytest.mark.parametrize("count", [1, 100, 2000])
def test_pipe_stays_under_64_kib(count):
    read, write = os.pipe()
    pipe = ResultPipe(write)
    results = [
        CaseResult("batchsize: 4; qseqlen: 1; kvseqlen: 1024; seed: 1", "4x1024", message="\u2028" * 5000)
        for _ in range(count)
    ]
    log_results(pipe, "test", results, EXIT_CHECK)
    pipe.flush()
    os.close(write)
    with os.fdopen(read) as file:
        text = file.read()
    assert len(text.encode()) <= PIPE_BYTES
    assert parse_like_server(text)["check"] == "fail"
    if count <= 100:
        assert sum(key.endswith("status") for key in parse_like_server(text)) == count


def test_profile_reports_decode(monkeypatch, nursery, cases_file):
    import base64

    arguments = ["profile", cases_file, "--submission", str(GALLERY / "honest_bf16.py")]
    code, result = run_here(arguments, nursery, monkeypatch)
    assert (code, result["check"], result["benchmark-count"]) == (0, "pass", "2")
    assert "aten::" in base64.b64decode(result["benchmark.1.report"], b"+*").decode()


def test_transcript_of_a_passing_test(monkeypatch, nursery, cases_file):
    code, result = run_here(["test", cases_file, "--submission", str(GALLERY / "honest_bf16.py")], nursery, monkeypatch)
    messages = [result.pop(f"test.{i}.message") for i in range(2)]
    assert code == 0
    assert result == {
        "test-count": "2",
        "test.0.spec": SMALL.splitlines()[0],
        "test.0.status": "pass",
        "test.1.spec": SMALL.splitlines()[1],
        "test.1.status": "pass",
        "check": "pass",
    }
    assert all("relative L2" in message for message in messages)


@pytest.mark.parametrize(
    ("name", "code", "reason"),
    [
        ("dishonest_zeros", 112, "not attention over the whole cache"),
        ("dishonest_exit_0", 112, "exited with code 0"),
        ("dishonest_segfault", 112, "signal 11 (SIGSEGV)"),
        ("dishonest_sleeps", 114, "time limit of 2 s"),
        ("dishonest_forges_everywhere", 112, "control channel"),
        ("dishonest_forges_in_message", 112, "Forged"),
        ("dishonest_exits_on_import", 112, "exited with code 0"),
        ("dishonest_fails_on_import", 112, "ModuleNotFoundError"),
        ("dishonest_closes_stdout", 112, "closed or replaced stdout"),
        ("dishonest_patched_torch", 112, "replaced torch.allclose"),
        ("dishonest_prints_100_mb", 112, "printed more than"),
        ("dishonest_not_utf8", 112, "not UTF-8"),
        ("dishonest_kills_parent", 112, "process that starts workers"),
        ("dishonest_changes_inputs", 112, "changed its inputs: q"),
        ("dishonest_none", 112, "got NoneType"),
        ("dishonest_float32_output", 112, "expected torch.bfloat16"),
    ],
)
def test_failures_are_reported_and_the_run_goes_on(name, code, reason, monkeypatch, nursery, cases_file):
    arguments = ["test", cases_file, "--submission", str(GALLERY / f"{name}.py"), "--timeout", "2"]
    got, result = run_here(arguments, nursery, monkeypatch)
    assert (got, result["check"]) == (code, "fail")
    assert [result[f"test.{i}.status"] for i in range(2)] == ["fail", "fail"]
    assert all(reason in result[f"test.{i}.error"] for i in range(2))
    assert set(result) == {
        "test-count",
        "check",
        *(f"test.{i}.{k}" for i in range(2) for k in ("spec", "status", "error")),
    }


def test_one_bad_case_leaves_the_others_their_verdict(monkeypatch, nursery, tmp_path, cases_file):
    path = tmp_path / "submission.py"
    path.write_text(
        "import os\nimport torch\n\n\ndef custom_kernel(data):\n"
        "    if data[4]['batch_size'] == 2:\n        os._exit(1)\n"
        "    q, kv = data[0].float(), data[1]['bf16'].view(data[0].shape[0], -1, 576).float()\n"
        "    weights = torch.softmax(q @ kv.mT * data[4]['sm_scale'], -1)\n"
        "    return (weights @ kv[..., :512]).to(torch.bfloat16)\n"
    )
    code, result = run_here(["test", cases_file, "--submission", str(path)], nursery, monkeypatch)
    assert (code, result["test.0.status"], result["test.1.status"]) == (112, "fail", "pass")


def test_after_two_time_limits_in_a_row_the_rest_is_not_run(monkeypatch, nursery, tmp_path):
    path = tmp_path / "cases.txt"
    path.write_text(SMALL + SMALL)
    arguments = ["test", str(path), "--submission", str(GALLERY / "dishonest_sleeps.py"), "--timeout", "1"]
    code, result = run_here(arguments, nursery, monkeypatch)
    assert (code, result["test-count"]) == (114, "4")
    assert ["not run" in result[f"test.{i}.error"] for i in range(4)] == [False, False, True, True]


@pytest.mark.parametrize("leave", ["", "os.setsid()", "os.setsid() or os.fork() and os._exit(0)"])
def test_memory_is_limited_as_the_kernel_counts_it(leave, monkeypatch, nursery, tmp_path, cases_file):
    monkeypatch.setattr(supervisor, "CPU_MEMORY_BYTES", 1 << 30)
    path = tmp_path / "submission.py"
    # The limit on address space of a worker would stop this one first: children do not share it.
    path.write_text(
        "import os\nimport time\n\n\ndef custom_kernel(data):\n    for _ in range(8):\n        if os.fork() == 0:\n"
        f"            {leave}\n"
        "            block = bytearray(300 << 20)\n            time.sleep(60)\n    time.sleep(60)\n"
    )
    code, result = run_here(["test", cases_file, "--submission", str(path)], nursery, monkeypatch)
    assert code == 112
    assert "MiB of memory" in result["test.0.error"]


# -- the command


def test_without_a_pipe_it_prints_for_a_person(cases_file, tmp_path):
    report = tmp_path / "report.json"
    submission = str(GALLERY / "honest_bf16.py")
    done, _ = run_eval("test", cases_file, "--submission", submission, "--json", str(report))
    assert done.returncode == 0
    assert "2 of 2 cases pass" in done.stdout
    assert "rtol = atol = 0.1" in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) <= 100
    document = json.loads(report.read_text())
    assert document["passed"] is True
    assert document["official"] is False
    assert [case["contest_passed"] for case in document["cases"]] == [True, True]
    assert list(tmp_path.glob(".eval-*")) == []


def test_benchmark_on_a_cpu_shows_no_time(cases_file):
    done, _ = run_eval("benchmark", cases_file, "--submission", str(GALLERY / "honest_bf16.py"))
    assert done.returncode == 0
    assert "Nothing can be timed" in done.stdout
    assert "geometric mean" not in done.stdout


def test_benchmark_on_a_cpu_with_a_pipe_is_a_device_failure(cases_file):
    done, result = run_eval("benchmark", cases_file, "--submission", str(GALLERY / "honest_bf16.py"), pipe=True)
    assert (done.returncode, result["check"]) == (110, "fail")


@pytest.mark.parametrize(
    ("arguments", "env", "code", "words"),
    [
        (["test", "/nonexistent/cases"], {}, 113, "No such file"),
        (["test", "--submission", "/nonexistent.py"], {}, 2, "give the path"),
        (["test"], {"POPCORN_FD": "250"}, 111, "POPCORN_FD"),
        (["test"], {"POPCORN_FD": "x"}, 111, "POPCORN_FD"),
        (["test"], {"POPCORN_SEED": "many"}, 113, "expected an integer, got 'many'"),
        (["measure"], {}, 2, "invalid choice"),
        ([], {}, 2, "next: `python eval.py --help`"),
    ],
)
def test_bad_invocations_say_what_is_wrong(arguments, env, code, words):
    done, _ = run_eval(*arguments, env=env)
    assert done.returncode == code
    assert words in done.stderr


def test_popcorn_seed_zero_is_a_seed(monkeypatch, nursery, cases_file, tmp_path):
    path = tmp_path / "submission.py"
    path.write_text("def custom_kernel(data):\n    raise ValueError(f'first {float(data[0].flatten()[0])}')\n")
    seen = set()
    for seed in (None, "0", "42"):
        if seed is not None:
            monkeypatch.setenv("POPCORN_SEED", seed)
        seen.add(run_here(["test", cases_file, "--submission", str(path)], nursery, monkeypatch)[1]["test.0.error"])
    assert len(seen) == 3


def descendants(pid: int) -> set[int]:
    found: set[int] = set()
    for child in _children(pid):
        found |= {child} | descendants(child)
    return found


def alive(pids: set[int]) -> set[int]:
    """Those that still run; one that nobody has waited for yet does not."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                found.add(pid)
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_run_leaves_no_process_and_no_file(number, cases_file, tmp_path):
    report = tmp_path / "report.json"
    arguments = ["test", cases_file, "--submission", str(GALLERY / "dishonest_sleeps.py"), "--json", str(report)]
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "eval.py"), *arguments, "--device", "cpu"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    # The process that starts workers, and the worker that sleeps.
    started: set[int] = set()
    deadline = time.monotonic() + 60
    while len(started) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
        started = descendants(process.pid)
    assert len(started) == 2
    process.send_signal(number)
    _, error = process.communicate(timeout=20)
    if number != signal.SIGKILL:
        assert process.returncode == 130
        assert "interrupted" in error
    deadline = time.monotonic() + 10
    while alive(started) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert alive(started) == set()
    assert list(tmp_path.iterdir()) == [tmp_path / "cases.txt"]


def test_a_process_that_leaves_its_session_is_ended_too(nursery, tmp_path, cases_file, monkeypatch):
    path = tmp_path / "submission.py"
    marker = tmp_path / "pid"
    path.write_text(
        "import os\nimport time\n\n\ndef custom_kernel(data):\n    if os.fork() == 0:\n        os.setsid()\n"
        f"        if os.fork() == 0:\n            open({str(marker)!r}, 'w').write(str(os.getpid()))\n"
        "            time.sleep(600)\n        os._exit(0)\n    time.sleep(0.5)\n    return None\n"
    )
    run_here(["test", cases_file, "--submission", str(path)], nursery, monkeypatch)
    pid = int(marker.read_text())
    deadline = time.monotonic() + 5
    while alive({pid}) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive({pid})


# -- numbers


def test_stats_are_the_contests():
    stats = calculate_stats([1.0, 2.0, 3.0, 6.0])
    assert (stats.runs, stats.mean, stats.best, stats.worst) == (4, 3.0, 1.0, 6.0)
    assert math.isclose(stats.std, math.sqrt(14 / 3))
    assert math.isclose(stats.err, stats.std / 2)


def test_stop_rule():
    assert not enough_runs([5.0, 5.0], 1e9, 0.0)
    assert enough_runs([5.0, 5.0, 5.0], 1e9, 0.0)
    assert not enough_runs([5.0, 6.0, 7.0], 1e9, 0.0)
    assert enough_runs([5.0, 6.0, 7.0], 17.0, 0.0)
    assert enough_runs([5.0, 6.0, 7.0], 1e9, 121.0)


@pytest.mark.parametrize(
    ("durations", "inclusive", "walls", "words"),
    [
        ([300e3] * 3, [320e3] * 3, [350e3] * 3, None),
        ([10e3] * 3, [20e3] * 3, [30e3] * 3, "not credible"),
        ([150e3] * 3, [900e3] * 3, [950e3] * 3, "left out"),
        ([150e3] * 3, [160e3] * 3, [5e6] * 3, "clocks disagree"),
        ([0.0] * 3, [0.0] * 3, [1e6] * 3, "impossible"),
        ([math.nan] * 3, [0.0] * 3, [1e6] * 3, "impossible"),
    ],
)
def test_times_that_cannot_be_honest(durations, inclusive, walls, words):
    case = manifest_cases("benchmarks")[-1]
    error = time_error(case, durations, inclusive, walls, "NVIDIA H200")
    assert (error is None) if words is None else words in error


def test_paper_bandwidth_prefers_the_longest_name():
    assert paper_bandwidth("NVIDIA GH200 480GB") == 4.9e12
    assert paper_bandwidth("AMD Instinct MI355X") == 8.0e12
    assert paper_bandwidth("an unknown card") is None
