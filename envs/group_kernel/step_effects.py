"""What a jump leaves behind once it is real: clock, cumulated times, tokens, KV, shared prefixes, completions."""

from __future__ import annotations

import numpy as np

from envs.group_kernel import layout as L
from envs.group_kernel import prefix_cache
from envs.group_kernel import queue as Q
from envs.group_kernel.jump import jump_duration_s, observe
from envs.group_kernel.kv_growth import blocks_wanted, evict_for_growth
from envs.perf_model.compiled import inner_kernel


@inner_kernel
def _finish(state, g, slot, now_s):
    """End a completed request: its last token reaches the caller after the return time."""
    Q.stop_running(state, g, slot)
    return_s = state.group_float[g, L.GF_RETURN_S]
    state.slot_float[g, slot, L.SF_PARTS + L.PART_RETURN] += return_s
    Q.record_end(state, g, slot, L.RECORD_COMPLETED, now_s + return_s)
    Q.give_slot(state, g, slot)


@inner_kernel
def _share_prefix(state, g, slot):
    """Hand the freshly computed full prefix blocks to the cache; duplicates made meanwhile are freed."""
    ints = state.slot_int[g, slot]
    request = ints[L.SI_REQUEST]
    if state.prefix_offset.shape[0] <= request + 1:
        return
    begin = state.prefix_offset[request]
    full = min(state.prefix_offset[request + 1] - begin, ints[L.SI_PROMPT] // max(1, state.group_int[g, L.GI_CACHE_BLOCK_TOKENS]))
    size = prefix_cache.blocks_per_entry(state, g)
    for i in range(begin + ints[L.SI_CACHE_REFS], begin + full):
        if ints[L.SI_BLOCKS] < size:
            break
        block = state.prefix_ids[i]
        if state.cache_links[g, block, 2] < 0:
            state.cache_links[g, block, 2] = 1
            state.group_int[g, L.GI_CACHE_BLOCKS] += 1
        else:
            prefix_cache.take_reference(state, g, block)
        ints[L.SI_BLOCKS] -= size
        state.group_int[g, L.GI_USED_BLOCKS0 + ints[L.SI_PLAN]] -= size
        ints[L.SI_CACHE_REFS] += 1


@inner_kernel
def _prefill_done(state, g, slot, now_s):
    """The prompt is computed: the first token is out, and its full prefix blocks go to the cache."""
    Q.settle_parts(state, g, slot)
    ints = state.slot_int[g, slot]
    ints[L.SI_PHASE] = L.PHASE_DECODE
    ints[L.SI_REDOING] = 0
    ints[L.SI_GENERATED] += 1
    if np.isnan(state.slot_float[g, slot, L.SF_FIRST_S]):
        state.slot_float[g, slot, L.SF_FIRST_S] = now_s + state.group_float[g, L.GF_RETURN_S]
    _share_prefix(state, g, slot)


@inner_kernel
def commit_jump(state, g):
    """Make the planned jump real: clock, cumulated times, tokens, KV, completions."""
    ints = state.group_int[g]
    group = state.group_float[g]
    steps = ints[L.GI_JUMP_STEPS]
    half = 0.5 * steps * (steps - 1.0)
    group[L.GF_CUM_COMPUTE_S] += steps * group[L.GF_J_COMPUTE_S]
    group[L.GF_CUM_MEMORY_S] += steps * group[L.GF_J_MEMORY_S] + half * group[L.GF_J_MEMORY_SLOPE]
    group[L.GF_CUM_COMM_S] += steps * group[L.GF_J_COMM_S] + half * group[L.GF_J_COMM_SLOPE]
    group[L.GF_CUM_HOST_S] += steps * group[L.GF_J_HOST_S]
    group[L.GF_BUSY_S] += jump_duration_s(group, steps)
    group[L.GF_CLOCK_S] = group[L.GF_JUMP_END_S]
    observe(group, steps)
    if ints[L.GI_CACHE_IDLE] > 0:  # only now: a jump that was cut short must not have evicted for steps never made
        evict_for_growth(state, g, steps)
    ints[L.GI_JUMP_ACTIVE] = 0
    ints[L.GI_STEPS] += steps
    ints[L.GI_EVENTS] += 1
    now_s = group[L.GF_CLOCK_S]
    block_tokens = ints[L.GI_BLOCK_TOKENS]
    entry_blocks = -(-ints[L.GI_CACHE_BLOCK_TOKENS] // block_tokens)
    running = state.running[g]
    slots = state.slot_int[g]
    place = 0
    # scalars and rows only in this loop: a call that takes the whole state costs more than the work
    while place < ints[L.GI_RUNNING]:
        slot = running[place]
        row = slots[slot]
        if row[L.SI_PHASE] == L.PHASE_DECODE:
            row[L.SI_DONE] += steps
            row[L.SI_GENERATED] += steps
            wanted = blocks_wanted(row, row[L.SI_DONE], block_tokens, entry_blocks)
            if wanted > 0:
                row[L.SI_BLOCKS] += wanted
                ints[L.GI_USED_BLOCKS0 + row[L.SI_PLAN]] += wanted
        elif row[L.SI_CHUNK] > 0:
            row[L.SI_DONE] += row[L.SI_CHUNK]
            if row[L.SI_DONE] >= row[L.SI_GOAL]:
                _prefill_done(state, g, slot, now_s)
        if row[L.SI_PHASE] == L.PHASE_DECODE and row[L.SI_GENERATED] >= row[L.SI_TARGET]:
            _finish(state, g, slot, now_s)
        else:
            place += 1
