"""The simulated groups: kernel state and the hardware, plans and health behind it.

Holds two sets of coefficients side by side: the world's (residual tables, interference, faults) and the schedulers'
(plain roofline), so that nobody plans with the truth.
"""

from __future__ import annotations

import numpy as np

from envs.cluster.world import WorldOptions
from envs.decision import group_model, split_planner
from envs.decision.group_model import GroupModel
from envs.domain.plans import SplitPlan, TpGroup
from envs.domain.snapshot import BoolArray, FloatArray
from envs.group_kernel import kv_pool
from envs.group_kernel import layout as L
from envs.group_kernel.engine_habits import write_habits
from envs.perf_model import group_cost
from envs.perf_model import step_time as ST
from envs.perf_model.memory_fit import Overlap
from envs.scenario.cluster_spec import ClusterSpec

(PARKED, DRAINING, LOST, DETECTED_DOWN) = range(4)
HEALTH_FLAGS = 4


def _flag(row: int, meaning: str) -> property:
    def read(self: GroupHealth) -> bool:
        return bool(self.flags[row])

    def write(self: GroupHealth, value: bool) -> None:
        self.flags[row] = value

    return property(read, write, doc=meaning)


class GroupHealth:
    """What is true of one group's hardware now; schedulers see only what was detected of it.

    flags: this group's column of `GroupSet.flags`, shape (HEALTH_FLAGS,), so that a snapshot reads all groups at once.
    rank_losses (ranks,), group_losses: noticed losses of a rank and losses of the whole group that are not yet over;
    faults may overlap, and only the end of the last one heals. unnoticed: losses that nobody has detected yet.
    is_gone: its ranks were given to another group. fell_back_s: when it last fell back to fewer ranks. link_slow, host_slow:
    factors on times, 1 = nominal.
    """

    is_parked = _flag(PARKED, "holds its hardware but serves nobody")
    is_draining = _flag(DRAINING, "takes no new requests; parked when empty")
    is_lost = _flag(LOST, "dead in truth, noticed or not")
    detected_down = _flag(DETECTED_DOWN, "known to be dead")

    def __init__(self, ranks: int, flags: BoolArray) -> None:
        self.flags = flags
        self.rank_losses = np.zeros(ranks, np.int64)
        self.group_losses = 0
        self.unnoticed = 0
        self.is_starting = False
        self.is_gone = False
        self.fell_back_s = -np.inf
        self.link_slow = 1.0
        self.host_slow = 1.0
        self.slow_compute = np.ones(ranks)
        self.slow_memory = np.ones(ranks)

    @property
    def rank_is_lost(self) -> BoolArray:
        return self.rank_losses > 0


