"""Differences within the noise vanish, true ones stay: checked against the textbook formula and by simulation."""

from __future__ import annotations

import numpy as np
import pytest

from envs.decision.shared_pace import mean_variance, shrunk_paces


def test_equal_groups_with_noise_become_alike():
    """2,000 draws of four equal groups, each measured to 10 %: the spread of what is told is under a third of what was measured."""
    rng = np.random.default_rng(5)
    std = np.full(4, 0.1)
    told, measured = [], []
    for _ in range(2000):
        pace = np.exp(0.1 * rng.standard_normal(4))
        told.append(np.log(shrunk_paces(pace, std, np.ones(4, np.bool_))).std())
        measured.append(np.log(pace).std())
    assert np.mean(told) < 0.34 * np.mean(measured)


def test_a_truly_slow_group_stays_slow():
    """One of three ten times slower, measured to 10 %: within 2 % of what was measured; one of two likewise."""
    for pace in ([1.0, 1.05, 10.0], [1.0, 10.0]):
        found = shrunk_paces(np.array(pace), np.full(len(pace), 0.1), np.ones(len(pace), np.bool_))
        assert found[-1] == pytest.approx(10.0, rel=0.02)


def test_by_hand():
    """Log paces 0, 0, 0.6 with variance 0.04: Q = 0.24 / 0.04 = 6, tau^2 = (6 - 2) / (75 - 25) = 0.08, weight 0.08 / 0.12 = 2 / 3 of the
    distance
    from the mean 0.2."""
    found = np.log(shrunk_paces(np.exp([0.0, 0.0, 0.6]), np.full(3, 0.2), np.ones(3, np.bool_)))
    assert found == pytest.approx([0.2 - 2 / 3 * 0.2] * 2 + [0.2 + 2 / 3 * 0.4])


def test_a_slow_group_does_not_hide_that_the_others_are_alike():
    found = shrunk_paces(np.array([1.0, 1.08, 10.0]), np.full(3, 0.1), np.ones(3, np.bool_))
    assert found[0] == pytest.approx(found[1])


def test_the_unmeasured_are_left_alone():
    found = shrunk_paces(np.array([3.0, 1.0, 1.2]), np.full(3, 0.3), np.array([False, True, True]))
    assert found[0] == pytest.approx(3.0)
    assert found[1] == pytest.approx(found[2])
    assert shrunk_paces(np.array([3.0]), np.array([0.1]), np.array([True]))[0] == pytest.approx(3.0)


def test_variance_of_a_mean():
    """Moments of 1, 3: mean 2, square mean 5, relative variance 0.25; of 10 measurements 0.027 with the prior's 0.02."""
    assert mean_variance(2.0, 5.0, 10.0) == pytest.approx(0.027)
    assert mean_variance(2.0, 4.0, 0.5) == pytest.approx(0.02)
