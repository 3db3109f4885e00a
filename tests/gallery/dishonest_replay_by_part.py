"""Recognises an input by all queries and the first 16 bytes of every token."""

# expect: replay: new content | 64 dims of one token are new
import hashlib

import torch
from mla import honest

results = {}


def custom_kernel(data):
    parts = (data[0], data[1]["mxfp4"][0].view(torch.uint8)[:, 0, :16])
    key = tuple(hashlib.sha256(t.contiguous().view(torch.uint8).cpu().numpy().tobytes()).digest() for t in parts)
    if key not in results:
        results[key] = honest(data)
    return results[key].clone()
