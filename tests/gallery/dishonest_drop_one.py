"""Leaves out one token in the middle."""

# expect: attention: every token | not attention
from mla import attend


def custom_kernel(data):
    return attend(data, select=lambda n: [i for i in range(n) if i != 37 or n == 1]).bfloat16()
