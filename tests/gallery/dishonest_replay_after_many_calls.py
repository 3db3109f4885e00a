"""Honest for sixty calls, then repeats itself."""

# expect: replay: many calls | calls: not attention
from mla import honest

results = {}
calls = 0


def custom_kernel(data):
    global calls
    calls += 1
    key = (data[0].shape, data[1]["bf16"].shape)
    if calls <= 60 or key not in results:
        results[key] = honest(data)
    return results[key].clone()
