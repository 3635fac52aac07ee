"""Routers that look at nothing or only count: exact choices on three or four groups, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from decision_points import route_point, view_of

from agents.heuristics.counting import LeastKv, PowerOfTwo, RandomRouter, RoundRobin, ShortestQueue, WeightedRoundRobin


def test_shortest_queue_counts_running_and_waiting():
    """Inside: 1 + 3 = 4, 3 + 0 = 3, 2 + 2 = 4. The middle one; without it the first of the two that tie."""
    view = view_of(3, {0: [(10, 1)], 1: [(10, 1)] * 3, 2: [(10, 1)] * 2}, waiting=[3, 0, 2])
    assert ShortestQueue().choose(route_point(view)) == 1
    assert ShortestQueue().choose(route_point(view, [True, False, True])) == 0


def test_least_kv_adds_what_the_queue_will_need():
    """Pool 1,000 blocks of 16 = 16,000 tokens. In use 20 % + 8,000 tokens queued 50 % = 70 %; 60 %; 65 %."""
    view = view_of(3, kv_blocks_free=[800, 400, 350], prefill_backlog_tokens=[8000, 0, 0])
    assert LeastKv().choose(route_point(view)) == 1
    assert LeastKv().choose(route_point(view, [True, False, True])) == 2
    assert LeastKv().choose(route_point(view, [True, False, False])) == 0


def test_round_robin_takes_turns_and_skips_the_masked():
    router = RoundRobin()
    view = view_of(3)
    assert [router.choose(route_point(view)) for _ in range(4)] == [0, 1, 2, 0]
    assert [router.choose(route_point(view, [True, False, True])) for _ in range(3)] == [2, 0, 2]
    assert router.choose(route_point(view)) == 0


def test_weighted_round_robin_is_smooth():
    """Weights 5, 1, 1 give a a b a c a a: nginx's smooth weighted round robin, its own published example."""
    router = WeightedRoundRobin()
    view = view_of(3, capability=[5.0, 1.0, 1.0])
    assert [router.choose(route_point(view)) for _ in range(7)] == [0, 0, 1, 0, 2, 0, 0]


def test_weighted_round_robin_shares_among_the_allowed():
    """With the strongest group masked, the others alternate by their own weights 2 : 1."""
    router = WeightedRoundRobin()
    view = view_of(3, capability=[9.0, 2.0, 1.0])
    chosen = [router.choose(route_point(view, [False, True, True])) for _ in range(300)]
    assert [chosen.count(g) for g in range(3)] == [0, 200, 100]


def test_random_router_is_uniform_over_the_allowed():
    """3,000 draws over three of four groups: 1,000 each, standard deviation 26; 130 is five of those."""
    router = RandomRouter(np.random.default_rng(0))
    point = route_point(view_of(4), [True, True, False, True])
    counts = np.bincount([router.choose(point) for _ in range(3000)], minlength=6)
    assert counts[[2, 4, 5]].sum() == 0
    assert counts[[0, 1, 3]] == pytest.approx([1000] * 3, abs=130)


def test_power_of_two_takes_the_less_loaded_of_its_pair():
    """Loads 0, 1, 2, 3: pairs are equally likely, so shares are 3/6, 2/6, 1/6 and none for the fullest (3,000 draws)."""
    router = PowerOfTwo(np.random.default_rng(0))
    point = route_point(view_of(4, waiting=[2, 0, 3, 1]))
    counts = np.bincount([router.choose(point) for _ in range(3000)], minlength=4)
    assert counts[2] == 0
    assert counts[[1, 3, 0]] == pytest.approx([1500, 1000, 500], abs=140)


def test_power_of_two_with_two_allowed_is_shortest_queue():
    router = PowerOfTwo(np.random.default_rng(0))
    view = view_of(3, waiting=[2, 0, 5])
    assert {router.choose(route_point(view, [True, False, True])) for _ in range(20)} == {0}
    assert {router.choose(route_point(view_of(2))) for _ in range(20)} == {0}, "a tie goes to the lower index"


def test_weighted_round_robin_gives_a_slowed_group_its_present_share():
    """Equal groups, the second's slowest rank measured at twice its declared time: weights 1 and 1/2, so 200 : 100 of 300."""
    router = WeightedRoundRobin()
    view = view_of(2, rank_ratio=np.array([[1.0], [2.0]]))
    chosen = [router.choose(route_point(view)) for _ in range(300)]
    assert [chosen.count(g) for g in range(2)] == [200, 100]
