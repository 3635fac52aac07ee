"""What each split and rebalance command does to the simulated world, and what it costs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies

from envs.cluster.cluster_process import ClusterProcess
from envs.cluster.faults import FaultEvent, FaultKind
from envs.decision import move_prices, split_planner
from envs.decision.move_candidates import fallback_plan, planned_split, rebalance_candidates, split_candidates
from envs.decision.split_planner import CORNERS
from envs.domain.commands import Command, CommandKind
from envs.domain.requests import OutcomeKind
from envs.group_kernel import layout as L
from tests.envs import small_worlds as W
from tests.envs.small_worlds import LIMITS, RouteTo, Shortest, check_laws, check_outcomes, world


class Stage:
    """A world played by one router, with commands given at stated times (at the first route decision after them)."""

    def __init__(self, table, router=None, spec=None, faults=(), **options):
        options = dict(control_tick_s=1.0, cold_start_s=3.0, rebuild_s=0.5, drain_s=60.0, interference_sigma=0.0) | options
        self.process = ClusterProcess(world(table, spec, faults=faults, **options), keep_lines=True)
        self.router = router or Shortest()

    def to(self, until_s: float):
        """Play to the first decision at or after `until_s`, which stays open; None at the end."""
        if self.process._asking is not None:
            self.answer()
        while (point := self.process.next_decision()) is not None:
            self.point = point
            if self.process.env.now >= until_s:
                return point
            self.answer()
        return None

    def answer(self):
        self.process.apply(self.point, self.router.choose(self.point))

    def order(self, kind: CommandKind, group_index: int, target_index: int = -1, argument: int = 0):
        self.process.moves.apply(Command(kind, group_index, target_index, argument))
        check_laws(self.process)

    def finish(self):
        self.to(np.inf)
        check_laws(self.process)
        check_outcomes(self.process)
        return self.process.outcomes


STEADY = W.trace(np.arange(60) * 0.2, 200, 60)


def slid(plan, heads: int):
    """`plan` with `heads` query heads moved from the second rank to the first."""
    return replace(plan, query_heads=(plan.query_heads[0] + heads, plan.query_heads[1] - heads))


def test_a_slide_inside_the_overlap_costs_no_pause_and_beyond_it_does():
    """One head moves freely where each rank holds one more; twelve heads move bytes: the pause is the planner's price."""
    stage = Stage(STEADY, RouteTo(W.PAIR))
    stage.to(3.0)
    groups = stage.process.groups
    window = groups.overlap(W.PAIR)
    assert window.query_heads >= 1
    plan = groups.plans[W.PAIR]
    stage.process.moves._switch(W.PAIR, slid(plan, window.query_heads), 0)
    assert stage.process.moves.pause_s == 0.0
    assert stage.process.state.group_int[W.PAIR, L.GI_PLAN] == 1
    stage.answer()
    out = stage.finish()
    assert out.parts[:, 6].max() == 0.0  # nobody was paused

    stage = Stage(STEADY, RouteTo(W.PAIR))
    stage.to(3.0)
    far = slid(plan, 8)
    price = split_planner.resplit_price(groups.groups[W.PAIR], plan, far, window)
    assert price.transfer_s > 0
    stage.process.moves._switch(W.PAIR, far, 0)
    assert stage.process.moves.pause_s == pytest.approx(price.transfer_s)
    stage.answer()
    paused = stage.finish().parts[:, 6]
    assert paused.max() == pytest.approx(price.transfer_s, rel=1e-6)


