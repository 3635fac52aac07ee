"""The retry budget: a share of what is active, never below zero, exact on a random history."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.decision.retry_budget import RetryBudget


@pytest.mark.parametrize(("active", "limit"), [(0, 3), (1, 3), (15, 3), (19, 3), (20, 4), (100, 20)])
def test_limit_is_a_fifth_of_active_but_at_least_three(active, limit):
    budget = RetryBudget()
    for _ in range(active):
        budget.start_request()
    assert budget.retries_limit == limit


def test_an_outage_is_not_multiplied():
    """100 requests fail at once and all ask again: the first failed ones leave 99 active, a fifth of what is left may retry."""
    budget = RetryBudget()
    for _ in range(100):
        budget.start_request()
    granted = 0
    for _ in range(100):
        budget.finish(is_retry=False)
        granted += budget.try_start_retry(attempts=1)
    assert granted == budget.granted == budget.active == budget.retrying
    assert granted <= 20 and budget.denied == 100 - granted


def test_attempts_of_one_request_are_bounded():
    budget = RetryBudget(attempts_max=2)
    assert budget.try_start_retry(attempts=1)
    assert not budget.try_start_retry(attempts=2)


@given(st.lists(st.sampled_from(["start", "retry", "end", "end retry"]), max_size=200))
def test_counts_equal_those_of_a_list_of_attempts(history):
    budget, attempts = RetryBudget(), []
    for event in history:
        if event == "start":
            budget.start_request()
            attempts.append(False)
        elif event == "retry":
            may = sum(attempts) < max(3, len(attempts) // 5)
            assert budget.try_start_retry(attempts=1) == may
            attempts += [True] * may
        else:
            is_retry = event == "end retry"
            if is_retry in attempts:
                attempts.remove(is_retry)
                budget.finish(is_retry)
            elif not attempts or is_retry:
                with pytest.raises(RuntimeError, match="exactly once"):
                    budget.finish(is_retry)
        assert (budget.active, budget.retrying) == (len(attempts), sum(attempts))


def test_settings_refuse_nonsense():
    for wrong in ({"active_share": 1.1}, {"retries_min": -1}, {"attempts_max": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            RetryBudget(**wrong)
