"""What goes wrong in a world: each fault has a kind, a place, a start, a length and a size; scripted or drawn from rates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np


class FaultKind(IntEnum):
    SLOW_COMPUTE = 0  # thermal or power throttling: FLOP take `size` times as long
    SLOW_MEMORY = 1
    SLOW_LINK = 2  # degraded link or a neighbour's traffic
    SLOW_HOST = 3  # a host CPU that starves its GPUs
    LOST_RANK = 4
    LOST_GROUP = 5


@dataclass(frozen=True, slots=True)
class FaultEvent:
    """`size` multiplies times (>= 1) for slow faults and is ignored for losses; rank_index -1 means every rank. `start_s` is on
    the trace's clock."""

    kind: FaultKind
    start_s: float
    length_s: float
    group_index: int
    rank_index: int = -1
    size: float = 2.0

    def __post_init__(self) -> None:
        if self.start_s < 0 or self.length_s <= 0:
            raise ValueError(f"FaultEvent {self.kind.name}: start_s={self.start_s} must be >= 0 and length_s={self.length_s} > 0")
        if self.size < 1.0:
            raise ValueError(f"FaultEvent {self.kind.name}: size={self.size} must be >= 1 (a factor on times)")

    def check_place(self, ranks_per_group: Sequence[int]) -> None:
        """Raise ValueError unless the group exists and has the rank; a lost rank must be named."""
        if not 0 <= self.group_index < len(ranks_per_group):
            raise ValueError(f"FaultEvent {self.kind.name}: group_index={self.group_index}, the cluster has {len(ranks_per_group)} groups")
        ranks = ranks_per_group[self.group_index]
        if not (0 if self.kind is FaultKind.LOST_RANK else -1) <= self.rank_index < ranks:
            raise ValueError(
                f"FaultEvent {self.kind.name}: rank_index={self.rank_index}, group {self.group_index} has ranks 0 to {ranks - 1}"
                "; -1 means every rank and is not for a lost rank (use LOST_GROUP)"
            )


@dataclass(frozen=True, slots=True)
class FaultRates:
    """Expected faults per group and hour of each kind, and their lengths and sizes.

    Real fleets see 4e-3 faults per server and day (InfiniteHBD trace); an episode of minutes keeps the mix and the
    ratios and compresses the clock, so these are rates of the compressed clock. The mix follows that trace's classes
    and the 1-2 % daily clock-scaling swing reported for Llama 3 training: slow-downs are the common case.
    """

    slow_compute_per_hour: float = 6.0
    slow_memory_per_hour: float = 2.0
    slow_link_per_hour: float = 1.5
    slow_host_per_hour: float = 1.5
    lost_rank_per_hour: float = 0.5
    lost_group_per_hour: float = 0.25
    length_mean_s: float = 60.0
    size_low: float = 1.3
    size_high: float = 3.0

    def scaled(self, factor: float) -> FaultRates:
        """The same mix, `factor` times as often."""
        rates = {f"{kind.name.lower()}_per_hour": self.per_hour(kind) * factor for kind in FaultKind}
        return FaultRates(**rates, length_mean_s=self.length_mean_s, size_low=self.size_low, size_high=self.size_high)

    def per_hour(self, kind: FaultKind) -> float:
        return float(getattr(self, f"{kind.name.lower()}_per_hour"))


def draw_faults(
    rates: FaultRates, ranks_per_group: list[int], span_s: float, rng: np.random.Generator, begin_s: float = 0.0
) -> tuple[FaultEvent, ...]:
    """Poisson faults over `span_s` from `begin_s` on, exponential lengths, log-uniform sizes; sorted by start, then group."""
    events: list[FaultEvent] = []
    for group_index, ranks in enumerate(ranks_per_group):
        for kind in FaultKind:
            for _ in range(int(rng.poisson(rates.per_hour(kind) * span_s / 3600.0))):
                start_s = begin_s + float(rng.uniform(0.0, span_s))
                length_s = max(1.0, float(rng.exponential(rates.length_mean_s)))
                size = float(np.exp(rng.uniform(np.log(rates.size_low), np.log(rates.size_high))))
                rank = int(rng.integers(ranks)) if kind in (FaultKind.SLOW_COMPUTE, FaultKind.SLOW_MEMORY, FaultKind.LOST_RANK) else -1
                events.append(FaultEvent(kind, start_s, length_s, group_index, rank, size))
    return tuple(sorted(events, key=lambda event: (event.start_s, event.group_index, event.kind)))
