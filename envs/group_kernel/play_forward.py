"""Play one group's batch forward from what a scheduler knows of it, with sampled output lengths: the what-if of one candidate.

Uses the same kernel as the simulated world, but on believed coefficients and sampled lengths; the live state is not touched.
"""

from __future__ import annotations

import math

import numpy as np

from envs.group_kernel import layout as L
from envs.group_kernel import queue as Q
from envs.group_kernel.advance import advance_group
from envs.perf_model.compiled import ZERO, inner_kernel, kernel
from envs.perf_model.step_time import GC_COMM_ALPHA_S, GC_COMM_TOKEN_S, GC_HOST_BASE_S, GC_HOST_SEQUENCE_S

SOFTNESS = 0.1


@inner_kernel
def _score(limits, class_index, prompt, arrival_s, first_s, finish_s, generated):
    """Weight times a soft "met both limits", less a linear lateness charge; hard enough to tell met from missed."""
    limit = limits[class_index]
    ttft = (first_s - arrival_s) / (limit[0] + limit[1] * prompt)
    tpot = (finish_s - first_s) / max(1.0, generated - 1.0) / limit[2]
    worst = max(ttft, tpot)
    soft = 1.0 / (1.0 + math.exp(min(60.0, max(-60.0, (worst - 1.0) / SOFTNESS))))
    return limit[3] * (soft - 0.02 * max(0.0, worst - 1.0))


@inner_kernel
def _sample(quantiles, class_index, generated, uniform):
    place = min(quantiles.shape[1] - 1, int(3.0 * math.log2(1.0 + generated)))
    values = quantiles[class_index, place]
    return max(1, int(values[min(values.shape[0] - 1, int(uniform * values.shape[0]))]))


@inner_kernel
def _reset(scratch, now_s, pause_s, blocks, block_tokens, running_limit, chunk, rank_cost, group_cost, correction):
    scratch.group_int[0, :] = 0
    scratch.group_float[0, :] = 0.0
    slots = scratch.slot_int.shape[1]
    ints = scratch.group_int[0]
    for slot in range(slots):
        scratch.free_slots[0, slot] = slots - 1 - slot
    ints[L.GI_FREE_SLOTS] = slots
    ints[L.GI_UP] = 1
    ints[L.GI_RUNNING_LIMIT] = running_limit
    ints[L.GI_CHUNK_MAX] = chunk
    ints[L.GI_CHUNK_MIN] = min(chunk, 256)
    ints[L.GI_BATCH_MIN] = 8
    ints[L.GI_BLOCK_TOKENS] = block_tokens
    ints[L.GI_CACHE_BLOCK_TOKENS] = block_tokens
    ints[L.GI_PREEMPTION_LIMIT] = 8
    group = scratch.group_float[0]
    group[L.GF_CLOCK_S] = now_s
    group[L.GF_PAUSED_UNTIL_S] = now_s + pause_s
    group[L.GF_QUEUE_TIMEOUT_S] = 1e9
    group[L.GF_GIVE_UP_S] = np.inf
    group[L.GF_TPOT_MARGIN] = 0.9
    for r in range(rank_cost.shape[0]):
        for column in range(rank_cost.shape[1]):
            scratch.rank_cost[0, 0, r, column] = rank_cost[r, column] * correction
            scratch.predicted_rank_cost[0, 0, r, column] = rank_cost[r, column] * correction
    Q.copy_row(group_cost, scratch.group_cost[0])
    for column in (GC_COMM_ALPHA_S, GC_COMM_TOKEN_S, GC_HOST_BASE_S, GC_HOST_SEQUENCE_S):
        scratch.group_cost[0, column] *= correction
    Q.copy_row(scratch.group_cost[0], scratch.predicted_group_cost[0])
    scratch.kv_bytes[0, :] = 0.0
    scratch.kv_block_bytes[0, :, :] = 0.0
    scratch.kv_bytes[0, 0] = blocks
    scratch.kv_block_bytes[0, 0, 0] = 1.0
    scratch.record_count[0] = 0


