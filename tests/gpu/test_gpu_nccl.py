"""NCCL with one rank, which is all that one device allows: sums, streams, bulk moves to nobody, and an abort that frees everybody."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from runtime.torch_tp.communicators.interface import GroupSettings, PeerLost
from runtime.torch_tp.communicators.nccl import NcclCommunicator
from runtime.torch_tp.rendezvous import listen, serve_store


@pytest.fixture
def fence():
    return threading.Event()


@pytest.fixture
def alone(device, fence):
    """A group of one; fenced when `fence` is set."""
    listener = listen("127.0.0.1", 0)
    address = listener.getsockname()
    store = serve_store(listener)
    communicator = NcclCommunicator(GroupSettings(1, 0, (0,), ((0,),), address, (), 10.0, lambda: not fence.is_set(), device))
    yield communicator
    communicator.close()
    del store


def test_sums_and_gathers_of_one_rank_change_nothing(alone, device):
    numbers = torch.randn(10_000, device=device)
    for dtype in (torch.float32, torch.bfloat16):
        tensor = numbers.to(dtype)
        alone.all_reduce(tensor)
        pending = alone.start_all_reduce(tensor)
        pending.wait()
        assert torch.equal(tensor, numbers.to(dtype))
    assert torch.equal(alone.all_gather(numbers)[0], numbers)
    alone.exchange([], [])


def test_sums_keep_the_order_of_their_stream(alone, device):
    """A sum comes after what its stream computed before it and before what it computes next, on two streams at once."""
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    results = []
    for stream in streams:
        with torch.cuda.stream(stream):
            tensor = torch.zeros(1 << 20, device=device)
            for _ in range(50):
                tensor += 1
                alone.all_reduce(tensor)
            results.append(tensor)
    torch.cuda.synchronize(device)
    assert all(bool((tensor == 50).all()) for tensor in results)


def test_a_fence_aborts_and_later_calls_say_so(alone, device, fence):
    alone.all_reduce(torch.ones(4, device=device))
    fence.set()
    deadline_s = time.monotonic() + 5.0
    with pytest.raises(PeerLost):
        while time.monotonic() < deadline_s:
            alone.all_reduce(torch.ones(1 << 20, device=device))
            torch.cuda.synchronize(device)
    with pytest.raises(PeerLost):
        alone.all_gather(torch.ones(4, device=device))
    # the device itself is none the worse for it
    assert float(torch.ones(8, device=device).sum()) == 8.0


def test_closing_does_not_wait(alone, device):
    began_s = time.monotonic()
    alone.close()
    alone.close()
    assert time.monotonic() - began_s < 5.0  # destroy() would wait for ever; abort() takes milliseconds
    with pytest.raises(PeerLost):
        alone.all_reduce(torch.ones(4, device=device))
