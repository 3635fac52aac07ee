"""Moving a group through time. Between two changes of its batch a group decodes the same sequences, and the time of
its i-th step is affine in i (KV grows by one token a sequence), so a whole run of steps, a *jump*, is one sum.

Order at equal times: step ends and completions first, then what the caller does at that time (arrivals, commands).
A request that arrives during a step joins at its end. A jump never crosses a completion, a KV shortage or a change of
regime (another rank becomes the slowest, communication becomes hidden), so jumping equals stepping.
"""

from __future__ import annotations

import math

import numpy as np

from envs.group_kernel import kv_pool, prefix_cache
from envs.group_kernel import layout as L
from envs.group_kernel import queue as Q
from envs.perf_model.compiled import ONE, ZERO, inner_kernel, kernel
from envs.perf_model.step_time import step_parts

STEPS_MAX = np.int64(1 << 30)
FORGET_S = 20.0  # observed and predicted step times are forgotten with this time constant


@inner_kernel
def jump_duration_s(group, steps):
    """Seconds of the first `steps` steps of the planned jump."""
    slope = group[L.GF_J_MEMORY_SLOPE] + group[L.GF_J_COMM_SLOPE]
    first = group[L.GF_J_COMPUTE_S] + group[L.GF_J_MEMORY_S] + group[L.GF_J_COMM_S] + group[L.GF_J_HOST_S]
    return steps * first + slope * (0.5 * steps * (steps - 1.0))


@inner_kernel
def steps_done_by(group, time_s, most):
    """Whole steps of the planned jump that have ended at `time_s`; at most `most`."""
    span = time_s - group[L.GF_JUMP_START_S]
    if span <= 0.0:
        return 0
    slope = group[L.GF_J_MEMORY_SLOPE] + group[L.GF_J_COMM_SLOPE]
    first = jump_duration_s(group, ONE)
    if first <= 0.0:
        return most
    if slope * most < 1e-9 * first:
        guess = span / first
    else:  # slope/2 n^2 + (first - slope/2) n = span
        half = first - 0.5 * slope
        guess = (-half + math.sqrt(half * half + 2.0 * slope * span)) / slope
    steps = min(most, max(0, int(guess)))
    while steps < most and jump_duration_s(group, steps + 1) <= span:
        steps += 1
    while steps > 0 and jump_duration_s(group, steps) > span:
        steps -= 1
    return steps


@kernel
def cut_jump(state, g, now_s):
    """Let the planned jump end at the first step boundary at or after `now_s`."""
    ints = state.group_int[g]
    group = state.group_float[g]
    if ints[L.GI_JUMP_ACTIVE] == 0 or ints[L.GI_JUMP_STEPS] <= 1:
        return
    steps = steps_done_by(group, now_s, ints[L.GI_JUMP_STEPS])
    if group[L.GF_JUMP_START_S] + jump_duration_s(group, steps) < now_s or steps == 0:
        steps += 1
    if steps < ints[L.GI_JUMP_STEPS]:
        ints[L.GI_JUMP_STEPS] = steps
        group[L.GF_JUMP_END_S] = group[L.GF_JUMP_START_S] + jump_duration_s(group, steps)


@inner_kernel
def _observe(group, steps):
    """Keep forgetting integrals, over busy time, of 1 and of believed / real: their ratio is the group's online correction.

    Integrals, so that it does not matter into how many jumps the time was cut.
    """
    real_s = jump_duration_s(group, steps)
    first_s = jump_duration_s(group, ONE)
    if first_s <= 0.0:
        return
    keep = math.exp(-real_s / FORGET_S)
    seen_s = FORGET_S * (1.0 - keep)
    group[L.GF_OBSERVED_S] = group[L.GF_OBSERVED_S] * keep + seen_s
    group[L.GF_PREDICTED_S] = group[L.GF_PREDICTED_S] * keep + seen_s * group[L.GF_J_BELIEVED_S] / first_s


@inner_kernel
def _finish(state, g, slot, now_s):
    Q.stop_running(state, g, slot)
    return_s = state.group_float[g, L.GF_RETURN_S]
    state.slot_float[g, slot, L.SF_PARTS + L.PART_RETURN] += return_s
    Q.record_end(state, g, slot, L.RECORD_COMPLETED, now_s + return_s)
    Q.give_slot(state, g, slot)


