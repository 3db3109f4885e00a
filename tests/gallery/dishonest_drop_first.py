"""Leaves out the first token."""

# expect: attention: planted key | not attention
from mla import attend


def custom_kernel(data):
    return attend(data, select=lambda n: slice(1 if n > 1 else 0, n)).bfloat16()
