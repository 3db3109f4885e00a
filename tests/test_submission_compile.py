"""Every plan that the submission would try on a ranked shape compiles for its machine, ahead of time."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
import yaml
from cases import ROOT
from triton.backends.compiler import GPUTarget

import submission

pytest.importorskip("tinygrad", reason="reason: the package gfx950 needs tinygrad; pip install tinygrad==0.14.0")
from gfx950.inspect import compile_portable

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
    """Portable plans of all ranked shapes that differ in code: num_splits is a run-time number, 1 or more."""
    plans = []
    for batch, kv in SHAPES:
        problem = submission.Problem(
            batch, batch, 16, batch * kv, kv, kv, arch, NUM_CUS[arch], torch.device("cuda"), 288, (18, 1), True
        )
        plans += [replace(p, num_splits=min(p.num_splits, 2)) for p in submission.candidate_plans(problem)]
    return list(dict.fromkeys(p for p in plans if p.body == "portable"))


@pytest.mark.parametrize(("arch", "plan"), [(a, p) for a in TARGETS for p in ranked_plans(a)], ids=str)
def test_ranked_plan_compiles(arch: str, plan: submission.Plan) -> None:
    compiled = compile_portable(plan, TARGETS[arch])
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
