"""Runs a few hand-written instructions in the emulator, assembled by the LLVM that Triton brings along."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from triton._C.libtriton import llvm
from triton.compiler.compiler import make_backend

import gfx950
from gfx950.compile import TARGET

FIRST_INPUT = 8
FIRST_SCALAR = 16
_SCALARS = 16

_KERNEL = """
    .amdgcn_target "amdgcn-amd-amdhsa--gfx950"
    .amdhsa_code_object_version 5
    .text
    .globl kern
    .p2align 8
    .type kern,@function
kern:
{body}
    s_endpgm
.Lend:
    .size kern, .Lend-kern
    .section .rodata,"a",@progbits
    .p2align 6
    .amdhsa_kernel kern
        .amdhsa_kernarg_size 32
        .amdhsa_user_sgpr_count 2
        .amdhsa_user_sgpr_kernarg_segment_ptr 1
        .amdhsa_system_sgpr_workgroup_id_x 1
        .amdhsa_private_segment_fixed_size {scratch}
        .amdhsa_enable_private_segment {uses_scratch}
        .amdhsa_next_free_vgpr 512
        .amdhsa_next_free_sgpr 96
        .amdhsa_accum_offset 256
    .end_amdhsa_kernel
    .amdgpu_metadata
---
amdhsa.kernels:
  - .args:
{args}
    .group_segment_fixed_size: 0
    .kernarg_segment_align: 8
    .kernarg_segment_size: 32
    .max_flat_workgroup_size: 1024
    .name: kern
    .private_segment_fixed_size: {scratch}
    .sgpr_count: 96
    .sgpr_spill_count: 0
    .symbol: kern.kd
    .vgpr_count: 512
    .vgpr_spill_count: 0
    .wavefront_size: 64
amdhsa.target: amdgcn-amd-amdhsa--gfx950
amdhsa.version: [1, 2]
...
    .end_amdgpu_metadata
"""
_ARGUMENT = """      - .address_space: global
        .offset: {offset}
        .size: 8
        .value_kind: global_buffer"""


@cache
def assemble(body: str, scratch: int = 0) -> bytes:
    """A code object whose kernel takes four pointers and consists of `body`."""
    args = "\n".join(_ARGUMENT.format(offset=8 * i) for i in range(4))
    text = _KERNEL.format(body=body, args=args, scratch=scratch, uses_scratch=int(scratch > 0))
    llvm.init_targets()
    backend = make_backend(TARGET)
    hsaco: bytes = backend.make_hsaco(text, {}, backend.parse_options({}))
    return hsaco


def _prologue(inputs: int, waves: int) -> list[str]:
    lines = [
        "s_load_dwordx8 s[4:11], s[0:1], 0x0",
        "s_waitcnt lgkmcnt(0)",
        f"s_load_dwordx16 s[{FIRST_SCALAR}:{FIRST_SCALAR + _SCALARS - 1}], s[8:9], 0x0",
        "v_lshlrev_b32 v1, 2, v0",
    ]
    for index in range(inputs):
        lines += [f"global_load_dword v{FIRST_INPUT + index}, v1, s[4:5]"]
        lines += [f"s_add_u32 s4, s4, {256 * waves}", "s_addc_u32 s5, s5, 0"]
    return [*lines, "s_waitcnt vmcnt(0) lgkmcnt(0)"]


def _epilogue(outputs: Sequence[str], waves: int) -> list[str]:
    lines = ["s_cselect_b32 s15, 1, 0", "s_mov_b64 exec, -1"]
    for name in outputs:
        move = "v_accvgpr_read_b32" if name.startswith("a") else "v_mov_b32"
        source = "s15" if name == "scc" else name
        lines += [f"{move} v3, {source}", "global_store_dword v1, v3, s[6:7]"]
        lines += [f"s_add_u32 s6, s6, {256 * waves}", "s_addc_u32 s7, s7, 0"]
    return lines


def build(body: str, inputs: int = 0, outputs: Sequence[str] = ("v4",), waves: int = 1, scratch: int = 0) -> bytes:
    """The code object that `execute` runs for a body with this many input rows."""
    return assemble("\n".join([*_prologue(inputs, waves), body, *_epilogue(outputs, waves)]), scratch)


def execute(
    body: str,
    inputs: Any = (),
    outputs: Sequence[str] = ("v4",),
    *,
    scalars: Sequence[int] = (),
    memory: Any = None,
    waves: int = 1,
    lds: int = 0,
    scratch: int = 0,
    **options: Any,
) -> tuple[np.ndarray, gfx950.RunStats]:
    """Run `body` once, in one workgroup.

    Args:
        inputs: uint32 [n, 64 * waves], in v8, v9, ...
        outputs: registers to return: v*, s*, a*, vcc_lo, vcc_hi, exec_lo, scc.
        scalars: up to 16 words, in s16, s17, ...
        memory: array that s[10:11] points to.

    Returns:
        uint32 [outputs, 64 * waves] and the run's statistics. v0 holds the lane number, v1 four times that.
    """
    rows = np.ascontiguousarray(inputs, np.uint32).reshape(-1, 64 * waves) if len(inputs) else np.zeros((0, 64 * waves))
    rows = np.ascontiguousarray(rows, np.uint32)
    words = np.zeros(_SCALARS, np.uint32)
    words[: len(scalars)] = [value & 0xFFFFFFFF for value in scalars]
    result = np.full((len(outputs), 64 * waves), 0xBAD0BAD0, np.uint32)
    hsaco = build(body, len(rows), outputs, waves, scratch)
    place = memory if memory is not None else np.zeros(1, np.uint32)
    stats = gfx950.run(hsaco, [rows, result, words, place], shared=lds, num_warps=waves, **options)
    return result, stats


def f32(values: Any) -> np.ndarray:
    """float32 values as their bits."""
    return np.ascontiguousarray(values, np.float32).view(np.uint32)


def pattern(seed: int, count: int, lanes: int = 64) -> np.ndarray:
    """Random words with the edges of the integer range in the first lanes of each row."""
    rng = np.random.default_rng(seed)
    words = rng.integers(0, 2**32, (count, lanes), dtype=np.uint32)
    edges = np.array([0, 1, 0xFFFFFFFF, 0x80000000, 0x7FFFFFFF, 31, 32, 0xFFFF], np.uint32)
    for row in range(count):
        words[row, : len(edges)] = np.roll(edges, row)
    return words


def floats(seed: int, count: int, *, special: bool = True) -> np.ndarray:
    """Random float32 over many magnitudes, as bits, with zeros, infinities, NaN and denormals in the first lanes."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((count, 64)) * np.exp2(rng.integers(-20, 20, (count, 64)))
    result = values.astype(np.float32)
    if special:
        edges = np.array([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e-40, 3.4e38], np.float32)
        for row in range(count):
            result[row, : len(edges)] = np.roll(edges, 2 * row)
    return result.view(np.uint32)
