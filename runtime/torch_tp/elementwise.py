"""What lies between the matrix products of many rows: norms, rotation, gating; in torch for any device, compiled on a CPU.

On one core torch needs an eighth of a 512-token prefill for these (each operation is a pass over memory, its exponential is slow);
the kernels need a fiftieth.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from runtime.torch_tp import row_kernels


class Elementwise(Protocol):
    def normed(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMS norm over the last dimension, a new tensor."""

    def rotated(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotary embedding; heads (rows, heads, dim) may be overwritten, cos and signed sin (rows, dim)."""

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up; both may be overwritten."""


class TorchElementwise:
    def normed(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight.shape, weight, eps)

    def rotated(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return torch.addcmul(heads * cos[:, None], heads.roll(heads.shape[-1] // 2, -1), sin[:, None])

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        return silu(gate) * up


class KernelElementwise:
    """float32 on a CPU; tensors are contiguous but for leading dimensions."""

    def __init__(self) -> None:
        self._bits = np.empty(0, dtype=np.int32)

    def normed(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        width = weight.shape[0]
        row_kernels.rms_normed(x.view(-1, width).numpy(), weight.numpy(), np.float32(eps), out.view(-1, width).numpy())
        return out

    def rotated(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        row_kernels.rotate(heads.numpy(), cos.numpy(), sin.numpy())
        return heads

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        if self._bits.shape[0] < gate.shape[1]:
            self._bits = np.empty(gate.shape[1], dtype=np.int32)
        row_kernels.gated(gate.numpy(), up.numpy(), self._bits[: gate.shape[1]])
        return up