def test_residents_keep_their_plan_until_a_third_one_moves_their_kv():
    """After one re-split old requests stay on the old plan; after a second one they are on the middle one, and the move of
    their KV is paid on top of the weights."""
    stage = Stage(W.trace(np.arange(16) * 0.25, 400, 800), RouteTo(W.PAIR))
    stage.to(2.0)
    process, groups = stage.process, stage.process.groups
    plan = groups.plans[W.PAIR]
    state = process.state
    old = [int(s) for s in state.running[W.PAIR, : state.group_int[W.PAIR, L.GI_RUNNING]]]
    assert len(old) > 3
    second = slid(plan, 4)
    process.moves._switch(W.PAIR, second, 0)
    assert (state.slot_int[W.PAIR, old, L.SI_PLAN] == 0).all()
    stage.to(3.0)
    new = [int(s) for s in state.running[W.PAIR, : state.group_int[W.PAIR, L.GI_RUNNING]] if int(s) not in old]
    assert new and (state.slot_int[W.PAIR, new, L.SI_PLAN] == 1).all()
    check_laws(process)
    oldest_kv = int(state.group_int[W.PAIR, L.GI_USED_BLOCKS0]) * LIMITS.kv_block_tokens
    before_s = process.moves.pause_s
    window = groups.overlap(W.PAIR)
    # the third plan is far away, but the old requests' KV moves from the first plan to the second only
    group, third = groups.groups[W.PAIR], slid(plan, -8)
    weights = split_planner.resplit_price(group, second, third, window).weight_bytes
    kv = split_planner.resplit_price(group, plan, second, window, kv_tokens=oldest_kv).kv_bytes
    assert kv.max() > 0
    link = group.inner_link
    expected_s = max(link.alpha_s + (w + k) * link.beta_s_per_byte for w, k in zip(weights, kv, strict=True) if w + k > 0)
    process.moves._switch(W.PAIR, third, 0)
    assert process.moves.pause_s - before_s == pytest.approx(expected_s)
    assert state.group_int[W.PAIR, L.GI_USED_BLOCKS0] == 0
    assert (state.slot_int[W.PAIR, old + new, L.SI_PLAN] == 1).all()
    check_laws(process)
    stage.answer()
    assert (stage.finish().kind == OutcomeKind.COMPLETED).all()


def test_what_is_carried_out_is_what_was_priced():
    """Every split candidate, carried out, gives the plan whose gain and price the candidate showed."""
    for corner in range(len(CORNERS)):
        stage = Stage(STEADY, RouteTo(W.PAIR))
        stage.to(3.0)
        process = stage.process
        health = process.moves.declared_health()
        found = split_candidates(process.view(), process.groups.groups, process.groups.plans, process.tables, health)
        wanted = [c for c in found.commands if c.kind is CommandKind.SET_SPLIT]
        if corner >= len(wanted):
            continue
        index = found.commands.index(wanted[corner])
        process.moves.apply(wanted[corner])
        assert np.log1p(process.moves.pause_s) == pytest.approx(found.moves[index, 1], abs=1e-9)
        assert process.groups.corners[W.PAIR] == wanted[corner].argument
        assert wanted[corner].argument in range(len(CORNERS))


def test_requeue_asks_about_waiting_requests_again_and_leaves_running_ones():
    stage = Stage(W.trace(np.zeros(30), 200, 100), RouteTo(W.SOLO))
    stage.to(0.0)
    for _ in range(29):
        stage.answer()
        stage.point = stage.process.next_decision()
    process = stage.process
    process.settle()
    ints = process.state.group_int[W.SOLO]
    waiting, running = int(ints[L.GI_WAITING]), int(ints[L.GI_RUNNING])
    assert waiting > 5 and running > 0
    stage.order(CommandKind.REQUEUE, W.SOLO)
    assert ints[L.GI_WAITING] == 0 and ints[L.GI_RUNNING] == running
    assert len(process._ready) == waiting
    stage.router = RouteTo(W.PAIR)
    out = stage.finish()
    assert (out.kind == OutcomeKind.COMPLETED).all()
    assert (out.group_index == W.PAIR).sum() == waiting + 1
    assert (out.attempts == 1).all() and (out.preemptions == 0).all()


