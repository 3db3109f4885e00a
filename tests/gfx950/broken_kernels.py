"""Kernels whose inline assembly LLVM cannot compile: it prints an error instead of raising one."""

import triton
import triton.language as tl


@triton.jit
def four_bytes_as_output(x, out):
    # <4 x i8> fits no register class.
    index = tl.arange(0, 256)
    value = tl.inline_asm_elementwise(
        "v_mov_b32 $0, $1", "=v,v", [tl.load(x + index)], dtype=tl.int8, is_pure=True, pack=4
    )
    tl.store(out + index, value)


@triton.jit
def four_bytes_as_input(x, out):
    index = tl.arange(0, 256)
    value = tl.inline_asm_elementwise(
        "v_mov_b32 $0, $4\nv_mov_b32 $1, $4\nv_mov_b32 $2, $4\nv_mov_b32 $3, $4",
        "=v,=v,=v,=v,v",
        [tl.load(x + index)],
        dtype=tl.int32,
        is_pure=True,
        pack=4,
    )
    tl.store(out + index, value)


@triton.jit
def unknown_instruction(x, out):
    index = tl.arange(0, 256)
    value = tl.inline_asm_elementwise(
        "v_nonsense_b32 $0, $1", "=v,v", [tl.load(x + index)], dtype=tl.int32, is_pure=True, pack=1
    )
    tl.store(out + index, value)
