"""Bulk moves between the ranks of one host beside their steps.

A ring of chunks per ordered pair of ranks, filled and emptied by a thread of low priority that stands back while a step's
all-reduce is under way.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from runtime.torch_tp.communicators import shared_flags as flags
from runtime.torch_tp.communicators.bulk_thread import BulkThread, Landings, check_pairs
from runtime.torch_tp.communicators.segments import Segment
from runtime.torch_tp.communicators.waiting import PeerWatch

CHUNK_BYTES = 64 * 1024
RING_CHUNKS = 4
PIECE_BYTES = 16 * 1024  # copied at a time: a few us of the memory bus, less than an all-reduce takes
PATIENCE_NS = 2_000_000
IDLE_NAP_S = 0.0001
# offsets in a pair's flag line
SENT, TAKEN = 0, 8


@dataclass(slots=True)
class _Move:
    """A tensor on its way to or from `peer`; it crosses as bytes."""

    peer: int
    tensor: Tensor
    done_bytes: int = 0

    @property
    def left_bytes(self) -> int:
        return self.tensor.nbytes - self.done_bytes

    def next_chunk(self) -> tuple[int, int]:
        """Address and length of the part that crosses next."""
        return self.tensor.data_ptr() + self.done_bytes, min(CHUNK_BYTES, self.left_bytes)


class Mailboxes:
    """The rings of all pairs, at `offset` in the segment."""

    def __init__(self, segment: Segment, offset: int, watch: PeerWatch, step_flags: int) -> None:
        self._segment = segment
        self._watch = watch
        self._rank, self._size = segment.rank, segment.size
        self._lines = segment.address + offset
        self._rings = self._lines + self._line_bytes(self._size)
        self._step_flags = step_flags
        self._counts: dict[tuple[int, int], int] = {}  # chunks passed so far, by (sender, receiver)
        self._scratch = np.zeros(2, np.int64)
        self._thread = BulkThread(watch.is_alive)

    @staticmethod
    def _line_bytes(size: int) -> int:
        return -(-size * size * flags.FLAG_BYTES // 4096) * 4096

    @staticmethod
    def total_bytes(size: int) -> int:
        return Mailboxes._line_bytes(size) + size * size * RING_CHUNKS * (flags.SLOT_HEADER_BYTES + CHUNK_BYTES)

    def exchange(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        check_pairs(sends, receives, self._rank, self._size)
        self._thread.run(lambda: self._move(sends, receives))

    def close(self) -> None:
        self._thread.close()

    def _move(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        outgoing = [_Move(peer, tensor.contiguous()) for peer, tensor in sends if tensor.nbytes]
        landings = Landings(receives)
        incoming = [_Move(peer, buffer) for peer, buffer in landings.pairs if buffer.nbytes]
        queues = [(True, _by_peer(outgoing)), (False, _by_peer(incoming))]
        idle_since_s = time.monotonic()
        while any(lane for _, lanes in queues for lane in lanes.values()):
            moved = False
            for is_send, lanes in queues:
                for moves in lanes.values():
                    if moves and (self._put if is_send else self._take)(moves[0]):
                        moved = True
                        if not moves[0].left_bytes:
                            moves.popleft()
            if moved:
                idle_since_s = time.monotonic()
            else:
                self._rest(idle_since_s, queues)
        landings.hand_over()

    def _rest(self, idle_since_s: float, queues: Sequence[tuple[bool, dict[int, deque[_Move]]]]) -> None:
        self._thread.raise_if_closed()
        missing = next(peer for _, lanes in queues for peer, moves in lanes.items() if moves)
        self._watch.look_around(time.monotonic() - idle_since_s, missing, "exchange")
        time.sleep(IDLE_NAP_S)

    def _line(self, sender: int, receiver: int) -> int:
        return self._lines + (sender * self._size + receiver) * flags.FLAG_BYTES

    def _chunk(self, sender: int, receiver: int, number: int) -> int:
        ring = (sender * self._size + receiver) * RING_CHUNKS + number % RING_CHUNKS
        return self._rings + ring * (flags.SLOT_HEADER_BYTES + CHUNK_BYTES)

    def _copy(self, target: int, source: int, length_bytes: int) -> None:
        begin_s = time.monotonic()
        clock = int(self._scratch.ctypes.data)
        flags.copy_politely(target, source, length_bytes, self._step_flags, self._size, PIECE_BYTES, PATIENCE_NS, clock)
        self._thread.pace(length_bytes, time.monotonic() - begin_s)

    def _put(self, move: _Move) -> bool:
        """Fill one chunk of the ring if there is room."""
        pair = (self._rank, move.peer)
        number, line = self._counts.get(pair, 0), self._line(*pair)
        if number - flags.read_flag(line + TAKEN) >= RING_CHUNKS:
            return False
        chunk = self._chunk(*pair, number)
        address, length_bytes = move.next_chunk()
        flags.write_flag(chunk, length_bytes)
        flags.write_flag(chunk + 8, move.left_bytes)
        self._copy(chunk + flags.SLOT_HEADER_BYTES, address, length_bytes)
        flags.write_flag(line + SENT, number + 1)
        self._counts[pair] = number + 1
        move.done_bytes += length_bytes
        return True

    def _take(self, move: _Move) -> bool:
        """Empty one chunk of the ring if there is one."""
        pair = (move.peer, self._rank)
        number, line = self._counts.get(pair, 0), self._line(*pair)
        if flags.read_flag(line + SENT) <= number:
            return False
        chunk = self._chunk(*pair, number)
        address, length_bytes = move.next_chunk()
        left_bytes = flags.read_flag(chunk + 8)
        if left_bytes != move.left_bytes:
            raise ValueError(
                f"exchange: rank {self._watch.labels[move.peer]} has {left_bytes} bytes left to send where {move.left_bytes} are expected; "
                "sends and receives of a pair must match in order and size"
            )
        self._copy(address, chunk + flags.SLOT_HEADER_BYTES, length_bytes)
        flags.write_flag(line + TAKEN, number + 1)
        self._counts[pair] = number + 1
        move.done_bytes += length_bytes
        return True


def _by_peer(moves: Sequence[_Move]) -> dict[int, deque[_Move]]:
    queues: dict[int, deque[_Move]] = {}
    for move in moves:
        queues.setdefault(move.peer, deque()).append(move)
    return queues
