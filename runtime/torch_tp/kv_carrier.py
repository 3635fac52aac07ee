"""Carries the KV of one slot between this rank and a file in shared memory (`kv_file`), beside the steps: what a request takes along that
goes on in another engine.

Every rank writes, or reads, the heads that its slot holds; no rank waits for another. Slots only grow, so what is there may be read at
any time; what comes is written where no step looks yet.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from runtime.torch_tp.communicators.bulk_thread import BulkThread
from runtime.torch_tp.kv_store import KvStore
from runtime.torch_tp.orders import Carried, CarryOrder
from runtime.torch_tp.shares import Interval

CHUNK_BYTES = 1 << 20


class KvCarrier:
    """`begin` on the main thread; what it returns does the work on any other, paced as other bulk moves are."""

    def __init__(self, lock: threading.Lock, generation_of: Callable[[int], int]) -> None:
        """lock, generation_of: as in KvMover."""
        self._lock, self._generation_of = lock, generation_of
        self._bulk = BulkThread(lambda: True)

    def begin(self, kv: KvStore, order: CarryOrder) -> Callable[[], Carried]:
        """Note whose the slot is at this very step. What is returned never raises: `Carried.error` says what went wrong."""
        generation, until_s = self._generation_of(order.slot), time.monotonic() + order.deadline_s
        carried = 0

        def check() -> None:
            if self._generation_of(order.slot) != generation:
                raise RuntimeError(f"slot {order.slot} was given up meanwhile")
            if time.monotonic() > until_s:
                raise TimeoutError(f"KV not carried within {order.deadline_s:g} s")

        def move() -> None:
            nonlocal carried
            carried = self._carry(kv, order, check)

        def work() -> Carried:
            began_s, error = time.perf_counter(), ""
            try:
                self._bulk.run(move)
            except Exception as failed:  # whatever it was: nobody but this copy is concerned
                error = f"{type(failed).__name__}: {failed}"
            return Carried(carried, time.perf_counter() - began_s, error)

        return work

    def _carry(self, kv: KvStore, order: CarryOrder, check: Callable[[], None]) -> int:
        """Returns: bytes. `check` is asked under the lock, before each chunk."""
        file, carried = order.file, 0
        whole = torch.frombuffer(file.mapped(), dtype=getattr(torch, file.dtype)).view(file.shape)
        with self._lock:
            check()
            heads = kv.heads(order.slot)
        for layer, held in enumerate(heads):
            if not held.width:
                continue
            step = max(1, CHUNK_BYTES // (2 * held.width * whole.stride(3) * whole.itemsize))
            for start in range(order.start, order.end, step):
                began_s = time.perf_counter()
                part = whole[layer, :, held.start : held.end, start : min(start + step, order.end)]
                with self._lock:
                    check()
                    if order.gives:
                        part.copy_(kv.export(order.slot, layer, held, start, start + part.shape[2]))
                    else:
                        kv.import_(order.slot, layer, held, start, part)
                carried += part.numel() * part.itemsize
                self._bulk.pace(part.numel() * part.itemsize, time.perf_counter() - began_s)
        if not order.gives:  # a rank that holds no head of the slot must still know its length
            nothing = whole.new_empty((2, 0, order.end - order.start, file.head_dim))
            with self._lock:
                check()
                kv.import_(order.slot, 0, Interval(0, 0), order.start, nothing)
        return carried
