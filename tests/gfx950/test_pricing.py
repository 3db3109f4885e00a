"""Prices of machine code: units, loops and paths, resources, prediction."""

import json
import re

import numpy as np
import pytest
from assembly import assemble, build, execute
from test_kernels import CASES, compiled_case, run_case

from gfx950 import pricing
from gfx950.decoder import Instruction
from gfx950.pricing import (
    LoopPrice,
    WaveCost,
    Work,
    cost_of,
    decode_work,
    merge_work,
    plan_entry,
    predict_us,
    price_loop,
    price_outside,
    resources,
)
from gfx950.profile import Listing, Profile


def decoded(body: str) -> list[Instruction]:
    """The instructions of a body, without the final s_endpgm."""
    return list(Listing(assemble(body)).instructions.values())[:-1]


@pytest.mark.parametrize(
    ("body", "unit", "amount"),
    [
        ("v_add_u32 v0, v1, v2", "valu_cycles", 4),
        ("v_pk_mul_f32 v[0:1], v[2:3], v[4:5]", "valu_cycles", 4),
        ("v_cvt_scalef32_pk_bf16_fp4 v0, v1, v2", "valu_cycles", 4),
        ("v_cmp_lt_f32 vcc, v0, v1", "valu_cycles", 4),
        ("v_mov_b32_dpp v0, v1 row_mirror row_mask:0xf bank_mask:0xf", "valu_cycles", 4),
        ("v_accvgpr_read_b32 v0, a0", "valu_cycles", 4),
        ("v_exp_f32 v0, v1", "valu_cycles", 16),
        ("v_rcp_f32 v0, v1", "valu_cycles", 16),
        ("v_mul_lo_u32 v0, v1, v2", "valu_cycles", 16),
        ("v_mfma_f32_16x16x32_bf16 v[0:3], v[4:7], v[8:11], v[0:3]", "mfma_cycles", 16),
        ("v_mfma_f32_32x32x16_bf16 v[0:15], v[16:19], v[20:23], v[0:15]", "mfma_cycles", 32),
        ("v_mfma_f32_16x16x32_fp8_bf8 v[0:3], v[4:5], v[6:7], v[0:3]", "mfma_cycles", 16),
        ("v_mfma_f32_16x16x128_f8f6f4 v[0:3], v[4:11], v[12:19], v[0:3]", "mfma_cycles", 32),
        ("v_mfma_f32_16x16x128_f8f6f4 v[0:3], v[4:7], v[12:19], v[0:3] cbsz:4", "mfma_cycles", 32),
        ("v_mfma_f32_16x16x128_f8f6f4 v[0:3], v[4:7], v[12:17], v[0:3] cbsz:4 blgp:2", "mfma_cycles", 16),
        (
            "v_mfma_scale_f32_32x32x64_f8f6f4 v[0:15], v[16:19], v[20:23], v[0:15], v24, v25 cbsz:4 blgp:4",
            "mfma_cycles",
            32,
        ),
        ("v_mfma_scale_f32_32x32x64_f8f6f4 v[0:15], v[16:23], v[24:31], v[0:15], v32, v33", "mfma_cycles", 64),
        ("ds_read_b128 v[0:3], v4", "lds_bytes", 16 * 64),
        ("ds_write_b8 v0, v1", "lds_bytes", 64),
        ("ds_read_u16_d16 v0, v1", "lds_bytes", 2 * 64),
        ("ds_read2_b32 v[0:1], v4 offset1:1", "lds_bytes", 8 * 64),
        ("ds_write2st64_b64 v0, v[2:3], v[4:5] offset1:1", "lds_bytes", 16 * 64),
        ("ds_read_b64_tr_b4 v[0:1], v4", "lds_bytes", 8 * 64),
        ("ds_bpermute_b32 v0, v1, v2", "lds_bytes", 4 * 64),
        ("buffer_load_dwordx4 v4, s[4:7], 0 offen lds", "lds_copy_bytes", 16 * 64),
        ("global_load_lds_dwordx4 v4, s[4:5]", "lds_copy_bytes", 16 * 64),
        ("global_load_dwordx4 v[0:3], v4, s[4:5]", "vmem_cycles", 16),
        ("global_load_ubyte v0, v4, s[4:5]", "vmem_cycles", 4),
        ("scratch_store_dword off, v0, off", "scratch_instructions", 1),
        ("s_add_u32 s0, s1, s2", "scalar_instructions", 1),
    ],
)
def test_each_instruction_is_charged_to_its_unit(body: str, unit: str, amount: int) -> None:
    cost = cost_of(decoded(body))
    assert getattr(cost, unit) == amount
    assert cost.instructions == 1
    charged = {"valu_cycles", "mfma_cycles", "lds_bytes", "lds_copy_bytes", "scalar_instructions"} - {unit}
    assert all(getattr(cost, other) == 0 for other in charged)


