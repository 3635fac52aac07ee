"""The thread on which a communicator moves bulk data: of low priority, paced, and one move at a time."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures

import torch
from torch import Tensor

from runtime.torch_tp.communicators.interface import PeerLost
from runtime.torch_tp.communicators.segments import shorten_naps

MOVES_WAITING_MAX = 64
LOOK_AROUND_S = 0.02
NICENESS = 10
BYTES_PER_S_MAX, REALTIME_BYTES_PER_S_MAX = 400e6, 16e6
"""While it moves; so much of the machine it may take. In a real-time class a chunk holds up whatever step meets it: they must be rare."""
STARVED_AFTER_S, STARVED_BYTES_PER_S = 0.5, 2e6


class Landings:
    """Contiguous room for what (peer, tensor) pairs are to receive."""

    def __init__(self, receives: Sequence[tuple[int, Tensor]]) -> None:
        self._targets = [tensor for _, tensor in receives]
        self._buffers = [tensor if tensor.is_contiguous() else torch.empty_like(tensor).contiguous() for tensor in self._targets]
        self.pairs = [(peer, buffer) for (peer, _), buffer in zip(receives, self._buffers, strict=True)]

    def hand_over(self) -> None:
        """All has come: put it where it belongs."""
        for tensor, buffer in zip(self._targets, self._buffers, strict=True):
            if buffer is not tensor:
                tensor.copy_(buffer)


def check_pairs(sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], rank: int, size: int) -> None:
    """Raises: ValueError for a peer outside the group, or this rank itself."""
    for peer, _ in (*sends, *receives):
        if not 0 <= peer < size or peer == rank:
            raise ValueError(
                f"exchange with peer {peer}: peers of rank {rank} are the other ranks of 0..{size - 1}; copy own data directly"
            )


class BulkThread:
    """Runs moves in order. The thread starts with the first one and belongs to the ordinary scheduling class, behind everything else,
    whatever the caller's is; unless it starves there, which it does where steps of a real-time class leave no core idle and other
    programs take the rest: then it joins the caller's class, at a rate that steps hardly notice."""

    def __init__(self, is_alive: Callable[[], bool]) -> None:
        self._is_alive = is_alive
        self._work: queue.Queue[tuple[Callable[[], None], Future[None]] | None] = queue.Queue(MOVES_WAITING_MAX)
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closed = False
        self.bytes_per_s_max = BYTES_PER_S_MAX
        self.is_realtime = False  # whether it has joined a caller of such a class
        self._moved_bytes, self._moving_s, self._move_began_s = 0, 0.0, 0.0

    def run(self, move: Callable[[], None]) -> None:
        """Do `move`, which keeps to deadlines itself, and wait for it. Raises: what it raises; PeerLost when closed or fenced."""
        self.raise_if_closed()
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="bulk-moves", daemon=True)
                self._thread.start()
        done: Future[None] = Future()
        try:
            self._work.put_nowait((move, done))
        except queue.Full as error:
            raise RuntimeError(f"{MOVES_WAITING_MAX} bulk moves are waiting already; let some end first") from error
        while not wait_for_futures([done], LOOK_AROUND_S).done:
            self.raise_if_closed()  # the thread may be in a call that nothing interrupts
        done.result()

    def pace(self, length_bytes: int, took_s: float) -> None:
        """Called by a move after each chunk: sleep off what it was faster than the limit."""
        self.note(length_bytes)
        rest_s = length_bytes / self.bytes_per_s_max - took_s
        if rest_s > 0:
            time.sleep(rest_s)

    def note(self, length_bytes: int) -> None:
        """Called by a move every now and then, where it paces itself by `bytes_per_s_max`: so much has it moved since the last call."""
        self._moved_bytes += length_bytes
        self._join_callers_class_if_starved()

    def raise_if_closed(self) -> None:
        if self._closed or not self._is_alive():
            raise PeerLost("this communicator was closed or fenced; bulk moves belong to its epoch")

    def close(self) -> None:
        """Let the move under way end with PeerLost and refuse further ones."""
        self._closed = True
        with contextlib.suppress(queue.Full):  # a full queue empties itself: each move in it is refused
            self._work.put_nowait(None)

    def _loop(self) -> None:
        self._stand_back()
        while (item := self._work.get()) is not None:
            move, done = item
            try:
                self.raise_if_closed()
                self._move_began_s = time.monotonic()
                move()
                self._moving_s += time.monotonic() - self._move_began_s
            except BaseException as error:  # handed to the caller, who waits for it
                done.set_exception(error)
            else:
                done.set_result(None)

    def _stand_back(self) -> None:
        thread_id = threading.get_native_id()
        self._callers_class = os.sched_getscheduler(thread_id), os.sched_getparam(thread_id)
        with contextlib.suppress(OSError):
            os.sched_setscheduler(thread_id, os.SCHED_BATCH, os.sched_param(0))
            os.setpriority(os.PRIO_PROCESS, thread_id, os.getpriority(os.PRIO_PROCESS, thread_id) + NICENESS)
        shorten_naps()

    def _join_callers_class_if_starved(self) -> None:
        moving_s = self._moving_s + time.monotonic() - self._move_began_s
        is_starved = moving_s > STARVED_AFTER_S and self._moved_bytes < STARVED_BYTES_PER_S * moving_s
        if is_starved and self._callers_class[0] in (os.SCHED_RR, os.SCHED_FIFO):
            self.bytes_per_s_max, self.is_realtime = REALTIME_BYTES_PER_S_MAX, True
            os.sched_setscheduler(threading.get_native_id(), *self._callers_class)