@inner_kernel
def _load_resident(scratch, now_s, ints, floats, remaining, tpot_limit_s):
    """Put one resident into the scratch group as it stands: waiting, in prefill or decoding."""
    slot = Q.take_slot(scratch, ZERO)
    row = scratch.slot_int[0, slot]
    values = scratch.slot_float[0, slot]
    row[L.SI_REQUEST] = 0
    row[L.SI_CLASS] = ints[1]
    row[L.SI_PROMPT] = ints[2]
    row[L.SI_GENERATED] = ints[3]
    row[L.SI_TARGET] = ints[3] + remaining
    values[L.SF_ARRIVAL_S] = floats[0]
    values[L.SF_FIRST_S] = floats[1]
    values[L.SF_KEY] = floats[2]
    values[L.SF_TPOT_LIMIT_S] = tpot_limit_s
    values[L.SF_MARK_S] = now_s
    values[L.SF_ENQUEUED_S] = now_s
    values[L.SF_ADMITTED_S] = np.nan
    context = ints[2] + ints[3]
    if ints[5] == 0:
        row[L.SI_PHASE] = L.PHASE_WAITING
        row[L.SI_DONE] = context - ints[4]
        Q.insert_waiting(scratch, ZERO, slot)
        return
    row[L.SI_GOAL] = context
    row[L.SI_DONE] = context - ints[4] if ints[4] > 0 else context - 1
    row[L.SI_PHASE] = L.PHASE_PREFILL if ints[4] > 0 else L.PHASE_DECODE
    block_tokens = scratch.group_int[0, L.GI_BLOCK_TOKENS]
    row[L.SI_BLOCKS] = -(-context // block_tokens)
    scratch.group_int[0, L.GI_USED_BLOCKS0] += row[L.SI_BLOCKS]
    scratch.running[0, scratch.group_int[0, L.GI_RUNNING]] = slot
    scratch.group_int[0, L.GI_RUNNING] += 1


@kernel
def total_score(scratch, limits, horizon_s):
    """Score of everybody that ended, plus the lateness of those that did not."""
    total = 0.0
    for i in range(scratch.record_count[0]):
        ints, floats = scratch.record_int[i], scratch.record_float[i]
        first_s = floats[L.RF_FIRST_S]
        if math.isnan(first_s):
            first_s = horizon_s
        finish_s = max(first_s, floats[L.RF_FINISH_S])
        total += _score(limits, ints[L.RI_CLASS], ints[L.RI_PROMPT], floats[L.RF_ARRIVAL_S], first_s, finish_s, ints[L.RI_GENERATED])
    running = scratch.group_int[0, L.GI_RUNNING]
    for place in range(running + scratch.group_int[0, L.GI_WAITING]):
        slot = scratch.running[0, place] if place < running else scratch.waiting[0, place - running]
        ints, floats = scratch.slot_int[0, slot], scratch.slot_float[0, slot]
        first_s = floats[L.SF_FIRST_S]
        if math.isnan(first_s):
            first_s = horizon_s
        total += _score(
            limits, ints[L.SI_CLASS], ints[L.SI_PROMPT], floats[L.SF_ARRIVAL_S], first_s, max(first_s, horizon_s), ints[L.SI_GENERATED]
        )
    return total


@kernel
def what_if_gain(
    scratch,
    now_s,
    g,
    group_ints,
    group_floats,
    offset,
    resident_ints,
    resident_floats,
    block_tokens,
    request,
    request_key,
    hits,
    limits,
    rank_cost,
    group_cost,
    plan,
    quantiles,
    chunk,
    uniforms,
    horizon_s,
):
    """Change of the summed score of group `g` when the request joins it, averaged over rows of `uniforms` (samples, draws).

    request: (arrival_s, prompt tokens, class index). The same draws serve both plays (common random numbers).
    """
    slots = scratch.slot_int.shape[1]
    gain = 0.0
    samples = uniforms.shape[0]
    draws = uniforms.shape[1]
    arrival_s, prompt, class_index = request[0], int(request[1]), int(request[2])
    for sample in range(samples):
        target = _sample(quantiles, class_index, ZERO, uniforms[sample, 0])
        for joins in range(2):
            _reset(
                scratch,
                now_s,
                group_floats[g, 3] + group_floats[g, 0],
                group_ints[g, 3],
                block_tokens,
                group_ints[g, 8],
                chunk[g],
                rank_cost[g, plan[g]],
                group_cost[g],
                group_floats[g, 2],
            )
            for i in range(offset[g], min(offset[g + 1], offset[g] + slots - 1)):
                remaining = _sample(
                    quantiles, resident_ints[i, 1], resident_ints[i, 3], uniforms[sample, 1 + (i - offset[g]) % (draws - 1)]
                )
                limit_s = limits[resident_ints[i, 1], 2]
                _load_resident(scratch, now_s, resident_ints[i], resident_floats[i], remaining, limit_s)
            if joins == 1:
                slot = Q.enqueue(scratch, ZERO, now_s, ZERO, class_index, prompt, target, arrival_s, request_key, limits[class_index, 2])
                scratch.slot_int[0, slot, L.SI_DONE] = min(hits, prompt - 1)
            advance_group(scratch, ZERO, now_s + horizon_s)
            total = total_score(scratch, limits, now_s + horizon_s)
            gain += total if joins == 1 else -total
    return gain / samples


def scratch_group(ranks: int, slots: int) -> L.KernelState:
    """A one-group state to play in; one per thread."""
    return L.allocate(1, ranks, slots)
