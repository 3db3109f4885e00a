"""Answers in the worker's place, in the right form but without the token of the request."""

# expect: attention: contest inputs | control channel
import json
import os

import torch

ANSWER = {
    "ok": True,
    "results": [{"type": "Tensor", "plain": True, "dtype": "torch.bfloat16", "shape": [4, 16, 512], "device": "cpu"}],
    "threads": [],
}


def custom_kernel(data):
    payload = json.dumps(ANSWER).encode()
    os.write(3, len(payload).to_bytes(4, "big") + payload)
    return torch.zeros(*data[0].shape[:2], 512, dtype=torch.bfloat16)
