"""Collectives of the tensor-parallel engine: shared memory against gloo, two domains against one, steps beside bulk moves.

A and B are measured in turns by the same processes, in rounds; what counts is the median over the rounds of each round's ratio. Part of
`python -m benchmarks.tp_engine`; alone: `python -m benchmarks.tp_collectives [--only NAME ...]`.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.emulated_hosts import EmulatedHost, two_hosts, why_not
from benchmarks.rank_runner import round_robin_allowed, run_ranks
from benchmarks.reporting import Bar, at_least, at_most, print_bars
from runtime.torch_tp.communicators.interface import Communicator, build_communicator
from runtime.torch_tp.communicators.segment_names import segment_name
from runtime.torch_tp.rendezvous import connect_store, listen, local_address_towards, serve_store

Domains = tuple[tuple[int, ...], ...]
Medians = dict[str, dict[int, list[float]]]  # microseconds by way and size, one per round

ROUNDS = 7
GROUPS_MAX = 100  # of one measurement
TORCHRUN_PORT = 29500
TWO_BY_TWO = ((0, 1), (2, 3))
STEP_BYTES = 8 * 576 * 4  # the activations of eight sequences of SmolLM2-135M


def times_us(call: Callable[[], None], repeats: int) -> np.ndarray:
    """Microseconds of each call, after one that does not count."""
    call()
    taken = np.empty(repeats)
    for index in range(repeats):
        begin_s = time.perf_counter()
        call()
        taken[index] = (time.perf_counter() - begin_s) * 1e6
    return taken


class PlainGloo:
    """torch's own all-reduce over gloo, on a group of its own: the yardstick."""

    def __init__(self, store_address: tuple[str, int], name: str, rank: int, size: int) -> None:
        gloo: Any = torch.distributed.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=60.0)
        options._devices = [gloo.create_device(hostname=local_address_towards(*store_address))]
        options._threads = 2  # torch's default
        prefix: Any = torch.distributed.PrefixStore
        self._group = gloo(prefix(name, connect_store(store_address, 30.0)), rank, size, options)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self._group.allreduce([tensor]).wait()


@dataclass(frozen=True, slots=True)
class Place:
    """What the ranks of one measurement are given: `number` is the epoch of the first group they build, others count on from it."""

    store_address: tuple[str, int]
    owner_pid: int
    number: int

    def build(self, kind: str, rank: int, domains: Domains, group: int = 0, **more: Any) -> Communicator:
        names = tuple(segment_name(self.owner_pid, self.number + group, f"domain{index}") for index in range(len(domains)))
        more = {"members": tuple(range(sum(len(domain) for domain in domains))), "deadline_s": 60.0, **more}
        return build_communicator(
            kind,
            epoch=self.number + group,
            rank=rank,
            domains=domains,
            store_address=self.store_address,
            segment_names=names,
            **more,
        )


_numbers = itertools.count(1, GROUPS_MAX)


def new_place(store_address: tuple[str, int]) -> Place:
    return Place(store_address, os.getpid(), next(_numbers))


@dataclass(frozen=True, slots=True)
class Comparison:
    """Ways to sum, given as arguments of `Place.build`, and sizes in bytes with the repeats in a round."""

    domains: Domains
    ways: Mapping[str, Mapping[str, Any]]
    sizes: Mapping[int, int]


