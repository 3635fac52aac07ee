"""The kernel against a plain step-by-step twin, closed forms of queueing theory, and conservation laws."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.group_kernel import layout as L
from envs.group_kernel.advance import advance_all, next_event_s
from envs.group_kernel.jump import cut_jump
from envs.group_kernel.queue import enqueue
from envs.group_kernel.reading import kv_conserved
from envs.perf_model import step_time as ST
from envs.perf_model.step_time import step_parts
from tests.oracles import PlainRequest, md1_wait_s, mm1_wait_s, mmc_wait_s, plain_group

COSTS = np.array([4e-6, 2e-3, 1e-10, 2e-8, 1.2e-5, 6e-3, 1e-7, 1e-4, 3e-4, 2e-6])


def make_group(groups=1, ranks=2, slots=4096, limit=8, chunk=512, blocks=10**7, block_tokens=16):
    """Groups with unlike ranks, endless KV by default, no batch or chunk adaptation."""
    state = L.allocate(groups, ranks, slots)
    for r in range(ranks):
        state.rank_cost[:, 0, r] = COSTS * (1.0 + 0.5 * r)
        state.rank_cost[:, 0, r, ST.RC_DECODE_KV_S] = COSTS[ST.RC_DECODE_KV_S] * (3.0 - r)
    state.predicted_rank_cost[:] = state.rank_cost
    state.group_cost[:, ST.GC_COMM_ALPHA_S] = 1e-3
    state.group_cost[:, ST.GC_COMM_TOKEN_S] = 1e-6
    state.group_cost[:, ST.GC_OVERLAP_FRACTION] = 0.1
    state.group_cost[:, ST.GC_HOST_BASE_S] = 2e-3
    state.group_cost[:, ST.GC_HOST_SEQUENCE_S] = 1e-5
    ints = state.group_int
    ints[:, L.GI_RUNNING_LIMIT] = limit
    ints[:, [L.GI_CHUNK_MAX, L.GI_CHUNK_MIN]] = chunk
    ints[:, L.GI_BATCH_MIN] = limit
    ints[:, [L.GI_BLOCK_TOKENS, L.GI_CACHE_BLOCK_TOKENS]] = block_tokens
    ints[:, L.GI_PREEMPTION_LIMIT] = 64
    state.group_float[:, L.GF_QUEUE_TIMEOUT_S] = 1e12
    state.group_float[:, L.GF_TPOT_MARGIN] = 0.9
    state.kv_bytes[:] = blocks
    state.kv_block_bytes[:, 0] = 1.0
    return state


def fixed_step(state, seconds):
    """Every step takes `seconds`, whatever it carries."""
    state.rank_cost[:] = 0.0
    state.group_cost[:, ST.GC_COMM_ALPHA_S] = 0.0
    state.group_cost[:, ST.GC_COMM_TOKEN_S] = 0.0
    state.group_cost[:, ST.GC_HOST_SEQUENCE_S] = 0.0
    state.group_cost[:, ST.GC_HOST_BASE_S] = seconds


def feed(state, arrivals_s, prompts, outputs, until_s=1e12):
    """Play all requests into group 0; returns (records by request, worst gap between the parts' sum and the whole)."""
    found, worst = {}, 0.0

    def drain():
        nonlocal worst
        for i in range(int(state.record_count[0])):
            ints, floats = state.record_int[i].copy(), state.record_float[i].copy()
            found[int(ints[L.RI_REQUEST])] = (ints, floats)
            whole = floats[L.RF_FINISH_S] - floats[L.RF_ARRIVAL_S]
            worst = max(worst, abs(floats[L.RF_PARTS :].sum() - whole))
        state.record_count[0] = 0

    for i, (arrival_s, prompt, output) in enumerate(zip(arrivals_s, prompts, outputs, strict=True)):
        advance_all(state, arrival_s)
        drain()
        assert enqueue(state, 0, arrival_s, i, 0, prompt, output, arrival_s, arrival_s, 0.1) >= 0
        cut_jump(state, 0, arrival_s)
        if i % 97 == 0:
            assert kv_conserved(state) == -1
    advance_all(state, until_s)
    drain()
    return found, worst


requests_strategy = st.lists(st.tuples(st.floats(0.0, 2.0), st.integers(1, 1500), st.integers(1, 60)), min_size=1, max_size=25)


@settings(max_examples=60, deadline=None)
@given(requests_strategy, st.integers(1, 9), st.sampled_from([64, 512]))
def test_jumping_equals_stepping(rows, limit, chunk):
    """First-token and finish times equal those of a plain loop that makes every step, for any requests."""
    state = make_group(limit=limit, chunk=chunk)
    rows = sorted(rows, key=lambda row: row[0])
    # one instant apart, or the twin and the kernel could order a tie and a step end differently
    arrivals = [row[0] + 1e-3 + i * 1e-6 for i, row in enumerate(rows)]
    found, worst = feed(state, arrivals, [row[1] for row in rows], [row[2] for row in rows])
    cost = make_group()

    def step_s(tokens, pairs, kv, sequences):
        args = (cost.rank_cost, cost.group_cost, cost.residual, cost.slow)
        return sum(step_parts(0, *args, tokens, 0, pairs, 0.0, kv, 0, 0, 0, sequences)[:4])

    plain = plain_group([PlainRequest(a, r[1], r[2]) for a, r in zip(arrivals, rows, strict=True)], step_s, limit, chunk)
    assert len(found) == len(rows)
    assert worst < 1e-9
    for i, expected in enumerate(plain):
        floats = found[i][1]
        assert floats[L.RF_FIRST_S] == pytest.approx(expected.first_s, abs=1e-9)
        assert floats[L.RF_FINISH_S] == pytest.approx(expected.finish_s, abs=1e-9)


def waits(found):
    return np.array([floats[L.RF_ADMITTED_S] - floats[L.RF_ARRIVAL_S] for _, floats in found.values()])


def test_wait_matches_pollaczek_khinchine():
    """Poisson 14/s into one slot with fixed 50 ms service: M/D/1 within 3 %."""
    rng = np.random.default_rng(7)
    state = make_group(limit=1)
    fixed_step(state, 0.050)
    arrivals = np.cumsum(rng.exponential(1 / 14, 120_000))
    found, _ = feed(state, arrivals, [1] * len(arrivals), [1] * len(arrivals))
    assert waits(found).mean() == pytest.approx(md1_wait_s(14, 0.050), rel=0.03)


def test_wait_matches_mm1():
    """Geometric numbers of 1 ms steps (mean 50) are exponential service but for rounding: M/M/1 within 3 %."""
    rng = np.random.default_rng(3)
    state = make_group(limit=1)
    fixed_step(state, 0.001)
    arrivals = np.cumsum(rng.exponential(1 / 13, 200_000))
    outputs = rng.geometric(1 / 50, len(arrivals))
    found, _ = feed(state, arrivals, [1] * len(arrivals), outputs)
    assert waits(found).mean() == pytest.approx(mm1_wait_s(13, 0.050), rel=0.03)


def test_wait_matches_erlang_c():
    """Four slots, geometric service of mean 250 steps of 0.2 ms: M/M/4 within 3 %."""
    rng = np.random.default_rng(5)
    state = make_group(limit=4)
    fixed_step(state, 0.0002)
    arrivals = np.cumsum(rng.exponential(1 / 48, 400_000))
    outputs = rng.geometric(1 / 250, len(arrivals))
    found, _ = feed(state, arrivals, [1] * len(arrivals), outputs)
    # a newcomer starts at a step boundary: half a step later on average
    assert waits(found).mean() - 0.0001 * (1 - 0.6**4) == pytest.approx(mmc_wait_s(48, 0.050, 4), rel=0.03)


@pytest.mark.fault("K09")
@pytest.mark.parametrize("blocks", [0, 1, 17, 33, 125, 500, 2200])
def test_tiny_cache_ends_with_everybody_accounted_for(blocks):
    """200 requests of 256 + 256 tokens and 16-token blocks: the run ends, preemptions are bounded, no block is lost."""
    state = make_group(limit=256, blocks=blocks)
    arrivals = np.cumsum(np.random.default_rng(11).exponential(1 / 2000, 200))
    found, worst = feed(state, arrivals, [256] * 200, [256] * 200)
    assert len(found) == 200
    kinds = np.array([ints[L.RI_KIND] for ints, _ in found.values()])
    preemptions = max(ints[L.RI_PREEMPTIONS] for ints, _ in found.values())
    assert preemptions <= 65
    assert (kinds == L.RECORD_COMPLETED).sum() == (200 if blocks >= 33 else 0)
    assert kv_conserved(state) == -1
    assert state.group_int[0, L.GI_USED_BLOCKS0] == 0
    assert worst < 1e-9
    assert np.isinf(next_event_s(state))


@pytest.mark.fault("K11")
def test_first_token_time_includes_the_queue():
    """100 requests at once on one slot of 1 s service: the k-th first token comes k seconds after arrival, in order."""
    state = make_group(limit=1)
    fixed_step(state, 1.0)
    found, _ = feed(state, [0.0] * 100, [1] * 100, [1] * 100)
    first = [found[i][1][L.RF_FIRST_S] for i in range(100)]
    assert first == pytest.approx(list(range(1, 101)))
    for ints, floats in found.values():
        assert ints[L.RI_KIND] == L.RECORD_COMPLETED
        assert floats[L.RF_ARRIVAL_S] <= floats[L.RF_ADMITTED_S] <= floats[L.RF_FIRST_S] <= floats[L.RF_FINISH_S]


def test_priority_waits_less_but_nobody_starves():
    """A head start of 2 s: an urgent request overtakes one that arrived less than 2 s before it, never an older one."""
    state = make_group(limit=1)
    fixed_step(state, 1.0)
    for i, (arrival_s, head_start_s) in enumerate([(0.0, 0.0), (0.1, 0.0), (1.5, 2.0), (2.5, 2.0)]):
        advance_all(state, arrival_s)
        enqueue(state, 0, arrival_s, i, 0, 1, 3, arrival_s, arrival_s - head_start_s, 0.1)
    advance_all(state, 100.0)
    order = [int(state.record_int[i, L.RI_REQUEST]) for i in range(4)]
    assert order == [0, 2, 1, 3]


def test_a_request_behind_the_head_is_given_up_in_time():
    """One slot, held for 5,000 steps of 10 ms; an old request waits behind an urgent one that came later. Timeout 2 s: the
    old one, never at the head, ends one step after 2.1 s, the urgent one after 3.1 s."""
    state = make_group(limit=1)
    fixed_step(state, 0.010)
    state.group_float[:, L.GF_QUEUE_TIMEOUT_S] = 2.0
    for i, (arrival_s, head_start_s, output) in enumerate([(0.0, 0.0, 5000), (0.1, 0.0, 3), (1.1, 50.0, 3)]):
        advance_all(state, arrival_s)
        enqueue(state, 0, arrival_s, i, 0, 1, output, arrival_s, arrival_s - head_start_s, 0.1)
        cut_jump(state, 0, arrival_s)
    advance_all(state, 100.0)
    ended = {int(state.record_int[i, L.RI_REQUEST]): i for i in range(3)}
    for request, due_s in ((1, 2.1), (2, 3.1)):
        assert state.record_int[ended[request], L.RI_KIND] == L.RECORD_TIMEOUT
        assert due_s < state.record_float[ended[request], L.RF_FINISH_S] <= due_s + 0.0101
    assert state.record_int[ended[0], L.RI_KIND] == L.RECORD_COMPLETED


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.0, 3.0), st.integers(1, 900), st.integers(1, 120), st.floats(0.0, 4.0)), min_size=2, max_size=30),
    st.integers(1, 4),
    st.floats(0.05, 2.0),
)
def test_nobody_waits_longer_than_the_timeout_and_a_step(rows, limit, timeout_s):
    """Any requests in any queue order, endless KV: who was admitted waited no longer than the timeout, who was given up waited
    longer, but by no more than one step (here under 0.15 s)."""
    state = make_group(limit=limit)
    state.group_float[:, L.GF_QUEUE_TIMEOUT_S] = timeout_s
    for i, (arrival_s, prompt, output, head_start_s) in enumerate(sorted(rows)):
        advance_all(state, arrival_s)
        enqueue(state, 0, arrival_s, i, 0, prompt, output, arrival_s, arrival_s - head_start_s, 1e9)
        cut_jump(state, 0, arrival_s)
    advance_all(state, 1e6)
    assert state.record_count[0] == len(rows)
    for ints, floats in zip(state.record_int[: len(rows)], state.record_float[: len(rows)], strict=True):
        if ints[L.RI_KIND] == L.RECORD_COMPLETED:
            assert floats[L.RF_ADMITTED_S] - floats[L.RF_ARRIVAL_S] <= timeout_s + 1e-9
        else:
            assert ints[L.RI_KIND] == L.RECORD_TIMEOUT
            assert timeout_s < floats[L.RF_FINISH_S] - floats[L.RF_ARRIVAL_S] <= timeout_s + 0.15


def test_time_on_the_device_is_no_wait():
    """Two sequences of 3,000 tokens in a pool for one and a half: the later one is preempted after more than the timeout, and waits
    its turn; it is not given up for the time it was running."""
    state = make_group(limit=2, blocks=300)
    fixed_step(state, 0.010)
    state.group_float[:, L.GF_QUEUE_TIMEOUT_S] = 15.0
    for i in range(2):
        enqueue(state, 0, 0.0, i, 0, 16, 3000 if i else 2700, 0.0, float(i), 0.1)
    advance_all(state, 1e4)
    ended = {int(state.record_int[i, L.RI_REQUEST]): i for i in range(2)}
    assert state.record_int[ended[1], L.RI_PREEMPTIONS] == 1
    assert state.record_int[ended[1], L.RI_KIND] == L.RECORD_COMPLETED
    assert state.record_float[ended[1], L.RF_PARTS + L.PART_REDONE] > 0
