"""Global, buffer and scratch accesses and atomics against numpy; bounds."""

from collections.abc import Callable

import numpy as np
import pytest
from assembly import execute, pattern

import gfx950

LANE = np.arange(64)


@pytest.mark.parametrize("words", [1, 2, 3, 4])
@pytest.mark.parametrize("address", ["saddr", "vaddr", "buffer"])
def test_wide_loads_and_stores(words: int, address: str) -> None:
    memory = pattern(words, 1, lanes=1024)[0].copy()
    before = memory.copy()
    span = f"v[8:{7 + words}]" if words > 1 else "v8"
    suffix = "" if words == 1 else f"x{words}"
    stride = 4 * words
    resource = """
        s_mov_b32 s36, s10
        s_mov_b32 s37, s11
        s_mov_b32 s38, 4096
        s_mov_b32 s39, 0x20000
        s_mov_b32 s40, 16
    """
    pointer = """
        v_mov_b32 v6, s11
        v_add_co_u32 v6, vcc, s10, v4
        v_mov_b32 v7, s11
        v_addc_co_u32 v7, vcc, 0, v7, vcc
    """
    load, store = {
        "saddr": (f"global_load_dword{suffix} {span}, v4, s[10:11] offset:16",
                  f"global_store_dword{suffix} v4, {span}, s[10:11] offset:2048"),
        "vaddr": (f"{pointer}\nglobal_load_dword{suffix} {span}, v[6:7], off offset:16",
                  f"global_store_dword{suffix} v[6:7], {span}, off offset:2048"),
        "buffer": (f"{resource}\nbuffer_load_dword{suffix} {span}, v4, s[36:39], 0 offen offset:16",
                   f"buffer_store_dword{suffix} {span}, v4, s[36:39], s40 offen offset:2032"),
    }[address]  # fmt: skip
    body = f"v_mul_u32_u24 v4, {stride}, v0\n{load}\ns_waitcnt vmcnt(0)\n{store}"
    result, _ = execute(body, outputs=[f"v{8 + i}" for i in range(words)], memory=memory)
    loaded = before[4 : 4 + 64 * words].reshape(64, words).T
    np.testing.assert_array_equal(result, loaded)
    expected = before.copy()
    expected[512 : 512 + 64 * words] = loaded.T.ravel()
    np.testing.assert_array_equal(memory, expected)


def test_narrow_loads_extend_and_narrow_stores_leave_neighbours() -> None:
    memory = pattern(5, 1, lanes=256)[0].copy()
    source = memory[:64].copy()
    body = """
        global_load_ubyte v16, v1, s[10:11] offset:1
        global_load_sbyte v17, v1, s[10:11] offset:3
        global_load_ushort v18, v1, s[10:11] offset:2
        global_load_sshort v19, v1, s[10:11]
        v_mov_b32 v20, -1
        global_load_short_d16 v20, v1, s[10:11] offset:2
        v_mov_b32 v21, -1
        global_load_short_d16_hi v21, v1, s[10:11] offset:2
        s_waitcnt vmcnt(0)
        global_store_byte v1, v16, s[10:11] offset:256
        global_store_short_d16_hi v1, v21, s[10:11] offset:514
    """
    result, _ = execute(body, outputs=[f"v{i}" for i in range(16, 22)], memory=memory)
    halves = source >> 16
    expected = [
        source >> 8 & 0xFF,
        (source >> 24).astype(np.uint8).view(np.int8).astype(np.int32).view(np.uint32),
        halves,
        (source & 0xFFFF).astype(np.uint16).view(np.int16).astype(np.int32).view(np.uint32),
        halves | 0xFFFF0000,
        halves << 16 | 0xFFFF,
    ]
    for row, values in zip(result, expected, strict=True):
        np.testing.assert_array_equal(row, values)
    np.testing.assert_array_equal(memory[64:128] & 0xFF, source >> 8 & 0xFF)
    np.testing.assert_array_equal(memory[128:192] >> 16, halves)
    reference = pattern(5, 1, lanes=256)[0]
    np.testing.assert_array_equal(memory[64:128] >> 8, reference[64:128] >> 8)
    np.testing.assert_array_equal(memory[128:192] & 0xFFFF, reference[128:192] & 0xFFFF)


def test_buffer_accesses_beyond_the_resource_read_zero_and_write_nothing() -> None:
    memory = pattern(7, 1, lanes=64)[0].copy()
    before = memory.copy()
    body = """
        s_mov_b32 s36, s10
        s_mov_b32 s37, s11
        s_mov_b32 s38, 130
        s_mov_b32 s39, 0x20000
        buffer_load_dword v4, v1, s[36:39], 0 offen
        s_waitcnt vmcnt(0)
        v_not_b32 v5, v4
        buffer_store_dword v5, v1, s[36:39], 0 offen
    """
    result, _ = execute(body, memory=memory)
    np.testing.assert_array_equal(result[0], np.where(LANE < 32, before, 0))
    np.testing.assert_array_equal(memory, np.where(LANE < 32, ~before, before))


