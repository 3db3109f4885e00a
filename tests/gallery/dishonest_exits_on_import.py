"""Ends the process while it is imported."""

# expect: load | exited with code 0
import os

os._exit(0)
