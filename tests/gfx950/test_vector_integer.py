"""Integer and bitwise vector instructions against arithmetic on Python integers."""

from collections.abc import Callable

import numpy as np
import pytest
from assembly import execute, pattern

MASK = 0xFFFFFFFF


def signed(value: int, bits: int = 32) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def byte_of(pair: int, choice: int) -> int:
    """One result byte of v_perm_b32."""
    if choice >= 13:
        return 0xFF
    if choice == 12:
        return 0
    if choice >= 8:
        return 0xFF if pair >> (16 * (choice - 8) + 15) & 1 else 0
    return pair >> (8 * choice) & 0xFF


def permute(a: int, b: int, c: int) -> int:
    return sum(byte_of(a << 32 | b, c >> (8 * i) & 0xFF) << (8 * i) for i in range(4))


ONE_SOURCE: dict[str, Callable[[int], int]] = {
    "v_mov_b32": lambda a: a,
    "v_not_b32": lambda a: a ^ MASK,
    "v_bfrev_b32": lambda a: int(format(a, "032b")[::-1], 2),
    "v_ffbh_u32": lambda a: 32 - a.bit_length() if a else MASK,
    "v_ffbl_b32": lambda a: (a & -a).bit_length() - 1 if a else MASK,
}
TWO_SOURCES: dict[str, Callable[[int, int], int]] = {
    "v_add_u32": lambda a, b: a + b,
    "v_sub_u32": lambda a, b: a - b,
    "v_subrev_u32": lambda a, b: b - a,
    "v_and_b32": lambda a, b: a & b,
    "v_or_b32": lambda a, b: a | b,
    "v_xor_b32": lambda a, b: a ^ b,
    "v_xnor_b32": lambda a, b: ~(a ^ b),
    "v_lshlrev_b32": lambda a, b: b << (a % 32),
    "v_lshrrev_b32": lambda a, b: b >> (a % 32),
    "v_ashrrev_i32": lambda a, b: signed(b) >> (a % 32),
    "v_lshlrev_b16": lambda a, b: (b << (a % 16)) % 65536,
    "v_lshrrev_b16": lambda a, b: b % 65536 >> (a % 16),
    "v_add_u16": lambda a, b: (a + b) % 65536,
    "v_sub_u16": lambda a, b: (a - b) % 65536,
    "v_mul_lo_u16": lambda a, b: (a * b) % 65536,
    "v_mul_u32_u24": lambda a, b: (a % 2**24) * (b % 2**24),
    "v_mul_i32_i24": lambda a, b: signed(a, 24) * signed(b, 24),
    "v_mul_lo_u32": lambda a, b: a * b,
    "v_mul_hi_u32": lambda a, b: a * b >> 32,
    "v_mul_hi_i32": lambda a, b: signed(a) * signed(b) >> 32,
    "v_max_i32": lambda a, b: max(signed(a), signed(b)),
    "v_min_i32": lambda a, b: min(signed(a), signed(b)),
    "v_max_u32": max,
    "v_min_u32": min,
    "v_bcnt_u32_b32": lambda a, b: bin(a).count("1") + b,
    "v_bfm_b32": lambda a, b: ((1 << a % 32) - 1) << (b % 32),
}
THREE_SOURCES: dict[str, Callable[[int, int, int], int]] = {
    "v_add3_u32": lambda a, b, c: a + b + c,
    "v_lshl_add_u32": lambda a, b, c: (a << (b % 32)) + c,
    "v_add_lshl_u32": lambda a, b, c: (a + b) << (c % 32),
    "v_lshl_or_b32": lambda a, b, c: a << (b % 32) | c,
    "v_and_or_b32": lambda a, b, c: a & b | c,
    "v_or3_b32": lambda a, b, c: a | b | c,
    "v_xad_u32": lambda a, b, c: (a ^ b) + c,
    "v_bfi_b32": lambda a, b, c: (a & b) | (~a & c),
    "v_bfe_u32": lambda a, b, c: a >> (b % 32) & ((1 << c % 32) - 1),
    "v_bfe_i32": lambda a, b, c: signed(signed(a) >> (b % 32), c % 32) if c % 32 else 0,
    "v_alignbit_b32": lambda a, b, c: (a << 32 | b) >> (c % 32),
    "v_alignbyte_b32": lambda a, b, c: (a << 32 | b) >> (8 * (c % 4)),
    "v_perm_b32": permute,
    "v_mad_u32_u24": lambda a, b, c: (a % 2**24) * (b % 2**24) + c,
    "v_mad_i32_i24": lambda a, b, c: signed(a, 24) * signed(b, 24) + c,
    "v_max3_i32": lambda a, b, c: max(signed(a), signed(b), signed(c)),
    "v_min3_i32": lambda a, b, c: min(signed(a), signed(b), signed(c)),
    "v_med3_i32": lambda a, b, c: sorted((signed(a), signed(b), signed(c)))[1],
    "v_max3_u32": max,
    "v_min3_u32": min,
}
ALL: dict[str, Callable[..., int]] = {**ONE_SOURCE, **TWO_SOURCES, **THREE_SOURCES}


