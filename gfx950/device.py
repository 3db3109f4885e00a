"""An emulated gfx950 behind Triton's ordinary launch: kernel[grid](...) on CPU tensors runs in the emulator.

The kernels are specialised, compiled and given their arguments by Triton's own code, as on the card. What is replaced
is the driver below it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import triton.compiler
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.driver import driver

from .compile import TARGET, checked_compile
from .driver import MAX_LDS_BYTES, RunStats, findings, run
from .hazards import find_hazards
from .profile import Profile

# Triton keys its caches by device number: one that no real device has keeps emulated kernels apart from others.
_DEVICE = 950
_MAX_THREADS = 1024
_COMPUTE_UNITS = 256


@dataclass(frozen=True)
class Launch:
    """One kernel launch."""

    name: str
    grid: tuple[int, int, int]
    num_warps: int
    shared_bytes: int
    stats: RunStats
    hsaco: bytes = field(repr=False)
    profile: Profile | None = field(repr=False)


class EmulatedDevice:
    """What ran on the emulated device."""

    def __init__(self, options: dict[str, Any], *, profile: bool) -> None:
        self.launches: list[Launch] = []
        self.options = options
        self.profile = profile

    def findings(self) -> list[str]:
        """What is wrong with the launches: races, uninitialised and pending LDS reads, hazards in the code."""
        lines = [f"{launch.name}: {line}" for launch in self.launches for line in findings(launch.stats)]
        kernels = {launch.hsaco: launch.name for launch in self.launches}
        return lines + [f"{name}: {hazard}" for hsaco, name in kernels.items() for hazard in find_hazards(hsaco)]


class _Utils:
    """Stands in for the native helpers that load a binary and ask for a device's properties."""

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[bytes, bytes, int, int, int]:
        # Triton hands the second item, its function handle, to the launcher.
        return binary, binary, 0, 0, _MAX_THREADS

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": MAX_LDS_BYTES, "multiprocessor_count": _COMPUTE_UNITS, "warpSize": TARGET.warp_size}


class _Launcher:
    """Runs a compiled kernel with the arguments that Triton bound."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self._metadata = metadata
        self._kinds = list(source.signature.values())

    def __call__(self, x: int, y: int, z: int, stream: Any, hsaco: bytes, *rest: Any) -> None:
        # Before the kernel's arguments: packed metadata, launch metadata and two hooks.
        bound = zip(self._kinds, rest[4:], strict=True)
        args = [_as_kind(kind, value) for kind, value in bound if kind != "constexpr"]
        metadata = self._metadata
        # Triton keeps a launcher with the compiled kernel: the device may be another one than when it was made.
        device: EmulatedDevice = driver.active.device
        options = dict(device.options)
        profile = Profile(hsaco) if device.profile else None
        if profile is not None:
            options["trace"] = profile
        stats = run(hsaco, args, (x, y, z), shared=metadata.shared, num_warps=metadata.num_warps, **options)
        device.launches.append(
            Launch(metadata.name, (x, y, z), metadata.num_warps, metadata.shared, stats, hsaco, profile)
        )


def _as_kind(kind: str, value: Any) -> Any:
    """An argument as the type it was compiled for: a Python int may be bound to a float parameter."""
    if kind.startswith("*"):
        return value
    return float(value) if kind.startswith("fp") else int(value)


class _Driver(DriverBase):  # type: ignore[misc]
    """The part of a Triton driver that a launch needs."""

    def __init__(self, device: EmulatedDevice) -> None:
        super().__init__()
        self.utils = _Utils()
        self.device = device

    @classmethod
    def is_active(cls) -> bool:
        return False

    def launcher_cls(self, source: Any, metadata: Any) -> _Launcher:
        return _Launcher(source, metadata)

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return _DEVICE

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError("the emulated device compiles no launcher in C")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("the emulated device has no clock")


@contextmanager
def emulated_device(*, profile: bool = False, **options: Any) -> Iterator[EmulatedDevice]:
    """Make Triton launch on an emulated gfx950.

    Args:
        profile: keep a Profile of each launch, for pricing what was executed.
        options: arguments of `run` for every launch, for instance check=False.

    Yields:
        The device, with a record of each launch.
    """
    device = EmulatedDevice(options, profile=profile)
    previous = driver._active
    # A kernel picks up the compile function when it is first launched on a device.
    with mock.patch.object(triton.compiler, "compile", checked_compile):
        driver.set_active(_Driver(device))
        try:
            yield device
        finally:
            driver._active = previous
