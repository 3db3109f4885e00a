"""Scales the queries in place."""

# expect: inputs and aliasing | changed its inputs: q
from mla import attend, queries


def custom_kernel(data):
    q = queries(data)
    data[0].mul_(data[4]["sm_scale"])
    return attend(data, q=q).bfloat16()
