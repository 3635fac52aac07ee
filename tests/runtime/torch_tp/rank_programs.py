"""What the ranks of the communicator tests do. Each returns what the test compares."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtime.torch_tp.communicators.interface import Communicator, PeerLost, build_communicator

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64, "int64": torch.int64}


def part_of(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    """Numbers of very unlike size, so that another order of summing would give other bits."""
    generator = torch.Generator().manual_seed(1000 * rank + count)
    numbers = torch.randn(count, generator=generator, dtype=torch.float64)
    if dtype.is_floating_point:
        return (numbers * 10.0 ** torch.randint(-3, 4, (count,), generator=generator)).to(dtype)
    return (numbers * 1000).to(dtype)


def sums(kind: str, sizes: tuple[int, ...], dtype: str, **settings: Any) -> list[bytes]:
    """All-reduce of every size; the bits of each sum."""
    communicator = build_communicator(kind, **settings)
    results = []
    for count in sizes:
        tensor = part_of(communicator.rank, count, DTYPES[dtype])
        communicator.all_reduce(tensor)
        results.append(tensor.view(torch.uint8).numpy().tobytes())
    _all_here(communicator)
    communicator.close()
    return results


def mixed_calls(kind: str, seed: int, calls: int, **settings: Any) -> list[bytes]:
    """See `mixed_calls_on`."""
    communicator = build_communicator(kind, **settings)
    results = mixed_calls_on(communicator, seed, calls)
    _all_here(communicator)
    communicator.close()
    return results


def mixed_calls_on(communicator: Communicator, seed: int, calls: int) -> list[bytes]:
    """A random sequence of sums, started sums, gathers and strided tensors: the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    results: list[Tensor] = []
    pending: list[Any] = []
    for number in range(calls):
        what = int(torch.randint(6, (1,), generator=generator))
        count = (
            int(torch.randint(1, 90_000, (1,), generator=generator)) if what % 2 else int(torch.randint(1, 700, (1,), generator=generator))
        )
        tensor = part_of(communicator.rank, count, torch.float32) + number
        if what <= 2:
            communicator.all_reduce(tensor)
        elif what == 3:
            pending.append(communicator.start_all_reduce(tensor))
        elif what == 4:
            tensor = torch.cat(communicator.all_gather(tensor[: count - communicator.rank] if count > 8 else tensor))
        else:
            tensor = torch.stack([tensor, tensor + 1], dim=1)[:, 0]  # strided
            communicator.all_reduce(tensor)
        results.append(tensor)
        if len(pending) > 5:
            pending.pop(2).wait()  # out of order
    for started in pending:
        started.wait()
    return [result.contiguous().numpy().tobytes() for result in results]


def gathers(kind: str, **settings: Any) -> list[list[list[float]]]:
    """Tensors whose last dimension differs by rank, one of them empty, one larger than a chunk."""
    communicator = build_communicator(kind, **settings)
    rank = communicator.rank
    shapes = [(2, rank + 1), (3, 2 * rank), (1, 50_000 if rank == 1 else 3)]
    results = [[part.tolist() for part in communicator.all_gather(torch.full(shape, float(rank)))] for shape in shapes]
    results.append([part.tolist() for part in communicator.all_gather(torch.tensor(rank, dtype=torch.int64))])
    _all_here(communicator)
    communicator.close()
    return results


def exchanges(kind: str, **settings: Any) -> list[bytes]:
    """Everybody sends everybody two tensors of unlike sizes; the second one lands in a strided tensor."""
    communicator = build_communicator(kind, **settings)
    rank, size = communicator.rank, communicator.size
    peers = [peer for peer in range(size) if peer != rank]
    sends, receives = [], []
    for peer in peers:
        sends += [(peer, message(rank, peer, 0)), (peer, message(rank, peer, 1))]
        strided = torch.zeros(message(peer, rank, 1).numel(), 2)[:, 1]
        receives += [(peer, torch.zeros_like(message(peer, rank, 0))), (peer, strided)]
    communicator.exchange(sends, receives)
    communicator.exchange([], [])
    _all_here(communicator)
    communicator.close()
    return [tensor.contiguous().numpy().tobytes() for _, tensor in receives]


def message(sender: int, receiver: int, number: int) -> Tensor:
    """What travels from one rank to another in `exchanges`."""
    return part_of(10 * sender + receiver, 70_001 * (sender + 1) if number == 0 else 17, torch.float32)


def sums_until_lost(kind: str, first_call: str, victim: int, deadline_s: float, ready: str, **settings: Any) -> int:
    """Sum for ever; the victim stops itself ("kill", "stop", "raise" or "leave" after some sums). Returns only by an exception."""
    communicator = build_communicator(kind, deadline_s=deadline_s, **settings)
    done = 0
    while True:
        if communicator.rank == victim and done == 20:
            if first_call == "idle":
                time.sleep(60.0)
            Path(ready).write_text(str(time.monotonic()))
            if first_call == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if first_call == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if first_call == "leave":
                communicator.close()
                return done
        communicator.all_reduce(torch.ones(512))
        done += 1


def fenced(kind: str, flag: str, **settings: Any) -> int:
    """Rank 0 waits for a sum that nobody joins until the file `flag` fences it."""
    communicator = build_communicator(kind, is_alive=lambda: not Path(flag).exists(), **settings)
    if communicator.rank == 0:
        communicator.all_reduce(torch.ones(4))
    time.sleep(60.0)
    return 0


def exchange_with_nobody(kind: str, **settings: Any) -> None:
    """Rank 0 waits for a message that never comes."""
    communicator = build_communicator(kind, **settings)
    if communicator.rank == 0:
        communicator.exchange([], [(1, torch.zeros(10))])
    time.sleep(60.0)


def _all_here(communicator: Communicator) -> None:
    """Nobody leaves before all have finished: gloo tells a peer that left from one that died by nothing."""
    communicator.all_reduce(torch.zeros(1))


def rebuild_after_loss(kind: str, victim: int, deadline_s: float, ready: str, **settings: Any) -> float:
    """Sum until the victim kills itself; the survivors sum again under epoch + 1."""
    try:
        sums_until_lost(kind, "kill", victim, deadline_s, ready, **settings)
    except PeerLost:
        survivors = tuple(rank for rank in settings["members"] if rank != victim)
        fresh = {**settings, "epoch": settings["epoch"] + 1000, "members": survivors, "domains": (survivors,)}
        communicator = build_communicator(kind, deadline_s=deadline_s, **fresh)
        total = torch.ones(3)
        communicator.all_reduce(total)
        _all_here(communicator)
        return float(total[0])
    raise AssertionError("the victim was not missed")


def unequal_exchange(kind: str, **settings: Any) -> None:
    """Rank 0 sends three chunks and a half, rank 1 expects four bytes more."""
    communicator = build_communicator(kind, **settings)
    room = torch.zeros(57_344 + communicator.rank)
    if communicator.rank == 0:
        communicator.exchange([(1, room)], [])
        time.sleep(60.0)
    else:
        communicator.exchange([], [(0, room)])


def exchange_that_is_closed(kind: str, **settings: Any) -> float:
    """Rank 0 waits for what rank 1 never sends, and is closed from another thread. Returns: how long the wait went on after that."""
    communicator = build_communicator(kind, **settings)
    if communicator.rank == 1:
        time.sleep(1.0)
        return 0.0
    threading.Timer(0.3, communicator.close).start()
    begin_s = time.monotonic()
    with contextlib.suppress(PeerLost):
        communicator.exchange([], [(1, torch.zeros(10))])
    return time.monotonic() - begin_s - 0.3
