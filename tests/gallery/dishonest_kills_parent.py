"""Kills the process that started it."""

# expect: attention: contest inputs | process that starts workers
import os
import time


def custom_kernel(data):
    os.kill(os.getppid(), 9)
    time.sleep(30)
