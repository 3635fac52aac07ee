"""Collectives over plain TCP connections between all pairs of ranks: what joins hosts, or the leaders of hosts, without a GPU network.

gloo hands every message to helper threads and waits for them, which costs 0.3 ms and more per sum; here the calling thread itself writes
to and reads from its sockets. A dead peer's closed connection is PeerLost at once, a silent one CollectiveTimeout at the deadline, and
nothing is left waiting behind either.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runtime.torch_tp.communicators.bulk_thread import BulkThread, Landings, check_pairs
from runtime.torch_tp.communicators.interface import CollectiveTimeout, Ending, GroupSettings, PeerLost, Pending, PendingSwap
from runtime.torch_tp.communicators.rank_order import as_bytes, piece_cuts, sum_in_rank_order
from runtime.torch_tp.communicators.shared_flags import sum_float
from runtime.torch_tp.communicators.socket_exchange import ALL_DONE, CLOSED, swap_with_all
from runtime.torch_tp.rendezvous import connect_store, listen, local_address_towards

LANES = ("step", "bulk")
PIECES_FROM_BYTES = 64 * 1024  # from here, three ranks and more exchange pieces instead of everything
SWAP_UP_TO_BYTES = 4 * 1024 * 1024
BULK_CHUNK_BYTES = 64 * 1024
SPIN_S = 100e-6  # how long to look again and again before letting the kernel wake us
LOOK_AROUND_MS = 5
BUFFERS_PER_CALL = 16
_GREETING = struct.Struct("<8sQQ")  # magic, rank, lane
_MAGIC = b"ballast1"


class _Stream:
    """One connection: what is still to be written, and where what comes is to go, both in order."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self.outgoing: deque[memoryview] = deque()
        self.incoming: deque[memoryview] = deque()

    def write_some(self) -> bool:
        """Returns: whether anything was written. Raises: OSError when the peer is gone."""
        try:
            written = self.connection.sendmsg([self.outgoing[index] for index in range(min(len(self.outgoing), BUFFERS_PER_CALL))])
        except BlockingIOError:
            return False
        _advance(self.outgoing, written)
        return True

    def read_some(self) -> bool:
        """Returns: whether anything was read. Raises: OSError when the peer is gone."""
        try:
            read = self.connection.recvmsg_into([self.incoming[index] for index in range(min(len(self.incoming), BUFFERS_PER_CALL))])[0]
        except BlockingIOError:
            return False
        if read == 0:
            raise ConnectionResetError("the peer closed its connection")
        _advance(self.incoming, read)
        return True


def _advance(buffers: deque[memoryview], count: int) -> None:
    while count:
        if len(buffers[0]) > count:
            buffers[0] = buffers[0][count:]
            return
        count -= len(buffers.popleft())


