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
import base64
import codecs
import contextlib
import ctypes
import hashlib
import json
import math
import mmap
import os
import re
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
MODES = ("test", "benchmark", "leaderboard", "profile")
EXTRA_MODES = ("audit", "inspect")

EXIT_PASS = 0
EXIT_USAGE = 2
EXIT_DEVICE = 110
EXIT_PIPE = 111
EXIT_CHECK = 112
EXIT_SPEC = 113
EXIT_TIMEOUT = 114

# The server reads the pipe only after the run: more than its 64 KiB would block for ever.
PIPE_BYTES = 60_000
PIPE_WAIT_S = 10.0
MESSAGE_CHARS = 800

# Strict check: relative L2 per (sequence, head) to the nearest honest truth, or this many times the error of an honest
# fp8 computation on that very row where that is larger. docs/evaluator.md has the calibration.
STRICT_REL_L2 = 0.05
FP8_SLACK = 1.5

# Time limits in seconds: importing the file, its first call (which compiles and picks), one later request.
LOAD_LIMIT_S = 120.0
FIRST_CALL_LIMIT_S = 300.0
REQUEST_LIMIT_S = 240.0
# The contest kills a run after these; ours ends a little earlier, with a report.
MODE_LIMIT_S = {"test": 880.0, "benchmark": 880.0, "profile": 880.0, "leaderboard": 1170.0}

# What a worker may use: memory as the kernel counts it (all its processes), and printed text.
CPU_MEMORY_BYTES = 4 << 30
GPU_HOST_MEMORY_SHARE = 0.75
MAX_PRINTED_BYTES = 16 << 20
KEPT_TEXT_BYTES = 4000

# Repeats and total time per case, as in the contest; runs between two validations of the outputs.
BENCHMARK_REPEATS, BENCHMARK_TIME_NS = 1000, 50e9
LEADERBOARD_REPEATS, LEADERBOARD_TIME_NS = 100, 30e9
MAX_CASE_WALL_S = 120.0
ROUND_RUNS = 25
SEED_STEP = 13
WARM_UP_RUNS = 3
INCLUSIVE_RUNS = 5

# A time that leaves out work: the device's clock against everything up to a device-wide synchronise.
INCLUSIVE_RATIO, INCLUSIVE_SLACK_NS = 2.0, 50_000.0
# On a CPU, inputs with more tokens than this are worth several threads.
MANY_TOKENS = 1 << 16
# The smallest cache: 288 bytes of codes and 18 of scales a token.
BYTES_PER_TOKEN = 306
# Paper bandwidth in bytes/s: nothing honest is faster than reading the cache once.
PAPER_BANDWIDTH = {
    "H200": 4.8e12,
    "GH200": 4.9e12,
    "H100": 3.35e12,
    "B200": 8.0e12,
    "A100": 2.04e12,
    "L40S": 0.864e12,
    "MI355X": 8.0e12,
    "MI350X": 8.0e12,
    "MI325X": 6.0e12,
    "MI300X": 5.3e12,
    "MI250X": 3.28e12,
}

CASE_KEYS = ("batchsize", "qseqlen", "kvseqlen", "seed")
TRUTHS = (("mxfp4", "bf16"), ("bf16", "bf16"), ("fp8", "fp8"), ("fp8", "bf16"), ("bf16", "fp8"), ("mxfp4", "fp8"))


# ---------------------------------------------------------------------------------------------------------------------
# Cases


class SpecError(Exception):
    """A case that cannot be run as it stands."""


@dataclass(frozen=True)
class Case:
    """One line of a case file."""

    spec: str
    args: dict[str, int]

    @property
    def shape(self) -> str:
        return f"{self.args['batchsize']}x{self.args['kvseqlen']}"

    @property
    def tokens(self) -> int:
        return self.args["batchsize"] * self.args["kvseqlen"]

    @property
    def min_bytes(self) -> int:
        """Bytes that any honest computation moves: the smallest cache, the queries, the output."""
        queries = self.args["batchsize"] * self.args["qseqlen"] * 16
        return self.tokens * BYTES_PER_TOKEN + queries * (576 + 512) * 2


def _value(text: str) -> int | float | bool | str:
    if text in ("True", "true", "False", "false"):
        return text in ("True", "true")
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def _checked_case(spec: str, args: dict[str, Any], where: str) -> Case:
    unknown = sorted(set(args) - set(CASE_KEYS))
    missing = [key for key in CASE_KEYS if key not in args]
    if unknown or missing:
        raise SpecError(f"{where}: expected the keys {', '.join(CASE_KEYS)}; unknown: {unknown}, missing: {missing}")
    for key, value in args.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise SpecError(f"{where}: {key}: expected an integer, got {value!r}")
        if key != "seed" and value < 1:
            raise SpecError(f"{where}: {key}: expected 1 or more, got {value}")
    return Case(spec, dict(args))


def parse_cases(text: str, name: str = "cases") -> list[Case]:
    """Cases of a file with one `key: value; key: value` per line; blank lines do not count."""
    cases = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        args: dict[str, Any] = {}
        where = f"{name}, line {number}"
        for part in line.strip().rstrip(";").split(";"):
            matched = re.fullmatch(
                r"\s*([A-Za-z_]\w*)\s*:\s*([A-Za-z_]\w*|[+-]?[0-9][0-9_]*(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*", part
            )
            if matched is None:
                raise SpecError(f"{where}: expected `key: value`, got {part.strip()!r}")
            if matched[1] in args:
                raise SpecError(f"{where}: {matched[1]} stands twice")
            args[matched[1]] = _value(matched[2])
        cases.append(_checked_case(line.strip(), args, where))
    if not cases:
        raise SpecError(
            f"{name}: no case in it; expected lines such as `batchsize: 4; qseqlen: 1; kvseqlen: 1024; seed: 1`"
        )
    return cases


