"""Collectives of GPUs over NCCL, with a watchdog that frees the device when a peer is lost.

A NCCL kernel whose peer is gone runs for ever and blocks whoever waits for its stream; only aborting the communicator ends it. The watchdog
does that at the deadline, or as soon as the epoch is fenced; calls and `raise_if_lost` then raise. Not yet run on a GPU.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore

from runtime.torch_tp.communicators.bulk_thread import BulkThread, Landings, check_pairs
from runtime.torch_tp.communicators.interface import CollectiveTimeout, GroupSettings, PeerLost, Pending
from runtime.torch_tp.communicators.rank_order import as_bytes, gather_unequal
from runtime.torch_tp.rendezvous import connect_store

logger = logging.getLogger(__name__)

LOOK_AROUND_S = 0.02
BULK_CHUNK_BYTES = 4 * 1024 * 1024
UNFINISHED_MAX = 4096  # operations the watchdog remembers per group; older ones end before younger ones


class _WatchedGroup:
    """One NCCL process group and the operations on it that have not ended."""

    def __init__(self, store: Any, name: str, settings: GroupSettings, high_priority: bool) -> None:
        nccl: Any = torch.distributed.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = timedelta(seconds=3600.0)  # the watchdog here keeps the deadline
        options.is_high_priority_stream = high_priority
        self.group: Any = nccl(PrefixStore(name, store), settings.own_index, len(settings.members), options)
        self._unfinished: deque[tuple[float, Any]] = deque(maxlen=UNFINISHED_MAX)
        self._lock = threading.Lock()

    def begun(self, work: Any) -> Any:
        with self._lock:
            self._unfinished.append((time.monotonic(), work))
        return work

    def oldest_age_s(self) -> float:
        """How long the oldest unfinished operation has been under way."""
        with self._lock:
            while self._unfinished and self._unfinished[0][1].is_completed():
                self._unfinished.popleft()
            return time.monotonic() - self._unfinished[0][0] if self._unfinished else 0.0


class NcclCommunicator:
    """Sums are ordered on the current stream as usual: `all_reduce` returns before the device has done it."""

    def __init__(self, settings: GroupSettings, name: str = "nccl") -> None:
        if not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
            raise ValueError("kind 'nccl' needs a GPU and a torch built with NCCL; use 'shm' or 'tcp' on CPUs")
        if settings.store_address is None:
            raise ValueError("kind 'nccl' needs store_address=(host, port) of the rendezvous store")
        self.rank, self.size = settings.own_index, len(settings.members)
        self._settings = settings
        self._failure: RuntimeError | None = None
        try:
            store = connect_store(settings.store_address, settings.deadline_s)
        except OSError as error:
            raise PeerLost(str(error)) from error
        prefix = f"e{settings.epoch}/{name}"
        self._step = _WatchedGroup(store, f"{prefix}/step", settings, high_priority=True)
        self._bulk = _WatchedGroup(store, f"{prefix}/bulk", settings, high_priority=False)
        self._bulk_thread = BulkThread(settings.is_alive)
        self._closing = threading.Event()
        self._watchdog = threading.Thread(target=self._watch, name="nccl-watchdog", daemon=True)
        self._watchdog.start()

    def _watch(self) -> None:
        while not self._closing.wait(LOOK_AROUND_S):
            age_s = max(self._step.oldest_age_s(), self._bulk.oldest_age_s())
            if not self._settings.is_alive():
                self._abort(PeerLost("this epoch was fenced"))
            elif age_s > self._settings.deadline_s:
                self._abort(CollectiveTimeout(f"a NCCL operation has not ended within deadline_s={self._settings.deadline_s:g}"))

    def _abort(self, reason: RuntimeError) -> None:
        """abort() and never destroy(): the latter waits for the kernels of a dead peer."""
        self._failure = reason
        self._closing.set()
        logger.warning("nccl aborted epoch=%d reason=%s", self._settings.epoch, reason)
        for watched in (self._step, self._bulk):
            watched.group.abort()

    def raise_if_lost(self) -> None:
        """To be asked after the device was waited for: after an abort the waiting ends, but the results are void."""
        if self._failure is not None:
            raise self._failure

    def _wait(self, watched: _WatchedGroup, work: Any) -> None:
        self.raise_if_lost()
        try:
            watched.begun(work).wait()
        except RuntimeError as error:
            self.raise_if_lost()
            raise PeerLost(f"NCCL: {error}") from error

    def all_reduce(self, tensor: Tensor) -> None:
        self.raise_if_lost()
        self._wait(self._step, self._step.group.allreduce([tensor]))

    def start_all_reduce(self, tensor: Tensor) -> Pending:
        self.raise_if_lost()
        return _NcclPending(self, self._step.begun(self._step.group.allreduce([tensor])))

    def _swap(self, own: Tensor) -> list[Tensor]:
        """Gather equally long byte vectors."""
        rows = torch.empty((self.size, own.numel()), dtype=own.dtype, device=own.device)
        self.raise_if_lost()
        self._wait(self._step, self._step.group._allgather_base(rows.view(-1), own))
        return list(rows)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Waits for the device, so that a loss shows here at the latest."""
        parts = gather_unequal(tensor, self._swap)
        torch.cuda.current_stream(tensor.device).synchronize()
        self.raise_if_lost()
        return parts

    def exchange(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        check_pairs(sends, receives, self.rank, self.size)
        self._bulk_thread.run(lambda: self._move(sends, receives))

    def _move(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        """Chunks on a stream of their own. Of each pair the lower rank sends first: NCCL runs a pair's operations one after the other."""
        device = next((tensor.device for _, tensor in (*sends, *receives)), self._settings.torch_device)
        landings = Landings(receives)
        outgoing = [(peer, as_bytes(tensor.contiguous())) for peer, tensor in sends]
        incoming = [(peer, as_bytes(buffer)) for peer, buffer in landings.pairs]
        with torch.cuda.stream(torch.cuda.Stream(device)):
            for begin in range(0, max((data.numel() for _, data in (*outgoing, *incoming)), default=0), BULK_CHUNK_BYTES):
                begin_s, moved = time.monotonic(), 0
                for peer, is_send, data in sorted(
                    [(peer, True, data) for peer, data in outgoing] + [(peer, False, data) for peer, data in incoming],
                    key=lambda entry: (entry[0], entry[1] != (self.rank < entry[0])),
                ):
                    chunk = data[begin : begin + BULK_CHUNK_BYTES]
                    if chunk.numel():
                        post = self._bulk.group.send if is_send else self._bulk.group.recv
                        self._wait(self._bulk, post([chunk], peer, 0))
                        moved += chunk.numel()
                torch.cuda.current_stream(device).synchronize()
                self.raise_if_lost()
                self._bulk_thread.pace(moved, time.monotonic() - begin_s)
            landings.hand_over()
            torch.cuda.current_stream(device).synchronize()

    def close(self) -> None:
        self._bulk_thread.close()
        if not self._closing.is_set():
            self._abort(PeerLost("this communicator was closed"))


class _NcclPending:
    """A started operation: `wait` orders the current stream behind it."""

    def __init__(self, communicator: NcclCommunicator, work: Any) -> None:
        self._communicator, self._work = communicator, work

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            self._communicator.raise_if_lost()
            raise PeerLost(f"NCCL: {error}") from error
        self._communicator.raise_if_lost()


def build(settings: GroupSettings) -> NcclCommunicator:
    """For `build_communicator`."""
    return NcclCommunicator(settings)
