"""One emulated group's kernel state: what `envs.group_kernel` advances in real time, filled as the simulated world fills its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from envs.decision import group_model
from envs.domain.plans import SplitPlan, TpGroup
from envs.group_kernel import kv_pool
from envs.group_kernel import layout as L
from envs.perf_model import group_cost
from envs.perf_model import step_time as ST
from envs.scenario.cluster_spec import ClusterLimits


@dataclass(frozen=True, slots=True)
class KernelSettings:
    """Habits of an emulated engine; as `WorldOptions` of the simulated world, times in s, sizes in tokens."""

    chunk_tokens_max: int = 2048
    chunk_tokens_min: int = 256
    batch_min: int = 8
    tpot_margin: float = 0.9
    preemption_limit: int = 32
    queue_timeout_s: float = 120.0
    memory_fraction: float = 0.9
    use_residual_tables: bool = True
    corner: str = "planner"


def plan_of(group: TpGroup, corner: str) -> SplitPlan:
    """The plan that a group starts with: of the corner, over all of its ranks."""
    return group_model.planned(group, corner, (1.0,) * len(group.ranks))


def kernel_of(group: TpGroup, limits: ClusterLimits, settings: KernelSettings, now_s: float) -> L.KernelState:
    """State of the one group, empty, its clock at `now_s`."""
    ranks, plan = len(group.ranks), plan_of(group, settings.corner)
    state = L.allocate(1, ranks, limits.max_running + limits.queue_limit)
    ints, floats = state.group_int[0], state.group_float[0]
    for column, value in (
        (L.GI_RUNNING_LIMIT, limits.max_running),
        (L.GI_CHUNK_MAX, settings.chunk_tokens_max),
        (L.GI_CHUNK_MIN, settings.chunk_tokens_min),
        (L.GI_BATCH_MIN, settings.batch_min),
        (L.GI_BLOCK_TOKENS, limits.kv_block_tokens),
        (L.GI_CACHE_BLOCK_TOKENS, limits.kv_block_tokens),
        (L.GI_PREEMPTION_LIMIT, settings.preemption_limit),
    ):
        ints[column] = value
    floats[L.GF_CLOCK_S] = now_s
    floats[L.GF_QUEUE_TIMEOUT_S] = settings.queue_timeout_s
    floats[L.GF_TPOT_MARGIN] = settings.tpot_margin
    state.predicted_group_cost[0] = state.group_cost[0] = group_model.group_row(group)
    state.rank_cost[0, :, :ranks] = group_model.rank_rows(group, plan, settings.use_residual_tables)
    state.predicted_rank_cost[0, :, :ranks] = group_model.rank_rows(group, plan, False)
    if settings.use_residual_tables:
        state.residual[0, :ranks] = group_cost.residual_rows(group)
    state.kv_block_bytes[0, :, :ranks] = group_model.kv_bytes_per_token(group, plan) * limits.kv_block_tokens
    if limits.kv_blocks is not None:
        state.kv_bytes[0] = limits.kv_blocks * state.kv_block_bytes[0, 0]
    else:
        state.kv_bytes[0, :ranks] = group_model.kv_bytes(group, plan, settings.memory_fraction)
    return state


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
