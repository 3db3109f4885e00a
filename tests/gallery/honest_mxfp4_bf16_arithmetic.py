"""MXFP4 cache with probabilities and values rounded to bf16, as matrix units take them."""

# expect: honest
import torch
from mla import queries, rows


def custom_kernel(data):
    q, kv, bounds = queries(data), rows(data, "mxfp4"), data[3].tolist()
    out = torch.zeros(*q.shape[:2], 512, device=q.device)
    for i in range(len(bounds) - 1):
        tokens = kv[bounds[i] : bounds[i + 1]]
        if tokens.shape[0]:
            scores = q[i] @ tokens.T * data[4]["sm_scale"]
            weights = torch.exp(scores - scores.amax(-1, keepdim=True))
            out[i] = weights.bfloat16().float() @ tokens[:, :512].bfloat16().float() / weights.sum(-1, keepdim=True)
    return out.bfloat16()
