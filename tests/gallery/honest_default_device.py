"""Sets a default device, which leaves a torch mode of the harmless kind."""

# expect: honest
import torch
from mla import attend

torch.set_default_device("cpu")


def custom_kernel(data):
    return attend(data, "mxfp4").bfloat16()
