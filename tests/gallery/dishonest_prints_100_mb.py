"""Prints 100 MB."""

# expect: attention: contest inputs | printed more than
import sys

from mla import honest


def custom_kernel(data):
    for _ in range(100):
        sys.stdout.write("x" * 1_000_000)
    return honest(data)
