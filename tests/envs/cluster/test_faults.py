"""How faults strike the simulated world, when they are noticed, and how everything comes back."""

from __future__ import annotations

import numpy as np
import pytest

from envs.cluster.cluster_process import ClusterProcess
from envs.cluster.faults import FaultEvent, FaultKind, FaultRates, draw_faults
from envs.decision.circuit_breaker import State
from envs.decision.detection import FailureKind, detection_delay_s
from envs.domain.requests import OutcomeKind
from envs.group_kernel import layout as L
from envs.perf_model import step_time as ST
from tests.envs import small_worlds as W
from tests.envs.small_worlds import RouteTo, Shortest, play, traffic, world

LONG = W.trace(np.arange(40) * 0.25, 200, 300)


def run_with(faults, table=LONG, router=None, **options):
    """Play; returns the process and what the pair's health looked like at each route decision."""
    seen = []

    def see(process, point):
        health = process.groups.health[W.PAIR]
        seen.append(
            (
                point.view.now_s,
                bool(point.view.is_up[W.PAIR]),
                bool(point.view.accepts[W.PAIR]),
                health.is_lost,
                int(point.view.breaker_state[W.PAIR]),
            )
        )

    options = dict(cold_start_s=3.0, rebuild_s=0.5, drain_s=60.0) | options
    process = play(world(table, faults=faults, **options), {"route": router or Shortest()}, check_every=1, on_point=see)
    return process, seen


def test_a_lost_group_is_noticed_after_the_delay_and_its_requests_go_elsewhere():
    """Before the delay the group still looks alive and takes requests; after it nobody may go there, its requests are
    retried on the other group, and it comes back after the fault and a cold start, through probes."""
    process, seen = run_with((FaultEvent(FaultKind.LOST_GROUP, 3.0, 2.0, W.PAIR),))
    noticed_s = 3.0 + float(detection_delay_s(FailureKind.GROUP_GONE))
    blind = [row for row in seen if 3.0 < row[0] < noticed_s]
    assert blind and all(row[1] and row[2] and row[3] for row in blind)
    dark = [row for row in seen if noticed_s < row[0] < noticed_s + 2.0 + 3.0]
    assert dark and not any(row[1] or row[2] for row in dark)
    assert {row[4] for row in dark} == {int(State.FORCED_OPEN)}
    after = [row for row in seen if row[0] > noticed_s + 5.0]
    assert after and all(row[1] and not row[3] for row in after)
    out = process.outcomes
    retried = out.attempts > 1
    assert retried.any()
    assert (out.kind[retried & (out.kind == OutcomeKind.COMPLETED)] == OutcomeKind.COMPLETED).any()
    assert set(np.unique(out.kind)) <= {OutcomeKind.COMPLETED, OutcomeKind.FAILED}
    served_after = (out.group_index == W.PAIR) & (out.admitted_s > noticed_s + 5.0)
    assert served_after.any()
    assert process.breakers.breakers[W.PAIR].state is State.CLOSED


def test_a_lost_rank_leaves_its_group_serving_on_the_other():
    """Noticed within 50 ms; the pair goes on with one rank, and with both after the fault and a cold start."""
    plans = {}

    def see(process, point):
        plans[point.view.now_s] = process.groups.plans[W.PAIR].query_heads

    fault = FaultEvent(FaultKind.LOST_RANK, 3.0, 2.0, W.PAIR, 1)
    play(world(LONG, faults=(fault,), cold_start_s=2.0, rebuild_s=0.5), {"route": Shortest()}, check_every=1, on_point=see)
    before = [heads for now, heads in plans.items() if now < 3.0]
    during = [heads for now, heads in plans.items() if 3.1 < now < 7.0]
    after = [heads for now, heads in plans.items() if now > 7.1]
    assert all(min(heads) > 0 for heads in before + after)
    assert during and all(heads[1] == 0 for heads in during)


