"""Pictures of a timed run or an inspection: `eval.py MODE --plot FILE`, `python -m evalkit.plot RESULT.json FILE`."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

from evalkit.cases import Case
from evalkit.report import write_whole
from evalkit.timing import paper_bandwidth

# Okabe and Ito's palette: told apart with any colour vision; marks and hatches tell the series apart in grey.
BLUE, ORANGE, GREEN, SKY, GREY = "#0072B2", "#E69F00", "#009E73", "#56B4E9", "#555555"
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


def check_name(path: Path) -> None:
    """ValueError when no picture can be written under this name; asked before the work, not after it."""
    if path.suffix not in FORMATS:
        raise ValueError(f"plot: expected a name that ends in one of {', '.join(FORMATS)}, got {path.name}")


def draw(document: dict[str, Any]) -> Any:
    """A figure: roofline and times per shape of a timed run, or cycle budget and predicted times of an inspection."""
    from matplotlib.figure import Figure

    if "plans" in document:
        return draw_inspection(document)
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


def draw_inspection(report: dict[str, Any]) -> Any:
    """Cycles per token by unit for every distinct loop on the left, predicted times per shape on the right."""
    from matplotlib.figure import Figure

    if any("loop" not in plan for plan in report["plans"]):
        raise ValueError(f"plot: {report['arch']} has no cycle budget to draw; `inspect --arch gfx950` has one")
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    budget, times = figure.subplots(1, 2, width_ratios=(1, 1.3))
    _budget(budget, report)
    _predicted(times, report)
    title = f"{report['arch']}, Triton {report['triton']}: PREDICTION from executed machine code, nothing was timed"
    figure.suptitle(title, fontsize=11)
    return figure


def _stack(axes: Any, places: list[float], width: float, parts: list[tuple[str, str, str, list[float]]]) -> list[float]:
    """Stacked bars of (label, colour, hatch, heights), with each part's height in it where it has room: the totals."""
    bottom = [0.0] * len(places)
    for name, color, hatch, values in parts:
        axes.bar(places, values, width, bottom, color=color, hatch=hatch, edgecolor="black", lw=0.6, label=name)
        bottom = [a + b for a, b in zip(bottom, values, strict=True)]
    return bottom


def _budget(axes: Any, report: dict[str, Any]) -> None:
    plans: dict[str, dict[str, Any]] = {}
    for plan in report["plans"]:
        split = "split" if plan["num_splits"] > 1 else "one split"
        plans.setdefault(f"{plan['loop']['num_warps']} waves,\n{split}", plan)
    columns = list(plans.values())

    def of(key: str) -> list[float]:
        return [plan[key] for plan in columns]

    groups: list[list[tuple[str, str, str, list[float]]]] = [
        [("MFMA", BLUE, "", of("mfma_cycles_per_token")), ("VALU", ORANGE, "//", of("valu_cycles_per_token"))],
        [
            ("LDS, the waves' own", GREEN, "..", of("lds_cycles_per_token")),
            ("LDS, copies from memory", SKY, "xx", of("lds_copy_cycles_per_token")),
        ],
        [("vector memory", "white", "", [plan["loop"]["vmem_cycles_per_token"] for plan in columns])],
    ]
    width = 0.8 / len(groups)
    for i, parts in enumerate(groups):
        places = [j + (i - 1) * width for j in range(len(columns))]
        for place, total in zip(places, _stack(axes, places, width, parts), strict=True):
            axes.text(place, total + 0.3, f"{total:.1f}", ha="center", fontsize=7)
    clock_hz, units = (report["assumptions"][name]["value"] for name in ("CLOCK_HZ", "COMPUTE_UNITS"))
    for name, style in (("HBM_PEAK_BYTES_PER_S", "--"), ("HBM_ATTAINED_BYTES_PER_S", ":")):
        rate = report["assumptions"][name]["value"]
        cycles = columns[0]["hbm_bytes_per_token"] / rate * clock_hz * units
        axes.axhline(cycles, color=GREY, ls=style, lw=1.5, label=f"a token from HBM at {rate / 1e12:g} TB/s")
    axes.set_xticks(range(len(columns)), list(plans), fontsize=8)
    axes.set(xlabel="plan (one group per unit)", ylabel="cycles per token and compute unit", ylim=(0, 52))
    axes.set_title("cycle budget of the hot loop by unit", fontsize=10)
    axes.grid(True, axis="y", alpha=0.3)
    axes.legend(fontsize=7, loc="upper left", ncols=2)


def _predicted(axes: Any, report: dict[str, Any]) -> None:
    plans = report["plans"]
    parts = {name: [plan["prediction"][name] for plan in plans] for name in ("launch_us", "merge_us", "predicted_us")}
    body = [total - launch - merge for launch, merge, total in zip(*parts.values(), strict=True)]
    series = [
        ("launches (assumed)", GREY, "", parts["launch_us"]),
        ("attention over the cache", BLUE, "//", body),
        ("merge of the splits", ORANGE, "..", parts["merge_us"]),
    ]
    places = [float(i) for i in range(len(plans))]
    for place, total in zip(places, _stack(axes, places, 0.7, series), strict=True):
        axes.text(place, total + 1, f"{total:.1f}", ha="center", fontsize=8)
    axes.set_ylim(0, 1.1 * max(parts["predicted_us"]))
    axes.set_xticks(places, [f"{plan['batch']}x{plan['kv']}" for plan in plans], fontsize=7)
    axes.set(xlabel="batch x tokens", ylabel="predicted time of one call, us")
    attained = report["assumptions"]["HBM_ATTAINED_BYTES_PER_S"]["value"] / 1e12
    mean = report["geomean_predicted_us"]
    axes.set_title(f"predicted at {attained:g} TB/s, geometric mean {mean:.1f} us", fontsize=10)
    axes.grid(True, axis="y", alpha=0.3)
    axes.legend(fontsize=8, loc="upper left")


def save(document: dict[str, Any], path: Path) -> None:
    """Write the picture; the ending of the name says how.

    Raises:
        ValueError: nothing to draw, an unknown ending, or matplotlib is missing.
    """
    check_name(path)
    try:
        figure = draw(document)
    except ImportError as error:
        raise ValueError(f"plot: needs matplotlib (pip install matplotlib): {error}") from error
    if path.suffix != ".html":
        picture = io.BytesIO()
        figure.savefig(picture, format=path.suffix[1:], dpi=150)
        write_whole(path, picture.getvalue())
        return
    svg = io.StringIO()
    figure.savefig(svg, format="svg")
    body = svg.getvalue()
    title = f"inspect {document['arch']}" if "plans" in document else f"{document['mode']}, {document['submission']}"
    page = f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title></head>\n<body>\n'
    write_whole(path, (page + body[body.index("<svg") :] + "</body></html>\n").encode())


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
