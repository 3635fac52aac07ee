"""Times of a communicator's all-reduces on these links, measured alike on every rank, and the cost of each way to do them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from runtime.torch_tp.link_cost import PROBE_REPEATS, PROBE_SIZES_BYTES, LinkCost


class Summing(Protocol):
    """The part of a Communicator that is measured."""

    def all_reduce(self, tensor: Tensor) -> None: ...
    def all_gather(self, tensor: Tensor) -> list[Tensor]: ...


@dataclass(frozen=True, slots=True)
class Measured:
    """Times of all-reduces of one size: the slowest rank's median and 99th percentile (the largest, for fewer than 100 repeats)."""

    size_bytes: int
    time_s_p50: float
    time_s_p99: float


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


def probe(ways: Mapping[str, Summing], sizes_bytes: Sequence[int] = PROBE_SIZES_BYTES, repeats: int = PROBE_REPEATS) -> dict[str, LinkCost]:
    """Cost of each way; the same on every rank, so that all decide alike."""
    measured = {name: measure_all_reduce(communicator, sizes_bytes, repeats) for name, communicator in ways.items()}
    return {name: LinkCost.fit(sizes_bytes, [entry.time_s_p50 for entry in entries]) for name, entries in measured.items()}
