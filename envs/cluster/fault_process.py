"""How a fault strikes a simulated world, when it is noticed, and how its victims recover."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from envs.cluster.faults import FaultEvent, FaultKind
from envs.decision import detection
from envs.decision.split_planner import InfeasibleSplit
from envs.group_kernel import layout as L
from envs.group_kernel.advance import stop_group
from envs.group_kernel.jump import cut_jump
from envs.group_kernel.prefix_cache import flush_idle
from envs.group_kernel.queue import preempt

if TYPE_CHECKING:
    from envs.cluster.cluster_process import ClusterProcess
    from envs.domain.plans import SplitPlan, TpGroup


def strike(cluster: ClusterProcess, fault: FaultEvent) -> Generator[Any, Any, None]:
    """simpy process of one fault: wait for its start, apply it, undo it at its end. The world begins at its first arrival: a
    fault that is over by then is noted and strikes nobody, one under way lasts for the rest of its time."""
    late_s = cluster.env.now - fault.start_s
    if late_s > 0:
        if late_s >= fault.length_s:
            cluster.log.note(cluster.env.now, f"fault_over:{fault.kind.name}", fault.group_index, fault.rank_index)
            return
        fault = replace(fault, start_s=cluster.env.now, length_s=fault.length_s - late_s)
    yield cluster.env.timeout(fault.start_s - cluster.env.now)
    cluster.settle()
    cluster.log.note(cluster.env.now, f"fault:{fault.kind.name}", fault.group_index, fault.rank_index)
    health = cluster.groups.health[fault.group_index]
    if health.is_parked or health.is_lost or health.is_gone:
        return
    if fault.kind in (FaultKind.LOST_RANK, FaultKind.LOST_GROUP):
        yield from _lose(cluster, fault)
    else:
        _set_slow(cluster, fault, fault.size)
        yield cluster.env.timeout(fault.length_s)
        cluster.settle()
        _set_slow(cluster, fault, 1.0 / fault.size)


def _set_slow(cluster: ClusterProcess, fault: FaultEvent, factor: float) -> None:
    """Multiply a speed by `factor`; the step under way still ends at its old speed."""
    g = fault.group_index
    cut_jump(cluster.state, g, cluster.env.now)
    health = cluster.groups.health[g]
    if fault.kind is FaultKind.SLOW_LINK:
        health.link_slow *= factor
    elif fault.kind is FaultKind.SLOW_HOST:
        health.host_slow *= factor
    else:
        speeds = health.slow_compute if fault.kind is FaultKind.SLOW_COMPUTE else health.slow_memory
        chosen = slice(None) if fault.rank_index < 0 else fault.rank_index
        speeds[chosen] *= factor
    cluster.groups.apply_speed(g)


def _lose(cluster: ClusterProcess, fault: FaultEvent) -> Generator[Any, Any, None]:
    """Stop the group now; after the detection delay go on with the survivors or send everybody elsewhere; return later."""
    g = fault.group_index
    health = cluster.groups.health[g]
    stop_group(cluster.state, g, cluster.env.now)
    health.is_lost = True
    health.unnoticed += 1
    whole = fault.kind is FaultKind.LOST_GROUP or len(cluster.groups.groups[g].ranks) == 1
    event = detection.FailureKind.GROUP_GONE if whole else detection.FailureKind.RANK_KILLED
    yield cluster.env.timeout(float(detection.detection_delay_s(event)))
    cluster.settle()
    health.unnoticed -= 1
    health.detected_down = True
    cluster.breakers.breakers[g].force_open(fault.kind.name.lower())
    if whole:
        health.group_losses += 1
    else:
        health.rank_losses[fault.rank_index] += 1
    if whole or not _go_on_with_survivors(cluster, g):
        for slot in list(cluster.residents(g)):
            cluster.put_back(cluster.extract(g, slot), is_retry=True)
    cluster.ask_held_again()
    yield cluster.env.timeout(fault.length_s)
    yield cluster.env.timeout(cluster.options.cold_start_s)
    cluster.settle()
    cluster.telemetry.ranks.forget(g, -1 if whole else fault.rank_index)  # other hardware, or the same after a cold start
    if whole:
        health.group_losses -= 1
    else:
        health.rank_losses[fault.rank_index] -= 1
    _come_back(cluster, g)


def _go_on_with_survivors(cluster: ClusterProcess, g: int) -> bool:
    """Plan over the remaining ranks; everybody's KV is lost and recomputed there. False when the model does not fit."""
    groups = cluster.groups
    try:
        plan = groups.plan_for(g, cluster.options.start_corner)
    except InfeasibleSplit:
        return False
    restart(cluster, g, groups.groups[g], plan)
    return True


def restart(cluster: ClusterProcess, g: int, group: TpGroup, plan: SplitPlan) -> None:
    """Rebuild group `g` as `group` under `plan`: everybody inside recomputes after the pause, but requests that fit no
    longer are asked about again."""
    stop_group(cluster.state, g, cluster.env.now)
    for slot in list(cluster.state.running[g, : cluster.state.group_int[g, L.GI_RUNNING]]):
        preempt(cluster.state, g, int(slot), cluster.env.now)
    for slot in cluster.residents(g):  # KV that was carried along for a waiting request is gone, too
        cluster.state.slot_int[g, slot, L.SI_DONE] = 0
    cluster.groups.rebuild(g, group, plan, int(cluster.groups.corners[g]))
    start(cluster, g, cluster.options.rebuild_s)
    cluster.put_back_misfits(g)


def start(cluster: ClusterProcess, g: int, pause_s: float) -> None:
    """Let group `g` serve from now on with an empty cache, its first step after `pause_s`."""
    health = cluster.groups.health[g]
    health.is_lost = health.detected_down = health.is_parked = health.is_starting = False
    flush_idle(cluster.state, g)
    floats = cluster.state.group_float[g]
    floats[L.GF_CLOCK_S] = max(floats[L.GF_CLOCK_S], cluster.env.now)
    floats[L.GF_PAUSED_UNTIL_S] = cluster.env.now + pause_s
    cluster.state.group_int[g, L.GI_UP] = 1
    cluster.breakers.breakers[g].revive()


def _come_back(cluster: ClusterProcess, g: int) -> None:
    """Lost hardware is well again: rebuild the group over all ranks that are well now, unless another loss goes on."""
    groups = cluster.groups
    health = groups.health[g]
    if health.is_gone or health.group_losses or health.unnoticed:
        return
    if health.is_parked:  # it was drained meanwhile and waits to be started
        health.is_lost = health.detected_down = False
        return
    try:
        plan = groups.plan_for(g, cluster.options.start_corner)
    except InfeasibleSplit:
        return
    restart(cluster, g, groups.groups[g], plan)
    cluster.ask_held_again()
