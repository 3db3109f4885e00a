"""What an output is worth: honest answers for one input, and how far an output may be from them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

import reference
import utils

# Relative L2 per (sequence, head) to the nearest honest truth, or this many times the error of an honest fp8
# computation on that very row where that is larger. docs/evaluator.md has the calibration.
STRICT_REL_L2 = 0.05
FP8_SLACK = 1.5

TRUTHS = (("mxfp4", "bf16"), ("bf16", "bf16"), ("fp8", "fp8"), ("fp8", "bf16"), ("bf16", "fp8"), ("mxfp4", "fp8"))


@dataclass
class Verdict:
    """What one output is worth."""

    passed: bool
    message: str
    cache: str = ""
    worst_rel_l2: float = math.inf
    worst_row: tuple[int, int] = (0, 0)
    limit: float = STRICT_REL_L2
    contest_passed: bool = False
    contest_message: str = ""


class Judge:
    """Honest answers for one input, computed when first needed.

    A row (one query token, one head) is honest when its relative L2 error to the nearest of six truths - three caches,
    queries in bf16 or fp8 - is at most `tolerance`, or at most 1.5 times the error against full precision of an honest
    fp8 computation on that row where the input makes that larger.
    """

    def __init__(self, data: Any, tolerance: float = STRICT_REL_L2) -> None:

        import reference

        self.data = data
        self.tolerance = tolerance
        self.reference = reference
        self.dtype = torch.float64 if data[0].device.type == "cpu" else torch.float32
        self._truths: dict[tuple[str, str], Any] = {}
        self._fp8_error: Any = None
        self._contest: Any = None

    def truth(self, cache: str, q: str = "bf16") -> Any:
        """Attention over one cache: [total_q, heads, 512]."""
        if (cache, q) not in self._truths:
            self._truths[cache, q] = self.reference.attention_truth(self.data, cache, self.dtype, q)[0]
        return self._truths[cache, q]

    def fp8_error(self) -> Any:
        """What honest fp8 rounding costs each row: relative L2 [total_q, heads], the worst of several computations.

        One is a whole fp8 kernel (queries, cache and probabilities) against full precision. The others round the
        queries to fp8 on different grids, over each cache, against the same cache with exact queries: where the weights
        hang on a hair, one rounding alone may land close by luck.
        """
        if self._fp8_error is None:
            import torch

            error = self.reference.relative_l2(honest_fp8(self.data), self.truth("bf16"))
            for queries in fp8_query_variants(self.data[0]):
                data = (queries, *self.data[1:])
                for cache in self.reference.CACHES:
                    rounded = self.reference.attention_truth(data, cache, torch.float32)[0]
                    error = torch.maximum(error, self.reference.relative_l2(rounded, self.truth(cache)))
            self._fp8_error = error
        return self._fp8_error

    def format_error(self, cache: str, q: str = "bf16") -> float:
        """What a cache format itself costs: mean relative L2 of its truth against the bf16 cache."""
        error = self.reference.relative_l2(self.truth(cache, q), self.truth("bf16"))
        finite = error[error.isfinite()]
        return float(finite.mean()) if finite.numel() else 0.0

    def contest(self, output: Any) -> tuple[bool, str]:
        """The contest's own check."""
        if self._contest is None:
            self._contest = self.reference.ref_kernel(self.data)

        good, lines = utils.verbose_allclose(
            output,
            self._contest,
            rtol=self.reference.CONTEST_RTOL,
            atol=self.reference.CONTEST_ATOL,
            max_error_ratio=self.reference.CONTEST_MISS_RATIO,
        )
        return good, "; ".join(lines)

    def strict(self, output: Any, first: str = "", complete: bool = True) -> Verdict:
        """Compare with the truths, `first` leading; `complete=False` stops at the first one that explains all rows."""

        order = sorted(TRUTHS, key=lambda pair: "/".join(pair) != first)
        nearest: Any = None
        means: dict[str, float] = {}
        for cache, q in order:
            error = self.reference.relative_l2(output, self.truth(cache, q))
            means[f"{cache}/{q}"] = float(error.nan_to_num(posinf=1e30).mean())
            nearest = error if nearest is None else torch.minimum(nearest, error)
            if not complete and bool((nearest <= self.tolerance).all()):
                break
        cache = min(means, key=lambda name: means[name])
        limit = torch.full_like(nearest, self.tolerance)
        if bool((nearest > limit).any()):
            limit = torch.maximum(limit, (FP8_SLACK * self.fp8_error()).to(limit.dtype).nan_to_num(posinf=0.0))
        # The worst row is the one furthest over its own limit.
        excess = (nearest / limit).reshape(-1)
        at = int(excess.argmax())
        row = (at // output.shape[1], at % output.shape[1])
        worst, allowed = float(nearest[row]), float(limit[row])
        bad = int((nearest > limit).sum())
        verdict = Verdict(bad == 0, "", cache, worst, row, allowed)
        where = f"(sequence {row[0]}, head {row[1]})"
        if bad:
            kind = "not finite" if math.isinf(worst) else f"{worst:.3g}"
            verdict.message = (
                f"not attention over the whole cache: {bad} of {nearest.numel()} rows are off, worst relative L2 {kind}"
                f" > {allowed:.3g} at {where}, nearest truth {cache}"
            )
        else:
            verdict.message = f"worst relative L2 {worst:.2e} <= {allowed:.3g} at {where}, truth {cache}"
        return verdict

    def verdict(self, output: Any, first: str = "", complete: bool = True) -> Verdict:
        """Both checks: the strict one decides, and so does the contest's."""
        verdict = self.strict(output, first, complete)
        verdict.contest_passed, verdict.contest_message = self.contest(output)
        if not verdict.contest_passed:
            verdict.passed = False
            verdict.message = f"contest check: {verdict.contest_message}; strict check: {verdict.message}"
        elif not verdict.passed:
            verdict.message = f"{verdict.message} (the contest's check alone would pass it)"
        return verdict


def fp8_query_variants(q: Any) -> Iterator[Any]:
    """The queries rounded to fp8 as honest kernels do it: one scale for all, one a head, and the same on other grids.

    Args:
        q: bf16 [total_q, heads, 576]
    Returns:
        float32 tensors of q's shape
    """

    import reference

    dtype = reference.fp8_dtype(q.device)
    limit = torch.finfo(dtype).max
    exact = q.to(torch.float32)
    per_tensor = exact.abs().amax().clamp(min=1e-12) / limit
    per_head = exact.abs().amax(-1, keepdim=True).clamp(min=1e-12) / limit
    for scale in (per_tensor, per_head):
        # A larger scale shifts all rounding points; 2 would shift none.
        for stretch in (1.0, 1.1, 1.2, 1.35, 1.5, 1.75):
            yield (exact / (scale * stretch)).clamp(-limit, limit).to(dtype).to(torch.float32) * (scale * stretch)


def honest_fp8(data: Any) -> Any:
    """MLA decode as an fp8 kernel does it: fp8 queries, cache and probabilities, everything else in float32."""

    import reference

    q, kv_data, qo_indptr, kv_indptr, config = data
    kv, kv_scale = kv_data["fp8"]
    exact_q = reference.dequantize_fp8(*reference.quantize_fp8(q)) * config["sm_scale"]
    out = torch.zeros(reference.output_shape(data), dtype=torch.float32, device=q.device)
    qo, tokens = qo_indptr.tolist(), kv_indptr.tolist()
    for i in range(len(qo) - 1):
        if tokens[i] == tokens[i + 1]:
            continue
        cache = reference.dequantize_fp8(kv[tokens[i] : tokens[i + 1], 0], kv_scale)
        scores = exact_q[qo[i] : qo[i + 1]] @ cache.T
        weights = torch.exp(scores - scores.amax(-1, keepdim=True))
        rounded = weights.to(torch.float8_e4m3fn).to(torch.float32)
        out[qo[i] : qo[i + 1]] = (rounded @ cache[:, : config["v_head_dim"]]) / weights.sum(-1, keepdim=True)
    return out


def tolerances(tolerance: float) -> dict[str, float]:
    """The active tolerances by name."""

    return {
        "contest_rtol": reference.CONTEST_RTOL,
        "contest_atol": reference.CONTEST_ATOL,
        "contest_miss_ratio": reference.CONTEST_MISS_RATIO,
        "strict_rel_l2": tolerance,
        "fp8_slack": FP8_SLACK,
    }
