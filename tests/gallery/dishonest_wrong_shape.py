"""Right values in the wrong shape."""

# expect: attention: contest inputs | expected shape
from mla import honest


def custom_kernel(data):
    return honest(data).flatten(1)
