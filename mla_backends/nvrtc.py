"""Compile CUDA C++ at run time and launch it: NVRTC and the CUDA driver through ctypes, nothing else.

torch brings the NVRTC library and the driver is there where a GPU is, so neither a host compiler nor a further package
is needed. Compiled code is kept in a cache directory of the user, if that can be written.
"""

from __future__ import annotations

import ctypes
import glob
import hashlib
import os
import sys
import tempfile
from functools import cache
from pathlib import Path


class CompileError(RuntimeError):
    """NVRTC refused the source; the message holds its log."""


class DriverError(RuntimeError):
    """The CUDA driver refused a call; the message holds the call and the driver's text."""


class _LaunchAttribute(ctypes.Structure):
    # CUlaunchAttribute: an id, padding to 8 bytes, a 64-byte union of which three words are used here.
    _fields_ = (("id", ctypes.c_uint32), ("pad", ctypes.c_uint32), ("value", ctypes.c_uint32 * 16))


class _LaunchConfig(ctypes.Structure):
    # CUlaunchConfig of the CUDA driver API.
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint32),
        ("queue", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("num_attributes", ctypes.c_uint32),
    )


# CUlaunchAttributeID, CUfunction_attribute and CUdevice_attribute of the CUDA driver API.
_ATTRIBUTE_CLUSTER_DIMENSION = 4
_MAX_DYNAMIC_SHARED_BYTES = 8
_NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14
_RESERVED_SHARED_MEMORY_PER_BLOCK = 111


def nvrtc_candidates() -> list[str]:
    """File names to try for the NVRTC library, best first: torch's own, CUDA_HOME's, the loader's."""
    found: list[str] = []
    for folder in sys.path:
        for pattern in ("nvidia/cu*/lib/libnvrtc.so.*", "nvidia/cuda_nvrtc/lib/libnvrtc.so.*"):
            found += sorted(glob.glob(os.path.join(folder or ".", pattern)), reverse=True)
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        if home:
            found += sorted(glob.glob(os.path.join(home, "lib64", "libnvrtc.so.*")), reverse=True)
    # The alternative build is a twin of the library, not a fallback; builtins are loaded by the library itself.
    found = [name for name in found if ".alt." not in os.path.basename(name) and "builtins" not in name]
    return [*found, "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"]


@cache
def load_nvrtc() -> ctypes.CDLL:
    """The NVRTC library.

    Raises:
        OSError: none of `nvrtc_candidates()` can be loaded.
    """
    reasons = []
    for name in nvrtc_candidates():
        try:
            # The library opens its builtins by bare name; loaded before, they are found wherever they lie.
            for builtins in sorted(glob.glob(os.path.join(os.path.dirname(name), "libnvrtc-builtins.so.*"))):
                if ".alt." not in builtins:
                    ctypes.CDLL(builtins)
            return ctypes.CDLL(name)
        except OSError as error:
            reasons.append(str(error))
    raise OSError("NVRTC not found: " + "; ".join(reasons))


@cache
def load_driver() -> ctypes.CDLL:
    """The CUDA driver library; OSError where there is none."""
    return ctypes.CDLL("libcuda.so.1")


def _check(code: int, call: str) -> None:
    if code:
        text = ctypes.c_char_p()
        load_driver().cuGetErrorString(code, ctypes.byref(text))
        raise DriverError(f"{call}: error {code} ({(text.value or b'unknown').decode()})")


def reserved_shared_bytes(device_index: int) -> int:
    """Shared memory of a CTA that the system keeps for itself, bytes: what a kernel uses begins behind it.

    Args:
        device_index: CUDA device.
    """
    driver, device, size = load_driver(), ctypes.c_int(), ctypes.c_int()
    _check(driver.cuDeviceGet(ctypes.byref(device), device_index), "cuDeviceGet")
    attribute = _RESERVED_SHARED_MEMORY_PER_BLOCK
    _check(driver.cuDeviceGetAttribute(ctypes.byref(size), attribute, device), "cuDeviceGetAttribute")
    return size.value