@pytest.mark.parametrize("name", ALL)
def test_integer_instruction_matches_python_integers(name: str) -> None:
    count = 1 + (name not in ONE_SOURCE) + (name in THREE_SOURCES)
    sources = pattern(len(name), count)
    if name == "v_perm_b32":
        sources[2] &= np.uint32(0x0F0F0F0F)
    operands = ", ".join(f"v{8 + i}" for i in range(count))
    result, _ = execute(f"{name} v4, {operands}", sources)
    expected = [ALL[name](*(int(row[lane]) for row in sources)) & MASK for lane in range(64)]
    np.testing.assert_array_equal(result[0], np.array(expected, np.uint32))


@pytest.mark.parametrize("name", ["v_lshlrev_b64", "v_lshrrev_b64", "v_ashrrev_i64"])
def test_shift64_matches_python_integers(name: str) -> None:
    sources = pattern(3, 3)
    result, _ = execute(f"{name} v[4:5], v8, v[10:11]", [sources[0], *sources])
    for lane in range(64):
        amount, value = int(sources[0, lane]) % 64, int(sources[1, lane]) | int(sources[2, lane]) << 32
        if name.startswith("v_lshl"):
            expected = value << amount
        else:
            expected = (signed(value, 64) if "ashr" in name else value) >> amount
        assert int(result[0, lane]) == expected & MASK


def test_add64_with_shift_matches_python_integers() -> None:
    sources = pattern(5, 5)
    body = "v_lshl_add_u64 v[4:5], v[8:9], v10, v[12:13]"
    result, _ = execute(
        body, [sources[0], sources[1], sources[2] % 5, sources[2], sources[3], sources[4]], ("v4", "v5")
    )
    low, high = (sources[i].astype(object) for i in (0, 3))
    value = low + (sources[1].astype(object) << 32)
    addend = high + (sources[4].astype(object) << 32)
    expected = [((int(v) << int(s) % 5) + int(a)) % 2**64 for v, s, a in zip(value, sources[2], addend, strict=True)]
    got = [int(lo) | int(hi) << 32 for lo, hi in zip(*result, strict=True)]
    assert got == expected


def test_carry_chain_adds_and_subtracts_64_bit_numbers() -> None:
    sources = pattern(7, 4)
    body = """
        v_add_co_u32 v4, vcc, v8, v10
        v_addc_co_u32 v5, vcc, v9, v11, vcc
        v_sub_co_u32 v6, s[20:21], v8, v10
        v_subb_co_u32 v7, s[20:21], v9, v11, s[20:21]
    """
    result, _ = execute(body, sources, ("v4", "v5", "v6", "v7", "vcc_lo", "vcc_hi"))
    a, b = ([int(lo) | int(hi) << 32 for lo, hi in zip(*pair, strict=True)] for pair in (sources[:2], sources[2:]))
    totals = [int(lo) | int(hi) << 32 for lo, hi in zip(result[0], result[1], strict=True)]
    differences = [int(lo) | int(hi) << 32 for lo, hi in zip(result[2], result[3], strict=True)]
    assert totals == [(x + y) % 2**64 for x, y in zip(a, b, strict=True)]
    assert differences == [(x - y) % 2**64 for x, y in zip(a, b, strict=True)]
    carries = sum((x + y >= 2**64) << lane for lane, (x, y) in enumerate(zip(a, b, strict=True)))
    assert int(result[4, 0]) | int(result[5, 0]) << 32 == carries


