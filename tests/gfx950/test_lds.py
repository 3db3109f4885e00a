"""LDS instructions against numpy, and the checks: races, uninitialised reads, copies without a wait, bounds."""

from collections.abc import Callable

import numpy as np
import pytest
from assembly import execute, pattern

import gfx950

LANE = np.arange(64)
WAIT = "s_waitcnt lgkmcnt(0)\n"


@pytest.mark.parametrize("words", [1, 2, 3, 4])
def test_wide_stores_and_loads_keep_their_order(words: int) -> None:
    sources = pattern(words, words)
    span = f"v[8:{7 + words}]" if words > 1 else "v8"
    target = f"v[16:{15 + words}]" if words > 1 else "v16"
    body = f"""
        v_mul_u32_u24 v4, {4 * words}, v0
        ds_write_b{32 * words} v4, {span} offset:64
        {WAIT}
        v_sub_u32 v5, {63 * 4 * words}, v4
        ds_read_b{32 * words} {target}, v5 offset:64
        {WAIT}
    """
    result, stats = execute(body, sources, [f"v{16 + i}" for i in range(words)], lds=64 + 256 * words)
    np.testing.assert_array_equal(result, sources[:, ::-1])
    assert gfx950.findings(stats) == []


def test_narrow_stores_and_loads_extend_and_merge() -> None:
    sources = pattern(7, 2)
    body = f"""
        ds_write_b32 v1, v8
        {WAIT}
        ds_write_b8 v1, v9 offset:1
        ds_write_b16_d16_hi v1, v9 offset:2
        {WAIT}
        ds_read_u8 v16, v1 offset:1
        ds_read_i8 v17, v1 offset:3
        ds_read_u16 v18, v1 offset:2
        ds_read_i16 v19, v1
        v_mov_b32 v20, -1
        ds_read_u16_d16 v20, v1
        v_mov_b32 v21, -1
        ds_read_u16_d16_hi v21, v1
        ds_read_b32 v22, v1
        {WAIT}
    """
    result, _ = execute(body, sources, [f"v{i}" for i in range(16, 23)], lds=256)
    word = sources[0] & 0xFF | (sources[1] & 0xFF) << 8 | sources[1] & 0xFFFF0000
    expected = [
        word >> 8 & 0xFF,
        (word >> 24).astype(np.uint8).view(np.int8).astype(np.int32).view(np.uint32),
        word >> 16,
        (word & 0xFFFF).astype(np.uint16).view(np.int16).astype(np.int32).view(np.uint32),
        word & 0xFFFF | 0xFFFF0000,
        0xFFFF | word << 16,
        word,
    ]
    for row, values in zip(result, expected, strict=True):
        np.testing.assert_array_equal(row, values)


@pytest.mark.parametrize(("suffix", "unit"), [("", 1), ("st64", 64)])
@pytest.mark.parametrize("bits", [32, 64])
def test_paired_accesses_count_offsets_in_elements(suffix: str, unit: int, bits: int) -> None:
    words = bits // 32
    sources = pattern(bits, 2 * words)
    nbytes = 4 * words
    first, second = (f"v[{8 + i * words}:{7 + (i + 1) * words}]" if words > 1 else f"v{8 + i}" for i in range(2))
    body = f"""
        v_mul_u32_u24 v4, {nbytes}, v0
        ds_write2{suffix}_b{bits} v4, {first}, {second} offset0:{64 // unit} offset1:{192 // unit}
        {WAIT}
        ds_read2{suffix}_b{bits} v[16:{15 + 2 * words}], v4 offset0:{192 // unit} offset1:{64 // unit}
        {WAIT}
    """
    result, _ = execute(body, sources, [f"v{16 + i}" for i in range(2 * words)], lds=256 * nbytes)
    np.testing.assert_array_equal(result, np.concatenate([sources[words:], sources[:words]]))


def test_lanes_that_are_off_neither_store_nor_load() -> None:
    sources = pattern(9, 2)
    body = f"""
        ds_write_b32 v1, v8
        {WAIT}
        v_mov_b32 v4, 0
        s_mov_b32 exec_lo, 0x0000ffff
        ds_write_b32 v1, v9
        s_mov_b32 exec_hi, 0x0000ffff
        {WAIT}
        ds_read_b32 v4, v1
        {WAIT}
    """
    result, _ = execute(body, sources, lds=256)
    stored = np.where((LANE < 16) | (LANE >= 32), sources[1], sources[0])
    np.testing.assert_array_equal(result[0], np.where((LANE < 16) | ((LANE >= 32) & (LANE < 48)), stored, 0))


