"""The audit's inputs, its command and the lint."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
GALLERY = ROOT / "tests" / "gallery"
sys.path.insert(0, str(ROOT))

import eval as harness  # noqa: E402
import reference  # noqa: E402
from evalkit import audit, calibrate, inputs, lint  # noqa: E402
from evalkit.judge import Judge  # noqa: E402

GOOD = "\n".join((*lint.DIRECTIVES, "def custom_kernel(data):", "    return data", ""))


def weights(data, sequence):
    """float64 [16, tokens]: softmax weights of one sequence over the bf16 cache."""
    begin, end = data[3][sequence], data[3][sequence + 1]
    tokens = data[1]["bf16"][begin:end, 0].double()
    return torch.softmax(data[0][sequence].double() @ tokens.T * data[4]["sm_scale"], -1)


# -- inputs


def test_inputs_depend_on_the_seed_only():
    first, same, other = (inputs.make("planted", 3, 50, seed) for seed in (1, 1, 2))
    assert torch.equal(first[0], same[0])
    assert torch.equal(first[1]["bf16"], same[1]["bf16"])
    assert not torch.equal(first[1]["bf16"], other[1]["bf16"])


def test_planted_keys_hold_half_of_the_weight_at_both_ends():
    first, last = [], []
    for seed in range(10):
        data = inputs.make("planted", 4, 129, seed)
        first.append(float(weights(data, 0)[:, 0].mean()))
        last.append(float(weights(data, 1)[:, -1].mean()))
        assert all(float(weights(data, i).max()) > 0.3 for i in range(4))
    assert 0.4 < sum(first) / 10 < 0.85
    assert 0.4 < sum(last) / 10 < 0.85


def test_one_hot_and_flat_are_what_they_say():
    assert all(float(weights(inputs.make("one-hot", 4, 129, 3), i).amax(-1).mean()) > 0.97 for i in range(4))
    flat = weights(inputs.make("flat", 4, 129, 3), 2)
    assert float(flat.max() / flat.min()) < 1.2


@pytest.mark.parametrize(("batch", "kv_len"), [(4, 129), (2, 200), (4, 1024)])
def test_every_token_is_some_heads(batch, kv_len):
    data = inputs.make("every-token", batch, kv_len, 5)
    best = torch.stack([weights(data, i) for i in range(batch)]).amax((0, 1))
    share = 1 / -(-kv_len // min(64, 16 * batch))
    assert float(best.min()) > 0.8 * share
    # The RoPE patterns survive both formats exactly, so no head looks elsewhere in another cache.
    exact = data[1]["bf16"][:, 0, 512:].double()
    assert torch.equal(reference.dequantize_mxfp4(*data[1]["mxfp4"], torch.float64)[:, 512:], exact)


@pytest.mark.parametrize(
    ("kind", "position"), [("planted", 0), ("planted", 1023), ("every-token", 511), ("every-token", 0)]
)
def test_one_dropped_token_in_1024_is_seen(kind, position):
    data = inputs.make(kind, 4, 1024, 8)
    verdict = Judge(data).strict(calibrate.dropped(data, position))
    assert not verdict.passed


@pytest.mark.parametrize("position", [0, 8191])
def test_a_dropped_end_of_a_long_sequence_is_seen(position):
    data = inputs.make("every-token", 1, 8192, 8)
    assert not Judge(data).strict(calibrate.dropped(data, position)).passed


def test_loud_tokens_count_alike():
    data = inputs.make("loud", 2, 129, 4)
    own = weights(data, 1)[0]
    sizes = own * data[1]["bf16"][129:, 0, :512].double().norm(dim=-1)
    assert float(own.max() / own.min()) > 5
    assert float(sizes.max() / sizes.min()) < 1.5
    # The levels are the same in all formats.
    exact = data[1]["bf16"][:, 0, 512:].double()
    assert torch.equal(reference.dequantize_mxfp4(*data[1]["mxfp4"], torch.float64)[:, 512:], exact)


def test_swapped_and_changed_touch_only_their_rows():
    data = inputs.make("every-token", 4, 64, 1)
    before = reference.attention_truth(data, "bf16")[0]
    swap = reference.attention_truth(inputs.swapped(data, 0, 3), "bf16")[0]
    torch.testing.assert_close(swap, before[[3, 1, 2, 0]])
    changed = reference.attention_truth(inputs.one_token_changed(data, 2, 10, 4), "bf16")[0]
    moved = reference.relative_l2(changed, before).amax(-1)
    assert [bool(m > 1e-9) for m in moved] == [False, False, moved[2] > 1e-9, False]


def test_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="kind: expected one of"):
        inputs.make("easy", 2, 33, 1)


def test_honest_variants_are_not_refused_and_the_count_is_printed(capsys):
    assert calibrate.main(["--seeds", "2", "--batch", "2", "--kv", "67"]) == 0
    assert "honest outputs refused: 0 of 192" in capsys.readouterr().out


def test_calibration_can_fail(monkeypatch, capsys):
    monkeypatch.setattr(Judge, "fp8_error", lambda self: torch.zeros(2, 16))
    monkeypatch.setattr(Judge.__init__, "__defaults__", (1e-4,))
    assert calibrate.main(["--seeds", "1", "--batch", "2", "--kv", "67", "--kinds", "normal"]) == 1
    assert "refused: 0 of" not in capsys.readouterr().out


# -- the command


@pytest.fixture
def short_audit(monkeypatch):
    """Longer shapes and many calls as far as two seconds go."""
    monkeypatch.setitem(audit.OTHER_SHAPES_S, "cpu", 1.0)
    monkeypatch.setitem(audit.MANY_CALLS_S, "cpu", 1.0)


def test_audit_document_and_screen(short_audit, tmp_path, capsys):
    report = tmp_path / "report.json"
    arguments = ["audit", "--submission", str(GALLERY / "honest_fp8.py"), "--json", str(report), "--seed", "5"]
    assert harness.main([*arguments, "--device", "cpu"]) == 0
    document = json.loads(report.read_text())
    assert document["verdict"] == "honest"
    assert document["cache"] == "fp8/fp8"
    assert 0.001 < document["worst_rel_l2"] <= document["worst_limit"]
    assert {"name", "passed", "evidence"} <= set(document["checks"][0])
    text = capsys.readouterr().out
    assert "HONEST: attention over the whole fp8 cache (queries as fp8)" in text
    assert "contest's own check on contest inputs: pass" in text
    assert max(map(len, text.splitlines())) <= 100
    # What a CPU has no time for is part of the verdict.
    untried = text[text.index("HONEST:") :].split("not tried")[0]
    assert "256x8192" in untried
    assert "1x1001" not in untried


def test_tolerance_is_printed_and_used(short_audit, tmp_path, capsys):
    path = tmp_path / "submission.py"
    path.write_text(
        "from mla import attend\n\n\ndef custom_kernel(data):\n    return (attend(data) * 1.08).bfloat16()\n"
    )
    (tmp_path / "mla.py").write_text((GALLERY / "mla.py").read_text())
    arguments = ["audit", "--submission", str(path), "--device", "cpu"]
    assert harness.main(arguments) == 112
    assert harness.main([*arguments, "--tolerance", "0.2"]) == 0
    assert "<= 0.2 to the nearest honest truth" in capsys.readouterr().out


def test_a_file_that_changes_while_it_is_evaluated_is_refused(tmp_path, capsys):
    path, cases = tmp_path / "submission.py", tmp_path / "cases.txt"
    text = "from mla import honest\n\n\ndef custom_kernel(data):\n    open(__file__, 'a').close()\n"
    text += "    return honest(data)\n"
    path.write_text(text)
    (tmp_path / "mla.py").write_text((GALLERY / "mla.py").read_text())
    cases.write_text("batchsize: 2; qseqlen: 1; kvseqlen: 33; seed: 1\n")
    arguments = ["test", str(cases), "--submission", str(path), "--device", "cpu"]
    assert harness.main(arguments) == 0
    path.write_text(text.replace(".close()", ".write('# harmless')"))
    assert harness.main(arguments) == 112
    assert "files were changed meanwhile: submission.py" in capsys.readouterr().out


# -- lint


def rules(text) -> set[tuple[str, str, int]]:
    content = text if isinstance(text, bytes) else text.encode()
    return {(f.severity, f.rule, f.line) for f in lint.lint_bytes(content)}


def test_a_clean_file_has_no_findings():
    assert rules(GOOD) == set()


@pytest.mark.parametrize(
    ("content", "finding"),
    [
        (b"", ("refused", "empty", 0)),
        (b" \n\n", ("refused", "empty", 0)),
        (GOOD.encode() + b"# \xff", ("refused", "encoding", 5)),
        (GOOD + "#" * 1_000_000, ("refused", "size", 0)),
        (GOOD + "# cuda " + lint.BANNED_WORD.title() + "s\n", ("refused", "banned word", 5)),
        ("\n" + GOOD, ("refused", "directive", 1)),
        (GOOD.replace("MI355X", "MI300X"), ("refused", "directive", 2)),
        (GOOD + "def broken(:\n", ("refused", "syntax", 5)),
        (GOOD + "x = " + "-" * 100_000 + "1\n", ("refused", "syntax", 0)),
        (GOOD.replace("custom_kernel", "kernel"), ("refused", "entry point", 0)),
        (GOOD + "import reference\n", ("look", "harness import", 5)),
        (GOOD + "from utils import set_seed\n", ("look", "harness import", 5)),
        (GOOD + "import sys\nprint(sys.argv)\n", ("look", "sniffing", 6)),
        (GOOD + "open('/proc/self/cmdline')\n", ("look", "mode sniffing", 5)),
        (GOOD + "name = 'POPCORN_SEED'\n", ("look", "mode sniffing", 5)),
        (GOOD + "import torch\ntorch.allclose = None\n", ("look", "patching", 6)),
        (GOOD + "import torch\nsetattr(torch.cuda, 'Event', None)\n", ("look", "patching", 6)),
        (GOOD + "key = id(GOOD)\n", ("look", "replay", 5)),
        (GOOD + "key = x.data_ptr()\n", ("look", "replay", 5)),
        (GOOD + "key = x._version\n", ("look", "replay", 5)),
        (GOOD + "import torch\ng = torch.cuda.CUDAGraph()\n", ("look", "replay", 6)),
        (GOOD + "exec('1')\n", ("look", "dynamic code", 5)),
        (GOOD + "import threading\n", ("look", "side work", 5)),
    ],
)
def test_lint_finds_it_with_its_line(content, finding):
    assert finding in rules(content)


def test_lint_survives_a_sum_that_some_pythons_cannot_parse():
    found = rules(GOOD + "x = 1" + " + 1" * 100_000 + "\n")
    assert found in (set(), {("refused", "syntax", 0)})  # Python 3.10 can


def test_lint_command_prints_file_and_line(tmp_path, capsys):
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    good.write_text(GOOD)
    bad.write_text(GOOD + f"# {lint.BANNED_WORD}\n")
    assert lint.main([str(good)]) == 0
    assert lint.main([str(bad)]) == 1
    assert f"{bad}:5: refused: banned word" in capsys.readouterr().out
    assert lint.main([]) == 2
    assert lint.main([str(tmp_path / "missing.py")]) == 2


def test_kernelguard_is_asked_where_it_is_installed():
    found, remark = lint.kernelguard_findings(GOOD.encode())
    if "not installed" in remark:
        pytest.skip(f"reason: {remark}")
    assert remark == "kernelguard: valid"
    replay = "r = {}\n\n\ndef custom_kernel(data):\n    k = data[0].data_ptr()\n    if k in r:\n        return r[k]\n"
    found, remark = lint.kernelguard_findings((GOOD.replace("def custom_kernel", "def x") + replay).encode())
    assert found
    assert all(f.severity == "refused" for f in found)
