"""Slots of one group: entering the queue, leaving it, preemption, and taking a request out. O(queue) at worst.

The queue is ordered by key = arrival - priority x head start, so a higher priority is served first but nobody waits
for ever: the order between two requests never changes, and every later arrival has a later key.
"""

from __future__ import annotations

import numpy as np

from envs.group_kernel import layout as L
from envs.group_kernel import prefix_cache
from envs.perf_model.compiled import inner_kernel, kernel


@inner_kernel
def copy_row(source, target):
    """Copy one row element by element (a slice assignment would want a buffer, and kernels do not allocate)."""
    for i in range(target.shape[0]):
        target[i] = source[i]


@inner_kernel
def insert_waiting(state, g, slot):
    waiting = state.waiting[g]
    count = state.group_int[g, L.GI_WAITING]
    key = state.slot_float[g, slot, L.SF_KEY]
    place = count
    while place > 0 and state.slot_float[g, waiting[place - 1], L.SF_KEY] > key:
        waiting[place] = waiting[place - 1]
        place -= 1
    waiting[place] = slot
    state.group_int[g, L.GI_WAITING] = count + 1
    group = state.group_float[g]
    group[L.GF_GIVE_UP_S] = min(group[L.GF_GIVE_UP_S], state.slot_float[g, slot, L.SF_ENQUEUED_S] + group[L.GF_QUEUE_TIMEOUT_S])


@inner_kernel
def remove_from(order, count, slot):
    """Remove `slot` from the first `count` entries of `order`, keeping the order; the caller lowers the count."""
    place = 0
    while order[place] != slot:
        place += 1
    for i in range(place, count - 1):
        order[i] = order[i + 1]


@inner_kernel
def take_slot(state, g):
    """A free slot number; the caller has checked that there is one."""
    count = state.group_int[g, L.GI_FREE_SLOTS] - 1
    state.group_int[g, L.GI_FREE_SLOTS] = count
    slot = state.free_slots[g, count]
    state.slot_int[g, slot, :] = 0
    state.slot_float[g, slot, :] = 0.0
    return slot


@inner_kernel
def give_slot(state, g, slot):
    state.slot_int[g, slot, L.SI_PHASE] = L.PHASE_FREE
    count = state.group_int[g, L.GI_FREE_SLOTS]
    state.free_slots[g, count] = slot
    state.group_int[g, L.GI_FREE_SLOTS] = count + 1


@kernel
def enqueue(state, g, now_s, request, class_index, prompt, target, arrival_s, key, tpot_limit_s):
    """Put a new request into group `g`'s queue; returns its slot, or -1 when every slot is taken."""
    if state.group_int[g, L.GI_FREE_SLOTS] == 0:
        return -1
    slot = take_slot(state, g)
    ints = state.slot_int[g, slot]
    floats = state.slot_float[g, slot]
    ints[L.SI_REQUEST] = request
    ints[L.SI_CLASS] = class_index
    ints[L.SI_PROMPT] = prompt
    ints[L.SI_TARGET] = target
    ints[L.SI_ATTEMPTS] = 1
    floats[L.SF_ARRIVAL_S] = arrival_s
    floats[L.SF_MARK_S] = arrival_s
    floats[L.SF_ADMITTED_S] = np.nan
    floats[L.SF_FIRST_S] = np.nan
    floats[L.SF_KEY] = key
    floats[L.SF_TPOT_LIMIT_S] = tpot_limit_s
    floats[L.SF_ENQUEUED_S] = now_s
    ints[L.SI_PHASE] = L.PHASE_WAITING
    insert_waiting(state, g, slot)
    return slot


@kernel
def enqueue_row(state, g, now_s, int_row, float_row, kv_tokens):
    """Put back a request taken out elsewhere (`take_out`); `kv_tokens` of its KV came along. Returns slot or -1."""
    if state.group_int[g, L.GI_FREE_SLOTS] == 0:
        return -1
    slot = take_slot(state, g)
    copy_row(int_row, state.slot_int[g, slot])
    copy_row(float_row, state.slot_float[g, slot])
    ints = state.slot_int[g, slot]
    ints[L.SI_DONE] = kv_tokens
    ints[L.SI_BLOCKS] = 0
    ints[L.SI_CACHE_REFS] = 0
    ints[L.SI_PHASE] = L.PHASE_WAITING
    state.slot_float[g, slot, L.SF_ENQUEUED_S] = now_s
    insert_waiting(state, g, slot)
    return slot


@inner_kernel
def settle_parts(state, g, slot):
    """Credit what the group's cumulated times grew by since the last settling to this request's latency parts."""
    ints = state.slot_int[g, slot]
    floats = state.slot_float[g, slot]
    group = state.group_float[g]
    compute_s = group[L.GF_CUM_COMPUTE_S] - floats[L.SF_SNAP_COMPUTE_S]
    memory_s = group[L.GF_CUM_MEMORY_S] - floats[L.SF_SNAP_MEMORY_S]
    comm_s = group[L.GF_CUM_COMM_S] - floats[L.SF_SNAP_COMM_S]
    host_s = group[L.GF_CUM_HOST_S] - floats[L.SF_SNAP_HOST_S]
    pause_s = group[L.GF_CUM_PAUSE_S] - floats[L.SF_SNAP_PAUSE_S]
    parts = floats[L.SF_PARTS :]
    parts[L.PART_PAUSE] += pause_s
    if ints[L.SI_REDOING] == 1 and ints[L.SI_PHASE] == L.PHASE_PREFILL:
        parts[L.PART_REDONE] += compute_s + memory_s + comm_s + host_s
    else:
        computed = L.PART_PREFILL if ints[L.SI_PHASE] == L.PHASE_PREFILL else L.PART_DECODE
        parts[computed] += compute_s
        parts[L.PART_MEMORY] += memory_s
        parts[L.PART_COMM] += comm_s
        parts[L.PART_HOST] += host_s
    take_snapshot(state, g, slot)