def test_permutes_and_swizzles_move_between_lanes() -> None:
    sources = pattern(11, 1)
    target = np.random.default_rng(1).permutation(64).astype(np.uint32)
    body = f"""
        ds_bpermute_b32 v4, v9, v8
        ds_permute_b32 v5, v9, v8
        ds_swizzle_b32 v6, v8 offset:swizzle(SWAP,16)
        ds_swizzle_b32 v7, v8 offset:swizzle(QUAD_PERM,3,2,0,1)
        ds_swizzle_b32 v10, v8 offset:swizzle(BROADCAST,8,3)
        {WAIT}
    """
    result, _ = execute(body, [sources[0], target * 4], ("v4", "v5", "v6", "v7", "v10"))
    pushed = np.zeros(64, np.uint32)
    pushed[target] = sources[0]
    quad = LANE // 4 * 4 + np.array([3, 2, 0, 1])[LANE % 4]
    for row, expected in zip(
        result,
        (sources[0][target], pushed, sources[0][LANE ^ 16], sources[0][quad], sources[0][LANE // 8 * 8 + 3]),
        strict=True,
    ):
        np.testing.assert_array_equal(row, expected)


@pytest.mark.parametrize(("name", "per_lane"), [("b16", 4), ("b8", 8), ("b4", 16)])
def test_transposed_read_gives_each_lane_a_column(name: str, per_lane: int) -> None:
    """16 lanes read per_lane rows of 16 elements; lane c of the 16 gets column c."""
    bits = 64 // per_lane
    sources = pattern(13, 2)
    body = f"""
        v_lshlrev_b32 v4, 3, v0
        ds_write_b64 v4, v[8:9]
        {WAIT}
        ds_read_b64_tr_{name} v[4:5], v4
        {WAIT}
    """
    result, _ = execute(body, sources, ("v4", "v5"), lds=512)
    pairs = [int(low) | int(high) << 32 for low, high in zip(*sources, strict=True)]
    for block in range(4):
        stream = [
            p >> (bits * e) & ((1 << bits) - 1) for p in pairs[16 * block : 16 * block + 16] for e in range(per_lane)
        ]
        for lane in range(16):
            column = stream[lane::16]
            expected = sum(value << (bits * row) for row, value in enumerate(column))
            got = int(result[0, 16 * block + lane]) | int(result[1, 16 * block + lane]) << 32
            assert got == expected


ATOMICS: dict[str, Callable[[np.ndarray], object]] = {
    "add_u32": lambda values: np.uint32(values.view(np.uint32).sum(dtype=np.uint32)),
    "max_i32": lambda values: values.view(np.int32).max(),
    "min_u32": lambda values: values.view(np.uint32).min(),
    "add_f32": lambda values: np.float32(sum(range(64))),
}


@pytest.mark.parametrize("name", ATOMICS)
def test_lds_atomics_combine_all_lanes(name: str) -> None:
    values = np.arange(64, dtype=np.float32).view(np.uint32) if name.endswith("f32") else pattern(15, 1)[0]
    start = {"min_u32": 0xFFFFFFFF, "max_i32": 0x80000000}.get(name, 0)
    body = f"""
        v_mov_b32 v4, 0
        v_mov_b32 v5, {start:#x}
        ds_write_b32 v4, v5
        {WAIT}
        ds_{name.replace("_", "_rtn_") if "f32" not in name else "add_rtn_f32"} v6, v4, v8
        {WAIT}
        ds_read_b32 v4, v4
        {WAIT}
    """
    result, _ = execute(body, values[None], ("v4", "v6"), lds=16)
    dtype = {"i32": np.int32, "u32": np.uint32, "f32": np.float32}[name[-3:]]
    assert result[0].view(dtype)[0] == ATOMICS[name](values)
    assert result[1, 0] == start


NEIGHBOUR = """
    ds_write_b32 v1, v8
    s_waitcnt lgkmcnt(0)
    {barrier}
    v_xor_b32 v5, 0x100, v1
    ds_read_b32 v4, v5
    s_waitcnt lgkmcnt(0)
    {second}
    ds_write_b32 v1, v9
"""


@pytest.mark.parametrize(
    ("barrier", "second", "kinds"),
    [
        ("s_barrier", "s_barrier", set()),
        ("s_nop 0", "s_barrier", {"RAW", "WAR"}),
        ("s_barrier", "s_nop 0", {"RAW", "WAR"}),
    ],
    ids=["both-barriers", "no-barrier-before-read", "no-barrier-after-read"],
)
def test_races_between_waves_are_found(barrier: str, second: str, kinds: set[str]) -> None:
    sources = pattern(17, 2, lanes=128)
    _, stats = execute(NEIGHBOUR.format(barrier=barrier, second=second), sources, waves=2, lds=512)
    assert {kind for kind, _ in stats["races"]} == kinds
    assert bool(gfx950.findings(stats)) == bool(kinds)


def test_two_waves_writing_different_values_race_and_equal_ones_do_not() -> None:
    body = "v_mov_b32 v4, 0\nds_write_b32 v4, v8"
    different = np.repeat(np.array([[1, 2]], np.uint32), 64, axis=1)
    _, stats = execute(body, different, waves=2, lds=16)
    assert {kind for kind, _ in stats["races"]} == {"WAW"}
    _, stats = execute(body, np.ones((1, 128), np.uint32), waves=2, lds=16)
    assert stats["races"] == {}


def test_a_read_before_any_write_is_counted() -> None:
    _, stats = execute(f"ds_read_b32 v4, v1\n{WAIT}", lds=256)
    assert len(stats["uninit"]) == 1


def test_accesses_beyond_the_allocation_fault() -> None:
    with pytest.raises(gfx950.MemoryFault, match="LDS access of 4 bytes"):
        execute("ds_write_b32 v1, v0 offset:4", lds=256)
    with pytest.raises(gfx950.MemoryFault, match="LDS access of 16 bytes"):
        execute("v_lshlrev_b32 v4, 4, v0\nds_read_b128 v[4:7], v4 offset:16", lds=1024)


COPY = """
    s_mov_b32 m0, 0
    v_lshlrev_b32 v4, {shift}, v0
    global_load_lds_{width} v4, s[10:11]
    s_add_u32 m0, m0, {span}
    global_load_lds_{width} v4, s[10:11] offset:0
    {wait}
    v_lshlrev_b32 v4, {shift}, v0
    ds_read_b32 v5, v4
    s_waitcnt lgkmcnt(0)
"""


@pytest.mark.parametrize(
    ("wait", "clean"),
    [
        ("s_waitcnt lgkmcnt(0)", True),
        ("s_waitcnt lgkmcnt(1)", False),
        ("s_waitcnt vmcnt(0)", False),
        ("s_nop 0", False),
    ],
)
def test_a_store_is_seen_by_other_waves_only_if_waited_for_before_the_barrier(wait: str, clean: bool) -> None:
    body = f"""
        ds_write_b32 v1, v8
        {wait}
        s_barrier
        v_xor_b32 v5, 0x100, v1
        ds_read_b32 v4, v5
        s_waitcnt lgkmcnt(0)
    """
    sources = pattern(17, 1, lanes=128)
    result, stats = execute(body, sources, waves=2, lds=512)
    np.testing.assert_array_equal(result[0], sources[0][np.arange(128) ^ 64])
    assert bool(stats["pending_reads"]) != clean and not stats["races"]


def test_a_wave_sees_its_own_stores_in_order() -> None:
    _, stats = execute("ds_write_b32 v1, v8\nds_read_b32 v4, v1", pattern(17, 1), lds=256)
    assert gfx950.findings(stats) == []


@pytest.mark.parametrize(("width", "shift"), [("dword", 2), ("dwordx4", 4)])
@pytest.mark.parametrize(
    ("wait", "clean"),
    [("s_waitcnt vmcnt(0)", True), ("s_waitcnt vmcnt(1)", True), ("s_waitcnt vmcnt(2)", False), ("s_nop 0", False)],
)
def test_asynchronous_copy_needs_a_wait_that_covers_it(width: str, shift: int, wait: str, clean: bool) -> None:
    memory = np.arange(256, dtype=np.uint32)
    body = COPY.format(shift=shift, width=width, span=64 << shift, wait=wait)
    result, stats = execute(body, outputs=("v5",), memory=memory, lds=128 << shift)
    np.testing.assert_array_equal(result[0], LANE * (1 << shift) // 4)
    assert (gfx950.findings(stats) == []) == clean


@pytest.mark.parametrize(
    ("before", "after", "clean"),
    [("s_waitcnt vmcnt(0)", "s_nop 0", True), ("s_nop 0", "s_waitcnt vmcnt(0)", False)],
    ids=["wait-before-barrier", "wait-after-barrier"],
)
def test_a_copy_is_seen_by_other_waves_only_if_waited_for_before_the_barrier(
    before: str, after: str, clean: bool
) -> None:
    body = f"""
        v_readfirstlane_b32 s20, v1
        s_mov_b32 m0, s20
        global_load_lds_dword v1, s[10:11]
        {before}
        s_barrier
        {after}
        v_xor_b32 v5, 0x100, v1
        ds_read_b32 v4, v5
        s_waitcnt lgkmcnt(0)
    """
    result, stats = execute(body, memory=np.arange(128, dtype=np.uint32), waves=2, lds=512)
    np.testing.assert_array_equal(result[0], np.arange(128) ^ 64)
    assert bool(stats["pending_reads"]) != clean
