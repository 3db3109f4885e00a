"""Different every time, within the tolerance."""

# expect: repeat, late output | two runs
import torch
from mla import attend


def custom_kernel(data):
    out = attend(data)
    return (out + 0.02 * out.abs().mean() * torch.randn_like(out)).bfloat16()
