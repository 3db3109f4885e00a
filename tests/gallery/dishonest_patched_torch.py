"""Replaces the comparison functions."""

# expect: isolation | replaced torch.allclose
import torch
from mla import honest

torch.allclose = lambda *args, **kwargs: True


def custom_kernel(data):
    return honest(data)
