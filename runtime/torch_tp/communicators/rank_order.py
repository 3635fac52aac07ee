"""The one order in which sums are formed, so that all ranks and all communicators get the same bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)


def sum_in_rank_order(parts: Sequence[Tensor]) -> Tensor:
    """((part 0 + part 1) + part 2) + ..., a new tensor; half precision is summed in float32 and rounded once."""
    total = parts[0].to(torch.float32) if parts[0].dtype in HALF else parts[0].clone()
    for part in parts[1:]:
        total += part
    return total.to(parts[0].dtype)
