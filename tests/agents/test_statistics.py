"""Statistics against numbers worked out by hand or by other means."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from agents.statistics import (
    bootstrap_interval,
    interquartile_mean,
    iqm_difference,
    mean_difference,
    paired_differences,
    probability_of_improvement,
)


def test_interquartile_mean_by_hand_and_against_scipy():
    """Of 1..8 the middle half is 3, 4, 5, 6; outliers beyond it do not count."""
    assert interquartile_mean([1000, 1, 2, 3, 4, 5, 6, -50]) == (2 + 3 + 4 + 5) / 4
    values = np.random.default_rng(0).normal(size=(5, 37))
    assert interquartile_mean(values, axis=1) == pytest.approx(stats.trim_mean(values, 0.25, axis=1))


def test_pairing_removes_the_worlds():
    """Worlds differ by 100, the policy is better by 1 +- .1 in each: the interval lies around 1, tightly."""
    rng = np.random.default_rng(1)
    worlds = rng.normal(0, 100, 40)
    policy = worlds + 1 + rng.normal(0, 0.1, 40)
    interval = mean_difference(policy, worlds, rng)
    assert 0.9 < interval.low < interval.estimate < interval.high < 1.1
    assert interval.excludes_zero and interval.worlds == 40


def test_bootstrap_width_matches_the_normal_theory():
    """100 normal numbers: half width of 95 % about 1.96 * s / 10, to within 10 %."""
    rng = np.random.default_rng(2)
    values = rng.normal(3.0, 2.0, 100)
    interval = bootstrap_interval(values, rng)
    assert (interval.high - interval.low) / 2 == pytest.approx(1.96 * values.std(ddof=1) / 10, rel=0.1)


def test_bootstrap_covers_the_truth_as_often_as_it_says():
    """300 repeats with 30 worlds: 95 % nominal; the percentile bootstrap is a little short at n = 30 (about 93 %)."""
    rng = np.random.default_rng(3)
    hits = sum((i := bootstrap_interval(rng.normal(0, 1, 30), rng, resamples=500)).low <= 0 <= i.high for _ in range(300))
    assert 0.89 <= hits / 300 <= 0.98


def test_probability_of_improvement_counts_ties_half():
    """Two wins, one tie, one loss: (2 + .5) / 4."""
    interval = probability_of_improvement([2, 2, 1, 0], [1, 1, 1, 1], np.random.default_rng(0))
    assert interval.estimate == 0.625
    assert 0 <= interval.low <= 0.625 <= interval.high <= 1


def test_seeds_are_averaged_within_a_world():
    """Ten seeds do not make ten times as many worlds."""
    policy = np.array([[1.0, 3.0], [2.0, 4.0]])
    assert paired_differences(policy, [1.0, 1.0]).tolist() == [1.0, 2.0]
    assert mean_difference(policy, [1.0, 1.0], np.random.default_rng(0)).worlds == 2


def test_iqm_difference_ignores_one_runaway_world():
    differences = [0.01, 0.012, 0.009, 0.011, 0.5, 0.01, 0.011, -0.4]
    interval = iqm_difference(differences, np.zeros(8), np.random.default_rng(0))
    assert interval.estimate == pytest.approx((0.01 + 0.01 + 0.011 + 0.011) / 4)


def test_same_generator_same_interval():
    values = np.arange(10.0)
    assert bootstrap_interval(values, np.random.default_rng(9)) == bootstrap_interval(values, np.random.default_rng(9))


@pytest.mark.parametrize(
    ("policy", "baseline", "message"),
    [([1.0], [1.0, 2.0], "same worlds"), ([], [], "at least one world"), ([np.nan], [1.0], "not finite")],
)
def test_unusable_input_is_named(policy, baseline, message):
    with pytest.raises(ValueError, match=message):
        mean_difference(policy, baseline, np.random.default_rng(0))
