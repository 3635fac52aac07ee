"""All that a scheduler may see at one instant: measured or declared, nothing of the future."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


class Residents(NamedTuple):
    """Requests inside groups, group after group: those of group g are rows offset[g] to offset[g + 1].

    ints (residents, 6): request id, class index, prompt tokens, tokens generated so far, prompt tokens not yet
    computed, 1 if admitted (holds KV). floats (residents, 3): arrival, first token (NaN before it), queue key.
    The true output length is not here. Packed, because compiled code reads them on every decision.
    """

    offset: IntArray
    ints: IntArray
    floats: FloatArray


class ClusterSnapshot(NamedTuple):
    """The cluster at `now_s`; arrays have shape (groups,) unless stated. Times in s, sizes in tokens or blocks.

    A named tuple, because one is made for every decision: a frozen data class of so many fields takes five times as long.

    is_up: serving; accepts: is_up, not draining, breaker lets traffic pass and the queue has room.
    prefill_backlog_tokens: prompt tokens of waiting and running requests not yet computed.
    decode_kv_tokens: KV tokens read by the next decode step. step_s: time of the step under way.
    decoding: sequences that decode now. correction: observed / predicted step time (1 = as predicted).
    report_age_s: age of what was reported; our own in-flight counts are always fresh.
    plan_corner: which split corner is in force (index into envs.decision.split_planner.CORNERS, -1 unknown).
    rank_busy_fraction: (groups, ranks) mean share of a step in which the rank computes, 0 for absent ranks.
    static_profile: (groups, 5) standardised declared rates (envs.decision.capability.STATIC_FEATURES).
    rank_ratio: (groups, ranks) measured / declared time of each rank's work, 1 where nothing was measured, 0 for absent
    ranks. correction_std: how uncertain the ratio of the group's least known rank is, as a share of it.
    class_ratio: (groups, classes, 2) observed / predicted TTFT and TPOT of each class in each group, 1 before any answer.
    """

    now_s: float
    is_up: BoolArray
    accepts: BoolArray
    is_draining: BoolArray
    running: IntArray
    waiting: IntArray
    running_limit: IntArray
    queue_limit: IntArray
    kv_blocks_free: IntArray
    kv_blocks_total: IntArray
    kv_block_tokens: int
    prefill_backlog_tokens: IntArray
    decode_kv_tokens: IntArray
    decoding: IntArray
    step_s: FloatArray
    step_left_s: FloatArray
    correction: FloatArray
    oldest_wait_s: FloatArray
    breaker_state: IntArray
    report_age_s: FloatArray
    pause_left_s: FloatArray
    plan_corner: IntArray
    rank_busy_fraction: FloatArray
    capability: FloatArray  # relative decode speed of the declared hardware, mean 1 over the cluster
    usd_per_hour: FloatArray
    residents: Residents
    hold_queue: int
    hold_queue_limit: int
    arrival_rate_5s: float
    arrival_rate_60s: float
    static_profile: FloatArray
    rank_ratio: FloatArray
    correction_std: FloatArray
    class_ratio: FloatArray

    @property
    def groups(self) -> int:
        return int(self.is_up.shape[0])