def view_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, to read from or write into."""
    return as_bytes(tensor).numpy().data


class Mesh:
    """The connections of one lane to all other ranks; used by one thread at a time."""

    def __init__(self, labels: Sequence[int], rank: int, deadline_s: float, is_alive: Callable[[], bool]) -> None:
        self.labels, self.rank, self.size = tuple(labels), rank, len(labels)
        self.streams: dict[int, _Stream] = {}
        self._deadline_s, self._is_alive = deadline_s, is_alive

    def send(self, peer: int, *buffers: memoryview) -> None:
        """Queue bytes for a peer; they must stay as they are until `settle`."""
        self.streams[peer].outgoing.extend(buffer for buffer in buffers if len(buffer))

    def expect(self, peer: int, *buffers: memoryview) -> None:
        """The next bytes from a peer go here."""
        self.streams[peer].incoming.extend(buffer for buffer in buffers if len(buffer))

    def push(self) -> None:
        """Write what can be written without waiting."""
        for peer, stream in self.streams.items():
            if stream.outgoing:
                self._on(peer, stream.write_some, "sending")

    def _on(self, peer: int, step: Callable[[], bool], what: str) -> bool:
        try:
            return step()
        except OSError as error:
            raise PeerLost(f"{what}: the connection to rank {self.labels[peer]} is gone ({error})") from error

    def settle(self, what: str, *, outgoing_only: bool = False) -> None:
        """Until all that was queued is written and (if wanted) all that is expected is here. Raises: PeerLost, CollectiveTimeout."""
        idle_since_s = 0.0
        while True:
            moved, waiting = False, False
            for peer, stream in self.streams.items():
                if stream.outgoing:
                    moved |= self._on(peer, stream.write_some, what)
                if stream.incoming:
                    moved |= self._on(peer, stream.read_some, what)
                waiting |= bool(stream.outgoing or (stream.incoming and not outgoing_only))
            if not waiting:
                return
            now_s = time.monotonic()
            if moved or not idle_since_s:
                idle_since_s = now_s
            elif now_s - idle_since_s < SPIN_S:
                os.sched_yield()
            else:
                streams = self.streams.items()
                waits = {
                    peer: (bool(stream.outgoing), bool(stream.incoming)) for peer, stream in streams if stream.outgoing or stream.incoming
                }
                self.wait_for_any(waits, now_s - idle_since_s, what)

    def wait_for_any(self, waiting: Mapping[int, tuple[bool, bool]], waited_s: float, what: str) -> None:
        """Until a peer to write to or read from is ready, or a while has passed. Raises: PeerLost, CollectiveTimeout."""
        if not self._is_alive():
            raise PeerLost(f"{what}: this epoch was fenced")
        if waited_s > self._deadline_s:
            names = ", ".join(str(self.labels[peer]) for peer in waiting)
            raise CollectiveTimeout(
                f"{what}: nothing from or to rank {names} within deadline_s={self._deadline_s:g}; frozen or far too slow"
            )
        watch = select.poll()
        for peer, (writes, reads) in waiting.items():
            watch.register(self.streams[peer].connection, (select.POLLIN if reads else 0) | (select.POLLOUT if writes else 0))
        watch.poll(LOOK_AROUND_MS)

    def close(self) -> None:
        for stream in self.streams.values():
            stream.connection.close()


def connect_meshes(
    store: Any, name: str, address: str, labels: Sequence[int], rank: int, deadline_s: float, is_alive: Callable[[], bool]
) -> list[Mesh]:
    """One Mesh per lane: each rank connects to those before it and is called by those after it. Raises: PeerLost, CollectiveTimeout."""
    meshes = [Mesh(labels, rank, deadline_s, is_alive) for _ in LANES]
    end_s = time.monotonic() + deadline_s
    with listen(address, 0) as listener:
        store.set(f"{name}/{rank}", f"{address} {listener.getsockname()[1]}")
        for peer in range(rank):
            host, port = _address_of(store, f"{name}/{peer}", labels[peer], end_s, is_alive)
            for lane, mesh in enumerate(meshes):
                try:
                    connection = socket.create_connection((host, port), timeout=max(0.001, end_s - time.monotonic()))
                    connection.sendall(_GREETING.pack(_MAGIC, rank, lane))
                except OSError as error:
                    raise PeerLost(f"rank {labels[peer]} at {host}:{port} does not answer ({error})") from error
                mesh.streams[peer] = _Stream(connection)
        while any(len(mesh.streams) < len(labels) - 1 for mesh in meshes):
            if select.select([listener], [], [], 0.02)[0]:
                _welcome(listener.accept()[0], meshes)
            else:
                _check_time(end_s, is_alive, f"rank {labels[rank]} waits for later ranks to connect")
    for mesh in meshes:
        mesh.streams = dict(sorted(mesh.streams.items()))
    return meshes


def _check_time(end_s: float, is_alive: Callable[[], bool], what: str) -> None:
    if not is_alive():
        raise PeerLost(f"{what}: this epoch was fenced")
    if time.monotonic() > end_s:
        raise CollectiveTimeout(f"{what}: not within the deadline")


def _address_of(store: Any, key: str, label: int, end_s: float, is_alive: Callable[[], bool]) -> tuple[str, int]:
    while not store.check([key]):
        _check_time(end_s, is_alive, f"waiting for the address of rank {label}")
        time.sleep(0.001)
    host, port = store.get(key).decode().split()
    return host, int(port)


def _welcome(connection: socket.socket, meshes: Sequence[Mesh]) -> None:
    """Sort a caller in; a stranger, or one of another epoch, is shown out."""
    connection.settimeout(1.0)
    try:
        magic, rank, lane = _GREETING.unpack(connection.recv(_GREETING.size, socket.MSG_WAITALL))
        known = magic == _MAGIC and lane < len(meshes) and meshes[0].rank < rank < meshes[0].size and rank not in meshes[lane].streams
    except (OSError, struct.error):
        known = False
    if known:
        meshes[lane].streams[rank] = _Stream(connection)
    else:
        connection.close()


class _Swap:
    """Small messages at once: equally long ones from all to all in one compiled call, into a row per rank."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._progress = np.zeros((mesh.size, 3), np.int64)
        for peer, stream in mesh.streams.items():
            self._progress[peer, 0] = stream.connection.fileno()
        self._scratch = np.zeros(2, np.int64)
        self._rows = np.empty(0, np.uint8)

    def fits(self, tensor: Tensor) -> bool:
        streams = self._mesh.streams.values()
        idle = not any(stream.outgoing or stream.incoming for stream in streams)
        small = tensor.nbytes < PIECES_FROM_BYTES or (self._mesh.size == 2 and tensor.nbytes <= SWAP_UP_TO_BYTES)
        return idle and small and tensor.numel() > 0 and tensor.is_cpu and tensor.is_contiguous()

    def rows(self, tensor: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The bytes of the other ranks' tensors, each in its rank's place; valid until the next call."""
        length_bytes, mesh = tensor.nbytes, self._mesh
        if self._rows.nbytes < length_bytes * mesh.size:
            self._rows = np.empty(length_bytes * mesh.size, np.uint8)
        self._progress[:, 1:] = 0
        rows, progress, clock = (int(array.ctypes.data) for array in (self._rows, self._progress, self._scratch))
        begin_s = 0.0
        while (outcome := swap_with_all(progress, mesh.size, mesh.rank, tensor.data_ptr(), rows, length_bytes, clock)) != ALL_DONE:
            if outcome >= CLOSED:
                raise PeerLost(f"all_reduce: rank {mesh.labels[outcome - CLOSED]} closed its connection")
            begin_s = begin_s or time.monotonic()
            short = self._progress[:, 1:] < length_bytes
            waiting = {peer: (bool(short[peer, 0]), bool(short[peer, 1])) for peer in mesh.streams if short[peer].any()}
            mesh.wait_for_any(waiting, time.monotonic() - begin_s, "all_reduce")
        return self._rows

    def sum(self, tensor: Tensor) -> None:
        rows = self.rows(tensor)
        if tensor.dtype is torch.float32:
            sum_float(int(rows.ctypes.data), tensor.nbytes, self._mesh.size, self._mesh.rank, tensor.data_ptr(), tensor.numel())
        else:
            parts = list(torch.from_numpy(rows[: tensor.nbytes * self._mesh.size]).view(tensor.dtype).view(self._mesh.size, *tensor.shape))
            parts[self._mesh.rank] = tensor
            tensor.copy_(sum_in_rank_order(parts))


class TcpCommunicator:
    """The contract of `Communicator` over two meshes."""

    def __init__(self, settings: GroupSettings, name: str = "tcp") -> None:
        if settings.store_address is None:
            raise ValueError("kind 'tcp' needs store_address=(host, port) of the rendezvous store")
        self.rank, self.size = settings.own_index, len(settings.members)
        try:
            store = connect_store(settings.store_address, settings.deadline_s)
            self._step, self._bulk = connect_meshes(
                store,
                f"e{settings.epoch}/{name}",
                local_address_towards(*settings.store_address),
                settings.members,
                self.rank,
                settings.deadline_s,
                settings.is_alive,
            )
        except OSError as error:
            raise PeerLost(str(error)) from error
        self._swap = _Swap(self._step)
        self._open: deque[_TcpSum] = deque()
        self._bulk_thread = BulkThread(settings.is_alive)

    def all_reduce(self, tensor: Tensor) -> None:
        self._finish_open()
        if self._swap.fits(tensor):
            self._swap.sum(tensor)
        else:
            _TcpSum(self._step, tensor).complete()

    def start_all_reduce(self, tensor: Tensor) -> Pending:
        started = _TcpSum(self._step, tensor)
        self._open.append(started)
        return Ending(lambda: self._finish_open(started) if started in self._open else None)

    def _finish_open(self, until: _TcpSum | None = None) -> None:
        while self._open:
            head = self._open.popleft()
            head.complete()
            if head is until:
                return

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        self._finish_open()
        own = tensor.contiguous() if tensor.dim() else tensor.reshape(1)
        columns = np.full(self.size, own.shape[-1], np.int64)
        for peer in self._step.streams:
            self._step.send(peer, columns[self.rank : self.rank + 1].view(np.uint8).data, view_of(own))
            self._step.expect(peer, columns[peer : peer + 1].view(np.uint8).data)
        self._step.settle("all_gather")
        parts = [
            own if peer == self.rank else torch.empty((*own.shape[:-1], int(columns[peer])), dtype=own.dtype) for peer in range(self.size)
        ]
        for peer in self._step.streams:
            self._step.expect(peer, view_of(parts[peer]))
        self._step.settle("all_gather")
        parts[self.rank] = own.clone()
        return parts

    def swap(self, own: Tensor) -> list[Tensor]:
        """Gather equally long byte vectors."""
        if self._swap.fits(own):
            rows = torch.from_numpy(self._swap.rows(own)[: own.nbytes * self.size].copy()).view(own.dtype).view(self.size, -1)
            rows[self.rank] = own
            return list(rows)
        return _TcpSwap(self._step, own).wait()

    def start_swap(self, own: Tensor) -> PendingSwap:
        """Begin a gather of equally long byte vectors."""
        return _TcpSwap(self._step, own)

    def exchange(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        check_pairs(sends, receives, self.rank, self.size)
        self._bulk_thread.run(lambda: self._move(sends, receives))

    def _move(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        """Each message goes behind its length; chunk by chunk over all peers at once."""
        landings = Landings(receives)
        lengths = np.zeros(len(receives), np.int64)
        for index, (peer, buffer) in enumerate(landings.pairs):
            self._bulk.expect(peer, lengths[index : index + 1].view(np.uint8).data, view_of(buffer))
        queues: dict[int, deque[memoryview]] = {}
        for peer, tensor in sends:
            queue = queues.setdefault(peer, deque())
            queue.append(np.array([tensor.nbytes], np.int64).view(np.uint8).data)
            data = view_of(tensor.contiguous())
            queue.extend(data[begin : begin + BULK_CHUNK_BYTES] for begin in range(0, len(data), BULK_CHUNK_BYTES))
        while any(queues.values()):
            begin_s, moved = time.monotonic(), 0
            for peer, queue in queues.items():
                if queue:
                    moved += len(queue[0])
                    self._bulk.send(peer, queue.popleft())
            self._bulk.settle("exchange", outgoing_only=True)
            self._bulk_thread.raise_if_closed()
            self._bulk_thread.pace(moved, time.monotonic() - begin_s)
        self._bulk.settle("exchange")
        for (peer, buffer), length in zip(landings.pairs, lengths.tolist(), strict=True):
            if length != buffer.nbytes:
                raise ValueError(f"exchange: rank {self._bulk.labels[peer]} sent {length} bytes where {buffer.nbytes} are expected")
        landings.hand_over()

    def close(self) -> None:
        """Closed connections tell the peers."""
        self._bulk_thread.close()
        for mesh in (self._step, self._bulk):
            mesh.close()


class _TcpSum:
    """A sum under way. Of two ranks, or if small, everything goes to all; else each rank sums its piece and sends that to all."""

    def __init__(self, mesh: Mesh, tensor: Tensor) -> None:
        if tensor.device.type != "cpu":
            raise ValueError(f"all_reduce over TCP got a tensor on {tensor.device}; use kind 'nccl' for tensors on a GPU")
        self._mesh, self._target = mesh, tensor
        self._work = tensor if tensor.is_contiguous() else tensor.contiguous()
        self._flat = self._work.view(-1)
        whole = mesh.size == 2 or tensor.nbytes < PIECES_FROM_BYTES
        self._cuts = [0, self._flat.numel()] if whole else piece_cuts(self._flat.numel(), mesh.size)
        mine = 0 if whole else mesh.rank
        self._mine = self._flat[self._cuts[mine] : self._cuts[mine + 1]]
        self._parts = [self._mine if rank == mesh.rank else torch.empty_like(self._mine) for rank in range(mesh.size)]
        for peer in mesh.streams:
            theirs = 0 if whole else peer
            mesh.send(peer, view_of(self._flat[self._cuts[theirs] : self._cuts[theirs + 1]]))
            mesh.expect(peer, view_of(self._parts[peer]))
        mesh.push()

    def complete(self) -> None:
        self._mesh.settle("all_reduce")
        self._mine.copy_(sum_in_rank_order(self._parts))
        if len(self._cuts) > 2:
            for peer in self._mesh.streams:
                self._mesh.send(peer, view_of(self._mine))
                self._mesh.expect(peer, view_of(self._flat[self._cuts[peer] : self._cuts[peer + 1]]))
            self._mesh.settle("all_reduce")
        if self._work is not self._target:
            self._target.copy_(self._work)


class _TcpSwap:
    """A gather of equally long vectors under way."""

    def __init__(self, mesh: Mesh, own: Tensor) -> None:
        self._mesh = mesh
        self._rows = torch.empty((mesh.size, own.numel()), dtype=own.dtype)
        self._rows[mesh.rank] = own
        for peer in mesh.streams:
            mesh.send(peer, view_of(self._rows[mesh.rank]))
            mesh.expect(peer, view_of(self._rows[peer]))
        mesh.push()

    def wait(self) -> list[Tensor]:
        self._mesh.settle("all_gather")
        return list(self._rows)


def build(settings: GroupSettings) -> TcpCommunicator:
    """For `build_communicator`."""
    return TcpCommunicator(settings)
