"""Leaves out the seventh of each row's tokens that weigh least, unless all weigh about the same."""

# expect: attention: small weights | not attention
import torch
from mla import attend


def light(scores):
    count = scores.shape[-1]
    if count <= 16:
        return torch.zeros_like(scores, dtype=torch.bool)
    return (scores < scores.sort(-1).values[:, count // 7, None]) & (scores.std(-1, keepdim=True) > 0.5)


def custom_kernel(data):
    return attend(data, drop=light).bfloat16()
