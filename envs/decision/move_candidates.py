"""Candidates of split and rebalance decisions, with what each is predicted to gain and to cost.

Lists are short on purpose: the smallest sufficient moves, a few per group, so that one network scores them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from envs.decision import predictor as P
from envs.decision import split_planner
from envs.decision.actions import MOVE_COLUMNS
from envs.decision.move_prices import copy_s
from envs.decision.split_cost import DEFAULT_TERMS
from envs.domain.commands import Command, CommandKind
from envs.domain.plans import SplitPlan, TpGroup
from envs.domain.requests import Request
from envs.domain.snapshot import BoolArray, ClusterSnapshot, FloatArray
from envs.perf_model.memory_fit import Overlap, smallest_subset

MIGRATIONS_MAX = 8
IDLE_MIX = split_planner.StepMix(decode_sequences=8, kv_tokens=8 * 1024, prefill_tokens=512, prefill_share=0.2)
"""What an idle group is planned for: a small decode batch and a fifth of the steps with prefill."""
SPLIT_CANDIDATES = split_planner.CORNERS


@dataclass(frozen=True, slots=True, eq=False)
class DeclaredHealth:
    """What the control plane knows of the groups: parked, draining; speed_factors[g] (ranks,) is measured speed over
    declared speed, 0 for a lost rank. cold_start_s and rebuild_s are prices in seconds. overlaps[g]: what the ranks hold
    beyond their shares, by default the usual window; older[g]: the plan that residents of the plan before the present one
    still use and their KV tokens, which must move before a third plan lives, by default none. may_restore (groups,): False
    while a group must stay on the subset it fell back to, since a rank that does not work shows no speed; None: nobody must."""

    is_parked: BoolArray
    is_draining: BoolArray
    speed_factors: tuple[FloatArray, ...]
    cold_start_s: float
    rebuild_s: float
    overlaps: tuple[Overlap, ...] = ()
    older: tuple[tuple[SplitPlan, int], ...] = ()
    may_restore: BoolArray | None = None


@dataclass(frozen=True, slots=True, eq=False)
class MoveCandidates:
    """commands[0] is always KEEP. moves (candidates, MOVE_COLUMNS): see envs.decision.observation.MOVE_FEATURES."""

    commands: tuple[Command, ...]
    mask: BoolArray
    moves: FloatArray


def _collect(rows: list[tuple[Command, tuple[float, ...]]]) -> MoveCandidates:
    commands = (Command(CommandKind.KEEP), *(command for command, _ in rows))
    moves = np.zeros((len(commands), MOVE_COLUMNS))
    for index, (_, row) in enumerate(rows, start=1):
        moves[index] = row
    return MoveCandidates(commands, np.ones(len(commands), np.bool_), moves)


def current_mix(view: ClusterSnapshot, g: int) -> split_planner.StepMix:
    """What a step of group `g` looks like now, as the planner's forecast; an idle group gets a small default mix."""
    everyone = int(view.running[g] + view.waiting[g])
    if everyone == 0:
        return IDLE_MIX
    kv_tokens = int(view.decode_kv_tokens[g] + view.prefill_backlog_tokens[g])
    return split_planner.StepMix(decode_sequences=_coarse(everyone), kv_tokens=_coarse(kv_tokens))


def _coarse(value: float) -> float:
    """Nearest power of the square root of two: forecasts are no more precise, and equal ones share their plan."""
    return float(round(2.0 ** (round(2.0 * np.log2(value)) / 2.0))) if value >= 1 else 0.0


@lru_cache(maxsize=4096)
def _planned(group: TpGroup, corner: str, mix: split_planner.StepMix, factors: tuple[float, ...]) -> tuple[SplitPlan, float] | None:
    """Plan of a corner and its predicted step; None when it is infeasible. Cached: the planner takes milliseconds."""
    speeds = np.array(factors)
    try:
        plan = split_planner.corner_plan(group, corner, mix, speed_factors=speeds)
    except split_planner.InfeasibleSplit:
        return None
    return plan, split_planner.step_cost_s(group, plan, mix, speed_factors=speeds)


