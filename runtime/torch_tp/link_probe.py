"""What a communicator's all-reduce costs on these links, measured: the start-up time alpha and the time per byte beta of each way to do it.

The figures feed two decisions: whether sums over several domains go flat or hierarchically, per size; and the planner's cost model.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

PROBE_SIZES_BYTES = (2048, 32 * 1024, 512 * 1024)
PROBE_REPEATS = 7


class Summing(Protocol):
    """The part of a Communicator that is measured."""

    def all_reduce(self, tensor: Tensor, *, urgent: bool = False) -> None: ...
    def all_gather(self, tensor: Tensor) -> list[Tensor]: ...


@dataclass(frozen=True, slots=True)
class AlphaBeta:
    """Time of an all-reduce of n bytes: alpha_s + n x beta_s_per_byte."""

    alpha_s: float
    beta_s_per_byte: float

    def __post_init__(self) -> None:
        if self.alpha_s < 0 or self.beta_s_per_byte < 0:
            raise ValueError(f"alpha_s={self.alpha_s}, beta_s_per_byte={self.beta_s_per_byte}: neither may be negative")

    def time_s(self, size_bytes: float) -> float:
        return self.alpha_s + size_bytes * self.beta_s_per_byte


@dataclass(frozen=True, slots=True)
class Measured:
    """Times of all-reduces of one size: the slowest rank's median and 99th percentile (the largest, for fewer than 100 repeats)."""

    size_bytes: int
    time_s_p50: float
    time_s_p99: float


def fit_alpha_beta(sizes_bytes: Sequence[float], times_s: Sequence[float]) -> AlphaBeta:
    """Least squares on relative errors, so that small messages count as much as large ones; no term is negative.

    Raises: ValueError for fewer than two different sizes, or a time that is not positive.
    """
    sizes, times = np.asarray(sizes_bytes, float), np.asarray(times_s, float)
    if len(set(sizes.tolist())) < 2 or sizes.shape != times.shape:
        raise ValueError(f"alpha and beta need times of at least two sizes; got sizes {list(sizes_bytes)} and {len(times)} times")
    if not (times > 0).all():
        raise ValueError(f"times_s={list(times_s)}: all must be positive")
    weighted = np.stack([1.0 / times, sizes / times], axis=1)
    alpha, beta = np.linalg.lstsq(weighted, np.ones(len(times)), rcond=None)[0]
    if alpha < 0:
        alpha, beta = 0.0, _single(weighted[:, 1])
    elif beta < 0:
        alpha, beta = _single(weighted[:, 0]), 0.0
    return AlphaBeta(float(alpha), float(beta))


def _single(column: np.ndarray) -> float:
    return float(column.sum() / (column @ column))


def measure_all_reduce(communicator: Summing, sizes_bytes: Sequence[int], repeats: int) -> list[Measured]:
    """Called by all ranks alike; every rank gets the same figures: those of the slowest one."""
    own = np.empty((len(sizes_bytes), 2))
    for index, size_bytes in enumerate(sizes_bytes):
        tensor = torch.zeros(max(1, size_bytes // 4))
        times_s = []
        for _ in range(repeats + 1):
            begin_s = time.perf_counter()
            communicator.all_reduce(tensor)
            times_s.append(time.perf_counter() - begin_s)
        own[index] = np.percentile(times_s[1:], [50, 99], method="higher")  # the first one touches new memory
    slowest = torch.stack(communicator.all_gather(torch.from_numpy(own.reshape(1, -1)))).amax(0).reshape(own.shape)
    return [Measured(size, float(p50), float(p99)) for size, (p50, p99) in zip(sizes_bytes, slowest.tolist(), strict=True)]


def probe(
    ways: Mapping[str, Summing], sizes_bytes: Sequence[int] = PROBE_SIZES_BYTES, repeats: int = PROBE_REPEATS
) -> dict[str, AlphaBeta]:
    """Alpha and beta of each way; the same on every rank, so that all decide alike."""
    found = {}
    for name, communicator in ways.items():
        measured = measure_all_reduce(communicator, sizes_bytes, repeats)
        found[name] = fit_alpha_beta([entry.size_bytes for entry in measured], [entry.time_s_p50 for entry in measured])
    return found