@inner_kernel
def _blocks_wanted(row, tokens, block_tokens, entry_blocks):
    """Private blocks that a slot needs for `tokens` tokens, beyond those it shares with the cache and has."""
    return -(-tokens // block_tokens) - row[L.SI_CACHE_REFS] * entry_blocks - row[L.SI_BLOCKS]


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
    Q.settle_parts(state, g, slot)
    ints = state.slot_int[g, slot]
    ints[L.SI_PHASE] = L.PHASE_DECODE
    ints[L.SI_REDOING] = 0
    ints[L.SI_GENERATED] += 1
    if np.isnan(state.slot_float[g, slot, L.SF_FIRST_S]):
        state.slot_float[g, slot, L.SF_FIRST_S] = now_s + state.group_float[g, L.GF_RETURN_S]
    _share_prefix(state, g, slot)


@inner_kernel
def blocks_to_grow(state, g, steps):
    """Blocks that decoding `steps` more steps would take, by plan slot."""
    grow0 = grow1 = 0
    ints = state.group_int[g]
    block_tokens = ints[L.GI_BLOCK_TOKENS]
    entry_blocks = -(-ints[L.GI_CACHE_BLOCK_TOKENS] // block_tokens)
    running = state.running[g]
    slots = state.slot_int[g]
    for place in range(ints[L.GI_RUNNING]):
        row = slots[running[place]]
        if row[L.SI_PHASE] == L.PHASE_DECODE:
            wanted = _blocks_wanted(row, row[L.SI_DONE] + steps, block_tokens, entry_blocks)
            if wanted > 0:
                if row[L.SI_PLAN] == 0:
                    grow0 += wanted
                else:
                    grow1 += wanted
    return grow0, grow1


@inner_kernel
def _evict_for_growth(state, g, steps):
    grow0, grow1 = blocks_to_grow(state, g, steps)
    if grow0 > 0:
        kv_pool.room_for(state, g, ZERO, grow0 + grow1)
    if grow1 > 0:
        kv_pool.room_for(state, g, ONE, grow0 + grow1)


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
    _observe(group, steps)
    if ints[L.GI_CACHE_IDLE] > 0:  # only now: a jump that was cut short must not have evicted for steps never made
        _evict_for_growth(state, g, steps)
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
            wanted = _blocks_wanted(row, row[L.SI_DONE], block_tokens, entry_blocks)
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


@inner_kernel
def _time_step(state, g, tokens0, tokens1, pairs0, pairs1, kv0, kv1, decode0, decode1, sequences):
    return step_parts(
        g,
        state.rank_cost,
        state.group_cost,
        state.residual,
        state.slow,
        tokens0,
        tokens1,
        pairs0,
        pairs1,
        kv0,
        kv1,
        decode0,
        decode1,
        sequences,
    )


@inner_kernel
def _count_decoding(state, g):
    """(sequences, KV tokens) of decoding slots by plan, and the tightest TPOT limit among them."""
    decode0 = decode1 = kv0 = kv1 = 0
    limit_s = np.inf
    running = state.running[g]
    slots = state.slot_int[g]
    floats = state.slot_float[g]
    for place in range(state.group_int[g, L.GI_RUNNING]):
        slot = running[place]
        row = slots[slot]
        if row[L.SI_PHASE] != L.PHASE_DECODE:
            continue
        limit_s = min(limit_s, floats[slot, L.SF_TPOT_LIMIT_S])
        if row[L.SI_PLAN] == 0:
            decode0 += 1
            kv0 += row[L.SI_DONE]
        else:
            decode1 += 1
            kv1 += row[L.SI_DONE]
    return decode0, decode1, kv0, kv1, limit_s


@inner_kernel
def _chunk_budget(state, g, decode0, decode1, kv0, kv1, limit_s):
    """Prefill tokens this step may carry: as many as keep the decoding sequences inside their tightest TPOT limit."""
    budget = state.group_int[g, L.GI_CHUNK_MAX]
    decoding = decode0 + decode1
    if decoding == 0:
        return budget
    plan = state.group_int[g, L.GI_PLAN]
    target_s = limit_s * state.group_float[g, L.GF_TPOT_MARGIN]
    least = state.group_int[g, L.GI_CHUNK_MIN]
    while budget > least:
        extra0 = budget if plan == 0 else 0
        extra1 = budget - extra0
        pairs = 0.5 * budget * budget
        parts = _time_step(
            state,
            g,
            decode0 + extra0,
            decode1 + extra1,
            pairs if plan == 0 else 0.0,
            0.0 if plan == 0 else pairs,
            kv0,
            kv1,
            decode0,
            decode1,
            decoding + 1,
        )
        if parts[0] + parts[1] + parts[2] + parts[3] <= target_s:
            break
        budget //= 2
    return max(budget, least)


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
def _batch_has_room(state, g, slot, decode0, decode1, kv0, kv1, limit_s):
    """May one more sequence join without pushing the decode step over the tightest TPOT limit?"""
    running = state.group_int[g, L.GI_RUNNING]
    if running < state.group_int[g, L.GI_BATCH_MIN]:
        return True
    limit_s = min(limit_s, state.slot_float[g, slot, L.SF_TPOT_LIMIT_S])
    plan = state.group_int[g, L.GI_PLAN]
    more0 = running + 1 - decode0 - decode1 if plan == 0 else 0
    more1 = running + 1 - decode0 - decode1 - more0
    tokens = state.slot_int[g, slot, L.SI_PROMPT]
    parts = _time_step(
        state,
        g,
        decode0 + more0,
        decode1 + more1,
        0.0,
        0.0,
        kv0 + (tokens if plan == 0 else 0),
        kv1 + (0 if plan == 0 else tokens),
        ZERO,
        ZERO,
        running + 1,
    )
    return parts[0] + parts[1] + parts[2] + parts[3] <= limit_s * state.group_float[g, L.GF_TPOT_MARGIN]


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
def _assign_chunks(state, g, budget):
    """Give the step's prefill budget to admitted slots in admission order; returns what is left."""
    for place in range(state.group_int[g, L.GI_RUNNING]):
        row = state.slot_int[g, state.running[g, place]]
        if row[L.SI_PHASE] == L.PHASE_PREFILL:
            chunk = min(budget, row[L.SI_GOAL] - row[L.SI_DONE])
            row[L.SI_CHUNK] = chunk
            budget -= chunk
    return budget


@inner_kernel
def _admit_waiting(state, g, budget, decode0, decode1, kv0, kv1, limit_s):
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
        if not _batch_has_room(state, g, slot, decode0, decode1, kv0, kv1, limit_s):
            break
        if not _admit(state, g, slot, now_s):
            break
        row[L.SI_CHUNK] = min(budget, row[L.SI_GOAL] - row[L.SI_DONE])
        budget -= row[L.SI_CHUNK]
    return budget


@inner_kernel
def _give_up_overdue(state, g, now_s):
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
def _kv_allows(state, g, steps):
    """Can every decoding sequence take `steps` more steps? Growth of both plans is charged at the tighter plan's free blocks."""
    grow0, grow1 = blocks_to_grow(state, g, steps)
    if grow0 > 0 and grow0 + grow1 > kv_pool.reachable_blocks(state, g, ZERO):
        return False
    return not (grow1 > 0 and grow0 + grow1 > kv_pool.reachable_blocks(state, g, ONE))


@inner_kernel
def _steps_within_kv(state, g, steps):
    """Largest number of decode steps, at most `steps`, for which KV suffices (0 when not even one fits)."""
    # at most one block more per sequence and block length: most jumps need no exact count
    rough = state.group_int[g, L.GI_RUNNING] * (steps // state.group_int[g, L.GI_BLOCK_TOKENS] + 1)
    plan = state.group_int[g, L.GI_PLAN]
    other_used = state.group_int[g, L.GI_USED_BLOCKS0 + 1 - plan]
    if (other_used == 0 and rough <= kv_pool.free_blocks(state, g, plan)) or _kv_allows(state, g, steps):
        return steps
    low, high = 0, steps
    while high - low > 1:
        middle = (low + high) // 2
        if _kv_allows(state, g, middle):
            low = middle
        else:
            high = middle
    return low


@inner_kernel
def _make_room(state, g, now_s):
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


@inner_kernel
def plan_jump(state, g):
    """Decide the next jump from the group's clock: admissions, chunks, number of steps, times. Leaves it idle if empty."""
    ints = state.group_int[g]
    group = state.group_float[g]
    now_s = group[L.GF_CLOCK_S]
    if group[L.GF_GIVE_UP_S] < now_s:
        _give_up_overdue(state, g, now_s)
    while True:  # make room until at least one step fits; each round removes a sequence, so it ends
        decode0, decode1, kv0, kv1, limit_s = _count_decoding(state, g)
        if decode0 + decode1 == 0 or _kv_allows(state, g, ONE):
            break
        _make_room(state, g, now_s)
    budget = _chunk_budget(state, g, decode0, decode1, kv0, kv1, limit_s) if _has_prefill(state, g) else 0
    left = _assign_chunks(state, g, budget)
    left = _admit_waiting(state, g, left, decode0, decode1, kv0, kv1, limit_s)
    prefill_tokens = budget - left
    if ints[L.GI_RUNNING] == 0:
        return
    if prefill_tokens > 0:
        _plan_mixed_step(state, g, decode0, decode1, kv0, kv1)
        steps = 1
    else:
        steps = _plan_decode_steps(state, g, decode0, decode1, kv0, kv1)
    ints[L.GI_DECODING] = decode0 + decode1
    ints[L.GI_CHUNK_TOKENS] = prefill_tokens
    ints[L.GI_JUMP_ACTIVE] = 1
    ints[L.GI_JUMP_STEPS] = steps
    group[L.GF_JUMP_START_S] = now_s
    if steps > 1 and ints[L.GI_WAITING] > 0:  # who waits too long is noticed at the next step, not at the end of the jump
        steps = min(steps, steps_done_by(group, group[L.GF_GIVE_UP_S], steps) + 1)
        ints[L.GI_JUMP_STEPS] = steps
    group[L.GF_JUMP_END_S] = now_s + jump_duration_s(group, steps)


@inner_kernel
def _has_prefill(state, g):
    if state.group_int[g, L.GI_WAITING] > 0:
        return True
    for place in range(state.group_int[g, L.GI_RUNNING]):
        if state.slot_int[g, state.running[g, place], L.SI_PHASE] == L.PHASE_PREFILL:
            return True
    return False


@inner_kernel
def _store_times(state, g, parts):
    group = state.group_float[g]
    group[L.GF_J_COMPUTE_S] = parts[0]
    group[L.GF_J_MEMORY_S] = parts[1]
    group[L.GF_J_COMM_S] = parts[2]
    group[L.GF_J_HOST_S] = parts[3]
    group[L.GF_J_MEMORY_SLOPE] = parts[4]
    group[L.GF_J_COMM_SLOPE] = parts[5]


@inner_kernel
def _believe(state, g, tokens0, tokens1, pairs0, pairs1, kv0, kv1, decode0, decode1, sequences):
    """Store what the schedulers' model says of the planned jump's first step, for `_observe`."""
    believed = step_parts(
        g,
        state.predicted_rank_cost,
        state.predicted_group_cost,
        state.plain_residual,
        state.plain_slow,
        tokens0,
        tokens1,
        pairs0,
        pairs1,
        kv0,
        kv1,
        decode0,
        decode1,
        sequences,
    )
    state.group_float[g, L.GF_J_BELIEVED_S] = believed[0] + believed[1] + believed[2] + believed[3]


@inner_kernel
def _plan_mixed_step(state, g, decode0, decode1, kv0, kv1):
    """Times of one step that carries prefill chunks beside the decoding sequences."""
    tokens0, tokens1 = decode0, decode1
    pairs0 = pairs1 = 0.0
    sequences = decode0 + decode1
    for place in range(state.group_int[g, L.GI_RUNNING]):
        row = state.slot_int[g, state.running[g, place]]
        if row[L.SI_PHASE] != L.PHASE_PREFILL or row[L.SI_CHUNK] == 0:
            continue
        chunk = row[L.SI_CHUNK]
        pairs = chunk * (row[L.SI_DONE] + 0.5 * (chunk + 1.0))
        if row[L.SI_PLAN] == 0:
            tokens0 += chunk
            pairs0 += pairs
        else:
            tokens1 += chunk
            pairs1 += pairs
        if row[L.SI_DONE] + chunk >= row[L.SI_GOAL]:
            sequences += 1
    _store_times(state, g, _time_step(state, g, tokens0, tokens1, pairs0, pairs1, kv0, kv1, ZERO, ZERO, sequences))
    _believe(state, g, tokens0, tokens1, pairs0, pairs1, kv0, kv1, ZERO, ZERO, sequences)


@kernel
def _same_regime(state, g, steps, regime, decode0, decode1, kv0, kv1):
    """Is the last of `steps` decode steps timed by the same rank, and its communication hidden or not, as the first?"""
    last = steps - 1
    kv0 += last * decode0
    kv1 += last * decode1
    return _time_step(state, g, decode0, decode1, 0.0, 0.0, kv0, kv1, decode0, decode1, decode0 + decode1)[6] == regime


@inner_kernel
def _plan_decode_steps(state, g, decode0, decode1, kv0, kv1):
    """Times and number of pure decode steps until the first completion, KV shortage or change of regime."""
    steps = STEPS_MAX
    for place in range(state.group_int[g, L.GI_RUNNING]):
        row = state.slot_int[g, state.running[g, place]]
        if row[L.SI_PHASE] == L.PHASE_DECODE:
            steps = min(steps, row[L.SI_TARGET] - row[L.SI_GENERATED])
    steps = max(1, _steps_within_kv(state, g, steps))
    decoding = decode0 + decode1
    parts = _time_step(state, g, decode0, decode1, 0.0, 0.0, kv0, kv1, decode0, decode1, decoding)
    if not _same_regime(state, g, steps, parts[6], decode0, decode1, kv0, kv1):
        # doubling from 1, not halving from `steps`: where a jump ends must not tell how long its sequences will be
        most, steps = steps, 1
        while 2 * steps < most and _same_regime(state, g, 2 * steps, parts[6], decode0, decode1, kv0, kv1):
            steps *= 2
    _store_times(state, g, parts)
    _believe(state, g, decode0, decode1, 0.0, 0.0, kv0, kv1, decode0, decode1, decoding)
    return steps


@kernel
def advance_group(state, g, until_s):
    """Run group `g` up to `until_s`; a step in flight at that time stays in flight."""
    ints = state.group_int[g]
    group = state.group_float[g]
    while True:
        if ints[L.GI_JUMP_ACTIVE] == 0:
            if group[L.GF_CLOCK_S] > until_s or ints[L.GI_UP] == 0:
                return
            if group[L.GF_PAUSED_UNTIL_S] > group[L.GF_CLOCK_S]:
                resume_s = min(group[L.GF_PAUSED_UNTIL_S], until_s)
                if ints[L.GI_RUNNING] > 0:
                    group[L.GF_CUM_PAUSE_S] += resume_s - group[L.GF_CLOCK_S]
                group[L.GF_CLOCK_S] = resume_s
                if group[L.GF_PAUSED_UNTIL_S] > resume_s:
                    return
            if ints[L.GI_RUNNING] + ints[L.GI_WAITING] > 0:
                plan_jump(state, g)
            if ints[L.GI_JUMP_ACTIVE] == 0:
                group[L.GF_CLOCK_S] = max(group[L.GF_CLOCK_S], until_s)
                return
        if group[L.GF_JUMP_END_S] > until_s:
            return
        commit_jump(state, g)


@kernel
def advance_all(state, until_s):
    """Run every group up to `until_s`. Groups share nothing between two calls, so their order does not matter."""
    for g in range(state.group_int.shape[0]):
        advance_group(state, g, until_s)


@kernel
def join(state, g, now_s, request, class_index, prompt, target, arrival_s, key, tpot_limit_s):
    """Put a new request into group `g`'s queue and let the step under way be its last without it; returns its slot or -1."""
    slot = Q.enqueue(state, g, now_s, request, class_index, prompt, target, arrival_s, key, tpot_limit_s)
    if slot >= 0:
        cut_jump(state, g, now_s)
    return slot


@kernel
def next_event_s(state):
    """Earliest end of a planned jump over all groups; inf when all are idle."""
    earliest = np.inf
    for g in range(state.group_int.shape[0]):
        if state.group_int[g, L.GI_JUMP_ACTIVE] == 1:
            earliest = min(earliest, state.group_float[g, L.GF_JUMP_END_S])
    return earliest


@kernel
def stop_group(state, g, now_s):
    """The group dies at `now_s`: whole steps that ended are kept, the one in flight is lost."""
    ints = state.group_int[g]
    group = state.group_float[g]
    if ints[L.GI_JUMP_ACTIVE] == 1:
        steps = steps_done_by(group, now_s, ints[L.GI_JUMP_STEPS])
        if steps > 0:
            ints[L.GI_JUMP_STEPS] = steps
            group[L.GF_JUMP_END_S] = group[L.GF_JUMP_START_S] + jump_duration_s(group, steps)
            commit_jump(state, g)
        ints[L.GI_JUMP_ACTIVE] = 0
        for place in range(ints[L.GI_RUNNING]):
            state.slot_int[g, state.running[g, place], L.SI_CHUNK] = 0
    ints[L.GI_UP] = 0
