"""A thread computes after the call has returned."""

# expect: attention: contest inputs | not attention
import threading
import time

import torch
from mla import honest


def custom_kernel(data):
    out = torch.zeros(*data[0].shape[:2], 512, dtype=torch.bfloat16, device=data[0].device)

    def work():
        time.sleep(2)
        out.copy_(honest(data))

    threading.Thread(target=work).start()
    return out
