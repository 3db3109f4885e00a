"""Closes its standard output."""

# expect: isolation | closed or replaced stdout
import os

from mla import honest

os.close(1)


def custom_kernel(data):
    return honest(data)
