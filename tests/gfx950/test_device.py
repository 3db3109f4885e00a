"""kernel[grid](...) on CPU tensors runs through Triton's own launch path in the emulator."""

import kernels
import pytest
import torch
from triton.runtime.driver import driver

import gfx950
from gfx950.device import emulated_device
from gfx950.pricing import price_loop, resources


def test_launch_runs_the_kernel_and_records_it() -> None:
    x, y, out = torch.randn(1000), torch.randn(1000), torch.full((1000,), float("nan"))
    with emulated_device() as device:
        kernels.masked_axpy[(4,)](x, y, out, 1000, 2.0, BLOCK=256)
    torch.testing.assert_close(out, 2 * x + y)
    (launch,) = device.launches
    assert (launch.name, launch.grid, launch.num_warps) == ("masked_axpy", (4, 1, 1), 4)
    assert launch.stats["groups"] == 4
    assert device.findings() == []
    # Tensors under 2 GiB are accessed by buffer instructions, as on the card.
    assert any(opcode.startswith("BUFFER_LOAD") for opcode, _ in launch.stats["executed"].values())


def test_hazards_in_the_code_are_among_the_findings() -> None:
    x, out = torch.randn(64), torch.zeros(64)
    with emulated_device() as device:
        kernels.squared_exponential[(1,)](x, out, BLOCK=64, num_warps=1)
    torch.testing.assert_close(out, torch.exp2(2 * x))
    (finding,) = device.findings()
    assert "squared_exponential: transcendental result read by a vector instruction: V_EXP_F32" in finding


def test_views_of_one_tensor_share_memory() -> None:
    storage = torch.arange(512, dtype=torch.float32)
    before = storage.clone()
    source, target = storage[:256], storage[128:384]
    with emulated_device():
        kernels.masked_axpy[(4,)](source, source, target, 256, 1, BLOCK=64, num_warps=1)
    expected = before.clone()
    # Blocks run in order, so the later ones read what the earlier ones wrote.
    for start in range(0, 256, 64):
        expected[128 + start : 192 + start] = 2 * expected[start : start + 64].clone()
    torch.testing.assert_close(storage, expected)


def test_values_that_triton_specialises_on_are_bound() -> None:
    """n = 1 becomes a constant, an int bound to a float stays a float, a misaligned view loses its divisibility."""
    x = torch.randn(257)
    out = torch.zeros(4)
    with emulated_device() as device:
        kernels.masked_axpy[(1,)](x, x, out, 1, 3, BLOCK=64)
        kernels.masked_axpy[(1,)](x[1:], x, out[1:], 2, 0.5, BLOCK=64)
    expected = torch.stack([4 * x[0], 0.5 * x[1] + x[0], 0.5 * x[2] + x[1], torch.tensor(0.0)])
    torch.testing.assert_close(out, expected)
    assert device.launches[0].hsaco != device.launches[1].hsaco


def test_an_access_beyond_a_tensor_faults() -> None:
    x = torch.zeros(100)
    with emulated_device(), pytest.raises(gfx950.MemoryFault):
        kernels.softmax_rows[(1,)](x, x, COLUMNS=1024)


def test_the_previous_driver_comes_back() -> None:
    before = driver._active
    with emulated_device():
        assert driver.active.get_current_target().arch == "gfx950"
    assert driver._active is before


def test_tensors_elsewhere_are_refused() -> None:
    with emulated_device(), pytest.raises(ValueError, match="must be on the CPU"):
        kernels.masked_axpy[(1,)](torch.zeros(8, device="meta"), torch.zeros(8), torch.zeros(8), 8, 1.0, BLOCK=64)


def test_profiled_launch_can_be_priced() -> None:
    a, b = torch.randn(64, 256).bfloat16(), torch.randn(256, 64).bfloat16()
    out = torch.empty(64, 64)
    with emulated_device(profile=True) as device:
        kernels.matmul[(1,)](a, b, out, 64, 64, 256, BLOCK_K=64)
    torch.testing.assert_close(out, a.float() @ b.float(), rtol=1e-5, atol=1e-4)
    (launch,) = device.launches
    price = price_loop(launch, num_warps=launch.num_warps, tokens_per_tile=64, profile=launch.profile)
    # 64 x 64 x 64 per trip in 32 matrix instructions of 16 cycles, on 4 SIMDs.
    assert price.mfma_cycles_per_token == 32 * 16 / 4 / 64
    assert resources(launch).lds_bytes == launch.shared_bytes


def test_options_reach_the_emulator() -> None:
    x, out = torch.zeros(2, 1024), torch.zeros(2, 1024)
    with emulated_device(groups=[(1, 0, 0)]) as device:
        kernels.softmax_rows[(2,)](x, out, COLUMNS=1024)
    assert device.launches[0].stats["groups"] == 1
    assert out[0].abs().max() == 0 and out[1].min() > 0
