"""The closed-form predictor: finite, monotone, close to the world it predicts when nothing is hidden, and blind to the future."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.cluster.cluster_process import ClusterProcess
from envs.decision import predictor as P
from envs.domain.requests import Request
from tests.envs import small_worlds as W
from tests.envs.small_worlds import LIMITS, RouteTo, Shortest, play, world

PLAIN = dict(use_residual_tables=False, interference_sigma=0.0)


@pytest.fixture(scope="module")
def busy():
    """The first decision of a world at 6 s, groups loaded."""
    process = ClusterProcess(world(W.traffic(120, 8.0, 2), W.cluster(LIMITS)))
    while (point := process.next_decision()) is not None and process.env.now < 6.0:
        process.apply(point, Shortest().choose(point))
    assert (point.view.running[:2] > 0).all()
    return point


def estimate(point, view=None, prompt=300, class_index=0, hits=0):
    request = Request(-1, point.view.now_s, prompt, class_index)
    return P.estimate_routes(view or point.view, request, np.full(point.view.groups, hits, np.int64), point.tables)


sizes = st.integers(0, 200_000)


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 1_000_000),
    st.integers(0, 2),
    sizes,
    sizes,
    st.integers(0, 50_000),
    st.integers(0, 5000),
    st.floats(0.05, 20.0),
    st.floats(0, 1e9),
)
def test_estimates_are_finite_for_any_load(busy, prompt, class_index, backlog, kv, waiting, free, correction, pause_s):
    groups = busy.view.groups
    view = busy.view._replace(
        prefill_backlog_tokens=np.full(groups, backlog),
        decode_kv_tokens=np.full(groups, kv),
        waiting=np.full(groups, waiting),
        kv_blocks_free=np.full(groups, free),
        correction=np.full(groups, correction),
        pause_left_s=np.full(groups, pause_s),
    )
    found = estimate(busy, view, prompt, class_index)
    assert np.isfinite(found).all()
    assert (found[:, [P.E_TTFT_S, P.E_TPOT_S, P.E_COMPLETION_S, P.E_STEP_AFTER_S, P.E_PREFILL_RATE]] > 0).all()
    assert (found[:, P.E_COMPLETION_S] >= found[:, P.E_TTFT_S]).all()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 20_000), st.integers(1, 20_000), st.integers(1, 4000))
def test_more_of_anything_makes_the_first_token_later(busy, backlog, more, prompt):
    """TTFT never falls with backlog, pause, correction, less free KV or a longer prompt; it never rises with cache hits."""
    groups = busy.view.groups

    def ttft(**changes):
        changed = {name: np.full(groups, value) for name, value in changes.items() if name not in ("prompt", "hits")}
        view = busy.view._replace(**({"prefill_backlog_tokens": np.full(groups, backlog)} | changed))
        return estimate(busy, view, changes.get("prompt", prompt), hits=changes.get("hits", 0))[:, P.E_TTFT_S]

    base = ttft()
    slack = 1e-9 * base
    assert (ttft(prefill_backlog_tokens=backlog + more) >= base - slack).all()
    assert (ttft(pause_left_s=1.0) >= base + 1.0 - busy.view.pause_left_s - slack).all()
    assert (ttft(correction=5.0) >= ttft(correction=1.0) - slack).all()
    assert (ttft(kv_blocks_free=0) >= ttft(kv_blocks_free=10**6) - slack).all()
    assert (ttft(prompt=prompt + more) >= base - slack).all()
    assert (ttft(hits=prompt // 2) <= base + slack).all()


@pytest.mark.parametrize("prompt", [100, 1000, 2048, 2049, 3500])
def test_an_idle_group_is_predicted_as_it_then_serves(prompt):
    """Alone in a group and with nothing hidden from the model, the first token comes when predicted: within 10 % and the
    return time (the predictor rounds partial chunks)."""
    predicted = {}
    for g in (W.PAIR, W.SOLO):
        process = play(
            world(W.trace([0.0], prompt, 50), **PLAIN),
            {"route": RouteTo(g)},
            on_point=lambda process, point, g=g: predicted.setdefault(g, point.estimates[g].copy()),
        )
        out = process.outcomes
        assert predicted[g][P.E_TTFT_S] == pytest.approx(out.first_token_s[0] - 0.002, rel=0.10)
        tpot_s = (out.finish_s[0] - out.first_token_s[0]) / 49
        assert predicted[g][P.E_TPOT_S] == pytest.approx(tpot_s, rel=0.05)


def test_remaining_bins_agree_with_their_starts():
    """bin_starts()[b] is the smallest count that remaining_bin puts in b, for every bin that any count reaches."""
    starts = P.bin_starts()
    reached = {P.remaining_bin(made) for made in range(20_000)}
    for b in sorted(reached):
        first = min(made for made in range(20_000) if P.remaining_bin(made) == b)
        assert starts[b] == first or b == P.REMAINING_BINS - 1, b


def test_queue_keys_order_by_arrival_within_a_class_and_let_priority_overtake_by_its_head_start():
    assert P.queue_key(5.0, 0, 2.0) < P.queue_key(5.1, 0, 2.0)
    assert P.queue_key(5.0, 1, 2.0) == 5.0 - 2 * 2.0
    assert P.queue_key(5.0, 2, 2.0) == 5.0


def test_residents_are_harmed_more_by_a_longer_newcomer(busy):
    """The harm to residents never shrinks with the newcomer's prompt, and an empty group has nobody to harm."""
    harms = np.array([estimate(busy, prompt=prompt)[:, P.E_HARM] for prompt in (16, 256, 1024, 4096)])
    assert (np.diff(harms, axis=0) <= 1e-9).all()
    assert (harms[:, W.SPARE] == 0.0).all()
