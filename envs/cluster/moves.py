"""Carrying out split and rebalance commands in the simulated world, each at its price."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import numpy as np

from envs.cluster import fault_process
from envs.decision import split_planner
from envs.decision.move_candidates import DeclaredHealth, fallback_plan
from envs.domain.commands import Command, CommandKind
from envs.domain.plans import SplitPlan, TpGroup
from envs.group_kernel import layout as L
from envs.group_kernel.advance import cut_jump, stop_group
from envs.group_kernel.prefix_cache import flush_idle
from envs.group_kernel.queue import enqueue_row, preempt

if TYPE_CHECKING:
    from envs.cluster.cluster_process import ClusterProcess, Held


class Moves:
    """Executes commands; counts them, and keeps the bulk transfers under way so that they share their links."""

    def __init__(self, cluster: ClusterProcess) -> None:
        self._cluster = cluster
        self.transfers = 0  # bulk moves under way on the outer links
        self.counts: dict[str, int] = {kind.name.lower(): 0 for kind in CommandKind}
        self.pause_s = 0.0

    def apply(self, command: Command) -> None:
        """Carry out a split or rebalance command now; raises KeyError for kinds that are not such."""
        handlers = {
            CommandKind.SET_SPLIT: self._set_split,
            CommandKind.REQUEUE: self._requeue,
            CommandKind.MIGRATE: self._migrate,
            CommandKind.SCALE_OUT: self._scale_out,
            CommandKind.SCALE_IN: self._scale_in,
            CommandKind.FALL_BACK: self._fall_back,
            CommandKind.RESTORE: self._restore,
            CommandKind.REGROUP: self._regroup,
        }
        self.counts[command.kind.name.lower()] += 1
        handlers[command.kind](command)

    def declared_health(self) -> DeclaredHealth:
        """What the control plane knows of each group: parked, draining, and the ranks' measured speed factors."""
        groups = self._cluster.groups
        speeds = []
        for g in range(len(groups.groups)):
            measured = groups.rank_times_s(g, 16, 0.0, 16 * 1024, truth=True).sum(axis=1)
            predicted = groups.rank_times_s(g, 16, 0.0, 16 * 1024, truth=False).sum(axis=1)
            idle = predicted <= 0
            factor = np.where(idle, 1.0, predicted / np.where(measured > 0, measured, 1.0))
            factor[groups.health[g].rank_is_lost] = 0.0
            speeds.append(factor)
        return DeclaredHealth(
            is_parked=np.array([h.is_parked for h in groups.health]),
            is_draining=np.array([h.is_draining for h in groups.health]),
            speed_factors=tuple(speeds),
            cold_start_s=self._cluster.options.cold_start_s,
            rebuild_s=self._cluster.options.rebuild_s,
        )

    def tick(self) -> None:
        """Park groups that have drained."""
        for g, health in enumerate(self._cluster.groups.health):
            ints = self._cluster.state.group_int[g]
            if health.is_draining and ints[L.GI_RUNNING] + ints[L.GI_WAITING] == 0:
                health.is_draining = False
                health.is_parked = True
                ints[L.GI_UP] = 0

    def _pause(self, g: int, seconds: float) -> None:
        """Stop group `g` for `seconds` from its next step boundary."""
        state, now_s = self._cluster.state, self._cluster.env.now
        cut_jump(state, g, now_s)
        start_s = max(now_s, state.group_float[g, L.GF_CLOCK_S])
        if state.group_int[g, L.GI_JUMP_ACTIVE]:
            start_s = state.group_float[g, L.GF_JUMP_END_S]
        floats = state.group_float[g]
        floats[L.GF_PAUSED_UNTIL_S] = max(floats[L.GF_PAUSED_UNTIL_S], start_s) + seconds
        self.pause_s += seconds

    def _set_split(self, command: Command) -> None:
        g = command.group_index
        corner = split_planner.CORNERS[command.argument]
        groups = self._cluster.groups
        factors = self.declared_health().speed_factors[g] if corner == "planner" else None
        plan = groups.plan_for(g, corner, factors)
        self._switch(g, plan, command.argument)

    def _switch(self, g: int, plan: SplitPlan, corner: int) -> None:
        """New requests get `plan`. Before a third plan lives, the oldest's requests move their KV; both moves are paid."""
        groups, state = self._cluster.groups, self._cluster.state
        oldest = 1 - int(state.group_int[g, L.GI_PLAN])
        kv_tokens = int(state.group_int[g, L.GI_USED_BLOCKS0 + oldest]) * groups.limits.kv_block_tokens
        overlap = groups.overlap(g)
        price = split_planner.resplit_price(groups.groups[g], groups.plans[g], plan, overlap, kv_tokens=kv_tokens)
        current = int(state.group_int[g, L.GI_PLAN])
        other = 1 - current
        if state.group_int[g, L.GI_USED_BLOCKS0 + other] > 0:
            for slot in state.running[g, : state.group_int[g, L.GI_RUNNING]]:
                state.slot_int[g, slot, L.SI_PLAN] = current
            state.group_int[g, L.GI_USED_BLOCKS0 + current] += state.group_int[g, L.GI_USED_BLOCKS0 + other]
            state.group_int[g, L.GI_USED_BLOCKS0 + other] = 0
        self._pause(g, price.transfer_s)
        flush_idle(state, g)
        groups.switch_plan(g, plan, corner)

    def _requeue(self, command: Command) -> None:
        for slot in list(self._cluster.residents(command.group_index, waiting_only=True)):
            self._cluster.put_back(self._cluster.extract(command.group_index, slot), is_retry=False)

    def _migrate(self, command: Command) -> None:
        """Move the running request `argument` (its request id): KV copied or recomputed, whichever is cheaper."""
        cluster, g = self._cluster, command.group_index
        slot = self._slot_of(g, command.argument)
        if slot < 0:
            return  # it ended since the candidates were listed
        kv_tokens = int(cluster.state.slot_int[g, slot, L.SI_DONE])
        cut_jump(cluster.state, g, cluster.env.now)
        stop_at_boundary = cluster.state.group_float[g, L.GF_JUMP_END_S] if cluster.state.group_int[g, L.GI_JUMP_ACTIVE] else 0.0
        cluster.env.process(self._transfer(command, kv_tokens, max(stop_at_boundary, cluster.env.now)))

    def _slot_of(self, g: int, request_id: int) -> int:
        for slot in self._cluster.state.running[g, : self._cluster.state.group_int[g, L.GI_RUNNING]]:
            if self._cluster.state.slot_int[g, slot, L.SI_REQUEST] == request_id:
                return int(slot)
        return -1

    def _transfer(self, command: Command, kv_tokens: int, boundary_s: float) -> Generator[Any, Any, None]:
        """simpy process: at the step boundary take the request out, copy its KV over the outer link, queue it at the target."""
        cluster, g, target = self._cluster, command.group_index, command.target_index
        yield cluster.env.timeout(max(0.0, boundary_s - cluster.env.now))
        cluster.settle()
        slot = self._slot_of(g, command.argument)
        if slot < 0:
            return
        held: Held = cluster.extract(g, slot)
        assert held.rows is not None
        copy_s = self.copy_s(g, kv_tokens)
        recompute_s = kv_tokens * float(cluster.state.predicted_rank_cost[target, 0].sum(axis=1).max())
        carries = copy_s < recompute_s or recompute_s <= 0
        self.transfers += 1
        yield cluster.env.timeout(copy_s if carries else 0.0)
        self.transfers -= 1
        cluster.settle()
        health = cluster.groups.health[target]
        if health.is_parked or health.detected_down or health.is_lost:
            cluster.put_back(held, is_retry=False)
            return
        goal = int(held.rows[0][L.SI_PROMPT] + held.rows[0][L.SI_GENERATED])
        kept = min(kv_tokens, goal - 1) if carries else 0
        if enqueue_row(cluster.state, target, cluster.env.now, *held.rows, kept) < 0:
            cluster.put_back(held, is_retry=False)
            return
        cut_jump(cluster.state, target, cluster.env.now)

    def copy_s(self, g: int, kv_tokens: int) -> float:
        """Seconds to copy the KV of `kv_tokens` out of group `g`; transfers under way share the link."""
        group = self._cluster.groups.groups[g]
        link = group.outer_link
        return link.alpha_s + kv_tokens * group.model.kv_bytes_per_token * link.beta_s_per_byte * (1 + self.transfers)

    def _scale_out(self, command: Command) -> None:
        self._cluster.env.process(self._cold_start(command.group_index))

    def _cold_start(self, g: int) -> Generator[Any, Any, None]:
        yield self._cluster.env.timeout(self._cluster.options.cold_start_s)
        self._cluster.settle()
        fault_process.start(self._cluster, g, 0.0)
        self._cluster.ask_held_again()

    def _scale_in(self, command: Command) -> None:
        """Drain: no new requests; waiting ones go elsewhere; parked at a tick when empty."""
        self._cluster.groups.health[command.group_index].is_draining = True
        self._requeue(command)

    def _restart_with(self, g: int, group: TpGroup, plan: SplitPlan) -> None:
        """Rebuild a living group at once: everybody inside recomputes after the pause."""
        cluster = self._cluster
        stop_group(cluster.state, g, cluster.env.now)
        for slot in list(cluster.state.running[g, : cluster.state.group_int[g, L.GI_RUNNING]]):
            preempt(cluster.state, g, int(slot), cluster.env.now)
        flush_idle(cluster.state, g)
        cluster.groups.rebuild(g, group, plan, int(cluster.groups.corners[g]))
        fault_process.start(cluster, g, cluster.options.rebuild_s)

    def _fall_back(self, command: Command) -> None:
        """Continue on the smallest subset of ranks that fits the model, serially if that is one."""
        groups, g = self._cluster.groups, command.group_index
        speeds = self.declared_health().speed_factors[g]
        plan = fallback_plan(groups.groups[g], speeds)
        self._restart_with(g, groups.groups[g], plan)

    def _restore(self, command: Command) -> None:
        groups, g = self._cluster.groups, command.group_index
        plan = groups.plan_for(g, self._cluster.options.start_corner)
        self._restart_with(g, groups.groups[g], plan)

    def _regroup(self, command: Command) -> None:
        """The parked donor's ranks join the target; the donor is gone for good."""
        groups = self._cluster.groups
        donor, target = groups.groups[command.group_index], groups.groups[command.target_index]
        merged = TpGroup(
            target.name, target.model, target.ranks + donor.ranks, target.inner_link, target.outer_link,
            min(target.host_speed, donor.host_speed),
        )  # fmt: skip
        if len(merged.ranks) > groups.ranks_max:
            return  # masked; a command from elsewhere changes nothing
        health = groups.health[command.target_index]
        health.rank_is_lost = np.concatenate([health.rank_is_lost, np.zeros(len(donor.ranks), np.bool_)])
        health.slow_compute = np.concatenate([health.slow_compute, np.ones(len(donor.ranks))])
        health.slow_memory = np.concatenate([health.slow_memory, np.ones(len(donor.ranks))])
        groups.health[command.group_index].is_lost = True
        groups.groups[command.target_index] = merged
        self._restart_with(command.target_index, merged, groups.plan_for(command.target_index, self._cluster.options.start_corner))
