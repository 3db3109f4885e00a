"""Computes on another queue that the timed one does not wait for."""

# expect: time | left out
import torch
from mla import honest

side = None


def custom_kernel(data):
    global side
    if side is None:
        side = torch.cuda.Stream()
    out = torch.empty(*data[0].shape[:2], 512, dtype=torch.bfloat16, device=data[0].device)
    with torch.cuda.stream(side):
        # Honest work, and enough of it to be seen: about a millisecond.
        torch.cuda._sleep(2_000_000)
        out.copy_(honest(data))
    return out