@pytest.mark.parametrize("name", ["v_mad_u64_u32", "v_mad_i64_i32"])
def test_mad64_matches_python_integers(name: str) -> None:
    sources = pattern(11, 4)
    result, _ = execute(f"{name} v[4:5], vcc, v8, v9, v[10:11]", sources, ("v4", "v5"))
    for lane in range(64):
        a, b, low, high = (int(row[lane]) for row in sources)
        product = signed(a) * signed(b) if "i64" in name else a * b
        expected = (product + low + (high << 32)) % 2**64
        assert int(result[0, lane]) | int(result[1, lane]) << 32 == expected


CONDITIONS: dict[str, Callable[[int, int], bool]] = {
    "lt": lambda a, b: a < b,
    "eq": lambda a, b: a == b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ne": lambda a, b: a != b,
    "ge": lambda a, b: a >= b,
}


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("kind", ["i32", "u32", "u16", "i16", "u64", "i64"])
def test_integer_compare_sets_the_mask(condition: str, kind: str) -> None:
    sources = pattern(13, 4)
    sources[2:, 20:40] = sources[:2, 20:40]
    wide, bits = kind.endswith("64"), int(kind[1:])
    operands = "v[8:9], v[10:11]" if wide else "v8, v10"
    result, _ = execute(f"v_cmp_{condition}_{kind} vcc, {operands}", sources, ("vcc_lo", "vcc_hi"))
    mask = int(result[0, 0]) | int(result[1, 0]) << 32
    for lane in range(64):
        pair = [int(sources[i, lane]) | int(sources[i + 1, lane]) << 32 for i in (0, 2)]
        a, b = (signed(v, bits) if kind.startswith("i") else v % 2**bits for v in pair)
        assert bool(mask >> lane & 1) == CONDITIONS[condition](a, b), lane


@pytest.mark.parametrize("table", [0x00, 0x80, 0xE8, 0x96, 0xCA, 0x1B, 0xFF])
def test_bitop3_follows_its_truth_table(table: int) -> None:
    sources = pattern(17, 3)
    result, _ = execute(f"v_bitop3_b32 v4, v8, v9, v10 bitop3:{table:#x}", sources)
    for bit in range(32):
        row = (sources[0] >> bit & 1) * 4 + (sources[1] >> bit & 1) * 2 + (sources[2] >> bit & 1)
        np.testing.assert_array_equal(result[0] >> bit & 1, table >> row & 1)


def test_lanes_that_are_off_keep_their_value() -> None:
    sources = pattern(19, 2)
    body = """
        v_mov_b32 v4, 7
        s_mov_b32 exec_lo, 0x0000ffff
        s_mov_b32 exec_hi, 0x80000000
        v_add_u32 v4, v8, v9
        v_cmp_ge_u32 vcc, v8, v8
    """
    result, _ = execute(body, sources, ("v4", "vcc_lo", "vcc_hi"))
    on = np.arange(64) < 16
    on[63] = True
    np.testing.assert_array_equal(result[0], np.where(on, sources[0] + sources[1], 7))
    assert (int(result[1, 0]), int(result[2, 0])) == (0xFFFF, 0x80000000)


