"""What moving a running call is thought to cost: declared, then as it was measured."""

from __future__ import annotations

import pytest

from envs.decision import move_prices
from envs.decision.group_model import GroupModel, planned
from envs.decision.move_prices import CallMovePrices
from envs.group_kernel import layout as L
from envs.scenario.cluster_file import load_cluster


@pytest.fixture(scope="module")
def groups():
    return load_cluster("unlike-3").groups


@pytest.fixture(scope="module")
def state(groups):
    model = GroupModel(L.allocate(len(groups), max(len(group.ranks) for group in groups), 1))
    for g, group in enumerate(groups):
        model.write_group(g, group)
        for slot in (0, 1):
            model.write_plan(g, slot, group, planned(group, "planner", (1.0,) * len(group.ranks)))
    return model.state


def test_before_anything_was_measured_prices_are_the_declared_ones(groups, state):
    """Copying beside the steps takes a quarter of its time from them (`CopyPrice.drag`), and the latency of the link as the pause."""
    prices = CallMovePrices(groups)
    link = groups[0].outer_link
    bytes_moved = 1000 * groups[0].model.kv_bytes_per_token
    assert prices.copied_s(0, 1000) == pytest.approx(link.alpha_s + 0.25 * bytes_moved * link.beta_s_per_byte)
    assert move_prices.copy_s(groups[0], 1000, transfers=2) == pytest.approx(link.alpha_s + 3 * bytes_moved * link.beta_s_per_byte)
    assert prices.again_s(state, 1, 1000) == move_prices.recompute_s(state, 1, 1000) > 0


def test_prices_follow_what_was_measured_of_the_groups_concerned_and_no_others(groups, state):
    """With all the weight on the last move: 1 s of copying and 0.2 s of pause, a call that stood still three times as long."""
    prices, untouched = CallMovePrices(groups, weight=1.0), CallMovePrices(groups)
    prices.was_copied(0, 1000, 1.0)
    prices.copied_call_paused(0, 0.2)
    assert prices.are_measured(0) and not prices.are_measured(1) and not untouched.are_measured(0)
    assert prices.copied_s(0, 1000) == pytest.approx(0.2 + 0.25)
    assert prices.copied_s(0, 2000) == pytest.approx(0.2 + 0.5)
    expected_s = prices.again_s(state, 1, 1000)
    prices.computed_call_paused(0, 1, expected_s, 3 * expected_s)
    assert prices.again_s(state, 1, 1000) == pytest.approx(3 * expected_s)
    prices.computed_call_paused(0, 1, 3 * expected_s, 3 * expected_s)  # as thought: nothing to learn
    assert prices.again_s(state, 1, 500) == pytest.approx(3 * untouched.again_s(state, 1, 500))
    assert prices.copied_s(1, 1000) == untouched.copied_s(1, 1000)
    assert prices.again_s(state, 0, 1000) == untouched.again_s(state, 0, 1000)


def test_one_wild_measurement_does_not_run_away(groups, state):
    prices = CallMovePrices(groups)
    declared_s = prices.again_s(state, 0, 100)
    prices.computed_call_paused(1, 0, declared_s, 1e9)
    assert prices.again_s(state, 0, 100) <= 50 * declared_s * (1 + 1e-9)
