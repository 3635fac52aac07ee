"""Time of one continuous-batching step of a TP group from coefficient arrays: roofline per rank, slowest rank, exposed
communication, host. Compiled; knows nothing of queues or requests.

Layout of the arrays (G groups, 2 plan slots, R ranks; absent ranks are all zero):

| array | shape | last axis |
|---|---|---|
| rank_cost | (G, 2, R, 10) | the `RC_*` columns, seconds per unit |
| group_cost | (G, 10) | the `GC_*` columns |
| residual | (G, R, 15) | measured / roofline multiplier of the GEMMs at 2^0 … 2^14 tokens |
| slow | (G, R, 2) | slow-down of compute and of memory, 1 = nominal |
"""

from __future__ import annotations

import math

from envs.perf_model.compiled import inlined_kernel, kernel

# Columns of rank_cost: what one rank adds to a step, over all layers.
RC_ATTENTION_TOKEN_S = 0  # projection FLOP of one token
RC_ATTENTION_WEIGHT_S = 1  # reading the attention weights once
RC_PREFILL_PAIR_S = 2  # one query-key pair of prefill attention
RC_DECODE_KV_S = 3  # reading one KV token in decode
RC_MLP_TOKEN_S = 4
RC_MLP_WEIGHT_S = 5
RC_HEAD_SEQUENCE_S = 6  # output head FLOP of one sequence
RC_HEAD_WEIGHT_S = 7
RC_OVERHEAD_S = 8  # fixed kernel overhead of all layers
RC_ELEMENTWISE_TOKEN_S = 9  # norms, rope, activation: bytes moved per token
RANK_COLUMNS = 10

# Columns of group_cost.
GC_COMM_ALPHA_S = 0  # all all-reduces of a step, latency part
GC_COMM_TOKEN_S = 1  # all all-reduces of a step, per token
GC_OVERLAP_FRACTION = 2  # share of compute that can hide communication
GC_HOST_BASE_S = 3
GC_HOST_SEQUENCE_S = 4
GC_HOST_SLOW = 5  # host slow-down, 1 = nominal
GC_LINK_SLOW = 6  # link slow-down, 1 = nominal
GC_INTERFERENCE = 7  # hidden multiplier of all device work, 1 in every predictor
GC_EXPERTS = 8  # experts held (0 = dense)
GC_EXPERTS_ACTIVE = 9
GROUP_COLUMNS = 10

RESIDUAL_BINS = 15


@inlined_kernel
def residual_position(tokens):
    """Place of `tokens` >= 1 on the logarithmic axis of the residual tables; the same for all ranks of a step."""
    return math.log2(tokens) if tokens > 1.0 else 0.0


@inlined_kernel
def residual_at(row, position):
    """Log-linear interpolation of one rank's residual table at a `residual_position`."""
    if position >= RESIDUAL_BINS - 1:
        return row[RESIDUAL_BINS - 1]
    low = int(position)
    return row[low] + (position - low) * (row[low + 1] - row[low])


