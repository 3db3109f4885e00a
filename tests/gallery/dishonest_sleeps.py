"""Never returns."""

# expect: attention: contest inputs | time limit
import time


def custom_kernel(data):
    time.sleep(1e6)