def test_a_matrix_instruction_without_a_known_rate_is_refused() -> None:
    with pytest.raises(ValueError, match="no rate known for V_MFMA_F32_4X4X4"):
        cost_of(decoded("v_mfma_f32_4x4x4_16b_f16 v[0:3], v[4:5], v[6:7], v[0:3]"))


# Four trips: a block of two instructions in the middle is skipped in all but the last.
LOOP = """
    s_mov_b32 s20, 4
    v_mov_b32 v4, 0
1:
    v_mfma_f32_16x16x32_bf16 v[16:19], v[8:11], v[12:15], 0
    ds_write_b32 v1, v4
    s_cmp_lg_u32 s20, 1
    s_cbranch_scc1 2f
    v_exp_f32 v5, v4
    v_add_u32 v4, 1, v4
2:
    v_add_u32 v4, 1, v4
    global_load_dwordx4 v[24:27], v1, s[10:11]
    global_load_ubyte v28, v1, s[10:11]
    s_sub_u32 s20, s20, 1
    s_cmp_lg_u32 s20, 0
    s_cbranch_scc1 1b
    v_mov_b32 v6, v4
"""


def profiled_loop() -> Profile:
    profile = Profile(build(LOOP))
    _, stats = execute(LOOP, memory=np.zeros(1024, np.uint32), lds=256, trace=profile)
    in_trips = sum(len(path) * count for path, count in profile.trips.items())
    assert stats["instructions"] == in_trips + sum(profile.outside.values())
    return profile


def test_loop_is_found_and_the_skipped_block_is_not_priced() -> None:
    listing = Listing(build(LOOP))
    (loop,) = listing.loops
    assert listing.hot_loop == loop
    names = [listing.instructions[site].name for site in listing.typical_path(loop)]
    assert names[0] == "V_MFMA_F32_16X16X32_BF16" and names[-1] == "S_CBRANCH_SCC1"
    assert "V_EXP_F32" not in names and len(names) == 10


def test_skipped_block_with_memory_instructions_is_priced() -> None:
    """As a kernel that copies the next tile only if there is one."""
    body = LOOP.replace("v_exp_f32 v5, v4", "global_load_dwordx2 v[30:31], v1, s[10:11]")
    assert price_loop(build(body), num_warps=1, tokens_per_tile=1).loads_by_width == {16: 1, 8: 1, 1: 1}


def test_a_loop_may_go_back_from_two_places() -> None:
    """The first branch back is for the last tile but one, say; the typical trip passes it and loads the next tile."""
    body = """
        s_mov_b32 s20, 5
    1:
        v_mfma_f32_16x16x32_bf16 v[16:19], v[8:11], v[12:15], 0
        s_sub_u32 s20, s20, 1
        s_cmp_eq_u32 s20, 1
        s_cbranch_scc1 1b
        s_cmp_eq_u32 s20, 0
        s_cbranch_scc1 2f
        global_load_dwordx4 v[24:27], v1, s[10:11]
        s_branch 1b
    2:
    """
    profile = Profile(build(body))
    execute(body, memory=np.zeros(1024, np.uint32), trace=profile)
    assert len(profile.listing.loops) == 1
    assert sorted((len(path), count) for path, count in profile.trips.items()) == [(4, 1), (6, 1), (8, 3)]
    assert price_loop(None, num_warps=1, tokens_per_tile=1, profile=profile).loads_by_width == {16: 1}


