"""Two and three worker processes on one device, summing through CUDA IPC: the whole engine, its changes of plan and its losses."""

from __future__ import annotations

import signal
import time

import pytest
import torch
from rank_processes import ranks

from runtime.torch_tp.communicators.interface import build_communicator
from runtime.torch_tp.engine import Engine, EngineSettings
from runtime.torch_tp.requests import GenerationRequest
from runtime.torch_tp.supervisor import RankSettings

PROMPTS = ((1, 397, 261), (1, 300, 301, 302), (1, 450, 264, 312, 266), (1, 273))
ON_GPU = EngineSettings(kv_tokens_max=1024, slots_max=8, communicator="cuda_ipc", with_text=False, wait_deadline_s=120.0)
ON_CPU = EngineSettings(kv_tokens_max=1024, slots_max=8, with_text=False, wait_deadline_s=120.0)


def part_of(rank: int, count: int, seed: int) -> torch.Tensor:
    """Numbers of very unlike size, so that another order of summing would give other bits."""
    generator = torch.Generator().manual_seed(1000 * rank + seed)
    return torch.randn(count, generator=generator) * 10.0 ** torch.randint(-3, 4, (count,), generator=generator)


def device_sums(sizes: tuple[int, ...], **settings):
    """Sums, a gather and a move, by one rank; as bytes."""
    communicator = build_communicator("cuda_ipc", torch_device="cuda:0", deadline_s=60.0, **settings)
    rank = communicator.rank
    found = []
    for number, count in enumerate(sizes):
        tensor = part_of(rank, count, number).to("cuda:0")
        communicator.all_reduce(tensor)
        found.append(tensor.cpu().numpy().tobytes())
    found += [part.cpu().numpy().tobytes() for part in communicator.all_gather(part_of(rank, 5 + rank, 99).to("cuda:0"))]
    peers = [peer for peer in range(communicator.size) if peer != rank]
    landing = [torch.empty(70_001, device="cuda:0") for _ in peers]
    communicator.exchange([(peer, part_of(rank, 70_001, peer).to("cuda:0")) for peer in peers], list(zip(peers, landing, strict=True)))
    communicator.all_reduce(torch.zeros(1, device="cuda:0"))
    communicator.close()
    return found, {peer: buffer.cpu().numpy().tobytes() for peer, buffer in zip(peers, landing, strict=True)}


@pytest.mark.parametrize("size", [2, 3])
def test_sums_are_the_same_bits_on_every_rank(device, size):
    """Rank order, as in all communicators; sizes around the chunk of 8 MiB, and more sums than slots."""
    sizes = (1, 576, 4608, 3, 2_097_152, 2_097_153, 5_000_000, 7, 7, 7)
    with ranks(device_sums, size, sizes=sizes) as group:
        results = group.values()
    for number, count in enumerate(sizes):
        total = part_of(0, count, number) + part_of(1, count, number)
        for rank in range(2, size):
            total += part_of(rank, count, number)
        for found, _ in results:
            assert found[number] == total.numpy().tobytes()
    for rank, (found, moved) in enumerate(results):
        assert found[len(sizes) :] == [part_of(peer, 5 + peer, 99).numpy().tobytes() for peer in range(size)]
        assert moved == {peer: part_of(peer, 70_001, rank).numpy().tobytes() for peer in range(size) if peer != rank}


def answers(engine: Engine, name: str, max_tokens: int = 60):
    requests = [GenerationRequest(f"{name}-{i}", prompt, max_tokens, ignore_eos=True) for i, prompt in enumerate(PROMPTS)]
    return [engine.submit(request) for request in requests]


@pytest.fixture(scope="module")
def undisturbed(dreams, nursery):
    """Greedy tokens of one CPU rank."""
    with Engine.start(dreams, [RankSettings()], ON_CPU, nursery=nursery) as engine:
        return [stream.result(120.0).tokens for stream in answers(engine, "cpu")]


def gpu_engine(dreams, nursery, *speeds: float) -> Engine:
    return Engine.start(dreams, [RankSettings(speed=speed, device="cuda:0") for speed in speeds], ON_GPU, nursery=nursery)


@pytest.mark.parametrize("speeds", [(1.0,), (1.0, 1.0), (1.0, 0.25)])
def test_tokens_are_those_of_a_cpu(device, dreams, nursery, undisturbed, speeds):
    with gpu_engine(dreams, nursery, *speeds) as engine:
        assert [stream.result(120.0).tokens for stream in answers(engine, "gpu")] == undisturbed


def test_plans_change_while_requests_run(device, dreams, nursery, undisturbed):
    """KV crosses on a stream of its own beside the steps; tokens stay."""
    with gpu_engine(dreams, nursery, 1.0, 1.0) as engine:
        streams = answers(engine, "slid")
        for shares in ((3.0, 1.0), (1.0, 3.0), (1.0, 1.0)):
            engine.set_plan(shares)
        assert [stream.result(120.0).tokens for stream in streams] == undisturbed
        assert engine.measured().slides == 3


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_a_lost_rank_loses_no_token(device, dreams, nursery, undisturbed, number):
    with gpu_engine(dreams, nursery, 1.0, 1.0) as engine:
        streams = answers(engine, "struck")
        next(iter(streams[0]))
        assert engine.signal_rank(1, number)
        tokens = [stream.result(120.0).tokens for stream in streams]
        assert (undisturbed[0][0], *tokens[0]) == undisturbed[0] and tokens[1:] == undisturbed[1:]
        deadline_s = time.monotonic() + 60.0
        while len(engine.supervisor.changes) < 2 and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert engine.supervisor.changes[1].lost[0].worker == 1
