"""Statistics, the contest's stop rule, and times that no honest computation can have."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from evalkit.cases import Case
from evalkit.supervisor import reading_answer

MAX_CASE_WALL_S = 120.0
# A time that leaves out work: the device's clock against everything up to a device-wide synchronise.
INCLUSIVE_RATIO, INCLUSIVE_SLACK_NS = 2.0, 50_000.0
# A row of calls by the evaluator's own clock against one call by the worker's events.
OWN_CLOCK_RATIO, OWN_CLOCK_SLACK_NS = 1.25, 100_000.0
# Paper bandwidth in bytes/s: nothing honest is faster than reading the cache once.
PAPER_BANDWIDTH = {
    "H200": 4.8e12,
    "GH200": 4.9e12,
    "H100": 3.35e12,
    "B200": 8.0e12,
    "A100": 2.04e12,
    "L40S": 0.864e12,
    "MI355X": 8.0e12,
    "MI350X": 8.0e12,
    "MI325X": 6.0e12,
    "MI300X": 5.3e12,
    "MI250X": 3.28e12,
}


@dataclass(frozen=True)
class Stats:
    """Times of one case in nanoseconds."""

    runs: int
    mean: float
    std: float
    err: float
    best: float
    worst: float


def calculate_stats(durations: list[float]) -> Stats:
    """Mean with its standard error, spread and extremes."""
    runs = len(durations)
    mean = sum(durations) / runs
    std = math.sqrt(sum((d - mean) ** 2 for d in durations) / (runs - 1)) if runs > 1 else 0.0
    return Stats(runs, mean, std, std / math.sqrt(runs), float(min(durations)), float(max(durations)))


def enough_runs(
    durations: list[float], max_time_ns: float, spent_s: float, max_wall_s: float = MAX_CASE_WALL_S
) -> bool:
    """The contest's stop rule, asked from the third run on."""
    if len(durations) < 3:
        return False
    stats = calculate_stats(durations)
    return stats.err < 0.001 * stats.mean or stats.mean * stats.runs > max_time_ns or spent_s > max_wall_s


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(math.log(v) for v in values) / len(values))


def paper_bandwidth(card: str) -> float | None:
    """Bytes per second on the card's data sheet, or None for an unknown card."""
    names = [name for name in PAPER_BANDWIDTH if name in card.upper().replace(" ", "")]
    return PAPER_BANDWIDTH[max(names, key=len)] if names else None


def timed_answer(answer: dict[str, Any], inclusive: bool) -> tuple[list[float], list[float]]:
    """(ns between the events, ns by the host's clock) of timed runs; of inclusive ones less the host's part."""
    with reading_answer():
        times = [float(t) for t in answer["durations"]]
        walls = [float(w) for w in answer["walls"]]
        if inclusive:
            hosts = [float(h) for h in answer["hosts"]]
            times = [max(1.0, t - h) for t, h in zip(times, hosts, strict=True)]
            walls = [max(1.0, w - h) for w, h in zip(walls, hosts, strict=True)]
    return times, walls


def late_error(answer: dict[str, Any]) -> str | None:
    """Which timed outputs were still written after the second event, or None."""
    with reading_answer():
        late = [int(i) for i in answer.get("late", [])]
    return f"the output of timed run {late[0] + 1} was written after the clock had stopped" if late else None


def clock_error(typical_ns: float, host_ns: float, own_ns: float) -> str | None:
    """Why the worker's times do not fit the evaluator's own clock, or None.

    Args:
        typical_ns: a call as the worker's events timed it, caches cold.
        host_ns: the host's part of a call as the worker timed it, which a row of calls may expose.
        own_ns: a call of a row without pauses, by the clock of this process, caches warm.
    """
    limit_ns = OWN_CLOCK_RATIO * typical_ns + host_ns + OWN_CLOCK_SLACK_NS
    if own_ns <= limit_ns:
        return None
    return (
        f"the clocks disagree: {typical_ns / 1e3:.1f} us between the events, {own_ns / 1e3:.1f} us a call by the"
        " evaluator's own clock"
    )


def time_error(case: Case, durations: list[float], inclusive: list[float], walls: list[float], card: str) -> str | None:
    """Why these times cannot be those of an honest computation, or None.

    Args:
        durations: ns, in the contest's order.
        inclusive: ns between the events with a device-wide synchronise before the second, less the host's part.
        walls: ns of the inclusive runs by the host's clock, less the host's part.
        card: the device's name.
    """
    if any(not math.isfinite(d) or d <= 0 for d in durations):
        return f"a time of {min(durations):.0f} ns is impossible"
    typical = sorted(durations)[len(durations) // 2]
    bandwidth = paper_bandwidth(card)
    if bandwidth is not None and typical * 1e-9 < case.min_bytes / bandwidth:
        floor = case.min_bytes / bandwidth * 1e6
        return (
            f"{typical / 1e3:.2f} us is not credible: reading the cache once takes {floor:.2f} us at"
            f" {bandwidth / 1e12:.1f} TB/s"
        )
    if inclusive and min(inclusive) > INCLUSIVE_RATIO * typical + INCLUSIVE_SLACK_NS:
        return (
            f"work is left out of the timed queue: {typical / 1e3:.1f} us between the events,"
            f" {min(inclusive) / 1e3:.1f} us until the device is idle"
        )
    if walls and min(walls) > INCLUSIVE_RATIO * max(inclusive) + 10 * INCLUSIVE_SLACK_NS:
        return (
            f"the clocks disagree: {max(inclusive) / 1e3:.1f} us between the events, {min(walls) / 1e3:.1f} us by the"
            " host's clock"
        )
    return None
