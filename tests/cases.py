"""Synthetic decode problems and their float64 answers, written apart from the code under test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

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
    # Put in last: ("q", query token, head, dim, value), ("scale", token, block, byte), ("codes", token, byte)
    planted: tuple[tuple[Any, ...], ...] = ()

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
    q = torch.randn(batch * case.q_len, case.heads, 576, generator=gen).double() * case.q_factor
    largest = torch.finfo(torch.bfloat16).max
    q = q.clamp(-largest, largest).to(torch.bfloat16)
    codes = torch.randint(0, 256, (total, 288), dtype=torch.uint8, generator=gen)
    scales = torch.full((total + case.scale_pad, 18 + case.scale_pad), 255, dtype=torch.uint8)
    choice = torch.tensor(case.scale_bytes, dtype=torch.uint8)
    inside = slice(case.lead, total - 3)
    drawn = torch.randint(0, len(choice), (sum(case.lengths), 18), generator=gen)
    scales[inside, :18] = choice[drawn]
    bounds = [case.lead]
    for length in case.lengths:
        bounds.append(bounds[-1] + length)
    for kind, *index, value in case.planted:
        {"q": q, "scale": scales, "codes": codes}[kind][tuple(index)] = value
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


def answer(case: Case, t: Tensors, cache: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 out [batch * q_len, heads, 512] and natural-log lse; the query tokens are causal among themselves.

    The cache is the dequantised MXFP4 one, or the float64 [total_kv, 576] that is given.
    """
    outs, lses = [], []
    for i in range(len(case.lengths)):
        first, last = int(t.indptr[i]), int(t.indptr[i + 1])
        keys = dequantise(t.codes[first:last], t.scales[first:last]) if cache is None else cache[first:last]
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


BF16_STEP = 2.0**-133  # between bf16's denormals: outputs around it cannot be nearer
GUARD = 512  # elements before and behind each buffer


@dataclass(frozen=True)
class Layout:
    """How the tensors of a case lie in memory."""

    scales: str = "padded"  # "padded" | "trimmed": [tokens, 18] | "columns": column-major | "spread": every other byte
    row_bytes: int = 288  # from one token's codes to the next
    q_pitch: int = 576  # from one head's query to the next
    native: bool = False  # float4_e2m1fn_x2 and float8_e8m0fnu, else uint8
    singleton: bool = False  # the contest's [tokens, 1, 288] for the codes, else [tokens, 288]
    long_indptr: bool = False  # int64, else int32

    def __str__(self) -> str:
        names = [name for name in ("native", "singleton", "long_indptr") if getattr(self, name)]
        return "-".join([self.scales, f"kv{self.row_bytes}", f"q{self.q_pitch}", *names])


