"""Backends for GPUs that the submission itself is not written for; it works without this package."""

from __future__ import annotations

from typing import Any


def backends() -> tuple[Any, ...]:
    """Every backend of this package; each says by `supports(problem)` whether it can take a problem."""
    from . import hopper

    return (hopper.HopperBackend(),)
