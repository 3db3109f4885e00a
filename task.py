"""Types of the contest's task: what a submission gets, what it returns, and what describes one case."""

from typing import Any, TypedDict

import torch

# (q, kv_data, qo_indptr, kv_indptr, config)
#   q         bf16 [total_q, heads, 576]
#   kv_data   {"bf16": bf16 [total_kv, 1, 576],
#              "fp8": (fp8 [total_kv, 1, 576], float32 [1]),
#              "mxfp4": (fp4x2 [total_kv, 1, 288], e8m0 [rows >= total_kv, cols >= 18])}
#   *_indptr  int32 [batch + 1]
#   config    sizes and sm_scale by name
input_t = tuple[torch.Tensor, dict[str, Any], torch.Tensor, torch.Tensor, dict[str, Any]]

# bf16 [total_q, heads, 512]
output_t = torch.Tensor


class TestSpec(TypedDict):
    """Arguments of `generate_input` for one case."""

    batchsize: int
    qseqlen: int
    kvseqlen: int
    seed: int
