"""Collectives of the ranks of one host through memory they all map: no system call, no copy beyond one in and one out.

Each rank has DEPTH slots per lane. Message number n goes into slot n mod DEPTH; a slot is used again when every rank has
read what it held, which in step has always happened long before, so that an all-reduce is one publish, one wait and one
sum, without a barrier. Large tensors travel in chunks, each published before the last one is summed; with three or more
ranks each rank sums its piece of a chunk and the others copy it.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from runtime.torch_tp.communicators import shared_flags as flags
from runtime.torch_tp.communicators.interface import Ending, GroupSettings, Pending
from runtime.torch_tp.communicators.segments import Segment, shorten_naps
from runtime.torch_tp.communicators.shared_mailboxes import Mailboxes
from runtime.torch_tp.communicators.waiting import PeerWatch

CHUNK_BYTES = 128 * 1024
PIECES_FROM_BYTES = 32 * 1024  # from here, three ranks and more sum a piece each
_WIDTHS = (torch.float32, torch.bfloat16)  # summed by compiled code
EVERYBODY = -1
SPIN_POLLS = 400
SPIN_POLLS_CROWDED = 20  # with more ranks than cores, whoever spins holds up the one it waits for


@dataclass(frozen=True, slots=True)
class LaneLayout:
    """Where one lane lies in the segment: flag lines of all ranks, then DEPTH x ranks slots."""

    size: int
    chunk_bytes: int

    @property
    def stride(self) -> int:
        return flags.SLOT_HEADER_BYTES + self.chunk_bytes

    @property
    def flag_bytes(self) -> int:
        return -(-self.size * flags.FLAG_BYTES // 4096) * 4096

    @property
    def total_bytes(self) -> int:
        return self.flag_bytes + -(-flags.DEPTH * self.size * self.stride // 4096) * 4096


def crowded_polls(ranks: int) -> int:
    """How long to spin before yielding the core."""
    return SPIN_POLLS if ranks <= len(os.sched_getaffinity(0)) else SPIN_POLLS_CROWDED


class Lane:
    """One order of messages between the ranks: used by one thread of each at a time."""

    def __init__(self, segment: Segment, layout: LaneLayout, watch: PeerWatch) -> None:
        self._segment = segment  # keeps the mapping alive
        self._watch = watch
        self.rank, self.size = segment.rank, segment.size
        self.chunk_bytes = layout.chunk_bytes
        self.stride = layout.stride
        self.flags = segment.address
        self._slots = self.flags + layout.flag_bytes
        self._slots_offset = segment.offset + layout.flag_bytes
        self.polls = crowded_polls(segment.size)
        self._scratch = np.zeros(2, np.int64)
        self.clock = int(self._scratch.ctypes.data)
        self.sequence = 0  # of the next message
        fields = (self.flags, self.size, self.rank, self._slots, self.stride, self.chunk_bytes, PIECES_FROM_BYTES, self.polls, self.clock)
        assert len(fields) == len(flags.LANE_FIELDS)
        self._fields = np.array(fields, np.int64)
        self.fields = int(self._fields.ctypes.data)
        self._progress = np.zeros(3, np.int64)
        self._progress_address = int(self._progress.ctypes.data)
        self._open: deque[_Sum] = deque()
        self._lock = threading.Lock()

    # --- the parts of a message

    def slots(self, sequence: int) -> int:
        """Address of rank 0's slot of a message; those of the others lie `stride` apart."""
        return self._slots + (sequence % flags.DEPTH) * self.size * self.stride

    def numbers(self, sequence: int, rank: int, count: int, dtype: torch.dtype) -> Tensor:
        """A view on what a rank has published."""
        offset = self._slots_offset + ((sequence % flags.DEPTH) * self.size + rank) * self.stride + flags.SLOT_HEADER_BYTES
        return torch.frombuffer(self._segment.bytes, dtype=dtype, count=count, offset=offset)

    def announcement(self, sequence: int, rank: int) -> int:
        return int(flags.read_flag(self.slots(sequence) + rank * self.stride))

    def until(self, what: str, attempt: Callable[[int], int]) -> None:
        """Repeat `attempt(waited_ns)`, which returns -1 or the missing rank every BUDGET_NS, and look around in between."""
        missing = attempt(0)
        if missing < 0:
            return
        begin_s = time.monotonic()
        while missing >= 0:
            waited_s = time.monotonic() - begin_s
            try:
                self._watch.look_around(waited_s, missing & 255, what)
            except RuntimeError:
                self._segment.leave()  # the others need not wait for their own deadlines
                raise
            missing = attempt(flags.BUDGET_NS + int(waited_s * 1e9))

    def publish(self, sequence: int, address: int, length_bytes: int, announced: int = 0) -> None:
        """Put `length_bytes` at `address` into this rank's slot, with `announced` for `announcement` to read."""
        place = (self.flags, self.size, self.rank, sequence, self.slots(sequence) + self.rank * self.stride)
        self.until("publish", lambda waited: flags.publish(*place, address, length_bytes, announced, self.polls, self.clock, waited))

    def await_published(self, sequence: int) -> None:
        self.until("all_reduce", lambda waited: flags.await_published(self.flags, self.size, sequence, self.polls, self.clock, waited))

    def release(self, sequence: int) -> None:
        """This rank has read message `sequence` and all before it."""
        flags.write_flag(self.flags + self.rank * flags.FLAG_BYTES + flags.DONE, sequence + 1)

    # --- sums

    def sum(self, tensor: Tensor) -> None:
        """In-place sum over the ranks."""
        with self._lock:
            if self._open:
                self.finish_open()
            if tensor.dtype in _WIDTHS and tensor.is_cpu and tensor.is_contiguous():
                self._sum_at_once(tensor, EVERYBODY)
            else:
                self._begin(tensor).complete()

    def _sum_at_once(self, tensor: Tensor, leader: int) -> None:
        """What `_begin(...).complete()` does, with as little Python as may be: it is most of the time of a small sum."""
        first, address, count, width = self.sequence, tensor.data_ptr(), tensor.numel(), 4 if tensor.dtype is torch.float32 else 2
        self.sequence = first + max(1, -(-count * width // self.chunk_bytes))
        if flags.advance_sum(self.fields, first, address, count, width, self._progress_address, leader, 0, 0) >= 0:
            place = (self.fields, first, address, count, width, self._progress_address, leader)
            self.until("all_reduce", lambda waited: flags.advance_sum(*place, waited, 0))

    def start(self, tensor: Tensor) -> Pending:
        """Publish as much of `tensor` as there is room for, unless an earlier sum has something left to publish."""
        with self._lock:
            started = self._begin(tensor)
            if not self._open or self._open[-1].is_published:
                started.publish()
            self._open.append(started)
            return Ending(lambda: self.finish(started))

    def _begin(self, tensor: Tensor) -> _Sum:
        begun = _Sum(self, tensor, self.sequence)
        self.sequence += begun.chunks
        return begun

    def finish_open(self, until: _Sum | None = None) -> None:
        """Complete the started sums in their order, up to and with `until`."""
        while self._open:
            head = self._open[0]
            head.complete()
            self._open.popleft()
            if head is until:
                return

    def finish(self, started: _Sum) -> None:
        with self._lock:
            if started in self._open:
                self.finish_open(started)

    # --- gathers and broadcasts

    def reduce_to(self, leader: int, tensor: Tensor) -> None:
        """In-place sum on the leader; elsewhere `tensor` stays as it is."""
        with self._lock:
            self.finish_open()
            work = _checked(tensor)
            self._sum_at_once(work, leader)
            if self.rank == leader and work is not tensor:
                tensor.copy_(work)

    def broadcast_from(self, leader: int, tensor: Tensor) -> None:
        """Everybody's `tensor` becomes the leader's."""
        with self._lock:
            self.finish_open()
            work = tensor.contiguous()
            place = (self.fields, self.sequence, work.data_ptr(), work.nbytes, self._progress_address, leader)
            self.sequence += max(1, -(-work.nbytes // self.chunk_bytes))
            self.until("broadcast", lambda waited: flags.advance_broadcast(*place, waited))
            if work is not tensor:
                tensor.copy_(work)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Everybody's tensors; the last dimension may differ. Each chunk announces how many bytes were still to come before it."""
        own = tensor.contiguous() if tensor.dim() else tensor.reshape(1)
        column_bytes = own.element_size() * math.prod(own.shape[:-1])
        if column_bytes == 0:
            raise ValueError(f"all_gather of shape {tuple(tensor.shape)}: only the last dimension may be empty")
        gathered: list[Tensor] = []
        with self._lock:
            self.finish_open()
            done, longest = 0, 1
            while done < longest:
                sequence = self.sequence
                self.sequence += 1
                left = max(0, own.nbytes - done)
                self.publish(sequence, own.data_ptr() + done, min(self.chunk_bytes, left), left)
                self.await_published(sequence)
                lefts = [self.announcement(sequence, rank) for rank in range(self.size)]
                if done == 0:
                    longest = max(lefts)
                    gathered = [self._room_for(own, length, column_bytes, rank) for rank, length in enumerate(lefts)]
                for rank, left in enumerate(lefts):
                    part = min(self.chunk_bytes, left)
                    if part:
                        flat = gathered[rank].view(-1).view(torch.uint8)
                        flat[done : done + part] = self.numbers(sequence, rank, part, torch.uint8)
                self.release(sequence)
                done += self.chunk_bytes
        return gathered

    def _room_for(self, own: Tensor, length_bytes: int, column_bytes: int, rank: int) -> Tensor:
        if length_bytes % column_bytes:
            raise ValueError(
                f"all_gather: rank {self._watch.labels[rank]} sent {length_bytes} bytes, no whole number of {column_bytes}-byte columns; "
                "all dimensions but the last, and the dtype, must agree"
            )
        return torch.empty((*own.shape[:-1], length_bytes // column_bytes), dtype=own.dtype)


def _checked(tensor: Tensor) -> Tensor:
    """`tensor` or a contiguous copy; float16 is summed in float32 and rounded once. Raises: ValueError for what cannot be summed here."""
    if tensor.device.type != "cpu":
        raise ValueError(f"a sum in shared memory got a tensor on {tensor.device}; use kind 'nccl' for tensors on a GPU")
    if tensor.dtype is torch.float16:
        return tensor.to(torch.float32)
    if tensor.dtype not in _WIDTHS:
        raise ValueError(f"all_reduce of {tensor.dtype} in shared memory: give float32, bfloat16 or float16")
    return tensor.contiguous()


class _Sum:
    """An all-reduce under way: the compiled kernel keeps its progress."""

    def __init__(self, lane: Lane, tensor: Tensor, sequence: int) -> None:
        self._lane, self._target = lane, tensor
        self._work = _checked(tensor)
        self._count, self._width = self._work.numel(), self._work.element_size()
        self._first = sequence
        per_chunk = lane.chunk_bytes // self._width
        self.chunks = max(1, -(-self._count // per_chunk))
        self._progress = np.zeros(3, np.int64)

    @property
    def is_published(self) -> bool:
        return int(self._progress[0]) == self.chunks

    def _advance(self, waited_ns: int, only_publish: bool = False) -> int:
        address, progress = self._work.data_ptr(), int(self._progress.ctypes.data)
        return flags.advance_sum(
            self._lane.fields, self._first, address, self._count, self._width, progress, EVERYBODY, waited_ns, only_publish
        )

    def publish(self) -> None:
        self._advance(0, only_publish=True)

    def complete(self) -> None:
        self._lane.until("all_reduce", self._advance)
        if self._work is not self._target:
            self._target.copy_(self._work)


class SharedMemoryCommunicator:
    """All collectives of the ranks of one host over one segment: a lane for steps, mailboxes for bulk moves."""

    def __init__(self, segment_name: str, rank: int, members: Sequence[int], deadline_s: float, is_alive: Callable[[], bool]) -> None:
        self.rank, self.size = rank, len(members)
        self.watch = PeerWatch(members, deadline_s, is_alive)
        layout = LaneLayout(self.size, CHUNK_BYTES)
        self._segment = Segment(segment_name, rank, self.size, layout.total_bytes + Mailboxes.total_bytes(self.size))
        self.watch.has_left = self._segment.has_left
        self._lane = Lane(self._segment, layout, self.watch)
        self._mailboxes = Mailboxes(self._segment, layout.total_bytes, self.watch, self._lane.flags)
        self._closed = False
        try:
            self._segment.attach(self.watch)
        except BaseException:
            self.close()
            raise
        shorten_naps()

    def all_reduce(self, tensor: Tensor) -> None:
        self._lane.sum(tensor)

    def reduce_to(self, leader: int, tensor: Tensor) -> None:
        """In-place sum on the rank `leader` only."""
        self._lane.reduce_to(leader, tensor)

    def broadcast_from(self, leader: int, tensor: Tensor) -> None:
        self._lane.broadcast_from(leader, tensor)

    def start_all_reduce(self, tensor: Tensor) -> Pending:
        return self._lane.start(tensor)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return self._lane.gather(tensor)

    def exchange(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        self._mailboxes.exchange(sends, receives)

    def leave(self) -> None:
        """Let the others know that nothing more will come from this rank: their waits end with PeerLost."""
        self._segment.leave()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._segment.leave()
            self._mailboxes.close()
            self.watch.close()


def build(settings: GroupSettings) -> SharedMemoryCommunicator:
    """For `build_communicator`: all members on this host."""
    if len(settings.domains) != 1:
        raise ValueError(f"kind 'shm' needs all members on one host; got domains={settings.domains}; use 'hierarchical'")
    if len(settings.segment_names) != 1:
        raise ValueError(f"kind 'shm' needs one segment name (segment_names.segment_name(...)); got {settings.segment_names}")
    return SharedMemoryCommunicator(settings.segment_names[0], settings.own_index, settings.members, settings.deadline_s, settings.is_alive)
