"""Quantisers to the bit, ground truths against a naive loop, and the contest's check as it is."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import reference  # noqa: E402
import utils  # noqa: E402

VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def small_input(lengths, seed=0, q_len=1):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(len(lengths) * q_len, 16, 576, generator=generator).bfloat16()
    kv = torch.randn(sum(lengths), 1, 576, generator=generator).bfloat16()
    return reference.assemble_input(q, kv, lengths)


# -- MXFP4


@pytest.mark.parametrize(
    ("amax", "byte", "code", "value"),
    [(0.5, 124, 6, 0.5), (1.74, 125, 7, 1.5), (1.75, 126, 6, 2.0), (3.5, 127, 6, 4.0), (7.0, 128, 6, 8.0)],
)
def test_scale_byte_rounds_the_mantissa_at_1_75(amax, byte, code, value):
    x = torch.zeros(1, 32)
    x[0, 5] = -amax
    codes, scales = reference.quantize_mxfp4(x, padded=False, native_types=False)
    assert int(scales[0, 0]) == byte
    assert int(codes[0, 2]) == (code | 8) << 4
    assert float(reference.dequantize_mxfp4(codes, scales)[0, 5]) == -value


@pytest.mark.parametrize(("ties", "expected"), [("away", "1632547609"), ("even", "0622446608")])
def test_ties(ties, expected):
    x = torch.tensor([[4, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25] + [0.0] * 23])
    codes, scales = reference.quantize_mxfp4(x, ties=ties, padded=False, native_types=False)
    assert int(scales[0, 0]) == 127
    assert bytes(codes[0, :5].tolist()).hex() == expected


def test_scale_bytes_of_extreme_blocks():
    amax = torch.tensor([0.0, 1e-45, 2.0**-126, 2.0**-125, 1.0, 3.4e38, math.inf])
    # Field 0 is clamped to exponent -127, infinity to 127.
    assert reference.mxfp4_scale_bytes(amax).tolist() == [0, 0, 0, 0, 125, 254, 254]


@pytest.mark.parametrize("native", [False, True])
def test_dequantisation_of_every_code_with_every_scale_byte(native):
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1).view(256, 256)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 17)[:, :16]
    assert not scales.is_contiguous()
    if native:
        codes = codes.view(torch.float4_e2m1fn_x2)
        scales = scales.view(torch.float8_e8m0fnu)
    got = reference.dequantize_mxfp4(codes, scales, torch.float64)
    assert got.shape == (256, 512)
    signed = VALUES + [-v for v in VALUES]
    for byte in (0, 1, 102, 127, 141, 254):
        expected = [signed[n] * math.ldexp(1.0, byte - 127) for c in range(256) for n in (c & 15, c >> 4)]
        assert got[byte].tolist() == expected
    assert got[255].isnan().all()
    assert got[:255].isfinite().all()
    single = reference.dequantize_mxfp4(codes, scales, torch.float32)
    assert torch.equal(single[:253].double(), got[:253])


def test_quantiser_matches_a_scalar_model(monkeypatch):
    # Small chunks, so that several are joined.
    monkeypatch.setattr(reference, "_CHUNK_ROWS", 5)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(33, 64, generator=generator) * torch.exp2(torch.randint(-130, 120, (33, 1), generator=generator))
    x[:, :7] = (x[:, :7] * 4).round() / 4
    for ties in ("away", "even"):
        codes, scales = reference.quantize_mxfp4(x, ties, padded=True, native_types=False)
        assert scales.shape == (256, 8)
        assert (scales[33:] == 255).all()
        got = torch.stack((codes & 15, codes >> 4), -1).flatten(1).tolist()
        for i, row in enumerate(x.tolist()):
            for block in range(2):
                values = row[32 * block : 32 * block + 32]
                byte = scalar_scale_byte(max(map(abs, values)))
                assert int(scales[i, block]) == byte
                expected = [scalar_code(v / math.ldexp(1.0, byte - 127), ties) for v in values]
                assert got[i][32 * block : 32 * block + 32] == expected


def scalar_scale_byte(amax: float) -> int:
    mantissa, exponent = math.frexp(amax)
    if amax < 2.0**-126:
        return 0
    return max(0, min(254, exponent - 1 + (mantissa * 2 >= 1.75) - 2 + 127))


def scalar_code(value: float, ties: str) -> int:
    size, best = min(abs(value), 6.0), 0
    for code in range(1, 8):
        gap, kept = abs(VALUES[code] - size), abs(VALUES[best] - size)
        if gap < kept or (gap == kept and (ties == "away" or code % 2 == 0)):
            best = code
    return best | (8 if math.copysign(1.0, value) < 0 else 0)


def test_quantiser_refuses_what_it_cannot_do():
    with pytest.raises(ValueError, match="multiple of 32"):
        reference.quantize_mxfp4(torch.zeros(4, 33))
    with pytest.raises(ValueError, match="'away' or 'even'"):
        reference.quantize_mxfp4(torch.zeros(4, 32), ties="up")


# -- fp8


def test_fp8_example():
    codes, scale = reference.quantize_fp8(torch.tensor([1.0, -3.0, 0.1, 2.9]).bfloat16())
    assert codes.float().tolist() == [144.0, -448.0, 15.0, 448.0]
    assert scale.dtype == torch.float32
    assert scale.shape == (1,)
    assert f"{float(scale):.10f}" == "0.0066833496"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz])
def test_fp8_stays_in_range_for_both_types(dtype):
    x = (torch.randn(64, 1, 576, generator=torch.Generator().manual_seed(1)) * 100).bfloat16()
    codes, scale = reference.quantize_fp8(x, dtype)
    assert codes.dtype == dtype
    assert codes.float().isfinite().all()
    error = (reference.dequantize_fp8(codes, scale) - x.float()).norm() / x.float().norm()
    assert error < 0.035


def test_fp8_of_zeros_and_of_nothing():
    codes, scale = reference.quantize_fp8(torch.zeros(3, 1, 576, dtype=torch.bfloat16))
    assert float(scale) > 0
    assert (codes.float() == 0).all()
    assert reference.quantize_fp8(torch.zeros(0, 1, 576, dtype=torch.bfloat16))[0].shape == (0, 1, 576)


# -- inputs


def test_generate_input_follows_the_recipe():
    q, kv, qo_indptr, kv_indptr, config = reference.generate_input(3, 1, 40, 11, device="cpu")
    generator = torch.Generator().manual_seed(11)
    assert torch.equal(q, torch.randn((3, 16, 576), dtype=torch.bfloat16, generator=generator))
    assert torch.equal(kv["bf16"], torch.randn((120, 1, 576), dtype=torch.bfloat16, generator=generator))
    assert qo_indptr.tolist() == [0, 1, 2, 3]
    assert kv_indptr.tolist() == [0, 40, 80, 120]
    assert qo_indptr.dtype == kv_indptr.dtype == torch.int32
    assert config == {
        "batch_size": 3,
        "num_heads": 16,
        "num_kv_heads": 1,
        "qk_head_dim": 576,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "v_head_dim": 512,
        "q_seq_len": 1,
        "kv_seq_len": 40,
        "sm_scale": 1 / math.sqrt(576),
    }
    codes, scales = kv["mxfp4"]
    assert (codes.shape, scales.shape) == ((120, 1, 288), (256, 24))
    assert (codes.dtype, scales.dtype) == (torch.float4_e2m1fn_x2, torch.float8_e8m0fnu)
    assert kv["fp8"][0].dtype == torch.float8_e4m3fn


@pytest.mark.parametrize("field", ["batchsize", "qseqlen", "kvseqlen"])
def test_generate_input_refuses_empty_sizes(field):
    with pytest.raises(ValueError, match=f"{field}: expected an integer of 1 or more, got 0"):
        reference.generate_input(**{"batchsize": 1, "qseqlen": 1, "kvseqlen": 1, "seed": 0, field: 0})


def test_format_errors_are_the_known_ones():
    data = reference.generate_input(4, 1, 1024, 4217, device="cpu")
    truth = reference.attention_truth(data, "bf16")[0]
    errors = {
        c: float(reference.relative_l2(reference.attention_truth(data, c)[0], truth).mean()) for c in ("fp8", "mxfp4")
    }
    fp8 = reference.attention_truth(data, "fp8", q="fp8")[0]
    assert abs(errors["mxfp4"] - 0.129) < 0.015
    assert abs(float(reference.relative_l2(fp8, truth).mean()) - 0.040) < 0.005
    assert errors["fp8"] < 0.035


# -- ground truth


@pytest.mark.parametrize("cache", reference.CACHES)
@pytest.mark.parametrize("chunk", [7, 1 << 16])
def test_attention_truth_matches_a_naive_loop(cache, chunk, monkeypatch):
    monkeypatch.setattr(reference, "_CHUNK_TOKENS", chunk)
    lengths = [33, 0, 1, 7, 14]
    data = small_input(lengths)
    out, lse = reference.attention_truth(data, cache)
    values = {
        "bf16": data[1]["bf16"][:, 0].double(),
        "fp8": data[1]["fp8"][0][:, 0].double() * data[1]["fp8"][1].double(),
        "mxfp4": reference.dequantize_mxfp4(*data[1]["mxfp4"], torch.float64),
    }[cache]
    start = 0
    for i, length in enumerate(lengths):
        tokens = values[start : start + length]
        start += length
        if not length:
            assert (out[i] == 0).all()
            assert (lse[i] == -math.inf).all()
            continue
        scores = data[0][i].double() @ tokens.T / 24
        torch.testing.assert_close(lse[i], scores.logsumexp(-1))
        torch.testing.assert_close(out[i], scores.softmax(-1) @ tokens[:, :512])


def test_attention_truth_of_chosen_sequences():
    data = small_input([5, 0, 9, 4])
    whole, whole_lse = reference.attention_truth(data)
    part, part_lse = reference.attention_truth(data, rows=[3, 1, 0])
    assert torch.equal(part, whole[[3, 1, 0]])
    assert torch.equal(part_lse, whole_lse[[3, 1, 0]])


def test_attention_truth_with_large_scores_and_fp8_queries():
    data = small_input([20, 30])
    data = (data[0] * 1000, *data[1:])
    exact, _ = reference.attention_truth(data, "bf16")
    assert exact.isfinite().all()
    rounded, _ = reference.attention_truth(data, "bf16", q="fp8")
    assert float(reference.relative_l2(rounded, exact).max()) > 0


def test_attention_truth_refuses_unknown_names():
    data = small_input([3])
    with pytest.raises(ValueError, match="cache: expected one of"):
        reference.attention_truth(data, "int4")
    with pytest.raises(ValueError, match="q: expected 'bf16' or 'fp8'"):
        reference.attention_truth(data, q="int8")


def test_relative_l2_is_per_row_and_never_nan():
    truth = torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    out = torch.tensor([[3.0, 4.5], [0.0, 0.0], [1.0, 0.0], [math.nan, 0.0], [math.inf, 0.0]])
    assert reference.relative_l2(out, truth).tolist() == [0.1, 0.0, math.inf, math.inf, math.inf]


# -- the contest's check


def test_reference_kernel_is_fp8_attention():
    data = small_input([40, 40])
    out = reference.ref_kernel(data)
    assert out.dtype == torch.bfloat16
    truth = reference.attention_truth(data, "fp8", q="fp8")[0]
    assert float(reference.relative_l2(out, truth).max()) < 0.004
    assert reference.reference_backend(data).startswith("torch-fp8")


def test_contest_check_is_as_blind_as_it_is():
    data = reference.generate_input(2, 1, 2048, 5, device="cpu")
    out = reference.ref_kernel(data)
    assert reference.check_implementation(data, out)[0]
    assert reference.check_implementation(data, data[0][..., :512] / 24)[0]
    few = out.clone()
    few.view(-1)[: int(0.049 * few.numel())] = math.nan
    assert reference.check_implementation(data, few)[0]
    more = out.clone()
    more.view(-1)[: int(0.051 * more.numel())] = math.nan
    good, message = reference.check_implementation(data, more)
    assert not good
    assert "mismatched elements" in message
    assert not reference.check_implementation(data, out[:1])[0]
    assert not reference.check_implementation(data, None)[0]


# -- helpers for public submissions


def test_public_helper_names():
    names = ["set_seed", "get_device", "verbose_allclose", "verbose_allequal", "match_reference"]
    for name in [*names, "make_match_reference"]:
        assert callable(getattr(utils, name))
    utils.set_seed(0)
    first = torch.rand(1)
    utils.set_seed(0)
    assert torch.equal(first, torch.rand(1))
    utils.clear_l2_cache_large()


def test_verbose_allclose_reports_places_and_special_values():
    want = torch.tensor([1.0, math.inf, math.nan, 2.0])
    assert utils.verbose_allclose(want.clone(), want)[0]
    good, lines = utils.verbose_allclose(torch.tensor([1.0, 5.0, math.nan, 3.0]), want)
    assert not good
    assert lines[0] == "Number of mismatched elements: 2 of 4"
    assert "(1,)" in lines[1]
    assert utils.verbose_allclose(torch.tensor([1.0, 5.0, math.nan, 2.0]), want, max_error_ratio=0.25)[0]
    assert not utils.verbose_allclose(torch.zeros(3), want)[0]


def test_verbose_allequal():
    assert utils.verbose_allequal(torch.arange(3), torch.arange(3)) == (True, [])
    good, lines = utils.verbose_allequal(torch.tensor([0, 1, 9]), torch.arange(3))
    assert not good
    assert "(2,)" in lines[1]


def test_match_reference_adapter():
    check = utils.make_match_reference(lambda data: data * 2, rtol=0, atol=0)
    assert check(torch.ones(2), torch.full((2,), 2.0))[0]
    assert not check(torch.ones(2), torch.ones(2))[0]