def test_executed_trips_are_told_apart() -> None:
    profile = profiled_loop()
    assert sorted(profile.trips.values()) == [1, 3]
    assert profile.waves == 1
    typical = profile.typical_trip
    assert typical is not None and profile.trips[typical] == 3
    assert typical == profile.listing.typical_path(profile.listing.loops[0])


@pytest.mark.parametrize("executed", [False, True])
def test_loop_price_is_per_token_and_compute_unit(executed: bool) -> None:
    price = price_loop(build(LOOP), num_warps=2, tokens_per_tile=32, profile=profiled_loop() if executed else None)
    assert price.valu_cycles_per_token == 4 * 2 / 4 / 32
    assert price.mfma_cycles_per_token == 16 * 2 / 4 / 32
    assert price.lds_cycles_per_token == 256 / 128 * 2 / 32
    assert price.vmem_cycles_per_token == (16 + 4) * 2 / 32
    assert price.issue_cycles_per_token == 20 * 2 / 4 / 32
    assert price.loads_by_width == {16: 1, 1: 1}
    assert price.loop_scratch_ops == 0
    assert price.mfma == {"V_MFMA_F32_16X16X32_BF16": 1}
    assert price.counted_from == ("executed" if executed else "code")
    assert json.loads(json.dumps(price.as_dict()))["loads_by_width"] == {"1": 1, "16": 1}


def test_scratch_in_the_loop_is_counted() -> None:
    code = assemble(LOOP.replace("ds_write_b32 v1, v4", "scratch_store_dword off, v4, off"), 16)
    assert price_loop(code, num_warps=1, tokens_per_tile=1).loop_scratch_ops == 1


def test_code_without_a_matrix_loop_has_no_loop_price() -> None:
    with pytest.raises(ValueError, match="no loop with matrix instructions"):
        price_loop(compiled_case("softmax"), num_warps=4, tokens_per_tile=1)


def test_all_is_outside_where_there_is_no_loop() -> None:
    profile = Profile(compiled_case("softmax"))
    _, stats = run_case("softmax", trace=profile)
    assert profile.waves == 3 * 4 and profile.typical_trip is None
    assert sum(profile.outside.values()) == stats["instructions"]
    with pytest.raises(ValueError, match="no loop with matrix instructions"):
        price_loop(compiled_case("softmax"), num_warps=4, tokens_per_tile=1, profile=profile)


def test_outside_is_what_the_loop_leaves_over() -> None:
    profile = profiled_loop()
    outside = price_outside(profile)
    assert outside.mfma_cycles == 0
    # v_lshlrev in the prologue, two moves around the loop, one move in the epilogue.
    assert outside.valu_cycles == 4 * 4


@pytest.mark.parametrize("name", ["matmul", "matmul-pipelined"])
def test_executed_counts_of_a_compiled_kernel_add_up(name: str) -> None:
    profile = Profile(compiled_case(name))
    problems, stats = run_case(name, trace=profile)
    assert problems == []
    assert profile.waves == 4
    trips = sum(profile.trips.values())
    matrix = sum(
        count * sum("MFMA" in profile.listing.instructions[site].name for site in path)
        for path, count in profile.trips.items()
    )
    executed = sum(count for opcode, count in stats["executed"].values() if "MFMA" in opcode)
    outside = sum(n for site, n in profile.outside.items() if "MFMA" in profile.listing.instructions[site].name)
    assert matrix + outside == executed
    assert trips >= 4
    price = price_loop(compiled_case(name), num_warps=4, tokens_per_tile=1, profile=profile)
    assert price.mfma_cycles_per_token > 0


