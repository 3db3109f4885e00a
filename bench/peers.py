"""`python -m bench.peers`: this repository's Hopper kernel beside others, same shapes, same run.

Each kernel runs in a process of its own, is checked against float64 over the cache it reads, and only then timed. A
package that cannot be imported is listed with the reason. Prints one table; writes JSON and, with matplotlib, a plot.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from bench import timing
from bench.timing import HEADS, LATENT_DIM, QK_DIM, RANKED_SHAPES, ROPE_DIM, SM_SCALE, Case

Call = Callable[[], torch.Tensor]
PAGE = 64
ERROR_LIMIT = {"mxfp4": 5e-3, "bf16": 1e-2}


def _ours(cases: list[Case]) -> list[Call]:
    from mla_backends import hopper

    backend = hopper.HopperBackend()
    capability = torch.cuda.get_device_capability()
    problem = SimpleNamespace(
        batch=len(cases[0].lengths),
        total_q=len(cases[0].lengths),
        heads=HEADS,
        total_kv=sum(cases[0].lengths),
        arch=f"sm_{capability[0]}{capability[1]}",
        num_cus=torch.cuda.get_device_properties().multi_processor_count,
    )
    reason = backend.supports(problem)
    if reason is not None:
        raise ImportError(reason)

    def calls(plan: hopper.HopperPlan) -> list[Call]:
        return [lambda case=case: backend.run(plan, case) for case in cases]  # type: ignore[misc]

    return calls(min(backend.plans(problem), key=lambda plan: timing.graph_time_us(calls(plan), replays=3)))


def _torch(cases: list[Case]) -> list[Call]:
    batch, length = len(cases[0].lengths), cases[0].lengths[0]

    def run(case: Case) -> torch.Tensor:
        assert case.kv_bf16 is not None
        kv = case.kv_bf16.view(batch, length, QK_DIM)
        weights = torch.softmax(torch.bmm(case.q, kv.transpose(1, 2)).float() * SM_SCALE, -1)
        return torch.bmm(weights.bfloat16(), kv[..., :LATENT_DIM])

    return [lambda case=case: run(case) for case in cases]  # type: ignore[misc]


def _pages(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """The cache as pages of 64 tokens and, as every length is a multiple of that, their table [batch, pages]."""
    assert case.kv_bf16 is not None
    pages = case.kv_bf16.view(-1, PAGE, QK_DIM)
    table = torch.arange(pages.shape[0], dtype=torch.int32, device="cuda").view(len(case.lengths), -1)
    return pages, table


def _flashinfer(cases: list[Case]) -> list[Call]:
    import flashinfer

    calls: list[Call] = []
    for case in cases:
        batch = len(case.lengths)
        pages, table = _pages(case)
        wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(
            torch.empty(128 << 20, dtype=torch.uint8, device="cuda"), backend="fa3"
        )
        wrapper.plan(
            torch.arange(batch + 1, dtype=torch.int32, device="cuda"),
            torch.arange(batch + 1, dtype=torch.int32, device="cuda") * table.shape[1],
            table.flatten(),
            torch.tensor(case.lengths, dtype=torch.int32, device="cuda"),
            HEADS,
            LATENT_DIM,
            ROPE_DIM,
            PAGE,
            False,
            SM_SCALE,
            torch.bfloat16,
            torch.bfloat16,
        )
        parts = (case.q[..., :LATENT_DIM], case.q[..., LATENT_DIM:], pages[..., :LATENT_DIM], pages[..., LATENT_DIM:])
        calls.append(lambda wrapper=wrapper, parts=parts: wrapper.run(*parts))  # type: ignore[misc]
    return calls


def _flash_mla(cases: list[Case]) -> list[Call]:
    import flash_mla

    calls: list[Call] = []
    for case in cases:
        pages, table = _pages(case)
        lengths = torch.tensor(case.lengths, dtype=torch.int32, device="cuda")
        metadata, splits = flash_mla.get_mla_metadata(lengths, HEADS, 1)

        args = (pages.unsqueeze(2), table, lengths, LATENT_DIM, metadata, splits)

        def run(case: Case = case, args: tuple[Any, ...] = args) -> torch.Tensor:
            out, _ = flash_mla.flash_mla_with_kvcache(case.q.unsqueeze(1), *args, softmax_scale=SM_SCALE)
            return out.squeeze(1)

        calls.append(run)
    return calls


def _sglang(cases: list[Case]) -> list[Call]:
    from sglang.srt.layers.attention.triton_ops.decode_attention import decode_attention_fwd

    batch, most = len(cases[0].lengths), 16
    logits = torch.empty((batch, HEADS, most, LATENT_DIM), dtype=torch.float32, device="cuda")
    lse = torch.empty((batch, HEADS, most), dtype=torch.float32, device="cuda")
    splits = torch.full((batch,), most, dtype=torch.int32, device="cuda")
    indices = torch.arange(sum(cases[0].lengths), dtype=torch.int64, device="cuda")

    def run(case: Case) -> torch.Tensor:
        assert case.kv_bf16 is not None
        cache = case.kv_bf16.unsqueeze(1)
        out = torch.empty((batch, HEADS, LATENT_DIM), dtype=torch.bfloat16, device="cuda")
        values = cache[..., :LATENT_DIM]
        decode_attention_fwd(
            case.q, cache, values, out, case.kv_indptr, indices, logits, lse, splits, most, SM_SCALE, 1.0, 1.0
        )
        return out

    return [lambda case=case: run(case) for case in cases]  # type: ignore[misc]


def _vllm(cases: list[Case]) -> list[Call]:
    try:
        from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd
    except ImportError:
        from vllm.attention.ops.triton_decode_attention import decode_attention_fwd

    batch, splits = len(cases[0].lengths), 16
    logits = torch.empty((batch, HEADS, splits, LATENT_DIM + 1), dtype=torch.float32, device="cuda")
    lse = torch.empty((batch, HEADS), dtype=torch.bfloat16, device="cuda")
    lengths = torch.tensor(cases[0].lengths, dtype=torch.int32, device="cuda")
    calls: list[Call] = []
    for case in cases:
        pages, table = _pages(case)

        cache = pages.unsqueeze(2)

        def run(case: Case = case, cache: torch.Tensor = cache, table: torch.Tensor = table) -> torch.Tensor:
            out = torch.empty((batch, HEADS, LATENT_DIM), dtype=torch.bfloat16, device="cuda")
            values = cache[..., :LATENT_DIM]
            decode_attention_fwd(
                case.q, cache, values, out, lse, table, lengths, logits, splits, SM_SCALE, page_size=PAGE
            )
            return out

        calls.append(run)
    return calls


def _aiter(cases: list[Case]) -> list[Call]:
    from aiter.mla import mla_decode_fwd

    batch = len(cases[0].lengths)
    qo_indptr = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
    last = torch.ones(batch, dtype=torch.int32, device="cuda")
    indices = torch.arange(sum(cases[0].lengths), dtype=torch.int32, device="cuda")

    def run(case: Case) -> torch.Tensor:
        assert case.kv_bf16 is not None
        out = torch.empty((batch, HEADS, LATENT_DIM), dtype=torch.bfloat16, device="cuda")
        cache = case.kv_bf16.view(-1, 1, 1, QK_DIM)
        mla_decode_fwd(case.q, cache, out, qo_indptr, case.kv_indptr, indices, last, 1, SM_SCALE)
        return out

    return [lambda case=case: run(case) for case in cases]  # type: ignore[misc]


# name -> (cache format that it reads, calls over the cases)
KERNELS: dict[str, tuple[str, Callable[[list[Case]], list[Call]]]] = {
    "ours": ("mxfp4", _ours),
    "torch": ("bf16", _torch),
    "flashinfer": ("bf16", _flashinfer),
    "flash_mla": ("bf16", _flash_mla),
    "sglang": ("bf16", _sglang),
    "vllm": ("bf16", _vllm),
    "aiter": ("bf16", _aiter),
}
TOKEN_BYTES = {"mxfp4": 306, "bf16": 1152}


def _child(name: str, path: Path, shapes: list[tuple[int, int]]) -> None:
    """Check and time one kernel; what it finds goes to `path`."""
    cache_format, prepare = KERNELS[name]
    rows: dict[str, Any] = {}
    for batch, length in shapes:
        try:
            cases = timing.rotation([length] * batch, bf16=cache_format == "bf16", mxfp4=cache_format == "mxfp4")
            calls = prepare(cases)
            error = timing.worst_error(cases[0], calls[0]())
            row: dict[str, Any] = {"error": error}
            if error <= ERROR_LIMIT[cache_format]:
                row["us"] = timing.graph_time_us(calls)
                row["call_us"] = timing.single_call_time_us(calls)
            else:
                row["reason"] = f"wrong: relative L2 {error:.3g}"
        except ImportError as error:
            rows["reason"] = f"not importable: {error}"
            break
        except Exception as error:  # a stranger's kernel may raise anything; the others must still run
            row = {"reason": f"{type(error).__name__}: {error}"[:200]}
        rows[f"{batch}x{length}"] = row
        path.write_text(json.dumps(rows))
        torch.cuda.empty_cache()
    path.write_text(json.dumps(rows))


def run_kernel(name: str, shapes: list[tuple[int, int]], limit_s: float) -> dict[str, Any]:
    """`_child` in a process of its own, ended after `limit_s`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "bench.peers", "--child", name, "--out", str(path)]
        command += ["--shapes", ",".join(f"{b}x{n}" for b, n in shapes)]
        try:
            done = subprocess.run(command, timeout=limit_s, capture_output=True, text=True)
            reason = f"exit {done.returncode}: {done.stderr.strip()[-200:]}" if done.returncode else ""
        except subprocess.TimeoutExpired:
            reason = f"over {limit_s:.0f} s"
        rows: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        if reason:
            rows["reason"] = reason
        return rows