def compare(rank: int, place: Place, comparison: Comparison, hosts: Sequence[EmulatedHost] = ()) -> Medians:
    """All ways in turns, beside plain gloo."""
    store = None
    if hosts:
        hosts[0 if rank in comparison.domains[0] else 1].enter()
        store = serve_store(listen(*place.store_address)) if rank == 0 else None
    communicators: dict[str, Any] = {
        name: place.build(rank=rank, domains=comparison.domains, group=group, **options)
        for group, (name, options) in enumerate(comparison.ways.items())
    }
    communicators["gloo"] = PlainGloo(place.store_address, f"plain{place.number}", rank, sum(len(domain) for domain in comparison.domains))
    found: Medians = {name: {size: [] for size in comparison.sizes} for name in communicators}
    for _ in range(ROUNDS):
        for size, repeats in comparison.sizes.items():
            tensor = torch.zeros(size // 4)
            for name, communicator in communicators.items():
                found[name][size].append(float(np.median(times_us(partial(communicator.all_reduce, tensor), repeats))))
    del store
    return found


def ratio(found: Medians, slow: str, fast: str, size: int) -> float:
    """The median of the rounds' ratios."""
    return statistics.median(a / b for a, b in zip(found[slow][size], found[fast][size], strict=True))


def table(found: Medians) -> None:
    sizes = list(next(iter(found.values())))
    print(f"  {f'us, median of {ROUNDS} rounds':32s}" + "".join(f"{size // 1024:>9d} KiB" for size in sizes))
    for name, by_size in found.items():
        print(f"  {name:32s}" + "".join(f"{statistics.median(by_size[size]):13.1f}" for size in sizes))


def shared_memory(store_address: tuple[str, int], round_robin: bool) -> Iterator[Bar]:
    """Two ranks of one host."""
    sizes = {2048: 400, 16 * 1024: 400, 64 * 1024: 200, 1024 * 1024: 20}
    comparison = Comparison(((0, 1),), {"shared memory": {"kind": "shm"}, "tcp": {"kind": "tcp"}}, sizes)
    found = run_ranks(compare, 2, round_robin=round_robin, place=new_place(store_address), comparison=comparison)[0]
    table(found)
    for size in (size for size in sizes if size <= 64 * 1024):
        faster = ratio(found, "gloo", "shared memory", size)
        yield at_least(f"gloo / shared memory, {size // 1024} KiB, 2 ranks", faster, 10.0, ROUNDS)


def hierarchical(store_address: tuple[str, int], round_robin: bool) -> Iterator[Bar]:
    """Two domains of two ranks, joined by loopback."""
    sizes = {2048: 100, 64 * 1024: 100, 1024 * 1024: 10}
    comparison = Comparison(
        TWO_BY_TWO,
        {
            "hierarchical, tcp between": {"kind": "hierarchical"},
            "hierarchical, gloo between": {"kind": "hierarchical", "between": "gloo"},
            "flat tcp": {"kind": "tcp"},
        },
        sizes,
    )
    found = run_ranks(compare, 4, round_robin=round_robin, place=new_place(store_address), comparison=comparison)[0]
    table(found)
    for size in sizes:
        faster = ratio(found, "gloo", "hierarchical, tcp between", size)
        yield at_least(f"flat gloo / hierarchical 2x2, {size // 1024} KiB", faster, 1.8, ROUNDS)


def slow_link(store_address: tuple[str, int], round_robin: bool) -> Iterator[Bar]:
    """Two domains of two ranks, each in a network namespace, joined by a cable of 1 Gbit/s (emulated hosts)."""
    reason = why_not()
    if reason is not None:
        print(f"  skipped: {reason}")
        return
    sizes = {2048: 60, 64 * 1024: 20, 1024 * 1024: 5}
    wires = {f"hierarchical, {wire}": {"kind": "hierarchical", "wire": wire} for wire in ("float32", "fp16", "int8")}
    with two_hosts(125e6) as hosts:
        comparison = Comparison(TWO_BY_TWO, wires, sizes)
        place = new_place((hosts[0].address, TORCHRUN_PORT))
        found = run_ranks(compare, 4, round_robin=round_robin, place=place, comparison=comparison, hosts=hosts)[0]
    table(found)
    for size in sizes:
        faster = max(ratio(found, "gloo", name, size) for name in wires)
        yield at_least(f"flat gloo / best hierarchical 2x2 over a 1 Gbit/s cable, {size // 1024} KiB", faster, 1.8, ROUNDS)


BULK_BYTES = 8 << 20
STEP_SUMS = 300


def beside_bulk(rank: int, place: Place, kind: str) -> tuple[list[float], list[float], list[float]]:
    """p99 in us of a step's sums, in turns alone and beside a bulk move in both directions; and the bulk rates in bytes/s."""
    communicator = place.build(kind, rank, ((0, 1),))
    tensor, weight = torch.zeros(STEP_BYTES // 4), torch.randn(576, 576)
    own, landing = torch.zeros(BULK_BYTES // 4), torch.empty(BULK_BYTES // 4)
    quiet: list[float] = []
    loaded: list[float] = []
    rates: list[float] = []

    def step_sums(until: threading.Event | None) -> float:
        taken: list[float] = []
        go_on = torch.ones(1)
        # rank 0 tells when the move has ended; all leave after the same sum
        while go_on[0] > 0:
            for _ in range(50):
                weight.mv(weight[0])  # some computation between sums, as in a step
                begin_s = time.perf_counter()
                communicator.all_reduce(tensor)
                taken.append((time.perf_counter() - begin_s) * 1e6)
            go_on[0] = float(rank == 0 and (len(taken) < STEP_SUMS or (until is not None and not until.is_set())))
            communicator.all_reduce(go_on)
        return float(np.percentile(taken, 99))

    def move(ended: threading.Event) -> None:
        begin_s = time.perf_counter()
        communicator.exchange([(1 - rank, own)], [(1 - rank, landing)])
        rates.append(2 * BULK_BYTES / (time.perf_counter() - begin_s))
        ended.set()

    step_sums(None)
    for _ in range(ROUNDS):
        quiet.append(step_sums(None))
        ended = threading.Event()
        mover = threading.Thread(target=move, args=(ended,))
        mover.start()
        loaded.append(step_sums(ended))
        mover.join()
    return quiet, loaded, rates


def bulk(store_address: tuple[str, int], round_robin: bool) -> Iterator[Bar]:
    """Sums of a step (8 sequences of SmolLM2-135M) beside a move of 8 MiB each way, 2 ranks."""
    for kind in ("shm", "tcp"):
        place = new_place(store_address)
        quiet, loaded, rates = run_ranks(beside_bulk, 2, round_robin=round_robin, place=place, kind=kind)[0]
        worse = statistics.median(b / a for a, b in zip(quiet, loaded, strict=True))
        rate = statistics.median(rates) / 1e6
        print(
            f"  {kind}: p99 {statistics.median(quiet):.0f} us alone, {statistics.median(loaded):.0f} us beside the move at {rate:.0f} MB/s"
        )
        yield at_most(f"p99 of a sum beside a bulk move / alone, {kind}", worse, 2.0, ROUNDS)


BENCHMARKS: dict[str, Callable[[tuple[str, int], bool], Iterator[Bar]]] = {
    "shared-memory": shared_memory,
    "hierarchical": hierarchical,
    "slow-link": slow_link,
    "bulk": bulk,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tp_collectives", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=sorted(BENCHMARKS), default=list(BENCHMARKS), metavar="NAME")
    options = parser.parse_args()
    round_robin = round_robin_allowed()
    listener = listen("127.0.0.1", 0)
    address = listener.getsockname()
    store = serve_store(listener)
    print(
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, scheduled "
        + ("round-robin" if round_robin else "as usual (SCHED_RR refused)")
    )
    bars: list[Bar] = []
    for name in options.only:
        print(f"\n{name}: {BENCHMARKS[name].__doc__}", flush=True)
        found = list(BENCHMARKS[name](address, round_robin))
        for bar in found:
            print(f"  {'reached' if bar.ok else 'MISSED '} {bar.name}: {bar.value:g} (wanted {bar.wanted:g})", flush=True)
        bars += found
    del store
    print_bars(bars, scheduling="round-robin" if round_robin else "normal", load=round(os.getloadavg()[0], 1))


if __name__ == "__main__":
    main()
