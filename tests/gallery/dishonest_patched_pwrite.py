"""Replaces what the worker writes outputs with, and computes there; what it returned stays empty."""

# expect: any | replaced os.pwrite
import os

import torch
from mla import honest

plain = os.pwrite


def custom_kernel(data):
    def pwrite(fd, payload, offset):
        os.pwrite = plain
        return plain(fd, honest(data).view(torch.uint8).numpy().tobytes(), offset)

    os.pwrite = pwrite
    return torch.zeros((*data[0].shape[:2], 512), dtype=torch.bfloat16)
