"""Products of many rows with a weight matrix: torch's BLAS, or oneDNN where that one leaves half of a processor unused.

In float32 on processors that are not Intel's, MKL does without AVX-512: 107 GFLOP/s on a core where oneDNN reaches 240.
oneDNN adds a row's products in one chain where MKL adds blocks of them, so that its rounding grows faster with the length of
a row; here it gets blocks, too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""x (rows, columns), weight (outputs, columns), bias → x · weightᵀ + bias, a new tensor."""

ROWS_FROM = 64
"""Fewer rows are multiplied as ever: there is less to gain, and short prompts keep the rounding of other implementations."""
CHAIN = 768
"""Products of a row that are added in one chain, at most."""


def product_for(device: torch.device, dtype: torch.dtype) -> Product:
    """The quickest here."""
    has_wide = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"
    if device.type == "cpu" and dtype == torch.float32 and has_wide and not _is_intel() and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return onednn_product
    return linear


def onednn_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if x.shape[0] < ROWS_FROM:
        return linear(x, weight, bias)
    multiply: Any = torch.ops.mkldnn._linear_pointwise
    blocks = -(-x.shape[1] // CHAIN)
    out: Tensor | None = None
    # strided operands would take a path a hundred times slower; copying them costs a tenth of the product
    for own_x, own_weight in zip(x.chunk(blocks, 1), weight.chunk(blocks, 1), strict=True):
        part = multiply(own_x.contiguous(), own_weight.contiguous(), bias if out is None else None, "none", [], "")
        out = part if out is None else out.add_(part)
    assert out is not None
    return out


def _is_intel() -> bool:
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    except OSError:  # not Linux: as torch does it
        return True
