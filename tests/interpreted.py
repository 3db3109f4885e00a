"""Runs the submission's kernels in Triton's interpreter, inside the worker of the `interpreter` fixture."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from cases import Case, build, errors


def start() -> None:
    """Choose interpretation before Triton is imported."""
    os.environ["TRITON_INTERPRET"] = "1"
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    import torch

    torch.set_num_threads(1)


def decode(case: Case, plan: dict[str, Any]) -> tuple[float, float]:
    """errors() of mla_decode with this plan."""
    import submission

    t = build(case)
    plan_ = submission.Plan(**plan)
    out, lse = submission.mla_decode(t.q, t.codes, t.scales, t.indptr, case.sm_scale, plan_)
    return errors(out, lse, case, t)


def decode_into_canaries(case: Case, plan: dict[str, Any]) -> tuple[float, bool]:
    """(worst relative L2, canaries intact) with NaN-poisoned outputs in the middle of larger buffers."""
    import torch

    import submission

    t = build(case)
    rows = t.q.shape[0] * case.heads
    guard = 512
    flat = torch.full((guard + rows * 512 + guard,), torch.nan, dtype=torch.bfloat16)
    flat_lse = torch.full((guard + rows + guard,), torch.nan, dtype=torch.float32)
    flat[:guard] = flat[-guard:] = 7.0
    flat_lse[:guard] = flat_lse[-guard:] = 7.0
    out = flat[guard:-guard].view(t.q.shape[0], case.heads, 512)
    lse = flat_lse[guard:-guard].view(t.q.shape[0], case.heads)
    inputs = submission.Inputs(t.q, t.codes, t.scales, t.indptr, case.sm_scale)
    submission.run_decode(inputs, submission.Plan(**plan), out, lse)
    intact = all(bool((f[:guard] == 7).all() and (f[-guard:] == 7).all()) for f in (flat, flat_lse))
    return max(errors(out, lse, case, t)), intact


def decode_table() -> Any:
    """float32 [256, 32]: what _load_tile makes of each scale byte (row) and each code (columns, twice)."""
    global submission, tl  # where the interpreter looks names up
    import torch
    import triton
    import triton.language as tl

    import submission

    @triton.jit
    def _decode_kernel(codes, scales, out):
        row = tl.program_id(0) * 16 + tl.arange(0, 16)[:, None]
        packed, scale = submission._load_tile(codes + row * 16, scales + row, row < 256, 1, 0, 32, 32)
        tile = submission._decode_tile(packed, scale, False, tl.float32)
        tl.store(out + row * 32 + tl.arange(0, 32)[None, :], tile)

    pairs = torch.arange(16, dtype=torch.uint8)
    codes = ((pairs << 4) | pairs).repeat(256, 1)
    out = torch.empty(256, 32)
    _decode_kernel[(16,)](codes, torch.arange(256, dtype=torch.uint8), out)
    return out.numpy()


def split_queries(factor: float) -> Any:
    """float32 [2, 64, 16]: a bf16 query block and what the scaled body's two fp8 terms and their scales make of it."""
    global submission, tl
    import torch
    import triton
    import triton.language as tl

    import submission

    @triton.jit
    def _split_kernel(q, out):
        at = tl.arange(0, 64)[:, None] * 16 + tl.arange(0, 16)[None, :]
        x = tl.load(q + at)
        first, second, scale = submission._split_q(x)
        exponent = tl.reshape(tl.trans(scale).to(tl.float32)[:, None, :].broadcast_to(2, 32, 16), (64, 16)) - 127
        tl.store(out + at, x.to(tl.float32))
        # Half of the exponent twice: 2^-127 is no normal float32.
        half = tl.exp2(exponent / 2)
        tl.store(out + 1024 + at, (first.to(tl.float32) + second.to(tl.float32)) * half * half)

    gen = torch.Generator().manual_seed(1)
    spread = torch.exp2(torch.randint(-3, 1, (64, 16), generator=gen))
    q = (torch.randn(64, 16, generator=gen) * spread * factor).to(torch.bfloat16)
    out = torch.empty(2, 64, 16)
    _split_kernel[(1,)](q, out)
    return out.numpy()


def contest_call(batch: int, kv: int) -> tuple[float, dict[str, Any]]:
    """(worst relative L2 over the MXFP4 cache, last_pick()) of custom_kernel on generated input."""
    import reference
    import submission

    data = reference.generate_input(batch, 1, kv, 7)
    out = submission.custom_kernel(data)
    again = submission.custom_kernel(data)
    assert out.data_ptr() != again.data_ptr(), "two calls share one output"
    truth, _ = reference.attention_truth(data, cache="mxfp4")
    pick = submission.last_pick()
    assert pick is not None
    return float(reference.relative_l2(out, truth).max()), pick
