"""The what-if play: against hand numbers, and it leaves the world alone."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from agents.heuristics.what_if import WhatIf
from envs.cluster.cluster_process import ClusterProcess
from envs.decision import predictor as P
from envs.group_kernel.play_forward import SOFTNESS, scratch_group, what_if_gain
from envs.perf_model import step_time as ST
from tests.envs import small_worlds as W
from tests.envs.small_worlds import Shortest, world

LIMITS = P.class_limits()  # rows: TTFT base, per token, TPOT, weight
STEP_S = 0.04


def score(ttft_over, tpot_over, weight):
    worst = max(ttft_over, tpot_over)
    return weight * (1.0 / (1.0 + np.exp((worst - 1.0) / SOFTNESS)) - 0.02 * max(0.0, worst - 1.0))


def gain(residents, prompt, class_index, output, horizon_s=120.0, limit=4, now_s=10.0, pause_s=0.0):
    """`what_if_gain` where every step takes STEP_S: residents are rows (class, prompt, generated, prefill left, admitted,
    arrival, first); all lengths are `output` further tokens."""
    rank_cost = np.zeros((1, 2, 1, ST.RANK_COLUMNS))
    group_cost = np.zeros((1, ST.GROUP_COLUMNS))
    group_cost[0, ST.GC_HOST_BASE_S] = STEP_S
    group_cost[0, [ST.GC_HOST_SLOW, ST.GC_LINK_SLOW, ST.GC_INTERFERENCE]] = 1.0
    group_ints = np.zeros((1, 9), np.int64)
    group_ints[0, 3] = 10**6
    group_ints[0, 8] = limit
    group_floats = np.array([[0.0, 0.0, 1.0, pause_s, 0.0]])
    ints = np.array([[i, r[0], r[1], r[2], r[3], r[4]] for i, r in enumerate(residents)], np.int64).reshape(-1, 6)
    floats = np.array([[r[5], r[6], r[5]] for r in residents], np.float64).reshape(-1, 3)
    quantiles = np.full((3, P.REMAINING_BINS, P.QUANTILES), float(output))
    return what_if_gain(
        scratch_group(1, 64), now_s, 0, group_ints, group_floats, np.array([0, len(residents)]), ints, floats, 16,
        np.array([now_s, prompt, class_index], np.float64), now_s, 0, LIMITS, rank_cost, group_cost, np.zeros(1, np.int64),
        quantiles, np.array([2048]), np.full((2, 8), 0.5), horizon_s,
    )  # fmt: skip


def test_alone_the_gain_is_the_requests_own_score():
    """One step to the first token, one per further token: TTFT 40 ms, TPOT 40 ms against 1.04 s and 100 ms."""
    assert gain([], 100, 0, 20) == pytest.approx(score(STEP_S / 1.04, 0.4, 1.0), rel=1e-9)
    assert gain([], 100, 1, 20) == pytest.approx(score(STEP_S / 0.54, 0.5, 2.0), rel=1e-9)


def test_a_full_batch_makes_the_newcomer_wait_for_a_resident():
    """One slot, a resident with 20 tokens to go: the newcomer's first token comes after 21 steps; the resident is unharmed."""
    resident = (0, 100, 5, 0, 1, 9.0, 9.5)
    found = gain([resident], 100, 0, 20, limit=1)
    assert found == pytest.approx(score(21 * STEP_S / 1.04, 0.4, 1.0), rel=1e-9)


def test_a_pause_counts():
    assert gain([], 100, 0, 20, pause_s=2.0) == pytest.approx(score((2.0 + STEP_S) / 1.04, 0.4, 1.0), rel=1e-9)


@pytest.mark.fault("K12")
def test_who_does_not_end_before_the_horizon_is_charged_not_forgotten():
    """A newcomer that cannot start before the horizon gains its lateness charge, less than nothing, and the later the worse."""
    resident = (0, 100, 5, 0, 1, 9.0, 9.5)
    near, far = (gain([resident], 100, 0, 10_000, horizon_s=h, limit=1) for h in (10.0, 60.0))
    assert near == pytest.approx(score(10.0 / 1.04, 0.0, 1.0), rel=1e-9)
    assert far < near < 0.0


def test_what_if_leaves_the_world_as_it_was_and_prefers_the_idle_group():
    """A decision of the what-if router changes no array of the kernel; with the pair crowded it goes to the single card."""
    process = ClusterProcess(world(W.trace(np.arange(30) * 0.05, 1500, 300)))
    router = WhatIf(np.random.default_rng(0))
    for _ in range(25):
        point = process.next_decision()
        process.apply(point, W.PAIR)
    point = process.next_decision()
    before = copy.deepcopy(tuple(np.array(part) for part in process.state))
    choice = router.choose(point)
    assert choice == W.SOLO
    for old, new in zip(before, process.state, strict=True):
        assert np.array_equal(old, new, equal_nan=True)
    process.apply(point, Shortest().choose(point))
