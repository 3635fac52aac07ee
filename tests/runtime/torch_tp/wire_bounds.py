"""How wrong a packed sum may be, by the formulas that `wire_codec` states."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def error_bound(wire: str, parts: Sequence[Tensor]) -> Tensor:
    """For the partial sums of all domains, shape (count,)."""
    return torch.stack([_fp16(part) if wire == "fp16" else _int8(part) for part in parts]).sum(0)


def _fp16(part: Tensor) -> Tensor:
    top = float(part.abs().max())
    scale = 2.0 ** math.ceil(math.log2(top / 2.0**15)) if top > 2.0**15 else 1.0
    return part.abs() * 2.0**-11 + scale * 2.0**-25


def _int8(part: Tensor) -> Tensor:
    blocks = torch.nn.functional.pad(part, (0, -part.numel() % 64)).view(-1, 64)
    return blocks.abs().amax(1).repeat_interleave(64)[: part.numel()] / 254
