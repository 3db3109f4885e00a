"""Reads one token of every page of eight, as a kernel that ignores its page size does."""

# expect: attention: contest inputs | not attention
from mla import attend


def custom_kernel(data):
    return attend(data, "fp8", select=lambda n: slice(0, n, 8)).bfloat16()
