"""Routers that look at nothing or only count: random, round robin, join-shortest-queue, power of two choices."""

from __future__ import annotations

import numpy as np

from envs.decision.actions import DecisionPoint
from envs.decision.capability import present_strength
from envs.domain.snapshot import FloatArray


def pick_lowest(point: DecisionPoint, score: FloatArray) -> int:
    """Allowed group with the lowest score, ties to the lowest index; without an allowed group hold, else refuse."""
    allowed = point.allowed_groups
    if allowed.any():
        return int(np.where(allowed, score, np.inf).argmin())
    return fall_through(point)


def fall_through(point: DecisionPoint) -> int:
    """Hold if that is legal, else refuse."""
    groups = point.view.groups
    return groups if point.mask[groups] else groups + 1


class RandomRouter:
    """Any allowed group, uniformly."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def choose(self, point: DecisionPoint) -> int:
        allowed = np.flatnonzero(point.allowed_groups)
        return int(self._rng.choice(allowed)) if len(allowed) else fall_through(point)


class RoundRobin:
    """The next allowed group in turn."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, point: DecisionPoint) -> int:
        groups = point.view.groups
        for offset in range(groups):
            index = (self._next + offset) % groups
            if point.mask[index]:
                self._next = (index + 1) % groups
                return index
        return fall_through(point)


class WeightedRoundRobin:
    """Smooth weighted round robin: the largest accumulated credit is served. A group earns by its declared speed and by what
    its capability profile leaves of it now (measured step times, queue, memory)."""

    def __init__(self) -> None:
        self._credit: FloatArray | None = None

    def choose(self, point: DecisionPoint) -> int:
        weight = np.where(point.allowed_groups, point.view.capability * present_strength(point.profile), 0.0)
        if self._credit is None or len(self._credit) != len(weight):
            self._credit = np.zeros(len(weight))
        if weight.sum() <= 0:
            return fall_through(point)
        self._credit += weight
        index = pick_lowest(point, -self._credit)
        self._credit[index] -= weight.sum()
        return index


class ShortestQueue:
    """Fewest requests inside."""

    def choose(self, point: DecisionPoint) -> int:
        view = point.view
        return pick_lowest(point, (view.running + view.waiting).astype(np.float64))


class PowerOfTwo:
    """The less loaded of two random allowed groups (Mitzenmacher, IEEE TPDS 12(10), 2001)."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def choose(self, point: DecisionPoint) -> int:
        allowed = np.flatnonzero(point.allowed_groups)
        if not len(allowed):
            return fall_through(point)
        pair = self._rng.choice(allowed, size=min(2, len(allowed)), replace=False)
        load = point.view.running + point.view.waiting
        return int(min(pair, key=lambda g: (load[g], g)))


class LeastKv:
    """Smallest share of KV in use, counting what its queue will need."""

    def choose(self, point: DecisionPoint) -> int:
        view = point.view
        used = 1.0 - view.kv_blocks_free / np.maximum(1, view.kv_blocks_total)
        queued = view.prefill_backlog_tokens / np.maximum(1, view.kv_blocks_total * view.kv_block_tokens)
        return pick_lowest(point, used + queued)
