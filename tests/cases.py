"""Synthetic decode problems and their float64 answers, written apart from the code under test."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True)
class Case:
    """One decode problem; the fields are picklable, so that a worker process can build it."""

    lengths: tuple[int, ...]
    heads: int = 16
    q_len: int = 1
    seed: int = 0
    scale_bytes: tuple[int, ...] = tuple(range(123, 130))  # drawn from, one per block
    q_factor: float = 1.0
    scale_pad: int = 6  # extra, uninitialised columns and rows of the scale tensor
    lead: int = 0  # tokens of the cache before the first sequence
    sm_scale: float = 576**-0.5

    def __str__(self) -> str:
        lengths = "-".join(map(str, self.lengths[:6])) + ("..." if len(self.lengths) > 6 else "")
        return f"{lengths}-h{self.heads}-q{self.q_len}"


@dataclass(frozen=True)
class Tensors:
    q: torch.Tensor  # bf16 [batch * q_len, heads, 576]
    codes: torch.Tensor  # uint8 [total_kv, 288]
    scales: torch.Tensor  # uint8 [total_kv + pad, 18 + pad]
    indptr: torch.Tensor  # int32 [batch + 1]


def build(case: Case) -> Tensors:
    """The case's tensors; tokens outside every sequence and padding of the scales are NaN (byte 255)."""
    gen = torch.Generator().manual_seed(case.seed)
    total = case.lead + sum(case.lengths) + 3
    batch = len(case.lengths)
    q = (torch.randn(batch * case.q_len, case.heads, 576, generator=gen) * case.q_factor).to(torch.bfloat16)
    codes = torch.randint(0, 256, (total, 288), dtype=torch.uint8, generator=gen)
    scales = torch.full((total + case.scale_pad, 18 + case.scale_pad), 255, dtype=torch.uint8)
    choice = torch.tensor(case.scale_bytes, dtype=torch.uint8)
    inside = slice(case.lead, total - 3)
    drawn = torch.randint(0, len(choice), (sum(case.lengths), 18), generator=gen)
    scales[inside, :18] = choice[drawn]
    bounds = [case.lead]
    for length in case.lengths:
        bounds.append(bounds[-1] + length)
    return Tensors(q, codes, scales, torch.tensor(bounds, dtype=torch.int32))


def dequantise(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """uint8 codes [n, 288] and scale bytes [n, >= 18] -> float64 [n, 576]."""
    table = torch.tensor(E2M1, dtype=torch.float64)
    values = torch.empty(len(codes), 576, dtype=torch.float64)
    values[:, 0::2] = table[(codes & 15).long()]
    values[:, 1::2] = table[(codes >> 4).long()]
    exponent = scales[:, :18].to(torch.float64) - 127
    factor = torch.where(scales[:, :18] == 255, torch.nan, torch.exp2(exponent))
    return values * factor.repeat_interleave(32, dim=1)


def answer(case: Case, t: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 out [batch * q_len, heads, 512] and natural-log lse; the query tokens are causal among themselves."""
    outs, lses = [], []
    for i in range(len(case.lengths)):
        first, last = int(t.indptr[i]), int(t.indptr[i + 1])
        keys = dequantise(t.codes[first:last], t.scales[first:last])
        for j in range(case.q_len):
            seen = keys[: max(0, last - first - (case.q_len - 1 - j))]
            scores = t.q[i * case.q_len + j].double() @ seen.T * case.sm_scale
            lses.append(torch.logsumexp(scores, -1) if len(seen) else torch.full((case.heads,), -torch.inf).double())
            outs.append(torch.softmax(scores, -1) @ seen[:, :512])
    return torch.stack(outs), torch.stack(lses)


def errors(out: torch.Tensor, lse: torch.Tensor | None, case: Case, t: Tensors) -> tuple[float, float]:
    """Worst relative L2 per (query token, head), worst lse gap over max(1, |lse|); inf where emptiness differs."""
    want, want_lse = answer(case, t)
    gap = (out.double() - want).norm(dim=-1)
    size = want.norm(dim=-1)
    rel = torch.where(size == 0, torch.where(gap == 0, 0.0, torch.inf), gap / size).nan_to_num(nan=torch.inf)
    if lse is None:
        return float(rel.max()), 0.0
    empty = torch.isneginf(want_lse)
    off = torch.where(
        empty,
        torch.where(torch.isneginf(lse), 0.0, torch.inf),
        (lse.double() - want_lse).abs() / want_lse.abs().clamp(min=1),
    )
    return float(rel.max()), float(off.nan_to_num(nan=torch.inf).max())
