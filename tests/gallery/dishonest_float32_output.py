"""Right values in the wrong type."""

# expect: attention: contest inputs | expected torch.bfloat16
from mla import attend


def custom_kernel(data):
    return attend(data)
