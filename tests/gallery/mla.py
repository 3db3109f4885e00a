"""Plain attention for the gallery: what its honest files return and its dishonest ones leave out."""

import torch

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def rows(data, cache="bf16"):
    """float32 [total_kv, 576] of one cache."""
    kv = data[1][cache]
    if cache == "bf16":
        return kv[:, 0].float()
    values, scale = kv
    if cache == "fp8":
        return values[:, 0].float() * scale
    raw = values[:, 0].view(torch.uint8)
    table = E2M1.to(raw.device)
    codes = torch.stack((table[(raw & 15).int()], table[(raw >> 4).int()]), -1).flatten(1)
    power = scale.view(torch.uint8)[: raw.shape[0], :18].float() - 127
    return (codes.view(-1, 18, 32) * torch.exp2(power)[..., None]).flatten(1)


def queries(data, fp8=False):
    """float32 [total_q, heads, 576], rounded through fp8 with one scale on request."""
    q = data[0].float()
    if not fp8:
        return q
    scale = q.abs().amax() / 448
    return (q / scale).to(torch.float8_e4m3fn).float() * scale


def attend(data, cache="bf16", select=None, drop=None, fp8_q=False, fp8_p=False, scale=None, kv=None, q=None):
    """float32 [total_q, heads, 512].

    `select(length)` picks the tokens of a sequence that are read; `drop(scores)` is where a head leaves one out.
    """
    q = queries(data, fp8_q) if q is None else q
    kv = rows(data, cache) if kv is None else kv
    scale = data[4]["sm_scale"] if scale is None else scale
    bounds = data[3].tolist()
    out = torch.zeros(*q.shape[:2], 512, device=q.device)
    for i in range(len(bounds) - 1):
        tokens = kv[bounds[i] : bounds[i + 1]]
        if select is not None:
            tokens = tokens[select(tokens.shape[0])]
        if not tokens.shape[0]:
            continue
        scores = q[i] @ tokens.T * scale
        if drop is not None:
            scores = scores.masked_fill(drop(scores), -torch.inf)
        weights = torch.exp(scores - scores.amax(-1, keepdim=True))
        total = weights.sum(-1, keepdim=True)
        if fp8_p:
            weights = weights.to(torch.float8_e4m3fn).float()
        out[i] = weights @ tokens[:, :512] / total
    return out


def honest(data):
    """bf16 attention over the bf16 cache."""
    return attend(data).bfloat16()