def migrate_one(**options):
    stage = Stage(W.trace(np.arange(40) * 0.2, 1500, 200), RouteTo(W.SOLO), **options)
    stage.to(2.0)
    process = stage.process
    view = process.view()
    first, last = view.residents.offset[W.SOLO], view.residents.offset[W.SOLO + 1]
    rows = [i for i in range(first, last) if view.residents.ints[i, 5] == 1 and view.residents.ints[i, 4] == 0]
    moved, made = int(view.residents.ints[rows[0], 0]), int(view.residents.ints[rows[0], 3])
    assert made > 3
    stage.order(CommandKind.MIGRATE, W.SOLO, W.PAIR, moved)
    stage.answer()
    return stage, moved, made


def test_migration_keeps_generated_tokens_and_pays_for_the_copy():
    """The request leaves at the step boundary, waits for the copy of its KV, and goes on where it was: it prefills one
    token, not its 1,500, and its whole output is what its trace says."""
    stage, moved, _ = migrate_one()
    process = stage.process
    stage.to(2.1)
    while process.moves.transfers == 0 and process.env.now < 4.0:
        stage.answer()
        stage.point = process.next_decision()
    left_s = process.env.now
    copy_s = move_prices.copy_s(process.groups.groups[W.SOLO], 1500)
    assert copy_s > 0.01
    out = stage.finish()
    outcome = out.outcome(moved)
    assert outcome.kind is OutcomeKind.COMPLETED and outcome.group_index == W.PAIR
    assert outcome.output_tokens == 200 and outcome.preemptions == 0
    assert outcome.parts[7] >= 0.5 * copy_s  # the copy is in "redone"
    assert outcome.first_token_s < left_s + 1e-6


def test_migration_carries_every_token_made_by_the_boundary(monkeypatch):
    """However many steps ran between two looks at the group, all KV but the last token's comes along."""
    carried = []
    enter = ClusterProcess.enter

    def spy(self, held, group_index, kv_tokens=0):
        if held.rows is not None:
            carried.append((kv_tokens, int(held.rows[0][L.SI_PROMPT] + held.rows[0][L.SI_GENERATED])))
        return enter(self, held, group_index, kv_tokens)

    monkeypatch.setattr(ClusterProcess, "enter", spy)
    stage, _, made = migrate_one()
    stage.finish()
    assert len(carried) == 1
    kept, context = carried[0]
    assert kept == context - 1 and context >= 1500 + made


def test_migration_out_of_a_group_stops_its_jump():
    """The steps planned with the migrated request aboard are not played to their end without it."""
    stage, _, _ = migrate_one()
    process = stage.process
    seen = []
    extract = process.extract

    def spy(g, slot):
        held = extract(g, slot)
        seen.append(int(process.state.group_int[g, L.GI_JUMP_STEPS]) if process.state.group_int[g, L.GI_JUMP_ACTIVE] else 1)
        return held

    process.extract = spy
    stage.finish()
    assert seen == [1]


def test_migration_to_a_dead_group_asks_again():
    stage, moved, _ = migrate_one(faults=(FaultEvent(FaultKind.LOST_GROUP, 2.05, 60.0, W.PAIR),))
    out = stage.finish()
    assert out.group_index[moved] == W.SOLO
    assert out.kind[moved] == OutcomeKind.COMPLETED


def test_scale_in_drains_then_parks_and_scale_out_starts_after_the_cold_start():
    stage = Stage(W.trace(np.arange(150) * 0.2, 100, 20))
    stage.to(4.0)
    health = stage.process.groups.health
    stage.order(CommandKind.SCALE_IN, W.PAIR)
    running = int(stage.process.state.group_int[W.PAIR, L.GI_RUNNING])
    stage.answer()
    point = stage.to(4.05)
    assert not point.mask[W.PAIR] and point.view.is_draining[W.PAIR] and not health[W.PAIR].is_parked
    stage.to(8.0)
    assert health[W.PAIR].is_parked and not health[W.PAIR].is_draining
    stage.order(CommandKind.SCALE_OUT, W.PAIR)
    assert not stage.process.moves.declared_health().is_parked[W.PAIR]  # no second start is offered
    stage.answer()
    assert not stage.to(10.8).mask[W.PAIR]
    assert stage.to(11.2).mask[W.PAIR]
    out = stage.finish()
    assert running >= 0 and (out.kind == OutcomeKind.COMPLETED).all()
    assert ((out.group_index == W.PAIR) & (out.admitted_s > 11.0)).any()


