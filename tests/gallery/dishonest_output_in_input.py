"""Writes the output over the queries."""

# expect: inputs and aliasing | changed its inputs: q
from mla import honest


def custom_kernel(data):
    q = data[0]
    result = honest(data)
    out = q.view(-1)[: result.numel()].view(result.shape)
    return out.copy_(result)
