"""What a request would meet in each group, and what it would do to those already there, by the schedulers' own model.

The model is the plain roofline times the group's observed / predicted correction: it never sees true output lengths,
true slow-downs or the world's residual tables. One compiled pass over groups and residents; closed form, no play-out
(`envs.group_kernel.play_forward` plays the batch forward where precision is worth milliseconds).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from envs.decision.request_classes import ClassBaseline, class_baseline
from envs.domain.requests import SERVICE_CLASSES, Request
from envs.domain.snapshot import ClusterSnapshot, FloatArray, IntArray
from envs.perf_model.compiled import ZERO, inner_kernel, kernel
from envs.perf_model.step_time import step_parts

# Columns of the estimate table (G, ESTIMATES).
(E_TTFT_S, E_TPOT_S, E_COMPLETION_S, E_OWN, E_HARM, E_UTILITY, E_STEP_S, E_STEP_AFTER_S, E_BACKLOG_S, E_PREFILL_RATE) = range(10)
(E_KV_WAIT_S, E_WORK_LEFT_S, E_TTFT_RATIO, E_TPOT_RATIO) = range(10, 14)
ESTIMATES = 14

# Columns of the baseline table (classes, G, BASELINES): a typical request's TTFT and TPOT over their limits, its time in s, its KV.
(B_TTFT_RATIO, B_TPOT_RATIO, B_TIME_S, B_KV_TOKENS) = range(4)
BASELINES = 4

SOFTNESS = 0.2  # width of the soft limit, as a share of the limit: our own prediction error is about that large
LATENESS_PRICE = 0.02  # utility lost per limit of lateness; keeps a gradient where a request is hopeless
REMAINING_BINS = 40
QUANTILES = 16


def remaining_bin(generated: int) -> int:
    """Bin of the remaining-length table: three per factor of two."""
    return min(REMAINING_BINS - 1, int(3.0 * math.log2(1.0 + generated)))


def bin_starts() -> IntArray:
    """Smallest `generated` of each bin, shape (REMAINING_BINS,)."""
    return np.array([math.ceil(2.0 ** (b / 3.0) - 1.0 - 1e-9) for b in range(REMAINING_BINS)], dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class PredictorTables:
    """What the predictor knows beside the snapshot. rank_cost (G, 2, R, RANK_COLUMNS), group_cost (G, GROUP_COLUMNS);
    plan (G,) plan slot in force; remaining_tokens (classes, REMAINING_BINS) expected further tokens given those made, and
    remaining_quantiles (classes, REMAINING_BINS, QUANTILES) their quantiles;
    chunk_tokens (G,) largest prefill chunk; baseline (classes, G, BASELINES), columns B_*: what a typical request of each class
    costs each group alone, before the group's correction;
    needs (classes, capability.FEATURES): what it asks of a group; limit_multiplier scales the class limits;
    head_start_s per priority level."""

    rank_cost: FloatArray
    group_cost: FloatArray
    plan: IntArray
    remaining_tokens: FloatArray
    remaining_quantiles: FloatArray
    chunk_tokens: IntArray
    residual: FloatArray
    slow: FloatArray
    baseline: FloatArray
    needs: FloatArray
    limit_multiplier: float = 1.0
    head_start_s: float = 2.0


@lru_cache(maxsize=64)
def class_limits(multiplier: float = 1.0) -> FloatArray:
    """Rows (ttft_base_s, ttft_per_token_s, tpot_s, weight, priority) per class; one array for all callers, to be read only."""
    return np.array(
        [
            (
                c.ttft_base_s * multiplier,
                c.ttft_per_prompt_token_s * multiplier,
                c.tpot_limit_s * multiplier,
                c.weight,
                c.priority,
            )
            for c in SERVICE_CLASSES
        ]
    )


@inner_kernel
def _soft_met(value, limit):
    """Probability-like score that `value` stays under `limit`: logistic in the relative slack, minus a linear lateness charge."""
    slack = (limit - value) / (SOFTNESS * limit)
    if slack > 30.0:
        return 1.0
    late = max(0.0, value / limit - 1.0)
    if slack < -30.0:
        return -LATENESS_PRICE * late
    return 1.0 / (1.0 + math.exp(-slack)) - LATENESS_PRICE * late


@inner_kernel
def _join(ttft_score, tpot_score):
    """Both limits must hold; a negative (late) score is kept as a charge."""
    if ttft_score > 0.0 and tpot_score > 0.0:
        return ttft_score * tpot_score
    return min(ttft_score, tpot_score)


@inner_kernel
def _step_s(g, plan, tokens, pairs, kv, sequences, rank_cost, group_cost, residual, slow):
    if plan == 0:
        parts = step_parts(g, rank_cost, group_cost, residual, slow, tokens, ZERO, pairs, 0.0, kv, ZERO, ZERO, ZERO, sequences)
    else:
        parts = step_parts(g, rank_cost, group_cost, residual, slow, ZERO, tokens, 0.0, pairs, ZERO, kv, ZERO, ZERO, sequences)
    return parts[0] + parts[1] + parts[2] + parts[3]


@inner_kernel
def _remaining(table, class_index, generated):
    place = int(3.0 * math.log2(1.0 + generated))
    return table[class_index, min(table.shape[1] - 1, place)]


@inner_kernel
def _resident_utility(now_s, prompt, generated, remaining, arrival_s, made_s, limit, step_s, extra_s, wait_s, redo_s):
    """Soft utility of one resident when a decode step takes `step_s` and a newcomer's prefill delays its tokens by `extra_s`.

    wait_s: until its first token, if that is still to come; redo_s: until it has recomputed what it lost.
    """
    if generated > 0 and not math.isnan(made_s):
        ttft_ok = 1.0 if made_s - arrival_s <= limit[0] + limit[1] * prompt else 0.0
        further = generated - 1.0 + remaining
        spent_s = now_s - made_s + remaining * step_s + extra_s
        spent_s += redo_s
        return limit[3] * ttft_ok * _soft_met(spent_s / max(1.0, further), limit[2])
    ttft = _soft_met(now_s - arrival_s + wait_s, limit[0] + limit[1] * prompt)
    return limit[3] * _join(ttft, _soft_met(step_s, limit[2]))


@inner_kernel
def _residents(now_s, first, last, ints, floats, limits, table, step_s, step_after_s, own_s, key, start_s, rate):
    """One pass over residents first..last - 1: their summed soft utility without and with a newcomer of queue key `key` that
    computes `own_s`, and the sum of their expected remaining tokens. start_s: when the backlog starts; rate: tokens per s."""
    before = after = left = 0.0
    ahead_s = start_s
    for i in range(first, last):
        class_index, prompt, generated = ints[i, 1], ints[i, 2], ints[i, 3]
        arrival_s, made_s = floats[i, 0], floats[i, 1]
        limit = limits[class_index]
        expected = _remaining(table, class_index, generated)
        left += expected
        remaining = max(1.0, expected)
        ahead_s += ints[i, 4] / rate
        behind_s = 0.0 if ints[i, 5] == 1 or floats[i, 2] <= key else own_s
        redo_s = ahead_s if ints[i, 4] > 0 else 0.0  # it must recompute first
        before += _resident_utility(now_s, prompt, generated, remaining, arrival_s, made_s, limit, step_s, 0.0, ahead_s, redo_s)
        after += _resident_utility(
            now_s, prompt, generated, remaining, arrival_s, made_s, limit, step_after_s, own_s, ahead_s + behind_s, redo_s
        )
    return before, after, left


@inner_kernel
def room_wait_s(need_tokens, free_tokens, places_missing, inside, inside_tokens, leave_s):
    """Until there is KV for `need_tokens` and a place in the batch: room comes back as residents finish, one mean context at a time.

    inside, inside_tokens: residents and their KV, at least one; leave_s: one of them leaves about every so often.
    """
    mean_context = max(1.0, inside_tokens / inside)
    return max(max(0.0, need_tokens - free_tokens) / mean_context * leave_s, places_missing * leave_s)


@kernel
def _estimate(
    now_s,
    arrival_s,
    prompt,
    class_index,
    hits,
    key,
    group_ints,
    group_floats,
    offset,
    resident_ints,
    resident_floats,
    block_tokens,
    limits,
    rank_cost,
    group_cost,
    residual,
    slow,
    plan,
    table,
    chunk,
    out,
):
    limit = limits[class_index]
    expected = max(1.0, table[class_index, 0])
    for g in range(out.shape[0]):
        running, waiting = group_ints[g, 0], group_ints[g, 1]
        backlog, kv = group_ints[g, 4], group_ints[g, 5]
        decoding = group_ints[g, 6]
        correction = group_floats[g, 2]
        costs = (rank_cost, group_cost, residual, slow)
        everyone = running + waiting
        width = chunk[g]
        mixed_s = correction * _step_s(g, plan[g], decoding + width, 0.5 * width * width, kv, decoding + 1, *costs)
        rate = width / mixed_s
        step_s = 0.0
        if everyone > 0:
            step_s = correction * _step_s(g, plan[g], everyone, 0.0, kv + backlog, everyone, *costs)
        step_after_s = correction * _step_s(g, plan[g], everyone + 1, 0.0, kv + backlog + prompt, everyone + 1, *costs)
        own_s = (
            max(prompt - hits[g], 1) / rate
            if prompt > width
            else correction * _step_s(g, plan[g], decoding + max(prompt - hits[g], 1), 0.5 * prompt * prompt, kv, decoding + 1, *costs)
        )
        start_s = group_floats[g, 3] + group_floats[g, 0]
        backlog_s = backlog / rate
        need = prompt + 0.5 * expected + (backlog if waiting > 0 else 0)
        before, after, left = _residents(
            now_s, offset[g], offset[g + 1], resident_ints, resident_floats, limits, table, step_s, step_after_s, own_s, key, start_s, rate
        )
        kv_wait_s = 0.0
        work_s = backlog_s
        if everyone > 0:
            mean_left = left / everyone
            leave_s = mean_left * step_s / everyone
            missing = everyone + 1 - group_ints[g, 8]
            kv_wait_s = room_wait_s(need, group_ints[g, 2] * block_tokens, missing, everyone, kv + backlog, leave_s)
            work_s += mean_left * step_s
        ttft_s = now_s - arrival_s + start_s + max(backlog_s, kv_wait_s) + own_s
        tpot_s = step_after_s + 0.5 * backlog_s / expected
        out[g, 0] = ttft_s
        out[g, 1] = tpot_s
        out[g, 2] = ttft_s + expected * tpot_s
        ttft_limit_s = limit[0] + limit[1] * prompt
        out[g, 3] = limit[3] * _join(_soft_met(ttft_s, ttft_limit_s), _soft_met(tpot_s, limit[2]))
        out[g, 4] = after - before
        out[g, 5] = before
        out[g, 6] = step_s
        out[g, 7] = step_after_s
        out[g, 8] = backlog_s
        out[g, 9] = rate
        out[g, 10] = kv_wait_s
        out[g, 11] = work_s
        out[g, 12] = ttft_s / ttft_limit_s
        out[g, 13] = tpot_s / limit[2]


@kernel
def _pack(
    running, waiting, free, total, backlog, kv, decoding, queue_limit, running_limit,
    left_s, wait_s, correction, pause_s, step_s,
    ints, floats,
):  # fmt: skip
    for g in range(ints.shape[0]):
        ints[g, 0] = running[g]
        ints[g, 1] = waiting[g]
        ints[g, 2] = free[g]
        ints[g, 3] = total[g]
        ints[g, 4] = backlog[g]
        ints[g, 5] = kv[g]
        ints[g, 6] = decoding[g]
        ints[g, 7] = queue_limit[g]
        ints[g, 8] = running_limit[g]
        floats[g, 0] = left_s[g]
        floats[g, 1] = wait_s[g]
        floats[g, 2] = correction[g]
        floats[g, 3] = pause_s[g]
        floats[g, 4] = step_s[g]


def pack_groups(view: ClusterSnapshot) -> tuple[IntArray, FloatArray]:
    """The snapshot's group columns side by side, (groups, 9) and (groups, 5), in the order that the compiled passes read."""
    ints = np.empty((view.groups, 9), np.int64)
    floats = np.empty((view.groups, 5))
    _pack(
        view.running, view.waiting, view.kv_blocks_free, view.kv_blocks_total, view.prefill_backlog_tokens, view.decode_kv_tokens,
        view.decoding, view.queue_limit, view.running_limit, view.step_left_s, view.oldest_wait_s, view.correction,
        view.pause_left_s, view.step_s, ints, floats,
    )  # fmt: skip
    return ints, floats


