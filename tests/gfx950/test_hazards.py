"""Pairs of instructions that are too close for the hardware, in hand-written code and in what LLVM makes."""

import pytest
from assembly import assemble
from test_kernels import CASES, compiled_case

from gfx950.hazards import Hazard, find_hazards

MFMA = "v_mfma_f32_16x16x32_bf16 v[16:19], v[8:11], v[12:15], v[16:19]"
SCALED = "v_mfma_scale_f32_16x16x128_f8f6f4 v[16:19], v[8:11], v[12:15], v[16:19], v20, v21 cbsz:4 blgp:4"
CONVERT = "v_cvt_scalef32_pk_bf16_fp4 {}, v30, v31"


def hazards(body: str) -> list[Hazard]:
    return find_hazards(assemble(body))


@pytest.mark.parametrize("register", ["v8", "v11", "v12", "v15", "v16", "v19"])
@pytest.mark.parametrize(
    ("between", "clean"), [("", False), ("s_nop 0", False), ("s_nop 1", True), ("s_nop 0\ns_nop 0", True)]
)
def test_vector_result_needs_two_wait_states_to_the_matrix_core(register: str, between: str, clean: bool) -> None:
    found = hazards("\n".join([CONVERT.format(register), between, MFMA]))
    assert (found == []) == clean
    if not clean:
        (hazard,) = found
        assert hazard.needed == 2 and hazard.wait_states == (1 if between else 0)
        assert "vector result read by the matrix core" in str(hazard)


def test_registers_that_the_matrix_instruction_does_not_read_are_free() -> None:
    for register in ("v7", "v20", "v30"):
        assert hazards("\n".join([CONVERT.format(register), MFMA])) == []
    # fp4 operands take four registers, not eight; scales are read too.
    assert hazards("\n".join([CONVERT.format("v22"), SCALED])) == []
    assert len(hazards("\n".join([CONVERT.format("v21"), SCALED]))) == 1


def test_other_instructions_count_as_wait_states() -> None:
    assert hazards("\n".join([CONVERT.format("v8"), "v_add_u32 v0, v1, v2", "s_add_u32 s0, s0, s1", MFMA])) == []


@pytest.mark.parametrize(
    ("between", "needed", "mfma"),
    [
        (8, 8, MFMA),
        (12, 12, "v_mfma_f32_32x32x16_bf16 v[16:31], v[8:11], v[12:15], v[16:31]"),
        (12, 12, SCALED.replace("cbsz:4 blgp:4", "").replace("v[8:11], v[12:15]", "v[0:7], v[8:15]")),
        (10, 10, "v_mfma_f32_16x16x4_f32 v[16:19], v8, v9, v[16:19]"),
    ],
    ids=["4-passes", "8-passes", "scaled-fp8", "float32"],
)
@pytest.mark.parametrize("use", ["v_add_u32 v0, v1, v16", "v_mov_b32 v17, v1"], ids=["read", "overwrite"])
def test_matrix_result_needs_its_passes(between: int, needed: int, mfma: str, use: str) -> None:
    # Wait states that LLVM puts between such a pair, read off its output for the intrinsics.
    padding = ["s_nop 0"] * between
    assert hazards("\n".join([mfma, *padding, use])) == []
    (hazard,) = hazards("\n".join([mfma, *padding[1:], use]))
    assert (hazard.needed, hazard.wait_states) == (needed, needed - 1)


def test_matrix_addend_must_not_be_overwritten_at_once() -> None:
    mfma = "v_mfma_f32_16x16x32_bf16 v[16:19], v[8:11], v[12:15], v[20:23]"
    assert len(hazards(f"{mfma}\ns_nop 1\nv_mov_b32 v21, v0")) == 1
    assert hazards(f"{mfma}\ns_nop 2\nv_mov_b32 v21, v0") == []
    assert hazards(f"{mfma}\nv_mov_b32 v8, v0") == []


def test_transcendental_result_needs_one_wait_state() -> None:
    assert len(hazards("v_exp_f32 v0, v1\nv_mul_f32 v2, v0, v3")) == 1
    assert hazards("v_exp_f32 v0, v1\ns_nop 0\nv_mul_f32 v2, v0, v3") == []
    assert hazards("v_exp_f32 v0, v1\nv_log_f32 v2, v0") == []


def test_accumulation_registers_are_not_vector_registers() -> None:
    mfma = "v_mfma_f32_16x16x32_bf16 a[16:19], v[8:11], v[12:15], a[16:19]"
    assert hazards(f"{mfma}\nv_mov_b32 v16, v0") == []
    assert len(hazards(f"{mfma}\nv_accvgpr_read_b32 v0, a16")) == 1
    assert len(hazards(f"v_accvgpr_write_b32 a16, v0\n{mfma}")) == 1


def test_pairs_are_followed_across_branches_and_round_loops() -> None:
    body = f"""
        s_mov_b32 s20, 4
    1:
        {MFMA}
        s_nop 7
        s_nop 7
        s_sub_u32 s20, s20, 1
        {CONVERT.format("v8")}
        s_cbranch_scc1 1b
    """
    (hazard,) = hazards(body)
    assert hazard.first > hazard.second and hazard.wait_states == 1
    skipped = f"{CONVERT.format('v8')}\ns_cbranch_scc1 1f\ns_nop 7\n1:\n{MFMA}"
    assert [h.wait_states for h in hazards(skipped)] == [1]
    unreachable = f"{CONVERT.format('v8')}\ns_branch 1f\n{MFMA}\n1:\ns_nop 0"
    assert hazards(unreachable) == []


@pytest.mark.parametrize("name", CASES)
def test_what_llvm_makes_has_no_hazard(name: str) -> None:
    assert find_hazards(compiled_case(name)) == []