def test_the_last_open_group_is_never_offered_for_scale_in():
    stage = Stage(W.trace(np.arange(20) * 0.5, 100, 20))
    stage.to(1.0)
    stage.order(CommandKind.SCALE_IN, W.SOLO)
    process = stage.process
    found = rebalance_candidates(
        process.view(), process.groups.groups, process.groups.plans, process.tables, process.moves.declared_health()
    )
    assert CommandKind.SCALE_IN not in {command.kind for command in found.commands}


def test_fall_back_and_restore_keep_every_request():
    """To one rank and back: the plans say so, both rebuilds pause the group, everybody completes and recomputes."""
    stage = Stage(W.trace(np.arange(60) * 0.2, 200, 80), RouteTo(W.PAIR))
    stage.to(3.0)
    process = stage.process
    before = process.groups.plans[W.PAIR]
    stage.order(CommandKind.FALL_BACK, W.PAIR)
    assert sorted(process.groups.plans[W.PAIR].query_heads)[0] == 0
    assert process.view().pause_left_s[W.PAIR] == pytest.approx(0.5)
    stage.answer()
    stage.to(6.0)
    stage.order(CommandKind.RESTORE, W.PAIR)
    assert min(process.groups.plans[W.PAIR].query_heads) > 0
    assert sum(process.groups.plans[W.PAIR].query_heads) == sum(before.query_heads)
    out = stage.finish()
    assert (out.kind == OutcomeKind.COMPLETED).all()
    assert out.preemptions.max() >= 1 and out.parts[:, 7].max() > 0.5


def test_regroup_gives_the_spares_ranks_away_for_good():
    """The spare's card joins the single card; the spare can be started or given away no more."""
    stage = Stage(W.trace(np.arange(80) * 0.2, 100, 20))
    stage.to(2.0)
    process = stage.process
    stage.order(CommandKind.REGROUP, W.SPARE, W.SOLO)
    assert len(process.groups.groups[W.SOLO].ranks) == 2
    stage.answer()
    stage.to(4.0)
    found = rebalance_candidates(
        process.view(), process.groups.groups, process.groups.plans, process.tables, process.moves.declared_health()
    )
    assert all(command.group_index != W.SPARE for command in found.commands)
    stage.order(CommandKind.REGROUP, W.SPARE, W.SOLO)
    assert len(process.groups.groups[W.SOLO].ranks) == 2
    assert not process.view().is_up[W.SPARE]
    assert (stage.finish().kind == OutcomeKind.COMPLETED).all()


def test_a_group_with_a_donors_ranks():
    """The donor's come behind its own; its name and links stay, the slower host sets the pace. Another model is refused."""
    pair, solo, spare = W.cluster().groups
    merged = replace(solo, host_speed=0.9).with_ranks_of(replace(pair, host_speed=0.7))
    assert merged == replace(solo, ranks=solo.ranks + pair.ranks, host_speed=0.7)
    assert solo.with_ranks_of(replace(spare, host_speed=2.0)).host_speed == solo.host_speed
    with pytest.raises(ValueError, match=r"they serve .* and 'tiny'; join groups of one model"):
        solo.with_ranks_of(replace(spare, model=replace(spare.model, name="tiny")))


def test_a_command_to_a_group_that_just_died_does_not_revive_it():
    """Lost at 2 s, noticed at 3 s; every command to it at 2.5 s changes nothing."""
    for kind in (CommandKind.FALL_BACK, CommandKind.RESTORE, CommandKind.SET_SPLIT, CommandKind.REQUEUE, CommandKind.SCALE_IN):
        stage = Stage(W.trace(np.arange(40) * 0.25, 100, 200), faults=(FaultEvent(FaultKind.LOST_GROUP, 2.0, 60.0, W.PAIR),))
        stage.to(2.5)
        stage.order(kind, W.PAIR)
        assert stage.process.groups.health[W.PAIR].is_lost
        assert stage.process.state.group_int[W.PAIR, L.GI_UP] == 0
        stage.finish()