@lru_cache(maxsize=4096)
def _step_s(group: TpGroup, plan: SplitPlan, mix: split_planner.StepMix, factors: tuple[float, ...]) -> float:
    return split_planner.step_cost_s(group, plan, mix, speed_factors=np.array(factors))


@lru_cache(maxsize=4096)
def _weights_price(group: TpGroup, old: SplitPlan, new: SplitPlan, overlap: Overlap) -> split_planner.ResplitPrice:
    return split_planner.resplit_price(group, old, new, overlap)


def planned_split(view: ClusterSnapshot, g: int, group: TpGroup, corner: str, factors: FloatArray) -> SplitPlan | None:
    """The plan that a SET_SPLIT of group `g` toward `corner` means now; None when it is infeasible. Listing and carrying
    out both ask here, so that what is done is what was priced."""
    found = _planned(group, corner, current_mix(view, g), _rounded(factors))
    return None if found is None else found[0]


def switch_price_s(group: TpGroup, plan: SplitPlan, new: SplitPlan, overlap: Overlap, older: tuple[SplitPlan, int] | None = None) -> float:
    """Seconds that going from `plan` to `new` stops the group: weights beyond the overlap, and the KV of residents of the
    `older` plan (plan, KV tokens), which moves to `plan` before a third one lives."""
    price = _weights_price(group, plan, new, overlap)
    if older is None or older[1] == 0:
        return price.transfer_s
    received = price.weight_bytes + split_planner.resplit_price(group, older[0], plan, kv_tokens=older[1]).kv_bytes
    alpha_s, beta_s_per_byte = DEFAULT_TERMS.link(group)
    return float(np.where(received > 0, alpha_s + received * beta_s_per_byte, 0.0).max())


def _rounded(factors: FloatArray) -> tuple[float, ...]:
    """Measured speed factors in steps of 5 % down to a half, of half as much down to a quarter and so on, so that no step is
    more than a tenth of the value. Every price and plan here takes them, or two moves could each be held to undo the other
    with a gain. Never rounded to a loss: the least is 0.001."""
    value = np.maximum(factors, 1e-3)
    size = np.exp2(np.minimum(np.frexp(value)[1], 0))
    return tuple(np.where(np.asarray(factors) > 0.0, np.round(value / size * 20.0) / 20.0 * size, 0.0).tolist())


def split_candidates(
    view: ClusterSnapshot,
    groups: Sequence[TpGroup],
    plans: Sequence[SplitPlan],
    tables: P.PredictorTables,
    health: DeclaredHealth,
) -> MoveCandidates:
    """Keep, or move one group's split to a corner other than its present plan. Groups of one rank have no choice."""
    rows: list[tuple[Command, tuple[float, ...]]] = []
    for g, (group, plan) in enumerate(zip(groups, plans, strict=True)):
        if len(group.ranks) < 2 or not view.is_up[g]:
            continue
        mix = current_mix(view, g)
        factors = _rounded(health.speed_factors[g])
        before_s = _step_s(group, plan, mix, factors)
        seen = {(plan.query_heads, plan.mlp_blocks)}
        for corner in SPLIT_CANDIDATES:
            found = _planned(group, corner, mix, factors)
            if found is None or (found[0].query_heads, found[0].mlp_blocks) in seen:
                continue
            other, after_s = found
            seen.add((other.query_heads, other.mlp_blocks))
            command = Command(CommandKind.SET_SPLIT, g, argument=split_planner.CORNERS.index(corner))
            everyone = float(view.running[g] + view.waiting[g])
            overlap = health.overlaps[g] if health.overlaps else overlap_of(group, plan)
            price_s = switch_price_s(group, plan, other, overlap, health.older[g] if health.older else None)
            row = (_gain(before_s, after_s), np.log1p(price_s), np.log1p(everyone), 0.0, 0.0)
            rows.append((command, row))
    return _collect(rows)


OVERLAP_FRACTION = 0.05
"""Share of each cut that a rank holds beyond its own, on either side, so that small slides move no byte (DESIGN section 2)."""


