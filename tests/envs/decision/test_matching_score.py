"""Matching scores with hand numbers, and their direction by hypothesis."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.decision.matching_score import DEFAULT_WEIGHTS, SUB_SCORES, matching_scores, total

BASE = {
    "ttft_s": [0.5, 2.0],
    "tpot_s": [0.05, 0.05],
    "ttft_limit_s": 1.0,
    "tpot_limit_s": 0.1,
    "kv_tokens_needed": 1000,
    "kv_tokens_free": [4000, 500],
    "comm_fraction": [0.25, 0.0],
    "rank_busy_fraction": [[0.6, 0.9, 0.0], [0.0, 0.0, 0.0]],
    "rank_is_present": [[True, True, False], [True, True, True]],
    "compute_ratio": [0.8, 3.0],
}


def test_hand_numbers():
    """Group 0: .8; 1 - 1000/4000; 1 - .25; 1 / (1 + max(.5, .5)); .75 / .9. Group 1: rate to spare; KV does not fit; no
    communication; TTFT at twice the limit, 1/3; idle ranks are balanced."""
    scores = matching_scores(**BASE)
    np.testing.assert_allclose(scores, [[0.8, 0.75, 0.75, 2 / 3, 5 / 6], [1.0, 0.0, 1.0, 1 / 3, 1.0]])
    assert scores.shape == (2, len(SUB_SCORES)) and sum(DEFAULT_WEIGHTS) == pytest.approx(1.0)


def test_observed_slowness_corrects_predictions():
    """Observed / predicted = 2: group 0's rate ratio .8 -> .4 and its times reach their limits, 1/2; the rest is unchanged."""
    scores = matching_scores(**BASE, observed_over_predicted=[2.0, 1.0])
    np.testing.assert_allclose(scores[0], [0.4, 0.75, 0.75, 0.5, 5 / 6])
    np.testing.assert_allclose(scores[1], matching_scores(**BASE)[1])


def test_total_is_the_weighted_mean():
    scores = np.array([[1.0, 0.0, 0.5, 0.25, 1.0]])
    assert total(scores, [1, 1, 0, 2, 0])[0] == pytest.approx((1.0 + 0.0 + 0.5) / 4)
    assert total(scores)[0] == pytest.approx(0.2 + 0.05 + 0.1 + 0.1)


@pytest.mark.parametrize("weights", [[0] * 5, [1] * 4, [-1, 1, 1, 1, 1], [float("nan")] * 5])
def test_weights_that_mean_nothing_are_refused(weights):
    with pytest.raises(ValueError, match="give 5 finite weights"):
        total(np.ones((1, 5)), weights)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ttft_s", float("nan")),
        ("tpot_limit_s", 0.0),
        ("comm_fraction", 1.5),
        ("kv_tokens_free", -1),
        ("observed_over_predicted", 0.0),
        ("rank_busy_fraction", [0.5, 0.5]),
        ("rank_is_present", [[False] * 3, [True] * 3]),
    ],
)
def test_bad_input_is_named(name, value):
    with pytest.raises(ValueError, match=name):
        matching_scores(**{**BASE, name: value})


POSITIVE = st.floats(0.001, 1000)
FRACTION = st.floats(0, 1)


@given(
    st.fixed_dictionaries(
        {
            "ttft_s": POSITIVE,
            "tpot_s": POSITIVE,
            "ttft_limit_s": POSITIVE,
            "tpot_limit_s": POSITIVE,
            "kv_tokens_needed": POSITIVE,
            "kv_tokens_free": POSITIVE,
            "comm_fraction": FRACTION,
            "compute_ratio": POSITIVE,
            "observed_over_predicted": POSITIVE,
            "rank_busy_fraction": st.lists(st.lists(FRACTION, min_size=3, max_size=3), min_size=1, max_size=1),
        }
    ),
    st.sampled_from(["ttft_s", "tpot_s", "kv_tokens_needed", "comm_fraction", "observed_over_predicted"]),
    st.sampled_from(["ttft_limit_s", "tpot_limit_s", "kv_tokens_free", "compute_ratio"]),
    st.floats(1.0, 10.0),
)
def test_worse_inputs_never_score_better(inputs, harmful, helpful, factor):
    """All in [0, 1]; raising a cost raises no sub-score, raising a supply or a limit lowers none."""
    scores = matching_scores(**inputs)
    assert (scores >= 0).all() and (scores <= 1).all()
    worse = {**inputs, harmful: min(inputs[harmful] * factor, 1.0 if harmful == "comm_fraction" else np.inf)}
    assert (matching_scores(**worse) <= scores + 1e-12).all()
    assert (matching_scores(**{**inputs, helpful: inputs[helpful] * factor}) >= scores - 1e-12).all()


@given(st.permutations(range(4)))
def test_groups_do_not_see_each_other(order):
    """Permuting groups permutes scores."""
    rng = np.random.default_rng(3)
    inputs = {name: rng.uniform(0.1, 1.0, 4) for name in BASE if not name.startswith("rank")}
    busy = rng.uniform(0, 1, (4, 3))
    scores = matching_scores(**inputs, rank_busy_fraction=busy)
    permuted = {name: values[list(order)] for name, values in inputs.items()}
    moved = matching_scores(**permuted, rank_busy_fraction=busy[list(order)])
    np.testing.assert_array_equal(moved, scores[list(order)])


def test_a_class_baseline_bounds_the_latency_expectation():
    """Group 0 predicts half of both limits (2/3); the class's baseline is at its TPOT limit there: 1/2. Group 1's is below its
    prediction and changes nothing."""
    scores = matching_scores(**BASE, baseline_ttft_ratio=[0.1, 0.1], baseline_tpot_ratio=[1.0, 0.2])
    assert scores[:, 3] == pytest.approx([0.5, 1 / 3])


def test_affinity_scales_compute_fit():
    """Cosine 1 leaves it; 0 takes a quarter; -1 half."""
    for cosine, factor in ((1.0, 1.0), (0.0, 0.75), (-1.0, 0.5)):
        assert matching_scores(**BASE, profile_affinity=cosine)[0, 0] == pytest.approx(0.8 * factor)
    with pytest.raises(ValueError, match=r"profile_affinity has a maximum of 1\.5"):
        matching_scores(**BASE, profile_affinity=[1.5, 0.0])
