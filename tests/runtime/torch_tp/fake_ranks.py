"""Ranks as threads of the test: the real model, with a barrier and a sum in rank order in place of a network."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from torch import Tensor

WAIT_S = 60.0
T = TypeVar("T")


class ThreadCommunicator:
    """Implements `Communicator` between threads of one process."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, board: list[Tensor | None]) -> None:
        self.rank, self.size = rank, size
        self._barrier, self._board = barrier, board

    def all_reduce(self, tensor: Tensor, *, urgent: bool = False) -> None:
        parts = self.all_gather(tensor.clone())
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        tensor.copy_(total)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        self._board[self.rank] = tensor
        self._barrier.wait(WAIT_S)
        parts = [part for part in self._board if part is not None]
        self._barrier.wait(WAIT_S)
        return parts

    def close(self) -> None:
        return


def run_ranks(size: int, work: Callable[[ThreadCommunicator], T]) -> Sequence[T]:
    """`work` on every rank at once; results in rank order. The first exception of any rank is raised."""
    barrier, board = threading.Barrier(size), [None] * size

    def guarded(rank: int) -> T:
        try:
            return work(ThreadCommunicator(rank, size, barrier, board))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(guarded, rank) for rank in range(size)]
        errors = [error for error in (future.exception() for future in futures) if error is not None]
        if errors:
            raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
        return [future.result() for future in futures]
