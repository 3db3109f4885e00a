"""Reads the first half of every sequence."""

# expect: attention: contest inputs | not attention
from mla import attend


def custom_kernel(data):
    return attend(data, select=lambda n: slice(0, (n + 1) // 2)).bfloat16()
