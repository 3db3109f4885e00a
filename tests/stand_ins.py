"""Stand-ins for what the host side of the submission meets: backends, GPUs, contest data."""

from __future__ import annotations

import functools
import gc
import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

import reference
import submission

REL_L2 = 5e-3
torch.set_num_threads(1)  # these problems are tiny: threads would only wait for each other


class Backend:
    """Answers rightly, or as `act(output, number of this run, plan)` says; counts its runs by plan."""

    def __init__(self, name: str = "fake", act: Callable[..., Any] | None = None, plans: tuple = ("only",)) -> None:
        self.name, self.act, self.offered = name, act, plans
        self.runs: dict[Any, int] = {}

    def supports(self, problem: submission.Problem) -> str | None:
        return None

    def plans(self, problem: submission.Problem) -> list[Any]:
        return list(self.offered)

    def run(self, plan: Any, inputs: submission.Inputs) -> torch.Tensor:
        number = self.runs[plan] = self.runs.get(plan, 0) + 1
        out = submission.torch_attention(inputs)[0].to(torch.bfloat16)
        return out if self.act is None else self.act(out, number, plan)


def raises(error: BaseException, first: int = 1, last: int = 1 << 30) -> Callable[..., torch.Tensor]:
    """An `act` that raises from run `first` to run `last`."""

    def act(out: torch.Tensor, number: int, plan: Any) -> torch.Tensor:
        if first <= number <= last:
            raise error
        return out

    return act


def use(monkeypatch: pytest.MonkeyPatch, *backends: Any) -> None:
    """Offer these beside the submission's own backends."""
    monkeypatch.setattr(submission, "_extra_backends", lambda: backends)


def on_device(monkeypatch: pytest.MonkeyPatch, **facts: Any) -> None:
    """Describe every problem with these facts instead of the machine's."""
    described = submission.Inputs.describe
    monkeypatch.setattr(
        submission.Inputs, "describe", lambda inputs, config: replace(described(inputs, config), **facts)
    )


@functools.cache
def contest_data(batch: int = 2, kv: int = 40, seed: int = 3) -> Any:
    """The contest's input of this shape, made once: not to be changed."""
    return reference.generate_input(batch, 1, kv, seed)


def worst(data: Any, out: torch.Tensor, cache: str = "mxfp4") -> float:
    """Worst relative L2 per (sequence, head) against float64 over the dequantised cache."""
    truth, _ = reference.attention_truth(data, cache=cache)
    return float(reference.relative_l2(out, truth).max())


def call(data: Any) -> torch.Tensor:
    """custom_kernel's output, judged."""
    out = submission.custom_kernel(data)
    assert worst(data, out) <= REL_L2
    return out


@contextmanager
def all_warnings() -> Iterator[list[str]]:
    """The text of every warning, repeated ones too, once the block has ended."""
    told: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield told
    told += [str(w.message) for w in caught]


def least_growth(
    measure: Callable[[], tuple[int, ...]], calls: Callable[[], None], batches: int = 4
) -> tuple[int, ...]:
    """How much each measured number grows over one batch of calls, in the batch where it grows least.

    A leak grows in every batch. What allocators keep for later, and what other tests left to the collector, does not.
    """

    def now() -> tuple[int, ...]:
        gc.collect()
        return measure()

    readings = [now()]
    for _ in range(batches):
        calls()
        readings.append(now())
    return tuple(
        min(after - before for before, after in itertools.pairwise(numbers)) for numbers in zip(*readings, strict=True)
    )
