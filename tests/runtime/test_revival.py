"""Lost ranks are started at once, and ever later where they do not stay."""

from __future__ import annotations

from itertools import pairwise

import pytest

from runtime.revival import FIRST_WAIT_S, STAYED_S, WAIT_MAX_S, Revivals


def test_one_that_never_stays_is_started_ever_later_and_never_given_up():
    revivals, now_s, starts = Revivals(), 0.0, []
    while now_s < 600.0:
        if revivals.due([1], now_s):
            starts.append(now_s)
        now_s += 0.05
    waits = [b - a for a, b in pairwise(starts)]
    assert starts[0] == 0.0 and waits[0] == pytest.approx(FIRST_WAIT_S, abs=0.06)
    assert all(b == pytest.approx(min(2.0 * a, WAIT_MAX_S), abs=0.15) for a, b in pairwise(waits))
    assert waits[-1] == pytest.approx(WAIT_MAX_S, abs=0.06)


def test_one_that_stayed_is_started_at_once():
    revivals = Revivals()
    assert revivals.due([0, 2], 10.0) == [0, 2]
    assert revivals.due([0], 10.0 + STAYED_S) == [0]
    assert revivals.due([2], 10.1) == [] and revivals.due([2], 10.0 + FIRST_WAIT_S) == [2]
    assert revivals.due([], 11.0) == []


def test_those_left_have_a_pause_first():
    revivals = Revivals(pause_s=0.2)
    assert [revivals.due([1], now_s) for now_s in (10.0, 10.19, 10.2)] == [[], [], [1]]
