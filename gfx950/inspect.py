"""`eval.py inspect`: what the machine code of every ranked plan costs, and the time that predicts. No card is needed.

For gfx950 each plan's code runs in the emulator, and what it executed is priced. For sm_90 only the assembler's own
figures are shown: registers, stack, shared memory, instructions.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton

import submission
from evalkit.report import write_json

# Per token and compute unit; what HBM allows at 8 TB/s is 23.5 cycles.
TARGETS = {"valu": 12.0, "mfma": 12.5, "issue": 23.5, "lds": 11.0}
MIN_WAVES_PER_CU = 6
# Enough trips round the loop that the typical one is the one without masks.
TILES_PER_SPLIT = 4
NUM_CUS = {"gfx950": 256, "sm_90": 132}
REPLACED_KERNELS = "170 to 190 VALU cycles a token in the lookup-table kernels that this replaces"


def ranked_problems(arch: str) -> list[Any]:
    """The benchmark shapes of task.yml as problems on `arch`."""
    from eval import manifest_cases

    problems = []
    for case in manifest_cases("benchmarks"):
        batch, kv = case.args["batchsize"], case.args["kvseqlen"]
        problems.append(
            submission.Problem(
                batch, batch, 16, batch * kv, kv, kv, arch, NUM_CUS[arch], torch.device("cpu"), 288, (24, 1), True
            )
        )
    return problems


def run_emulated(plan: Any, tokens: int) -> Any:
    """Run `plan` over one sequence of random content in the emulator; returns the device with profiles."""
    from gfx950.device import emulated_device

    gen = torch.Generator().manual_seed(tokens)
    q = torch.randn(1, 16, 576, generator=gen).bfloat16()
    codes = torch.randint(0, 256, (tokens, 288), dtype=torch.uint8, generator=gen)
    scales = torch.randint(124, 130, (tokens, 24), dtype=torch.uint8, generator=gen)
    inputs = submission.Inputs(q, codes, scales, torch.tensor([0, tokens], dtype=torch.int32), 576**-0.5)
    out = torch.empty(1, 16, 512, dtype=torch.bfloat16)
    with emulated_device(profile=True) as device:
        submission.run_decode(inputs, plan, out)
    return device


def tokens_per_tile(plan: Any) -> int:
    return 32 * plan.num_warps if plan.body == "gfx950" else plan.block_n


def inspect_gfx950() -> dict[str, Any]:
    """The report of every ranked plan; see the module."""
    from gfx950.pricing import (
        assumptions,
        decode_work,
        geometric_mean,
        merge_work,
        plan_entry,
        predict_us,
        price_loop,
        price_outside,
        resources,
    )

    decodes: dict[Any, Any] = {}
    merges: dict[int, Any] = {}
    entries = []
    for problem in ranked_problems("gfx950"):
        plan = submission.choose_plan(problem)
        tile = tokens_per_tile(plan)
        # The code depends on whether there are splits and not on how many; two are quick to run.
        build = replace(plan, num_splits=min(2, plan.num_splits))
        if build not in decodes:
            print(f"compiling and running {build}", file=sys.stderr, flush=True)
            device = run_emulated(build, TILES_PER_SPLIT * tile * build.num_splits)
            launch = device.launches[0]
            loop = price_loop(launch, num_warps=launch.num_warps, tokens_per_tile=tile, profile=launch.profile)
            decodes[build] = loop, price_outside(launch.profile), resources(launch), device.findings()
        loop, outside, kernel, found = decodes[build]
        work = decode_work(
            batch=problem.batch, kv_len=problem.kv_len_max, num_splits=plan.num_splits, loop=loop, outside=outside
        )
        merge = None
        if plan.num_splits > 1:
            if plan.num_splits not in merges:
                merges[plan.num_splits] = run_emulated(plan, tile).launches[1]
            launch = merges[plan.num_splits]
            merge = merge_work(
                batch=problem.batch,
                num_splits=plan.num_splits,
                groups=problem.batch * launch.grid[0] * launch.grid[1],
                num_warps=launch.num_warps,
                outside=price_outside(launch.profile),
            )
        prediction = predict_us(work, merge=merge, further_launches=int(merge is not None))
        entry = plan_entry(
            batch=problem.batch, kv_len=problem.kv_len_max, loop=loop, kernel=kernel, prediction=prediction
        )
        # The wave's own LDS accesses; the copies from memory run beside them and are listed apart.
        entry["lds_copy_cycles_per_token"] = loop.lds_copy_cycles_per_token
        entry["lds_cycles_per_token"] = loop.lds_cycles_per_token - loop.lds_copy_cycles_per_token
        entry |= {"plan": str(plan), "num_splits": plan.num_splits, "findings": found}
        entry["missed_targets"] = missed_targets(entry)
        entries.append(entry)
    return {
        "arch": "gfx950",
        "triton": triton.__version__,
        "note": "prediction: machine code executed in an emulator and priced, never timed on a card",
        "geomean_predicted_us": geometric_mean(e["predicted_us"] for e in entries),
        "geomean_predicted_us_at_peak": geometric_mean(e["prediction"]["predicted_us_at_peak"] for e in entries),
        "targets": TARGETS | {"waves_per_cu": MIN_WAVES_PER_CU, "loop_scratch_ops": 0},
        "assumptions": assumptions(),
        "plans": entries,
    }


def missed_targets(entry: dict[str, Any]) -> list[str]:
    """Targets that a plan's hot loop misses, with the value found."""
    found = {
        "valu": entry["valu_cycles_per_token"],
        "mfma": entry["mfma_cycles_per_token"],
        "issue": entry["valu_cycles_per_token"] + entry["mfma_cycles_per_token"],
        "lds": entry["lds_cycles_per_token"],
    }
    missed = [f"{name} {found[name]:.2f} > {limit}" for name, limit in TARGETS.items() if found[name] > limit]
    if entry["loop_scratch_ops"]:
        missed.append(f"scratch operations in the loop: {entry['loop_scratch_ops']}")
    if entry["waves_per_cu"] < MIN_WAVES_PER_CU:
        missed.append(f"waves per compute unit {entry['waves_per_cu']} < {MIN_WAVES_PER_CU}")
    return missed


