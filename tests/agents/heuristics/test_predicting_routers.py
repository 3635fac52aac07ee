"""Routers on the predictor's estimates, with the estimates written by hand; and the what-if and matching routers on the toy model."""

from __future__ import annotations

import numpy as np
import pytest
from decision_points import route_point, view_of

from agents.heuristics.match import MatchingScore, sub_scores
from agents.heuristics.predicting import LeastCompletion, LeastSlack, LeastWorkLeft, NetUtility, PrefixAffinity
from agents.heuristics.what_if import WhatIf
from envs.decision import predictor as P

MIDDLE_MASKED = [True, False, True]


@pytest.mark.parametrize(
    ("router", "column"), [(LeastWorkLeft(), P.E_WORK_LEFT_S), (LeastCompletion(), P.E_COMPLETION_S)], ids=["work_left", "completion"]
)
def test_least_of_one_column(router, column):
    estimates = {column: [3.0, 1.0, 2.0]}
    assert router.choose(route_point(view_of(3), estimates=estimates)) == 1
    assert router.choose(route_point(view_of(3), MIDDLE_MASKED, estimates=estimates)) == 2
    assert router.choose(route_point(view_of(3), estimates={column: [2.0, 1.0, 1.0]})) == 1, "a tie goes to the lower index"


def test_least_slack_looks_at_the_worse_of_both_limits():
    """Worst ratios: max(.2, .9) = .9, max(.5, .4) = .5, max(.6, .1) = .6; completion is the same for all."""
    estimates = {P.E_TTFT_RATIO: [0.2, 0.5, 0.6], P.E_TPOT_RATIO: [0.9, 0.4, 0.1], P.E_COMPLETION_S: [4.0] * 3}
    assert LeastSlack().choose(route_point(view_of(3), estimates=estimates)) == 1
    assert LeastSlack().choose(route_point(view_of(3), MIDDLE_MASKED, estimates=estimates)) == 2


def test_least_slack_breaks_near_ties_by_completion():
    """.50 + .02 ln 8 = .542 against .51 + .02 ln 1 = .510."""
    estimates = {P.E_TTFT_RATIO: [0.50, 0.51], P.E_TPOT_RATIO: [0.1, 0.1], P.E_COMPLETION_S: [8.0, 1.0]}
    assert LeastSlack().choose(route_point(view_of(2), estimates=estimates)) == 1
    assert LeastSlack(completion_weight=0.0).choose(route_point(view_of(2), estimates=estimates)) == 0


def test_net_utility_counts_the_harm_to_residents():
    """Own .9, .8, .7; harm -.5, -.1, -.2: net .4, .7, .5. Selfish routing would take the first."""
    estimates = {P.E_OWN: [0.9, 0.8, 0.7], P.E_HARM: [-0.5, -0.1, -0.2], P.E_COMPLETION_S: [2.0] * 3}
    assert NetUtility().choose(route_point(view_of(3), estimates=estimates)) == 1
    assert NetUtility().choose(route_point(view_of(3), MIDDLE_MASKED, estimates=estimates)) == 2


def test_net_utility_breaks_ties_by_completion():
    estimates = {P.E_OWN: [0.9, 0.9], P.E_HARM: [0.0, 0.0], P.E_COMPLETION_S: [2.0, 1.0]}
    assert NetUtility().choose(route_point(view_of(2), estimates=estimates)) == 1


def test_prefix_affinity_follows_the_longest_prefix_within_its_guard():
    """Completion 1.0, 1.4, 1.6 with guard 1.5: the third holds most of the prefix but is too loaded, the second may."""
    estimates = {P.E_COMPLETION_S: [1.0, 1.4, 1.6]}
    point = route_point(view_of(3), hits=[0, 128, 512], estimates=estimates)
    assert PrefixAffinity().choose(point) == 1
    assert PrefixAffinity(guard=2.0).choose(point) == 2
    assert PrefixAffinity().choose(route_point(view_of(3), MIDDLE_MASKED, hits=[0, 128, 512], estimates=estimates)) == 0


