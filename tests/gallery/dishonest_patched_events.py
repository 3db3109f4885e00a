"""Replaces the device's timer."""

# expect: isolation | replaced torch.cuda.Event.elapsed_time
import torch
from mla import honest

torch.cuda.Event.elapsed_time = lambda self, other: 1e-3


def custom_kernel(data):
    return honest(data)
