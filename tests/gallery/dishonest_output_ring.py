"""Hands out four output tensors in turn."""

# expect: held outputs | later call
from mla import honest

outputs = {}
calls = 0


def custom_kernel(data):
    global calls
    calls += 1
    result = honest(data)
    return outputs.setdefault((result.shape, calls % 4), result).copy_(result)
