"""Scalar instructions against arithmetic on Python integers: results, SCC, branches, scalar loads."""

from collections.abc import Callable

import numpy as np
import pytest
from assembly import execute

M32, M64 = 2**32 - 1, 2**64 - 1
# Pairs of operands, 64 bits wide; the 32-bit instructions use the low words.
PAIRS = [
    (0, 0),
    (1, 2),
    (M64, 1),
    (0x80000000, 0x7FFFFFFF),
    (0x7FFFFFFF, 1),
    (0x123456789ABCDEF0, 0x0F0F0F0F0000001F),
    (0x80000000_80000000, 33),
    (0xFFFFFFFF00000000, 0x00080004),
    (5, 0x00200003),
]


def signed(value: int, bits: int = 32) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def nonzero(result: int) -> int:
    return int(result != 0)


def logic(function: Callable[[int, int], int], bits: int) -> Callable[[int, int], tuple[int, int | None]]:
    def run(a: int, b: int) -> tuple[int, int | None]:
        result = function(a, b) % 2**bits
        return result, nonzero(result)

    return run


def add_signed(a: int, b: int) -> tuple[int, int | None]:
    total = signed(a) + signed(b)
    return total, int(total != signed(total))


def sub_signed(a: int, b: int) -> tuple[int, int | None]:
    total = signed(a) - signed(b)
    return total, int(total != signed(total))


def field(value: int, descriptor: int, bits: int, *, is_signed: bool) -> tuple[int, int | None]:
    offset, length = descriptor % bits, descriptor >> 16 & 127
    result = value >> offset & ((1 << length) - 1)
    if is_signed and length:
        result = signed(result, length) % 2**bits
    return result, nonzero(result)


# name -> (bits of the operands, function of them to (result, SCC or None when it keeps its value 1)).
TWO_SOURCES: dict[str, tuple[int, Callable[[int, int], tuple[int, int | None]]]] = {
    "s_add_u32": (32, lambda a, b: (a + b, int(a + b > M32))),
    "s_sub_u32": (32, lambda a, b: (a - b, int(b > a))),
    "s_addc_u32": (32, lambda a, b: (a + b + 1, int(a + b + 1 > M32))),
    "s_subb_u32": (32, lambda a, b: (a - b - 1, int(b + 1 > a))),
    "s_add_i32": (32, add_signed),
    "s_sub_i32": (32, sub_signed),
    "s_min_i32": (32, lambda a, b: (min(signed(a), signed(b)), int(signed(a) < signed(b)))),
    "s_max_i32": (32, lambda a, b: (max(signed(a), signed(b)), int(signed(a) > signed(b)))),
    "s_min_u32": (32, lambda a, b: (min(a, b), int(a < b))),
    "s_max_u32": (32, lambda a, b: (max(a, b), int(a > b))),
    "s_and_b32": (32, logic(lambda a, b: a & b, 32)),
    "s_or_b32": (32, logic(lambda a, b: a | b, 32)),
    "s_xor_b32": (32, logic(lambda a, b: a ^ b, 32)),
    "s_andn2_b32": (32, logic(lambda a, b: a & ~b, 32)),
    "s_orn2_b32": (32, logic(lambda a, b: a | ~b, 32)),
    "s_nand_b32": (32, logic(lambda a, b: ~(a & b), 32)),
    "s_nor_b32": (32, logic(lambda a, b: ~(a | b), 32)),
    "s_xnor_b32": (32, logic(lambda a, b: ~(a ^ b), 32)),
    "s_lshl_b32": (32, logic(lambda a, b: a << (b % 32), 32)),
    "s_lshr_b32": (32, logic(lambda a, b: a >> (b % 32), 32)),
    "s_ashr_i32": (32, logic(lambda a, b: signed(a) >> (b % 32), 32)),
    "s_bfm_b32": (32, lambda a, b: (((1 << a % 32) - 1) << (b % 32), None)),
    "s_bfe_u32": (32, lambda a, b: field(a, b, 32, is_signed=False)),
    "s_bfe_i32": (32, lambda a, b: field(a, b, 32, is_signed=True)),
    "s_mul_i32": (32, lambda a, b: (a * b, None)),
    "s_mul_hi_u32": (32, lambda a, b: (a * b >> 32, None)),
    "s_mul_hi_i32": (32, lambda a, b: (signed(a) * signed(b) >> 32, None)),
    "s_lshl1_add_u32": (32, lambda a, b: ((a << 1) + b, int((a << 1) + b > M32))),
    "s_lshl4_add_u32": (32, lambda a, b: ((a << 4) + b, int((a << 4) + b > M32))),
    "s_cselect_b32": (32, lambda a, b: (a, None)),
    "s_pack_ll_b32_b16": (32, lambda a, b: (a % 65536 | (b % 65536) << 16, None)),
    "s_pack_lh_b32_b16": (32, lambda a, b: (a % 65536 | (b >> 16) << 16, None)),
    "s_pack_hh_b32_b16": (32, lambda a, b: (a >> 16 | (b >> 16) << 16, None)),
    "s_and_b64": (64, logic(lambda a, b: a & b, 64)),
    "s_or_b64": (64, logic(lambda a, b: a | b, 64)),
    "s_xor_b64": (64, logic(lambda a, b: a ^ b, 64)),
    "s_andn2_b64": (64, logic(lambda a, b: a & ~b, 64)),
    "s_lshl_b64": (64, logic(lambda a, b: a << (b % 64), 64)),
    "s_lshr_b64": (64, logic(lambda a, b: a >> (b % 64), 64)),
    "s_ashr_i64": (64, logic(lambda a, b: signed(a, 64) >> (b % 64), 64)),
    "s_bfe_u64": (64, lambda a, b: field(a, b, 64, is_signed=False)),
    "s_cselect_b64": (64, lambda a, b: (a, None)),
}
NARROW_SECOND = ("s_lshl_b64", "s_lshr_b64", "s_ashr_i64", "s_bfe_u64")
ONE_SOURCE: dict[str, tuple[int, int, Callable[[int], tuple[int, int | None]]]] = {
    "s_mov_b32": (32, 32, lambda a: (a, None)),
    "s_mov_b64": (64, 64, lambda a: (a, None)),
    "s_cmov_b32": (32, 32, lambda a: (a, None)),
    "s_not_b32": (32, 32, lambda a: (a ^ M32, nonzero(a ^ M32))),
    "s_not_b64": (64, 64, lambda a: (a ^ M64, nonzero(a ^ M64))),
    "s_bcnt1_i32_b32": (32, 32, lambda a: (bin(a).count("1"), nonzero(a))),
    "s_bcnt1_i32_b64": (64, 32, lambda a: (bin(a).count("1"), nonzero(a))),
    "s_ff1_i32_b32": (32, 32, lambda a: (f"{a:032b}"[::-1].find("1") if a else M32, None)),
    "s_ff1_i32_b64": (64, 32, lambda a: (f"{a:064b}"[::-1].find("1") if a else M32, None)),
    "s_flbit_i32_b32": (32, 32, lambda a: (f"{a:032b}".find("1") if a else M32, None)),
    "s_flbit_i32_b64": (64, 32, lambda a: (f"{a:064b}".find("1") if a else M32, None)),
    "s_brev_b32": (32, 32, lambda a: (int(f"{a:032b}"[::-1], 2), None)),
    "s_sext_i32_i8": (32, 32, lambda a: (signed(a, 8), None)),
    "s_sext_i32_i16": (32, 32, lambda a: (signed(a, 16), None)),
    "s_abs_i32": (32, 32, lambda a: (abs(signed(a)), nonzero(a))),
}
# SCC is 1 before the instruction, so that instructions which read or keep it are told from those that set it.
SET_SCC = "s_cmp_eq_u32 s0, s0\n"


