"""Puts a tensor of its own into the input's dictionary, and a result beside it."""

# expect: inputs and aliasing | changed its inputs: bf16, config
from mla import honest


def custom_kernel(data):
    out = honest(data)
    data[1]["bf16"] = data[1]["bf16"].clone()
    data[4]["result"] = 1
    return out
