"""Pictures of a timed run: complete, with units, in every format, and a clear word when there is nothing to draw."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import eval as harness  # noqa: E402
from evalkit import plot  # noqa: E402

pytest.importorskip("matplotlib", reason="matplotlib is not installed: no picture can be drawn")


def document(card="NVIDIA H200", timed=True):
    cases = []
    for batch, tokens, mean_us in ((4, 1024, 14.0), (256, 8192, 411.0)):
        spec = f"batchsize: {batch}; qseqlen: 1; kvseqlen: {tokens}; seed: 1"
        pick = {"candidates": [{"backend": "torch", "time_us": 3 * mean_us}, {"backend": "triton", "time_us": mean_us}]}
        cases.append({"spec": spec, "stats": {"mean": 1e3 * mean_us} if timed else None, "pick": pick})
    environment = {"card": card}
    return {"mode": "benchmark", "submission": "s.py", "environment": environment, "cases": cases, "geomean_us": 75.9}


def test_roofline_and_bars_hold_every_shape_with_units():
    roof, bars = plot.draw(document()).axes
    assert "TFLOP/s" in roof.get_ylabel()
    assert "FLOP per byte" in roof.get_xlabel()
    assert bars.get_ylabel() == "time of one call, us"
    labels = [text.get_text() for text in roof.get_legend().get_texts()]
    assert labels == ["4.8 TB/s", "989 TFLOP/s bf16", "4x1024", "256x8192"]
    # 2 * 16 heads * (576 + 512) per token in 411 us.
    point = roof.get_lines()[-1]
    assert point.get_ydata()[0] == pytest.approx(2 * 16 * 1088 * 256 * 8192 / 411e-6 / 1e12)
    heights = [[bar.get_height() for bar in group] for group in bars.containers]
    assert heights[0] == [14.0, 411.0]
    assert heights[1] == [42.0, 1233.0]
    assert heights[2][1] == pytest.approx(135.6, rel=0.01)


def test_an_unknown_card_has_no_limit_line():
    roof, bars = plot.draw(document(card="a card")).axes
    assert [text.get_text() for text in roof.get_legend().get_texts()] == ["4x1024", "256x8192"]
    assert len(bars.containers) == 2


def inspection():
    prediction = {"launch_us": 6.0, "merge_us": 1.0, "predicted_us": 12.0}
    cycles = {"mfma_cycles_per_token": 8.0, "valu_cycles_per_token": 10.5, "hbm_bytes_per_token": 306}
    cycles |= {"lds_cycles_per_token": 9.0, "lds_copy_cycles_per_token": 2.0}
    plans = [
        {"batch": 4, "kv": kv, "num_splits": splits, "loop": {"num_warps": 8, "vmem_cycles_per_token": 5.5}}
        | {"prediction": prediction}
        | cycles
        for kv, splits in ((1024, 16), (2048, 32), (8192, 1))
    ]
    values = {
        "CLOCK_HZ": 2.4e9,
        "COMPUTE_UNITS": 256,
        "HBM_PEAK_BYTES_PER_S": 8e12,
        "HBM_ATTAINED_BYTES_PER_S": 5.65e12,
    }
    return {
        "arch": "gfx950",
        "triton": "3.6.0",
        "plans": plans,
        "geomean_predicted_us": 12.0,
        "assumptions": {name: {"value": value} for name, value in values.items()},
    }


def test_inspection_shows_cycles_by_unit_and_predicted_times_as_such():
    figure = plot.draw(inspection())
    assert "PREDICTION" in figure.get_suptitle()
    budget, times = figure.axes
    assert budget.get_ylabel() == "cycles per token and compute unit"
    assert times.get_ylabel() == "predicted time of one call, us"
    # One column for each distinct loop; matrix core and VALU stand on each other.
    mfma, valu = budget.containers[:2]
    assert [bar.get_height() for bar in mfma] == [8.0, 8.0]
    assert [bar.get_y() + bar.get_height() for bar in valu] == [18.5, 18.5]
    # 306 bytes x 256 units x 2.4 GHz at 8 and 5.65 TB/s.
    assert [line.get_ydata()[0] for line in budget.get_lines()] == pytest.approx([23.5, 33.27], rel=1e-3)
    assert [sum(bar.get_height() for bar in column) for column in zip(*times.containers, strict=True)] == [12.0] * 3


def test_another_architecture_has_no_budget_to_draw():
    report = inspection() | {"arch": "sm_90", "plans": [{"batch": 4, "kv": 1024}]}
    with pytest.raises(ValueError, match="sm_90 has no cycle budget"):
        plot.draw(report)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["benchmark", "--plot", "a.gif"], ".png, .svg, .html"),
        (["benchmark", "--plot", "missing/a.png"], "--plot: missing/a.png: expected a file in a folder that exists"),
        (["test", "--json", "missing/a.json"], "--json: missing/a.json"),
        (["audit", "--plot", "a.png"], "goes with benchmark, leaderboard and inspect"),
        (["test", "--compare", "old.json"], "goes with benchmark and leaderboard"),
    ],
)
def test_what_cannot_be_written_is_said_before_the_work(options, reason, capsys):
    assert harness.main([*options, "--device", "cpu"]) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "start"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.html", b"<!doctype html>")]
)
def test_formats(name, start, tmp_path):
    (tmp_path / "r.json").write_text(json.dumps(document()))
    assert plot.main([str(tmp_path / "r.json"), str(tmp_path / name)]) == 0
    assert (tmp_path / name).read_bytes().startswith(start)


def test_nothing_to_draw_and_unknown_formats_are_said(tmp_path, capsys):
    with pytest.raises(ValueError, match="no timed case"):
        plot.save(document(timed=False), tmp_path / "a.png")
    with pytest.raises(ValueError, match=r"\.png, \.svg, \.html"):
        plot.save(document(), tmp_path / "a.gif")
    assert plot.main([str(tmp_path / "missing.json"), "a.png"]) == 1
    assert plot.main([]) == 2
