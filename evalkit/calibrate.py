"""How often does the strict check refuse honest computations? `python -m evalkit.calibrate --seeds 1000`.

Each seed draws one input of every adversarial kind and judges honest variants on it: each cache, queries in bf16 or
rounded to fp8 with one scale or one a head, probabilities exact, in bf16 or in fp8, tokens whole or split. It prints
the worst ratio of a row's error to its limit, and counts refusals; there must be none. With --drop it also counts how
often leaving out one token is seen.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import reference
from evalkit import inputs
from evalkit.judge import Judge


def attention(data: Any, cache: str, q: torch.Tensor, weights_as: str = "exact", splits: int = 1) -> torch.Tensor:
    """bf16 output of an honest kernel with the given queries (float32), rounding of the weights, and splits."""
    _, kv_data, _, kv_indptr, config = data
    bounds = kv_indptr.tolist()
    out = torch.zeros(reference.output_shape(data), device=q.device)
    for i in range(len(bounds) - 1):
        kv = cache_rows(kv_data, cache, bounds[i], bounds[i + 1])
        parts, sizes = [], []
        for tokens in kv.tensor_split(min(splits, kv.shape[0])):
            scores = q[i] @ tokens.T * config["sm_scale"]
            top = scores.amax(-1, keepdim=True)
            weights = torch.exp(scores - top)
            total = weights.sum(-1, keepdim=True)
            if weights_as == "fp8":
                weights = weights.to(torch.float8_e4m3fn).float()
            elif weights_as == "fp8-scaled":
                weights = (weights * 256).to(torch.float8_e4m3fn).float() / 256
            elif weights_as == "bf16":
                weights = weights.bfloat16().float()
            values = weights @ tokens[:, : config["v_head_dim"]] / total
            parts.append(values.bfloat16().float() if splits > 1 else values)
            sizes.append(top + total.log())
        share = torch.softmax(torch.stack(sizes), 0)
        out[i] = (torch.stack(parts) * share).sum(0)
    return out.bfloat16()


def cache_rows(kv_data: dict[str, Any], cache: str, begin: int, end: int) -> torch.Tensor:
    if cache == "bf16":
        return kv_data["bf16"][begin:end, 0].float()
    values, scale = kv_data[cache]
    if cache == "fp8":
        return reference.dequantize_fp8(values[begin:end, 0], scale)
    return reference.dequantize_mxfp4(values[begin:end], scale[begin:end])


def per_head(q: torch.Tensor) -> torch.Tensor:
    scale = q.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
    return (q.float() / scale).to(torch.float8_e4m3fn).float() * scale


def per_tensor(q: torch.Tensor) -> torch.Tensor:
    scale = q.float().abs().amax().clamp(min=1e-12) / 448
    return (q.float() / scale).to(torch.float8_e4m3fn).float() * scale


def contest_fp8(q: torch.Tensor) -> torch.Tensor:
    return reference.dequantize_fp8(*reference.quantize_fp8(q))


Variant = tuple[str, str, Callable[[torch.Tensor], torch.Tensor], str, int]
VARIANTS: tuple[Variant, ...] = (
    ("bf16 cache", "bf16", torch.Tensor.float, "bf16", 1),
    ("bf16 cache, 5 splits", "bf16", torch.Tensor.float, "bf16", 5),
    ("fp8 cache, bf16 q", "fp8", torch.Tensor.float, "bf16", 1),
    ("fp8 all through", "fp8", contest_fp8, "fp8", 1),
    ("fp8 all through, scaled weights", "fp8", per_tensor, "fp8-scaled", 1),
    ("fp8 all through, 5 splits", "fp8", per_tensor, "fp8", 5),
    ("fp8, scale per head", "fp8", per_head, "fp8-scaled", 1),
    ("MXFP4 cache", "mxfp4", torch.Tensor.float, "bf16", 1),
    ("MXFP4 cache, 5 splits", "mxfp4", torch.Tensor.float, "bf16", 5),
    ("MXFP4 cache, fp8 q", "mxfp4", per_tensor, "bf16", 1),
    ("MXFP4 cache, fp8 q per head", "mxfp4", per_head, "bf16", 1),
    ("MXFP4 cache, fp8 q and weights", "mxfp4", per_head, "fp8-scaled", 1),
)


def dropped(data: Any, position: int) -> torch.Tensor:
    """bf16 attention that leaves out one position of every sequence."""
    _, kv_data, _, kv_indptr, _ = data
    lengths = (kv_indptr[1:] - kv_indptr[:-1]).tolist()
    keep = torch.ones(kv_data["bf16"].shape[0], dtype=torch.bool)
    keep[kv_indptr[:-1].long() + position] = False
    less = reference.assemble_input(data[0], kv_data["bf16"][keep], [n - 1 for n in lengths])
    return reference.attention_truth(less, "bf16", torch.float32)[0].bfloat16()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--kv", type=int, default=129)
    parser.add_argument(
        "--drop", action="store_true", help="also leave out one random token, and count how often it is seen"
    )
    parser.add_argument("--kinds", nargs="*", default=list(inputs.KINDS), choices=inputs.KINDS)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    began = time.monotonic()
    worst: dict[tuple[str, str], float] = {}
    refusals: dict[tuple[str, str], int] = {}
    seen: dict[str, int] = {kind: 0 for kind in options.kinds}
    for seed in range(options.first, options.first + options.seeds):
        for kind in options.kinds:
            data = inputs.make(kind, options.batch, options.kv, 1_000_003 * seed + 17)
            judge = Judge(data)
            for name, cache, round_q, weights_as, splits in VARIANTS:
                output = attention(data, cache, round_q(data[0]), weights_as, splits)
                verdict = judge.strict(output)
                at = (kind, name)
                worst[at] = max(worst.get(at, 0.0), verdict.worst_rel_l2 / verdict.limit)
                refusals[at] = refusals.get(at, 0) + (not verdict.passed)
            if options.drop:
                # On planted inputs the planted token of some sequence, elsewhere any.
                position = (0, options.kv - 1, (7919 * seed) % options.kv)[seed % 3]
                if kind in ("planted", "one-hot"):
                    position = (0, options.kv - 1)[seed % 2]
                seen[kind] += not judge.strict(dropped(data, position)).passed
    count = options.seeds
    print(f"{count} seeds from {options.first}, {options.batch} sequences of {options.kv} tokens")
    print(f"{'kind':12} {'variant':32} {'worst error / limit':>20} {'refused':>8}")
    for (kind, name), ratio in worst.items():
        print(f"{kind:12} {name:32} {ratio:20.3f} {refusals[kind, name]:8d}")
    total = sum(refusals.values())
    print(f"honest outputs refused: {total} of {count * len(options.kinds) * len(VARIANTS)}")
    if options.drop:
        for kind, hits in seen.items():
            print(f"one token left out is seen: {kind:12} {hits} of {count}")
    print(f"{time.monotonic() - began:.0f} s")
    return int(total > 0)


if __name__ == "__main__":
    sys.exit(main())
