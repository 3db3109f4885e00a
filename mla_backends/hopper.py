"""MXFP4 MLA decode on Hopper: plans, workspace and launch of the kernel in `hopper.cu`.

q   bf16 [batch, 16, 576]      kv_fp4 uint8 [tokens, 288]      kv_indptr int32 [batch + 1]
out bf16 [batch, 16, 512]      kv_scale uint8 [tokens, 18], any strides

One launch. Clusters of CTAs take equal shares of all tokens, whatever the lengths; see `hopper.cu`.
"""

from __future__ import annotations

import ctypes
import math
import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from . import nvrtc

HEADS = 16
QK_DIM = 576
LATENT_DIM = 512
TOKEN_BYTES = QK_DIM // 2
SCALE_BLOCKS = QK_DIM // 32
MIN_SCALE_PITCH, MAX_SCALE_PITCH = SCALE_BLOCKS, 32  # bytes between two tokens' scales that the kernel reads in place
MAX_CLUSTER = 16  # over 8 is not portable, but every Hopper GPU so far takes it
ARRIVALS_PER_SEQUENCE = MAX_CLUSTER  # counters, one per rank of a cluster
MAX_PLANS = 8  # each is timed by whoever picks
STEP = 64  # tokens of one pass through the kernel's loop
THREADS = 128
CTAS_PER_SM = 2  # shared memory holds no more
SOURCE = Path(__file__).with_name("hopper.cu")


def shared_bytes(scale_pitch: int) -> int:
    """Shared memory of a CTA; hopper.cu asserts that its `Shared` fits.

    Args:
        scale_pitch: bytes from one token's scales to the next.
    """
    values = STEP * LATENT_DIM * 2
    operands = HEADS * (QK_DIM + STEP) * 2  # Q and the weights
    packed = STEP * (TOKEN_BYTES + scale_pitch) + 4 * 16
    return (values + operands + packed + MAX_CLUSTER * HEADS * 8 + 1024 + 127) & ~127  # statistics, schedule, barriers


def max_clusters(cluster: int) -> int:
    """Clusters that may share one sequence: their statistics must fit where the merge keeps them.

    Args:
        cluster: CTAs of a cluster; above 1 the accumulators stay where they are while peers read them.
    """
    accumulators = HEADS * (LATENT_DIM + 4) * 4 if cluster > 1 else 0
    return (STEP * LATENT_DIM * 2 - accumulators) // (HEADS * 8)


def options(scale_pitch: int, shared_base: int = 1024) -> tuple[str, ...]:
    """NVRTC options.

    Args:
        scale_pitch: bytes from one token's scales to the next.
        shared_base: shared address, bytes, at which a CTA's own memory begins; what comes before is the system's.
    """
    return (
        "--gpu-architecture=sm_90a",  # with its warpgroup products
        "--std=c++17",
        "--device-as-default-execution-space",  # for generic lambdas
        f"-DSCALE_PITCH={scale_pitch}",
        f"-DSHARED_BYTES={shared_bytes(scale_pitch)}",
        f"-DSHARED_BASE={shared_base}",
    )


@dataclass(frozen=True, slots=True)
class HopperPlan:
    """How the launch is cut."""

    cluster: int  # CTAs that share a segment and merge through shared memory: 1, 2, 4, 8 or 16
    clusters: int  # clusters in the grid; each takes an equal share of all tokens

    def __post_init__(self) -> None:
        """Refuse what the kernel cannot run."""
        if self.cluster not in (1, 2, 4, 8, MAX_CLUSTER):
            raise ValueError(f"HopperPlan.cluster: expected 1, 2, 4, 8 or 16, got {self.cluster}")
        limit = max_clusters(self.cluster)
        if not 1 <= self.clusters <= limit:
            raise ValueError(f"HopperPlan.clusters: expected 1..{limit}, got {self.clusters}")