class HoldAlways:
    def choose(self, point):
        return point.view.groups if point.mask[point.view.groups] else int(np.flatnonzero(point.mask)[0])


def test_hold_is_asked_again_on_a_completion_and_at_its_deadline():
    """Request 0 runs; request 1 is held: asked again when 0 completes. Then alone, it may be held no longer at its deadline."""
    stage = Stage(W.trace([0.0, 0.1, 3.0], 64, [12, 4, 4]), hold_max_s=1.0)
    stage.to(0.0)
    stage.process.apply(stage.point, W.SOLO)
    asked = []
    while (point := stage.process.next_decision()) is not None:
        asked.append((point.request.request_id, stage.process.env.now, bool(point.mask[point.view.groups])))
        stage.process.apply(point, HoldAlways().choose(point))
    completed_s = stage.process.outcomes.finish_s[0] - stage.process.options.return_s
    of_one = [row for row in asked if row[0] == 1]
    assert 0.15 < completed_s < 1.0
    assert of_one[0][1] == pytest.approx(0.1)
    assert of_one[1][1] == pytest.approx(completed_s, abs=1e-6)
    assert of_one[-1][1] == pytest.approx(1.1, abs=1e-6) and not of_one[-1][2]
    assert [row[2] for row in asked if row[0] == 2][-1] is False
    assert asked[-1][1] == pytest.approx(4.0, abs=1e-6)


def test_a_completion_that_nobody_foresaw_asks_held_requests_again():
    """Held while a long request runs elsewhere; a short one that arrives later completes first, and that is when it is asked."""
    stage = Stage(W.trace([0.0, 0.1, 0.15], [64, 64, 16], [400, 4, 1]), hold_max_s=5.0)
    answers = iter([W.SOLO, 3, W.PAIR])
    asked = []
    while (point := stage.process.next_decision()) is not None:
        asked.append((point.request.request_id, stage.process.env.now))
        stage.process.apply(point, next(answers, W.PAIR))
    again = [now for request, now in asked if request == 1][1]
    assert again == pytest.approx(stage.process.outcomes.finish_s[2] - stage.process.options.return_s, abs=1e-6)


def test_hold_is_masked_when_the_hold_queue_is_full():
    limit = LIMITS.hold_limit
    stage = Stage(W.trace(np.zeros(limit + 3), 64, 4))
    may_hold = []
    for _ in range(limit + 3):
        point = stage.process.next_decision()
        may_hold.append(bool(point.mask[point.view.groups]))
        stage.process.apply(point, HoldAlways().choose(point))
    assert may_hold == [True] * limit + [False] * 3


def test_each_held_request_has_its_own_deadline():
    """One held at 0.0 and one put back by a lost group at about 1.5 s: neither waits longer than the maximum hold."""
    faults = (FaultEvent(FaultKind.LOST_GROUP, 0.2, 60.0, W.PAIR), FaultEvent(FaultKind.LOST_GROUP, 0.2, 60.0, W.SOLO))
    stage = Stage(W.trace([0.0, 0.1, 0.9, 1.15], 64, 4000, 0), faults=faults, hold_max_s=1.0)
    asked = {}
    while (point := stage.process.next_decision()) is not None:
        asked.setdefault(point.request.request_id, []).append(stage.process.env.now)
        first = point.request.request_id < 2 and len(asked[point.request.request_id]) == 1
        stage.process.apply(point, W.PAIR if first else HoldAlways().choose(point))
    assert asked[2][-1] == pytest.approx(1.9, abs=1e-6)
    assert asked[3][-1] == pytest.approx(2.15, abs=1e-6)
    assert asked[0][-1] - asked[0][1] == pytest.approx(1.0, abs=1e-6)


