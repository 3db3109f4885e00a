"""Returns what it computed last time for these addresses."""

# expect: replay: new content | new content in the same storage
from mla import honest

results = {}


def custom_kernel(data):
    key = (data[0].data_ptr(), data[1]["bf16"].data_ptr(), data[0].shape)
    if key not in results:
        # The input is kept alive so that its address is not given to another.
        results[key] = (data, honest(data))
    return results[key][1].clone()
