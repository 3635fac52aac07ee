"""The confidence sequence errs as seldom as it says although it is looked at after every value, and it does find differences."""

from __future__ import annotations

import math

import numpy as np
import pytest

from runtime.rollout.sequential_test import BET_MAX, MeanTest


@pytest.mark.parametrize("draw", ["coin", "narrow", "skewed"])
def test_it_holds_at_all_times_together(draw):
    """500 streams of 300 values, looked at after each: the true mean is shut out in at most 10 % of them (error chance 0.1; a plain 90 %
    interval looked at as often shuts it out in 60 %)."""
    rng = np.random.default_rng(11)
    streams = {
        "coin": lambda: rng.choice([-1.0, 1.0], 300),
        "narrow": lambda: rng.normal(0.0, 0.05, 300),
        "skewed": lambda: rng.beta(0.5, 4.5, 300) * 2 - 1 + 0.8,
    }[draw]
    mean = {"coin": 0.0, "narrow": 0.0, "skewed": 0.0}[draw]
    wrong = naive = 0
    for _ in range(500):
        values = np.clip(streams(), -1, 1)
        test = MeanTest(0.1)
        shut_out = False
        for value in values:
            test.add(float(value))
            shut_out |= not test.low <= mean <= test.high
        wrong += shut_out
        counts = np.arange(10, 301)
        means = np.cumsum(values)[9:] / counts
        spread = np.sqrt(np.maximum(np.cumsum(values**2)[9:] / counts - means**2, 1e-12) / counts)
        naive += bool((np.abs(means - mean) > 1.645 * spread).any())
    assert wrong <= 0.1 * 500, wrong
    assert naive > 0.25 * 500  # the same look at an interval that is not made for it


def test_it_finds_a_difference():
    """Pairs that differ by -0.2, give or take 0.1: shown to be harm within 80 pairs; by 0: never, and within a margin of 0.1 after 200."""
    rng = np.random.default_rng(5)
    worse, same = MeanTest(0.01), MeanTest(0.01)
    for _ in range(80):
        worse.add(float(rng.normal(-0.2, 0.1)))
    for _ in range(200):
        same.add(float(rng.normal(0.0, 0.05)))
    assert worse.high < 0.0 and same.low > -0.1 and same.high > 0.0


def test_by_hand():
    """Two values against the formulas of the paper, written out."""
    test, log_term = MeanTest(0.05), math.log(40.0)
    x, mean, variance, bets, weighted, spread, total, squares = [0.75, 0.5], 0.5, 0.25, 0.0, 0.0, 0.0, 0.0, 0.0
    for t, value in enumerate(x, start=1):
        bet = min(BET_MAX, math.sqrt(2 * log_term / (variance * t * math.log(1 + t))))
        bets, weighted = bets + bet, weighted + bet * value
        spread += 4 * (value - mean) ** 2 * (-math.log(1 - bet) - bet) / 4
        total += value
        mean = (0.5 + total) / (t + 1)
        squares += (value - mean) ** 2
        variance = (0.25 + squares) / (t + 1)
        test.add(2 * value - 1)
    low = 2 * (weighted / bets - (log_term + spread) / bets) - 1
    assert test.low == pytest.approx(max(-1.0, low)) and test.mean == pytest.approx(0.25)
    with pytest.raises(ValueError, match="within -1 to 1"):
        test.add(1.5)
