"""Returns an empty tensor and computes in a profile function, once the evaluator goes on."""

# expect: attention: contest inputs | left a trace or profile function
import sys

import torch
from mla import honest


def custom_kernel(data):
    out = torch.empty(*data[0].shape[:2], 512, dtype=torch.bfloat16, device=data[0].device)

    def later(frame, event, argument):
        seen.append(event)
        if len(seen) == 12:
            sys.setprofile(None)
            out.copy_(honest(data))

    seen = []
    sys.setprofile(later)
    return out
