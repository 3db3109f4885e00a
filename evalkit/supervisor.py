"""Starts workers, talks to them, watches what they use, and ends them; evalkit/worker.py is the other side."""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import json
import math
import mmap
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Without /proc (not on Linux) memory is not watched and strays are not found.
HAS_PROC = os.path.isdir("/proc/self")
# Limit in seconds of a request that names none.
REQUEST_LIMIT_S = 240.0

# What a worker may use: memory as the kernel counts it (all its processes), and printed text.
CPU_MEMORY_BYTES = 4 << 30
GPU_HOST_MEMORY_SHARE = 0.75
MAX_PRINTED_BYTES = 16 << 20
KEPT_TEXT_BYTES = 4000


class WorkerFailure(Exception):
    """The worker, or the submission in it, did not do what was asked; the text says what happened."""

    def __init__(self, reason: str, kind: str = "error") -> None:
        super().__init__(reason)
        self.kind = kind


@contextlib.contextmanager
def reading_answer() -> Iterator[None]:
    """A worker's answer is what a submission may have made of it: one of another form is a failure of the worker."""
    try:
        yield
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise WorkerFailure(f"sent an answer of the wrong form ({type(error).__name__})", "protocol") from error


def _ending(status: int) -> str:
    if status < 0:
        return "ended in an unknown way"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        with contextlib.suppress(ValueError):
            return f"was killed by signal {number} ({signal.Signals(number).name})"
        return f"was killed by signal {number}"
    return f"exited with code {os.WEXITSTATUS(status)} before it answered"


def hide_from_workers() -> None:
    """No process of this user may look into this one, its memory or its descriptors; a worker's root may not either.

    See `give_up_reach` in evalkit/worker.py for the other half.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE


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


def _processes_of(session: int, orphans: set[int]) -> dict[int, tuple[int, float]]:
    """(resident bytes, seconds of processor time) by pid: a session, its descendants elsewhere, and given orphans."""
    everybody: dict[int, tuple[int, int, float]] = {}
    found: set[int] = set()
    for entry in os.listdir("/proc") if HAS_PROC else ():
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            stat = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            ticks = (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")
            everybody[int(entry)] = (int(stat[1]), int(stat[21]) * mmap.PAGESIZE, ticks)
            if int(stat[3]) == session or int(entry) in orphans | {session}:
                found.add(int(entry))
    grown = True
    while grown:
        more = {pid for pid, (parent, _, _) in everybody.items() if parent in found} - found
        found |= more
        grown = bool(more)
    return {pid: everybody[pid][1:] for pid in found}


def _children(parent: int) -> set[int]:
    found: set[int] = set()
    for entry in os.listdir("/proc") if HAS_PROC else ():
        if entry.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                if int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1]) == parent:
                    found.add(int(entry))
    return found


class Nursery:
    """Starts workers and says how they ended; see evalkit/worker.py.

    Args:
        device: "cpu" (Triton interprets), "gfx950" (Triton compiles, the emulator executes) or "cuda".
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
        script = Path(__file__).with_name("worker.py")
        ours, theirs = socket.socketpair()
        env = {k: v for k, v in os.environ.items() if not k.startswith("POPCORN_")}
        env["PYTHONDONTWRITEBYTECODE"] = "1"
        env["EVAL_NURSERY"] = self.mark
        if self.device == "cpu":
            env["TRITON_INTERPRET"] = "1"
        elif self.device == "gfx950":
            env.pop("TRITON_INTERPRET", None)
        if self.device != "cuda":
            env.setdefault("OMP_NUM_THREADS", "1")
        how = "exec" if self.device == "cuda" else "fork"
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

    def strays(self) -> set[int]:
        """Processes that a worker started and that came to this one as orphans."""
        if sys.platform != "linux":
            return set()
        keep = self.known_children | ({self.process.pid} if self.process is not None else set())
        return {pid for pid in _children(os.getpid()) - keep if self.exclusive or self._is_marked(pid)}

    def reap_strays(self) -> None:
        """Kill processes that left their worker's session and came to this one as orphans."""
        for _ in range(20):
            strays = self.strays()
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
        self.on_wait: Callable[[], None] = lambda: None
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
        address = 0 if nursery.device == "cuda" else self.memory_bytes
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
                used = sum(size for size, _ in self.processes().values())
                if used > self.memory_bytes:
                    self._fail(f"used {used >> 20} MiB of memory, the limit is {self.memory_bytes >> 20} MiB", "memory")
            self.on_wait()
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
        except (ValueError, RecursionError):
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

    def processes(self) -> dict[int, tuple[int, float]]:
        """(resident bytes, seconds of processor time) of the worker and of all that it started, by pid."""
        return _processes_of(self.pid, self.nursery.strays()) if self.pid is not None else {}

    def processor_s(self) -> float:
        """Seconds of processor time that they have used so far."""
        return sum(seconds for _, seconds in self.processes().values())

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
            for member in (*_processes_of(pid, self.nursery.strays()), pid):
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
