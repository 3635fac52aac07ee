"""Objective against hand-computed numbers; K12 (failing fast looks good) and K13 (nothing measured yet)."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.decision import objective
from envs.domain.requests import CLASS_INDEX, LATENCY_PARTS, SERVICE_CLASSES, OutcomeKind, RequestOutcome

CHAT, CODE, BATCH = CLASS_INDEX["chat"], CLASS_INDEX["code"], CLASS_INDEX["batch"]
HORIZON_S = 60.0


def outcome(class_index=CHAT, kind=OutcomeKind.COMPLETED, arrival_s=10.0, ttft_s=1.0, tpot_s=0.05, prompt=1000, tokens=101, **more):
    served = kind is OutcomeKind.COMPLETED
    first_s = arrival_s + ttft_s if served else math.nan
    finish_s = first_s + tpot_s * (tokens - 1) if served else math.nan
    fields = dict(
        request_id=0, class_index=class_index, kind=kind, reason="" if served else "test", group_index=0, arrival_s=arrival_s,
        admitted_s=arrival_s, first_token_s=first_s, finish_s=finish_s, prompt_tokens=prompt,
        output_tokens=tokens if served else 0,
    )  # fmt: skip
    return RequestOutcome(**{**fields, **more})


def test_limits_are_those_of_the_frozen_table():
    ttft_s, tpot_s, weight = objective.limits([CHAT, CODE, BATCH], [1000, 2000, 3000], multiplier=2)
    assert ttft_s == pytest.approx([2.8, 2.6, 46.0])
    assert tpot_s == pytest.approx([0.2, 0.16, 0.6])
    assert weight == pytest.approx([1.0, 2.0, 0.5])


def test_met_needs_completion_and_both_limits():
    """Chat, 1,000 prompt tokens: TTFT limit 1.4 s, TPOT limit 0.1 s; equal to the limit is within it."""
    got = objective.met(CHAT, 1000, [True, True, True, False, True], [1.4, 1.5, 1.0, 1.0, np.nan], [0.1, 0.05, 0.11, 0.05, 0.05])
    assert got.tolist() == [True, False, False, False, False]


def test_goodput_is_a_weighted_share_of_all_that_arrived():
    """Weights 1, 2, 0.5, of which the first and the last met: 1.5 / 3.5."""
    assert objective.goodput([1.0, 2.0, 0.5], [True, False, True]) == pytest.approx(1.5 / 3.5)
    assert objective.goodput([], []) is None


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (outcome(), 1.0),
        (outcome(class_index=CODE, ttft_s=0.9, tpot_s=0.08), 2.0),
        # First token at 2.8 s against 1.4: late by one limit.
        (outcome(ttft_s=2.8), -1.0),
        # 100 further tokens at 0.12 s against 0.10: 2 s late = 2 / 1.4 limits.
        (outcome(tpot_s=0.12), -2.0 / 1.4),
        (outcome(ttft_s=2.8, tpot_s=0.12), -3.4 / 1.4),
        # Unserved to the horizon: (60 - 1.4) / 1.4; batch: weight 0.5, limit 21 s, (60 - 21) / 21.
        (outcome(kind=OutcomeKind.REFUSED), -58.6 / 1.4),
        (outcome(kind=OutcomeKind.FAILED), -58.6 / 1.4),
        (outcome(class_index=BATCH, kind=OutcomeKind.UNFINISHED), -0.5 * 39 / 21),
        # Served after the horizon costs what refusal costs, not more.
        (outcome(ttft_s=500.0), -58.6 / 1.4),
        # Batch with 30,000 prompt tokens: the limit of 50 s leaves 10 s to the horizon, yet refusal costs one whole limit.
        (outcome(class_index=BATCH, kind=OutcomeKind.REFUSED, prompt=30_000), -0.5),
    ],
)
def test_value_of_one_request_by_hand(case, expected):
    assert objective.value_of(case, HORIZON_S) == pytest.approx(expected)
    assert objective.values(objective.columns([case]), HORIZON_S)[0] == pytest.approx(expected)


outcomes_any = st.builds(
    outcome,
    class_index=st.sampled_from([CHAT, CODE, BATCH]),
    kind=st.sampled_from(list(OutcomeKind)),
    arrival_s=st.floats(0, 1e4),
    ttft_s=st.floats(0, 200),
    tpot_s=st.floats(0, 2),
    prompt=st.integers(1, 100_000),
    tokens=st.integers(1, 3000),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(outcomes_any, max_size=6), st.integers(1, 4))
def test_scalar_and_array_values_agree(cases, multiplier):
    arrays = objective.values(objective.columns(cases), HORIZON_S, multiplier)
    scalars = [objective.value_of(case, HORIZON_S, multiplier) for case in cases]
    assert arrays == pytest.approx(scalars, rel=1e-12, abs=1e-9)


@pytest.mark.fault("K12")
@settings(max_examples=300, deadline=None)
@given(outcomes_any, st.sampled_from([OutcomeKind.REFUSED, OutcomeKind.FAILED, OutcomeKind.UNFINISHED]))
def test_no_failure_is_worth_more_than_serving(case, kind):
    """Whatever happens to a served request, refusing, losing or holding the same request is worth no more."""
    failed = outcome(class_index=case.class_index, kind=kind, arrival_s=case.arrival_s, prompt=case.prompt_tokens)
    assert objective.value_of(failed, HORIZON_S) <= objective.value_of(case, HORIZON_S) + 1e-9


@pytest.mark.fault("K12")
def test_later_is_never_better_and_is_linear_to_the_horizon():
    """Second differences of the value over first-token time vanish between limit and horizon: no cap, no log."""
    times_s = np.linspace(2.0, 55.0, 50)
    worth = np.array([objective.value_of(outcome(ttft_s=t, tokens=1), HORIZON_S) for t in times_s])
    assert (np.diff(worth) < 0).all()
    assert np.abs(np.diff(worth, 2)).max() < 1e-9


def _one_server(policy, rng, count=400, rate_per_s=0.4):
    """FIFO server, 10 % long requests (8 s) among short ones (1 s): load 0.68, so that serving everybody is possible."""
    arrivals_s = np.cumsum(rng.exponential(1 / rate_per_s, count))
    is_long = rng.random(count) < 0.1
    free_s, results = 0.0, []
    for arrival_s, long in zip(arrivals_s.tolist(), is_long.tolist(), strict=True):
        tokens, service_s = (81, 8.0) if long else (11, 1.0)
        if policy == "refuse":
            results.append(outcome(kind=OutcomeKind.REFUSED, arrival_s=arrival_s))
        elif policy == "hold" or (policy == "starve long" and long):
            results.append(outcome(kind=OutcomeKind.UNFINISHED, arrival_s=arrival_s))
        else:
            start_s = max(free_s, arrival_s)
            free_s = start_s + service_s
            tpot_s = service_s / (tokens - 1)
            results.append(outcome(arrival_s=arrival_s, ttft_s=start_s - arrival_s, tpot_s=tpot_s, tokens=tokens))
    return results, float(arrivals_s[-1])


@pytest.mark.fault("K12")
@pytest.mark.parametrize("policy", ["refuse", "hold", "starve long"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_giving_up_scores_below_serving(policy, seed):
    served, span_s = _one_server("serve", np.random.default_rng(seed))
    given_up, _ = _one_server(policy, np.random.default_rng(seed))
    good = objective.summary(served, span_s, HORIZON_S)
    bad = objective.summary(given_up, span_s, HORIZON_S)
    assert bad["value_total"] < good["value_total"]
    assert bad["latency"]["ttft_s"]["p99"] == HORIZON_S
    assert bad["outcomes"]["completed"] < good["outcomes"]["completed"] == 400


def test_partial_charges_add_up_to_the_charge_at_the_finish():
    """Chat, P=1,000, first token at 3.4 s (2 s late), then 0.2 s per token: charge so far is a running total."""
    limits = (1.4, 0.1)
    at = [(1.0, 0), (2.4, 0), (3.4, 1), (5.4, 11), (7.4, 21)]
    charges = [float(objective.lateness_charge(*limits, 0.0, 3.4, until_s, tokens, HORIZON_S)) for until_s, tokens in at]
    assert charges == pytest.approx([0.0, 1.0 / 1.4, 2.0 / 1.4, 3.0 / 1.4, 4.0 / 1.4])
    final = outcome(arrival_s=0.0, ttft_s=3.4, tpot_s=0.2, tokens=21)
    assert -objective.value_of(final, HORIZON_S) == pytest.approx(charges[-1])
    assert float(objective.lateness_charge(*limits, 0.0, math.nan, 2.4, 0, HORIZON_S)) == pytest.approx(1.0 / 1.4)


def test_summary_by_hand():
    """Chat met, code late, batch refused: goodput 1 / 3.5; TTFT values 1, 3 and 60 s."""
    parts = tuple(float(i) for i in range(len(LATENCY_PARTS)))
    cases = [
        outcome(parts=parts),
        outcome(class_index=CODE, ttft_s=3.0, tokens=1, preemptions=2),
        outcome(class_index=BATCH, kind=OutcomeKind.REFUSED, reason="queue full"),
    ]
    report = objective.summary(cases, span_s=10.0, horizon_s=HORIZON_S)
    json.dumps(report, allow_nan=False)
    assert report["goodput_share"] == pytest.approx(1 / 3.5)
    assert report["goodput_per_s"] == pytest.approx(0.1)
    assert report["outcomes"] == {"completed": 2, "refused": 1, "unservable": 0, "failed": 0, "unfinished": 0}
    assert report["failure_reasons"] == {"queue full": 1}
    assert report["latency"]["ttft_s"]["p50"] == pytest.approx(3.0)
    # Linear interpolation at 0.99 x 2 = 1.98 of the way along (1, 3, 60).
    assert report["latency"]["ttft_s"]["p99"] == pytest.approx(3.0 + 0.98 * 57.0)
    assert report["latency"]["tpot_s"]["measured"] == 1  # a single token has none
    assert report["classes"]["batch"]["goodput_share"] == 0.0
    assert report["classes"]["batch"]["latency"]["ttft_s"]["p50"] == HORIZON_S
    assert report["classes"]["code"]["latency"]["tpot_s"]["p50"] is None
    assert report["latency_parts_mean_s"]["memory_stall_s"] == 3.0
    assert report["preemptions"] == 2
    # 1 - 2 x (3.0 - 0.9) / 0.9 - 0.5 x (60 - 21) / 21
    assert report["value_total"] == pytest.approx(1 - 2 * 2.1 / 0.9 - 0.5 * 39 / 21)


def test_failures_stand_at_the_worst_value_even_when_a_completion_was_slower_than_the_horizon():
    report = objective.summary([outcome(ttft_s=100.0, tokens=1), outcome(kind=OutcomeKind.FAILED)], 1.0, HORIZON_S)
    assert report["latency"]["ttft_s"]["p50"] == pytest.approx(100.0)


@pytest.mark.fault("K13")
def test_an_empty_run_gives_strict_json_with_nulls():
    report = json.loads(json.dumps(objective.summary([], span_s=0.0, horizon_s=HORIZON_S), allow_nan=False))
    assert report["goodput_share"] is None and report["goodput_per_s"] is None and report["value_mean"] is None
    assert report["latency"]["ttft_s"] == {"p50": None, "p95": None, "p99": None, "measured": 0, "at_worst": 0}
    assert report["latency_parts_mean_s"]["queue_s"] is None
    assert set(report["classes"]) == {service.name for service in SERVICE_CLASSES}


@pytest.mark.fault("K13")
def test_a_run_of_nothing_but_refusals_is_strict_json():
    report = objective.summary([outcome(kind=OutcomeKind.REFUSED)] * 3, 1.0, HORIZON_S)
    json.dumps(report, allow_nan=False)
    assert report["goodput_share"] == 0.0 and report["refusals"] == 3


def test_multiplier_is_the_smallest_integer_that_serves_the_median_group():
    """Chat, P=1,000 (1.4 s, 0.1 s): groups need 0.5, 2.5 and 9 limits, so 3; with four groups the faster middle counts."""
    ttft_s = [[0.7], [3.5], [12.6]]
    tpot_s = [[0.05], [0.10], [0.10]]
    assert objective.smallest_limit_multiplier(ttft_s, tpot_s, [CHAT], [1000]) == 3
    assert objective.smallest_limit_multiplier([[1.4]], [[0.1]], [CHAT], [1000]) == 1
    assert objective.smallest_limit_multiplier([[0.1]], [[0.2]], [CHAT], [1000]) == 2
    assert objective.smallest_limit_multiplier([*ttft_s, [14.0]], [*tpot_s, [0.1]], [CHAT], [1000]) == 3


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="not in order"):
        objective.summary([outcome(finish_s=math.nan)], 1.0, HORIZON_S)
    with pytest.raises(ValueError, match="horizon_s"):
        objective.summary([], 1.0, math.inf)
    with pytest.raises(ValueError, match="give 9"):
        objective.summary([outcome(parts=(1.0,))], 1.0, HORIZON_S)
    with pytest.raises(ValueError, match="not finite"):
        objective.smallest_limit_multiplier([[math.inf]], [[0.1]], [CHAT], [1000])
    with pytest.raises(ValueError, match="groups, cases"):
        objective.smallest_limit_multiplier(np.empty((0, 1)), np.empty((0, 1)), [CHAT], [1000])


def test_gpu_seconds_have_a_price():
    assert objective.gpu_charge(100.0, 0.01) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="gpu_s"):
        objective.gpu_charge(-1.0, 0.01)