@pytest.mark.parametrize("name", CASES)
def test_resources_agree_with_the_assembly_text(name: str) -> None:
    compiled = compiled_case(name)
    found = resources(compiled)

    def directive(key: str) -> int:
        match = re.search(rf"\.{key}:?\s+(\d+)", compiled.asm["amdgcn"])
        assert match is not None
        return int(match.group(1))

    assert found.vgprs + found.agprs == directive("vgpr_count")
    assert found.agprs == directive("agpr_count")
    assert found.sgprs == directive("sgpr_count")
    assert (found.vgpr_spills, found.sgpr_spills) == (directive("vgpr_spill_count"), directive("sgpr_spill_count"))
    assert found.scratch_bytes == directive("private_segment_fixed_size")
    assert found.lds_bytes == compiled.metadata.shared
    match = re.search(r"; Occupancy: (\d+)", compiled.asm["amdgcn"])
    assert match is not None
    assert found.waves_per_simd == int(match.group(1))
    assert json.loads(json.dumps(found.as_dict()))["vgprs"] == found.vgprs


@pytest.mark.parametrize(
    ("shared", "num_warps", "waves"),
    [(0, 4, 4), (52416, 2, 4), (80 * 1024, 2, 4), (80 * 1024 + 1, 2, 2), (160 * 1024, 4, 4), (20 * 1024, 1, 4)],
)
def test_occupancy_follows_registers_and_lds(shared: int, num_warps: int, waves: int) -> None:
    """The test kernels ask for 512 registers: one wave per SIMD."""
    found = resources(assemble("s_nop 0"), num_warps=num_warps, shared=shared)
    assert found.waves_per_simd == 1
    assert found.waves_per_cu == waves


def wave(**units: int) -> WaveCost:
    return WaveCost(**{name: units.get(name, 0) for name in WaveCost.__slots__})


def loop_price(cost: WaveCost) -> LoopPrice:
    return LoopPrice(
        num_warps=2,
        tokens_per_tile=64,
        valu_cycles_per_token=0,
        mfma_cycles_per_token=0,
        lds_cycles_per_token=0,
        lds_copy_cycles_per_token=0,
        vmem_cycles_per_token=0,
        loop_scratch_ops=0,
        loads_by_width={},
        mfma={},
        barriers=0,
        wave=cost,
        counted_from="code",
    )


@pytest.mark.parametrize(
    ("groups", "num_warps", "per_cu", "per_simd"),
    [(1, 1, 1, 1), (256, 4, 1, 1), (257, 4, 2, 2), (512, 2, 2, 1), (513, 2, 3, 2), (1024, 8, 4, 8)],
)
def test_the_busiest_simd_sets_the_issue_time(groups: int, num_warps: int, per_cu: int, per_simd: int) -> None:
    work = Work(groups, num_warps, wave(valu_cycles=2400), hbm_bytes=0)
    prediction = predict_us(work)
    assert (prediction.groups_per_cu, prediction.waves_per_simd) == (per_cu, per_simd)
    assert prediction.issue_us == pytest.approx(per_simd * 1.0)
    assert prediction.predicted_us == pytest.approx(per_simd * 1.0 + pricing.LAUNCH_US)
    assert prediction.bound == "issue"