def inspect_sm_90() -> dict[str, Any]:
    """What NVIDIA's assembler says of the portable plans."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    entries: list[dict[str, Any]] = []
    for problem in ranked_problems("sm_90"):
        plan = submission.choose_plan(problem)
        compiled = compile_portable(plan)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            usage = subprocess.run(
                [tools / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True
            ).stdout
            code = subprocess.run([tools / "cuobjdump", "-sass", file.name], capture_output=True, text=True, check=True)
        numbers = {key: int(re.search(rf"{key}:(\d+)", usage).group(1)) for key in ("REG", "STACK")}  # type: ignore[union-attr]
        entries.append(
            {
                "batch": problem.batch,
                "kv": problem.kv_len_max,
                "plan": str(plan),
                "registers": numbers["REG"],
                "stack_bytes": numbers["STACK"],
                "shared_bytes": compiled.metadata.shared,
                "instructions": len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/", code.stdout, re.MULTILINE)),
                "matrix_instructions": len(re.findall(r"\b[HQI]G?MMA\b", code.stdout)),
            }
        )
    return {"arch": "sm_90", "triton": triton.__version__, "note": "from the assembler; not timed", "plans": entries}


def compile_portable(plan: Any, target: Any = None) -> Any:
    """The portable attention kernel for sm_90 (or `target`), ahead of time, for contiguous bf16 inputs."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    pointers = {"q_ptr": "*bf16", "kv_ptr": "*u8", "scale_ptr": "*u8", "kv_indptr_ptr": "*i32"}
    pointers |= {"out_ptr": "*fp32", "lse_ptr": "*fp32"} if plan.num_splits > 1 else {"out_ptr": "*bf16"}
    numbers = {"kv_row_stride": "i32", "scale_row_stride": "i32", "qk_scale": "fp32", "num_splits": "i32"}
    constants: dict[str, Any] = {"scale_col_stride": 1, "q_len": 1, "HEADS": 16}
    constants |= {"BLOCK_N": plan.block_n, "CHUNK": 128, "SCALED": False, "DTYPE": submission.tl.bfloat16}
    constants |= {} if plan.num_splits > 1 else {"lse_ptr": None}
    names = submission._attend_kernel.arg_names
    signature = {n: "constexpr" if n in constants else (pointers | numbers)[n] for n in names}
    aligned = {(names.index(n),): [["tt.divisibility", 16]] for n in [*pointers, "kv_row_stride"] if n not in constants}
    return triton.compile(
        ASTSource(submission._attend_kernel, signature, constants, aligned),
        target=target or GPUTarget("cuda", 90, 32),
        options={"num_warps": plan.num_warps, "num_stages": 1},
    )


