"""The prefix cache against a plain ordered dictionary, and in a batch: hits, shared blocks, jumping against stepping."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.group_kernel import layout as L
from envs.group_kernel import prefix_cache as C
from envs.group_kernel import reading as R
from envs.group_kernel.advance import advance_all, advance_group
from envs.group_kernel.jump import cut_jump
from envs.group_kernel.queue import enqueue
from envs.group_kernel.reading import hit_tokens, kv_conserved, read_groups
from tests.envs.group_kernel.test_advance import make_group

BLOCKS = 12


def cached_group(prefixes, blocks=10**6, block_tokens=16, entry_tokens=32, **options):
    """One group and requests with the given prefix blocks of `entry_tokens` tokens."""
    state = make_group(blocks=blocks, block_tokens=block_tokens, slots=64, **options)
    offset = np.concatenate(([0], np.cumsum([len(ids) for ids in prefixes]))).astype(np.int64)
    ids = np.array([block for ids in prefixes for block in ids], np.int64)
    empty = L.allocate(1, 2, 64, offset, ids)
    state = state._replace(cache_links=empty.cache_links, prefix_offset=offset, prefix_ids=ids)
    state.group_int[:, L.GI_CACHE_BLOCK_TOKENS] = entry_tokens
    return state


class PlainCache:
    """References by block, and idle blocks in an OrderedDict, oldest first."""

    def __init__(self):
        self.references: dict[int, int] = {}
        self.idle: OrderedDict[int, None] = OrderedDict()

    def take(self, block):
        self.references[block] += 1
        self.idle.pop(block, None)

    def drop(self, block):
        self.references[block] -= 1
        if self.references[block] == 0:
            self.idle[block] = None

    def evict(self):
        block, _ = self.idle.popitem(last=False)
        del self.references[block]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("idta"), st.integers(0, BLOCKS - 1)), max_size=80))
def test_idle_blocks_leave_in_the_order_of_their_last_use(actions):
    """Insert, drop, take and evict in any order: the same blocks present, the same references, the same order of eviction."""
    state = cached_group([[block for block in range(BLOCKS)]])
    plain = PlainCache()
    links = state.cache_links[0]
    for action, block in actions:
        if action == "i" and block not in plain.references:
            links[block, 2] = 1
            state.group_int[0, L.GI_CACHE_BLOCKS] += 1
            plain.references[block] = 1
        elif action == "t" and block in plain.references:
            C.take_reference(state, 0, block)
            plain.take(block)
        elif action == "d" and plain.references.get(block, 0) > 0:
            C.drop_reference(state, 0, block)
            plain.drop(block)
        elif action == "a" and plain.idle:
            C.evict_oldest(state, 0)
            plain.evict()
        assert {b: int(links[b, 2]) for b in range(BLOCKS) if links[b, 2] >= 0} == plain.references
        assert state.group_int[0, L.GI_CACHE_IDLE] == len(plain.idle)
        assert state.group_int[0, L.GI_CACHE_BLOCKS] == len(plain.references)
        ring, at = [], int(links[BLOCKS, 1])
        while at != BLOCKS:
            ring.append(at)
            at = int(links[at, 1])
        assert ring == list(plain.idle)


def add(state, request, now_s, prompt, target):
    advance_all(state, now_s)
    assert enqueue(state, 0, now_s, request, 0, prompt, target, now_s, now_s, 0.1) >= 0
    cut_jump(state, 0, now_s)


def records(state):
    return {int(state.record_int[i, 0]): (state.record_int[i].copy(), state.record_float[i].copy()) for i in range(state.record_count[0])}


def test_hits_are_the_full_leading_blocks_and_save_their_prefill():
    """Prompts of 100 tokens in blocks of 32: three full ones. The same prefix hits 96 tokens and prefills 4; a prefix that
    parts after one block hits 32; a prompt of exactly three blocks recomputes the last one, since a token must be computed."""
    state = cached_group([[0, 1, 2], [0, 1, 2], [0, 3, 4], [0, 1, 2]])
    hits = np.zeros(1, np.int64)
    hit_tokens(state, 1, hits)
    assert hits[0] == 0
    for i, prompt in enumerate([100, 100, 100, 96]):
        add(state, i, 10.0 * i, prompt, 5)
        advance_all(state, 10.0 * i + 9.0)
        assert kv_conserved(state) == -1
    found = records(state)
    assert [int(found[i][0][L.RI_HIT]) for i in range(4)] == [0, 96, 32, 64]
    ttft_s = [found[i][1][L.RF_FIRST_S] - 10.0 * i for i in range(4)]
    assert ttft_s[1] < ttft_s[2] < ttft_s[0]
    hit_tokens(state, 1, hits)
    assert hits[0] == 96
    assert state.group_int[0, L.GI_USED_BLOCKS0] == 0
    assert state.group_int[0, L.GI_CACHE_BLOCKS] == state.group_int[0, L.GI_CACHE_IDLE] == 5


def test_shared_blocks_are_held_once():
    """Eight running requests with one prefix of 320 tokens hold its 20 KV blocks once, not eight times."""
    state = cached_group([list(range(10))] * 8)
    add(state, 0, 0.0, 321, 400)
    advance_all(state, 1.0)
    for i in range(1, 8):
        add(state, i, 1.0 + 0.01 * i, 321, 400)
    advance_all(state, 2.0)
    assert state.group_int[0, L.GI_RUNNING] == 8
    assert state.group_int[0, L.GI_CACHE_BLOCKS] == 10
    assert kv_conserved(state) == -1
    out_int, out_float = np.zeros((R.READ_INTS, 1), np.int64), np.zeros((R.READ_FLOATS, 1))
    read_groups(state, 2.0, out_int, out_float)
    private = state.slot_int[0, state.running[0, :8], L.SI_BLOCKS].sum()
    assert 10**6 - out_int[2, 0] >= 20 + private
    assert 10**6 - out_int[2, 0] <= 20 + private + 8 * 8  # growth of the steps under way


lives = st.lists(st.tuples(st.floats(0.0, 3.0), st.integers(33, 200), st.integers(1, 120), st.integers(0, 3)), min_size=2, max_size=14)


@settings(max_examples=40, deadline=None)
@given(lives, st.integers(24, 60))
def test_jumping_equals_stepping_when_the_cache_must_make_room(rows, blocks):
    """A small pool, shared prefixes, evictions and preemptions: hits, preemptions and times are those of a run that is
    cut after every single step."""
    rows = sorted(rows)
    prefixes = [[family * 8 + k for k in range(min(8, prompt // 32))] for _, prompt, _, family in rows]
    found = []
    for stepwise in (False, True):
        state = cached_group(prefixes, blocks=blocks, limit=6)

        def run_to(until_s, state=state, stepwise=stepwise):
            while stepwise:
                if not state.group_int[0, L.GI_JUMP_ACTIVE]:  # plan at the present
                    advance_group(state, 0, min(until_s, state.group_float[0, L.GF_CLOCK_S]))
                if not state.group_int[0, L.GI_JUMP_ACTIVE]:
                    break
                cut_jump(state, 0, state.group_float[0, L.GF_JUMP_START_S])
                if state.group_float[0, L.GF_JUMP_END_S] > until_s:
                    break
                advance_group(state, 0, state.group_float[0, L.GF_JUMP_END_S])
            advance_group(state, 0, until_s)

        for i, (at_s, prompt, output, _) in enumerate(rows):
            run_to(at_s + 1e-3 * i + 1e-4)
            enqueue(state, 0, at_s + 1e-3 * i + 1e-4, i, 0, prompt, output, at_s, at_s + 1e-3 * i, 0.1)
            cut_jump(state, 0, at_s + 1e-3 * i + 1e-4)
            assert kv_conserved(state) == -1
        run_to(1e6)
        found.append(records(state))
        assert state.group_int[0, L.GI_USED_BLOCKS0] == 0
        assert state.group_int[0, L.GI_CACHE_BLOCKS] == state.group_int[0, L.GI_CACHE_IDLE]
    assert found[0].keys() == found[1].keys() == set(range(len(rows)))
    for i in found[0]:
        assert (found[0][i][0] == found[1][i][0]).all(), f"request {i}"
        assert found[0][i][1][: L.RF_PARTS] == pytest.approx(found[1][i][1][: L.RF_PARTS], abs=1e-9, nan_ok=True)


def test_the_reported_correction_does_not_depend_on_where_jumps_are_cut():
    """One decode of 2,000 steps on hardware twice as slow as believed, whole and cut into pieces: observed / predicted is 2."""
    seen = []
    for pieces in (1, 40):
        state = make_group()
        state.predicted_rank_cost[:] = state.rank_cost * 0.5
        state.predicted_group_cost[:] = state.group_cost
        for column in (0, 1, 3, 4):
            state.predicted_group_cost[:, column] *= 0.5
        enqueue(state, 0, 0.0, 0, 0, 64, 2000, 0.0, 0.0, 0.1)
        for piece in range(pieces):
            advance_all(state, 0.5 * piece)
            cut_jump(state, 0, 0.5 * piece)
        advance_all(state, 1e4)
        out_int, out_float = np.zeros((R.READ_INTS, 1), np.int64), np.zeros((R.READ_FLOATS, 1))
        read_groups(state, 1e4, out_int, out_float)
        seen.append(out_float[2, 0])
    assert seen[0] == pytest.approx(2.0, rel=1e-6)
    assert seen[1] == pytest.approx(seen[0], rel=1e-9)


def test_free_blocks_shrink_while_a_jump_is_under_way():
    """Four sequences decode undisturbed: the pool that is reported shrinks with the steps, as it would step by step."""
    state = make_group(blocks=4000)
    for i in range(4):
        enqueue(state, 0, 0.0, i, 0, 16, 3000, 0.0, 0.0, 0.1)
    free = []
    for now_s in (1.0, 5.0, 9.0):
        advance_all(state, now_s)
        out_int, out_float = np.zeros((R.READ_INTS, 1), np.int64), np.zeros((R.READ_FLOATS, 1))
        read_groups(state, now_s, out_int, out_float)
        held = sum(-(-(tokens) // 16) for tokens in [out_int[5, 0] / 4] * 4)
        assert 4000 - out_int[2, 0] == pytest.approx(held, abs=4)
        free.append(out_int[2, 0])
    assert free[0] > free[1] > free[2]


def test_a_queue_timeout_is_noticed_at_the_next_step_not_at_the_end_of_the_jump():
    """A long decode holds the only slot; who waits behind it for more than 2 s is given up within one step of that time."""
    state = make_group(limit=1)
    state.group_float[:, L.GF_QUEUE_TIMEOUT_S] = 2.0
    enqueue(state, 0, 0.0, 0, 0, 16, 5000, 0.0, 0.0, 0.1)
    advance_all(state, 1.0)
    enqueue(state, 0, 1.0, 1, 0, 16, 5, 1.0, 1.0, 0.1)
    cut_jump(state, 0, 1.0)
    advance_all(state, 1e5)
    found = records(state)
    assert found[1][0][L.RI_KIND] == L.RECORD_TIMEOUT
    assert 3.0 <= found[1][1][L.RF_FINISH_S] < 3.1
