"""Honest for five calls, then repeats itself."""

# expect: attention: queries x 30 | not attention
from mla import honest

results = {}
calls = 0


def custom_kernel(data):
    global calls
    calls += 1
    key = data[0].shape
    if calls <= 5 or key not in results:
        results[key] = honest(data)
    return results[key].clone()