def offered(process, kind: CommandKind, group_index: int) -> bool:
    """Whether a rebalance decision would list such a command now."""
    health = process.moves.declared_health()
    found = rebalance_candidates(process.view(), process.groups.groups, process.groups.plans, process.tables, health)
    return any((command.kind, command.group_index) == (kind, group_index) for command in found.commands)


def test_restore_is_offered_only_after_the_stay_that_a_fall_back_lasts():
    """The pair falls back from a rank that is 4 times too slow. That rank works no more, so nothing shows that it is still slow;
    what was measured of it fades, and after half a minute alone it would pass for well. Offered 60 s after the fall-back, not before."""
    slow = FaultEvent(FaultKind.SLOW_MEMORY, 1.0, 500.0, W.PAIR, 1, size=4.0)
    stage = Stage(W.trace(np.arange(140) * 0.5, 100, 150), RouteTo(W.PAIR), faults=(slow,), fall_back_stay_s=60.0)
    process = stage.process
    stage.to(0.9)
    assert not offered(process, CommandKind.FALL_BACK, W.PAIR)
    stage.to(4.0)
    assert offered(process, CommandKind.FALL_BACK, W.PAIR) and not offered(process, CommandKind.RESTORE, W.PAIR)
    fell_back_s = process.env.now
    stage.order(CommandKind.FALL_BACK, W.PAIR)
    assert process.groups.plans[W.PAIR].query_heads[1] == 0
    for until_s in (4.4, 20.0, fell_back_s + 59.2):
        stage.to(until_s)
        assert not offered(process, CommandKind.RESTORE, W.PAIR)
    assert process.telemetry.speed_factors(W.PAIR)[1] > 0.5  # only the stay holds it back
    stage.to(fell_back_s + 60.01)
    assert offered(process, CommandKind.RESTORE, W.PAIR)
    stage.order(CommandKind.RESTORE, W.PAIR)
    assert min(process.groups.plans[W.PAIR].query_heads) > 0
    assert (stage.finish().kind == OutcomeKind.COMPLETED).all()


@settings(deadline=None, max_examples=25)
@given(speeds=strategies.tuples(strategies.floats(0.005, 1.2), strategies.floats(0.005, 1.2)))
@example(speeds=(0.197, 0.038))
def test_split_and_subset_moves_agree_on_what_is_faster(speeds):
    """Whatever the ranks' speeds: of a group that always makes the move with the largest gain, every move is faster than the one
    before, so that it ends. Two lists that rounded the speeds differently went to and fro for ever."""
    stage = Stage(W.trace(np.arange(4) * 0.2, 200, 20), RouteTo(W.SOLO))
    stage.to(0.5)
    process = stage.process
    group, plans = process.groups.groups[W.PAIR], list(process.groups.plans)
    now = process.moves.declared_health()
    factors = tuple(np.array(speeds) if g == W.PAIR else own for g, own in enumerate(now.speed_factors))
    health = replace(now, speed_factors=factors)
    for _ in range(2 * len(CORNERS)):
        asked = process.view(), process.groups.groups, plans, process.tables, health
        lists = [split_candidates(*asked), rebalance_candidates(*asked)]
        kinds = (CommandKind.SET_SPLIT, CommandKind.FALL_BACK, CommandKind.RESTORE)
        moves = [
            (found.moves[i, 0], command)
            for found in lists for i, command in enumerate(found.commands) if command.kind in kinds and command.group_index == W.PAIR
        ]  # fmt: skip
        gain, command = max(moves, key=lambda move: move[0], default=(0.0, None))
        if gain <= 1e-9:
            return
        if command.kind is CommandKind.FALL_BACK:
            plans[W.PAIR] = fallback_plan(group, factors[W.PAIR])
        else:
            corner = CORNERS[command.argument] if command.kind is CommandKind.SET_SPLIT else "planner"
            plans[W.PAIR] = planned_split(process.view(), W.PAIR, group, corner, factors[W.PAIR])
    pytest.fail("no end of moves that are predicted to gain")
