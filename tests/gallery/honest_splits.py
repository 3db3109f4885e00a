"""Split-K over seven uneven parts with bf16 partial results, merged by log-sum-exp in reverse order."""

# expect: honest
import torch
from mla import queries, rows


def custom_kernel(data):
    q, kv, bounds = queries(data), rows(data, "mxfp4"), data[3].tolist()
    out = torch.zeros(*q.shape[:2], 512, device=q.device)
    for i in range(len(bounds) - 1):
        parts = []
        for tokens in reversed(kv[bounds[i] : bounds[i + 1]].tensor_split(7)):
            if tokens.shape[0]:
                scores = q[i] @ tokens.T * data[4]["sm_scale"]
                lse = scores.logsumexp(-1, keepdim=True)
                parts.append(((torch.exp(scores - lse) @ tokens[:, :512]).bfloat16().float(), lse))
        if parts:
            weights = torch.softmax(torch.stack([lse for _, lse in parts]), 0)
            out[i] = (torch.stack([part for part, _ in parts]) * weights).sum(0)
    return out.bfloat16()