def manifest_cases(section: str, path: Path = HERE / "task.yml") -> list[Case]:
    """The `tests` or `benchmarks` of task.yml, whose entries are JSON objects, one a line."""
    try:
        text = path.read_text()
    except OSError as error:
        raise SpecError(f"{path.name}: {error.strerror}; give a case file instead") from error
    block = re.search(rf"^{section}:\n((?:[ \t]+.*\n|\n)+)", text, re.MULTILINE)
    cases = []
    for entry in re.findall(r"^\s*-\s*(\{.*\})\s*$", block[1], re.MULTILINE) if block else []:
        try:
            args = json.loads(entry)
        except json.JSONDecodeError as error:
            raise SpecError(f"{path.name}, {section}: {entry}: {error}") from error
        cases.append(_checked_case("; ".join(f"{k}: {v}" for k, v in args.items()), args, f"{path.name}, {section}"))
    if not cases:
        raise SpecError(f"{path.name}: no entry under {section}")
    return cases


def reduced_case(case: Case) -> Case:
    """A small relative of a case for the interpreter on a CPU: 256x8192 becomes 8x257, odd lengths included."""
    args = dict(case.args)
    args["batchsize"] = max(2, round(math.log2(args["batchsize"])))
    args["kvseqlen"] = max(33, args["kvseqlen"] // 32 + 1)
    return Case("; ".join(f"{k}: {v}" for k, v in args.items()), args)


def combine_seeds(case_seed: int, secret: int) -> int:
    """The contest's pairing (Cantor's): large whenever the secret is large."""
    return case_seed + (case_seed + secret) * (case_seed + secret + 1) // 2


def hidden_seed(key: bytes, *parts: int) -> int:
    """A seed for the worker's eyes, from which neither the key nor any other seed can be worked out."""
    text = ",".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, key=key[:64], digest_size=7).digest(), "big")


# ---------------------------------------------------------------------------------------------------------------------
# The contest's protocol


