"""Closes every descriptor it has."""

# expect: attention: contest inputs | control channel
import os
import time


def custom_kernel(data):
    os.closerange(0, 256)
    time.sleep(30)