def words(*values: int) -> list[int]:
    return [part for value in values for part in (value & M32, value >> 32)]


def run_pair(instruction: str, a: int, b: int, *outputs: str) -> list[int]:
    result, _ = execute(SET_SCC + instruction, outputs=outputs, scalars=words(a, b))
    return [int(row[0]) for row in result]


@pytest.mark.parametrize("name", TWO_SOURCES)
def test_scalar_instruction_with_two_sources(name: str) -> None:
    bits, function = TWO_SOURCES[name]
    for a, b in PAIRS:
        wide = bits == 64
        second = "s18" if not wide or name in NARROW_SECOND else "s[18:19]"
        operands = f"s[24:25], s[16:17], {second}" if wide else "s24, s16, s18"
        low, high, scc = run_pair(f"{name} {operands}", a, b, "s24", "s25", "scc")
        second_value = b % 2**32 if not wide or name in NARROW_SECOND else b
        expected, expected_scc = function(a % 2**bits, second_value)
        got = low | high << 32 if wide else low
        assert got == expected % 2**bits, (a, b)
        assert scc == (1 if expected_scc is None else expected_scc), (a, b)


@pytest.mark.parametrize("name", ONE_SOURCE)
def test_scalar_instruction_with_one_source(name: str) -> None:
    source_bits, result_bits, function = ONE_SOURCE[name]
    for pair in PAIRS:
        for a in pair:
            source = "s[16:17]" if source_bits == 64 else "s16"
            target = "s[24:25]" if result_bits == 64 else "s24"
            low, high, scc = run_pair(f"{name} {target}, {source}", a, 0, "s24", "s25", "scc")
            expected, expected_scc = function(a % 2**source_bits)
            got = low | high << 32 if result_bits == 64 else low
            assert got == expected % 2**result_bits, a
            assert scc == (1 if expected_scc is None else expected_scc), a


