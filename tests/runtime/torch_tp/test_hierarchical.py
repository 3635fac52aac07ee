"""Sums over domains: two hosts of two ranks each, and uneven ones, as processes of one machine."""

from __future__ import annotations

import pytest
import torch

from runtime.torch_tp.communicators.rank_order import sum_in_rank_order
from runtime.torch_tp.rendezvous import listen, serve_store
from tests.conftest import SLOWER
from tests.runtime.torch_tp import rank_programs
from tests.runtime.torch_tp.rank_processes import ranks
from tests.runtime.torch_tp.wire_bounds import error_bound

SIZES = (3, 5_000, 70_001)
TWO_BY_TWO = ((0, 1), (2, 3))


@pytest.fixture(scope="module")
def store():
    listener = listen("127.0.0.1", 0)
    address = listener.getsockname()
    kept = serve_store(listener)
    yield address
    del kept


def in_domain_order(parts, domains):
    """Summed in each domain in rank order, then over the domains."""
    return sum_in_rank_order([sum_in_rank_order([parts[rank] for rank in domain]) for domain in domains])


@pytest.mark.parametrize(("domains", "between"), [(TWO_BY_TWO, "tcp"), (TWO_BY_TWO, "gloo"), (((0, 3), (1,), (2,)), "tcp")])
def test_sums_in_the_order_of_domains_on_every_rank(store, domains, between):
    """Bit for bit, also where a domain has one rank only, or the ranks of a domain are not neighbours."""
    with ranks(
        rank_programs.sums, 4, domains, kind="hierarchical", between=between, sizes=SIZES, dtype="float32", store_address=store
    ) as group:
        results = group.values()
    for index, count in enumerate(SIZES):
        parts = [rank_programs.part_of(rank, count, torch.float32) for rank in range(4)]
        assert {result[index] for result in results} == {in_domain_order(parts, domains).view(torch.uint8).numpy().tobytes()}


@pytest.mark.parametrize("wire", ["fp16", "int8"])
def test_packed_sums_are_the_same_on_all_ranks_and_within_their_bound(store, wire):
    with ranks(
        rank_programs.sums, 4, TWO_BY_TWO, kind="hierarchical", wire=wire, sizes=SIZES, dtype="float32", store_address=store
    ) as group:
        results = group.values()
    for index, count in enumerate(SIZES):
        assert len({result[index] for result in results}) == 1
        found = torch.frombuffer(bytearray(results[0][index]), dtype=torch.float32)
        parts = [rank_programs.part_of(rank, count, torch.float32) for rank in range(4)]
        crossing = [parts[0] + parts[1], parts[2] + parts[3]]
        bound = error_bound(wire, crossing) + 2.0**-22 * (crossing[0].abs() + crossing[1].abs())
        error = (found - (crossing[0] + crossing[1])).abs()
        assert bool((error <= bound).all())
        assert count < 1000 or float(error.max()) > 0.0  # it was packed indeed


def test_gathers_and_exchanges(store):
    """Domains (0, 2) and (1): rank order is not the order of domains."""
    domains = ((0, 2), (1,))
    with ranks(rank_programs.gathers, 3, domains, kind="hierarchical", store_address=store) as group:
        results = group.values()
    assert results[0] == results[1] == results[2]
    first, second, third, scalars = results[0]
    assert first == [[[0.0]] * 2, [[1.0] * 2] * 2, [[2.0] * 3] * 2]
    assert second == [[[]] * 3, [[1.0] * 2] * 3, [[2.0] * 4] * 3]
    assert [len(part[0]) for part in third] == [3, 50_000, 3] and scalars == [[0], [1], [2]]
    with ranks(rank_programs.exchanges, 3, domains, kind="hierarchical", store_address=store) as group:
        results = group.values()
    for rank, found in enumerate(results):
        senders = [peer for peer in range(3) if peer != rank]
        assert found == [rank_programs.message(peer, rank, number).numpy().tobytes() for peer in senders for number in (0, 1)]


@pytest.mark.parametrize("wire", ["float32", "fp16"])
def test_random_calls_and_the_measured_choice(store, wire):
    """Kind "auto" times both ways first; whatever it chooses, all ranks choose alike and agree."""
    with ranks(rank_programs.mixed_calls, 4, TWO_BY_TWO, kind="auto", wire=wire, seed=3, calls=25, store_address=store) as group:
        results = group.values()
    assert results[0] == results[1] == results[2] == results[3]


@pytest.mark.fault("K20")
@pytest.mark.parametrize("victim", [0, 3])
def test_a_killed_rank_ends_the_waiting_in_both_domains(store, tmp_path, victim):
    """A leader's death, and that of another rank: also who has no connection to it learns of it, from its own leader."""
    ready = tmp_path / "ready"
    with ranks(
        rank_programs.sums_until_lost,
        4,
        TWO_BY_TWO,
        kind="hierarchical",
        first_call="kill",
        victim=victim,
        deadline_s=30.0,
        ready=str(ready),
        store_address=store,
    ) as group:
        outcomes = [group.outcome(rank) for rank in range(4) if rank != victim]
    assert [outcome.error for outcome in outcomes] == ["PeerLost"] * 3
    assert max(outcome.at_s for outcome in outcomes) - float(ready.read_text()) < 1.0 * SLOWER