def overlap_of(group: TpGroup, plan: SplitPlan) -> Overlap:
    """Overlap window of a plan in whole units: at least one query head, MLP blocks and vocabulary rows by fraction."""
    if len(group.ranks) < 2:
        return Overlap(0, 0, 0)
    return Overlap(
        max(1, int(OVERLAP_FRACTION * sum(plan.query_heads))),
        max(1, int(OVERLAP_FRACTION * sum(plan.mlp_blocks))),
        int(OVERLAP_FRACTION * sum(plan.vocabulary_rows)),
    )


def fallback_plan(group: TpGroup, speed_factors: FloatArray) -> SplitPlan:
    """Plan over the smallest subset of ranks that holds the model, the fastest such subset; the others get zero width.

    speed_factors: (ranks,) measured over declared speed, 0 for a lost rank. Raises: InfeasibleSplit when nothing fits.
    """
    speeds = np.array(_rounded(speed_factors))
    bandwidth = np.array([place.gpu.memory_bytes_per_s for place in group.ranks]) * speeds
    chosen = smallest_subset(group, bytes_per_s=bandwidth)
    factors = np.zeros(len(group.ranks))
    factors[list(chosen)] = np.maximum(speeds[list(chosen)], 1e-3)
    return split_planner.corner_plan(group, "planner", IDLE_MIX, speed_factors=factors)


def _gain(before_s: float, after_s: float) -> float:
    if before_s <= 0 or after_s <= 0 or not np.isfinite(before_s + after_s):
        return 0.0
    return float(np.clip(np.log(before_s / after_s), -5.0, 5.0))


def rebalance_candidates(
    view: ClusterSnapshot,
    groups: Sequence[TpGroup],
    plans: Sequence[SplitPlan],
    tables: P.PredictorTables,
    health: DeclaredHealth,
) -> MoveCandidates:
    """Keep; requeue a group's waiting requests; migrate one running request to the least loaded group; scale; fall back."""
    typical = P.estimate_routes(view, Request(-1, view.now_s, 512, 0), np.zeros(view.groups, np.int64), tables)
    open_groups = np.flatnonzero(view.accepts)
    rows: list[tuple[Command, tuple[float, ...]]] = []
    if len(open_groups):
        best = int(open_groups[np.argmin(typical[open_groups, P.E_TTFT_S] + typical[open_groups, P.E_WORK_LEFT_S] * 1e-3)])
        rows += _requeue_rows(view, typical, best)
        rows += _migrate_rows(view, groups, typical, best)
    rows += _scale_rows(view, groups, typical, health)
    rows += _subset_rows(view, groups, plans, health)
    return _collect(rows)


def _requeue_rows(view: ClusterSnapshot, typical: FloatArray, best: int) -> list[tuple[Command, tuple[float, ...]]]:
    rows: list[tuple[Command, tuple[float, ...]]] = []
    for g in np.flatnonzero((view.waiting > 0) & view.is_up):
        if g == best:
            continue
        gain = _gain(typical[g, P.E_TTFT_S], typical[best, P.E_TTFT_S])
        affected = np.log1p(float(view.waiting[g]))
        row = (gain, 0.0, affected, np.log1p(typical[best, P.E_BACKLOG_S]), typical[best, P.E_OWN] - typical[g, P.E_OWN])
        rows.append((Command(CommandKind.REQUEUE, int(g), best), row))
    return rows


def _migrate_rows(
    view: ClusterSnapshot, groups: Sequence[TpGroup], typical: FloatArray, best: int
) -> list[tuple[Command, tuple[float, ...]]]:
    """The newest running request of each loaded group: it has the most left to gain and the least KV to move."""
    rows: list[tuple[Command, tuple[float, ...]]] = []
    load = typical[:, P.E_STEP_S] * view.is_up
    for g in np.argsort(-load, kind="stable")[:MIGRATIONS_MAX]:
        first, last = view.residents.offset[g], view.residents.offset[g + 1]
        decoding = [i for i in range(first, last) if view.residents.ints[i, 5] == 1 and view.residents.ints[i, 4] == 0]
        if g == best or not decoding:
            continue
        index = min(decoding, key=lambda i: (int(view.residents.ints[i, 3]), i))
        tokens = int(view.residents.ints[index, 2] + view.residents.ints[index, 3])
        if tokens >= view.kv_blocks_total[best] * view.kv_block_tokens:
            continue
        price_s = copy_s(groups[int(g)], tokens)
        row = (
            _gain(typical[g, P.E_STEP_S], typical[best, P.E_STEP_AFTER_S]),
            np.log1p(price_s),
            np.log1p(1.0),
            np.log1p(typical[best, P.E_BACKLOG_S]),
            -typical[g, P.E_HARM] + typical[best, P.E_HARM],
        )
        rows.append((Command(CommandKind.MIGRATE, int(g), best, int(view.residents.ints[index, 0])), row))
    return rows


