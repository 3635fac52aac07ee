"""Fewer bytes between domains: float sums packed into 16 or 8 bits for the crossing, and how wrong the result may be.

Every domain's sum is packed by its leader and unpacked by all leaders, the sender's included, so that all add the same
numbers. Let x_d be the partial sum of domain d; per element of the sum over the domains

- fp16: |error| <= sum over d of (|x_d| 2^-11 + s_d 2^-25); s_d = 1, or the power of two that brings max |x_d| under 2^15;
- int8: |error| <= sum over d of m_d / 254; m_d is the largest |x_d| in the element's block of BLOCK numbers, which are
  rounded to the nearest of 255 steps of m_d / 127;

plus the float32 rounding of scaling and adding, a few times 2^-24 |x_d|.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numba import carray
from torch import Tensor

from envs.perf_model.kernel_cache import cached_njit
from runtime.torch_tp.communicators.shared_flags import byte_pointer, float_pointer

BLOCK = 64  # numbers that share one int8 scale: 6 % more bytes than none
_FP16_TOP = 2.0**15
_STEPS = 127.0


class WireCodec(Protocol):
    """Packs float32 vectors on the CPU."""

    def pack(self, numbers: Tensor) -> Tensor:
        """float32 of shape (count,) to uint8; the length depends on `count` only."""
        ...

    def add_up(self, rows: Sequence[Tensor], count: int) -> Tensor:
        """The float32 sum of packed vectors, in their order."""
        ...


class Fp16Wire:
    """Half the bytes, behind the scale as a float32. What is not finite stays so."""

    @staticmethod
    def _scale(numbers: Tensor) -> float:
        top = float(numbers.abs().max()) if numbers.numel() else 0.0
        return 2.0 ** math.ceil(math.log2(top / _FP16_TOP)) if _FP16_TOP < top < math.inf else 1.0

    def pack(self, numbers: Tensor) -> Tensor:
        scale = self._scale(numbers)
        packed = torch.empty(4 + 2 * numbers.numel(), dtype=torch.uint8)
        packed[:4].view(torch.float32).fill_(scale)
        packed[4:].view(torch.float16).copy_(numbers if scale == 1.0 else numbers / scale)
        return packed

    def add_up(self, rows: Sequence[Tensor], count: int) -> Tensor:
        total = torch.zeros(count)
        for row in rows:
            aligned = row if row.data_ptr() % 4 == 0 else row.clone()
            scale = float(aligned[:4].view(torch.float32))
            total.add_(aligned[4:].view(torch.float16).to(torch.float32), alpha=scale)
        return total


@cached_njit("int64(int64, int64, int64)", nogil=True)
def _pack_int8(source, count, target):  # type: ignore[no-untyped-def]
    """Scales of all blocks, then a signed byte per number. Returns: 0, or 1 when a number is not finite."""
    numbers = carray(float_pointer(source), count)
    blocks = (count + BLOCK - 1) // BLOCK
    scales = carray(float_pointer(target), blocks)
    steps = carray(byte_pointer(target + 4 * blocks), count)
    for block in range(blocks):
        begin, end = block * BLOCK, min(count, block * BLOCK + BLOCK)
        top = np.float32(0.0)
        for i in range(begin, end):
            top = max(top, abs(numbers[i]))
            if not np.isfinite(numbers[i]):
                return 1
        scale = top / np.float32(_STEPS)
        scales[block] = scale
        # a block whose scale is no normal number is sent as zeros: its numbers are under 2^-119
        inverse = np.float32(1.0) / scale if scale > np.float32(1.2e-38) else np.float32(0.0)
        for i in range(begin, end):
            steps[i] = np.int8(np.rint(numbers[i] * inverse))
    return 0


@cached_njit("void(int64, int64, int64)", nogil=True)
def _add_int8(source, count, total):  # type: ignore[no-untyped-def]
    blocks = (count + BLOCK - 1) // BLOCK
    scales = carray(float_pointer(source), blocks)
    steps = carray(byte_pointer(source + 4 * blocks), count)
    sums = carray(float_pointer(total), count)
    for block in range(blocks):
        scale = scales[block]
        for i in range(block * BLOCK, min(count, block * BLOCK + BLOCK)):
            sums[i] += scale * np.float32(steps[i])


class Int8Wire:
    """About a quarter of the bytes."""

    def pack(self, numbers: Tensor) -> Tensor:
        """Raises: ValueError for numbers that are not finite: 8 bits cannot say so."""
        own = numbers.contiguous()
        packed = torch.empty(4 * -(-own.numel() // BLOCK) + own.numel(), dtype=torch.uint8)
        if _pack_int8(own.data_ptr(), own.numel(), packed.data_ptr()):
            raise ValueError(
                "int8 wire: the sum holds numbers that are not finite; use wire 'fp16' or 'float32' to see where they come from"
            )
        return packed

    def add_up(self, rows: Sequence[Tensor], count: int) -> Tensor:
        total = torch.zeros(count)
        for row in rows:
            aligned = row if row.data_ptr() % 4 == 0 else row.clone()
            _add_int8(aligned.data_ptr(), count, total.data_ptr())
        return total


CODECS: dict[str, WireCodec] = {"fp16": Fp16Wire(), "int8": Int8Wire()}


def codec_of(wire: str) -> WireCodec | None:
    """None for "float32", which sends the numbers as they are. Raises: ValueError for an unknown name."""
    if wire == "float32":
        return None
    if wire not in CODECS:
        raise ValueError(f"wire {wire!r} unknown; known: float32, {', '.join(CODECS)}")
    return CODECS[wire]
