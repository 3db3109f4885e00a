"""Compilation for gfx950: refused when LLVM prints an error, cached otherwise, arguments checked."""

import os
from types import SimpleNamespace
from typing import Any

import broken_kernels
import kernels
import pytest
import triton
from test_kernels import CASES, compiled_case

import gfx950
from gfx950.compile import AssemblerError, compile_kernel
from gfx950.device import emulated_device

AXPY = CASES["axpy"]


@pytest.mark.parametrize(
    "kernel", [broken_kernels.four_bytes_as_output, broken_kernels.four_bytes_as_input], ids=lambda k: k.__name__
)
def test_an_error_that_ends_the_compiler_is_reported_each_time(kernel: Any) -> None:
    for _ in range(2):
        with pytest.raises(AssemblerError, match=r"could(n't| not) allocate (in|out)put reg"):
            compile_kernel(kernel, {"x": "*u8", "out": "*i32"}, num_warps=1)


def test_an_instruction_that_does_not_exist_fails() -> None:
    with pytest.raises((AssemblerError, RuntimeError)):
        compile_kernel(broken_kernels.unknown_instruction, {"x": "*i32", "out": "*i32"}, num_warps=1)


def test_code_returned_in_spite_of_a_printed_error_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on the LLVM builds where the compiler prints the error and goes on: here the printing is added."""
    compile_silently = triton.compile

    def compile_and_print(*args: Any, **kwargs: Any) -> Any:
        compiled = compile_silently(*args, **kwargs)
        os.write(2, b"error: couldn't allocate input reg for constraint 'v'\n")
        return compiled

    monkeypatch.setattr(triton, "compile", compile_and_print)
    with pytest.raises(AssemblerError, match="returned code but printed"):
        compile_kernel(kernels.masked_axpy, AXPY.signature, {"BLOCK": 64}, num_warps=1)
    monkeypatch.undo()
    assert compile_kernel(kernels.masked_axpy, AXPY.signature, {"BLOCK": 64}, num_warps=1).asm["hsaco"]


def test_output_of_a_clean_compilation_is_passed_on(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    compile_silently = triton.compile

    def compile_and_print(*args: Any, **kwargs: Any) -> Any:
        print("remark: something worth knowing", flush=True)
        return compile_silently(*args, **kwargs)

    monkeypatch.setattr(triton, "compile", compile_and_print)
    compile_kernel(kernels.masked_axpy, AXPY.signature, {"BLOCK": 128}, num_warps=1)
    assert "remark: something worth knowing" in capsys.readouterr().err


def test_signature_must_name_every_argument_and_no_other() -> None:
    with pytest.raises(ValueError, match="needs a type or value of \\['BLOCK'\\]"):
        compile_kernel(kernels.masked_axpy, AXPY.signature)
    with pytest.raises(ValueError, match="got also \\['z'\\]"):
        compile_kernel(kernels.masked_axpy, {**AXPY.signature, "z": "i32"}, {"BLOCK": 64})


def test_code_for_another_target_is_refused() -> None:
    compiled = compiled_case("axpy")
    with pytest.raises(ValueError, match="expected an ELF file"):
        gfx950.run(b"not code", [])
    data = bytearray(compiled.asm["hsaco"])
    data[48] = 0x4C
    with pytest.raises(ValueError, match="expected machine 0x4f"):
        gfx950.run(bytes(data), [])


def test_more_lds_than_a_compute_unit_has_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 163840 bytes of LDS, got 163841"):
        gfx950.run(compiled_case("axpy").asm["hsaco"], [], shared=160 * 1024 + 1)


def test_kernels_for_other_targets_or_several_ctas_are_refused() -> None:
    def compiled_for(arch: str, num_ctas: int) -> SimpleNamespace:
        return SimpleNamespace(metadata=SimpleNamespace(target=SimpleNamespace(arch=arch), num_ctas=num_ctas))

    with pytest.raises(ValueError, match="expected a kernel for gfx950, got one for gfx942"):
        gfx950.run_compiled(compiled_for("gfx942", 1), [])
    with pytest.raises(ValueError, match="expected num_ctas 1, got 2"):
        gfx950.run_compiled(compiled_for("gfx950", 2), [])


def test_arguments_that_do_not_fit_are_refused() -> None:
    arguments, _ = AXPY.data()
    args = [arguments[name] for name in AXPY.signature]
    with pytest.raises(ValueError, match=r"args\[3\]: the kernel takes 4 bytes here, got 8 \(ndarray\)"):
        gfx950.run_compiled(compiled_case("axpy"), [*args[:3], args[0]])
    with pytest.raises(ValueError, match=r"takes \d+ arguments, got 99"):
        gfx950.run_compiled(compiled_case("axpy"), [0] * 99)
    arguments["out"].flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        gfx950.run_compiled(compiled_case("axpy"), args)


def test_assembler_errors_surface_in_an_ordinary_launch() -> None:
    import torch

    with emulated_device(), pytest.raises(AssemblerError):
        broken_kernels.four_bytes_as_output[(1,)](
            torch.zeros(256, dtype=torch.uint8), torch.zeros(256, dtype=torch.int8)
        )