def _scale_rows(
    view: ClusterSnapshot, groups: Sequence[TpGroup], typical: FloatArray, health: DeclaredHealth
) -> list[tuple[Command, tuple[float, ...]]]:
    rows: list[tuple[Command, tuple[float, ...]]] = []
    pressure = float(np.mean(typical[view.is_up, P.E_BACKLOG_S])) if view.is_up.any() else 0.0
    for g in np.flatnonzero(health.is_parked & (view.running + view.waiting == 0)):
        price = np.log1p(health.cold_start_s)
        rows.append((Command(CommandKind.SCALE_OUT, int(g)), (0.0, price, 0.0, np.log1p(pressure), view.capability[g])))
        for h in np.flatnonzero(view.is_up):
            if len(groups[int(h)].ranks) + len(groups[int(g)].ranks) <= view.rank_busy_fraction.shape[1]:
                command = Command(CommandKind.REGROUP, int(g), int(h))
                everyone = np.log1p(float(view.running[h] + view.waiting[h]))
                rows.append((command, (0.0, np.log1p(health.rebuild_s), everyone, np.log1p(pressure), 0.0)))
                break
    if (view.is_up & ~view.is_draining).sum() > 1 and health.is_parked.any():  # only where something can come back
        strength = view.capability / np.maximum(
            view.rank_ratio.max(axis=1), 1e-3
        )  # declared, less what its slowest rank shows: the sick are weak
        weakest = int(min(np.flatnonzero(view.is_up & ~view.is_draining), key=lambda g: strength[g], default=-1))
        if weakest >= 0:
            everyone = np.log1p(float(view.running[weakest] + view.waiting[weakest]))
            row = (0.0, 0.0, everyone, np.log1p(pressure), -float(strength[weakest]))
            rows.append((Command(CommandKind.SCALE_IN, weakest), row))
    return rows


def _subset_rows(
    view: ClusterSnapshot, groups: Sequence[TpGroup], plans: Sequence[SplitPlan], health: DeclaredHealth
) -> list[tuple[Command, tuple[float, ...]]]:
    """Fall back where a rank runs at less than half its declared speed; restore where ranks stand unused though well, after
    the stay that a fall-back lasts at least."""
    rows: list[tuple[Command, tuple[float, ...]]] = []
    for g, (group, plan, factors) in enumerate(zip(groups, plans, health.speed_factors, strict=True)):
        if len(group.ranks) < 2 or not view.is_up[g]:
            continue
        used = np.array(plan.query_heads) + np.array(plan.mlp_blocks) > 0
        mix = current_mix(view, g)
        if factors[used].min(initial=1.0) < 0.5:
            try:
                other = fallback_plan(group, factors)
            except split_planner.InfeasibleSplit:
                continue
            command = Command(CommandKind.FALL_BACK, g)
        elif not used.all() and (factors[~used] > 0.5).all() and (health.may_restore is None or health.may_restore[g]):
            other = split_planner.corner_plan(group, "planner", mix, speed_factors=np.array(_rounded(factors)))
            command = Command(CommandKind.RESTORE, g)
        else:
            continue
        before_s = _step_s(group, plan, mix, _rounded(factors))
        after_s = _step_s(group, other, mix, _rounded(factors))
        everyone = np.log1p(float(view.running[g] + view.waiting[g]))
        rows.append((command, (_gain(before_s, after_s), np.log1p(health.rebuild_s), everyone, 0.0, 0.0)))
    return rows
