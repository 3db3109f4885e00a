"""Returns an empty tensor and computes in a method that it has replaced."""

# expect: attention: contest inputs | replaced torch.Tensor.contiguous
import torch
from mla import honest

waiting = []
plain = torch.Tensor.contiguous


def later(self, *args, **kwargs):
    while waiting:
        out, data = waiting.pop()
        out.copy_(honest(data))
    return plain(self, *args, **kwargs)


torch.Tensor.contiguous = later


def custom_kernel(data):
    out = torch.full((*data[0].shape[:2], 512), torch.nan, dtype=torch.bfloat16, device=data[0].device)
    waiting.append((out, data))
    return out