class GroupSet:
    """Kernel state of every group of a cluster, built from specs; changes of plan, speed and health go through here."""

    def __init__(self, cluster: ClusterSpec, options: WorldOptions, prefix_offset: np.ndarray, prefix_ids: np.ndarray) -> None:
        self.options = options
        self.limits = cluster.limits
        self.groups: list[TpGroup] = list(cluster.groups)
        count = len(self.groups)
        self.ranks_max = max(len(group.ranks) for group in self.groups)
        slots = cluster.limits.max_running + cluster.limits.queue_limit
        self.state = L.allocate(count, self.ranks_max, slots, prefix_offset, prefix_ids)
        self.model = GroupModel(self.state)  # what schedulers believe
        self.plans: list[SplitPlan] = []
        self.slot_plans: list[list[SplitPlan]] = []  # of each group, the plan in each of its two plan slots
        self.corners = np.full(count, split_planner.CORNERS.index(options.start_corner), np.int64)
        self.flags = np.zeros((HEALTH_FLAGS, count), np.bool_)
        self.health = [GroupHealth(len(group.ranks), self.flags[:, g]) for g, group in enumerate(self.groups)]
        self.interference = np.ones(count)
        self.kv_tokens = np.zeros(count, np.int64)  # tokens of KV of an empty group under the plan in force
        self.kv_tokens_min = 0
        write_habits(self.state, options, cluster.limits.max_running, cluster.limits.kv_block_tokens)
        self.state.group_float[:, L.GF_RETURN_S] = options.return_s
        for g in range(count):
            self.health[g].is_parked = cluster.parked[g]
            self.state.group_int[g, L.GI_UP] = 0 if cluster.parked[g] else 1
            self.plans.append(self.plan_for(g, options.start_corner))
            self.slot_plans.append([self.plans[g]] * 2)
            self._write_group(g)
            self.write_plan(g, 0, self.plans[g])
            self._fit_memory(g)

    def set_prefix_block_tokens(self, tokens: int) -> None:
        """Tokens of one prefix block of the trace."""
        self.state.group_int[:, L.GI_CACHE_BLOCK_TOKENS] = max(1, tokens)

    def plan_for(self, g: int, corner: str, speed_factors: FloatArray | None = None) -> SplitPlan:
        """Plan of one corner for group `g`, over its healthy ranks. Raises InfeasibleSplit when the model does not fit."""
        factors = np.ones(len(self.groups[g].ranks)) if speed_factors is None else np.array(speed_factors, np.float64)
        factors[self.health[g].rank_is_lost] = 0.0
        return group_model.planned(self.groups[g], corner, tuple(factors.tolist()))

    def overlap(self, g: int) -> Overlap:
        """What group `g`'s ranks hold beyond their shares: none where even one head more would not fit."""
        return group_model.overlap(self.groups[g], self.plans[g], self.options.memory_fraction)

    def _write_group(self, g: int) -> None:
        group = self.groups[g]
        self.model.write_group(g, group)
        row = group_model.group_row(group).copy()
        row[ST.GC_INTERFERENCE] = self.interference[g]
        row[ST.GC_LINK_SLOW], row[ST.GC_HOST_SLOW] = self.health[g].link_slow, self.health[g].host_slow
        self.state.group_cost[g] = row
        if self.options.use_residual_tables:
            self.state.residual[g, : len(group.ranks)] = group_cost.residual_rows(group)

    def write_plan(self, g: int, slot: int, plan: SplitPlan) -> None:
        """Put `plan`'s coefficients and KV block sizes into plan slot `slot` of group `g`."""
        group = self.groups[g]
        self.slot_plans[g][slot] = plan
        ranks = len(group.ranks)
        self.state.rank_cost[g, slot] = 0.0
        self.state.rank_cost[g, slot, :ranks] = group_model.rank_rows(group, plan, self.options.use_residual_tables)
        self.model.write_plan(g, slot, group, plan)
        self.state.kv_block_bytes[g, slot] = 0.0
        self.state.kv_block_bytes[g, slot, :ranks] = group_model.kv_bytes_per_token(group, plan) * self.limits.kv_block_tokens

    def _fit_memory(self, g: int) -> None:
        """Bytes left for KV on each rank: usable memory less weights and workspace of the plan in force."""
        group, plan = self.groups[g], self.plans[g]
        self.state.kv_bytes[g] = 0.0
        self.state.kv_bytes[g, : len(group.ranks)] = group_model.kv_bytes(group, plan, self.options.memory_fraction)
        if self.limits.kv_blocks is not None:  # a declared pool, as in tests of tiny caches
            cap = self.limits.kv_blocks * self.state.kv_block_bytes[g, self.state.group_int[g, L.GI_PLAN]]
            self.state.kv_bytes[g] = cap
        slot = int(self.state.group_int[g, L.GI_PLAN])
        self.kv_tokens[g] = int(kv_pool.total_blocks(self.state, g, slot)) * self.limits.kv_block_tokens
        self.kv_tokens_min = int(self.kv_tokens.min())

    def switch_plan(self, g: int, plan: SplitPlan, corner: int) -> None:
        """Make `plan` the one for new requests; residents keep theirs. The caller has moved a third plan's KV and paid."""
        slot = 1 - int(self.state.group_int[g, L.GI_PLAN])
        self.plans[g] = plan
        self.corners[g] = corner
        self.write_plan(g, slot, plan)
        self.state.group_int[g, L.GI_PLAN] = slot
        self._fit_memory(g)

    def rebuild(self, g: int, group: TpGroup, plan: SplitPlan, corner: int) -> None:
        """New ranks or new hardware behind group `g`; only while nobody is running in it."""
        self.groups[g] = group
        self.plans[g] = plan
        self.corners[g] = corner
        self._write_group(g)
        for slot in (0, 1):
            self.write_plan(g, slot, plan)
        self._fit_memory(g)
        self.apply_speed(g)

    def apply_speed(self, g: int) -> None:
        """Write the true slow-downs of group `g` into the kernel."""
        health = self.health[g]
        self.state.group_cost[g, [ST.GC_LINK_SLOW, ST.GC_HOST_SLOW]] = health.link_slow, health.host_slow
        ranks = len(self.groups[g].ranks)
        self.state.slow[g, :ranks, 0] = health.slow_compute
        self.state.slow[g, :ranks, 1] = health.slow_memory
