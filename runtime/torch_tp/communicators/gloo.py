"""Collectives over torch's gloo process groups: between hosts, and the yardstick inside one.

Groups are built straight on a prefix of the rendezvous store, never as torch's global default group, so that an epoch's
group can be dropped and the next one built at once. Sums are made of gathers and added here in rank order: the same bits
as through shared memory, whatever the size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore

from runtime.torch_tp.communicators.bulk_thread import BulkThread, Landings, check_pairs
from runtime.torch_tp.communicators.interface import CollectiveTimeout, Done, GroupSettings, PeerLost, Pending, PendingSwap
from runtime.torch_tp.communicators.rank_order import as_bytes, gather_unequal, sum_in_rank_order
from runtime.torch_tp.rendezvous import connect_store, local_address_towards

LOOK_AROUND_S = 0.02
GATHER_UP_TO_BYTES = 64 * 1024  # up to here one gather of everything is faster than exchanging pieces
BULK_CHUNK_BYTES = 256 * 1024

# Groups with an operation that will never end: their destructor would wait for it, so they are kept until the process ends.
_abandoned: list[Any] = []


class GlooGroup:
    """One gloo process group and the way to wait on it: in short steps, since a wait of gloo cannot be interrupted."""

    def __init__(self, store: Any, name: str, rank: int, size: int, deadline_s: float, is_alive: Callable[[], bool], address: str) -> None:
        gloo: Any = torch.distributed.ProcessGroupGloo  # its options are missing from torch's stubs
        self._deadline_s, self._is_alive = deadline_s, is_alive
        self._name = name
        options = gloo._Options()
        options._timeout = timedelta(seconds=deadline_s + 1.0)  # ours comes first
        options._devices = [gloo.create_device(hostname=address)]
        options._threads = 2
        try:
            self.group: Any = gloo(PrefixStore(name, store), rank, size, options)
        except RuntimeError as error:
            raise self._meaning(error, "building the group") from error

    def _meaning(self, error: RuntimeError, what: str) -> RuntimeError:
        text = str(error)
        if "timed out" in text.lower() or "timeout" in text.lower():
            return CollectiveTimeout(f"{what} ({self._name}): no end within deadline_s={self._deadline_s:g}: {text}")
        return PeerLost(f"{what} ({self._name}): {text}")

    def wait(self, work: Any, what: str) -> None:
        """Wait for a gloo operation. Raises: PeerLost, CollectiveTimeout; the group is then of no more use."""
        begin_s = time.monotonic()
        while True:
            try:
                work.wait(timedelta(seconds=LOOK_AROUND_S))
                return
            except RuntimeError as error:
                text = str(error)
                # gloo's own word for "not yet"; anything else, or the same of its inner wait, is a failure of the operation
                if text != "Operation timed out!":
                    self.abandon()
                    raise self._meaning(error, what) from error
            if not self._is_alive():
                self.abandon()
                raise PeerLost(f"{what} ({self._name}): this epoch was fenced")
            if time.monotonic() - begin_s > self._deadline_s:
                self.abandon()
                raise CollectiveTimeout(
                    f"{what} ({self._name}): no end within deadline_s={self._deadline_s:g}; a rank is frozen or far too slow"
                )

    def wait_uninterrupted(self, work: Any, what: str) -> None:
        """For sends and receives, which a wait that is cut short would break. Raises: PeerLost, CollectiveTimeout."""
        try:
            work.wait(timedelta(seconds=self._deadline_s))
        except RuntimeError as error:
            raise self._meaning(error, what) from error

    def abandon(self) -> None:
        _abandoned.append(self.group)

    def gather_bytes(self, own: Tensor, size: int, what: str) -> Tensor:
        """The equally long uint8 vectors of all ranks: shape (size, bytes)."""
        gathered = torch.empty((size, own.numel()), dtype=torch.uint8)
        self.wait(self.group._allgather_base(gathered.view(-1), own), what)
        return gathered


class GlooCommunicator:
    """Steps and bulk moves each have a group of their own, so that neither queues behind the other."""

    def __init__(self, settings: GroupSettings, name: str = "gloo") -> None:
        if settings.store_address is None:
            raise ValueError("kind 'gloo' needs store_address=(host, port) of the rendezvous store")
        self.rank, self.size = settings.own_index, len(settings.members)
        self._settings = settings
        try:
            self._store = connect_store(settings.store_address, settings.deadline_s)
        except OSError as error:
            raise PeerLost(str(error)) from error
        self._address = local_address_towards(*settings.store_address)
        self._name = f"e{settings.epoch}/{name}"
        self._step, self._bulk = self._group("step"), self._group("bulk")
        self._bulk_thread = BulkThread(settings.is_alive)

    def _group(self, lane: str) -> GlooGroup:
        deadline_s, is_alive = self._settings.deadline_s, self._settings.is_alive
        return GlooGroup(self._store, f"{self._name}/{lane}", self.rank, self.size, deadline_s, is_alive, self._address)

    def all_reduce(self, tensor: Tensor) -> None:
        work = tensor.contiguous()
        if tensor.nbytes <= GATHER_UP_TO_BYTES:
            gathered = self._step.gather_bytes(as_bytes(work), self.size, "all_reduce")
            parts = [row.view(tensor.dtype).reshape(tensor.shape) for row in gathered]
            tensor.copy_(sum_in_rank_order(parts))
            return
        flat = work.reshape(-1)
        per_rank = -(-flat.numel() // self.size)
        padded = torch.zeros(per_rank * self.size, dtype=flat.dtype)
        padded[: flat.numel()] = flat
        pieces = torch.empty_like(padded)
        self._step.wait(self._step.group.alltoall_base(as_bytes(pieces), as_bytes(padded), [], []), "all_reduce")
        summed = sum_in_rank_order(list(pieces.view(self.size, per_rank)))
        everything = self._step.gather_bytes(as_bytes(summed), self.size, "all_reduce").view(-1).view(flat.dtype)
        tensor.copy_(everything[: flat.numel()].view(tensor.shape))

    def start_all_reduce(self, tensor: Tensor) -> Pending:
        """Done at once: gloo's threads would compete with the computation for the cores; "tcp" does send ahead."""
        self.all_reduce(tensor)
        return Done(None)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return gather_unequal(tensor, self.swap)

    def swap(self, own: Tensor) -> list[Tensor]:
        """Gather equally long vectors."""
        return list(self._step.gather_bytes(as_bytes(own), self.size, "all_gather").view(own.dtype))

    def start_swap(self, own: Tensor) -> PendingSwap:
        """As `swap`, done at once."""
        return Done(self.swap(own))

    def exchange(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        check_pairs(sends, receives, self.rank, self.size)
        self._bulk_thread.run(lambda: self._move(sends, receives))

    def _move(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        """Chunk by chunk over all pairs at once: gloo matches a pair's messages by their order."""
        landings = Landings(receives)
        outgoing = [(peer, as_bytes(tensor.contiguous())) for peer, tensor in sends]
        incoming = [(peer, as_bytes(buffer)) for peer, buffer in landings.pairs]
        longest = max((data.numel() for _, data in (*outgoing, *incoming)), default=0)
        for begin in range(0, longest, BULK_CHUNK_BYTES):
            self._bulk_thread.raise_if_closed()
            begin_s = time.monotonic()
            works, moved = [], 0
            for post, pairs in ((self._bulk.group.recv, incoming), (self._bulk.group.send, outgoing)):
                for peer, data in pairs:
                    chunk = data[begin : begin + BULK_CHUNK_BYTES]
                    if chunk.numel():
                        works.append(post([chunk], peer, 0))
                        moved += chunk.numel()
            for work in works:
                self._bulk.wait_uninterrupted(work, "exchange")
            self._bulk_thread.pace(moved, time.monotonic() - begin_s)
        landings.hand_over()

    def close(self) -> None:
        """Dropping the groups closes their connections, which the peers see at once."""
        self._bulk_thread.close()
        for lane in ("_step", "_bulk"):
            if hasattr(self, lane):
                delattr(self, lane)


def build(settings: GroupSettings) -> GlooCommunicator:
    """For `build_communicator`."""
    return GlooCommunicator(settings)