@pytest.mark.parametrize("select", ["BYTE_0", "BYTE_3", "WORD_1", "DWORD"])
@pytest.mark.parametrize("unused", ["UNUSED_PAD", "UNUSED_SEXT", "UNUSED_PRESERVE"])
def test_sdwa_selects_parts_of_registers(select: str, unused: str) -> None:
    sources = pattern(23, 3)
    body = f"""
        v_mov_b32 v4, v10
        v_add_u32_sdwa v4, sext(v8), v9 dst_sel:{select} dst_unused:{unused} src0_sel:BYTE_1 src1_sel:WORD_1
    """
    result, _ = execute(body, sources)
    bits, shift = {"BYTE_0": (8, 0), "BYTE_3": (8, 24), "WORD_1": (16, 16), "DWORD": (32, 0)}[select]
    for lane in range(64):
        total = (signed(int(sources[0, lane]) >> 8, 8) + (int(sources[1, lane]) >> 16)) & MASK
        part = total % 2**bits
        if unused == "UNUSED_SEXT":
            expected = signed(part, bits) << shift
        else:
            rest = int(sources[2, lane]) & ~(((1 << bits) - 1) << shift) if unused == "UNUSED_PRESERVE" else 0
            expected = part << shift | rest
        assert int(result[0, lane]) == expected & MASK, lane


def test_sdwa_select_takes_parts_of_both_sources() -> None:
    sources = pattern(24, 2)
    body = """
        v_cmp_lt_u32 vcc, v8, v9
        v_cndmask_b32_sdwa v4, v8, v9, vcc dst_sel:DWORD src0_sel:BYTE_2 src1_sel:WORD_1
    """
    result, _ = execute(body, sources)
    first, second = sources[0] >> 16 & 0xFF, sources[1] >> 16
    np.testing.assert_array_equal(result[0], np.where(sources[0] < sources[1], second, first))


@pytest.mark.parametrize("select", ["BYTE_0", "WORD_1"])
def test_sdwa_compare_takes_parts_of_registers(select: str) -> None:
    sources = pattern(26, 2)
    result, _ = execute(
        f"v_cmp_lt_i32_sdwa s[20:21], sext(v8), v9 src0_sel:{select} src1_sel:{select}", sources, ("s20", "s21")
    )
    bits, shift = (8, 0) if select == "BYTE_0" else (16, 16)
    mask = int(result[0, 0]) | int(result[1, 0]) << 32
    for lane in range(64):
        a, b = (int(row[lane]) >> shift & ((1 << bits) - 1) for row in sources)
        assert bool(mask >> lane & 1) == (signed(a, bits) < b)


