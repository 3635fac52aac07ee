"""What the next step of a group's batch carries and how long it takes, by the world's coefficients and by the schedulers'.

Knows times and sizes; who is admitted is decided in `admission`.
"""

from __future__ import annotations

import numpy as np

from envs.group_kernel import layout as L
from envs.group_kernel.kv_growth import steps_within_kv
from envs.perf_model.compiled import ZERO, inner_kernel, kernel
from envs.perf_model.step_time import step_parts

STEPS_MAX = np.int64(1 << 30)


@inner_kernel
def _time_step(state, g, tokens0, tokens1, pairs0, pairs1, kv0, kv1, decode0, decode1, sequences):
    """Parts of one step as the world has it (`step_parts`)."""
    costs = (state.rank_cost, state.group_cost, state.residual, state.slow)
    return step_parts(g, *costs, tokens0, tokens1, pairs0, pairs1, kv0, kv1, decode0, decode1, sequences)


@inner_kernel
def _believe(state, g, tokens0, tokens1, pairs0, pairs1, kv0, kv1, decode0, decode1, sequences):
    """Store what the schedulers' model says of the planned jump's first step, for `observe`."""
    costs = (state.predicted_rank_cost, state.predicted_group_cost, state.plain_residual, state.plain_slow)
    believed = step_parts(g, *costs, tokens0, tokens1, pairs0, pairs1, kv0, kv1, decode0, decode1, sequences)
    state.group_float[g, L.GF_J_BELIEVED_S] = believed[0] + believed[1] + believed[2] + believed[3]


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
def count_decoding(state, g):
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
def chunk_budget(state, g, decode0, decode1, kv0, kv1, limit_s):
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
        tokens0, tokens1 = decode0 + extra0, decode1 + budget - extra0
        pairs = 0.5 * budget * budget
        pairs0 = pairs if plan == 0 else 0.0
        parts = _time_step(state, g, tokens0, tokens1, pairs0, pairs - pairs0, kv0, kv1, decode0, decode1, decoding + 1)
        if parts[0] + parts[1] + parts[2] + parts[3] <= target_s:
            break
        budget //= 2
    return max(budget, least)


@inner_kernel
def batch_has_room(state, g, slot, decode0, decode1, kv0, kv1, limit_s):
    """May one more sequence join without pushing the decode step over the tightest TPOT limit?"""
    running = state.group_int[g, L.GI_RUNNING]
    if running < state.group_int[g, L.GI_BATCH_MIN]:
        return True
    limit_s = min(limit_s, state.slot_float[g, slot, L.SF_TPOT_LIMIT_S])
    plan = state.group_int[g, L.GI_PLAN]
    more0 = running + 1 - decode0 - decode1 if plan == 0 else 0
    more1 = running + 1 - decode0 - decode1 - more0
    tokens = state.slot_int[g, slot, L.SI_PROMPT]
    after0 = kv0 + (tokens if plan == 0 else 0)
    after1 = kv1 + (0 if plan == 0 else tokens)
    parts = _time_step(state, g, decode0 + more0, decode1 + more1, 0.0, 0.0, after0, after1, ZERO, ZERO, running + 1)
    return parts[0] + parts[1] + parts[2] + parts[3] <= limit_s * state.group_float[g, L.GF_TPOT_MARGIN]


@inner_kernel
def plan_mixed_step(state, g, decode0, decode1, kv0, kv1):
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
def plan_decode_steps(state, g, decode0, decode1, kv0, kv1):
    """Times and number of pure decode steps until the first completion, KV shortage or change of regime."""
    steps = STEPS_MAX
    for place in range(state.group_int[g, L.GI_RUNNING]):
        row = state.slot_int[g, state.running[g, place]]
        if row[L.SI_PHASE] == L.PHASE_DECODE:
            steps = min(steps, row[L.SI_TARGET] - row[L.SI_GENERATED])
    steps = max(1, steps_within_kv(state, g, steps))
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
