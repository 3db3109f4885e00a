"""Pictures of a timed run: complete, with units, in every format, and a clear word when there is nothing to draw."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

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
