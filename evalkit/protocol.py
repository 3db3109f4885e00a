"""The contest's side: exit codes, and results on the pipe that its server reads."""

from __future__ import annotations

import base64
import contextlib
import os
import select
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evalkit.running import CaseResult

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
