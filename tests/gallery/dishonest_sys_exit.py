"""Calls sys.exit(0)."""

# expect: attention: contest inputs | called sys.exit(0)
import sys


def custom_kernel(data):
    sys.exit(0)