def test_overlapping_losses_heal_only_when_the_last_is_over():
    """A rank is lost from 1 to 6 s, the whole group from 3 to 20 s: the rank's end must not revive the group."""
    faults = (FaultEvent(FaultKind.LOST_RANK, 1.0, 5.0, W.PAIR, 0), FaultEvent(FaultKind.LOST_GROUP, 3.0, 17.0, W.PAIR))
    table = W.trace(np.arange(120) * 0.25, 100, 20)
    process, seen = run_with(faults, table, cold_start_s=1.0)
    dark = [row for row in seen if 4.1 < row[0] < 21.9]
    assert dark and not any(row[1] for row in dark)
    assert any(row[1] for row in seen if row[0] > 22.1)
    health = process.groups.health[W.PAIR]
    assert not health.rank_is_lost.any() and health.group_losses == 0


def test_two_lost_ranks_of_one_group_each_last_their_own_time():
    """Rank 0 from 1 to 12 s; rank 1 from 2 to 4 s: with both gone the group is out, with rank 1 back it serves on that one."""
    faults = (FaultEvent(FaultKind.LOST_RANK, 1.0, 11.0, W.PAIR, 0), FaultEvent(FaultKind.LOST_RANK, 2.0, 2.0, W.PAIR, 1))
    heads = {}

    def see(process, point):
        heads[point.view.now_s] = (bool(point.view.is_up[W.PAIR]), process.groups.plans[W.PAIR].query_heads)

    table = W.trace(np.arange(80) * 0.25, 100, 20)
    play(world(table, faults=faults, cold_start_s=1.0, rebuild_s=0.2), {"route": Shortest()}, check_every=1, on_point=see)
    assert not any(up for now, (up, _) in heads.items() if 2.1 < now < 4.9)
    alone = [plan for now, (up, plan) in heads.items() if 5.3 < now < 12.9]
    assert alone and all(plan[0] == 0 and plan[1] > 0 for plan in alone)
    assert all(min(plan) > 0 for now, (_, plan) in heads.items() if now > 13.3)


@pytest.mark.parametrize("kind, column", [(FaultKind.SLOW_LINK, ST.GC_LINK_SLOW), (FaultKind.SLOW_HOST, ST.GC_HOST_SLOW)])
def test_a_rebuild_neither_heals_nor_doubles_a_slow_link_or_host(kind, column):
    """Slow from 1 to 20 s, rank lost at 3 s (two rebuilds inside): still slow until 20 s, nominal after it, never faster."""
    faults = (FaultEvent(kind, 1.0, 19.0, W.PAIR, size=3.0), FaultEvent(FaultKind.LOST_RANK, 3.0, 3.0, W.PAIR, 1))
    factors = {}

    def see(process, point):
        factors[point.view.now_s] = process.state.group_cost[W.PAIR, column]

    play(world(W.trace(np.arange(100) * 0.25, 64, 5), faults=faults, cold_start_s=1.0), {"route": Shortest()}, on_point=see)
    assert all(factor == pytest.approx(3.0 if 1.0 < now < 20.0 else 1.0) for now, factor in factors.items() if now not in (1.0, 20.0))


def test_the_cache_does_not_survive_the_loss_of_its_memory():
    """Every request shares one prefix: it hits until the group is lost, and the first one after the return hits nothing."""
    table = W.trace(np.arange(30) * 1.0, 640, 4, prefixes=[list(range(9))] * 30, block_tokens=64)
    faults = (FaultEvent(FaultKind.LOST_GROUP, 10.5, 1.0, W.PAIR), FaultEvent(FaultKind.LOST_GROUP, 0.0, 1000.0, W.SOLO))
    process = play(world(table, faults=faults, cold_start_s=1.0, hold_max_s=20.0), {"route": RouteTo(W.PAIR)}, check_every=1)
    out = process.outcomes
    done = out.kind == OutcomeKind.COMPLETED
    assert (out.hit_tokens[1:10] == 576).all()
    back = np.flatnonzero(done & (out.admitted_s > 12.0))
    assert out.hit_tokens[back[np.argmin(out.admitted_s[back])]] == 0
    assert out.hit_tokens[-1] == 576


