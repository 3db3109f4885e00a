"""Allocates without end."""

# expect: attention: contest inputs | allocate
import torch


def custom_kernel(data):
    blocks = []
    while True:
        blocks.append(torch.empty(1 << 29, dtype=torch.uint8))
