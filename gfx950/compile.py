"""Cross-compiles Triton and Gluon kernels for gfx950 and refuses code that the assembler complained about.

An assembler error (for instance an inline-asm operand that fits no register) does not reach Python: LLVM prints it, and
then triton.compile returns wrong code all the same, or the whole process exits. So the first compilation of a kernel
runs in a child process whose output is captured; the caller then takes the code from the cache.
"""

import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NoReturn

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGET = GPUTarget("hip", "gfx950", 64)
_ERROR = re.compile(r"\berror:|(?:couldn't|could not) allocate (?:input|output) reg|LLVM ERROR", re.IGNORECASE)
# Code is cached apart from Triton's own cache, which may hold code that was compiled in spite of an error.
_CACHE_SUFFIX = "-gfx950-checked"
# Exit status of the child when the compiler raised an exception, which the caller then gets by compiling itself.
_RAISED = 101
_LONGEST_COMPILATION_S = 600


class AssemblerError(RuntimeError):
    """The compiler printed an error, whether or not it returned code."""


def _compile_in_child(source: Any, options: Any, log: IO[bytes]) -> NoReturn:
    """Body of the child process: compile into the cache, with everything that is printed going to the log."""
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = os.fdopen(1, "w")
    status = 0
    try:
        triton.compile(source, target=TARGET, options=options)
    except BaseException:
        traceback.print_exc()
        status = _RAISED
    sys.stdout.flush()
    os._exit(status)


def _exit_status(child: int) -> int:
    """Wait for the child process, but not for ever: a fork may inherit a lock that nobody holds there any more."""
    deadline = time.monotonic() + _LONGEST_COMPILATION_S
    while time.monotonic() < deadline:
        finished, status = os.waitpid(child, os.WNOHANG)
        if finished:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _printed_by_compiler(source: Any, options: Any) -> tuple[int, str]:
    """Compile in a child process. Returns its wait status (negative: a signal) and what it printed."""
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryFile() as log:
        child = os.fork()
        if child == 0:
            _compile_in_child(source, options, log)
        status = _exit_status(child)
        log.seek(0)
        return status, log.read().decode(errors="replace")


@contextmanager
def _checked_cache() -> Iterator[Path]:
    with knobs.cache.scope():
        directory = knobs.cache.dir
        if not directory.endswith(_CACHE_SUFFIX):
            directory += _CACHE_SUFFIX
        knobs.cache.dir = directory
        yield Path(directory)


def checked_compile(source: Any, target: Any = None, options: Any = None, **kwargs: Any) -> Any:
    """triton.compile that fails when the compiler prints an error. Targets other than gfx950 pass through unchanged.

    Raises:
        AssemblerError: an error was printed, or the compiler brought its process down. Nothing stays in the cache.
    """
    if target is None or getattr(target, "arch", None) != TARGET.arch:
        return triton.compile(source, target=target, options=options, **kwargs)
    with _checked_cache() as directory:
        status, printed = _printed_by_compiler(source, options)
        errors = [line for line in printed.splitlines() if _ERROR.search(line)]
        if status not in (0, _RAISED):
            tail = "\n".join(errors or printed.splitlines()[-5:])
            raise AssemblerError(f"{source.name}: the compiler ended its process (status {status}) after\n{tail}")
        compiled = triton.compile(source, target=target, options=options, **kwargs)
        if errors:
            _forget(directory, compiled)
            listing = "\n".join(errors)
            raise AssemblerError(f"{source.name}: the compiler returned code but printed\n{listing}")
        if printed:
            sys.stderr.write(printed)
    return compiled


def _forget(directory: Path, compiled: Any) -> None:
    """Remove the cache entries of compiled code, so that a second attempt cannot find it and pass."""
    for entry in {Path(path).parent for path in compiled.metadata_group.values()}:
        if entry.parent == directory:
            shutil.rmtree(entry, ignore_errors=True)


def compile_kernel(
    fn: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any] | None = None,
    *,
    divisible_by_16: Collection[str] | None = None,
    within_2gb: bool = True,
    **options: Any,
) -> Any:
    """Compile a @triton.jit or @gluon.jit kernel for gfx950.

    Args:
        fn: the kernel.
        signature: type of each runtime argument, for instance {"x": "*bf16", "n": "i32"}.
        constexprs: value of each constexpr argument.
        divisible_by_16: arguments known to be multiples of 16; by default all pointers, as for PyTorch's tensors.
        within_2gb: pointers are to less than 2 GiB, which lets Triton use buffer instructions, as for such tensors.
        options: compile options such as num_warps, num_stages, waves_per_eu.

    Raises:
        AssemblerError: the compiler printed an error, whether or not it returned code.
        ValueError: an argument has no type and no value, or an unknown name was given.
    """
    constexprs = dict(constexprs or {})
    names = list(fn.arg_names)
    unknown = sorted({*signature, *constexprs} - set(names))
    if unknown:
        raise ValueError(f"signature: {fn.__name__} takes {names}, got also {unknown}")
    missing = [name for name in names if name not in signature and name not in constexprs]
    if missing:
        raise ValueError(f"signature: {fn.__name__} needs a type or value of {missing}")
    types = {name: "constexpr" if name in constexprs else signature[name] for name in names}
    aligned = {name for name in names if types[name].startswith("*")} if divisible_by_16 is None else divisible_by_16
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for position, name in enumerate(names):
        facts: list[list[Any]] = [["tt.divisibility", 16]] if name in aligned else []
        if within_2gb and types[name].startswith("*"):
            facts.append(["tt.pointer_range", 32])
        if facts:
            attributes[(position,)] = facts
    source = _source_class(fn)(fn, types, constexprs, attributes)
    return checked_compile(source, target=TARGET, options=options)


def _source_class(fn: Any) -> Any:
    if not fn.is_gluon():
        return ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    return GluonASTSource