def print_table(results: dict[str, dict[str, Any]], shapes: list[tuple[int, int]]) -> None:
    """Microseconds, in brackets ours as a share of them; below, our GB/s and the time of one call in contest order."""
    keys = [f"{b}x{n}" for b, n in shapes]
    print("GPU time, us (in brackets: ours / theirs)")
    print(f"{'kernel':12}" + "".join(f"{key:>16}" for key in keys) + f"{'geomean':>10}")
    ours = results.get("ours", {})
    for name, rows in results.items():
        cells, times = [], []
        for key in keys:
            us, own = rows.get(key, {}).get("us"), ours.get(key, {}).get("us")
            times.append(us)
            ratio = f" ({own / us:.2f})" if us and own and name != "ours" else ""
            cells.append(f"{f'{us:.1f}{ratio}' if us else '-':>16}")
        mean = f"{timing.geometric_mean(times):>10.1f}" if all(times) else f"{'-':>10}"
        print(f"{name:12}" + "".join(cells) + mean)
        reasons = {rows.get("reason"), *(rows.get(key, {}).get("reason") for key in keys)} - {None}
        for reason in sorted(reasons):
            print(f"  {reason}")
    if ours.get(keys[0], {}).get("us"):
        rates = [b * n * TOKEN_BYTES["mxfp4"] / ours[key]["us"] / 1e3 for (b, n), key in zip(shapes, keys, strict=True)]
        print(f"{'ours, GB/s':12}" + "".join(f"{rate:>16.0f}" for rate in rates))
        print(f"{'one call, us':12}" + "".join(f"{ours[key]['call_us']:>16.1f}" for key in keys))