@inner_kernel
def take_snapshot(state, g, slot):
    """Remember the group's cumulated times, so that `settle_parts` can credit the difference."""
    for i in range(5):
        state.slot_float[g, slot, L.SF_SNAP_COMPUTE_S + i] = state.group_float[g, L.GF_CUM_COMPUTE_S + i]


@inner_kernel
def release_kv(state, g, slot):
    """Give back the private KV blocks and cache references of an admitted slot."""
    ints = state.slot_int[g, slot]
    state.group_int[g, L.GI_USED_BLOCKS0 + ints[L.SI_PLAN]] -= ints[L.SI_BLOCKS]
    ints[L.SI_BLOCKS] = 0
    begin = state.prefix_offset[ints[L.SI_REQUEST]] if ints[L.SI_CACHE_REFS] > 0 else 0
    # from the tail, so that the head of a prefix is the last to be evicted
    for i in range(begin + ints[L.SI_CACHE_REFS] - 1, begin - 1, -1):
        prefix_cache.drop_reference(state, g, state.prefix_ids[i])
    ints[L.SI_CACHE_REFS] = 0


@inner_kernel
def stop_running(state, g, slot):
    """Take an admitted slot off the device: settle its times, free its KV, leave the running list."""
    settle_parts(state, g, slot)
    release_kv(state, g, slot)
    remove_from(state.running[g], state.group_int[g, L.GI_RUNNING], slot)
    state.group_int[g, L.GI_RUNNING] -= 1


@kernel
def preempt(state, g, slot, now_s):
    """Send an admitted slot back to the queue under its old key; its KV is lost and will be recomputed.

    `now_s` lies after the group's clock where a stopped group is emptied: the time between counts as redone.
    """
    stop_running(state, g, slot)
    state.slot_float[g, slot, L.SF_PARTS + L.PART_REDONE] += max(0.0, now_s - state.group_float[g, L.GF_CLOCK_S])
    ints = state.slot_int[g, slot]
    ints[L.SI_DONE] = 0
    ints[L.SI_PHASE] = L.PHASE_WAITING
    ints[L.SI_PREEMPTIONS] += 1
    ints[L.SI_REDOING] = 1
    state.slot_float[g, slot, L.SF_MARK_S] = now_s
    state.slot_float[g, slot, L.SF_ENQUEUED_S] = now_s  # it waits from now on: its time on the device was no wait
    state.group_int[g, L.GI_PREEMPTIONS] += 1
    insert_waiting(state, g, slot)


@kernel
def take_out(state, g, slot, now_s, int_row, float_row):
    """Remove a request from the group at `now_s`; its rows are copied out so that it can go on elsewhere.

    The part of a step that was under way counts as redone.
    """
    if state.slot_int[g, slot, L.SI_PHASE] == L.PHASE_WAITING:
        remove_from(state.waiting[g], state.group_int[g, L.GI_WAITING], slot)
        state.group_int[g, L.GI_WAITING] -= 1
    else:
        stop_running(state, g, slot)
        lost_s = now_s - state.group_float[g, L.GF_CLOCK_S]
        state.slot_float[g, slot, L.SF_PARTS + L.PART_REDONE] += max(0.0, lost_s)
        state.slot_float[g, slot, L.SF_MARK_S] = max(now_s, state.group_float[g, L.GF_CLOCK_S])
        state.slot_int[g, slot, L.SI_REDOING] = 1
    copy_row(state.slot_int[g, slot], int_row)
    copy_row(state.slot_float[g, slot], float_row)
    give_slot(state, g, slot)


@inner_kernel
def record_end(state, g, slot, kind, finish_s):
    """Write the finished-request record; the buffer holds one entry per slot, and callers drain it after each advance."""
    index = state.record_count[0]
    state.record_count[0] = index + 1
    ints = state.slot_int[g, slot]
    floats = state.slot_float[g, slot]
    row = state.record_int[index]
    row[L.RI_REQUEST] = ints[L.SI_REQUEST]
    row[L.RI_GROUP] = g
    row[L.RI_KIND] = kind
    row[L.RI_GENERATED] = ints[L.SI_GENERATED]
    row[L.RI_PREEMPTIONS] = ints[L.SI_PREEMPTIONS]
    row[L.RI_HIT] = ints[L.SI_HIT]
    row[L.RI_ATTEMPTS] = ints[L.SI_ATTEMPTS]
    row[L.RI_CLASS] = ints[L.SI_CLASS]
    row[L.RI_PROMPT] = ints[L.SI_PROMPT]
    values = state.record_float[index]
    values[L.RF_ARRIVAL_S] = floats[L.SF_ARRIVAL_S]
    values[L.RF_ADMITTED_S] = floats[L.SF_ADMITTED_S]
    values[L.RF_FIRST_S] = floats[L.SF_FIRST_S]
    values[L.RF_FINISH_S] = finish_s
    copy_row(floats[L.SF_PARTS :], values[L.RF_PARTS :])
