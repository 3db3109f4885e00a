"""Attention over the bf16 cache, batched: long contexts in reasonable time."""

# expect: honest
import itertools

import torch


def custom_kernel(data):
    q, kv, bounds = data[0], data[1]["bf16"], data[3].tolist()
    lengths = {b - a for a, b in itertools.pairwise(bounds)}
    if len(lengths) == 1:
        keys = kv.view(q.shape[0], -1, 576)
        scores = torch.bmm(q, keys.transpose(1, 2)).float() * data[4]["sm_scale"]
        return torch.bmm(torch.softmax(scores, -1).to(q.dtype), keys[..., :512])
    out = torch.zeros(*q.shape[:2], 512, dtype=q.dtype, device=q.device)
    for i in range(q.shape[0]):
        keys = kv[bounds[i] : bounds[i + 1], 0]
        scores = (q[i] @ keys.T).float() * data[4]["sm_scale"]
        out[i] = torch.softmax(scores, -1).to(q.dtype) @ keys[:, :512]
    return out
