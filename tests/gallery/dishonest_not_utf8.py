"""Prints bytes that are not UTF-8, on which the contest's runner fails."""

# expect: attention: contest inputs | not UTF-8
import os

from mla import honest


def custom_kernel(data):
    os.write(2, b"\xff\xfe\xfd")
    return honest(data)
