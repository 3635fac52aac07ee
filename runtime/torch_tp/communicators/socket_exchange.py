"""Compiled leaf that swaps equally long messages with several peers over non-blocking sockets, without the interpreter lock."""

from __future__ import annotations

import socket

from numba import types

from envs.perf_model.kernel_cache import cached_njit
from runtime.torch_tp.communicators.shared_flags import load_acquire, now_ns, sched_yield, store_release

_send = types.ExternalFunction("send", types.intp(types.int32, types.intp, types.intp, types.int32))
_recv = types.ExternalFunction("recv", types.intp(types.int32, types.intp, types.intp, types.int32))
_SEND_FLAGS = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_RECV_FLAGS = int(socket.MSG_DONTWAIT)
SPIN_NS = 100_000
ALL_DONE, BUDGET_SPENT, CLOSED = -1, 0, 256


@cached_njit("int64(int64, int64, int64, int64, int64, int64, int64)", nogil=True)
def swap_with_all(progress, size, rank, source, target, length_bytes, clock):  # type: ignore[no-untyped-def]
    """Send `length_bytes` at `source` to every peer and receive as much from each at `target` + peer x `length_bytes`.

    `progress`: int64 rows (descriptor, bytes sent, bytes received) of all ranks, kept between calls; `clock`: 16 bytes of
    the caller's own. Looks again and again for SPIN_NS, then comes back.
    Returns: ALL_DONE, BUDGET_SPENT, or CLOSED + the peer that closed its end.
    """
    started_ns = 0
    while True:
        missing = 0
        for peer in range(size):
            if peer == rank:
                continue
            row = progress + peer * 24
            descriptor = load_acquire(row)
            sent, received = load_acquire(row + 8), load_acquire(row + 16)
            if sent < length_bytes:
                count = _send(descriptor, source + sent, length_bytes - sent, _SEND_FLAGS)
                # a failed send shows as an end of the other direction below
                if count > 0:
                    sent += count
                    store_release(row + 8, sent)
            if received < length_bytes:
                count = _recv(descriptor, target + peer * length_bytes + received, length_bytes - received, _RECV_FLAGS)
                if count == 0:
                    return CLOSED + peer
                if count > 0:
                    received += count
                    store_release(row + 16, received)
            missing += (length_bytes - sent) + (length_bytes - received)
        if missing == 0:
            return ALL_DONE
        time_ns = now_ns(clock)
        if started_ns == 0:
            started_ns = time_ns
        elif time_ns - started_ns > SPIN_NS:
            return BUDGET_SPENT
        sched_yield()
