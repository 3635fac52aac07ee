"""The fake keeps the contract of the real communicators."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from runtime.torch_tp.communicators.interface import CollectiveTimeout, PeerLost
from tests.runtime.torch_tp.fake_communicator import FakeCommunicator, fake_group


def on_all(fakes: list[FakeCommunicator], program: Callable[[FakeCommunicator], Any]) -> list[Any]:
    """Results, or the exceptions raised, by rank."""
    found: list[Any] = [None] * len(fakes)

    def run(rank: int) -> None:
        try:
            found[rank] = program(fakes[rank])
        except RuntimeError as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(fakes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120.0)
    return found


def test_sums_gathers_and_exchanges():
    def program(communicator: FakeCommunicator) -> Any:
        tensor = torch.tensor([1.0, float(communicator.rank)])
        communicator.all_reduce(tensor)
        gathered = communicator.all_gather(torch.full((1, communicator.rank), 7.0))
        landed = torch.zeros(2)
        right, left = (communicator.rank + 1) % 3, (communicator.rank - 1) % 3
        communicator.exchange([(right, torch.full((2,), float(communicator.rank)))], [(left, landed)])
        return tensor.tolist(), [part.shape[1] for part in gathered], landed.tolist()

    assert on_all(fake_group(3), program) == [([3.0, 3.0], [0, 1, 2], [float((rank - 1) % 3)] * 2) for rank in range(3)]


def test_a_lost_rank_and_a_late_one():
    def program(communicator: FakeCommunicator) -> None:
        if communicator.rank == 1:
            communicator.close()
        else:
            communicator.all_reduce(torch.ones(1))

    assert [type(found) for found in on_all(fake_group(3), program)] == [PeerLost, type(None), PeerLost]

    def late(communicator: FakeCommunicator) -> None:
        if communicator.rank == 0:
            communicator.all_reduce(torch.ones(1))

    assert isinstance(on_all(fake_group(2, deadline_s=0.1), late)[0], CollectiveTimeout)


def test_an_exchange_with_oneself_is_refused():
    with pytest.raises(ValueError, match=r"peers of rank 0 are the other ranks of 0\.\.1"):
        fake_group(2)[0].exchange([(0, torch.ones(1))], [])