LANE = np.arange(64)
DPP_SOURCES = {
    "quad_perm:[1,0,3,2]": LANE ^ 1,
    "quad_perm:[2,3,0,1]": LANE ^ 2,
    "row_shl:1": np.where(LANE % 16 < 15, LANE + 1, -1),
    "row_shr:4": np.where(LANE % 16 >= 4, LANE - 4, -1),
    "row_ror:8": LANE ^ 8,
    "row_mirror": LANE // 16 * 16 + 15 - LANE % 16,
    "row_half_mirror": LANE // 8 * 8 + 7 - LANE % 8,
    "row_bcast:15": np.where(LANE >= 16, LANE // 16 * 16 - 1, -1),
    "row_bcast:31": np.where(LANE >= 32, 31, -1),
    "row_newbcast:5": LANE // 16 * 16 + 5,
}


@pytest.mark.parametrize("control", DPP_SOURCES)
@pytest.mark.parametrize("bound", [True, False])
def test_dpp_reads_other_lanes(control: str, bound: bool) -> None:
    sources = pattern(29, 3)
    body = f"""
        v_mov_b32 v4, v10
        v_add_u32_dpp v4, v8, v9 {control} row_mask:0xf bank_mask:0xf {"bound_ctrl:0" if bound else ""}
    """
    result, _ = execute(body, sources)
    source = DPP_SOURCES[control]
    moved = np.where(source >= 0, sources[0][np.maximum(source, 0)], 0)
    expected = np.where((source >= 0) | bound, moved + sources[1], sources[2])
    np.testing.assert_array_equal(result[0], expected.astype(np.uint32))


def test_dpp_row_and_bank_masks_limit_what_is_written() -> None:
    sources = pattern(31, 2)
    result, _ = execute(
        "v_mov_b32 v4, v9\nv_mov_b32_dpp v4, v8 row_mirror row_mask:0x5 bank_mask:0x3 bound_ctrl:0", sources
    )
    written = (LANE // 16 % 2 == 0) & (LANE // 4 % 4 < 2)
    expected = np.where(written, sources[0][LANE // 16 * 16 + 15 - LANE % 16], sources[1])
    np.testing.assert_array_equal(result[0], expected)


def test_lane_instructions_move_between_lanes_and_scalars() -> None:
    sources = pattern(37, 2)
    body = """
        v_readlane_b32 s20, v8, 5
        s_mov_b32 s21, 61
        v_readlane_b32 s22, v8, s21
        v_mov_b32 v4, v9
        v_writelane_b32 v4, s20, 9
        v_mbcnt_lo_u32_b32 v5, -1, 0
        v_mbcnt_hi_u32_b32 v5, -1, v5
        s_mov_b64 exec, 0xff00
        v_readfirstlane_b32 s23, v8
    """
    result, _ = execute(body, sources, ("s20", "s22", "v4", "v5", "s23"))
    assert int(result[0, 0]) == sources[0, 5] and int(result[1, 0]) == sources[0, 61]
    expected = sources[1].copy()
    expected[9] = sources[0, 5]
    np.testing.assert_array_equal(result[2], expected)
    np.testing.assert_array_equal(result[3], LANE)
    assert int(result[4, 0]) == sources[0, 8]


@pytest.mark.parametrize("rows", [16, 32])
def test_permlane_swap_trades_rows(rows: int) -> None:
    sources = pattern(41, 2)
    result, _ = execute(
        f"v_mov_b32 v4, v8\nv_mov_b32 v5, v9\ns_nop 1\nv_permlane{rows}_swap_b32 v4, v5", sources, ("v4", "v5")
    )
    odd = LANE & rows != 0
    np.testing.assert_array_equal(result[0], np.where(odd, sources[1][LANE ^ rows], sources[0]))
    np.testing.assert_array_equal(result[1], np.where(odd, sources[1], sources[0][LANE ^ rows]))


def test_swap_and_select() -> None:
    sources = pattern(43, 2)
    body = """
        v_cmp_lt_u32 vcc, v8, v9
        v_cndmask_b32 v4, v8, v9, vcc
        v_cmp_gt_u32 s[20:21], v8, v9
        v_cndmask_b32 v5, v8, v9, s[20:21]
        v_swap_b32 v8, v9
    """
    result, _ = execute(body, sources, ("v4", "v5", "v8"))
    np.testing.assert_array_equal(result[0], np.maximum(*sources))
    np.testing.assert_array_equal(result[1], np.minimum(*sources))
    np.testing.assert_array_equal(result[2], sources[1])


PACKED_16: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "v_pk_add_u16": lambda a, b: a + b,
    "v_pk_sub_u16": lambda a, b: a - b,
    "v_pk_mul_lo_u16": lambda a, b: a * b,
    "v_pk_lshlrev_b16": lambda a, b: b << (a % 16),
    "v_pk_lshrrev_b16": lambda a, b: b % 65536 >> (a % 16),
    "v_pk_max_u16": np.maximum,
    "v_pk_min_u16": np.minimum,
    "v_pk_max_i16": lambda a, b: np.maximum(a.astype(np.int16), b.astype(np.int16)),
    "v_pk_min_i16": lambda a, b: np.minimum(a.astype(np.int16), b.astype(np.int16)),
}


@pytest.mark.parametrize("name", PACKED_16)
@pytest.mark.parametrize("swapped", [False, True])
def test_packed_16_bit_instruction_works_on_halves(name: str, swapped: bool) -> None:
    sources = pattern(47, 2)
    select = "op_sel:[1,0] op_sel_hi:[0,1]" if swapped else ""
    result, _ = execute(f"{name} v4, v8, v9 {select}", sources)
    halves = [(row & 0xFFFF).astype(np.int64) for row in (*sources, *(sources >> 16))]
    first = halves[2], halves[0]
    low = PACKED_16[name](first[0] if swapped else first[1], halves[1]).astype(np.uint16)
    high = PACKED_16[name](first[1] if swapped else first[0], halves[3]).astype(np.uint16)
    np.testing.assert_array_equal(result[0], low.astype(np.uint32) | high.astype(np.uint32) << 16)
