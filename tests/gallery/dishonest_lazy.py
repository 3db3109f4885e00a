"""Returns a tensor subclass that computes when somebody looks at it, after the clock has stopped."""

# expect: attention: contest inputs | expected a torch.Tensor, got Later
import torch
from mla import honest


class Later(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        args = [honest(a.work) if isinstance(a, Later) else a for a in args]
        return function(*args, **(kwargs or {}))


def custom_kernel(data):
    out = torch.empty(*data[0].shape[:2], 512, dtype=torch.bfloat16).as_subclass(Later)
    out.work = data
    return out