def readable(value: Any) -> str:
    """An assumption's value for a person; a table as the keys that share each value."""
    if not isinstance(value, dict):
        return str(value)
    return "; ".join(f"{v} for {', '.join(k for k in value if value[k] == v)}" for v in sorted(set(value.values())))


def show(report: dict[str, Any]) -> None:
    """Print the report as a table for a person."""
    from rich.console import Console
    from rich.table import Table

    console = Console() if sys.stdout.isatty() else Console(width=100)
    console.print(f"inspect {report['arch']}, Triton {report['triton']}: {report['note']}", highlight=False)
    table = Table(box=None, pad_edge=False)
    if report["arch"] == "gfx950":
        names = [
            "shape",
            "plan",
            "VALU",
            "MFMA",
            "sum",
            "LDS",
            "scratch",
            "waves/CU",
            "LDS KB",
            "HBM us",
            "us",
            "us 8T",
        ]
        for name in names:
            table.add_column(name, justify="left" if name in ("shape", "plan") else "right", no_wrap=True)
        for e in report["plans"]:
            issue = e["valu_cycles_per_token"] + e["mfma_cycles_per_token"]
            table.add_row(
                f"{e['batch']}x{e['kv']}",
                f"{e['resources']['waves_per_cu'] and e['loop']['num_warps']}w {e['num_splits']}s",
                *(f"{e[k]:.2f}" for k in ("valu_cycles_per_token", "mfma_cycles_per_token")),
                f"{issue:.2f}",
                f"{e['lds_cycles_per_token']:.2f}",
                str(e["loop_scratch_ops"]),
                str(e["waves_per_cu"]),
                f"{e['lds_bytes'] / 1024:.0f}",
                f"{e['prediction']['hbm_us']:.1f}",
                f"{e['predicted_us']:.1f}",
                f"{e['prediction']['predicted_us_at_peak']:.1f}",
            )
        console.print(table)
        console.print(
            f"geometric mean, predicted: {report['geomean_predicted_us']:.1f} us at 5.65 TB/s, "
            f"{report['geomean_predicted_us_at_peak']:.1f} us at 8 TB/s; nothing here was measured",
            highlight=False,
        )
        console.print(
            f"VALU, MFMA, LDS: cycles per token and compute unit, counted from executed instructions; HBM allows 23.5 "
            f"at 8 TB/s; {REPLACED_KERNELS}. plan: waves a workgroup, splits a sequence.",
            highlight=False,
        )
        for e in report["plans"]:
            for line in [*e["missed_targets"], *e["findings"]]:
                console.print(f"{e['batch']}x{e['kv']}: {line}", highlight=False)
        for name, one in report["assumptions"].items():
            console.print(f"  {name} = {readable(one['value'])}: {one['source']}", highlight=False)
    else:
        names = ["shape", "registers", "stack_bytes", "shared_bytes", "instructions", "matrix_instructions"]
        for name in names:
            table.add_column(name, justify="right")
        for e in report["plans"]:
            table.add_row(f"{e['batch']}x{e['kv']}", *(str(e[k]) for k in names[1:]))
        console.print(table)


def main(options: Any) -> int:
    """Run the mode; exit 0, or 112 if a gfx950 plan misses a target or its code shows a race or hazard."""
    report = inspect_gfx950() if options.arch == "gfx950" else inspect_sm_90()
    show(report)
    if options.json is not None:
        write_json(options.json, report)
    if options.plot is not None:
        from evalkit import plot

        try:
            plot.save(report, options.plot)
        except ValueError as error:
            print(f"eval.py: {error}", file=sys.stderr)
            return 2
    bad = any(e.get("missed_targets") or e.get("findings") for e in report["plans"])
    return 112 if bad else 0
