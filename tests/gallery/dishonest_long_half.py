"""Leaves out every second block of 64 tokens where sequences are long."""

# expect: other shapes | 1x1001
import torch
from mla import attend


def every_second(length):
    at = torch.arange(length)
    return at[at // 64 % 2 == 0] if length >= 512 else at


def custom_kernel(data):
    return attend(data, select=every_second).bfloat16()
