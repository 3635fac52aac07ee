"""What an engine would report of each group at one instant: loads, backlog, KV, residents. Compiled; changes nothing."""

from __future__ import annotations

import numpy as np

from envs.group_kernel import kv_pool
from envs.group_kernel import layout as L
from envs.group_kernel.advance import advance_group
from envs.group_kernel.jump import jump_duration_s, steps_done_by
from envs.group_kernel.kv_growth import blocks_to_grow
from envs.perf_model.compiled import inner_kernel, kernel
from envs.perf_model.kernel_cache import cached_njit

# integer rows of `read_groups`
(R_RUNNING, R_WAITING, R_BLOCKS_FREE, R_BLOCKS_TOTAL, R_BACKLOG_TOKENS, R_DECODE_KV, R_DECODING, R_SLOTS_FREE) = range(8)
READ_INTS = 8
# float rows
(R_STEP_LEFT_S, R_OLDEST_WAIT_S, R_CORRECTION, R_PAUSE_LEFT_S, R_STEP_NOW_S) = range(5)
READ_FLOATS = 5

# integer and float columns of `read_residents`
(V_REQUEST, V_CLASS, V_PROMPT, V_GENERATED, V_PREFILL_LEFT, V_ADMITTED) = range(6)
RESIDENT_INTS = 6
(V_ARRIVAL_S, V_FIRST_S, V_KEY) = range(3)
RESIDENT_FLOATS = 3


@inner_kernel
def read_groups(state, now_s, out_int, out_float):
    """Fill `out_int` (READ_INTS, G) and `out_float` (READ_FLOATS, G) as of `now_s`; call after `advance_all(state, now_s)`."""
    for g in range(state.group_int.shape[0]):
        ints = state.group_int[g]
        group = state.group_float[g]
        backlog = decode_kv = decoding = 0
        done = steps_done_by(group, now_s, ints[L.GI_JUMP_STEPS]) if ints[L.GI_JUMP_ACTIVE] == 1 else 0
        oldest_s = 0.0
        for place in range(ints[L.GI_RUNNING]):
            row = state.slot_int[g, state.running[g, place]]
            if row[L.SI_PHASE] == L.PHASE_DECODE:
                decoding += 1
                decode_kv += row[L.SI_DONE] + done
            else:
                backlog += row[L.SI_GOAL] - row[L.SI_DONE]
        for place in range(ints[L.GI_WAITING]):
            slot = state.waiting[g, place]
            row = state.slot_int[g, slot]
            backlog += row[L.SI_PROMPT] + row[L.SI_GENERATED] - row[L.SI_DONE]
            oldest_s = max(oldest_s, now_s - state.slot_float[g, slot, L.SF_ENQUEUED_S])
        out_int[R_RUNNING, g] = ints[L.GI_RUNNING]
        out_int[R_WAITING, g] = ints[L.GI_WAITING]
        grown0, grown1 = blocks_to_grow(state, g, done) if done > 0 else (0, 0)
        out_int[R_BLOCKS_FREE, g] = max(0, kv_pool.reachable_blocks(state, g, ints[L.GI_PLAN]) - grown0 - grown1)
        out_int[R_BLOCKS_TOTAL, g] = kv_pool.total_blocks(state, g, ints[L.GI_PLAN])
        out_int[R_BACKLOG_TOKENS, g] = backlog
        out_int[R_DECODE_KV, g] = decode_kv
        out_int[R_DECODING, g] = decoding
        out_int[R_SLOTS_FREE, g] = ints[L.GI_FREE_SLOTS]
        step_left_s = 0.0
        step_now_s = 0.0
        if ints[L.GI_JUMP_ACTIVE] == 1:
            step_left_s = group[L.GF_JUMP_START_S] + jump_duration_s(group, done + 1) - now_s
            step_now_s = jump_duration_s(group, done + 1) - jump_duration_s(group, done)
        out_float[R_STEP_LEFT_S, g] = max(0.0, step_left_s)
        out_float[R_STEP_NOW_S, g] = step_now_s
        out_float[R_OLDEST_WAIT_S, g] = oldest_s
        correction = 1.0
        if group[L.GF_PREDICTED_S] > 0.0:
            correction = min(20.0, max(0.05, group[L.GF_OBSERVED_S] / group[L.GF_PREDICTED_S]))
        out_float[R_CORRECTION, g] = correction
        out_float[R_PAUSE_LEFT_S, g] = max(0.0, group[L.GF_PAUSED_UNTIL_S] - now_s)


