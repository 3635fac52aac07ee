"""Ranks as threads of the test: the real model, with a barrier and a sum in rank order in place of a network."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from envs.domain.plans import LayerPlans
from runtime.torch_tp.checkpoint import Checkpoint
from runtime.torch_tp.communicators.serial import SerialCommunicator
from runtime.torch_tp.model import Slice, TpModel

WAIT_S = 60.0
T = TypeVar("T")


class ThreadCommunicator:
    """Implements `Communicator` between threads of one process."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, board: list[Tensor | None]) -> None:
        self.rank, self.size = rank, size
        self._barrier, self._board = barrier, board

    def all_reduce(self, tensor: Tensor) -> None:
        parts = self.all_gather(tensor.clone())
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        tensor.copy_(total)

    def start_all_reduce(self, tensor: Tensor) -> Started:
        return Started(self, tensor)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        self._board[self.rank] = tensor
        self._barrier.wait(WAIT_S)
        parts = [part for part in self._board if part is not None]
        self._barrier.wait(WAIT_S)
        return parts

    def close(self) -> None:
        return


@dataclass
class Started:
    """A sum that happens only when it is waited for: what is read before that is this rank's part alone."""

    communicator: ThreadCommunicator
    tensor: Tensor

    def wait(self) -> None:
        self.communicator.all_reduce(self.tensor)


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


class Ranks:
    """All ranks of one model, driven as one: every call runs on each rank at once."""

    def __init__(self, checkpoint: Checkpoint, size: int, tokens_max: int = 2048, **how: Any) -> None:
        """how: device and dtype, as `TpModel` takes them."""
        self.size = size
        room = {"kv_tokens_max": tokens_max, "slots_max": 16}
        self.models = [TpModel(checkpoint, SerialCommunicator(), rank=rank, **room, **how) for rank in range(size)]

    def use_plan(self, plan: LayerPlans) -> None:
        for model in self.models:
            model.use_plan(plan)

    def allocate(self, slot: int, plan_version: int, tokens_max: int) -> None:
        for model in self.models:
            model.kv.allocate(slot, plan_version, tokens_max)

    def forward(self, slices: Sequence[Slice], **how: bool) -> Tensor:
        """Whole logits, (rows, vocabulary), put together from the ranks' ranges."""

        def work(communicator: ThreadCommunicator) -> Tensor:
            model = self.models[communicator.rank]
            model.communicator = communicator
            return model.forward(slices, **how)

        return torch.cat(list(run_ranks(self.size, work)), dim=1)

    def logits_of(self, slot: int, plan_version: int, ids: Sequence[int], chunks: Sequence[int], start: int = 0) -> Tensor:
        """Logits of every position of one sequence fed in chunks of these sizes (the last takes the rest)."""
        out, at = [], 0
        for size in [*chunks, len(ids)]:
            piece = ids[at : at + size]
            if piece:
                out.append(self.forward([Slice(slot, plan_version, piece, start + at)], all_logits=True))
            at += len(piece)
        return torch.cat(out)

    def greedy(self, slot: int, plan_version: int, ids: Sequence[int], count: int, start: int = 0) -> list[int]:
        """`count` most likely tokens after `ids`, which take positions from `start` on."""
        chosen: list[int] = []
        piece = list(ids)
        for _ in range(count):
            logits = self.forward([Slice(slot, plan_version, piece, start)])
            start += len(piece)
            piece = [int(logits[0].argmax())]
            chosen += piece
        return chosen