@kernel
def step_parts(g, rank_cost, group_cost, residual, slow, tokens0, tokens1, pairs0, pairs1, kv0, kv1, decode0, decode1, sequences):
    """One step of group `g`; suffixes 0 and 1 are the two plan slots.

    Args: tokens: all tokens computed; pairs: prefill query-key pairs; kv: KV tokens read by decode;
    decode: decoding sequences (each adds one KV token per step); sequences: rows that need logits.
    Returns: (compute_s, memory_s, communication_s, host_s, memory slope, communication slope, regime);
    slopes are seconds per further decode step, valid while `regime` stays the same.
    Source: roofline bound, Williams et al., CACM 52(4), 2009; the max over ranks is the barrier of each all-reduce.
    """
    ranks = rank_cost.shape[2]
    tokens = tokens0 + tokens1
    position = residual_position(tokens)
    share0 = tokens0 > 0 or kv0 > 0
    share1 = tokens1 > 0 or kv1 > 0
    experts = group_cost[g, GC_EXPERTS]
    touched = 1.0
    if experts > 0.0:  # expected share of experts that some token of the batch wakes
        touched = 1.0 - (1.0 - group_cost[g, GC_EXPERTS_ACTIVE] / experts) ** tokens
    attention_s = -1.0
    attention_flop_s = 0.0
    attention_slope = 0.0
    attention_rank = 0
    mlp_s = -1.0
    mlp_flop_s = 0.0
    head_s = -1.0
    head_flop_s = 0.0
    for r in range(ranks):
        slow_compute = slow[g, r, 0]
        slow_memory = slow[g, r, 1]
        bend = residual_at(residual[g, r], position)
        weight = 0.0
        mlp_weight = 0.0
        head_weight = 0.0
        overhead = 0.0
        head_token = 0.0
        if share0:
            weight = rank_cost[g, 0, r, RC_ATTENTION_WEIGHT_S]
            mlp_weight = rank_cost[g, 0, r, RC_MLP_WEIGHT_S]
            head_weight = rank_cost[g, 0, r, RC_HEAD_WEIGHT_S]
            overhead = rank_cost[g, 0, r, RC_OVERHEAD_S]
            head_token = rank_cost[g, 0, r, RC_HEAD_SEQUENCE_S]
        if share1:
            weight = max(weight, rank_cost[g, 1, r, RC_ATTENTION_WEIGHT_S])
            mlp_weight = max(mlp_weight, rank_cost[g, 1, r, RC_MLP_WEIGHT_S])
            head_weight = max(head_weight, rank_cost[g, 1, r, RC_HEAD_WEIGHT_S])
            overhead = max(overhead, rank_cost[g, 1, r, RC_OVERHEAD_S])
            head_token = max(head_token, rank_cost[g, 1, r, RC_HEAD_SEQUENCE_S])
        flop = (tokens0 * rank_cost[g, 0, r, RC_ATTENTION_TOKEN_S] + tokens1 * rank_cost[g, 1, r, RC_ATTENTION_TOKEN_S]) * slow_compute
        pair = (pairs0 * rank_cost[g, 0, r, RC_PREFILL_PAIR_S] + pairs1 * rank_cost[g, 1, r, RC_PREFILL_PAIR_S]) * slow_compute
        small = tokens0 * rank_cost[g, 0, r, RC_ELEMENTWISE_TOKEN_S] + tokens1 * rank_cost[g, 1, r, RC_ELEMENTWISE_TOKEN_S]
        read = small * slow_memory + (kv0 * rank_cost[g, 0, r, RC_DECODE_KV_S] + kv1 * rank_cost[g, 1, r, RC_DECODE_KV_S]) * slow_memory
        total = max(flop, weight * slow_memory) * bend + pair + read + overhead
        if total > attention_s:
            attention_s = total
            attention_flop_s = flop + pair
            attention_rank = r
            attention_slope = (decode0 * rank_cost[g, 0, r, RC_DECODE_KV_S] + decode1 * rank_cost[g, 1, r, RC_DECODE_KV_S]) * slow_memory
        flop = (tokens0 * rank_cost[g, 0, r, RC_MLP_TOKEN_S] + tokens1 * rank_cost[g, 1, r, RC_MLP_TOKEN_S]) * slow_compute
        total = max(flop, mlp_weight * touched * slow_memory) * bend
        if total > mlp_s:
            mlp_s = total
            mlp_flop_s = flop
        flop = sequences * head_token * slow_compute
        total = max(flop, head_weight * slow_memory)
        if total > head_s:
            head_s = total
            head_flop_s = flop
    interference = group_cost[g, GC_INTERFERENCE]
    device_s = (attention_s + mlp_s + head_s) * interference
    compute_s = min(device_s, attention_flop_s + mlp_flop_s + head_flop_s)
    comm_s = (group_cost[g, GC_COMM_ALPHA_S] + group_cost[g, GC_COMM_TOKEN_S] * tokens) * group_cost[g, GC_LINK_SLOW]
    hidden_s = group_cost[g, GC_OVERLAP_FRACTION] * device_s
    memory_slope = attention_slope * interference
    comm_slope = 0.0
    regime = attention_rank * 2
    if comm_s > hidden_s:
        comm_s -= hidden_s
        comm_slope = -group_cost[g, GC_OVERLAP_FRACTION] * memory_slope
        regime += 1
    else:
        comm_s = 0.0
    host_s = (group_cost[g, GC_HOST_BASE_S] + group_cost[g, GC_HOST_SEQUENCE_S] * sequences) * group_cost[g, GC_HOST_SLOW]
    return compute_s, device_s - compute_s, comm_s, host_s, memory_slope, comm_slope, regime


@kernel
def rank_times(g, rank_cost, group_cost, residual, slow, plan, tokens, pairs, kv, out):
    """Fill `out` (R, 2) with each rank's attention and MLP seconds of a step under one plan slot (telemetry, balance)."""
    position = residual_position(tokens)
    for r in range(rank_cost.shape[2]):
        cost = rank_cost[g, plan, r]
        bend = residual_at(residual[g, r], position)
        interference = group_cost[g, GC_INTERFERENCE]
        attention = max(tokens * cost[RC_ATTENTION_TOKEN_S] * slow[g, r, 0], cost[RC_ATTENTION_WEIGHT_S] * slow[g, r, 1]) * bend
        attention += pairs * cost[RC_PREFILL_PAIR_S] * slow[g, r, 0] + kv * cost[RC_DECODE_KV_S] * slow[g, r, 1]
        attention += tokens * cost[RC_ELEMENTWISE_TOKEN_S] * slow[g, r, 1] + cost[RC_OVERHEAD_S]
        out[r, 0] = attention * interference
        out[r, 1] = max(tokens * cost[RC_MLP_TOKEN_S] * slow[g, r, 0], cost[RC_MLP_WEIGHT_S] * slow[g, r, 1]) * bend * interference