class Guarded:
    """A case's tensors in the middle of larger buffers, which a kernel must leave as they are.

    What lies around them is NaN wherever the type has one (scale byte 255, bf16 and E8M0 0xFF..).
    """

    def __init__(self, t: Tensors, layout: Layout = Layout()) -> None:
        self._buffers: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        heads, rows = t.q.shape[1], len(t.scales)
        self.q = self._place("q", t.q, (heads * layout.q_pitch, layout.q_pitch, 1))
        self.codes = self._place("codes", t.codes, (layout.row_bytes, 1))
        scales = t.scales[: len(t.codes), :18] if layout.scales == "trimmed" else t.scales
        columns = scales.shape[1]
        strides = {"columns": (1, rows), "spread": (2 * columns, 2)}.get(layout.scales, (columns, 1))
        self.scales = self._place("scales", scales, strides)
        self.indptr = self._place("indptr", t.indptr.long() if layout.long_indptr else t.indptr, (1,))
        if layout.singleton:
            self.codes = self.codes[:, None]
        if layout.native:
            self.codes = self.codes.view(torch.float4_e2m1fn_x2)
            self.scales = self.scales.view(torch.float8_e8m0fnu)
        for name, (buffer, _) in self._buffers.items():
            self._buffers[name] = buffer, buffer.clone()

    def _place(self, name: str, values: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
        extent = 1 + sum((n - 1) * stride for n, stride in zip(values.shape, strides, strict=True))
        size = values.element_size()
        buffer = torch.full(((extent + 2 * GUARD) * size,), 255, dtype=torch.uint8)
        view = buffer.view(values.dtype).as_strided(values.shape, strides, GUARD)
        view.copy_(values)
        self._buffers[name] = buffer, buffer
        return view

    def changed(self) -> list[str]:
        """Names of the inputs that are not what they were, surroundings included."""
        return [name for name, (now, then) in self._buffers.items() if not torch.equal(now, then)]


class Allocations:
    """Buffers handed out inside `guarded_allocations`."""

    def __init__(self) -> None:
        self._buffers: list[tuple[torch.Tensor, int]] = []

    def make(self, shape: Any, dtype: torch.dtype | None, device: Any) -> torch.Tensor:
        dtype = dtype or torch.get_default_dtype()
        count, size = torch.Size(shape).numel(), dtype.itemsize
        buffer = torch.full(((count + 2 * GUARD) * size,), 0xA5, dtype=torch.uint8, device=device)
        self._buffers.append((buffer, GUARD * size))
        inside = buffer[GUARD * size : (GUARD + count) * size]
        inside.fill_(255)  # NaN, or -1
        return inside.view(dtype).view(shape)

    def overrun(self) -> bool:
        """Whether anything was written before or behind a buffer."""
        return any(bool((b[:n] != 0xA5).any() or (b[-n:] != 0xA5).any()) for b, n in self._buffers)


@contextmanager
def guarded_allocations() -> Iterator[Allocations]:
    """Every output and scratch that is allocated inside is full of NaN and lies between canaries."""
    made = Allocations()

    def size(args: tuple[Any, ...]) -> Any:
        return args[0] if len(args) == 1 and not isinstance(args[0], int) else args

    def empty(*args: Any, dtype: Any = None, device: Any = None, **rest: Any) -> torch.Tensor:
        return made.make(size(args), dtype, device)

    def empty_like(x: torch.Tensor, *, dtype: Any = None, **rest: Any) -> torch.Tensor:
        return made.make(x.shape, dtype or x.dtype, x.device)

    def new_empty(x: torch.Tensor, *args: Any, dtype: Any = None, **rest: Any) -> torch.Tensor:
        return made.make(size(args), dtype or x.dtype, x.device)

    with (
        mock.patch.object(torch, "empty", empty),
        mock.patch.object(torch, "empty_like", empty_like),
        mock.patch.object(torch.Tensor, "new_empty", new_empty),
    ):
        yield made


def complaints(
    out: torch.Tensor, lse: torch.Tensor | None, case: Case, t: Tensors, rel_l2: float = 5e-3, lse_off: float = 1e-4
) -> list[str]:
    """What is wrong with an answer: NaN elsewhere than float64 has it, relative L2 of a (query token, head), lse."""
    want, want_lse = answer(case, t)
    found = []
    nan = want.isnan().any(-1)
    if not torch.equal(out.isnan().any(-1), nan):
        found.append(f"NaN in rows {out.isnan().any(-1).nonzero().tolist()}, expected in {nan.nonzero().tolist()}")
    if not bool(out[nan].isnan().all()):
        found.append("a row that should be NaN is so only in part")
    gap, size = (out.double() - want)[~nan].norm(dim=-1), want[~nan].norm(dim=-1)
    gap = (gap - 512**0.5 * BF16_STEP).clamp(min=0)
    rel = torch.where(gap == 0, gap, gap / size)
    if not bool((rel <= rel_l2).all()):
        found.append(f"relative L2 {rel.max():.1e}")
    if lse is not None:
        lse, expected = lse.double()[~nan], want_lse[~nan]
        same = lse == expected  # both -inf
        off = torch.where(same, 0.0, (lse - expected).abs() / expected.abs().clamp(min=1))
        if not bool((off <= lse_off).all()):
            found.append(f"lse off by {off.max():.1e}")
    return found


MAX_VALUE_BYTE = 252  # six times two to this minus 127 is the largest value that float32 holds with every code
FAR_ENDS = (
    "values 20",
    "values 200",
    "scores 1e10",
    "scores 1e20",
    "scores 1e37",
    "largest q",
    "equal scores 1e10",
    "scores 3e38",
)


def far_end(kind: str, lengths: tuple[int, ...]) -> tuple[Case, Tensors]:
    """Values or scores near the end of float32's range, where float32 attention is finite and near float64's.

    "values n": up to 6 * 2^125, without signs; scores rise by n powers of two in the last head, evenly less in the
    heads before it, and fall in the first ones. "scores 3e38": of either sign, by head.
    """
    q_factor = {"scores 1e10": 2.0**28, "scores 1e20": 2.0**62, "scores 1e37": 2.0**115, "largest q": 2.0**127}
    if kind in q_factor:
        case = Case(lengths, scale_bytes=(100, 101) if kind == "largest q" else (127, 128), q_factor=q_factor[kind])
        return case, build(case)
    case = Case(lengths, scale_bytes=(127,), sm_scale=1.0 if kind == "scores 3e38" else 576**-0.5)
    t, total = build(case), sum(lengths)
    # The score is that of RoPE alone: so many of its dims are 1 and the others 0.
    rank = torch.cat([torch.arange(n) / max(1, n - 1) for n in lengths])  # 0 .. 1 in each sequence
    if kind == "scores 3e38":
        ones, slope = 57 + (6 * rank).long(), torch.where(torch.arange(16) % 2 == 0, 2.0**122, -(2.0**122))
    elif kind == "equal scores 1e10":
        ones, slope = torch.full((total,), 64), torch.full((16,), 2.0**33)
    else:
        growth = float(kind.split()[1])
        ones, slope = (64 * rank).long(), (torch.arange(16) - 8) / 7 * growth / (64 * case.sm_scale * 1.4427)
        t.codes.bitwise_and_(0x77)
        t.scales[:total, :16] = MAX_VALUE_BYTE
    dims = torch.where(torch.arange(64) < ones[:, None], 2, 0)
    t.codes[:total, 256:] = (dims[:, ::2] | dims[:, 1::2] << 4).to(torch.uint8)
    t.q[:, :, :512], t.q[:, :, 512:] = 0, slope[:, None]
    return case, t
