"""A planned run of equal decode steps, a *jump*: how long it takes, where it can be cut, what it teaches.

The time of its i-th step is affine in i (KV grows by one token a sequence), so its duration is one sum.
"""

from __future__ import annotations

import math

from envs.group_kernel import layout as L
from envs.perf_model.compiled import ONE, inner_kernel, kernel

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
def observe(group, steps):
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
