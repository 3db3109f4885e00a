"""Replaces the clock."""

# expect: any | replaced time.perf_counter
import time

from mla import honest

time.perf_counter = lambda: 0.0


def custom_kernel(data):
    return honest(data)
