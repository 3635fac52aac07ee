"""One emulated group's kernel state: what `envs.group_kernel` advances in real time, filled as the simulated world fills its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from envs.decision import group_model
from envs.decision.move_candidates import switch_price_s
from envs.domain.plans import SplitPlan, TpGroup
from envs.group_kernel import kv_pool
from envs.group_kernel import layout as L
from envs.group_kernel.engine_habits import EngineHabits, write_habits
from envs.group_kernel.plan_switch import move_older_residents, older_blocks, pause_group
from envs.group_kernel.prefix_cache import flush_idle
from envs.perf_model import group_cost
from envs.perf_model import step_time as ST
from envs.scenario.cluster_spec import ClusterLimits


@dataclass(frozen=True, slots=True)
class KernelSettings(EngineHabits):
    """An emulated engine. use_residual_tables: as in the simulated world; corner: of the plan that its group starts with."""

    use_residual_tables: bool = True
    corner: str = "planner"


def plan_of(group: TpGroup, corner: str) -> SplitPlan:
    """The plan that a group starts with: of the corner, over all of its ranks."""
    return group_model.planned(group, corner, (1.0,) * len(group.ranks))


def kernel_of(group: TpGroup, limits: ClusterLimits, settings: KernelSettings, now_s: float) -> L.KernelState:
    """State of the one group, empty, its clock at `now_s`."""
    ranks, plan = len(group.ranks), plan_of(group, settings.corner)
    state = L.allocate(1, ranks, limits.max_running + limits.queue_limit)
    write_habits(state, settings, limits.max_running, limits.kv_block_tokens)
    state.group_float[0, L.GF_CLOCK_S] = now_s
    state.predicted_group_cost[0] = state.group_cost[0] = group_model.group_row(group)
    if settings.use_residual_tables:
        state.residual[0, :ranks] = group_cost.residual_rows(group)
    for slot in (1, 0):
        _write_plan(state, slot, group, plan, limits, settings)
    return state


def _write_plan(state: L.KernelState, slot: int, group: TpGroup, plan: SplitPlan, limits: ClusterLimits, settings: KernelSettings) -> None:
    """Put `plan` into a plan slot and let new calls get it; the pool is what it leaves."""
    ranks = len(group.ranks)
    state.rank_cost[0, slot, :ranks] = group_model.rank_rows(group, plan, settings.use_residual_tables)
    state.predicted_rank_cost[0, slot, :ranks] = group_model.rank_rows(group, plan, False)
    state.kv_block_bytes[0, slot, :ranks] = group_model.kv_bytes_per_token(group, plan) * limits.kv_block_tokens
    state.group_int[0, L.GI_PLAN] = slot
    if limits.kv_blocks is not None:
        state.kv_bytes[0] = limits.kv_blocks * state.kv_block_bytes[0, slot]
    else:
        state.kv_bytes[0, :ranks] = group_model.kv_bytes(group, plan, settings.memory_fraction)


class PlanSlots:
    """The plans that an emulated group lives by: the present one and the one before, whose residents may still be inside."""

    def __init__(self, state: L.KernelState, group: TpGroup, limits: ClusterLimits, settings: KernelSettings) -> None:
        self._state, self._group, self._limits, self._settings = state, group, limits, settings
        self._slots = [plan_of(group, settings.corner)] * 2
        self.version = 1

    @property
    def current(self) -> SplitPlan:
        return self._slots[int(self._state.group_int[0, L.GI_PLAN])]

    def switch(self, plan: SplitPlan, now_s: float) -> float:
        """New calls get `plan`; a third plan waits for nobody: the oldest's residents move first, and both moves are paid by a pause.
        Returns: the pause, s."""
        state, other = self._state, 1 - int(self._state.group_int[0, L.GI_PLAN])
        window = group_model.overlap(self._group, self.current, self._settings.memory_fraction)
        older = self._slots[other], older_blocks(state, 0) * self._limits.kv_block_tokens
        price_s = switch_price_s(self._group, self.current, plan, window, older)
        move_older_residents(state, 0)
        pause_group(state, 0, now_s, price_s)
        flush_idle(state, 0)
        self._slots[other] = plan
        _write_plan(state, other, self._group, plan, self._limits, self._settings)
        self.version += 1
        return price_s


def kv_tokens(state: L.KernelState) -> int:
    """Tokens that the empty pool holds."""
    return int(kv_pool.total_blocks(state, 0, int(state.group_int[0, L.GI_PLAN]))) * int(state.group_int[0, L.GI_BLOCK_TOKENS])


def slow_down(state: L.KernelState, compute: Sequence[float], memory: Sequence[float]) -> None:
    """Let the ranks' compute and memory take so many times as long, for drills."""
    state.slow[0, :, 0] = np.asarray(compute)
    state.slow[0, :, 1] = np.asarray(memory)


def measured_times(state: L.KernelState, g: int, tokens: int, pairs: float, kv: int) -> np.ndarray:
    """Attention and MLP seconds of every rank in a step of that size, (ranks, 2), as the emulated hardware has it."""
    times = np.zeros((state.slow.shape[1], 2))
    plan = int(state.group_int[g, L.GI_PLAN])
    ST.rank_times(g, state.rank_cost, state.group_cost, state.residual, state.slow, plan, tokens, pairs, kv, times)
    return times