def nvrtc_version() -> tuple[int, int]:
    """Version of the NVRTC library that `compile_cubin` uses."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    load_nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def compile_source(source: str, name: str, options: tuple[str, ...]) -> bytes:
    """Compile CUDA C++ to machine code (cubin), without a cache.

    Args:
        source: the translation unit.
        name: its name in messages.
        options: NVRTC options; must hold --gpu-architecture=sm_XX.

    Raises:
        CompileError: with NVRTC's log.
    """
    nvrtc = load_nvrtc()
    program = ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), 0, None, None)
    try:
        array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        failed = nvrtc.nvrtcCompileProgram(program, len(options), array)
        size = ctypes.c_size_t()
        if failed:
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise CompileError(f"{name}: {log.value.decode(errors='replace')}")
        nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
        cubin = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetCUBIN(program, cubin)
        return cubin.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def cache_dir() -> Path:
    """Where compiled code is kept."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(root) / "mla_backends"


def compile_cubin(source: str, name: str, options: tuple[str, ...]) -> bytes:
    """`compile_source` behind a disk cache keyed by source, options and compiler version."""
    key = hashlib.sha256(repr((source, options, nvrtc_version())).encode()).hexdigest()
    path = cache_dir() / f"{key}.cubin"
    try:
        return path.read_bytes()
    except OSError:
        pass
    cubin = compile_source(source, name, options)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Renamed into place, so that another process never reads half a file.
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(cubin)
        os.replace(file.name, path)
    except OSError:
        pass  # an unwritable cache costs time only
    return cubin


class Kernel:
    """One loaded kernel that takes one struct by value."""

    def __init__(
        self, cubin: bytes, name: str, args_type: type[ctypes.Structure], threads: int, shared_bytes: int = 0
    ) -> None:
        """Load `name` from `cubin` into the current CUDA context.

        Args:
            cubin: machine code for the current device.
            name: the kernel's extern "C" name.
            args_type: the struct that is its only parameter.
            threads: threads of a CTA.
            shared_bytes: dynamic shared memory of a CTA.
        """
        self._driver = load_driver()
        self._module = ctypes.c_void_p()
        self._function = ctypes.c_void_p()
        self.threads = threads
        self.shared_bytes = shared_bytes
        self.args_type = args_type
        _check(self._driver.cuModuleLoadData(ctypes.byref(self._module), cubin), "cuModuleLoadData")
        _check(
            self._driver.cuModuleGetFunction(ctypes.byref(self._function), self._module, name.encode()),
            "cuModuleGetFunction",
        )
        for attribute, value in ((_MAX_DYNAMIC_SHARED_BYTES, shared_bytes), (_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)):
            _check(self._driver.cuFuncSetAttribute(self._function, attribute, value), "cuFuncSetAttribute")

    def prepare(self, grid: int, cluster: int) -> PreparedLaunch:
        """A launch of `grid` CTAs in clusters of `cluster`, its argument struct open to be filled.

        Args:
            grid: CTAs.
            cluster: CTAs of a cluster.
        """
        return PreparedLaunch(self, grid, cluster)

    def max_clusters(self, cluster: int) -> int:
        """How many clusters of `cluster` CTAs the device holds at once."""
        launch = self.prepare(cluster, cluster)
        count = ctypes.c_int()
        _check(
            self._driver.cuOccupancyMaxActiveClusters(ctypes.byref(count), self._function, ctypes.byref(launch.config)),
            "cuOccupancyMaxActiveClusters",
        )
        return count.value


class PreparedLaunch:
    """Everything of a launch that does not change between calls, laid out once."""

    def __init__(self, kernel: Kernel, grid: int, cluster: int) -> None:
        """See `Kernel.prepare`."""
        self.kernel = kernel
        self.args = kernel.args_type()
        self._attribute = _LaunchAttribute(id=_ATTRIBUTE_CLUSTER_DIMENSION)
        self._attribute.value[0:3] = [cluster, 1, 1]
        self.config = _LaunchConfig(
            grid=(grid, 1, 1),
            block=(kernel.threads, 1, 1),
            shared_bytes=kernel.shared_bytes,
            attributes=ctypes.pointer(self._attribute),
            num_attributes=1,
        )
        self._params = (ctypes.c_void_p * 1)(ctypes.addressof(self.args))
        self._call = kernel._driver.cuLaunchKernelEx
        self._argv = (ctypes.byref(self.config), kernel._function, self._params, None)

    def __call__(self, queue: int) -> None:
        """Launch on the CUDA queue with this handle."""
        self.config.queue = queue
        code = self._call(*self._argv)
        if code:
            _check(code, "cuLaunchKernelEx")
