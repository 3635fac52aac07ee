"""The one order in which sums are formed, so that all ranks and all communicators get the same bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)


def sum_in_rank_order(parts: Sequence[Tensor]) -> Tensor:
    """((part 0 + part 1) + part 2) + ..., a new tensor; half precision is summed in float32 and rounded once."""
    if parts[0].dtype in HALF:
        total = parts[0].to(torch.float32)
        for part in parts[1:]:
            total += part
        return total.to(parts[0].dtype)
    total = parts[0] + parts[1] if len(parts) > 1 else parts[0].clone()
    for part in parts[2:]:
        total += part
    return total


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor as a flat view of its bytes."""
    return tensor.reshape(-1).view(torch.uint8)


def gather_unequal(tensor: Tensor, swap: Callable[[Tensor], Sequence[Tensor]]) -> list[Tensor]:
    """`Communicator.all_gather` by `swap`, which gathers equally long vectors: of the widths, then of the contents behind padding."""
    own = tensor.contiguous() if tensor.dim() else tensor.reshape(1)
    lead = own.shape[:-1]
    columns = [int(part) for part in swap(torch.tensor([own.shape[-1]], device=own.device))]
    column_bytes = own.element_size() * math.prod(lead)
    padded = torch.zeros(max(1, max(columns) * column_bytes), dtype=torch.uint8, device=own.device)
    padded[: own.nbytes] = as_bytes(own)
    rows = zip(swap(padded), columns, strict=True)
    return [row[: width * column_bytes].clone().view(own.dtype).reshape(*lead, width) for row, width in rows]


def piece_cuts(count: int, size: int, alignment: int = 32) -> list[int]:
    """Where the pieces of `count` numbers begin that `size` ranks sum up one each, and where the last one ends."""
    return [count * rank // size // alignment * alignment for rank in range(size)] + [count]
