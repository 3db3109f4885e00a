"""Data, checks and timing that the benchmarks share.

GPU time is the median over replays of a CUDA graph that runs once over several copies of the inputs, together larger
than the last-level cache, so that every call reads its cache from memory as in a real decode step.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

HEADS, QK_DIM, LATENT_DIM, ROPE_DIM = 16, 576, 512, 64
SM_SCALE = 1 / math.sqrt(QK_DIM)
RANKED_SHAPES = ((4, 1024), (32, 1024), (64, 1024), (256, 1024), (4, 8192), (32, 8192), (64, 8192), (256, 8192))
ROTATED_BYTES = 256 << 20  # four times the L2 of an H200
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP8_MAX = 448.0
CHECKED_SEQUENCES = 4


@dataclass(slots=True)
class Case:
    """One decode step in every format; what a kernel does not read may be left out by `make_case`."""

    lengths: list[int]
    q: torch.Tensor  # bf16 [batch, 16, 576]
    kv_indptr: torch.Tensor  # int32 [batch + 1]
    kv_bf16: torch.Tensor | None  # [tokens, 576]
    kv_fp4: torch.Tensor | None  # uint8 [tokens, 288]
    kv_scale: torch.Tensor | None  # uint8 [tokens, 18]
    sm_scale: float = SM_SCALE

    def bytes(self) -> int:
        """Memory that the tensors take."""
        tensors = (self.q, self.kv_bf16, self.kv_fp4, self.kv_scale)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """MXFP4 as aiter's dynamic_mxfp4_quant rounds block scales; ties of values go to even.

    Args:
        x: bf16 [tokens, 576].

    Returns:
        codes uint8 [tokens, 288], scales uint8 [tokens, 18].
    """
    blocks = x.float().view(x.shape[0], QK_DIM // 32, 32)
    peak = ((blocks.abs().amax(-1).view(torch.int32) + 0x200000) & -0x800000).view(torch.float32)
    exponent = torch.where(peak > 0, torch.floor(torch.log2(peak)) - 2, torch.full_like(peak, -127)).clamp(-127, 127)
    scaled = blocks * torch.exp2(-exponent)[..., None]
    magnitude = scaled.abs().clamp(max=6.0)
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    rounded = torch.round(magnitude / step) * step
    levels = torch.tensor(E2M1, device=x.device)
    codes = torch.bucketize(rounded, levels).to(torch.uint8) | ((scaled < 0).to(torch.uint8) << 3)
    codes = codes.view(x.shape[0], QK_DIM)
    return codes[:, 0::2] | (codes[:, 1::2] << 4), (exponent + 127).to(torch.uint8)


def dequantise(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float64 [tokens, 576]."""
    levels = torch.tensor([*E2M1, *(-v for v in E2M1)], dtype=torch.float64, device=codes.device)
    values = levels[torch.stack([codes & 15, codes >> 4], -1).view(codes.shape[0], QK_DIM).long()]
    return values * torch.exp2(scales.double() - 127).repeat_interleave(32, 1)


def make_case(lengths: Sequence[int], seed: int, *, bf16: bool, mxfp4: bool) -> Case:
    """N(0, 1) queries and cache on the current CUDA device, in the formats asked for."""
    generator = torch.Generator("cuda").manual_seed(seed)
    tokens = sum(lengths)
    q = torch.randn((len(lengths), HEADS, QK_DIM), dtype=torch.bfloat16, device="cuda", generator=generator)
    kv = torch.randn((tokens, QK_DIM), dtype=torch.bfloat16, device="cuda", generator=generator)
    indptr = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(torch.int32).cuda()
    codes = scales = None
    if mxfp4:
        pieces = [quantise(piece) for piece in kv.split(1 << 18)]
        codes, scales = torch.cat([c for c, _ in pieces]), torch.cat([s for _, s in pieces])
    return Case(list(lengths), q, indptr, kv if bf16 else None, codes, scales)


def rotation(lengths: Sequence[int], *, bf16: bool, mxfp4: bool) -> list[Case]:
    """Cases of one shape, at least two, together over `ROTATED_BYTES`."""
    cases = [make_case(lengths, 0, bf16=bf16, mxfp4=mxfp4)]
    count = max(2, min(128, -(-ROTATED_BYTES // cases[0].bytes())))
    return cases + [make_case(lengths, seed, bf16=bf16, mxfp4=mxfp4) for seed in range(1, count)]


def worst_error(case: Case, out: torch.Tensor) -> float:
    """Largest relative L2 per (sequence, head) against float64 over the cache that was read, on some sequences."""
    bounds, worst = case.kv_indptr.tolist(), 0.0
    for b in sorted({round(i * (len(bounds) - 2) / (CHECKED_SEQUENCES - 1)) for i in range(CHECKED_SEQUENCES)}):
        rows = slice(bounds[b], bounds[b + 1])
        if case.kv_bf16 is not None:
            k = case.kv_bf16[rows].double()
        else:
            assert case.kv_fp4 is not None and case.kv_scale is not None
            k = dequantise(case.kv_fp4[rows], case.kv_scale[rows])
        expected = torch.softmax(case.q[b].double() @ k.T * case.sm_scale, -1) @ k[:, :LATENT_DIM]
        error = (out[b].double() - expected).norm(dim=-1) / expected.norm(dim=-1)
        worst = math.inf if error.isnan().any() else max(worst, error.max().item())
    return worst


def graph_time_us(calls: Sequence[Callable[[], object]], replays: int = 9) -> float:
    """Median GPU time of one call, microseconds: a graph of all calls, replayed."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def single_call_time_us(calls: Sequence[Callable[[], object]], repeats: int = 9) -> float:
    """Median of event-to-event time as the contest takes it: flush, event, call, event, then synchronise."""
    flush = torch.empty(ROTATED_BYTES, dtype=torch.uint8, device="cuda")
    times = []
    for i in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        for _ in range(4):
            flush.zero_()
        begin.record()
        calls[i % len(calls)]()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def geometric_mean(values: Sequence[float]) -> float:
    """Of positive numbers."""
    return math.exp(sum(map(math.log, values)) / len(values))
