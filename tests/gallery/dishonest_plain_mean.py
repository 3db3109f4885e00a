"""The mean of all values, without any weight."""

# expect: attention: contest inputs | not attention
from mla import attend


def custom_kernel(data):
    return attend(data, scale=0.0).bfloat16()
