"""Pictures of a timed run: `eval.py benchmark --plot FILE`, or `python -m evalkit.plot RESULT.json FILE`."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

from evalkit.cases import Case
from evalkit.timing import paper_bandwidth

# Okabe and Ito's palette: told apart with any colour vision; marks and hatches tell the series apart in grey.
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#E69F00", "#009E73", "#555555"
FORMATS = (".png", ".svg", ".html")
# Dense bf16 matrix rate in FLOP/s, from the data sheets.
PAPER_FLOPS = {"H200": 989e12, "H100": 989e12, "B200": 2250e12, "MI355X": 2500e12, "MI300X": 1307e12}


def flops(case: Case) -> float:
    """Multiplications and additions of one call: 16 heads, 576 dims of keys and 512 of values a token."""
    return 2.0 * 16 * (576 + 512) * case.tokens * case.args["qseqlen"]


def timed_cases(document: dict[str, Any]) -> list[tuple[Case, dict[str, Any]]]:
    """(case, entry) of every timed case in a --json document."""
    found = []
    for entry in document.get("cases", []):
        if entry.get("stats"):
            args = {k.strip(): int(v) for k, v in (part.split(":") for part in entry["spec"].split(";"))}
            found.append((Case(entry["spec"], args), entry))
    return found


def fallback_us(entry: dict[str, Any]) -> float | None:
    """The fallback's time as the submission's own pick measured it."""
    for candidate in (entry.get("pick") or {}).get("candidates") or []:
        if candidate.get("backend") in ("aiter", "torch") and candidate.get("time_us"):
            return float(candidate["time_us"])
    return None


def draw(document: dict[str, Any]) -> Any:
    """A figure with the roofline on the left and times per shape on the right."""
    from matplotlib.figure import Figure

    cases = timed_cases(document)
    if not cases:
        raise ValueError("plot: no timed case in this result; a benchmark on a GPU has some")
    card = document["environment"]["card"]
    bandwidth = paper_bandwidth(card)
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    roof, bars = figure.subplots(1, 2, width_ratios=(1, 1.5))
    _roofline(roof, cases, card, bandwidth)
    _bars(bars, cases, bandwidth)
    geomean = document.get("geomean_us")
    title = f"{document['mode']} of {document['submission']} on {card}, unofficial"
    figure.suptitle(title + (f", geometric mean {geomean:.1f} us" if geomean else ""), fontsize=11)
    return figure


def _roofline(axes: Any, cases: list[tuple[Case, dict[str, Any]]], card: str, bandwidth: float | None) -> None:
    peak = next((PAPER_FLOPS[name] for name in sorted(PAPER_FLOPS, key=len, reverse=True) if name in card), None)
    x_range = (10.0, 1000.0)
    if bandwidth is not None:
        ridge = min(peak / bandwidth, x_range[1]) if peak else x_range[1]
        xs = [x_range[0], ridge]
        axes.plot(xs, [x * bandwidth / 1e12 for x in xs], color=GREY, lw=1.5, label=f"{bandwidth / 1e12:.1f} TB/s")
        if peak and ridge < x_range[1]:
            label = f"{peak / 1e12:.0f} TFLOP/s bf16"
            axes.plot([ridge, x_range[1]], [peak / 1e12] * 2, color=GREY, lw=1.5, ls="--", label=label)
    markers = "osD^v<>P"
    for i, (case, entry) in enumerate(cases):
        seconds = entry["stats"]["mean"] * 1e-9
        color = (BLUE, ORANGE)[case.args["kvseqlen"] > 1024]
        x, y = flops(case) / case.min_bytes, flops(case) / seconds / 1e12
        axes.plot(x, y, markers[i % len(markers)], color=color, ms=8, mec="black", mew=0.6, label=case.shape)
    axes.set(xscale="log", yscale="log", xlim=x_range)
    axes.set_xlabel("FLOP per byte (MXFP4 cache, q and output)")
    axes.set_ylabel("attained, TFLOP/s")
    axes.set_title("roofline", fontsize=10)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(fontsize=7, loc="lower right")


def _bars(axes: Any, cases: list[tuple[Case, dict[str, Any]]], bandwidth: float | None) -> None:
    series = [("this file", BLUE, "", [entry["stats"]["mean"] / 1e3 for _, entry in cases])]
    fallbacks = [fallback_us(entry) for _, entry in cases]
    if any(fallbacks):
        series.append(("fallback, as the pick timed it", ORANGE, "//", [value or 0.0 for value in fallbacks]))
    if bandwidth is not None:
        limits = [case.min_bytes / bandwidth * 1e6 for case, _ in cases]
        series.append((f"bytes at {bandwidth / 1e12:.1f} TB/s", GREEN, "..", limits))
    width = 0.8 / len(series)
    for i, (name, color, hatch, values) in enumerate(series):
        places = [j + (i - (len(series) - 1) / 2) * width for j in range(len(values))]
        drawn = axes.bar(places, values, width, color=color, hatch=hatch, edgecolor="black", lw=0.6, label=name)
        if i == 0:
            axes.bar_label(drawn, [f"{v:.3g}" for v in values], fontsize=7, padding=1, rotation=90)
    axes.set_xticks(range(len(cases)), [case.shape for case, _ in cases], fontsize=8)
    axes.set(yscale="log", xlabel="batch x tokens", ylabel="time of one call, us")
    axes.set_title("time per shape", fontsize=10)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(True, axis="y", alpha=0.3)
    axes.legend(fontsize=8)


def save(document: dict[str, Any], path: Path) -> None:
    """Write the picture; the ending of the name says how.

    Raises:
        ValueError: no timed case, an unknown ending, or matplotlib is missing.
    """
    if path.suffix not in FORMATS:
        raise ValueError(f"plot: expected a name that ends in one of {', '.join(FORMATS)}, got {path.name}")
    try:
        figure = draw(document)
    except ImportError as error:
        raise ValueError(f"plot: needs matplotlib (pip install matplotlib): {error}") from error
    if path.suffix != ".html":
        figure.savefig(path, dpi=150)
        return
    svg = io.StringIO()
    figure.savefig(svg, format="svg")
    body = svg.getvalue()
    title = f"{document['submission']} on {document['environment']['card']}"
    page = f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title></head>\n<body>\n'
    path.write_text(page + body[body.index("<svg") :] + "</body></html>\n", encoding="utf-8")


def main(argv: list[str]) -> int:
    if len(argv) != 2:
        print("usage: python -m evalkit.plot RESULT.json FILE.png|.svg|.html", file=sys.stderr)
        return 2
    try:
        save(json.loads(Path(argv[0]).read_text()), Path(argv[1]))
    except (OSError, ValueError, KeyError) as error:
        print(f"evalkit.plot: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
