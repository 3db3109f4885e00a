"""Leaves one row unwritten and hopes that the memory holds an earlier answer."""

# expect: attention: contest inputs | not attention
import torch
from mla import honest


def custom_kernel(data):
    result = honest(data)
    out = torch.full_like(result, torch.nan) if custom_kernel.memory is None else custom_kernel.memory.clone()
    out[1:] = result[1:]
    custom_kernel.memory = out
    return out.clone()


custom_kernel.memory = None
