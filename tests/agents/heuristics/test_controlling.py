"""Split and rebalance heuristics: exact choices among hand-written moves."""

from __future__ import annotations

import numpy as np
import pytest
from decision_points import control_point, view_of

from agents import heuristics
from agents.heuristics.controlling import BestSplit, Elastic, Threshold, TowardCorner, VirtualUsage
from envs.decision import predictor as P
from envs.decision.split_planner import CORNERS
from envs.domain.commands import Command, CommandKind


def split_to(group: int, corner: str) -> Command:
    return Command(CommandKind.SET_SPLIT, group, argument=CORNERS.index(corner))


def row(gain: float, price_s: float = 0.0, affected: int = 0, target_backlog_s: float = 0.0, utility: float = 0.0) -> tuple[float, ...]:
    """A row of MOVE_FEATURES from plain numbers."""
    return (gain, np.log1p(price_s), np.log1p(affected), np.log1p(target_backlog_s), utility)


@pytest.mark.parametrize("corner", ["even", "compute", "bandwidth", "memory"])
def test_corner_is_reached_one_group_after_the_other(corner):
    other = "memory" if corner != "memory" else "even"
    moves = [(split_to(0, other), row(0.5)), (split_to(0, corner), row(-0.1)), (split_to(1, corner), row(-0.2))]
    splitter = heuristics.make("split", corner, np.random.default_rng(0))
    index = CORNERS.index(corner)
    assert splitter.choose(control_point("split", view_of(2, plan_corner=[-1, -1]), moves)) == 2
    assert splitter.choose(control_point("split", view_of(2, plan_corner=[index, -1]), moves)) == 3
    assert splitter.choose(control_point("split", view_of(2, plan_corner=[index, index]), moves)) == 0
    assert splitter.choose(control_point("split", view_of(2, plan_corner=[-1, -1]), moves, [True, True, False, True])) == 3


def test_toward_corner_by_index():
    moves = [(split_to(0, "compute"), row(0.5))]
    assert TowardCorner(CORNERS.index("compute")).choose(control_point("split", view_of(1, plan_corner=[0]), moves)) == 1


def test_best_split_takes_the_largest_gain_that_pays():
    """60 s to pay back: a gain of .10 saves 60 (1 - e^-.1) = 5.7 s, of .20 saves 10.9 s, of .30 saves 15.6 s."""
    moves = [(split_to(0, "compute"), row(0.10, 1.0)), (split_to(0, "memory"), row(0.20, 2.0)), (split_to(1, "compute"), row(0.30, 20.0))]
    assert BestSplit().choose(control_point("split", view_of(2), moves)) == 2
    assert BestSplit().choose(control_point("split", view_of(2), moves, [True, True, False, True])) == 1
    assert BestSplit(payback_s=120.0).choose(control_point("split", view_of(2), moves)) == 3


def test_best_split_has_hysteresis():
    """A gain of 4 % is under the least gain of 5 % even when it costs nothing; a loss is never taken."""
    moves = [(split_to(0, "compute"), row(0.04)), (split_to(0, "memory"), row(-0.3))]
    assert BestSplit().choose(control_point("split", view_of(1), moves)) == 0
    assert BestSplit(least_gain=0.03).choose(control_point("split", view_of(1), moves)) == 1


def test_threshold_requeues_only_past_its_backlog():
    moves = [(Command(CommandKind.REQUEUE, 0, 1), row(0.8, affected=3))]
    assert Threshold().choose(control_point("rebalance", view_of(2), moves, estimates={P.E_BACKLOG_S: [1.9, 0.0]})) == 0
    assert Threshold().choose(control_point("rebalance", view_of(2), moves, estimates={P.E_BACKLOG_S: [2.1, 0.0]})) == 1
    worse = [(Command(CommandKind.REQUEUE, 0, 1), row(-0.1))]
    assert Threshold().choose(control_point("rebalance", view_of(2), worse, estimates={P.E_BACKLOG_S: [9.0, 0.0]})) == 0


def test_threshold_falls_back_restores_and_scales():
    """Fall back and restore need a gain above .1; scaling out needs a mean backlog above 1 s. The largest score wins."""
    view, nothing = view_of(2), {P.E_BACKLOG_S: [0.0, 0.0]}

    def choice(*moves):
        return Threshold().choose(control_point("rebalance", view, list(moves), estimates=nothing))

    assert choice((Command(CommandKind.FALL_BACK, 0), row(0.05))) == 0
    assert choice((Command(CommandKind.FALL_BACK, 0), row(0.5))) == 1
    assert choice((Command(CommandKind.RESTORE, 1), row(0.5))) == 1
    assert choice((Command(CommandKind.SCALE_OUT, 1), row(0.0, target_backlog_s=0.9, utility=1.0))) == 0
    assert choice((Command(CommandKind.SCALE_OUT, 1), row(0.0, target_backlog_s=1.1, utility=1.0))) == 1
    scale, fall = (
        (Command(CommandKind.SCALE_OUT, 1), row(0.0, target_backlog_s=5.0, utility=1.0)),
        (Command(CommandKind.FALL_BACK, 0), row(0.8)),
    )
    assert choice(scale, fall) == 2, "fall back .8 - .1 = .7 against scaling out .5 + .1 x 1 = .6"
    assert choice((Command(CommandKind.MIGRATE, 0, 1), row(3.0))) == 0, "the threshold rule never migrates"


