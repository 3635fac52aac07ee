"""Changing a plan: what moves, whether it pays, and in which order things happen."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.decision.layer_cuts import layer_plans
from envs.decision.move_prices import CopyPrice
from envs.domain.plans import LayerPlans, SplitPlan
from envs.domain.specs import ModelSpec
from runtime.torch_tp.group_plans import GroupPlans
from runtime.torch_tp.orders import Prepared, PrepareOrder, Switched, SwitchOrder
from runtime.torch_tp.profiler import RankProfile
from runtime.torch_tp.requests import SamplingSettings
from runtime.torch_tp.resplit import (
    Slide,
    SlideState,
    kv_moves,
    kv_ranges,
    moved_bytes_per_token,
    over_members,
    pays,
)
from runtime.torch_tp.steps import NewSlot, SliceCommand, StepCommand, StepResult

MODEL = ModelSpec("m", 3, 48, 9, 3, 16, 64, 100, weight_dtype="fp32", kv_dtype="fp32")


def uniform(version: int, *heads: int) -> LayerPlans:
    blocks = (1,) * len(heads)
    return LayerPlans.uniform(SplitPlan(heads, blocks, blocks, version=version), MODEL.layers)


shares = st.lists(st.floats(0.0, 5.0), min_size=1, max_size=4).filter(lambda weights: sum(weights) > 0.1)


@given(st.data())
def test_moves_give_every_rank_exactly_what_it_wants_from_who_has_it(data):
    ranks = data.draw(st.integers(1, 4))
    weights = st.lists(st.floats(0.0, 5.0), min_size=ranks, max_size=ranks).filter(lambda item: sum(item) > 0.1)
    old, new = (layer_plans(MODEL, data.draw(weights), version=version) for version in (1, 2))
    moves = kv_moves(old, new, MODEL)
    for layer in range(MODEL.layers):
        have, want = kv_ranges(old, layer, MODEL), kv_ranges(new, layer, MODEL)
        for rank in range(ranks):
            heads = [move.heads for move in moves if (move.layer, move.target) == (layer, rank)]
            got = [head for part in heads for head in range(part.start, part.end)]
            assert sorted(got) == list(range(want[rank].start, want[rank].end))
        for move in moves:
            if move.layer == layer:
                assert have[move.source].covers(move.heads)
                # what a rank has, it does not fetch
                assert move.source == move.target or have[move.target].intersection(move.heads).width == 0


def test_a_move_by_hand():
    """(6, 3) to (3, 6) of 9 heads in groups of 3: KV head 1 goes from rank 0 to rank 1 in each of 3 layers."""
    moves = kv_moves(uniform(1, 6, 3), uniform(2, 3, 6), MODEL)
    crossing = [move for move in moves if move.source != move.target]
    assert [(move.layer, move.source, move.target, move.heads.start, move.heads.end) for move in crossing] == [
        (i, 0, 1, 1, 2) for i in range(3)
    ]


def test_a_head_that_a_cut_divides_is_there_already():
    """(5, 4) holds KV head 1 on both ranks: going to (6, 3) or (3, 6) moves nothing."""
    for heads in ((6, 3), (3, 6)):
        assert all(move.source == move.target for move in kv_moves(uniform(1, 5, 4), uniform(2, *heads), MODEL))


def test_bytes_of_a_move_by_hand():
    """(6, 3) to (3, 6) of 9 heads in groups of 3: KV head 1 goes from rank 0 to rank 1, keys and values of 16 floats in 3 layers."""
    moves = kv_moves(uniform(1, 6, 3), uniform(2, 3, 6), MODEL)
    assert moved_bytes_per_token(moves, MODEL) == 3 * 2 * 16 * 4


def test_a_third_plan_costs_the_kv_of_the_oldest():
    """Two live plans, 50 tokens under the older: 50 x 384 bytes must move first. With one live plan nothing has to."""
    plans = GroupPlans(RankProfile((1.0, 1.0)), has_buddies=False)
    plans.model = MODEL
    plans.live = (uniform(1, 6, 3),)
    new = NewSlot(0, "x", 1, tokens_max=64, seed=7, sampling=SamplingSettings())
    plans.records.apply(StepCommand(1, (SliceCommand(0, "x", 1, tuple(range(50)), 0, True),), new_slots=(new,)), StepResult(1, ()))
    assert plans.kv_bytes_ahead_of_another() == 0
    plans.live = (uniform(1, 6, 3), uniform(2, 3, 6))
    assert plans.kv_bytes_ahead_of_another() == 50 * 384


def test_plans_of_different_groups_have_no_moves():
    with pytest.raises(ValueError, match="one group"):
        kv_moves(uniform(1, 6, 3), uniform(2, 3, 3, 3), MODEL)


def test_members_join_at_zero_width_and_leave_only_without_work():
    plan = over_members(uniform(4, 6, 3), (0, 2), (0, 1, 2))
    assert plan.version == 4
    assert plan.layers[0].query_heads == (6, 0, 3)
    idle = LayerPlans.uniform(SplitPlan((6, 0, 3), (1, 0, 1), (1, 0, 1), version=4), MODEL.layers)
    assert over_members(idle, (0, 1, 2), (0, 2)).layers[0].query_heads == (6, 3)
    with pytest.raises(ValueError, match=r"members \[2\] have work"):
        over_members(plan, (0, 1, 2), (0, 1))


def test_hysteresis_by_measured_price():
    assert pays(0.100, 0.080, cost_s=1.0)  # 20 % of 60 s is 12 s
    assert not pays(0.100, 0.080, cost_s=13.0)
    assert not pays(0.100, 0.099, cost_s=0.0)  # within the noise of a forecast
    assert not pays(0.100, 0.110, cost_s=0.0)
    assert not pays(0.0, 0.0, cost_s=0.0)


def test_the_price_is_learnt():
    price = CopyPrice(pause_s=0.1, bytes_per_s=1e6, drag=0.5, weight=1.0)
    assert price.cost_s(2e6, pauses=2) == pytest.approx(0.2 + 0.5 * 2.0)
    price.learn_pause(0.01)
    price.learn_copy(10**7, 1.0)
    price.learn_copy(10, 1.0)  # too little to tell a rate
    assert price.cost_s(2e6) == pytest.approx(0.01 + 0.5 * 0.2)


class Host:
    """A group without ranks: keeps plans and slots, and answers when the test says so."""

    def __init__(self, *plans: LayerPlans, slots: dict[int, int] | None = None) -> None:
        self.plans: tuple[LayerPlans, ...] = plans
        self.slots = slots or {}
        self.acts: list[str] = []
        self.pending: Future[Prepared] = Future()

    def slots_of_plan(self, version: int) -> tuple[int, ...]:
        return tuple(slot for slot, held in self.slots.items() if held == version)

    def prepare(self, order: PrepareOrder) -> Future[Prepared]:
        copied = f"bring up to date {list(order.moves)}" if order.goes_on else f"copy {list(order.moves)} to {order.to_version}"
        self.acts.append(f"prepare plan {order.plan.version}" if order.plan else copied)
        self.pending = Future()
        return self.pending

    def switch(self, order: SwitchOrder, plan: LayerPlans | None = None) -> Switched:
        assert len(self.plans) + (plan is not None) <= 2, "three plans alive"
        self.acts.append(f"switch {'plan' if order.uses_plan else list(order.moves)}")
        for slot in order.moves:
            self.slots[slot] = self.plans[-1].version
        if plan is not None:
            self.plans = (*self.plans, plan)
        return Switched(order.moves, 0, 0.001)

    def release_plan(self, version: int) -> None:
        assert version == self.plans[0].version and not self.slots_of_plan(version)
        self.acts.append(f"release {version}")
        self.plans = self.plans[1:]


def test_a_second_plan_needs_no_move():
    host = Host(uniform(1, 6, 3), slots={0: 1})
    slide = Slide(host, uniform(2, 3, 6))
    assert slide.advance() is None and slide.advance() is None  # waits for the ranks
    host.pending.set_result(Prepared((), 0, 0, 0.1))
    step = slide.advance()
    assert step is not None and step.new_plan is slide.plan and slide.state is SlideState.DONE
    assert host.acts == ["prepare plan 2", "switch plan"]
    assert host.slots == {0: 1}  # keeps its heads
    assert slide.advance() is None


def test_before_a_third_plan_the_oldest_plans_slots_move_as_many_at_a_time_as_fit():
    host = Host(uniform(1, 6, 3), uniform(2, 3, 6), slots={0: 1, 1: 1, 2: 2})
    slide = Slide(host, uniform(3, 9, 0))
    slide.advance()
    host.pending.set_result(Prepared((0,), 0, 100, 0.1))  # room for one copy
    step = slide.advance()
    assert step is not None and (step.moved, step.moved_to, step.new_plan) == ((0,), 2, None)
    slide.advance()
    host.pending.set_result(Prepared((1,), 0, 100, 0.1))
    slide.advance()
    slide.advance()
    host.pending.set_result(Prepared((), 0, 0, 0.1))
    slide.advance()
    assert host.acts == ["copy [0, 1] to 2", "switch [0]", "copy [1] to 2", "switch [1]", "release 1", "prepare plan 3", "switch plan"]
    assert slide.state is SlideState.DONE and [plan.version for plan in host.plans] == [2, 3]


def test_a_slow_copy_is_brought_up_to_date_while_that_gets_quicker():
    """1 s, then 0.4 s for what came meanwhile, then 0.3 s: no longer half of it, so the rest crosses at the switch."""
    host = Host(uniform(1, 6, 3), uniform(2, 3, 6), slots={0: 1})
    slide = Slide(host, uniform(3, 9, 0))
    slide.advance()
    for seconds in (1.0, 0.4):
        host.pending.set_result(Prepared((0,), 0, 100, seconds))
        assert slide.advance() is None
    host.pending.set_result(Prepared((0,), 0, 100, 0.3))
    step = slide.advance()
    assert step is not None and step.moved == (0,)
    assert host.acts == ["copy [0] to 2", "bring up to date [0]", "bring up to date [0]", "switch [0]"]


def test_a_failure_before_the_switch_changes_nothing():
    host = Host(uniform(1, 6, 3), uniform(2, 3, 6), slots={0: 1})
    slide = Slide(host, uniform(3, 9, 0))
    slide.advance()
    host.pending.set_exception(RuntimeError("rank 1 lost"))
    assert slide.advance() is None
    assert slide.state is SlideState.FAILED and slide.reason == "rank 1 lost"
    assert host.slots == {0: 1} and [plan.version for plan in host.plans] == [1, 2]
    assert host.acts == ["copy [0] to 2"]


def test_without_room_for_any_copy_the_slide_gives_up():
    host = Host(uniform(1, 6, 3), uniform(2, 3, 6), slots={0: 1})
    slide = Slide(host, uniform(3, 9, 0))
    slide.advance()
    host.pending.set_result(Prepared((), 0, 0, 0.1))
    assert slide.advance() is None and slide.state is SlideState.FAILED and "no room" in slide.reason


def test_a_plan_of_an_old_version_or_another_group_is_refused():
    host = Host(uniform(2, 6, 3))
    with pytest.raises(ValueError, match="above 2"):
        Slide(host, uniform(2, 3, 6))
    with pytest.raises(ValueError, match="for 3 ranks"):
        Slide(host, uniform(3, 3, 3, 3))
