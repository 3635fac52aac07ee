"""Heuristics for the control tick: splits that follow a rule, rebalancing by threshold or by virtual usage."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from envs.decision import predictor as P
from envs.decision.actions import DecisionPoint
from envs.decision.capability import similarity
from envs.domain.commands import CommandKind

KEEP = 0  # every split and rebalance decision has keep as its first candidate
GAIN, PRICE, AFFECTED, TARGET_BACKLOG, UTILITY = range(5)  # columns of DecisionPoint.moves


@dataclass(frozen=True, slots=True)
class Never:
    """Leave everything as it is."""

    def choose(self, point: DecisionPoint) -> int:
        return KEEP


@dataclass(frozen=True, slots=True)
class TowardCorner:
    """Bring one group after the other to a fixed corner of the split (index into CORNERS)."""

    corner: int

    def choose(self, point: DecisionPoint) -> int:
        for index, command in enumerate(point.commands):
            is_wanted = command.kind is CommandKind.SET_SPLIT and command.argument == self.corner
            if is_wanted and point.mask[index] and point.view.plan_corner[command.group_index] != self.corner:
                return index
        return KEEP


@dataclass(frozen=True, slots=True)
class BestSplit:
    """The split with the largest predicted speed-up, if it beats `least_gain` (log) and pays its price back within
    `payback_s` seconds: the planner with hysteresis."""

    least_gain: float = 0.05
    payback_s: float = 60.0

    def choose(self, point: DecisionPoint) -> int:
        gain = np.where(point.mask, point.moves[:, GAIN], -np.inf)
        saved_s = self.payback_s * (1.0 - np.exp(-np.maximum(gain, 0.0)))
        pays = (gain > self.least_gain) & (saved_s > np.expm1(point.moves[:, PRICE]))
        return int(np.where(pays, gain, -np.inf).argmax()) if pays.any() else KEEP


@dataclass(frozen=True, slots=True)
class Threshold:
    """Requeue from the most backlogged group when its backlog passes `requeue_s` and another would start sooner; fall
    back from a very slow rank and restore it; scale out on pressure."""

    requeue_s: float = 2.0
    scale_out_s: float = 1.0

    def choose(self, point: DecisionPoint) -> int:
        estimates = point.estimates
        best, best_score = KEEP, 0.0
        for index, command in enumerate(point.commands):
            if not point.mask[index]:
                continue
            score = 0.0
            gain = point.moves[index, GAIN]
            if command.kind is CommandKind.REQUEUE and estimates[command.group_index, P.E_BACKLOG_S] > self.requeue_s:
                score = gain
            elif command.kind in (CommandKind.FALL_BACK, CommandKind.RESTORE):
                score = gain - 0.1
            elif command.kind is CommandKind.SCALE_OUT and np.expm1(point.moves[index, TARGET_BACKLOG]) > self.scale_out_s:
                score = 0.5 + 0.1 * point.moves[index, UTILITY]
            if score > best_score:
                best, best_score = index, score
        return best


@dataclass(frozen=True, slots=True)
class Elastic:
    """`Threshold` on a fleet that breathes. Out: the strongest parked group, where its profile is unlike that of those that serve all
    the more
    (complementary). In: what the list names as weakest, when nobody waits, traffic does not rise, and the others keep `spare` of their
    places
    and of their KV free with everybody on them."""

    spare: float = 0.5
    unlike_weight: float = 0.5
    threshold: Threshold = Threshold()

    def choose(self, point: DecisionPoint) -> int:
        chosen = self.threshold.choose(point)
        if point.commands[chosen].kind is CommandKind.SCALE_OUT:
            return self._start(point)
        return chosen if chosen != KEEP else self._park(point)

    def _start(self, point: DecisionPoint) -> int:
        view = point.view
        serving = (
            view.static_profile[view.is_up].mean(axis=0, keepdims=True) if view.is_up.any() else np.zeros((1, view.static_profile.shape[1]))
        )
        unlike = 1.0 - similarity(view.static_profile, serving)[:, 0]
        score = view.capability * (1.0 + self.unlike_weight * unlike)
        starts = [i for i, command in enumerate(point.commands) if command.kind is CommandKind.SCALE_OUT and point.mask[i]]
        return max(starts, key=lambda index: score[point.commands[index].group_index])

    def _park(self, point: DecisionPoint) -> int:
        view = point.view
        is_calm = not view.waiting.any() and view.hold_queue == 0 and view.arrival_rate_5s <= 1.2 * view.arrival_rate_60s
        for index, command in enumerate(point.commands):
            if is_calm and command.kind is CommandKind.SCALE_IN and point.mask[index]:
                others = view.accepts & (np.arange(view.groups) != command.group_index)
                places = (1.0 - self.spare) * view.running_limit[others].sum()
                blocks = (1.0 - self.spare) * view.kv_blocks_total[others].sum()
                used = (view.kv_blocks_total - view.kv_blocks_free)[view.is_up].sum()
                if view.running[view.is_up].sum() <= places and used <= blocks and others.any():
                    return index
        return KEEP


@dataclass(frozen=True, slots=True)
class VirtualUsage:
    """Llumnix-like (Sun et al., OSDI 2024): a group's virtual usage counts running KV and what its queue will need;
    migrate from the fullest to the emptiest when they differ by `gap`, requeue when the fullest has a queue."""

    gap: float = 0.3
    fallback: Threshold = Threshold(requeue_s=4.0)

    def choose(self, point: DecisionPoint) -> int:
        view = point.view
        total = np.maximum(1, view.kv_blocks_total * view.kv_block_tokens)
        usage = 1.0 - view.kv_blocks_free / np.maximum(1, view.kv_blocks_total) + view.prefill_backlog_tokens / total
        usage = np.where(view.is_up, usage, np.nan)
        if np.isnan(usage).all():
            return KEEP
        fullest = int(np.nanargmax(usage))
        if usage[fullest] - np.nanmin(usage) > self.gap:
            wanted = CommandKind.REQUEUE if view.waiting[fullest] > 0 else CommandKind.MIGRATE
            for index, command in enumerate(point.commands):
                if command.kind is wanted and command.group_index == fullest and point.mask[index]:
                    return index
        return self.fallback.choose(point)
