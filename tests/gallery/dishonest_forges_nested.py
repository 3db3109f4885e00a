"""Answers with JSON that is nested too deeply for a parser."""

# expect: attention: contest inputs | control channel
import os
import time


def custom_kernel(data):
    body = b"[" * 200_000
    os.write(3, len(body).to_bytes(4, "big") + body)
    time.sleep(30)
