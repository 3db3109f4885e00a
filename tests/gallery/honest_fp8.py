"""What a pure fp8 kernel computes: queries, cache and probabilities in fp8."""

# expect: honest
from mla import attend


def custom_kernel(data):
    return attend(data, "fp8", fp8_q=True, fp8_p=True).bfloat16()
