"""bf16 queries over the fp8 cache."""

# expect: honest
from mla import attend


def custom_kernel(data):
    return attend(data, "fp8").bfloat16()
