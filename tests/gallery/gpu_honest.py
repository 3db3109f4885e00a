"""Attention over the bf16 cache in float32, batched: long contexts in reasonable time."""

# expect: honest
import itertools

import torch


def custom_kernel(data):
    q, kv, bounds, scale = data[0].float(), data[1]["bf16"], data[3].tolist(), data[4]["sm_scale"]
    lengths = {b - a for a, b in itertools.pairwise(bounds)}
    if len(lengths) == 1:
        keys = kv.view(q.shape[0], -1, 576).float()
        return (torch.softmax(q @ keys.transpose(1, 2) * scale, -1) @ keys[..., :512]).bfloat16()
    out = torch.zeros(*q.shape[:2], 512, device=q.device)
    for i in range(q.shape[0]):
        keys = kv[bounds[i] : bounds[i + 1], 0].float()
        out[i] = torch.softmax(q[i] @ keys.T * scale, -1) @ keys[:, :512]
    return out.bfloat16()
