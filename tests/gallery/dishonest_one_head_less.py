"""Leaves the last head at zero: 6 % of the rows."""

# expect: attention: contest inputs | not attention
from mla import honest


def custom_kernel(data):
    out = honest(data)
    out[:, -1] = 0
    return out