def test_slow_faults_slow_the_group_and_end():
    """Compute and memory three times slower from 2 to 6 s: requests wholly inside take longer than those before and after."""
    faults = tuple(FaultEvent(kind, 2.0, 4.0, W.SOLO, size=3.0) for kind in (FaultKind.SLOW_COMPUTE, FaultKind.SLOW_MEMORY))
    table = W.trace([0.0, 3.0, 7.0], 200, 20)
    out = play(world(table, faults=faults, interference_sigma=0.0), {"route": RouteTo(W.SOLO)}).outcomes
    times_s = out.finish_s - table.arrival_s
    assert times_s[1] > 2.0 * times_s[0]
    assert times_s[2] == pytest.approx(times_s[0], rel=1e-9)


def test_a_group_drained_during_its_outage_stays_parked():
    process = ClusterProcess(
        world(
            W.trace(np.arange(60) * 0.5, 64, 5),
            faults=(FaultEvent(FaultKind.LOST_RANK, 2.0, 5.0, W.PAIR, 0),),
            cold_start_s=1.0,
            control_tick_s=1.0,
        )
    )
    ordered = False
    while (point := process.next_decision()) is not None:
        if process.env.now > 4.0 and not ordered:
            process.groups.health[W.PAIR].is_draining = ordered = True
        if process.env.now > 12.0:
            assert process.groups.health[W.PAIR].is_parked and not point.mask[W.PAIR]
        process.apply(point, Shortest().choose(point))
    assert process.state.group_int[W.PAIR, L.GI_UP] == 0


def test_faults_at_places_that_do_not_exist_are_refused():
    """Group, rank, and a lost rank without a name: one line that says what there is, before anything runs."""
    for fault in (
        FaultEvent(FaultKind.LOST_GROUP, 1.0, 1.0, 7),
        FaultEvent(FaultKind.SLOW_COMPUTE, 1.0, 1.0, W.SOLO, 1),
        FaultEvent(FaultKind.LOST_RANK, 1.0, 1.0, W.PAIR),
    ):
        with pytest.raises(ValueError, match="index"):
            ClusterProcess(world(LONG, faults=(fault,)))


def test_drawn_faults_have_the_stated_rate_and_places():
    """500 hours of two groups: counts within 4 sigma of a Poisson law, starts inside, sizes between the limits."""
    rates = FaultRates(lost_group_per_hour=0.5)
    events = draw_faults(rates, [2, 1], 500 * 3600.0, np.random.default_rng(3))
    for kind in FaultKind:
        count = sum(event.kind is kind for event in events)
        mean = rates.per_hour(kind) * 500 * 2
        assert abs(count - mean) < 4 * np.sqrt(mean)
    assert all(1.3 <= event.size <= 3.0 and 0 <= event.start_s <= 500 * 3600 for event in events)
    for event in events:
        event.check_place([2, 1])


def test_a_request_whose_retries_are_spent_fails_with_that_reason():
    """Every group is lost again and again: requests fail with a reason, and none is lost from the books."""
    faults = tuple(FaultEvent(FaultKind.LOST_GROUP, 2.0 + 8.0 * k, 1.0, g) for k in range(6) for g in (W.PAIR, W.SOLO))
    process, _ = run_with(faults, W.trace(np.arange(20) * 0.1, 200, 3000), cold_start_s=1.0, hold_max_s=30.0, drain_s=120.0)
    reasons = {outcome.reason for outcome in process.outcomes.to_outcomes() if outcome.kind is OutcomeKind.FAILED}
    assert "retries_spent" in reasons
    assert process.outcomes.attempts.max() == process.options.attempts_max


def test_random_traffic_ends_well_after_mild_faults():
    """Default fault rates, times ten: nine requests of ten complete."""
    made = world(traffic(300, 5.0, 9), cold_start_s=5.0)
    from dataclasses import replace

    out = play(replace(made, fault_rates=FaultRates().scaled(10.0)), {"route": Shortest()}, check_every=20).outcomes
    assert (out.kind == OutcomeKind.COMPLETED).mean() > 0.9
