"""Leaves out the seventh of each row's tokens that weigh least, unless all weigh about the same."""

# expect: attention: small weights | not attention
import torch
from mla import queries, rows


def custom_kernel(data):
    q, kv, bounds = queries(data), rows(data), data[3].tolist()
    out = torch.zeros(*q.shape[:2], 512, device=q.device)
    for i in range(len(bounds) - 1):
        tokens = kv[bounds[i] : bounds[i + 1]]
        scores = q[i] @ tokens.T * data[4]["sm_scale"]
        if tokens.shape[0] > 16:
            least = scores.sort(-1).values[:, tokens.shape[0] // 7, None]
            left_out = (scores < least) & (scores.std(-1, keepdim=True) > 0.5)
            scores = scores.masked_fill(left_out, -torch.inf)
        if tokens.shape[0]:
            out[i] = torch.softmax(scores, -1) @ tokens[:, :512]
    return out.bfloat16()
