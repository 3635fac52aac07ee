"""Who may go on the device: chunks for those in prefill, newcomers from the queue, victims where KV runs out, and who is given up."""

from __future__ import annotations

import numpy as np

from envs.group_kernel import kv_pool, prefix_cache
from envs.group_kernel import layout as L
from envs.group_kernel import queue as Q
from envs.group_kernel.batch_step import batch_has_room
from envs.perf_model.compiled import inner_kernel


@inner_kernel
def _give_up(state, g, slot, kind, now_s):
    """End a waiting request that will not be served here."""
    Q.remove_from(state.waiting[g], state.group_int[g, L.GI_WAITING], slot)
    state.group_int[g, L.GI_WAITING] -= 1
    part = L.PART_REDONE if state.slot_int[g, slot, L.SI_REDOING] == 1 else L.PART_QUEUE
    state.slot_float[g, slot, L.SF_PARTS + part] += now_s - state.slot_float[g, slot, L.SF_MARK_S]
    Q.record_end(state, g, slot, kind, now_s)
    Q.give_slot(state, g, slot)


@inner_kernel
def give_up_overdue(state, g, now_s):
    """End every request that has waited longer than the queue timeout, wherever it stands in the queue."""
    group = state.group_float[g]
    timeout_s = group[L.GF_QUEUE_TIMEOUT_S]
    next_s = np.inf
    place = 0
    while place < state.group_int[g, L.GI_WAITING]:
        slot = state.waiting[g, place]
        give_up_s = state.slot_float[g, slot, L.SF_ENQUEUED_S] + timeout_s
        if give_up_s < now_s:
            _give_up(state, g, slot, L.RECORD_TIMEOUT, now_s)
        else:
            next_s = min(next_s, give_up_s)
            place += 1
    group[L.GF_GIVE_UP_S] = next_s


@inner_kernel
def _admit(state, g, slot, now_s):
    """Move the head of the queue onto the device: cache hit, KV blocks, stamps. False when KV has no room."""
    ints = state.slot_int[g, slot]
    plan = state.group_int[g, L.GI_PLAN]
    request = ints[L.SI_REQUEST]
    goal = ints[L.SI_PROMPT] + ints[L.SI_GENERATED]
    size = prefix_cache.blocks_per_entry(state, g)
    matched = 0
    if ints[L.SI_DONE] == 0 and state.prefix_offset.shape[0] > request + 1:
        matched = prefix_cache.matched_blocks(state, g, request)
        matched = min(matched, (goal - 1) // max(1, state.group_int[g, L.GI_CACHE_BLOCK_TOKENS]))
        begin = state.prefix_offset[request]
        for i in range(begin, begin + matched):  # hold them before making room, or they would be evicted
            prefix_cache.take_reference(state, g, state.prefix_ids[i])
    need = kv_pool.blocks_for(state, g, goal) - matched * size
    # one block per running sequence stays free, or the newcomer would be preempted at once
    reserve = state.group_int[g, L.GI_RUNNING]
    if not kv_pool.room_for(state, g, plan, need + reserve):
        for i in range(matched - 1, -1, -1):
            prefix_cache.drop_reference(state, g, state.prefix_ids[state.prefix_offset[request] + i])
        return False
    Q.remove_from(state.waiting[g], state.group_int[g, L.GI_WAITING], slot)
    state.group_int[g, L.GI_WAITING] -= 1
    floats = state.slot_float[g, slot]
    part = L.PART_REDONE if ints[L.SI_REDOING] == 1 else L.PART_QUEUE
    floats[L.SF_PARTS + part] += now_s - floats[L.SF_MARK_S]
    if np.isnan(floats[L.SF_ADMITTED_S]):
        floats[L.SF_ADMITTED_S] = now_s
    ints[L.SI_GOAL] = goal
    if matched > 0:
        ints[L.SI_DONE] = min(matched * state.group_int[g, L.GI_CACHE_BLOCK_TOKENS], goal - 1)
        ints[L.SI_HIT] = ints[L.SI_DONE]
    ints[L.SI_CACHE_REFS] = matched
    ints[L.SI_BLOCKS] = need
    ints[L.SI_PLAN] = plan
    ints[L.SI_PHASE] = L.PHASE_PREFILL
    state.group_int[g, L.GI_USED_BLOCKS0 + plan] += need
    Q.take_snapshot(state, g, slot)
    state.running[g, state.group_int[g, L.GI_RUNNING]] = slot
    state.group_int[g, L.GI_RUNNING] += 1
    return True


@inner_kernel
def assign_chunks(state, g, budget):
    """Give the step's prefill budget to admitted slots in admission order; returns what is left."""
    for place in range(state.group_int[g, L.GI_RUNNING]):
        row = state.slot_int[g, state.running[g, place]]
        if row[L.SI_PHASE] == L.PHASE_PREFILL:
            chunk = min(budget, row[L.SI_GOAL] - row[L.SI_DONE])
            row[L.SI_CHUNK] = chunk
            budget -= chunk
    return budget


@inner_kernel
def admit_waiting(state, g, budget, decode0, decode1, kv0, kv1, limit_s):
    """Admit from the queue while budget, batch and KV allow; returns the budget left."""
    ints = state.group_int[g]
    now_s = state.group_float[g, L.GF_CLOCK_S]
    while ints[L.GI_WAITING] > 0:
        slot = state.waiting[g, 0]
        row = state.slot_int[g, slot]
        whole = kv_pool.blocks_for(state, g, row[L.SI_PROMPT] + row[L.SI_GENERATED])
        if whole > kv_pool.total_blocks(state, g, ints[L.GI_PLAN]):
            _give_up(state, g, slot, L.RECORD_TOO_LARGE, now_s)
            continue
        if budget <= 0 or ints[L.GI_RUNNING] >= ints[L.GI_RUNNING_LIMIT]:
            break
        if not batch_has_room(state, g, slot, decode0, decode1, kv0, kv1, limit_s):
            break
        if not _admit(state, g, slot, now_s):
            break
        row[L.SI_CHUNK] = min(budget, row[L.SI_GOAL] - row[L.SI_DONE])
        budget -= row[L.SI_CHUNK]
    return budget


@inner_kernel
def make_room(state, g, now_s):
    """Preempt the last in queue order; one that was preempted too often, or is alone, ends as a failure."""
    ints = state.group_int[g]
    victim = state.running[g, 0]
    worst = -np.inf
    for place in range(ints[L.GI_RUNNING]):
        slot = state.running[g, place]
        key = state.slot_float[g, slot, L.SF_KEY]
        if key >= worst:
            worst = key
            victim = slot
    alone = ints[L.GI_RUNNING] == 1
    Q.preempt(state, g, victim, now_s)
    if alone or state.slot_int[g, victim, L.SI_PREEMPTIONS] > ints[L.GI_PREEMPTION_LIMIT]:
        _give_up(state, g, victim, L.RECORD_TOO_LARGE if alone else L.RECORD_PREEMPTED_OUT, now_s)
