"""The compiled part of a bulk move inside a host: carries all its messages through the rings of their pairs without the interpreter lock.

The lock is what disturbs steps most: a thread of low priority that runs Python holds it while a step's thread wants it.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from envs.perf_model.kernel_cache import cached_njit
from runtime.torch_tp.communicators.shared_flags import (
    DONE,
    FLAG_BYTES,
    PUBLISHED,
    SLEEP_US,
    SLOT_HEADER_BYTES,
    copy_memory,
    load_acquire,
    long_pointer,
    now_ns,
    sched_yield,
    sleep_us,
    store_release,
)

CHUNK_BYTES = 64 * 1024
RING_CHUNKS = 4
CHUNK_STRIDE = SLOT_HEADER_BYTES + CHUNK_BYTES
PIECE_BYTES = 4 * 1024  # copied at a time: less than 1 us, by which a rank that waited for another one goes on late
PATIENCE_NS = 2_000_000
IDLE_NAP_US = 100
# offsets in a pair's flag line
SENT, TAKEN = 0, 8
LANE_FIELDS = ("is_send", "line", "ring", "number", "message", "end", "done_bytes")
IS_SEND, LINE, RING, NUMBER, MESSAGE, END, DONE_BYTES = range(len(LANE_FIELDS))
ALL_MOVED, BUDGET_OVER = -1, -2
AT_REST, WAITING, SUMMING = range(3)


@cached_njit("int64(int64, int64)", nogil=True)
def _lane_state(flags, size):  # type: ignore[no-untyped-def]
    """AT_REST, WAITING for a rank that has not come to the collective yet, or SUMMING: all have come and not all have left it."""
    first, last, is_inside = load_acquire(flags + PUBLISHED), load_acquire(flags + PUBLISHED), False
    for rank in range(size):
        line = flags + rank * FLAG_BYTES
        published = load_acquire(line + PUBLISHED)
        first, last = min(first, published), max(last, published)
        is_inside |= published > load_acquire(line + DONE)
    if not is_inside:
        return AT_REST
    return SUMMING if first == last else WAITING


@cached_njit("void(int64, int64, int64, int64, int64, boolean, int64)", nogil=True)
def copy_politely(target, source, count, flags, size, offers_core, clock):  # type: ignore[no-untyped-def]
    """Copy `count` bytes in pieces, none of them begun while the ranks of the lane at `flags` are summing. While one waits for another it
    has time; but a thread of its own real-time class (`offers_core`) may be on its very core, and offers that back after each piece,
    so that it sees the other come. In the ordinary class that would offer the core to every program of the machine.

    Stands back at most PATIENCE_NS per piece, so that a lane that is never at rest cannot starve the copy.
    """
    for begin in range(0, count, PIECE_BYTES):
        started_ns = 0
        while _lane_state(flags, size) == SUMMING:
            time_ns = now_ns(clock)
            if started_ns == 0:
                started_ns = time_ns
            elif time_ns - started_ns > PATIENCE_NS:
                break
            sleep_us(SLEEP_US)
        copy_memory(target + begin, source + begin, min(PIECE_BYTES, count - begin))
        if offers_core and _lane_state(flags, size) != AT_REST:
            sched_yield()


@cached_njit("int64(int64, int64, int64, int64, int64, int64, float64, boolean, int64)", nogil=True)
def advance_moves(lanes, lane_count, messages, flags, size, state, bytes_per_s_max, offers_core, budget_ns):  # type: ignore[no-untyped-def]
    """Carry the messages of all lanes (directions of pairs) as far as they go within `budget_ns`, no faster than `bytes_per_s_max`.

    Args: `lanes`: address of int64 rows LANE_FIELDS; a lane's messages are rows `message` to `end` - 1 of (address, bytes) at `messages`,
        `number` counts the chunks that its ring has passed. `flags`, `size`: of the steps' lane. `state`: address of int64: clock (two),
        bytes moved in this call, when something last moved (ns), a word that ends the call when it is not 0.
    Returns: ALL_MOVED, BUDGET_OVER (call again), or the lane whose sender has other bytes to send than are expected.
    """
    told = carray(long_pointer(state), 5)
    rows = carray(long_pointer(lanes), (lane_count, 7))
    parcels = carray(long_pointer(messages), (np.int64(1) << 32, 2))
    told[2] = 0
    entered_ns = now_ns(state)
    while True:
        is_left, has_moved = False, False
        for lane in range(lane_count):
            row = rows[lane]
            if row[MESSAGE] == row[END]:
                continue
            is_left = True
            if row[IS_SEND] and row[NUMBER] - load_acquire(row[LINE] + TAKEN) >= RING_CHUNKS:
                continue
            if not row[IS_SEND] and load_acquire(row[LINE] + SENT) <= row[NUMBER]:
                continue
            chunk = row[RING] + row[NUMBER] % RING_CHUNKS * CHUNK_STRIDE
            begun_ns = now_ns(state)
            left_bytes = parcels[row[MESSAGE], 1] - row[DONE_BYTES]
            length = min(CHUNK_BYTES, left_bytes)
            own = parcels[row[MESSAGE], 0] + row[DONE_BYTES]
            if row[IS_SEND]:
                store_release(chunk, left_bytes)
                copy_politely(chunk + SLOT_HEADER_BYTES, own, length, flags, size, offers_core, state)
                store_release(row[LINE] + SENT, row[NUMBER] + 1)
            else:
                if load_acquire(chunk) != left_bytes:
                    return lane
                copy_politely(own, chunk + SLOT_HEADER_BYTES, length, flags, size, offers_core, state)
                store_release(row[LINE] + TAKEN, row[NUMBER] + 1)
            row[NUMBER] += 1
            row[DONE_BYTES] += length
            if length == left_bytes:
                row[MESSAGE] += 1
                row[DONE_BYTES] = 0
            has_moved = True
            told[2] += length
            told[3] = now_ns(state)
            rest_us = np.int64(length / bytes_per_s_max * 1e6) - (told[3] - begun_ns) // 1000
            if rest_us > 0:
                sleep_us(rest_us)
        if not is_left:
            return ALL_MOVED
        if now_ns(state) - entered_ns > budget_ns or load_acquire(state + 32) != 0:
            return BUDGET_OVER
        if not has_moved:
            sleep_us(IDLE_NAP_US)