def queue_key(arrival_s: float, class_index: int, head_start_s: float) -> float:
    """Place in a group's queue: arrival time minus the head start of the class's priority."""
    return arrival_s - SERVICE_CLASSES[class_index].priority * head_start_s


def estimate_routes(
    view: ClusterSnapshot,
    request: Request,
    hits: IntArray,
    tables: PredictorTables,
    packed: tuple[IntArray, FloatArray] | None = None,
) -> FloatArray:
    """Estimates for `request` in every group, shape (groups, ESTIMATES), columns `E_*`; seconds, utilities, ratios.

    hits: prompt tokens each group's prefix cache holds, shape (groups,). packed: `pack_groups(view)` if at hand. Groups
    that are down get estimates too: the mask, not the predictor, keeps requests away from them.
    """
    out = np.empty((view.groups, ESTIMATES))
    ints, floats = pack_groups(view) if packed is None else packed
    residents = view.residents
    _estimate(
        view.now_s,
        request.arrival_s,
        request.prompt_tokens,
        request.class_index,
        hits,
        queue_key(request.arrival_s, request.class_index, tables.head_start_s),
        ints,
        floats,
        residents.offset,
        residents.ints,
        residents.floats,
        view.kv_block_tokens,
        class_limits(tables.limit_multiplier),
        tables.rank_cost,
        tables.group_cost,
        tables.residual,
        tables.slow,
        tables.plan,
        tables.remaining_tokens,
        tables.chunk_tokens,
        out,
    )
    return out


