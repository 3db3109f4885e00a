"""Gives the submission inputs that aiter does not take, above a stand-in that ends the process as aiter does.

Each input runs in a child of its own; a line `change|outcome` tells what became of it. See test_aiter_contract.py.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import test_aiter_contract as contract
import torch

import reference
import submission

FP8 = torch.float8_e4m3fn  # gfx950's


def check(held: bool, what: str) -> None:
    if not held:
        sys.stderr.write(f"aborts: {what}\n")
        sys.stderr.flush()
        os.abort()


def check_metadata(given: dict[str, Any]) -> None:
    qo, kv = given["seqlens_qo_indptr"], given["seqlens_kv_indptr"]
    for x in (qo, kv, given["kv_last_page_lens"]):
        check(x.dtype == torch.int32 and x.is_contiguous(), "lengths: int32, contiguous")
    check(int(kv[0]) == 0 and min(kv.diff().tolist()) >= 196, "lengths")
    check(qo.tolist() == list(range(len(kv))), "one query token a sequence")
    check(given["max_split_per_batch"] > 0 and given["page_size"] == 1, "splits, page size")
    check(given["dtype_kv"] == FP8 and given["dtype_q"] in (FP8, torch.bfloat16), "dtypes")


def check_decode(given: dict[str, Any]) -> None:
    q, kv, o = given["q"], given["kv_buffer"], given["o"]
    check(q.is_contiguous() and q.shape[1:] == (16, 576) and q.dtype in (torch.bfloat16, FP8), "q")
    check(o.is_contiguous() and o.shape == (len(q), 16, 512) and o.dtype == torch.bfloat16, "o")
    check(kv.is_contiguous() and kv.dtype == FP8 and kv.shape[1:] == (1, 1, 576), "kv_buffer")
    for name in ("qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_lens"):
        check(given[name].dtype == torch.int32 and given[name].is_contiguous(), name)
    pages = given["kv_indices"]
    check(int(given["kv_indptr"][0]) == 0 and int(given["kv_indptr"][-1]) <= len(pages), "as many page ids as tokens")
    check(int(pages.min()) >= 0 and int(pages.max()) < min(len(kv), 7_456_541), "page ids")
    for name in ("kv_scale", "q_scale") if q.dtype == FP8 else ("kv_scale",):
        x = given.get(name)
        held = x is not None and x.dtype == torch.float32 and x.numel() == 1 and x.is_contiguous()
        check(held and x.device == q.device, name)
    constants = tuple(given[name] for name in ("max_seqlen_q", "page_size", "nhead_kv", "logit_cap"))
    check(constants == (1, 1, 1, 0.0), "constants")


def strict(function: Any, checks: Callable[[dict[str, Any]], None]) -> Any:
    signature = inspect.signature(function)

    def checked(*args: Any, **kwargs: Any) -> Any:
        checks(dict(signature.bind(*args, **kwargs).arguments))
        return function(*args, **kwargs)

    checked.__signature__ = signature  # type: ignore[attr-defined]
    return checked


def wide(x: torch.Tensor) -> torch.Tensor:
    """The same values, rows twice as far apart."""
    raw = x.view(torch.uint8)
    return torch.cat([raw, raw], -1)[..., : raw.shape[-1]].view(x.dtype)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def change_fp8(change: Callable[[torch.Tensor, torch.Tensor], Any]) -> Callable[[list[Any]], None]:
    return lambda data: data[1].update(fp8=change(*data[1]["fp8"]))


def put(place: int, change: Callable[[Any], Any]) -> Callable[[list[Any]], None]:
    return lambda data: data.__setitem__(place, change(data[place]))


def several(*changes: Callable[[list[Any]], None]) -> Callable[[list[Any]], None]:
    return lambda data: [change(data) for change in changes] and None  # type: ignore[func-returns-value]


# data: [q, kv_data, qo_indptr, kv_indptr, config], two sequences of 200 tokens. "later": in a second call.
CHANGES: dict[str, Callable[[list[Any]], None]] = {
    "none": lambda data: None,
    "strided q": put(0, wide),
    "int64 indptr": put(3, lambda x: x.long()),
    "strided indptr": put(3, lambda x: torch.stack([x, x], -1)[:, 0]),
    "int64 qo_indptr": put(2, lambda x: x.long()),
    "strided qo_indptr": put(2, lambda x: torch.stack([x, x], -1)[:, 0]),
    "no qo_indptr": put(2, lambda x: None),
    "short sequence": put(3, lambda x: int32(0, 195, 400)),
    "empty sequence": put(3, lambda x: int32(0, 0, 400)),
    "late start": put(3, lambda x: int32(2, 200, 400)),
    "short sequence later": put(3, lambda x: int32(0, 395, 400)),
    "empty sequence later": put(3, lambda x: int32(0, 400, 400)),
    "late start later": put(3, lambda x: int32(2, 200, 400)),
    "beyond the cache later": put(3, lambda x: int32(0, 200, 401)),
    "two query tokens": several(
        put(0, lambda x: torch.cat([x, x])), put(2, lambda x: x * 2), put(4, lambda x: {**x, "q_seq_len": 2})
    ),
    "32 heads": several(put(0, lambda x: torch.cat([x, x], 1)), put(4, lambda x: {**x, "num_heads": 32})),
    "no fp8": lambda data: data[1].pop("fp8") and None,
    "scalar scale": change_fp8(lambda x, scale: (x, scale.reshape(()))),
    "double scale": change_fp8(lambda x, scale: (x, scale.double())),
    "two scales": change_fp8(lambda x, scale: (x, torch.cat([scale, scale]))),
    "no scale": change_fp8(lambda x, scale: (x, None)),
    "raw bytes": change_fp8(lambda x, scale: (x.view(torch.uint8), scale)),
    "other fp8": change_fp8(lambda x, scale: (x.view(torch.uint8).view(torch.float8_e4m3fnuz), scale)),
    "short fp8": change_fp8(lambda x, scale: (x[:300], scale)),
    "strided fp8": change_fp8(lambda x, scale: (wide(x), scale)),
    "flat fp8": change_fp8(lambda x, scale: (x.reshape(-1, 576), scale)),
}


def outcome(change: str) -> str:
    """Who answered, and whether rightly; or the refusal."""
    q, kv, qo_indptr, kv_indptr, config = reference.generate_input(2, 1, 200, 5)
    data = [q, dict(kv), qo_indptr, kv_indptr, config]
    try:
        if change.endswith("later"):
            submission.custom_kernel(tuple(data))  # type: ignore[arg-type]
        CHANGES[change](data)
        out = submission.custom_kernel(tuple(data))  # type: ignore[arg-type]
    except ValueError as error:
        return f"ValueError {error}"
    inputs = submission._unpack(tuple(data))  # type: ignore[arg-type]
    caches = ("mxfp4", "fp8")[: 1 + ("fp8" in data[1])]
    truths = [submission.torch_attention(inputs, cache=cache)[0] for cache in caches]
    error = min(float(submission._relative_l2(out, truth).max()) for truth in truths)
    pick = submission.last_pick()
    assert pick is not None
    verdict = "right" if error < 0.05 else f"wrong by {error:.1e}"
    return f"{pick['backend']} {verdict}" + f", for ever without {[*submission._dropped]}" * bool(submission._dropped)


def main() -> None:
    patch = pytest.MonkeyPatch()
    contract.on_device(patch, arch="gfx950", num_cus=256)
    patch.setattr(submission, "_extra_backends", tuple)
    patch.setattr(submission.TritonBackend, "supports", lambda self, problem: "left out")
    module: Any = contract.install(patch, contract.RELEASES["0.1.17"])
    module.aiter.get_mla_metadata_v1 = strict(module.aiter.get_mla_metadata_v1, check_metadata)
    module.mla.mla_decode_fwd = strict(module.mla.mla_decode_fwd, check_decode)
    for change in CHANGES:
        sys.stdout.flush()
        child = os.fork()
        if not child:
            try:
                print(f"{change}|{' '.join(outcome(change).split())}", flush=True)
                os._exit(0)
            except BaseException as error:
                print(f"{change}|{type(error).__name__} {str(error)[:200]!r}", flush=True)
                os._exit(0)
        status = os.waitpid(child, 0)[1]
        if status:
            print(f"{change}|ended by signal {os.WTERMSIG(status)}")


if __name__ == "__main__":
    main()
