"""What one rank owns under a plan: ranges of query heads, KV heads, MLP columns and vocabulary rows."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from envs.domain.plans import LayerPlans

if TYPE_CHECKING:
    from runtime.torch_tp.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Interval:
    """Half-open range [start, end) of units; empty where start == end."""

    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end:
            raise ValueError(f"Interval [{self.start}, {self.end}) must have 0 <= start <= end")

    @property
    def width(self) -> int:
        return self.end - self.start

    def scaled(self, factor: int) -> Interval:
        """The same range in smaller units: heads to rows, blocks to columns."""
        return Interval(self.start * factor, self.end * factor)

    def intersection(self, other: Interval) -> Interval:
        """Common part; empty (at some position) where they do not meet."""
        start = max(self.start, other.start)
        return Interval(start, max(start, min(self.end, other.end)))

    def covers(self, other: Interval) -> bool:
        return other.width == 0 or (self.start <= other.start and other.end <= self.end)


@dataclass(frozen=True, slots=True)
class RankShare:
    """One rank's ranges: per layer query heads, KV heads and MLP columns; vocabulary rows once."""

    query: tuple[Interval, ...]
    kv: tuple[Interval, ...]
    mlp: tuple[Interval, ...]
    vocabulary: Interval


def kv_interval(query: Interval, config: ModelConfig) -> Interval:
    """KV heads that these query heads read; one that a cut divides belongs to both neighbours."""
    group = config.query_heads // config.kv_heads
    if query.width == 0:
        return Interval(query.start // group, query.start // group)
    return Interval(query.start // group, -(-query.end // group))


def cut(widths: tuple[int, ...], rank: int) -> Interval:
    """Range of `rank` where ranks lie side by side in rank order."""
    ends = list(accumulate(widths, initial=0))
    return Interval(ends[rank], ends[rank + 1])


def share_of(plan: LayerPlans, config: ModelConfig, rank: int) -> RankShare:
    """What `rank` owns under `plan`. Raises ValueError when the plan does not cover the model or has no such rank."""
    plan.check_covers(config.to_spec())
    if not 0 <= rank < plan.ranks:
        raise ValueError(f"rank {rank} is not in plan version {plan.version}, which has {plan.ranks} ranks")
    query = tuple(cut(layer.query_heads, rank) for layer in plan.layers)
    return RankShare(
        query=query,
        kv=tuple(kv_interval(heads, config) for heads in query),
        mlp=tuple(cut(layer.mlp_blocks, rank).scaled(layer.mlp_block) for layer in plan.layers),
        vocabulary=cut(plan.vocabulary_rows, rank),
    )
