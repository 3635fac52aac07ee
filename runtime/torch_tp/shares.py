"""What one rank owns under a plan: ranges of query heads, KV heads, MLP columns and vocabulary rows."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

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


class HeadCounts(Protocol):
    """What cutting asks of a model: its config and the planner's spec both have it."""

    @property
    def query_heads(self) -> int: ...

    @property
    def kv_heads(self) -> int: ...


def kv_interval(query: Interval, config: HeadCounts) -> Interval:
    """KV heads that these query heads read; one that a cut divides belongs to both neighbours."""
    group = config.query_heads // config.kv_heads
    if query.width == 0:
        return Interval(query.start // group, query.start // group)
    return Interval(query.start // group, -(-query.end // group))


def cut(widths: tuple[int, ...], rank: int) -> Interval:
    """Range of `rank` where ranks lie side by side in rank order."""
    ends = list(accumulate(widths, initial=0))
    return Interval(ends[rank], ends[rank + 1])


def buddies(widths: tuple[int, ...]) -> dict[int, int]:
    """By rank with heads: the rank beside it that also keeps its KV; the next one with heads, of the last one the one before.

    Side by side, so that the buddy's range stays one range when it takes the other's over. Empty where one rank has all heads.
    """
    working = [rank for rank, width in enumerate(widths) if width]
    if len(working) < 2:
        return {}
    return dict(zip(working, [*working[1:], working[-2]], strict=True))


def kept_kv(widths: tuple[int, ...], rank: int, config: HeadCounts) -> Interval:
    """KV heads of one layer that `rank` keeps where every rank's KV has a copy with its buddy: its own and those of whom it stands by."""
    kept = kv_interval(cut(widths, rank), config)
    for other, buddy in buddies(widths).items():
        if buddy == rank:
            theirs = kv_interval(cut(widths, other), config)
            kept = Interval(min(kept.start, theirs.start), max(kept.end, theirs.end))
    return kept


def share_of(plan: LayerPlans, config: ModelConfig, rank: int, *, has_buddies: bool = False) -> RankShare:
    """What `rank` owns under `plan`; has_buddies: its KV includes its neighbours' (see `kept_kv`).

    Raises ValueError when the plan does not cover the model or has no such rank.
    """
    plan.check_covers(config.to_spec())
    if not 0 <= rank < plan.ranks:
        raise ValueError(f"rank {rank} is not in plan version {plan.version}, which has {plan.ranks} ranks")
    query = tuple(cut(layer.query_heads, rank) for layer in plan.layers)
    return RankShare(
        query=query,
        kv=tuple(
            kept_kv(layer.query_heads, rank, config) if has_buddies else kv_interval(heads, config)
            for layer, heads in zip(plan.layers, query, strict=True)
        ),
        mlp=tuple(cut(layer.mlp_blocks, rank).scaled(layer.mlp_block) for layer in plan.layers),
        vocabulary=cut(plan.vocabulary_rows, rank),
    )
