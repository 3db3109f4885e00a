"""Returns an empty tensor and computes when the evaluator first touches it, through a mode that sees every function."""

# expect: attention: contest inputs | left a torch mode active: Later
import torch
from mla import honest
from torch.overrides import TorchFunctionMode


class Later(TorchFunctionMode):
    def __init__(self, out, data):
        super().__init__()
        self.out, self.data = out, data

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if self.data is not None and any(arg is self.out for arg in args):
            data, self.data = self.data, None
            self.out.copy_(honest(data))
        return function(*args, **(kwargs or {}))


def custom_kernel(data):
    out = torch.empty(*data[0].shape[:2], 512, dtype=torch.bfloat16, device=data[0].device)
    Later(out, data).__enter__()
    return out