def test_prefix_affinity_ignores_short_hits():
    point = route_point(view_of(2), hits=[0, 63], estimates={P.E_COMPLETION_S: [1.0, 1.2]})
    assert PrefixAffinity().choose(point) == 0
    point = route_point(view_of(2), hits=[0, 64], estimates={P.E_COMPLETION_S: [1.0, 1.2]})
    assert PrefixAffinity().choose(point) == 1


@pytest.mark.parametrize("router", [LeastCompletion(), LeastSlack(), NetUtility(), LeastWorkLeft(), WhatIf(np.random.default_rng(0))])
def test_faster_idle_group_is_preferred_under_the_real_predictor(router):
    """Idle but for one equal resident each, twice as fast: better by every measure."""
    view = view_of(2, {0: [(100, 10)], 1: [(100, 10)]})
    assert router.choose(route_point(view, speeds=[1.0, 2.0])) == 1
    assert router.choose(route_point(view, speeds=[2.0, 1.0])) == 0


def test_what_if_sees_that_a_busy_engine_makes_the_newcomer_wait():
    """At speed .11 a step takes 10 / .11 = 90.9 ms, over the share (.9) of chat's 100 ms at which an engine still adds prefill: the
    newcomer waits 100 steps for the twenty residents and then .909 s for its 1,000 tokens, 10.0 s against its limit of 1.4 s.
    Its score is -.02 x (10 / 1.4 - 1). The idle group is slower (95 ms a step), and the closed form, which knows nothing of
    that share, calls it the worse one."""
    view = view_of(2, {1: [(100, 1)] * 20})
    point = route_point(view, speeds=[0.105, 0.11], prompt_tokens=1000)
    assert point.estimates[0, P.E_OWN] < point.estimates[1, P.E_OWN]
    router = WhatIf(np.random.default_rng(0))
    assert router.gains(point, np.array([1])) == pytest.approx([-0.02 * (10.0 / 1.4 - 1.0)], rel=1e-3)
    assert router.choose(point) == 0


def test_what_if_gain_of_an_idle_group_is_the_requests_own_score():
    """Nobody to harm and every limit met by far: the gain is the chat weight 1 times almost 1 (TPOT 10 of 100 ms:
    1 / (1 + exp((.1 - 1) / .1)) = .99988)."""
    point = route_point(view_of(2))
    gains = WhatIf(np.random.default_rng(0)).gains(point, np.array([0, 1]))
    assert gains == pytest.approx([0.99988, 0.99988], abs=2e-4)


def test_what_if_shortlist_bounds_the_play_outs():
    """With a shortlist of one the closed-form favourite is taken as it is."""
    view = view_of(3, {0: [(500, 10)] * 30, 1: [(500, 10)] * 2, 2: [(500, 10)] * 40})
    router = WhatIf(np.random.default_rng(0), shortlist=1)
    assert router.choose(route_point(view)) == 1


def test_matching_score_prefers_room_and_speed():
    """Equal groups but for KV: .1 % free cannot hold the request, so its headroom is 0 and the other wins; then by speed."""
    view = view_of(2, kv_blocks_free=[1, 1000])
    assert MatchingScore().choose(route_point(view)) == 1
    assert MatchingScore().choose(route_point(view_of(2), speeds=[1.0, 2.0])) == 1
    assert MatchingScore().choose(route_point(view, [True, False])) == 0


def test_matching_sub_scores_by_hand():
    """400 + 100 of 16,000 KV tokens: headroom 1 - 500/16,000. No communication: 1. One rank: balance 1.
    Prediction: TTFT about 40 ms of 1.16 s, TPOT 10 of 100 ms: latency 1 / 1.1. Equal groups have no affinity: compute fit 3/4."""
    scores = sub_scores(route_point(view_of(2)))
    assert scores[0] == pytest.approx([0.75, 1 - 500 / 16_000, 1.0, 1 / 1.1, 1.0], rel=1e-3)
    assert np.array_equal(scores[0], scores[1])


def test_matching_score_learns_from_what_a_class_met():
    """Equal groups, but this class's answers took 1.5 times the prediction in the first: the second wins; for another class,
    without such a record, the tie goes to the first."""
    ratio = np.ones((2, 3, 2))
    ratio[0, 0] = 1.5
    view = view_of(2, class_ratio=ratio)
    assert MatchingScore().choose(route_point(view)) == 1
    assert MatchingScore().choose(route_point(view, class_index=1)) == 0
