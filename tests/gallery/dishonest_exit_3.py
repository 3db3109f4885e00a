"""Ends the process with an error."""

# expect: attention: contest inputs | exited with code 3
import os


def custom_kernel(data):
    os._exit(3)
