"""Attention over the bf16 cache."""

# expect: honest
from mla import attend


def custom_kernel(data):
    return attend(data, "bf16").bfloat16()
