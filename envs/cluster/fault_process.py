"""How a fault strikes a simulated world, when it is noticed, and how its victims recover."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import numpy as np

from envs.cluster.faults import FaultEvent, FaultKind
from envs.decision import detection
from envs.decision.split_planner import InfeasibleSplit
from envs.group_kernel import layout as L
from envs.group_kernel.advance import cut_jump, stop_group
from envs.group_kernel.queue import preempt
from envs.perf_model import step_time as ST

if TYPE_CHECKING:
    from envs.cluster.cluster_process import ClusterProcess


def strike(cluster: ClusterProcess, fault: FaultEvent) -> Generator[Any, Any, None]:
    """simpy process of one fault: wait for its start, apply it, undo it at its end."""
    yield cluster.env.timeout(fault.start_s)
    cluster.settle()
    cluster.log.note(cluster.env.now, f"fault:{fault.kind.name}", fault.group_index, fault.rank_index)
    health = cluster.groups.health[fault.group_index]
    if health.is_parked or health.is_lost:
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
        cluster.state.group_cost[g, ST.GC_LINK_SLOW] *= factor
    elif fault.kind is FaultKind.SLOW_HOST:
        cluster.state.group_cost[g, ST.GC_HOST_SLOW] *= factor
    else:
        speeds = health.slow_compute if fault.kind is FaultKind.SLOW_COMPUTE else health.slow_memory
        if fault.rank_index < 0:
            speeds *= factor
        elif fault.rank_index < len(speeds):
            speeds[fault.rank_index] *= factor
        cluster.groups.apply_speed(g)


def _lose(cluster: ClusterProcess, fault: FaultEvent) -> Generator[Any, Any, None]:
    """Stop the group now; after the detection delay go on with the survivors or send everybody elsewhere; return later."""
    g = fault.group_index
    health = cluster.groups.health[g]
    stop_group(cluster.state, g, cluster.env.now)
    health.is_lost = True
    whole = fault.kind is FaultKind.LOST_GROUP or len(cluster.groups.groups[g].ranks) == 1
    event = detection.FailureKind.GROUP_GONE if whole else detection.FailureKind.RANK_KILLED
    yield cluster.env.timeout(float(detection.detection_delay_s(event)))
    cluster.settle()
    health.detected_down = True
    cluster.breakers.breakers[g].force_open(fault.kind.name.lower())
    if whole or not _go_on_with_survivors(cluster, g, fault.rank_index):
        for slot in list(cluster.residents(g)):
            cluster.put_back(cluster.extract(g, slot), is_retry=True)
    cluster.ask_held_again()
    yield cluster.env.timeout(fault.length_s)
    yield from _come_back(cluster, g)


def _go_on_with_survivors(cluster: ClusterProcess, g: int, rank: int) -> bool:
    """Plan over the remaining ranks; everybody's KV is lost and recomputed there. False when the model does not fit."""
    groups = cluster.groups
    health = groups.health[g]
    health.rank_is_lost[rank] = True
    try:
        plan = groups.plan_for(g, cluster.options.start_corner)
    except InfeasibleSplit:
        return False
    _requeue_inside(cluster, g)
    groups.rebuild(g, groups.groups[g], plan, int(groups.corners[g]))
    start(cluster, g, cluster.options.rebuild_s)
    return True


def _requeue_inside(cluster: ClusterProcess, g: int) -> None:
    """Send the running requests of a stopped group back to its own queue; their KV is gone."""
    for slot in list(cluster.state.running[g, : cluster.state.group_int[g, L.GI_RUNNING]]):
        preempt(cluster.state, g, int(slot), cluster.env.now)


def start(cluster: ClusterProcess, g: int, pause_s: float) -> None:
    """Let group `g` serve from now on, its first step after `pause_s`."""
    health = cluster.groups.health[g]
    health.is_lost = health.detected_down = health.is_parked = health.is_draining = False
    floats = cluster.state.group_float[g]
    floats[L.GF_CLOCK_S] = max(floats[L.GF_CLOCK_S], cluster.env.now)
    floats[L.GF_PAUSED_UNTIL_S] = cluster.env.now + pause_s
    cluster.state.group_int[g, L.GI_UP] = 1
    cluster.breakers.breakers[g].revive()


def _come_back(cluster: ClusterProcess, g: int) -> Generator[Any, Any, None]:
    """The lost hardware is well again: rebuild the group over all of its ranks after a cold start."""
    groups = cluster.groups
    health = groups.health[g]
    was_down = health.detected_down
    if was_down:
        yield cluster.env.timeout(cluster.options.cold_start_s)
    cluster.settle()
    health.rank_is_lost = np.zeros(len(groups.groups[g].ranks), np.bool_)
    cut_jump(cluster.state, g, cluster.env.now)
    stop_group(cluster.state, g, cluster.env.now)
    _requeue_inside(cluster, g)
    groups.rebuild(g, groups.groups[g], groups.plan_for(g, cluster.options.start_corner), int(groups.corners[g]))
    start(cluster, g, cluster.options.rebuild_s)
    cluster.ask_held_again()