class _Args(ctypes.Structure):
    # `Args` of hopper.cu, field for field.
    _fields_ = (
        ("q", ctypes.c_void_p),
        ("kv", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("kv_indptr", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("parts", ctypes.c_void_p),
        ("part_stats", ctypes.c_void_p),
        ("arrivals", ctypes.c_void_p),
        ("log2_scale", ctypes.c_float),
        ("batch", ctypes.c_int),
    )


def choose_plans(batch: int, total_kv: int, num_sms: int) -> list[HopperPlan]:
    """Plans worth timing for one shape, most promising first; pure.

    Args:
        batch: sequences.
        total_kv: tokens of all sequences.
        num_sms: multiprocessors of the device.
    """
    steps = -(-total_kv // STEP)
    slots = CTAS_PER_SM * num_sms
    plans: list[HopperPlan] = []

    def add(cluster: int, clusters: int) -> None:
        # Larger clusters leave slots free in every GPC; a cluster too many would wait for all others to end.
        resident = int(slots / cluster * {1: 1.0, 2: 1.0, 4: 0.94, 8: 0.91, 16: 0.85}[cluster])
        clusters = min(clusters, resident, max_clusters(cluster), -(-steps // cluster))
        plan = HopperPlan(cluster, max(1, clusters))
        if plan not in plans:
            plans.append(plan)

    # Two CTAs an SM or one, the same number for every sequence, so that a uniform batch is cut evenly.
    for ctas in (slots, num_sms):
        if batch <= ctas:
            splits = 1 << ((ctas // batch).bit_length() - 1)
            for cluster in (1, 2) if splits <= 8 else (4, 8, 16):
                add(cluster, batch * splits // cluster)
    # Every slot busy, cut across sequences: for ragged batches and those that do not divide the machine.
    add(1, slots)
    add(2, slots // 2)
    add(4, slots // 4)
    return plans[:MAX_PLANS]


@dataclass(slots=True)
class _Workspace:
    """Scratch of one CUDA queue: calls on one queue never overlap, so they share it."""

    parts: torch.Tensor  # float32 [2 clusters, 16, 512]
    stats: torch.Tensor  # float32 [2 clusters, 16 ranks, 16 heads, 2]
    arrivals: torch.Tensor  # int32 [batch, 16], zero between launches

    def holds(self, batch: int, clusters: int) -> bool:
        return self.arrivals.shape[0] >= batch and self.parts.shape[0] >= 2 * clusters


def _parts(clusters: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    parts = torch.empty((2 * clusters, HEADS, LATENT_DIM), dtype=torch.float32, device=device)
    return parts, torch.empty((2 * clusters, MAX_CLUSTER, HEADS, 2), dtype=torch.float32, device=device)


class _ZeroArena:
    """Zeroed counters that a graph capture can take without recording a fill of its own.

    The kernel leaves its counters at zero, so they must be zeroed once, before the first replay; a fill recorded in the
    graph would be a second launch at every replay.
    """

    ROWS = 1 << 14

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.refill()

    def refill(self) -> None:
        self._rows = torch.zeros((self.ROWS, ARRIVALS_PER_SEQUENCE), dtype=torch.int32, device=self._device)
        self._used = 0

    def low(self) -> bool:
        return 2 * self._used > self.ROWS

    def take(self, batch: int) -> torch.Tensor:
        if self._used + batch > self.ROWS:
            return torch.zeros((batch, ARRIVALS_PER_SEQUENCE), dtype=torch.int32, device=self._device)
        self._used += batch
        return self._rows[self._used - batch : self._used]


def source_text() -> str:
    """The kernel's source with its one include in place."""
    ptx = SOURCE.with_name("ptx.cuh").read_text().replace("#pragma once\n", "")
    return SOURCE.read_text().replace('#include "ptx.cuh"\n', ptx)


@cache
def load_kernel(device_index: int, scale_pitch: int) -> nvrtc.Kernel:
    """The kernel for one device, compiled on the first call.

    Args:
        device_index: CUDA device.
        scale_pitch: bytes from one token's scales to the next.
    """
    with torch.cuda.device(device_index):
        torch.cuda.current_stream()  # makes torch's context current in this thread
        base = nvrtc.reserved_shared_bytes(device_index)
        cubin = nvrtc.compile_cubin(source_text(), SOURCE.name, options(scale_pitch, base))
        return nvrtc.Kernel(cubin, "mla_decode_mxfp4", _Args, THREADS, shared_bytes(scale_pitch))


class HopperBackend:
    """One launch of the sm_90 kernel."""

    name = "hopper"

    def __init__(self) -> None:
        """Nothing is compiled or allocated before the first run."""
        self._lock = threading.Lock()
        self._workspaces: dict[tuple[int, int], _Workspace] = {}
        self._launches: dict[tuple[HopperPlan, int, int, int], nvrtc.PreparedLaunch] = {}
        self._arenas: dict[int, _ZeroArena] = {}

    def supports(self, problem: Any) -> str | None:
        """None, or the reason why the problem is not for this kernel."""
        if problem.arch != "sm_90":
            return f"written for sm_90, the device is {problem.arch}"
        if problem.heads != HEADS:
            return f"written for {HEADS} heads, not {problem.heads}"
        if problem.total_q != problem.batch:
            return f"one query token per sequence only, not {problem.total_q} for {problem.batch} sequences"
        if getattr(problem, "kv_row_bytes", TOKEN_BYTES) != TOKEN_BYTES:
            return f"rows of the cache must be aligned and {TOKEN_BYTES} bytes apart, not {problem.kv_row_bytes}"
        try:
            nvrtc.load_nvrtc()
        except OSError as error:
            return str(error)
        return None

    def plans(self, problem: Any) -> list[HopperPlan]:
        """Plans to time, most promising first."""
        return choose_plans(problem.batch, problem.total_kv, problem.num_cus)

    def run(self, plan: HopperPlan, inputs: Any) -> torch.Tensor:
        """Attention of every query token over its whole sequence.

        Args:
            plan: from `plans`; it affects speed only.
            inputs: q bf16 [batch, 16, 576]; kv_fp4 uint8 [tokens, 288]; kv_scale uint8 [>= tokens, >= 18], any strides;
                kv_indptr int32 or int64 [batch + 1]; sm_scale float.

        Returns:
            bf16 [batch, 16, 512], a fresh tensor; zero for an empty sequence.

        Raises:
            ValueError: a tensor is laid out as the kernel cannot read it.
        """
        q, kv, scale, indptr = inputs.q, inputs.kv_fp4, inputs.kv_scale, inputs.kv_indptr
        batch = q.shape[0]
        if not kv.is_contiguous() or kv.data_ptr() % 16:
            raise ValueError(f"kv_fp4: expected contiguous rows at a 16-byte address, got strides {kv.stride()}")
        if not q.is_contiguous() or q.data_ptr() % 16:
            q = q.clone(memory_format=torch.contiguous_format)
        if indptr.dtype != torch.int32 or not indptr.is_contiguous():
            indptr = indptr.to(torch.int32).contiguous()
        pitch, col_stride = scale.stride()
        if col_stride != 1 or not MIN_SCALE_PITCH <= pitch <= MAX_SCALE_PITCH:
            scale = scale[:, :SCALE_BLOCKS].contiguous()  # a second launch, for layouts that nobody is known to use
        device = q.device
        if device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self._launch(plan, q, kv, scale, indptr, inputs.sm_scale, batch)
        return self._launch(plan, q, kv, scale, indptr, inputs.sm_scale, batch)

    def _launch(
        self,
        plan: HopperPlan,
        q: torch.Tensor,
        kv: torch.Tensor,
        scale: torch.Tensor,
        indptr: torch.Tensor,
        sm_scale: float,
        batch: int,
    ) -> torch.Tensor:
        index = q.device.index
        queue = torch.cuda.current_stream().cuda_stream
        # A launch's argument struct is filled anew at each call, so two queues must not share one.
        key = (plan, scale.stride(0), index, queue)
        out = torch.empty((batch, HEADS, LATENT_DIM), dtype=torch.bfloat16, device=q.device)
        with self._lock:  # threads share a queue, and with it the struct from here until the launch has read it
            launch = self._launches.get(key)
            if launch is None:
                kernel = load_kernel(index, scale.stride(0))
                launch = kernel.prepare(plan.cluster * plan.clusters, plan.cluster)
                self._launches[key] = launch
            space = self._workspace(index, queue, batch, plan.clusters, q.device)
            args = launch.args
            args.q, args.kv, args.scale = q.data_ptr(), kv.data_ptr(), scale.data_ptr()
            args.kv_indptr, args.out = indptr.data_ptr(), out.data_ptr()
            args.parts, args.part_stats = space.parts.data_ptr(), space.stats.data_ptr()
            args.arrivals = space.arrivals.data_ptr()
            args.log2_scale, args.batch = sm_scale * math.log2(math.e), batch
            launch(queue)
        return out

    def _workspace(self, index: int, queue: int, batch: int, clusters: int, device: torch.device) -> _Workspace:
        arena = self._arenas.get(index)
        if torch.cuda.is_current_stream_capturing():
            # A graph's replays may overlap anything else, so every captured call has a workspace of its own.
            if arena is None:
                zeros = torch.zeros((batch, ARRIVALS_PER_SEQUENCE), dtype=torch.int32, device=device)
                return _Workspace(*_parts(clusters, device), zeros)
            return _Workspace(*_parts(clusters, device), arena.take(batch))
        if arena is None:
            self._arenas[index] = _ZeroArena(device)
        elif arena.low():
            arena.refill()
        space = self._workspaces.get((index, queue))
        if space is None or not space.holds(batch, clusters):
            zeros = torch.zeros((max(batch, 64), ARRIVALS_PER_SEQUENCE), dtype=torch.int32, device=device)
            space = _Workspace(*_parts(clusters, device), zeros)
            self._workspaces[index, queue] = space
        return space
