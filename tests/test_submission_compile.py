"""Every plan that the submission would try on a ranked shape compiles for its machine, ahead of time."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import yaml
from cases import ROOT
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import submission

TARGETS = {
    "gfx950": GPUTarget("hip", "gfx950", 64),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
}
NUM_CUS = {"gfx950": 256, "gfx942": 304, "sm_80": 108, "sm_90": 132, "sm_100": 148}
SHAPES = [(c["batchsize"], c["kvseqlen"]) for c in yaml.safe_load((ROOT / "task.yml").read_text())["benchmarks"]]


def ranked_plans(arch: str) -> list[submission.Plan]:
    """The Triton plans of all ranked shapes that differ in code: num_splits is a run-time number, 1 or more."""
    plans = []
    for batch, kv in SHAPES:
        problem = submission.Problem(
            batch, batch, 16, batch * kv, kv, kv, arch, NUM_CUS[arch], torch.device("cpu"), 288, (18, 1), True
        )
        plans += [replace(p, num_splits=min(p.num_splits, 2)) for p in submission.candidate_plans(problem)]
    return list(dict.fromkeys(p for p in plans if isinstance(p, submission.Plan)))


def compile_attend(arch: str, plan: submission.Plan) -> Any:
    pointers = dict(
        q_ptr="*bf16", kv_ptr="*u8", scale_ptr="*u8", kv_indptr_ptr="*i32", out_ptr="*bf16", lse_ptr="constexpr",
        partial_out_ptr="*fp32", partial_lse_ptr="*fp32",
    )  # fmt: skip
    constants: dict[str, Any] = dict(
        lse_ptr=None, scale_col_stride=1, q_len=1, HEADS=16, HEAD_GROUP=plan.head_group, BLOCK_N=plan.block_n,
        CHUNK=plan.chunk, SPLIT=plan.num_splits > 1, DTYPE=submission.tl.bfloat16,
    )  # fmt: skip
    if plan.num_splits == 1:
        constants |= {"partial_out_ptr": None, "partial_lse_ptr": None}
    numbers = dict(kv_row_stride="i32", scale_row_stride="i32", qk_scale="fp32", num_splits="i32")
    names = submission._attend_kernel.arg_names
    signature = {n: "constexpr" if n in constants else (pointers | numbers)[n] for n in names}
    aligned = {(names.index(n),): [["tt.divisibility", 16]] for n in [*pointers, "kv_row_stride"] if n not in constants}
    source = ASTSource(submission._attend_kernel, signature, constants, aligned)
    return triton.compile(
        source, target=TARGETS[arch], options={"num_warps": plan.num_warps, "num_stages": plan.num_stages}
    )


@pytest.mark.parametrize(("arch", "plan"), [(a, p) for a in TARGETS for p in ranked_plans(a)], ids=str)
def test_ranked_plan_compiles(arch: str, plan: submission.Plan) -> None:
    compiled = compile_attend(arch, plan)
    if arch.startswith("gfx"):
        text = compiled.asm["amdgcn"]
        assert "mfma" in text
        spills = int(re.search(r"\.vgpr_spill_count:\s*(\d+)", text).group(1))  # type: ignore[union-attr]
        assert spills == 0, f"{spills} spilled registers"
        loads = set(re.findall(r"(global_load_\w+|buffer_load_\w+)", text))
        assert any(load.endswith("dwordx4") for load in loads), f"no 16-byte loads of codes, only {loads}"
    else:
        assert re.search(r"wgmma|mma\.sync|tcgen05", compiled.asm["ptx"])
        assert re.search(r"ld\.global\S*\.v4\.b32", compiled.asm["ptx"]), "no 16-byte loads of codes"
