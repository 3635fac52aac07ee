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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from runtime.torch_tp.communicators import shared_flags as flags
from runtime.torch_tp.communicators.interface import GroupSettings, Pending
from runtime.torch_tp.communicators.rank_order import piece_cuts, sum_in_rank_order
from runtime.torch_tp.communicators.segments import Segment, shorten_naps
from runtime.torch_tp.communicators.shared_mailboxes import Mailboxes
from runtime.torch_tp.communicators.waiting import PeerWatch

CHUNK_BYTES = 128 * 1024
URGENT_CHUNK_BYTES = 32 * 1024
PIECES_FROM_BYTES = 32 * 1024  # from here, three ranks and more sum a piece each
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

    def __init__(self, segment: Segment, offset: int, layout: LaneLayout, watch: PeerWatch) -> None:
        self._segment = segment  # keeps the mapping alive
        self._watch = watch
        self.rank, self.size = segment.rank, segment.size
        self.chunk_bytes = layout.chunk_bytes
        self.stride = layout.stride
        self.flags = segment.address + offset
        self._slots = self.flags + layout.flag_bytes
        self._slots_offset = segment.offset + offset + layout.flag_bytes
        self.polls = crowded_polls(segment.size)
        self._scratch = np.zeros(2, np.int64)
        self.clock = int(self._scratch.ctypes.data)
        self.sequence = 0  # of the next message
        self.finished = 0  # messages that this rank has read
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

    def await_from(self, sequence: int, rank: int, what: str) -> None:
        """Wait for the message of one rank only."""
        line = self.flags + rank * flags.FLAG_BYTES

        def attempt(waited: int) -> int:
            return rank if flags.await_published(line, 1, sequence, self.polls, self.clock, waited) >= 0 else -1

        self.until(what, attempt)

    def release(self, sequence: int) -> None:
        """This rank has read message `sequence` and all before it."""
        self.finished = sequence + 1
        flags.write_flag(self.flags + self.rank * flags.FLAG_BYTES + flags.DONE, sequence + 1)

    def add_up(self, sequence: int, begin: int, count: int, target: Tensor) -> None:
        """target = sum over the ranks, in rank order, of numbers begin .. begin + count of what they published."""
        if target.dtype is torch.float32 or target.dtype is torch.bfloat16:
            kernel = flags.sum_float if target.dtype is torch.float32 else flags.sum_bfloat
            first = self.slots(sequence) + flags.SLOT_HEADER_BYTES + begin * target.element_size()
            kernel(first, self.stride, self.size, target.data_ptr(), count)
        else:
            parts = [self.numbers(sequence, rank, begin + count, target.dtype)[begin:] for rank in range(self.size)]
            target.copy_(sum_in_rank_order(parts))

    # --- sums

    def sum(self, tensor: Tensor) -> None:
        """In-place sum over the ranks."""
        with self._lock:
            if self._open:
                self.finish_open()
            length_bytes = tensor.nbytes
            if tensor.dtype is torch.float32 and length_bytes <= self._one_shot_bytes and tensor.is_contiguous() and not tensor.is_cuda:
                self._sum_at_once(tensor.data_ptr(), length_bytes >> 2)
            else:
                self._begin(tensor)
                self.finish_open()

    @property
    def _one_shot_bytes(self) -> int:
        return self.chunk_bytes if self.size <= 2 else min(self.chunk_bytes, PIECES_FROM_BYTES)

    def _sum_at_once(self, address: int, count: int) -> None:
        sequence = self.sequence
        slots = self.slots(sequence)
        stage = flags.all_reduce_float(
            self.flags, self.size, self.rank, sequence, slots, self.stride, address, count, self.polls, self.clock, 0
        )
        if stage >= 0:
            self.until(
                "all_reduce",
                _Resume(
                    lambda stage: flags.all_reduce_float(
                        self.flags, self.size, self.rank, sequence, slots, self.stride, address, count, self.polls, self.clock, stage
                    ),
                    stage,
                ),
            )
        self.sequence = self.finished = sequence + 1

    def start(self, tensor: Tensor) -> Pending:
        """Publish as much of `tensor` as there is room for."""
        with self._lock:
            return self._begin(tensor)

    def _begin(self, tensor: Tensor) -> _Sum:
        if self._open and (self._open[-1].unpublished or self.sequence - self.finished >= flags.DEPTH - 1):
            self.finish_open()
        started = _Sum(self, tensor, self.sequence)
        self.sequence += started.chunks
        self._open.append(started)
        started.publish_some()
        return started

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
            for sequence, part in self._chunks(work):
                self.publish(sequence, part.data_ptr(), part.nbytes)
                if self.rank == leader:
                    self.await_published(sequence)
                    self.add_up(sequence, 0, part.numel(), part)
                self.release(sequence)
            if self.rank == leader and work is not tensor:
                tensor.copy_(work)

    def broadcast_from(self, leader: int, tensor: Tensor) -> None:
        """Everybody's `tensor` becomes the leader's."""
        with self._lock:
            self.finish_open()
            work = _checked(tensor)
            for sequence, part in self._chunks(work):
                if self.rank == leader:
                    self.publish(sequence, part.data_ptr(), part.nbytes)
                else:
                    self.await_from(sequence, leader, "broadcast")
                    flags.copy_bytes(part.data_ptr(), self.slots(sequence) + leader * self.stride + flags.SLOT_HEADER_BYTES, part.nbytes)
                self.release(sequence)
            if work is not tensor:
                tensor.copy_(work)

    def _chunks(self, work: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Numbers the chunks of a contiguous tensor as the next messages."""
        for part in work.view(-1).split(self.chunk_bytes // work.element_size()):
            self.sequence += 1
            yield self.sequence - 1, part

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
    """`tensor` or a contiguous copy. Raises: ValueError for what cannot be summed in shared memory."""
    if tensor.device.type != "cpu":
        raise ValueError(f"a sum in shared memory got a tensor on {tensor.device}; use kind 'nccl' for tensors on a GPU")
    if tensor.dtype is torch.bool or tensor.dtype.is_complex:
        raise ValueError(f"all_reduce of {tensor.dtype}: give float32, bfloat16, float16, float64 or an integer type")
    return tensor.contiguous()


class _Resume:
    """An `attempt` for Lane.until over a kernel that keeps a stage."""

    def __init__(self, call: Callable[[int], int], stage: int) -> None:
        self._call, self._stage, self._fresh = call, stage, True

    def __call__(self, waited_ns: int) -> int:
        if self._fresh:
            self._fresh = False
        else:
            self._stage = self._call(self._stage)
        return self._stage


class _Sum:
    """An all-reduce under way: which chunks are published and which are summed."""

    def __init__(self, lane: Lane, tensor: Tensor, sequence: int) -> None:
        self._lane, self._target = lane, tensor
        self._work = _checked(tensor)
        self._per_chunk = lane.chunk_bytes // tensor.element_size()
        self._count = tensor.numel()
        self._first = sequence
        self.chunks = max(1, -(-self._count // self._per_chunk))
        self._published = 0

    @property
    def unpublished(self) -> int:
        return self.chunks - self._published

    def _extent(self, chunk: int) -> tuple[int, int]:
        begin = chunk * self._per_chunk
        return begin, min(self._per_chunk, self._count - begin)

    def publish_some(self) -> None:
        """Publish chunks while own slots are free: the next one always goes out before the present one is summed."""
        width = self._work.element_size()
        while self.unpublished and self._first + self._published - self._lane.finished < flags.DEPTH - 1:
            begin, count = self._extent(self._published)
            self._lane.publish(self._first + self._published, self._work.data_ptr() + begin * width, count * width)
            self._published += 1

    def complete(self) -> None:
        lane = self._lane
        for chunk in range(self.chunks):
            self.publish_some()
            sequence = self._first + chunk
            begin, count = self._extent(chunk)
            lane.await_published(sequence)
            if lane.size > 2 and count * self._work.element_size() >= PIECES_FROM_BYTES:
                self._sum_in_pieces(sequence, begin, count)
            else:
                lane.add_up(sequence, 0, count, self._work.view(-1)[begin : begin + count])
            lane.release(sequence)
        if self._work is not self._target:
            self._target.copy_(self._work)

    def _sum_in_pieces(self, sequence: int, begin: int, count: int) -> None:
        """Each rank sums its piece into its own slot, where nobody else looks at that piece before; then all copy the pieces."""
        lane = self._lane
        cuts = piece_cuts(count, lane.size)
        mine, end = cuts[lane.rank], cuts[lane.rank + 1]
        dtype = self._work.dtype
        lane.add_up(sequence, mine, end - mine, lane.numbers(sequence, lane.rank, count, dtype)[mine:end])
        flags.write_flag(lane.flags + lane.rank * flags.FLAG_BYTES + flags.REDUCED, sequence + 1)
        lane.until("all_reduce", lambda waited: flags.await_reduced(lane.flags, lane.size, sequence, lane.polls, lane.clock, waited))
        work = self._work.view(-1)[begin : begin + count]
        for rank in range(lane.size):
            work[cuts[rank] : cuts[rank + 1]] = lane.numbers(sequence, rank, count, dtype)[cuts[rank] : cuts[rank + 1]]

    def wait(self) -> None:
        self._lane.finish(self)


class SharedMemoryCommunicator:
    """All collectives of the ranks of one host over one segment: a lane for steps, one for urgent sums, mailboxes for bulk moves."""

    def __init__(self, segment_name: str, rank: int, members: Sequence[int], deadline_s: float, is_alive: Callable[[], bool]) -> None:
        self.rank, self.size = rank, len(members)
        self.watch = PeerWatch(members, deadline_s, is_alive)
        layouts = [LaneLayout(self.size, CHUNK_BYTES), LaneLayout(self.size, URGENT_CHUNK_BYTES)]
        lane_bytes = sum(layout.total_bytes for layout in layouts)
        self._segment = Segment(segment_name, rank, self.size, lane_bytes + Mailboxes.total_bytes(self.size))
        self.watch.has_left = self._segment.has_left
        self.step_lane = Lane(self._segment, 0, layouts[0], self.watch)
        self._urgent_lane = Lane(self._segment, layouts[0].total_bytes, layouts[1], self.watch)
        self._mailboxes = Mailboxes(self._segment, lane_bytes, self.watch, self.step_lane.flags)
        self._closed = False
        try:
            self._segment.attach(self.watch)
        except BaseException:
            self.close()
            raise
        shorten_naps()

    def lane(self, urgent: bool) -> Lane:
        return self._urgent_lane if urgent else self.step_lane

    def all_reduce(self, tensor: Tensor, *, urgent: bool = False) -> None:
        self.lane(urgent).sum(tensor)

    def reduce_to(self, leader: int, tensor: Tensor, *, urgent: bool = False) -> None:
        """In-place sum on the rank `leader` only."""
        self.lane(urgent).reduce_to(leader, tensor)

    def broadcast_from(self, leader: int, tensor: Tensor, *, urgent: bool = False) -> None:
        self.lane(urgent).broadcast_from(leader, tensor)

    def start_all_reduce(self, tensor: Tensor) -> Pending:
        return self.step_lane.start(tensor)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return self.step_lane.gather(tensor)

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
