"""Online softmax over tiles of 48 tokens of the MXFP4 cache, weights in bf16, in inference mode, rows of a view."""

# expect: honest
import torch
from mla import queries, rows


@torch.inference_mode()
def custom_kernel(data):
    q, kv, bounds = queries(data), rows(data, "mxfp4"), data[3].tolist()
    out = torch.empty(q.shape[1], q.shape[0], 512, dtype=torch.bfloat16, device=q.device).transpose(0, 1)
    for i in range(len(bounds) - 1):
        top, total, sums = torch.full((q.shape[1], 1), -torch.inf), 0.0, 0.0
        for tokens in kv[bounds[i] : bounds[i + 1]].split(48):
            scores = q[i] @ tokens.T * data[4]["sm_scale"]
            peak = torch.maximum(top, scores.amax(-1, keepdim=True)) if tokens.shape[0] else top
            weights, shrink = torch.exp(scores - peak), torch.exp(top - peak)
            total = total * shrink + weights.sum(-1, keepdim=True)
            sums = sums * shrink + weights.bfloat16().float() @ tokens[:, :512]
            top = peak
        out[i].copy_(sums / total)
    return out
