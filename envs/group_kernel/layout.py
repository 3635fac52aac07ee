"""Arrays that hold the state of all groups, and the names of their columns. Allocation only; `advance` moves them.

The state is a named tuple of arrays, because compiled code takes it as it is. S is the number of slots of a group:
every request in a group, waiting or running, sits in one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from envs.domain.snapshot import FloatArray, IntArray
from envs.perf_model.step_time import GC_HOST_SLOW, GC_INTERFERENCE, GC_LINK_SLOW, GROUP_COLUMNS, RANK_COLUMNS, RESIDUAL_BINS

# group integers
GI_RUNNING, GI_WAITING, GI_FREE_SLOTS, GI_PLAN, GI_JUMP_ACTIVE, GI_JUMP_STEPS, GI_USED_BLOCKS0, GI_USED_BLOCKS1 = range(8)
GI_CACHE_BLOCKS, GI_CACHE_IDLE, GI_RUNNING_LIMIT, GI_CHUNK_MAX, GI_CHUNK_MIN, GI_BATCH_MIN = range(8, 14)
GI_UP, GI_BLOCK_TOKENS, GI_CACHE_BLOCK_TOKENS, GI_STEPS, GI_PREEMPTIONS, GI_DECODING, GI_CHUNK_TOKENS = range(14, 21)
GI_PREEMPTION_LIMIT, GI_EVENTS = range(21, 23)
GROUP_INTS = 23

# group floats
GF_CLOCK_S, GF_JUMP_START_S, GF_JUMP_END_S, GF_PAUSED_UNTIL_S = range(4)
GF_CUM_COMPUTE_S, GF_CUM_MEMORY_S, GF_CUM_COMM_S, GF_CUM_HOST_S, GF_CUM_PAUSE_S = range(4, 9)
GF_J_COMPUTE_S, GF_J_MEMORY_S, GF_J_COMM_S, GF_J_HOST_S, GF_J_MEMORY_SLOPE, GF_J_COMM_SLOPE = range(9, 15)
GF_RETURN_S, GF_QUEUE_TIMEOUT_S, GF_TPOT_MARGIN, GF_BUSY_S = range(15, 19)
GF_OBSERVED_S, GF_PREDICTED_S, GF_J_BELIEVED_S = range(19, 22)
GF_GIVE_UP_S = 22  # no waiting request is given up before this time; exact after each sweep of the queue
GROUP_FLOATS = 23

# slot integers
SI_REQUEST, SI_CLASS, SI_PROMPT, SI_TARGET, SI_GOAL, SI_DONE, SI_GENERATED, SI_BLOCKS, SI_PHASE, SI_PLAN = range(10)
SI_PREEMPTIONS, SI_HIT, SI_CACHE_REFS, SI_CHUNK, SI_ATTEMPTS, SI_REDOING = range(10, 16)
SLOT_INTS = 16
PHASE_FREE, PHASE_WAITING, PHASE_PREFILL, PHASE_DECODE = range(4)

# slot floats
SF_ARRIVAL_S, SF_MARK_S, SF_ADMITTED_S, SF_FIRST_S, SF_KEY, SF_TPOT_LIMIT_S, SF_ENQUEUED_S = range(7)
SF_SNAP_COMPUTE_S, SF_SNAP_MEMORY_S, SF_SNAP_COMM_S, SF_SNAP_HOST_S, SF_SNAP_PAUSE_S = range(7, 12)
SF_PARTS = 12  # nine columns in the order of envs.domain.requests.LATENCY_PARTS
SLOT_FLOATS = 21
PART_QUEUE, PART_PREFILL, PART_DECODE, PART_MEMORY, PART_COMM, PART_HOST, PART_PAUSE, PART_REDONE, PART_RETURN = range(9)

# finished-request records
RI_REQUEST, RI_GROUP, RI_KIND, RI_GENERATED, RI_PREEMPTIONS, RI_HIT, RI_ATTEMPTS, RI_CLASS, RI_PROMPT = range(9)
RECORD_INTS = 9
RF_ARRIVAL_S, RF_ADMITTED_S, RF_FIRST_S, RF_FINISH_S = range(4)
RF_PARTS = 4
RECORD_FLOATS = 13
RECORD_COMPLETED, RECORD_TIMEOUT, RECORD_PREEMPTED_OUT, RECORD_TOO_LARGE = range(4)


class KernelState(NamedTuple):
    """G groups, S slots, R ranks, B distinct prefix blocks (+1 sentinel), M records. See module text of `step_time`."""

    group_int: IntArray  # (G, GROUP_INTS)
    group_float: FloatArray  # (G, GROUP_FLOATS)
    slot_int: IntArray  # (G, S, SLOT_INTS)
    slot_float: FloatArray  # (G, S, SLOT_FLOATS)
    waiting: IntArray  # (G, S) slot numbers, by queue key
    running: IntArray  # (G, S) slot numbers, by admission
    free_slots: IntArray  # (G, S) stack
    rank_cost: FloatArray  # (G, 2, R, RANK_COLUMNS)
    group_cost: FloatArray  # (G, GROUP_COLUMNS)
    residual: FloatArray  # (G, R, RESIDUAL_BINS)
    slow: FloatArray  # (G, R, 2)
    predicted_rank_cost: FloatArray  # as rank_cost, but what the schedulers' own model believes
    predicted_group_cost: FloatArray
    plain_residual: FloatArray  # all ones
    plain_slow: FloatArray  # all ones
    kv_bytes: FloatArray  # (G, R) bytes for KV
    kv_block_bytes: FloatArray  # (G, 2, R) bytes of one block under each plan slot
    cache_links: IntArray  # (G, B + 1, 3) previous, next, references (-1 = absent); row B is the sentinel
    prefix_offset: IntArray  # (N + 1,)
    prefix_ids: IntArray  # (sum,)
    record_int: IntArray  # (M, RECORD_INTS)
    record_float: FloatArray  # (M, RECORD_FLOATS)
    record_count: IntArray  # (1,)


def allocate(
    groups: int,
    ranks: int,
    slots: int,
    prefix_offset: IntArray | None = None,
    prefix_ids: IntArray | None = None,
    records: int | None = None,
) -> KernelState:
    """Empty state: every group down-clocked to 0 s, all slots free, costs zero (fill them from `group_cost`)."""
    offset = (np.zeros(1, np.int64) if prefix_offset is None else prefix_offset).view()
    ids = (np.zeros(0, np.int64) if prefix_ids is None else prefix_ids).view()
    # read-only like those of a trace: to numba it is another type, for which it would compile everything again
    offset.flags.writeable = ids.flags.writeable = False
    blocks = int(ids.max()) + 1 if ids.size else 0
    links = np.full((groups, blocks + 1, 3), -1, np.int64)
    links[:, blocks, :2] = blocks  # an empty ring: the sentinel points at itself
    group_cost = np.zeros((groups, GROUP_COLUMNS))
    group_cost[:, [GC_HOST_SLOW, GC_LINK_SLOW, GC_INTERFERENCE]] = 1.0
    state = KernelState(
        np.zeros((groups, GROUP_INTS), np.int64),
        np.zeros((groups, GROUP_FLOATS)),
        np.zeros((groups, slots, SLOT_INTS), np.int64),
        np.zeros((groups, slots, SLOT_FLOATS)),
        np.zeros((groups, slots), np.int64),
        np.zeros((groups, slots), np.int64),
        np.tile(np.arange(slots - 1, -1, -1, dtype=np.int64), (groups, 1)),
        np.zeros((groups, 2, ranks, RANK_COLUMNS)),
        group_cost,
        np.ones((groups, ranks, RESIDUAL_BINS)),
        np.ones((groups, ranks, 2)),
        np.zeros((groups, 2, ranks, RANK_COLUMNS)),
        group_cost.copy(),
        np.ones((groups, ranks, RESIDUAL_BINS)),
        np.ones((groups, ranks, 2)),
        np.zeros((groups, ranks)),
        np.zeros((groups, 2, ranks)),
        links,
        offset,
        ids,
        np.zeros((records or groups * slots + 64, RECORD_INTS), np.int64),
        np.zeros((records or groups * slots + 64, RECORD_FLOATS)),
        np.zeros(1, np.int64),
    )
    state.group_int[:, GI_FREE_SLOTS] = slots
    state.group_int[:, GI_UP] = 1
    state.group_float[:, GF_GIVE_UP_S] = np.inf
    return state