@inner_kernel
def read_residents(state, now_s, offset, out_int, out_float):
    """Fill the rows of every resident, running before waiting, group after group; `offset` (G + 1,) tells whose rows are whose."""
    index = 0
    for g in range(state.group_int.shape[0]):
        offset[g] = index
        ints = state.group_int[g]
        group = state.group_float[g]
        done = steps_done_by(group, now_s, ints[L.GI_JUMP_STEPS]) if ints[L.GI_JUMP_ACTIVE] == 1 else 0
        for place in range(ints[L.GI_RUNNING] + ints[L.GI_WAITING]):
            is_running = place < ints[L.GI_RUNNING]
            slot = state.running[g, place] if is_running else state.waiting[g, place - ints[L.GI_RUNNING]]
            row = state.slot_int[g, slot]
            out_int[index, V_REQUEST] = row[L.SI_REQUEST]
            out_int[index, V_CLASS] = row[L.SI_CLASS]
            out_int[index, V_PROMPT] = row[L.SI_PROMPT]
            out_int[index, V_GENERATED] = row[L.SI_GENERATED] + (done if row[L.SI_PHASE] == L.PHASE_DECODE else 0)
            left = 0
            if row[L.SI_PHASE] == L.PHASE_PREFILL:
                left = row[L.SI_GOAL] - row[L.SI_DONE]
            elif not is_running:
                left = row[L.SI_PROMPT] + row[L.SI_GENERATED] - row[L.SI_DONE]
            out_int[index, V_PREFILL_LEFT] = left
            out_int[index, V_ADMITTED] = 1 if is_running else 0
            out_float[index, V_ARRIVAL_S] = state.slot_float[g, slot, L.SF_ARRIVAL_S]
            out_float[index, V_FIRST_S] = state.slot_float[g, slot, L.SF_FIRST_S]
            out_float[index, V_KEY] = state.slot_float[g, slot, L.SF_KEY]
            index += 1
    offset[state.group_int.shape[0]] = index


@kernel
def advance_and_read(state, now_s, group_ints, group_floats, offset, resident_ints, resident_floats):
    """What `advance_all`, `read_groups` and `read_residents` do, in one call, since handing over the state costs as much as they do.

    resident_ints and resident_floats hold at least one row per slot; returns how many are filled.
    """
    for g in range(state.group_int.shape[0]):
        advance_group(state, g, now_s)
    read_groups(state, now_s, group_ints, group_floats)
    read_residents(state, now_s, offset, resident_ints, resident_floats)
    return offset[state.group_int.shape[0]]


@kernel
def step_under_way(state, g):
    """(tokens, prefill query-key pairs, KV tokens) of group `g`'s step."""
    ints = state.group_int[g]
    kv = 0
    for place in range(ints[L.GI_RUNNING]):
        row = state.slot_int[g, state.running[g, place]]
        if row[L.SI_PHASE] == L.PHASE_DECODE:
            kv += row[L.SI_DONE]
    chunk = ints[L.GI_CHUNK_TOKENS]
    return ints[L.GI_DECODING] + chunk, 0.5 * chunk * chunk, kv


@kernel
def hit_tokens(state, request, out):
    """Prompt tokens of `request` that each group's prefix cache already holds; `out` (G,)."""
    for g in range(state.group_int.shape[0]):
        out[g] = 0
        if state.prefix_offset.shape[0] > request + 1:
            matched = 0
            for i in range(state.prefix_offset[request], state.prefix_offset[request + 1]):
                if state.cache_links[g, state.prefix_ids[i], 2] < 0:
                    break
                matched += 1
            out[g] = matched * state.group_int[g, L.GI_CACHE_BLOCK_TOKENS]


@cached_njit()
def kv_conserved(state):
    """Check used blocks, slots and lists against each other; returns the first group that is wrong, or -1."""
    for g in range(state.group_int.shape[0]):
        used = np.zeros(2, np.int64)
        ints = state.group_int[g]
        for place in range(ints[L.GI_RUNNING]):
            row = state.slot_int[g, state.running[g, place]]
            used[row[L.SI_PLAN]] += row[L.SI_BLOCKS]
            if row[L.SI_BLOCKS] < 0 or row[L.SI_PHASE] < L.PHASE_PREFILL:
                return g
        if used[0] != ints[L.GI_USED_BLOCKS0] or used[1] != ints[L.GI_USED_BLOCKS1]:
            return g
        if ints[L.GI_RUNNING] + ints[L.GI_WAITING] + ints[L.GI_FREE_SLOTS] != state.slot_int.shape[1]:
            return g
        present = 0
        for block in range(state.cache_links.shape[1] - 1):
            if state.cache_links[g, block, 2] >= 0:
                present += 1
        if present != ints[L.GI_CACHE_BLOCKS]:
            return g
    return -1
