"""One task a sequence in a pool of threads that stays; the plan follows from the lengths in every call."""

# expect: honest
import functools
import itertools
from concurrent.futures import ThreadPoolExecutor

import torch
from mla import queries, rows

pool = ThreadPoolExecutor(4)


@functools.lru_cache(maxsize=64)
def plan(bounds):
    return [slice(begin, end) for begin, end in itertools.pairwise(bounds)]


def custom_kernel(data):
    q, kv = queries(data), rows(data)

    def work(i, part):
        tokens = kv[part]
        return torch.softmax(q[i] @ tokens.T * data[4]["sm_scale"], -1) @ tokens[:, :512]

    parts = plan(tuple(data[3].tolist()))
    return torch.stack(list(pool.map(work, range(len(parts)), parts))).bfloat16()