def test_elastic_starts_the_strongest_and_of_equals_the_least_alike():
    """Pressed, with parked groups 1 and 2: the stronger one; of equally strong ones that whose profile points away from group 0's."""
    moves = [(Command(CommandKind.SCALE_OUT, g), row(0.0, target_backlog_s=1.1)) for g in (1, 2)]
    profile = np.zeros((3, 5))
    profile[:, 0] = 1.0, 1.0, -1.0

    def choice(capability):
        view = view_of(3, capability=capability, is_up=[True, False, False])._replace(static_profile=profile)
        return Elastic().choose(control_point("rebalance", view, moves, estimates={P.E_BACKLOG_S: [0.0] * 3}))

    assert choice([1.0, 1.0, 1.0]) == 2
    assert choice([1.0, 2.5, 1.0]) == 1


def test_elastic_parks_only_what_the_others_can_carry():
    """Two groups of 1,000 blocks: with 600 of them in use the other would not keep half of its KV free; with 400 it would. Nobody may
    wait."""
    moves = [(Command(CommandKind.SCALE_IN, 1), row(0.0, utility=-0.5))]

    def choice(free, **more):
        view = view_of(2, kv_blocks_free=free, kv_blocks_total=[1000, 1000], **more)
        return Elastic().choose(control_point("rebalance", view, moves, estimates={P.E_BACKLOG_S: [0.0, 0.0]}))

    assert choice([700, 700]) == 0
    assert choice([800, 800]) == 1
    assert choice([800, 800], waiting=[1, 0]) == 0
    assert choice([800, 800], accepts=[False, True]) == 0
    assert choice([800, 800], arrival_rate_5s=2.0, arrival_rate_60s=1.0) == 0
    assert Threshold().choose(control_point("rebalance", view_of(2), moves, estimates={P.E_BACKLOG_S: [0.0, 0.0]})) == 0


def test_virtual_usage_moves_from_the_fullest():
    """KV in use 90 % against 10 %: apart by more than 30 %. With a queue it requeues, without one it migrates."""
    moves = [(Command(CommandKind.MIGRATE, 0, 1), row(0.1)), (Command(CommandKind.REQUEUE, 0, 1), row(0.1))]
    estimates = {P.E_BACKLOG_S: [0.0, 0.0]}
    running = view_of(2, kv_blocks_free=[100, 900])
    assert VirtualUsage().choose(control_point("rebalance", running, moves, estimates=estimates)) == 1
    queued = view_of(2, kv_blocks_free=[100, 900], waiting=[2, 0])
    assert VirtualUsage().choose(control_point("rebalance", queued, moves, estimates=estimates)) == 2
    assert VirtualUsage().choose(control_point("rebalance", queued, moves, [True, True, False], estimates=estimates)) == 0


def test_virtual_usage_counts_the_queue_and_leaves_small_gaps():
    """Group 0: 20 % + 6,400 of 16,000 queued tokens = 60 %, group 1: 40 %: apart by 20 %, so nothing is moved; with 9,600
    queued it is 80 %."""
    moves = [(Command(CommandKind.REQUEUE, 0, 1), row(0.1))]
    estimates = {P.E_BACKLOG_S: [0.0, 0.0]}
    small = view_of(2, kv_blocks_free=[800, 600], waiting=[1, 0], prefill_backlog_tokens=[6400, 0])
    assert VirtualUsage().choose(control_point("rebalance", small, moves, estimates=estimates)) == 0
    large = view_of(2, kv_blocks_free=[800, 600], waiting=[1, 0], prefill_backlog_tokens=[9600, 0])
    assert VirtualUsage().choose(control_point("rebalance", large, moves, estimates=estimates)) == 1


@pytest.mark.fault("K13")
def test_virtual_usage_with_every_group_down_keeps():
    moves = [(Command(CommandKind.MIGRATE, 0, 1), row(0.1))]
    view = view_of(2, is_up=[False, False], kv_blocks_free=[0, 0], kv_blocks_total=[0, 0])
    assert VirtualUsage().choose(control_point("rebalance", view, moves, estimates={})) == 0


@pytest.mark.parametrize("name", ["planner", "threshold"])
def test_order_of_candidates_does_not_matter(name):
    """The same command is chosen from a shuffled list (keep stays first)."""
    rng = np.random.default_rng(0)
    decision = "split" if name == "planner" else "rebalance"
    kinds = [CommandKind.SET_SPLIT] if decision == "split" else [CommandKind.REQUEUE, CommandKind.FALL_BACK, CommandKind.SCALE_OUT]
    controller = heuristics.make(decision, name, rng)
    for _ in range(30):
        moves = [(Command(rng.choice(kinds), g, 5, i), tuple(rng.uniform(0, 2, 5))) for i, g in enumerate(rng.integers(0, 4, 6))]
        moves = [(Command(CommandKind(c.kind), int(c.group_index), c.target_index, c.argument), m) for c, m in moves]
        shuffled = [moves[i] for i in rng.permutation(len(moves))]
        estimates = {P.E_BACKLOG_S: [1.0, 2.5, 3.0, 9.0, 0.0, 0.0]}
        points = [control_point(decision, view_of(6), order, estimates=estimates) for order in (moves, shuffled)]
        first, second = (point.commands[controller.choose(point)] for point in points)
        assert first == second
