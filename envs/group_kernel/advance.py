"""Moving a group through time. Between two changes of its batch a group decodes the same sequences, and the time of
its i-th step is affine in i (KV grows by one token a sequence), so a whole run of steps, a *jump*, is one sum.

Order at equal times: step ends and completions first, then what the caller does at that time (arrivals, commands).
A request that arrives during a step joins at its end. A jump never crosses a completion, a KV shortage or a change of
regime (another rank becomes the slowest, communication becomes hidden), so jumping equals stepping.
"""

from __future__ import annotations

import numpy as np

from envs.group_kernel import layout as L
from envs.group_kernel import queue as Q
from envs.group_kernel.admission import admit_waiting, assign_chunks, give_up_overdue, make_room
from envs.group_kernel.batch_step import chunk_budget, count_decoding, plan_decode_steps, plan_mixed_step
from envs.group_kernel.jump import cut_jump, jump_duration_s, steps_done_by
from envs.group_kernel.kv_growth import kv_allows
from envs.group_kernel.step_effects import commit_jump
from envs.perf_model.compiled import ONE, inner_kernel, kernel


@inner_kernel
def _has_prefill(state, g):
    """Does anybody wait or compute its prompt?"""
    if state.group_int[g, L.GI_WAITING] > 0:
        return True
    for place in range(state.group_int[g, L.GI_RUNNING]):
        if state.slot_int[g, state.running[g, place], L.SI_PHASE] == L.PHASE_PREFILL:
            return True
    return False


@inner_kernel
def plan_jump(state, g):
    """Decide the next jump from the group's clock: admissions, chunks, number of steps, times. Leaves it idle if empty."""
    ints = state.group_int[g]
    group = state.group_float[g]
    now_s = group[L.GF_CLOCK_S]
    if group[L.GF_GIVE_UP_S] < now_s:
        give_up_overdue(state, g, now_s)
    while True:  # make room until at least one step fits; each round removes a sequence, so it ends
        decode0, decode1, kv0, kv1, limit_s = count_decoding(state, g)
        if decode0 + decode1 == 0 or kv_allows(state, g, ONE):
            break
        make_room(state, g, now_s)
    budget = chunk_budget(state, g, decode0, decode1, kv0, kv1, limit_s) if _has_prefill(state, g) else 0
    left = assign_chunks(state, g, budget)
    left = admit_waiting(state, g, left, decode0, decode1, kv0, kv1, limit_s)
    prefill_tokens = budget - left
    if ints[L.GI_RUNNING] == 0:
        return
    if prefill_tokens > 0:
        plan_mixed_step(state, g, decode0, decode1, kv0, kv1)
        steps = 1
    else:
        steps = plan_decode_steps(state, g, decode0, decode1, kv0, kv1)
    ints[L.GI_DECODING] = decode0 + decode1
    ints[L.GI_CHUNK_TOKENS] = prefill_tokens
    ints[L.GI_JUMP_ACTIVE] = 1
    ints[L.GI_JUMP_STEPS] = steps
    group[L.GF_JUMP_START_S] = now_s
    if steps > 1 and ints[L.GI_WAITING] > 0:  # who waits too long is noticed at the next step, not at the end of the jump
        steps = min(steps, steps_done_by(group, group[L.GF_GIVE_UP_S], steps) + 1)
        ints[L.GI_JUMP_STEPS] = steps
    group[L.GF_JUMP_END_S] = now_s + jump_duration_s(group, steps)


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
