"""Bulk moves between the ranks of one host beside their steps.

A ring of chunks per ordered pair of ranks, filled and emptied by a thread of low priority that stands back while a step's
all-reduce is under way, and that hardly ever runs Python (`bulk_kernel`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from runtime.torch_tp.communicators import bulk_kernel as kernel
from runtime.torch_tp.communicators import shared_flags as flags
from runtime.torch_tp.communicators.bulk_thread import BulkThread, Landings, check_pairs
from runtime.torch_tp.communicators.segments import Segment
from runtime.torch_tp.communicators.waiting import PeerWatch

BUDGET_NS = 20_000_000  # so long the kernel moves before it lets this thread look around


class Mailboxes:
    """The rings of all pairs, at `offset` in the segment."""

    def __init__(self, segment: Segment, offset: int, watch: PeerWatch, step_flags: int) -> None:
        self._segment = segment
        self._watch = watch
        self._rank, self._size = segment.rank, segment.size
        self._lines = segment.address + offset
        self._rings = self._lines + self._line_bytes(self._size)
        self._step_flags = step_flags
        self._numbers: dict[tuple[int, int], int] = {}  # chunks passed so far, by (sender, receiver)
        self._state = np.zeros(5, np.int64)  # see `advance_moves`
        self._thread = BulkThread(watch.is_alive)

    @staticmethod
    def _line_bytes(size: int) -> int:
        return -(-size * size * flags.FLAG_BYTES // 4096) * 4096

    @staticmethod
    def total_bytes(size: int) -> int:
        return Mailboxes._line_bytes(size) + size * size * kernel.RING_CHUNKS * kernel.CHUNK_STRIDE

    def exchange(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        check_pairs(sends, receives, self._rank, self._size)
        self._thread.run(lambda: self._move(sends, receives))

    def close(self) -> None:
        self._state[4] = 1
        self._thread.close()

    def _move(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        landings = Landings(receives)
        outgoing = [(peer, tensor.contiguous()) for peer, tensor in sends]
        by_pair: dict[tuple[int, int], list[Tensor]] = {}
        for peer, tensor in outgoing:
            by_pair.setdefault((self._rank, peer), []).append(tensor)
        for peer, buffer in landings.pairs:
            by_pair.setdefault((peer, self._rank), []).append(buffer)
        # what is empty does not cross
        parcels = {pair: [tensor for tensor in tensors if tensor.nbytes] for pair, tensors in by_pair.items()}
        messages = np.array([(t.data_ptr(), t.nbytes) for tensors in parcels.values() for t in tensors], np.int64).reshape(-1, 2)
        lanes = np.array(self._lanes(parcels), np.int64).reshape(-1, len(kernel.LANE_FIELDS))
        try:
            self._carry(lanes, messages, list(parcels))
        finally:
            for pair, lane in zip(parcels, lanes, strict=True):
                self._numbers[pair] = int(lane[kernel.NUMBER])
        landings.hand_over()

    def _lanes(self, parcels: dict[tuple[int, int], list[Tensor]]) -> list[tuple[int, ...]]:
        lanes, begin = [], 0
        for (sender, receiver), tensors in parcels.items():
            place = sender * self._size + receiver
            line, ring = self._lines + place * flags.FLAG_BYTES, self._rings + place * kernel.RING_CHUNKS * kernel.CHUNK_STRIDE
            number, end = self._numbers.get((sender, receiver), 0), begin + len(tensors)
            lanes.append((int(sender == self._rank), line, ring, number, begin, end, 0))
            begin = end
        return lanes

    def _carry(self, lanes: np.ndarray, messages: np.ndarray, pairs: Sequence[tuple[int, int]]) -> None:
        """Call the kernel until all has crossed, and look around in between."""
        state = int(self._state.ctypes.data)
        self._state[3] = time.monotonic_ns()
        while True:
            end = kernel.advance_moves(
                lanes.ctypes.data, len(lanes), messages.ctypes.data, self._step_flags, self._size, state, self._thread.bytes_per_s_max,
                self._thread.is_realtime, BUDGET_NS,
            )  # fmt: skip
            self._thread.note(int(self._state[2]))
            if end >= 0:
                self._refuse(lanes[end], messages, pairs[end])
            left = [pair for pair, lane in zip(pairs, lanes, strict=True) if lane[kernel.MESSAGE] < lane[kernel.END]]
            if not left:
                return
            self._thread.raise_if_closed()
            missing = next(rank for rank in left[0] if rank != self._rank)
            self._watch.look_around((time.monotonic_ns() - int(self._state[3])) / 1e9, missing, "exchange")

    def _refuse(self, lane: np.ndarray, messages: np.ndarray, pair: tuple[int, int]) -> None:
        chunk = int(lane[kernel.RING] + lane[kernel.NUMBER] % kernel.RING_CHUNKS * kernel.CHUNK_STRIDE)
        expected = int(messages[lane[kernel.MESSAGE], 1] - lane[kernel.DONE_BYTES])
        raise ValueError(
            f"exchange: rank {self._watch.labels[pair[0]]} has {flags.read_flag(chunk)} bytes left to send where {expected} are expected; "
            "sends and receives of a pair must match in order and size"
        )
