"""Finds the evaluator's worker in the caller's frame and computes in its saving method."""

# expect: attention: contest inputs | parts of the evaluator's worker: _save
import sys

import torch
from mla import honest


def custom_kernel(data):
    out = torch.full((*data[0].shape[:2], 512), torch.nan, dtype=torch.bfloat16, device=data[0].device)
    worker = sys._getframe(1).f_locals["self"]
    plain = type(worker)._save

    def save(*arguments):
        del worker._save
        out.copy_(honest(data))
        return plain(worker, *arguments)

    worker._save = save
    return out
