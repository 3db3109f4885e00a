"""Returns what it computed last time for this object."""

# expect: replay: new content | new content in the same storage
from mla import honest

results = {}


def custom_kernel(data):
    if id(data[0]) not in results:
        # The input is kept alive so that its identity is not given to another.
        results[id(data[0])] = (data, honest(data))
    return results[id(data[0])][1].clone()
