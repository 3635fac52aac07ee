"""A cluster as the rest of the project receives it: groups of ranks, their bounds, what is parked, what is scripted to fail."""

from __future__ import annotations

from dataclasses import dataclass

from envs.domain.plans import TpGroup
from envs.domain.specs import ModelSpec

FAULT_KINDS: tuple[str, ...] = ("slow_compute", "slow_memory", "slow_link", "slow_host", "lost_rank", "lost_group")


@dataclass(frozen=True, slots=True)
class ClusterLimits:
    """Bounds of every group, and of the cluster's hold queue.

    max_running: requests in one batch. queue_limit: requests waiting in a group. hold_limit: requests held centrally.
    kv_block_tokens: tokens of one KV block. context_tokens: longest prompt + output.
    kv_blocks: a declared pool per group; None takes what memory leaves.
    """

    max_running: int = 128
    queue_limit: int = 256
    hold_limit: int = 256
    kv_block_tokens: int = 16
    context_tokens: int = 8192
    kv_blocks: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_running", "queue_limit", "kv_block_tokens", "context_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"ClusterLimits: {name}={getattr(self, name)} must be at least 1")
        for name in ("hold_limit", "kv_blocks"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"ClusterLimits: {name}={getattr(self, name)} must be >= 0")


@dataclass(frozen=True, slots=True)
class ScriptedFault:
    """One fault of a cluster file. `kind` is one of FAULT_KINDS; rank_index -1 means every rank; `size` multiplies times."""

    kind: str
    group_index: int
    start_s: float
    length_s: float
    rank_index: int = -1
    size: float = 2.0

    def __post_init__(self) -> None:
        if self.kind not in FAULT_KINDS:
            raise ValueError(f"ScriptedFault: kind {self.kind!r} unknown; known: {', '.join(FAULT_KINDS)}")
        if self.start_s < 0 or self.length_s <= 0 or self.size < 1:
            raise ValueError(
                f"ScriptedFault {self.kind}: start_s={self.start_s} must be >= 0, length_s={self.length_s} > 0 and size={self.size} >= 1"
            )


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """All groups serve `model`. `parked[g]`: group g is a spare that starts switched off."""

    name: str
    model: ModelSpec
    groups: tuple[TpGroup, ...]
    parked: tuple[bool, ...]
    limits: ClusterLimits = ClusterLimits()
    faults: tuple[ScriptedFault, ...] = ()
    description: str = ""

    def __post_init__(self) -> None:
        if not self.groups:
            raise ValueError(f"ClusterSpec {self.name!r}: no groups; give at least one")
        if len(self.parked) != len(self.groups):
            raise ValueError(f"ClusterSpec {self.name!r}: {len(self.parked)} parked flags, {len(self.groups)} groups; give one each")
        if all(self.parked):
            raise ValueError(f"ClusterSpec {self.name!r}: every group is parked; leave at least one running")
        for group in self.groups:
            if group.model != self.model:
                raise ValueError(f"ClusterSpec {self.name!r}: group {group.name!r} serves {group.model.name!r}, not {self.model.name!r}")
        names = [group.name for group in self.groups]
        if len(set(names)) < len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(f"ClusterSpec {self.name!r}: group names {', '.join(twice)} given twice; rename")

    @property
    def gpus(self) -> int:
        """Devices over all groups, parked ones included."""
        return sum(len(group.ranks) for group in self.groups)

    @property
    def usd_per_hour(self) -> float:
        """Price of all groups that are not parked; devices of unknown price count as 0."""
        running = (group for group, parked in zip(self.groups, self.parked, strict=True) if not parked)
        return sum(place.gpu.usd_per_hour for group in running for place in group.ranks)
