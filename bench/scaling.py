"""`python -m bench.scaling`: how the Hopper kernel's cost grows with batch and length, and what ragged batches cost.

A ragged batch is compared with a uniform one of the same batch and token count; the ratio should stay under 1.3.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

from bench import timing


def lognormal_lengths(batch: int, mean: int, sigma: float = 1.0, seed: int = 0) -> list[int]:
    """Lengths with the heavy tail of served prompts, scaled so that they average `mean`; 1 at least."""
    rng = random.Random(seed)
    raw = [rng.lognormvariate(0.0, sigma) for _ in range(batch)]
    return [max(1, round(x * mean * batch / sum(raw))) for x in raw]


def growth_cases() -> dict[str, list[tuple[str, list[int]]]]:
    """(label, lengths) of each series: batch 1..512 at 8192 tokens, 1k..128k tokens at batches 4 and 64."""
    batches = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    series = {"batch 1 to 512, kv 8192": [(f"batch {b}, kv 8192", [8192] * b) for b in batches]}
    for batch in (4, 64):
        cases = [(f"batch {batch}, kv {n >> 10}k", [n] * batch) for n in (1 << i for i in range(10, 18))]
        series[f"batch {batch}, kv 1k to 128k"] = cases
    return series


def ragged_cases() -> list[tuple[str, list[int]]]:
    """(label, lengths) of batches that a schedule by sequence would balance badly."""
    return [
        ("lognormal, 64 x ~2k", lognormal_lengths(64, 2048)),
        ("lognormal, 256 x ~4k", lognormal_lengths(256, 4096)),
        ("one of 128k among 63 of 1k", [1 << 17] + [1024] * 63),
        ("one of 128k alone with 3 of 1k", [1 << 17] + [1024] * 3),
    ]


def time_lengths(lengths: Sequence[int]) -> dict[str, Any]:
    """Best plan's GPU time over rotated inputs, checked first."""
    from mla_backends import hopper

    backend = hopper.HopperBackend()
    cases = timing.rotation(lengths, bf16=False, mxfp4=True)
    num_sms = torch.cuda.get_device_properties().multi_processor_count
    best: dict[str, Any] = {"us": math.inf}
    for plan in hopper.choose_plans(len(lengths), sum(lengths), num_sms):
        error = timing.worst_error(cases[0], backend.run(plan, cases[0]))
        if error > 5e-3:
            raise SystemExit(f"{plan}: relative L2 {error:.3g}")
        us = timing.graph_time_us([lambda case=case, plan=plan: backend.run(plan, case) for case in cases], replays=5)  # type: ignore[misc]
        if us < best["us"]:
            best = {"us": us, "plan": str(plan), "ns_per_token": us * 1e3 / sum(lengths)}
    return best


def save_plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Time over tokens, both axes logarithmic; needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    series: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["kind"] == "growth":
            series.setdefault(row["series"], []).append(row)
    styles = ("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^")  # Okabe and Ito's colours, and a marker each
    for (label, chosen), (colour, marker) in zip(series.items(), cycle(styles), strict=False):
        axes.plot(
            [row["tokens"] for row in chosen], [row["us"] for row in chosen], marker=marker, color=colour, label=label
        )
    ragged = [row for row in rows if row["kind"] == "ragged"]
    for row, marker in zip(ragged, cycle("x+1*"), strict=False):
        label = f"{row['label']}: {row['over_uniform']:.2f} x uniform"
        axes.plot(row["tokens"], row["us"], marker, color="black", markersize=9, label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("tokens read")
    axes.set_ylabel("GPU time, us")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("scaling.json"), help="JSON; a plot is written beside it")
    parser.add_argument("--max-tokens", type=int, default=1 << 23, help="leave larger cases out")
    options = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise SystemExit("bench.scaling needs a GPU of compute capability 9.0")
    rows: list[dict[str, Any]] = []
    for series, cases in {**growth_cases(), "ragged": ragged_cases()}.items():
        kind = "ragged" if series == "ragged" else "growth"
        for label, lengths in cases:
            tokens = sum(lengths)
            if tokens > options.max_tokens:
                continue
            row = {"kind": kind, "series": series, "label": label, "tokens": tokens, **time_lengths(lengths)}
            text = f"{label:32} {tokens:>9} tokens {row['us']:>9.1f} us {row['ns_per_token']:>8.3f} ns/token"
            if kind == "ragged":
                uniform = time_lengths([max(1, tokens // len(lengths))] * len(lengths))
                row["over_uniform"] = row["ns_per_token"] / uniform["ns_per_token"]
                text += f"  {row['over_uniform']:.2f} x uniform"
            rows.append(row)
            print(f"{text}  {row['plan']}", flush=True)
            torch.cuda.empty_cache()
    options.out.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}, indent=1))
    try:
        save_plot(rows, options.out.with_suffix(".png"))
    except ImportError as error:
        print(f"no plot: {error}")


if __name__ == "__main__":
    main()