def escape(value: Any, limit: int = MESSAGE_CHARS) -> str:
    """One line of text that no reader can take for two: line breaks and control characters are spelled out."""
    text = value if isinstance(value, str) else repr(value)
    if len(text) > limit:
        text = text[: limit - 20] + f" ... ({len(text)} chars)"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class ResultPipe:
    """Collects results and writes them at the end, so that the last word is this process's."""

    def __init__(self, fd: int) -> None:
        os.fstat(fd)
        os.set_inheritable(fd, False)
        self.fd = fd
        self.entries: list[tuple[str, str, bool]] = []

    def log(self, key: str, value: Any, optional: bool = False, limit: int = MESSAGE_CHARS) -> None:
        self.entries.append((key, escape(value, limit), optional))

    def text(self) -> str:
        """All results; messages are cut, then dropped, and at last whole cases, to stay under the pipe's size."""
        for limit in (10**9, 200, 0):
            lines = [f"{k}: {v[:limit] if o else v}\n" for k, v, o in self.entries if limit or not o]
            if sum(len(line.encode("utf-8", "backslashreplace")) for line in lines) <= PIPE_BYTES:
                return "".join(lines)
        kept, total = [], 0
        for line in reversed(lines):
            total += len(line.encode("utf-8", "backslashreplace"))
            if total > PIPE_BYTES:
                break
            kept.append(line)
        return "".join(reversed(kept))

    def flush(self) -> None:
        """Write everything; OSError when the reader is gone or does not make room."""
        data = self.text().encode("utf-8", "backslashreplace")
        os.set_blocking(self.fd, False)
        deadline = time.monotonic() + PIPE_WAIT_S
        while data:
            _, ready, _ = select.select([], [self.fd], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise OSError("the result pipe is full")
            with contextlib.suppress(BlockingIOError):
                data = data[os.write(self.fd, data) :]


# ---------------------------------------------------------------------------------------------------------------------
# Workers


class WorkerFailure(Exception):
    """The worker, or the submission in it, did not do what was asked; the text says what happened."""

    def __init__(self, reason: str, kind: str = "error") -> None:
        super().__init__(reason)
        self.kind = kind


def _ending(status: int) -> str:
    if status < 0:
        return "ended in an unknown way"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        with contextlib.suppress(ValueError):
            return f"was killed by signal {number} ({signal.Signals(number).name})"
        return f"was killed by signal {number}"
    return f"exited with code {os.WEXITSTATUS(status)} before it answered"


def memory_file(size: int) -> int:
    """A file without a name, gone with its last descriptor."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("eval", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, max(size, 1))
    return fd


@contextlib.contextmanager
def memory_files(*sizes: int) -> Iterator[list[int]]:
    fds = [memory_file(size) for size in sizes]
    try:
        yield fds
    finally:
        for fd in fds:
            os.close(fd)


def _session_processes(session: int) -> dict[int, int]:
    """Resident bytes of every process of a session, by pid."""
    found = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            stat = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            if int(stat[3]) == session:
                found[int(entry)] = int(stat[21]) * mmap.PAGESIZE
    return found


def _children(parent: int) -> set[int]:
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                if int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1]) == parent:
                    found.add(int(entry))
    return found


class Nursery:
    """Starts workers and says how they ended; see evalkit/worker.py.

    Args:
        device: "cpu" or "cuda".
        exclusive: this process starts no other children, so any that it finds later came from a worker. Otherwise only
            those that carry the nursery's mark in their environment are taken for such.
    """

    def __init__(self, device: str, exclusive: bool = False) -> None:
        self.device = device
        self.exclusive = exclusive
        self.mark = secrets.token_hex(8)
        self.process: subprocess.Popen[bytes] | None = None
        self.sock: socket.socket | None = None
        # Orphans of a killed worker come to this process, which then ends them.
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
        self.known_children = _children(os.getpid()) if sys.platform == "linux" else set()

    def _start(self) -> socket.socket:
        if self.alive() and self.sock is not None:
            return self.sock
        self.close()
        script = HERE / "evalkit" / "worker.py"
        if not script.exists():
            script = HERE / "eval_worker.py"
        ours, theirs = socket.socketpair()
        env = {k: v for k, v in os.environ.items() if not k.startswith("POPCORN_")}
        env["PYTHONDONTWRITEBYTECODE"] = "1"
        env["EVAL_NURSERY"] = self.mark
        if self.device == "cpu":
            env["TRITON_INTERPRET"] = "1"
            env.setdefault("OMP_NUM_THREADS", "1")
        how = "fork" if self.device == "cpu" else "exec"
        with theirs:
            command = [sys.executable, str(script), "nursery", str(theirs.fileno()), how]
            self.process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                cwd=tempfile.gettempdir(),
            )
        self.sock = ours
        return ours

    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def ask(self, message: dict[str, Any], fds: list[int] | None = None, limit_s: float = 120.0) -> dict[str, Any]:
        """One request and its answer."""
        sock = self._start()
        sock.settimeout(limit_s)
        payload = json.dumps(message).encode()
        frame = len(payload).to_bytes(4, "big") + payload
        try:
            if fds:
                frame = frame[socket.send_fds(sock, [frame], fds) :]
            sock.sendall(frame)
            size = int.from_bytes(_read_exactly(sock, 4), "big")
            answer: dict[str, Any] = json.loads(_read_exactly(sock, min(size, 1 << 16)))
            return answer
        except (OSError, ValueError) as error:
            self.close()
            raise WorkerFailure(f"the process that starts workers ended: {error}", "crash") from error

    def close(self) -> None:
        """End the nursery, and whatever a worker left behind."""
        if self.sock is not None:
            self.sock.close()
            self.sock = None
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
        self.reap_strays()

    def reap_strays(self) -> None:
        """Kill processes that left their worker's session and came to this one as orphans."""
        if sys.platform != "linux":
            return
        for _ in range(20):
            keep = self.known_children | ({self.process.pid} if self.process is not None else set())
            strays = {pid for pid in _children(os.getpid()) - keep if self.exclusive or self._is_marked(pid)}
            if not strays:
                return
            for pid in strays:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(OSError):
                    os.waitpid(pid, 0)

    def _is_marked(self, pid: int) -> bool:
        with contextlib.suppress(OSError):
            return f"EVAL_NURSERY={self.mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return False


def _read_exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = sock.recv(count - len(data))
        if not more:
            raise OSError("no answer")
        data += more
    return data


class Worker:
    """One worker process, watched while it works: time, memory, printed text, and how it ended."""

    def __init__(self, nursery: Nursery, deadline: float = math.inf) -> None:
        self.nursery = nursery
        self.deadline = deadline
        self.memory_bytes = CPU_MEMORY_BYTES
        if nursery.device == "cuda":
            self.memory_bytes = int(GPU_HOST_MEMORY_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        self.received = b""
        self.printed = 0
        self.text = b""
        self.stray_bytes = False
        self.decoders = {}
        self.sock, control = socket.socketpair()
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        for fd in (out_read, err_read):
            os.set_blocking(fd, False)
            self.decoders[fd] = codecs.getincrementaldecoder("utf-8")()
        # The limit on address space makes a greedy allocation an exception; a GPU driver reserves far too much for it.
        address = self.memory_bytes if nursery.device == "cpu" else 0
        try:
            answer = nursery.ask(
                {"op": "start", "address_bytes": address}, [control.fileno(), out_write, err_write], limit_s=120.0
            )
        except WorkerFailure:
            self._close_pipes()
            raise
        finally:
            control.close()
            os.close(out_write)
            os.close(err_write)
        self.pid: int | None = int(answer["pid"])
        self.sock.setblocking(False)

    # -- talking

    def request(
        self, op: str, fds: list[int] | None = None, limit_s: float = REQUEST_LIMIT_S, **fields: Any
    ) -> dict[str, Any]:
        """Ask for something and wait for the answer.

        Raises:
            WorkerFailure: the worker died, took too long, used too much, printed too much, answered nonsense, or
                reports an exception of the submission.
        """
        if self.pid is None:
            raise WorkerFailure("the worker is gone", "crash")
        remaining = self.deadline - time.monotonic()
        if remaining <= 0:
            raise WorkerFailure("the time limit of the whole run is reached", "timeout")
        limit_s = min(limit_s, remaining)
        token = secrets.token_hex(8)
        payload = json.dumps({"op": op, "token": token, **fields}).encode()
        frame = len(payload).to_bytes(4, "big") + payload
        try:
            self.sock.setblocking(True)
            self.sock.settimeout(limit_s)
            if fds:
                frame = frame[socket.send_fds(self.sock, [frame], fds) :]
            self.sock.sendall(frame)
            self.sock.setblocking(False)
        except OSError:
            self._fail_after_death()
        answer = self._wait_for_answer(time.monotonic() + limit_s, limit_s, op)
        if answer.get("token") != token:
            self._fail("wrote to the evaluator's control channel", "protocol")
        if not answer.get("ok"):
            raise WorkerFailure(str(answer.get("error", "no reason given")), "submission")
        return answer

    def _wait_for_answer(self, deadline: float, limit_s: float, op: str) -> dict[str, Any]:
        next_memory_check = 0.0
        while True:
            answer = self._parse()
            if answer is not None:
                self._drain()
                self._check_printed()
                return answer
            now = time.monotonic()
            if now > deadline:
                doing = {"load": "importing the file", "call": "the call"}.get(op, op)
                self._fail(f"ran past the time limit of {limit_s:.0f} s ({doing})", "timeout")
            if now > next_memory_check:
                next_memory_check = now + 0.25
                used = sum(_session_processes(self.pid or -1).values())
                if used > self.memory_bytes:
                    self._fail(f"used {used >> 20} MiB of memory, the limit is {self.memory_bytes >> 20} MiB", "memory")
            readable, _, _ = select.select([self.sock.fileno(), *self.decoders], [], [], 0.1)
            self._drain()
            self._check_printed()
            if self.sock.fileno() in readable:
                try:
                    more = self.sock.recv(1 << 16)
                except (BlockingIOError, ConnectionError):
                    continue
                if not more:
                    self._fail_after_death()
                self.received += more

    def _parse(self) -> dict[str, Any] | None:
        if len(self.received) < 4:
            return None
        size = int.from_bytes(self.received[:4], "big")
        if size > 1 << 20:
            self._fail("wrote to the evaluator's control channel", "protocol")
        if len(self.received) < 4 + size:
            return None
        body, self.received = self.received[4 : 4 + size], self.received[4 + size :]
        try:
            answer = json.loads(body)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            self._fail("wrote to the evaluator's control channel", "protocol")
        return answer

    def _drain(self) -> None:
        for fd in list(self.decoders):
            for _ in range(64):
                try:
                    data = os.read(fd, 1 << 16)
                except BlockingIOError:
                    break
                if not data:
                    del self.decoders[fd]
                    os.close(fd)
                    break
                self.printed += len(data)
                self.text = (self.text + data)[-KEPT_TEXT_BYTES:]
                try:
                    self.decoders[fd].decode(data)
                except UnicodeDecodeError:
                    self.stray_bytes = True

    def _check_printed(self) -> None:
        if self.printed > MAX_PRINTED_BYTES:
            self._fail(f"printed more than {MAX_PRINTED_BYTES >> 20} MiB", "output")
        if self.stray_bytes:
            self._fail("printed bytes that are not UTF-8, on which the contest's runner fails", "output")

    # -- ending

    def _fail(self, reason: str, kind: str) -> None:
        self.close()
        raise WorkerFailure(reason, kind)

    def _fail_after_death(self) -> None:
        """The control channel is closed: find out how the worker ended, and end it if it has not."""
        for _ in range(40):
            if self._ended():
                break
            time.sleep(0.05)
        else:
            self._fail("closed the evaluator's control channel", "protocol")
        self._drain()
        orphaned = not self.nursery.alive()
        ending = _ending(self.close())
        if orphaned:
            ending = "ended together with the process that starts workers, which a submission must not touch"
        self._check_printed()
        last = self.printed_tail().splitlines()
        raise WorkerFailure(ending + (f"; it last printed: {last[-1][:300]}" if last else ""), "crash")

    def _ended(self) -> bool:
        with contextlib.suppress(OSError):
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
        return True

    def printed_tail(self) -> str:
        """The last text that the worker printed."""
        return self.text.decode("utf-8", "replace").strip()

    def _close_pipes(self) -> None:
        self.sock.close()
        for fd in self.decoders:
            with contextlib.suppress(OSError):
                os.close(fd)
        self.decoders.clear()

    def close(self) -> int:
        """Kill the worker with everything in its session; returns its wait status, -1 when that is unknown."""
        status = -1
        pid, self.pid = self.pid, None
        if pid is not None:
            for member in (*_session_processes(pid), pid):
                with contextlib.suppress(OSError):
                    os.kill(member, signal.SIGKILL)
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
            if self.nursery.alive():
                with contextlib.suppress(WorkerFailure):
                    status = int(self.nursery.ask({"op": "wait", "pid": pid}, limit_s=30.0)["status"])
            self.nursery.reap_strays()
        with contextlib.suppress(OSError):
            self._drain()
        self._close_pipes()
        return status

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


# ---------------------------------------------------------------------------------------------------------------------
# Data to and from a worker


def _input_tensors(data: Any) -> dict[str, Any]:
    q, kv, qo_indptr, kv_indptr, _ = data
    return {
        "q": q,
        "bf16": kv["bf16"],
        "fp8": kv["fp8"][0],
        "fp8_scale": kv["fp8"][1],
        "fp4": kv["mxfp4"][0],
        "fp4_scale": kv["mxfp4"][1],
        "qo_indptr": qo_indptr,
        "kv_indptr": kv_indptr,
    }


def input_layout(data: Any) -> dict[str, Any]:
    """Where each tensor of an input lies in its memory file."""
    tensors, offset = {}, 0
    for name, tensor in _input_tensors(data).items():
        size = tensor.numel() * tensor.element_size()
        dtype = str(tensor.dtype).removeprefix("torch.")
        tensors[name] = {"dtype": dtype, "shape": list(tensor.shape), "offset": offset, "bytes": size}
        offset += -(-size // 256) * 256
    return {"tensors": tensors, "bytes": offset, "config": data[4]}


def write_input(data: Any, layout: dict[str, Any], fd: int) -> None:
    """Fill a memory file with an input's bytes."""
    import torch

    for name, tensor in _input_tensors(data).items():
        raw = memoryview(tensor.contiguous().view(torch.uint8).cpu().numpy()).cast("B")
        entry, written = layout["tensors"][name], 0
        while written < entry["bytes"]:
            written += os.pwrite(fd, raw[written : written + (1 << 28)], entry["offset"] + written)


def give_input(worker: Worker, slot: int, data: Any, over: int | None = None) -> None:
    """Hand an input to a worker: in new storage, or over the tensors of the slot `over`."""
    layout = input_layout(data)
    with memory_files(layout["bytes"]) as (fd,):
        write_input(data, layout, fd)
        worker.request("input", [fd], slot=slot, layout=layout, over=over)


def output_shape(data: Any) -> tuple[int, int, int]:
    return (data[0].shape[0], data[0].shape[1], data[4]["v_head_dim"])


def read_output(fd: int, offset: int, shape: tuple[int, ...], device: Any) -> Any:
    """A bf16 tensor from a memory file."""
    import torch

    count = math.prod(shape)
    raw = bytearray(count * 2)
    view, done = memoryview(raw), 0
    while done < len(raw):
        more = os.preadv(fd, [view[done : done + (1 << 28)]], offset + done)
        if more == 0:
            raise WorkerFailure("the output's memory file is too short", "protocol")
        done += more
    return torch.frombuffer(raw, dtype=torch.bfloat16).view(shape).to(device)


@dataclass
class CallResult:
    """What one call returned, as far as the worker can tell, and the output's bytes if it is well-formed."""

    output: Any
    error: str | None
    call_s: float
    aliases_input: bool
    changed: list[str]
    begin: int
    later: Any = None


def output_error(meta: dict[str, Any], shape: tuple[int, ...], device: str) -> str | None:
    """Why what came back is not the tensor the contest asks for, or None."""
    if not meta.get("plain"):
        return f"output: expected a torch.Tensor, got {escape(str(meta.get('type')), 80)}"
    if meta.get("dtype") != "torch.bfloat16":
        return f"output: expected torch.bfloat16, got {escape(str(meta.get('dtype')), 80)}"
    if tuple(meta.get("shape", ())) != shape:
        return f"output: expected shape {shape}, got {escape(str(tuple(meta.get('shape', ()))), 80)}"
    if meta.get("device") != device:
        return f"output: expected a tensor on {device}, got one on {escape(str(meta.get('device')), 80)}"
    if not meta.get("saved", True):
        return "output: its bytes could not be read"
    return None


def call(
    worker: Worker,
    slots: list[int],
    datas: list[Any],
    *,
    check_inputs: bool = False,
    poison: bool = False,
    pause_s: float = 0.0,
    hold: list[int] | None = None,
    limit_s: float = REQUEST_LIMIT_S,
) -> list[CallResult]:
    """Call the submission once per slot, read every output after the last call, and bring them here."""
    shapes = [output_shape(data) for data in datas]
    sizes = [2 * math.prod(shape) for shape in shapes]
    device = datas[0][0].device
    with memory_files(sum(sizes) * (2 if pause_s else 1)) as (fd,):
        answer = worker.request(
            "call",
            [fd],
            limit_s,
            slots=slots,
            bytes=sizes,
            hash=check_inputs,
            poison=poison,
            pause_s=pause_s,
            hold=hold or [],
        )
        results = []
        offset = 0
        for meta, shape, size in zip(answer["results"], shapes, sizes, strict=True):
            error = output_error(meta, shape, device.type)
            output = None if error else read_output(fd, offset, shape, device)
            later = None if error or not pause_s else read_output(fd, offset + sum(sizes), shape, device)
            results.append(
                CallResult(
                    output,
                    error,
                    float(meta.get("call_s", 0.0)),
                    bool(meta.get("aliases_input")),
                    [str(name) for name in meta.get("changed", [])],
                    int(meta.get("begin", -1)),
                    later,
                )
            )
            offset += size
    return results


# ---------------------------------------------------------------------------------------------------------------------
# Verdicts


@dataclass
class Verdict:
    """What one output is worth."""

    passed: bool
    message: str
    cache: str = ""
    worst_rel_l2: float = math.inf
    worst_row: tuple[int, int] = (0, 0)
    limit: float = STRICT_REL_L2
    contest_passed: bool = False
    contest_message: str = ""


class Judge:
    """Honest answers for one input, computed when first needed.

    A row (one query token, one head) is honest when its relative L2 error to the nearest of six truths - three caches,
    queries in bf16 or fp8 - is at most `tolerance`, or at most 1.5 times the error against full precision of an honest
    fp8 computation on that row where the input makes that larger.
    """

    def __init__(self, data: Any, tolerance: float = STRICT_REL_L2) -> None:
        import torch

        import reference

        self.data = data
        self.tolerance = tolerance
        self.reference = reference
        self.dtype = torch.float64 if data[0].device.type == "cpu" else torch.float32
        self._truths: dict[tuple[str, str], Any] = {}
        self._fp8_error: Any = None
        self._contest: Any = None

    def truth(self, cache: str, q: str = "bf16") -> Any:
        """Attention over one cache: [total_q, heads, 512]."""
        if (cache, q) not in self._truths:
            self._truths[cache, q] = self.reference.attention_truth(self.data, cache, self.dtype, q)[0]
        return self._truths[cache, q]

    def fp8_error(self) -> Any:
        """What honest fp8 rounding costs each row: relative L2 [total_q, heads], the worst of several computations.

        One is a whole fp8 kernel (queries, cache and probabilities) against full precision. The others round the
        queries to fp8 on different grids, over each cache, against the same cache with exact queries: where the weights
        hang on a hair, one rounding alone may land close by luck.
        """
        if self._fp8_error is None:
            import torch

            error = self.reference.relative_l2(honest_fp8(self.data), self.truth("bf16"))
            for queries in fp8_query_variants(self.data[0]):
                data = (queries, *self.data[1:])
                for cache in self.reference.CACHES:
                    rounded = self.reference.attention_truth(data, cache, torch.float32)[0]
                    error = torch.maximum(error, self.reference.relative_l2(rounded, self.truth(cache)))
            self._fp8_error = error
        return self._fp8_error

    def format_error(self, cache: str, q: str = "bf16") -> float:
        """What a cache format itself costs: mean relative L2 of its truth against the bf16 cache."""
        error = self.reference.relative_l2(self.truth(cache, q), self.truth("bf16"))
        finite = error[error.isfinite()]
        return float(finite.mean()) if finite.numel() else 0.0

    def contest(self, output: Any) -> tuple[bool, str]:
        """The contest's own check."""
        if self._contest is None:
            self._contest = self.reference.ref_kernel(self.data)
        import utils

        good, lines = utils.verbose_allclose(
            output,
            self._contest,
            rtol=self.reference.CONTEST_RTOL,
            atol=self.reference.CONTEST_ATOL,
            max_error_ratio=self.reference.CONTEST_MISS_RATIO,
        )
        return good, "; ".join(lines)

    def strict(self, output: Any, first: str = "", complete: bool = True) -> Verdict:
        """Compare with the truths, `first` leading; `complete=False` stops at the first one that explains all rows."""
        import torch

        order = sorted(TRUTHS, key=lambda pair: "/".join(pair) != first)
        nearest: Any = None
        means: dict[str, float] = {}
        for cache, q in order:
            error = self.reference.relative_l2(output, self.truth(cache, q))
            means[f"{cache}/{q}"] = float(error.nan_to_num(posinf=1e30).mean())
            nearest = error if nearest is None else torch.minimum(nearest, error)
            if not complete and bool((nearest <= self.tolerance).all()):
                break
        cache = min(means, key=lambda name: means[name])
        limit = torch.full_like(nearest, self.tolerance)
        if bool((nearest > limit).any()):
            limit = torch.maximum(limit, (FP8_SLACK * self.fp8_error()).to(limit.dtype).nan_to_num(posinf=0.0))
        # The worst row is the one furthest over its own limit.
        excess = (nearest / limit).reshape(-1)
        at = int(excess.argmax())
        row = (at // output.shape[1], at % output.shape[1])
        worst, allowed = float(nearest[row]), float(limit[row])
        bad = int((nearest > limit).sum())
        verdict = Verdict(bad == 0, "", cache, worst, row, allowed)
        where = f"(sequence {row[0]}, head {row[1]})"
        if bad:
            kind = "not finite" if math.isinf(worst) else f"{worst:.3g}"
            verdict.message = (
                f"not attention over the whole cache: {bad} of {nearest.numel()} rows are off, worst relative L2 {kind}"
                f" > {allowed:.3g} at {where}, nearest truth {cache}"
            )
        else:
            verdict.message = f"worst relative L2 {worst:.2e} <= {allowed:.3g} at {where}, truth {cache}"
        return verdict

    def verdict(self, output: Any, first: str = "", complete: bool = True) -> Verdict:
        """Both checks: the strict one decides, and so does the contest's."""
        verdict = self.strict(output, first, complete)
        verdict.contest_passed, verdict.contest_message = self.contest(output)
        if not verdict.contest_passed:
            verdict.passed = False
            verdict.message = f"contest check: {verdict.contest_message}; strict check: {verdict.message}"
        elif not verdict.passed:
            verdict.message = f"{verdict.message} (the contest's check alone would pass it)"
        return verdict


def fp8_query_variants(q: Any) -> Iterator[Any]:
    """The queries rounded to fp8 as honest kernels do it: one scale for all, one a head, and the same on other grids.

    Args:
        q: bf16 [total_q, heads, 576]
    Returns:
        float32 tensors of q's shape
    """
    import torch

    import reference

    dtype = reference.fp8_dtype(q.device)
    limit = torch.finfo(dtype).max
    exact = q.to(torch.float32)
    per_tensor = exact.abs().amax().clamp(min=1e-12) / limit
    per_head = exact.abs().amax(-1, keepdim=True).clamp(min=1e-12) / limit
    for scale in (per_tensor, per_head):
        # A larger scale shifts all rounding points; 2 would shift none.
        for stretch in (1.0, 1.1, 1.2, 1.35, 1.5, 1.75):
            yield (exact / (scale * stretch)).clamp(-limit, limit).to(dtype).to(torch.float32) * (scale * stretch)


def honest_fp8(data: Any) -> Any:
    """MLA decode as an fp8 kernel does it: fp8 queries, cache and probabilities, everything else in float32."""
    import torch

    import reference

    q, kv_data, qo_indptr, kv_indptr, config = data
    kv, kv_scale = kv_data["fp8"]
    exact_q = reference.dequantize_fp8(*reference.quantize_fp8(q)) * config["sm_scale"]
    out = torch.zeros(output_shape(data), dtype=torch.float32, device=q.device)
    qo, tokens = qo_indptr.tolist(), kv_indptr.tolist()
    for i in range(len(qo) - 1):
        if tokens[i] == tokens[i + 1]:
            continue
        cache = reference.dequantize_fp8(kv[tokens[i] : tokens[i + 1], 0], kv_scale)
        scores = exact_q[qo[i] : qo[i + 1]] @ cache.T
        weights = torch.exp(scores - scores.amax(-1, keepdim=True))
        rounded = weights.to(torch.float8_e4m3fn).to(torch.float32)
        out[qo[i] : qo[i + 1]] = (rounded @ cache[:, : config["v_head_dim"]]) / weights.sum(-1, keepdim=True)
    return out


# ---------------------------------------------------------------------------------------------------------------------
# Timing


@dataclass(frozen=True)
class Stats:
    """Times of one case in nanoseconds."""

    runs: int
    mean: float
    std: float
    err: float
    best: float
    worst: float


def calculate_stats(durations: list[float]) -> Stats:
    """Mean with its standard error, spread and extremes."""
    runs = len(durations)
    mean = sum(durations) / runs
    std = math.sqrt(sum((d - mean) ** 2 for d in durations) / (runs - 1)) if runs > 1 else 0.0
    return Stats(runs, mean, std, std / math.sqrt(runs), float(min(durations)), float(max(durations)))


def enough_runs(
    durations: list[float], max_time_ns: float, spent_s: float, max_wall_s: float = MAX_CASE_WALL_S
) -> bool:
    """The contest's stop rule, asked from the third run on."""
    if len(durations) < 3:
        return False
    stats = calculate_stats(durations)
    return stats.err < 0.001 * stats.mean or stats.mean * stats.runs > max_time_ns or spent_s > max_wall_s


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(math.log(v) for v in values) / len(values))


def paper_bandwidth(card: str) -> float | None:
    """Bytes per second on the card's data sheet, or None for an unknown card."""
    names = [name for name in PAPER_BANDWIDTH if name in card.upper().replace(" ", "")]
    return PAPER_BANDWIDTH[max(names, key=len)] if names else None


def timed_answer(answer: dict[str, Any], inclusive: bool) -> tuple[list[float], list[float]]:
    """(ns between the events, ns by the host's clock) of timed runs; of inclusive ones less the host's part."""
    times = [float(t) for t in answer["durations"]]
    walls = [float(w) for w in answer["walls"]]
    if inclusive:
        hosts = [float(h) for h in answer["hosts"]]
        times = [max(1.0, t - h) for t, h in zip(times, hosts, strict=True)]
        walls = [max(1.0, w - h) for w, h in zip(walls, hosts, strict=True)]
    return times, walls


def time_error(case: Case, durations: list[float], inclusive: list[float], walls: list[float], card: str) -> str | None:
    """Why these times cannot be those of an honest computation, or None.

    Args:
        durations: ns, in the contest's order.
        inclusive: ns between the events with a device-wide synchronise before the second, less the host's part.
        walls: ns of the inclusive runs by the host's clock, less the host's part.
        card: the device's name.
    """
    if any(not math.isfinite(d) or d <= 0 for d in durations):
        return f"a time of {min(durations):.0f} ns is impossible"
    typical = sorted(durations)[len(durations) // 2]
    bandwidth = paper_bandwidth(card)
    if bandwidth is not None and typical * 1e-9 < case.min_bytes / bandwidth:
        floor = case.min_bytes / bandwidth * 1e6
        return (
            f"{typical / 1e3:.2f} us is not credible: reading the cache once takes {floor:.2f} us at"
            f" {bandwidth / 1e12:.1f} TB/s"
        )
    if inclusive and min(inclusive) > INCLUSIVE_RATIO * typical + INCLUSIVE_SLACK_NS:
        return (
            f"work is left out of the timed queue: {typical / 1e3:.1f} us between the events,"
            f" {min(inclusive) / 1e3:.1f} us until the device is idle"
        )
    if walls and min(walls) > INCLUSIVE_RATIO * max(inclusive) + 10 * INCLUSIVE_SLACK_NS:
        return (
            f"the clocks disagree: {max(inclusive) / 1e3:.1f} us between the events, {min(walls) / 1e3:.1f} us by the"
            " host's clock"
        )
    return None


# ---------------------------------------------------------------------------------------------------------------------
# Running


@dataclass
class CaseResult:
    """Everything known about one case; also an entry of the JSON file."""

    spec: str
    shape: str
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

    def case_done(self, index: int, result: CaseResult) -> None: ...

    def finish(self, run: Run, results: list[CaseResult], code: int) -> None: ...


@dataclass
class Run:
    """One invocation: what to run, where, and under which limits."""

    mode: str
    submission: Path
    device: str
    secret: int | None
    reduced: bool
    tolerance: float = STRICT_REL_L2
    first_call_limit_s: float = FIRST_CALL_LIMIT_S
    reporter: Reporter = field(default_factory=Reporter)
    key: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    shared_nursery: Nursery | None = None
    own_process: bool = False

    def __post_init__(self) -> None:
        self.nursery = self.shared_nursery or Nursery(self.device, exclusive=self.own_process)
        self.deadline = time.monotonic() + MODE_LIMIT_S.get(self.mode, math.inf)
        if self.secret is not None:
            self.key = hashlib.blake2b(str(self.secret).encode()).digest()

    @property
    def card(self) -> str:
        if self.device == "cpu":
            return "CPU"
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
            folder = str(self.submission.parent)
            worker.request("setup", limit_s=120.0, device=self.device, folder=folder, harness=str(HERE))
            yield worker

    def load(self, worker: Worker) -> float:
        answer = worker.request("load", path=str(self.submission), limit_s=LOAD_LIMIT_S)
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
        shape = output_shape(datas[0])
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
        result = CaseResult(case.spec, case.shape)
        self.reporter.case_started(index, case)
        started = time.monotonic()
        steps = {"test": self.test_case, "profile": self.profile_case}
        step = steps.get(self.mode, self.timed_case)
        if self.device == "cpu" and self.mode in ("benchmark", "leaderboard"):
            step = self.test_case
        try:
            if time.monotonic() > self.deadline:
                raise WorkerFailure("not run: the time limit of the whole run is reached", "timeout")
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
            results = [self.case(i, case) for i, case in enumerate(cases)]
        finally:
            self.close()
        return results, exit_code(results)


DEVICE_WORDS = ("CUDA error", "HIP error", "device-side assert", "illegal memory access", "no GPU is visible")


def _is_device_failure(result: CaseResult) -> bool:
    return not result.passed and any(words in result.message for words in DEVICE_WORDS)


def inspection_error(found: dict[str, Any]) -> str | None:
    """What an inspection of the worker found that no honest submission does, or None."""
    if found.get("replaced"):
        return f"the submission replaced {escape(', '.join(map(str, found['replaced'])), 200)}"
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


# ---------------------------------------------------------------------------------------------------------------------
# Command line


def log_results(pipe: ResultPipe, mode: str, results: list[CaseResult], code: int) -> None:
    """The contest's keys for these results."""
    word = "test" if mode == "test" else "benchmark"
    pipe.log(f"{word}-count", len(results))
    report_chars = PIPE_BYTES // max(1, len(results)) * 3 // 5
    for i, result in enumerate(results):
        pipe.log(f"{word}.{i}.spec", result.spec, limit=300)
        if mode == "test":
            pipe.log(f"{word}.{i}.status", "pass" if result.passed else "fail")
            pipe.log(f"{word}.{i}.{'message' if result.passed else 'error'}", result.message, optional=True)
        elif not result.passed:
            pipe.log(f"{word}.{i}.status", "fail")
            pipe.log(f"{word}.{i}.error", result.message, optional=True)
        elif mode == "profile":
            report = (result.report or "").encode()[:report_chars]
            pipe.log(f"{word}.{i}.report", base64.b64encode(report, b"+*").decode(), limit=10**9)
        elif result.stats is not None:
            for name, value in asdict(result.stats).items():
                pipe.log(f"{word}.{i}.{name}", value)
    pipe.log("check", "pass" if code == EXIT_PASS else "fail")


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write a file whole or not at all; numbers that JSON lacks become null."""

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(k): clean(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [clean(v) for v in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    text = json.dumps(clean(document), indent=2) + "\n"
    with tempfile.NamedTemporaryFile("w", dir=path.resolve().parent, prefix=".eval-", delete=False) as file:
        try:
            file.write(text)
            file.close()
            os.chmod(file.name, 0o644)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def environment(device: str) -> dict[str, Any]:
    """Card and versions, for the header and the JSON file."""
    import platform

    import torch

    found: dict[str, Any] = {"device": device, "python": platform.python_version(), "torch": torch.__version__}
    with contextlib.suppress(ImportError):
        from importlib import metadata

        for package in ("triton", "aiter", "amd-aiter"):
            with contextlib.suppress(metadata.PackageNotFoundError):
                found[package] = metadata.version(package)
    if device == "cuda":
        found["card"] = torch.cuda.get_device_name()
        found["runtime"] = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    else:
        found["card"] = "none (CPU)"
    return found


def tolerances(tolerance: float) -> dict[str, float]:
    """The active tolerances by name."""
    import reference

    return {
        "contest_rtol": reference.CONTEST_RTOL,
        "contest_atol": reference.CONTEST_ATOL,
        "contest_miss_ratio": reference.CONTEST_MISS_RATIO,
        "strict_rel_l2": tolerance,
        "fp8_slack": FP8_SLACK,
    }


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
modes:
  test         is it right? every case of task.yml, or of CASES
  benchmark    how fast is it? one input per case, timed in the contest's order
  leaderboard  the same with fresh inputs each run, as the ranking is made
  profile      where does the time go? torch's profiler, one call per case
  audit        does it honestly compute attention over the whole cache?
  inspect      gfx950 code of the kernels, without the card

CASES: one case a line, `batchsize: 4; qseqlen: 1; kvseqlen: 1024; seed: 4217`.
exit: 0 pass, 2 usage, 110 device failure, 111 result pipe, 112 check failed, 113 bad case, 114 time limit.
"""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="eval.py",
        description="Check and time a submission; without a GPU in Triton's interpreter, on reduced shapes.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("mode", choices=(*MODES, *EXTRA_MODES), help="what to do, see below")
    parser.add_argument("cases", nargs="?", type=Path, help="file with cases (default: those of task.yml)")
    parser.add_argument("--submission", type=Path, default=HERE / "submission.py", help="default: submission.py")
    parser.add_argument(
        "--device", choices=("auto", "cuda", "cpu"), default="auto", help="default: a GPU if there is one"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything to FILE too")
    parser.add_argument("--seed", type=int, help="work this number into every seed (default: POPCORN_SEED, if set)")
    parser.add_argument(
        "--tolerance", type=float, default=STRICT_REL_L2, help=f"of the strict check (default: {STRICT_REL_L2})"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=FIRST_CALL_LIMIT_S,
        metavar="S",
        help=f"limit of a case's first call in seconds (default: {FIRST_CALL_LIMIT_S:.0f})",
    )
    parser.add_argument(
        "--compare", type=Path, metavar="OLD.json", help="compare the times with an earlier --json file"
    )
    parser.add_argument(
        "--explain", action="store_true", help="show what the submission's picker tried, and what it printed"
    )
    return parser


def fail(code: int, message: str) -> int:
    print(f"eval.py: {message}", file=sys.stderr)
    return code


def choose_device(wanted: str) -> str | None:
    """ "cuda" or "cpu"; None when a GPU is asked for and there is none."""
    import torch

    if wanted == "cpu":
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    return None if wanted == "cuda" else "cpu"


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
    options = build_parser().parse_args(argv)
    # `import eval` elsewhere means this module, also when it runs as the main one.
    sys.modules.setdefault("eval", sys.modules[__name__])
    if argv is None:
        hide_command_line()
        signal.signal(signal.SIGTERM, _interrupted)
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
    submission = options.submission.resolve()
    device = choose_device(options.device)
    if device is None:
        return fail(EXIT_DEVICE, "no GPU that this torch can use; --device cpu checks the file in the interpreter")
    if str(HERE) not in sys.path:
        sys.path.insert(0, str(HERE))
    if device == "cpu":
        # The reduced shapes are too small for more, and spinning threads of two processes are in each other's way.
        torch_threads(1)
    if options.mode == "audit":
        from evalkit import audit

        return audit.main(options, device, submission, secret, pipe, nursery, own_process)
    if options.mode == "inspect":
        return _inspect(options)

    if options.cases is not None:
        try:
            text = options.cases.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise SpecError(f"{options.cases}: {error}") from error
        cases = parse_cases(text, options.cases.name)
    else:
        cases = manifest_cases("tests" if options.mode == "test" else "benchmarks")
    reduced = device == "cpu" and options.cases is None
    if reduced:
        cases = [reduced_case(case) for case in cases]
    elif device == "cpu" and max(case.tokens for case in cases) > MANY_TOKENS:
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
        first_call_limit_s=options.timeout,
        reporter=reporter,
        shared_nursery=nursery,
        own_process=own_process,
    )
    results, code = run.all_cases(cases)
    if pipe is not None:
        log_results(pipe, options.mode, results, code)
    reporter.finish(run, results, code)
    if options.json is not None:
        write_json(options.json, report_document(run, results, code))
    return code


def report_document(run: Run, results: list[CaseResult], code: int) -> dict[str, Any]:
    """The JSON file."""
    means = [r.stats.mean for r in results if r.stats is not None]
    complete = bool(means) and len(means) == len(results)
    return {
        "mode": run.mode,
        "official": False,
        "submission": run.submission.name,
        "environment": environment(run.device),
        "reduced_shapes": run.reduced,
        "tolerances": tolerances(run.tolerance),
        "cases": [asdict(result) for result in results],
        "geomean_us": geometric_mean(means) / 1e3 if complete else None,
        "passed": code == EXIT_PASS,
        "exit_code": code,
    }


def _inspect(options: argparse.Namespace) -> int:
    try:
        from gfx950 import inspect as gfx950_inspect  # type: ignore[attr-defined, unused-ignore]
    except ImportError as error:
        return fail(EXIT_USAGE, f"inspect needs the gfx950 package beside eval.py: {error}")
    return int(gfx950_inspect.main(options))


if __name__ == "__main__":
    sys.exit(main())