def save_plot(results: dict[str, dict[str, Any]], shapes: list[tuple[int, int]], path: Path) -> None:
    """Bars per shape, one for each kernel, with their times; needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.add_subplot()
    keys = [f"{b}x{n}" for b, n in shapes]
    timed = {name: rows for name, rows in results.items() if any(rows.get(key, {}).get("us") for key in keys)}
    width = 0.8 / max(1, len(timed))
    colours = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999")  # told apart by everybody
    for i, (name, rows) in enumerate(timed.items()):
        points = [(x, rows[key]["us"]) for x, key in enumerate(keys) if rows.get(key, {}).get("us")]
        places = [x + (i + 0.5) * width - 0.4 for x, _ in points]
        bars = axes.bar(places, [us for _, us in points], width, label=name, color=colours[i % len(colours)])
        axes.bar_label(bars, fmt=lambda us: f"{us:.0f}" if us >= 100 else f"{us:.1f}", fontsize=7, padding=1)
    axes.set_xticks(range(len(keys)), keys)
    axes.set_yscale("log")
    axes.set_xlabel("batch x kv length")
    axes.set_ylabel("GPU time, us (logarithmic)")
    axes.legend()
    figure.savefig(path, dpi=120)


def parse_shapes(text: str) -> list[tuple[int, int]]:
    """`4x1024,64x8192` -> [(4, 1024), (64, 8192)]."""
    try:
        return [(int(b), int(n)) for b, _, n in (item.partition("x") for item in text.split(","))]
    except ValueError:
        raise ValueError(f"--shapes: expected BATCHxLENGTH,..., got {text!r}") from None


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", default=",".join(KERNELS), help="which to run, in this order")
    parser.add_argument(
        "--shapes", default=",".join(f"{b}x{n}" for b, n in RANKED_SHAPES), help="lengths: multiples of 64"
    )
    parser.add_argument("--out", type=Path, default=Path("peers.json"), help="JSON; a plot is written beside it")
    parser.add_argument("--limit-s", type=float, default=300.0, help="time that one kernel may take")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    shapes = parse_shapes(options.shapes)
    if options.child:
        _child(options.child, options.out, shapes)
        return
    if not torch.cuda.is_available():
        raise SystemExit("bench.peers needs a CUDA GPU")
    unknown = set(options.kernels.split(",")) - set(KERNELS)
    if unknown:
        raise SystemExit(f"--kernels: expected names among {', '.join(KERNELS)}, got {', '.join(sorted(unknown))}")
    results = {name: run_kernel(name, shapes, options.limit_s) for name in options.kernels.split(",")}
    device = torch.cuda.get_device_name()
    options.out.write_text(json.dumps({"device": device, "torch": torch.__version__, "results": results}, indent=1))
    try:
        save_plot(results, shapes, options.out.with_suffix(".png"))
    except ImportError as error:
        print(f"no plot: {error}")
    print(device)
    print_table(results, shapes)


if __name__ == "__main__":
    main()
