"""One output tensor for all calls of a shape."""

# expect: held outputs | one tensor for several calls
from mla import honest

outputs = {}


def custom_kernel(data):
    result = honest(data)
    return outputs.setdefault(result.shape, result).copy_(result)