@kernel
def _alone(prompt, output, rank_cost, group_cost, residual, slow, plan, chunk, rate, step_s):
    """Prefill rate (classes, G) and decode step (classes, G) of one request alone in each group."""
    for c in range(prompt.shape[0]):
        for g in range(plan.shape[0]):
            width = min(prompt[c], chunk[g])
            costs = (rank_cost, group_cost, residual, slow)
            rate[c, g] = width / _step_s(g, plan[g], width, 0.5 * prompt[c] * width, 0, 1, *costs)
            step_s[c, g] = _step_s(g, plan[g], 1, 0.0, prompt[c] + output[c] // 2, 1, *costs)


def baselines(
    prompt_tokens: FloatArray,
    output_tokens: FloatArray,
    rank_cost: FloatArray,
    group_cost: FloatArray,
    residual: FloatArray,
    slow: FloatArray,
    plan: IntArray,
    chunk_tokens: IntArray,
    kv_bytes_per_token: float,
) -> ClassBaseline:
    """What a typical request of each class (prompt_tokens, output_tokens, shape (classes,), >= 1) costs each group that does
    nothing else, by the schedulers' model. The rest as in `PredictorTables`."""
    classes, groups = len(prompt_tokens), len(plan)
    rate, step_s = np.empty((classes, groups)), np.empty((classes, groups))
    typical = np.maximum(1, np.rint(np.stack([prompt_tokens, output_tokens]))).astype(np.int64)
    _alone(typical[0], typical[1], rank_cost, group_cost, residual, slow, plan, chunk_tokens, rate, step_s)
    return class_baseline(typical[0], typical[1], rate, step_s, kv_bytes_per_token)


def baseline_table(baseline: ClassBaseline, limit_multiplier: float = 1.0) -> FloatArray:
    """`baseline` against the class limits, shape (classes, G, BASELINES), columns B_*."""
    limits = class_limits(limit_multiplier)
    ttft_limit_s = limits[:, 0] + limits[:, 1] * baseline.prompt_tokens
    table = np.empty((*baseline.time_s.shape, BASELINES))
    table[..., B_TTFT_RATIO] = baseline.ttft_s / ttft_limit_s[:, None]
    table[..., B_TPOT_RATIO] = baseline.step_s / limits[:, 2, None]
    table[..., B_TIME_S] = baseline.time_s
    table[..., B_KV_TOKENS] = (baseline.prompt_tokens + baseline.output_tokens)[:, None]
    return table
