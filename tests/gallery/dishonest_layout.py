"""Returns a sparse tensor: what it holds is worked out when somebody reads it."""

# expect: attention: contest inputs | expected a strided tensor, got torch.sparse_coo
from mla import honest


def custom_kernel(data):
    return honest(data).to_sparse()
