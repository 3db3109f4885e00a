"""Finds the token of the request in its callers and sends an answer of its own, of the wrong form."""

# expect: attention: contest inputs | answer of the wrong form
import json
import os
import sys
import time


def custom_kernel(data):
    frame = sys._getframe()
    while "token" not in frame.f_locals:
        frame = frame.f_back
    body = json.dumps({"token": frame.f_locals["token"], "ok": True, "results": [None]}).encode()
    os.write(3, len(body).to_bytes(4, "big") + body)
    time.sleep(1)
