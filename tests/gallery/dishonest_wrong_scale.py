"""Scales the scores by 1/sqrt(512)."""

# expect: attention: contest inputs | not attention
from mla import attend


def custom_kernel(data):
    return attend(data, scale=512**-0.5).bfloat16()