ATOMICS: dict[str, Callable[[int, int], int]] = {
    "add": lambda old, new: (old + new) % 2**32,
    "sub": lambda old, new: (old - new) % 2**32,
    "umax": max,
    "umin": min,
    "smax": lambda old, new: max(old, new, key=lambda v: v - 2**32 if v >> 31 else v),
    "smin": lambda old, new: min(old, new, key=lambda v: v - 2**32 if v >> 31 else v),
    "and": lambda old, new: old & new,
    "or": lambda old, new: old | new,
    "xor": lambda old, new: old ^ new,
    "swap": lambda old, new: new,
}


@pytest.mark.parametrize("name", ATOMICS)
@pytest.mark.parametrize("form", ["global", "buffer"])
def test_atomics_apply_lane_after_lane_and_return_the_old_value(name: str, form: str) -> None:
    sources = pattern(9, 1)
    memory = np.array([0x80001234, 0x12345678], np.uint32)
    start = memory.copy()
    body = """
        v_and_b32 v4, 1, v0
        v_lshlrev_b32 v4, 2, v4
        v_mov_b32 v6, v8
        s_mov_b32 s36, s10
        s_mov_b32 s37, s11
        s_mov_b32 s38, 8
        s_mov_b32 s39, 0x20000
    """
    if form == "global":
        body += f"global_atomic_{name} v5, v4, v8, s[10:11] sc0\ns_waitcnt vmcnt(0)"
    else:
        body += f"buffer_atomic_{name} v6, v4, s[36:39], 0 offen sc0\ns_waitcnt vmcnt(0)\nv_mov_b32 v5, v6"
    result, _ = execute(body, sources, ("v5",), memory=memory)
    cells = [int(value) for value in start]
    for lane in range(64):
        assert int(result[0, lane]) == cells[lane % 2]
        cells[lane % 2] = ATOMICS[name](cells[lane % 2], int(sources[0, lane]))
    assert [int(value) for value in memory] == cells


def test_float_add_and_compare_and_swap_atomics() -> None:
    memory = np.array([1.5, 0, 0], np.float32).view(np.uint32)
    body = """
        v_mov_b32 v4, 0
        v_cvt_f32_u32 v5, v0
        global_atomic_add_f32 v4, v5, s[10:11]
        v_add_u32 v6, 1, v0
        v_mov_b32 v7, v0
        global_atomic_cmpswap v10, v4, v[6:7], s[10:11] offset:4 sc0
        s_waitcnt vmcnt(0)
    """
    result, _ = execute(body, outputs=("v10",), memory=memory)
    assert memory[:1].view(np.float32)[0] == 1.5 + sum(range(64))
    # Every lane expects what the lane before it stored.
    assert memory[1] == 64
    np.testing.assert_array_equal(result[0], LANE)


def test_scratch_is_private_to_each_lane_and_wave() -> None:
    sources = pattern(11, 2, lanes=128)
    body = """
        scratch_store_dword off, v8, off
        scratch_store_dwordx2 off, v[8:9], off offset:8
        s_waitcnt vmcnt(0)
        scratch_load_dword v4, off, off
        scratch_load_dword v5, off, off offset:12
        s_waitcnt vmcnt(0)
    """
    result, stats = execute(body, sources, ("v4", "v5"), waves=2, scratch=16)
    np.testing.assert_array_equal(result, sources)
    assert stats["scratch_bytes"] == 16
    with pytest.raises(gfx950.MemoryFault, match="scratch access of 8 bytes"):
        execute("scratch_store_dwordx2 off, v[0:1], off offset:12", scratch=16)


@pytest.mark.parametrize(
    "body",
    [
        "global_load_dword v4, v1, s[10:11] offset:4",
        "global_store_byte v1, v0, s[10:11] offset:-1",
        "global_atomic_add v1, v0, s[10:11] offset:4",
        "s_load_dword s20, s[10:11], 0x100",
        "v_mov_b32 v4, 0\nglobal_load_dword v4, v4, s[18:19]",
    ],
    ids=["load", "store", "atomic", "scalar", "wild"],
)
def test_accesses_outside_the_buffers_fault(body: str) -> None:
    with pytest.raises(gfx950.MemoryFault, match="out of bounds"):
        execute(body, memory=np.zeros(64, np.uint32), scalars=[0, 0, 0x12345, 0x7FFF])


def test_traffic_counts_what_is_loaded_of_each_buffer() -> None:
    memory = np.arange(1024, dtype=np.uint32)
    body = """
        v_lshlrev_b32 v4, 4, v0
        global_load_dwordx4 v[8:11], v4, s[10:11]
        v_mov_b32 v5, 0
        global_load_ushort v6, v5, s[10:11] offset:2000
        s_mov_b64 exec, 7
        global_load_dword v6, v1, s[10:11]
    """
    _, stats = execute(body, memory=memory, traffic=True)
    loaded = stats["traffic"][3]
    assert loaded.requested == 64 * 16 + 64 * 2 + 3 * 4
    assert loaded.distinct == 64 * 16 + 2
    assert loaded.most == 64
    assert stats["traffic"][1].requested == 0
    assert execute(body, memory=memory)[1]["traffic"] == {}


def test_lanes_that_are_off_do_not_fault() -> None:
    body = "s_mov_b64 exec, 1\nglobal_load_dword v4, v1, s[10:11] offset:252\ns_waitcnt vmcnt(0)"
    result, _ = execute(body, memory=np.arange(64, dtype=np.uint32))
    assert result[0, 0] == 63
