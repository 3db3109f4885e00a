"""fp8 queries over the MXFP4 cache."""

# expect: honest
from mla import attend


def custom_kernel(data):
    return attend(data, "mxfp4", fp8_q=True).bfloat16()
