"""Carrying out split and rebalance commands in the simulated world, each at its price."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import numpy as np

from envs.cluster import fault_process
from envs.decision import split_planner
from envs.decision.move_candidates import DeclaredHealth, fallback_plan, planned_split, switch_price_s
from envs.decision.move_prices import copy_s, recompute_s
from envs.domain.commands import Command, CommandKind
from envs.domain.plans import SplitPlan
from envs.group_kernel import layout as L
from envs.group_kernel.jump import cut_jump
from envs.group_kernel.plan_switch import move_older_residents, older_blocks, pause_group
from envs.group_kernel.prefix_cache import flush_idle

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
        if command.kind is not CommandKind.SCALE_OUT and self._cluster.groups.health[command.group_index].is_lost:
            return  # it died unnoticed a moment ago: the command reaches nobody
        handlers[command.kind](command)

    def declared_health(self) -> DeclaredHealth:
        """What the control plane knows of each group: parked, draining, and the ranks' measured speed factors."""
        groups, telemetry = self._cluster.groups, self._cluster.telemetry
        return DeclaredHealth(
            is_parked=np.array([h.is_parked and not (h.is_starting or h.detected_down or h.is_gone) for h in groups.health]),
            is_draining=np.array([h.is_draining for h in groups.health]),
            speed_factors=tuple(telemetry.speed_factors(g) for g in range(len(groups.groups))),
            cold_start_s=self._cluster.options.cold_start_s,
            rebuild_s=self._cluster.options.rebuild_s,
            overlaps=tuple(groups.overlap(g) for g in range(len(groups.groups))),
            older=tuple(self._older(g) for g in range(len(groups.groups))),
            may_restore=self._cluster.env.now >= np.array([h.fell_back_s for h in groups.health]) + self._cluster.options.fall_back_stay_s,
        )

    def _older(self, g: int) -> tuple[SplitPlan, int]:
        """The plan in the other plan slot of group `g` and the KV tokens of the residents that still use it."""
        groups, state = self._cluster.groups, self._cluster.state
        other = 1 - int(state.group_int[g, L.GI_PLAN])
        return groups.slot_plans[g][other], older_blocks(state, g) * groups.limits.kv_block_tokens

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
        pause_group(self._cluster.state, g, self._cluster.env.now, seconds)
        self.pause_s += seconds

    def _set_split(self, command: Command) -> None:
        g = command.group_index
        corner = split_planner.CORNERS[command.argument]
        plan = self._plan_now(g, corner)
        if plan is None:
            return  # listed by somebody else: no such plan exists now
        self._switch(g, plan, command.argument)
        self._cluster.put_back_misfits(g)

    def _plan_now(self, g: int, corner: str) -> SplitPlan | None:
        """The plan that the candidate list has priced: for the present mix and the measured speeds."""
        factors = self.declared_health().speed_factors[g]
        return planned_split(self._cluster.view(), g, self._cluster.groups.groups[g], corner, factors)

    def _switch(self, g: int, plan: SplitPlan, corner: int) -> None:
        """New requests get `plan`. Before a third plan lives, the oldest's requests move their KV; both moves are paid."""
        groups, state = self._cluster.groups, self._cluster.state
        price_s = switch_price_s(groups.groups[g], groups.plans[g], plan, groups.overlap(g), self._older(g))
        move_older_residents(state, g)
        self._pause(g, price_s)
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
        cut_jump(cluster.state, g, cluster.env.now)
        stop_at_boundary = cluster.state.group_float[g, L.GF_JUMP_END_S] if cluster.state.group_int[g, L.GI_JUMP_ACTIVE] else 0.0
        cluster.env.process(self._transfer(command, stop_at_boundary))

    def _slot_of(self, g: int, request_id: int) -> int:
        for slot in self._cluster.state.running[g, : self._cluster.state.group_int[g, L.GI_RUNNING]]:
            if self._cluster.state.slot_int[g, slot, L.SI_REQUEST] == request_id:
                return int(slot)
        return -1

    def _transfer(self, command: Command, boundary_s: float) -> Generator[Any, Any, None]:
        """simpy process: at the step boundary take the request out, copy its KV over the outer link, queue it at the target."""
        cluster, g, target = self._cluster, command.group_index, command.target_index
        yield from cluster.wait_until(boundary_s)
        cluster.settle()
        slot = self._slot_of(g, command.argument)
        if slot < 0:
            return
        held: Held = cluster.extract(g, slot)
        assert held.rows is not None
        kv_tokens = int(held.rows[0][L.SI_DONE])
        price_s = copy_s(cluster.groups.groups[g], kv_tokens, self.transfers)
        carries = not cluster.groups.health[g].is_lost and price_s < recompute_s(cluster.state, target, kv_tokens)
        self.transfers += 1
        yield cluster.env.timeout(price_s if carries else 0.0)
        self.transfers -= 1
        cluster.settle()
        health = cluster.groups.health[target]
        is_open = not (health.is_parked or health.detected_down or health.is_lost or health.is_draining)
        goal = int(held.rows[0][L.SI_PROMPT] + held.rows[0][L.SI_GENERATED])
        kept = min(kv_tokens, goal - 1) if carries else 0
        if not (is_open and cluster.fits(held.request.request_id)[target] and cluster.enter(held, target, kept)):
            cluster.put_back(held, is_retry=False)

    def _scale_out(self, command: Command) -> None:
        self._cluster.groups.health[command.group_index].is_starting = True
        self._cluster.env.process(self._cold_start(command.group_index))

    def _cold_start(self, g: int) -> Generator[Any, Any, None]:
        yield self._cluster.env.timeout(self._cluster.options.cold_start_s)
        self._cluster.settle()
        health = self._cluster.groups.health[g]
        health.is_starting = False
        if health.is_gone:
            return
        fault_process.start(self._cluster, g, 0.0)
        self._cluster.ask_held_again()

    def _scale_in(self, command: Command) -> None:
        """Drain: no new requests; waiting ones go elsewhere; parked at a tick when empty."""
        self._cluster.groups.health[command.group_index].is_draining = True
        self._requeue(command)

    def _fall_back(self, command: Command) -> None:
        """Continue on the smallest subset of ranks that fits the model, serially if that is one."""
        groups, g = self._cluster.groups, command.group_index
        speeds = self.declared_health().speed_factors[g]
        plan = fallback_plan(groups.groups[g], speeds)
        groups.health[g].fell_back_s = self._cluster.env.now
        fault_process.restart(self._cluster, g, groups.groups[g], plan)

    def _restore(self, command: Command) -> None:
        groups, g = self._cluster.groups, command.group_index
        plan = self._plan_now(g, "planner")
        if plan is not None:
            fault_process.restart(self._cluster, g, groups.groups[g], plan)

    def _regroup(self, command: Command) -> None:
        """The parked donor's ranks join the target; the donor is gone for good."""
        groups = self._cluster.groups
        merged = groups.groups[command.target_index].with_ranks_of(groups.groups[command.group_index])
        if len(merged.ranks) > groups.ranks_max:
            return  # masked; a command from elsewhere changes nothing
        health, gives = groups.health[command.target_index], groups.health[command.group_index]
        if health.is_lost or gives.is_gone or not gives.is_parked:
            return
        health.rank_losses = np.concatenate([health.rank_losses, gives.rank_losses])
        health.slow_compute = np.concatenate([health.slow_compute, gives.slow_compute])
        health.slow_memory = np.concatenate([health.slow_memory, gives.slow_memory])
        gives.is_gone, gives.is_parked, gives.detected_down = True, False, True
        groups.groups[command.target_index] = merged
        self._cluster.telemetry.ranks.forget(command.target_index)
        plan = groups.plan_for(command.target_index, self._cluster.options.start_corner)
        fault_process.restart(self._cluster, command.target_index, merged, plan)
