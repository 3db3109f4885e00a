"""Inputs on which a computation that leaves something out gives itself away."""

from __future__ import annotations

import math
from typing import Any

import torch

import reference

KINDS = ("normal", "shifted", "planted", "one-hot", "flat", "q30", "every-token", "loud")

# "every-token": score gap, in nats, between the tokens that a head looks at and all others.
GROUP_SCORE = 12.0
# Sign patterns of this length in the RoPE dimensions tell the groups apart.
PATTERNS = reference.QK_ROPE_HEAD_DIM
# A planted key outweighs all N(0, 1) keys together by this many nats: one of many, and nearly the only one.
PLANTED_NATS = 0.5
ONE_HOT_NATS = 10.0
# "every-token": tokens of a small group that both ends belong to, so that they are seen in a sequence of any length.
ENDS_GROUP = 32
# "loud": score levels of its tokens in nats; as multiples they are fp4 numbers, so that no format moves them.
LOUD_NATS, LOUD_LEVELS = 2.0, (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _hadamard(size: int) -> torch.Tensor:
    rows = torch.ones(1, 1)
    while rows.shape[0] < size:
        rows = torch.cat((torch.cat((rows, rows), 1), torch.cat((rows, -rows), 1)))
    return rows


def _normal(batch: int, kv_len: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Generator]:
    """float32 q [batch, 16, 576] and kv [batch, kv_len, 576] on the CPU: every device gets the same numbers."""
    generator = torch.Generator().manual_seed(seed % (1 << 63))
    q = torch.randn(batch, reference.NUM_HEADS, reference.QK_HEAD_DIM, generator=generator)
    kv = torch.randn(batch, kv_len, reference.QK_HEAD_DIM, generator=generator)
    return q, kv, generator


def planted_positions(batch: int, kv_len: int, generator: torch.Generator) -> list[int]:
    """One position per sequence: the first token, the last one, the rest at random."""
    positions = torch.randint(kv_len, (batch,), generator=generator).tolist()
    for i, position in enumerate((0, kv_len - 1)[:batch]):
        positions[i] = position
    return positions


def _plant(q: torch.Tensor, kv: torch.Tensor, positions: list[int], nats: float) -> None:
    """Replace one key per sequence by one that every head of the sequence looks at."""
    kv_len = kv.shape[1]
    # q_h . sum(q) is about 576, and the sum of exp(scores) of N(0, 1) keys about kv_len * exp(1 / 2).
    strength = (math.log(kv_len) + 0.5 + nats) / (reference.SM_SCALE * reference.QK_HEAD_DIM)
    for i, position in enumerate(positions):
        kv[i, position] = strength * q[i].sum(0)


def token_groups(batch: int, kv_len: int, generator: torch.Generator) -> torch.Tensor:
    """int64 [kv_len]: the group of each token; heads of one sequence look at 16 groups, four sequences at all."""
    groups = min(PATTERNS, reference.NUM_HEADS * batch)
    order = torch.randperm(groups, generator=generator)
    found = order.repeat(-(-kv_len // groups))[:kv_len]
    if kv_len > 2 * groups * ENDS_GROUP:
        others = found == order[0]
        found[others] = order[1]
        found[torch.randint(kv_len, (ENDS_GROUP - 2,), generator=generator)] = order[0]
        found[0] = found[-1] = order[0]
    return found


def make(kind: str, batch: int, kv_len: int, seed: int, device: torch.device | str = "cpu") -> Any:
    """One adversarial input of the contest's form.

    Args:
        kind: one of `KINDS`:
            normal       N(0, 1), the contest's own
            shifted      the cache's mean is 0.5
            planted      one key per sequence holds about half of the weight: first, last and random positions
            one-hot      the same key holds nearly all of it
            flat         all weights nearly equal
            q30          queries x 30: sharp and hard to get right
            every-token  RoPE decides; each head averages its own few tokens, and all tokens are some head's
            loud         RoPE decides; a token's values are the louder the smaller its weight, so all count alike
        batch, kv_len: sequences and tokens of each.
        seed: all numbers follow from it.
        device: where the tensors go.
    """
    q, kv, generator = _normal(batch, kv_len, seed)
    if kind == "shifted":
        kv += 0.5
    elif kind in ("planted", "one-hot"):
        positions = planted_positions(batch, kv_len, generator)
        _plant(q, kv, positions, PLANTED_NATS if kind == "planted" else ONE_HOT_NATS)
    elif kind == "flat":
        q *= 0.01
    elif kind == "q30":
        q *= 30
    elif kind == "every-token":
        patterns = _hadamard(PATTERNS)
        kv[..., reference.KV_LORA_RANK :] = patterns[token_groups(batch, kv_len, generator)]
        strength = GROUP_SCORE / (reference.SM_SCALE * PATTERNS)
        groups = min(PATTERNS, reference.NUM_HEADS * batch)
        looks_at = torch.arange(batch * reference.NUM_HEADS) % groups
        q[:] = 0
        q[..., reference.KV_LORA_RANK :] = strength * patterns[looks_at].view(batch, reference.NUM_HEADS, PATTERNS)
    elif kind == "loud":
        pattern = _hadamard(PATTERNS)[1 + seed % (PATTERNS - 1)]
        levels = torch.tensor(LOUD_LEVELS)[torch.randint(len(LOUD_LEVELS), (batch, kv_len, 1), generator=generator)]
        kv *= torch.exp(-levels * (LOUD_NATS / LOUD_LEVELS[-1]))
        kv[..., reference.KV_LORA_RANK :] = levels * pattern
        q[:] = 0
        strength = LOUD_NATS / (LOUD_LEVELS[-1] * reference.SM_SCALE * PATTERNS)
        q[..., reference.KV_LORA_RANK :] = strength * pattern
    elif kind != "normal":
        raise ValueError(f"kind: expected one of {KINDS}, got {kind!r}")
    return assemble(q, kv, device)


def assemble(q: torch.Tensor, kv: torch.Tensor, device: torch.device | str) -> Any:
    """The contest's tuple from float32 [batch, 16, 576] and [batch, kv_len, 576]."""
    batch, kv_len = kv.shape[:2]
    flat = kv.reshape(batch * kv_len, 1, -1).to(torch.bfloat16).to(device)
    return reference.assemble_input(q.to(torch.bfloat16).to(device), flat, [kv_len] * batch)


def ragged(lengths: list[int], seed: int, device: torch.device | str = "cpu") -> Any:
    """N(0, 1) with sequences of the given lengths, 0 included."""
    generator = torch.Generator().manual_seed(seed % (1 << 63))
    q = torch.randn(len(lengths), reference.NUM_HEADS, reference.QK_HEAD_DIM, generator=generator)
    kv = torch.randn(sum(lengths), 1, reference.QK_HEAD_DIM, generator=generator)
    return reference.assemble_input(q.to(torch.bfloat16).to(device), kv.to(torch.bfloat16).to(device), lengths)


def with_tokens(data: Any, q: torch.Tensor, kv: torch.Tensor) -> Any:
    """The same lengths with other queries and another bf16 cache; everything is quantised anew."""
    lengths = (data[3][1:] - data[3][:-1]).tolist()
    return reference.assemble_input(q, kv, lengths)


def swapped(data: Any, first: int, second: int) -> Any:
    """Two sequences of equal length change places, queries and tokens."""
    q, kv, bounds = data[0].clone(), data[1]["bf16"].clone(), data[3].tolist()
    a, b = slice(bounds[first], bounds[first + 1]), slice(bounds[second], bounds[second + 1])
    q[[first, second]] = q[[second, first]]
    kv[a], kv[b] = data[1]["bf16"][b], data[1]["bf16"][a]
    return with_tokens(data, q, kv)


# Dimensions that `part_negated` turns round: two scale blocks.
NEGATED_DIMS = 64


def part_negated(data: Any, sequence: int, position: int, part: int) -> Any:
    """64 value dims of one token change their sign: no magnitude, scale, sum of squares or other token changes."""
    kv = data[1]["bf16"].clone()
    begin = NEGATED_DIMS * part
    kv[int(data[3][sequence]) + position, 0, begin : begin + NEGATED_DIMS].neg_()
    return with_tokens(data, data[0].clone(), kv)


def one_token_changed(data: Any, sequence: int, position: int, seed: int) -> Any:
    """The value part of one token is drawn anew; which tokens a head looks at stays as it was when RoPE decides."""
    kv = data[1]["bf16"].clone()
    generator = torch.Generator().manual_seed(seed % (1 << 63))
    values = torch.randn(reference.KV_LORA_RANK, generator=generator).to(kv)
    kv[int(data[3][sequence]) + position, 0, : reference.KV_LORA_RANK] = values
    return with_tokens(data, data[0].clone(), kv)
