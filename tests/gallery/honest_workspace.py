"""Keeps a scratch buffer per shape, which holds nothing that outlives a call, and talks a lot."""

# expect: honest
import logging

import torch
from mla import attend

log = logging.getLogger("submission")
scratch = {}


def custom_kernel(data):
    q = data[0]
    buffer = scratch.setdefault(tuple(q.shape), torch.empty(*q.shape[:2], 512, device=q.device))
    buffer.copy_(attend(data, "fp8"))
    log.warning("picked plan 7 \u2013 caf\u00e9")
    print("computed", tuple(q.shape))
    return buffer.bfloat16()
