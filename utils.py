"""Helpers under the names that submissions to the contest import."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

MIB = 1 << 20


def set_seed(seed: int = 42) -> None:
    """Seed Python, numpy and every torch device."""
    random.seed(seed)
    # The legacy generator is the one that submissions draw from.
    np.random.seed(seed % (1 << 32))  # noqa: NPY002
    torch.manual_seed(seed)


def get_device(use_cuda: bool = True) -> torch.device:
    """The GPU where there is one and it is wanted, else the CPU."""
    return torch.device("cuda" if use_cuda and torch.cuda.is_available() else "cpu")


def _mismatches(received: torch.Tensor, wrong: torch.Tensor, expected: torch.Tensor, max_print: int) -> list[str]:
    count = int(wrong.count_nonzero())
    lines = [f"Number of mismatched elements: {count} of {wrong.numel()}"]
    for index in wrong.nonzero()[:max_print].tolist():
        at = tuple(index)
        lines.append(f"ERROR at {at}: got {received[at].item()}, expected {expected[at].item()}")
    if count > max_print:
        lines.append(f"... and {count - max_print} more")
    return lines


def _shape_error(received: Any, expected: torch.Tensor) -> str | None:
    if not isinstance(received, torch.Tensor):
        return f"expected a torch.Tensor, got {type(received).__name__}"
    if received.shape != expected.shape:
        return f"SIZE MISMATCH: expected {tuple(expected.shape)}, got {tuple(received.shape)}"
    return None


@torch.no_grad()
def verbose_allclose(
    received: torch.Tensor,
    expected: torch.Tensor,
    rtol: float = 1e-5,
    atol: float = 1e-8,
    max_print: int = 5,
    max_error_ratio: float = 0.0,
) -> tuple[bool, list[str]]:
    """Element-wise closeness, with the first misses spelled out.

    Args:
        received, expected: tensors of one shape.
        rtol, atol: an element misses when |received - expected| > atol + rtol * |expected|, or when only one is NaN or
            infinite.
        max_error_ratio: share of the elements, 0..1, that may miss.
    Returns:
        (good, lines to show)
    """
    error = _shape_error(received, expected)
    if error:
        return False, [error]
    got, want = received.float(), expected.float()
    same_special = (got == want) | (got.isnan() & want.isnan())
    close = (got - want).abs() <= atol + rtol * want.abs()
    close &= got.isfinite() & want.isfinite()
    wrong = ~(close | same_special)
    if int(wrong.count_nonzero()) > max_error_ratio * wrong.numel():
        return False, _mismatches(received, wrong, expected, max_print)
    worst = (got - want).abs().nan_to_num().max().item() if wrong.numel() else 0.0
    return True, [f"Maximum error: {worst}"]


@torch.no_grad()
def verbose_allequal(received: torch.Tensor, expected: torch.Tensor, max_print: int = 5) -> tuple[bool, list[str]]:
    """Element-wise equality, with the first misses spelled out."""
    error = _shape_error(received, expected)
    if error:
        return False, [error]
    wrong = torch.not_equal(received, expected)
    if wrong.any():
        return False, _mismatches(received, wrong, expected, max_print)
    return True, []


def match_reference(
    data: Any,
    output: Any,
    reference: Callable[[Any], torch.Tensor],
    rtol: float = 1e-5,
    atol: float = 1e-8,
    max_error_ratio: float = 0.0,
) -> tuple[bool, str]:
    """Compare `output` with `reference(data)`; returns (good, message)."""
    good, lines = verbose_allclose(output, reference(data), rtol=rtol, atol=atol, max_error_ratio=max_error_ratio)
    return good, "; ".join(lines)


def make_match_reference(reference: Callable[[Any], torch.Tensor], **kwargs: Any) -> Callable[[Any, Any], Any]:
    """A `check_implementation(data, output)` against `reference`."""

    def check(data: Any, output: Any) -> tuple[bool, str]:
        return match_reference(data, output, reference=reference, **kwargs)

    return check


def flush_bytes(device: torch.device | int | None = None) -> int:
    """How much must be written to push everything out of the device's last-level cache: twice its size or more."""
    properties = torch.cuda.get_device_properties(device)
    last_level = 2 * int(getattr(properties, "L2_cache_size", 0))
    # AMD reports the L2 of one die (4 MiB) and not the 256 MiB cache behind it.
    floor = 512 * MIB if torch.version.hip else 128 * MIB
    return max(last_level, floor)


# The contest's own flush writes 62.5 GiB and keeps the device busy for milliseconds, which hides the host's share of
# the call that is queued behind it. 2 GiB, half a millisecond on an H200, hide an ordinary launch path as well.
FLUSH_WRITTEN_BYTES = 2048 * MIB

_flush_buffers: dict[int, torch.Tensor] = {}


def clear_l2_cache() -> None:
    """Queue writes over the whole last-level cache of the current device; does not wait for them."""
    if not torch.cuda.is_available():
        return
    device = torch.cuda.current_device()
    if device not in _flush_buffers:
        _flush_buffers[device] = torch.empty(flush_bytes(device) // 4, dtype=torch.int32, device=f"cuda:{device}")
    buffer = _flush_buffers[device]
    for _ in range(-(-FLUSH_WRITTEN_BYTES // (4 * buffer.numel()))):
        buffer.fill_(42)


clear_l2_cache_large = clear_l2_cache