def test_prediction_takes_the_larger_of_the_times() -> None:
    loop = loop_price(wave(valu_cycles=1000, mfma_cycles=1400, lds_bytes=128 * 600, lds_copy_bytes=128 * 600))
    memory = 8.0e12 * 50e-6
    work = Work(256, 2, wave(valu_cycles=2400), memory, loop, tiles_per_group=10)
    prediction = predict_us(work)
    assert prediction.issue_us == pytest.approx(11.0)
    assert prediction.lds_us == pytest.approx(10 * 2 * 1200 / 2400)
    assert prediction.hbm_us_at_peak == pytest.approx(50.0)
    assert prediction.hbm_us == pytest.approx(50.0 * 8.0 / 5.65)
    assert prediction.predicted_us == pytest.approx(prediction.hbm_us + pricing.LAUNCH_US)
    assert prediction.predicted_us_at_peak == pytest.approx(50.0 + pricing.LAUNCH_US)
    assert prediction.bound == "hbm"
    few_bytes = predict_us(Work(256, 2, wave(), 1.0, loop, tiles_per_group=20))
    assert few_bytes.bound == "issue" and few_bytes.issue_us == pytest.approx(20.0)


def test_a_merge_kernel_adds_its_time_and_its_launch() -> None:
    work = Work(256, 4, wave(valu_cycles=2400), hbm_bytes=0)
    merge = Work(512, 4, wave(valu_cycles=2400), hbm_bytes=5.65e12 * 1e-6)
    prediction = predict_us(work, merge=merge, further_launches=1)
    assert prediction.merge_us == pytest.approx(2.0)
    assert prediction.launch_us == pricing.LAUNCH_US + pricing.FURTHER_LAUNCH_US
    assert prediction.predicted_us == pytest.approx(1.0 + 2.0 + prediction.launch_us)
    assert json.loads(json.dumps(prediction.as_dict()))["merge_us"] == pytest.approx(2.0)


def test_work_of_a_decode_call() -> None:
    loop = loop_price(wave(valu_cycles=100))
    whole = decode_work(batch=256, kv_len=8192, num_splits=1, loop=loop, outside=wave())
    assert (whole.groups, whole.tiles_per_group) == (256, 128)
    assert whole.hbm_bytes == 256 * (8192 * 306 + 16 * 576 * 2 + 16 * 512 * 2)
    split = decode_work(batch=4, kv_len=1000, num_splits=8, loop=loop, outside=wave(), partials_per_split=2)
    assert (split.groups, split.tiles_per_group) == (32, 2)
    assert split.hbm_bytes == 4 * (1000 * 306 + 16 * 576 * 2 + 8 * 2 * 16 * 513 * 4)
    merge = merge_work(batch=4, num_splits=8, groups=64, num_warps=1, outside=wave(valu_cycles=240))
    assert merge.hbm_bytes == 4 * (8 * 16 * 513 * 4 + 16 * 512 * 2)
    assert predict_us(merge).issue_us == pytest.approx(0.1)


def test_plan_entry_holds_what_the_report_lists() -> None:
    loop = loop_price(wave(valu_cycles=100))
    prediction = predict_us(decode_work(batch=64, kv_len=1024, num_splits=4, loop=loop, outside=wave()))
    kernel = resources(compiled_case("matmul"))
    entry = json.loads(json.dumps(plan_entry(batch=64, kv_len=1024, loop=loop, kernel=kernel, prediction=prediction)))
    listed = {
        "batch", "kv", "valu_cycles_per_token", "mfma_cycles_per_token", "lds_cycles_per_token", "loop_scratch_ops",
        "vgpr_spills", "sgpr_spills", "scratch_bytes", "waves_per_cu", "lds_bytes", "hbm_bytes_per_token",
        "predicted_us",
    }  # fmt: skip
    assert listed <= set(entry)
    assert (entry["batch"], entry["kv"], entry["hbm_bytes_per_token"]) == (64, 1024, 306)


def test_geometric_mean() -> None:
    assert pricing.geometric_mean([2, 8]) == pytest.approx(4)


def test_every_rate_has_a_source() -> None:
    rates = {n for n, v in vars(pricing).items() if re.fullmatch(r"[A-Z][A-Z0-9_]+", n) and isinstance(v, int | float)}
    assert rates | {"MFMA_CYCLES"} == set(pricing.SOURCES)
    json.dumps(pricing.assumptions())