CONDITIONS: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b,
    "lg": lambda a, b: a != b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
}


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("kind", ["i32", "u32"])
def test_scalar_compare_sets_scc(condition: str, kind: str) -> None:
    for a, b in [*PAIRS, (7, 7)]:
        x, y = (signed(a), signed(b)) if kind == "i32" else (a & M32, b & M32)
        (scc,) = run_pair(f"s_cmp_{condition}_{kind} s16, s18", a, b, "scc")
        assert scc == CONDITIONS[condition](x, y), (a, b)
        constant = 0xFFF0
        (scc,) = run_pair(f"s_cmpk_{condition}_{kind} s16, {constant:#x}", a, b, "scc")
        assert scc == CONDITIONS[condition](x, signed(constant, 16) if kind == "i32" else constant), a


def test_bit_compare_and_64_bit_equality() -> None:
    assert run_pair("s_bitcmp1_b32 s16, s18", 0b1000, 3, "scc") == [1]
    assert run_pair("s_bitcmp0_b32 s16, s18", 0b1000, 3, "scc") == [0]
    assert run_pair("s_cmp_eq_u64 s[16:17], s[18:19]", 1 << 40, 1 << 40, "scc") == [1]
    assert run_pair("s_cmp_lg_u64 s[16:17], s[18:19]", 1 << 40, 1 << 40, "scc") == [0]


def test_constants_in_the_instruction() -> None:
    body = "s_movk_i32 s24, -5\ns_addk_i32 s24, 3\ns_mulk_i32 s24, -7\ns_mov_b32 s25, 0x12345678\ns_mov_b32 s26, -16"
    assert run_pair(body, 0, 0, "s24", "s25", "s26") == [14, 0x12345678, M32 - 15]


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("and", lambda a, e: a & e),
        ("or", lambda a, e: a | e),
        ("xor", lambda a, e: a ^ e),
        ("andn2", lambda a, e: a & ~e),
    ],
)
def test_saveexec_saves_and_changes_the_mask(name: str, function: Callable[[int, int], int]) -> None:
    a, before = 0x00FF00FF_F0F0F0F0, 0x0F0F0F0F_0000FFFF
    body = f"""
        s_mov_b64 exec, s[18:19]
        s_{name}_saveexec_b64 s[24:25], s[16:17]
        s_mov_b64 s[26:27], exec
    """
    got = run_pair(body, a, before, "s24", "s25", "s26", "s27", "scc")
    after = function(a, before) & M64
    assert got == [before & M32, before >> 32, after & M32, after >> 32, int(after != 0)]


def test_loop_counts_and_conditional_branches_are_taken() -> None:
    body = """
        s_mov_b32 s24, 0
        s_mov_b32 s25, 10
    1:
        s_add_u32 s24, s24, s25
        s_sub_u32 s25, s25, 1
        s_cmp_lg_u32 s25, 0
        s_cbranch_scc1 1b
        s_cbranch_scc0 4f
        s_mov_b32 s24, 0
    4:
        s_mov_b64 vcc, 0
        s_cbranch_vccnz 2f
        s_cbranch_vccz 5f
        s_mov_b32 s24, 0
    5:
        s_cbranch_execnz 6f
        s_mov_b32 s24, 0
    6:
        s_or_b32 s24, s24, 0x1000
        s_cbranch_execz 2f
        s_branch 3f
    2:
        s_mov_b32 s24, 0
    3:
    """
    result, stats = execute(body, outputs=("s24",))
    assert int(result[0, 0]) == 55 | 0x1000
    assert max(count for _, count in stats["executed"].values()) == 10


def test_call_and_return() -> None:
    body = """
        s_getpc_b64 s[24:25]
        s_add_u32 s24, s24, 24
        s_addc_u32 s25, s25, 0
        s_swappc_b64 s[26:27], s[24:25]
        s_add_u32 s28, s28, 100
        s_branch 2f
        s_nop 0
        s_mov_b32 s28, 5
        s_setpc_b64 s[26:27]
    2:
    """
    result, _ = execute(body, outputs=("s28",))
    assert int(result[0, 0]) == 105


def test_scalar_loads_of_every_width_and_addressing() -> None:
    memory = np.arange(100, 164, dtype=np.uint32)
    body = """
        s_mov_b32 s40, 64
        s_load_dword s32, s[10:11], 0x8
        s_load_dwordx2 s[34:35], s[10:11], s40
        s_load_dwordx4 s[36:39], s[10:11], s40 offset:0x10
        s_load_dwordx8 s[48:55], s[10:11], 0x80
        s_waitcnt lgkmcnt(0)
    """
    outputs = ("s32", "s34", "s35", "s36", "s39", "s48", "s55")
    result, _ = execute(body, outputs=outputs, memory=memory)
    assert [int(row[0]) for row in result] == [102, 116, 117, 120, 123, 132, 139]
