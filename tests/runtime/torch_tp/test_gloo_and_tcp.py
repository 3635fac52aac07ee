"""Collectives over the network: the same sums as shared memory, lost and frozen peers, a fresh group after a kill."""

from __future__ import annotations

import signal
import time

import pytest
import torch

from runtime.torch_tp.communicators.rank_order import sum_in_rank_order
from runtime.torch_tp.rendezvous import listen, serve_store
from tests.conftest import SLOWER
from tests.runtime.torch_tp import rank_programs
from tests.runtime.torch_tp.rank_processes import ranks

SIZES = (1, 700, 40_001)  # numbers: gathered at once, and in pieces


@pytest.fixture(scope="module")
def store():
    """A store in this process; the one in a process of its own has its own tests."""
    listener = listen("127.0.0.1", 0)
    address = listener.getsockname()
    kept = serve_store(listener)
    yield address
    del kept


@pytest.fixture(params=["gloo", "tcp"])
def kind(request):
    return request.param


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sums_are_those_of_rank_order_on_every_rank(store, kind, dtype):
    """The bits that shared memory gives, too."""
    with ranks(rank_programs.sums, 3, kind=kind, sizes=SIZES, dtype=dtype, store_address=store) as group:
        results = group.values()
    for index, count in enumerate(SIZES):
        parts = [rank_programs.part_of(rank, count, rank_programs.DTYPES[dtype]) for rank in range(3)]
        assert {result[index] for result in results} == {sum_in_rank_order(parts).view(torch.uint8).numpy().tobytes()}


def test_gathers_exchanges_and_random_calls(store, kind):
    with ranks(rank_programs.gathers, 3, kind=kind, store_address=store) as group:
        first, second, third, scalars = group.values()[2]
    assert first == [[[0.0]] * 2, [[1.0] * 2] * 2, [[2.0] * 3] * 2]
    assert second == [[[]] * 3, [[1.0] * 2] * 3, [[2.0] * 4] * 3]
    assert [len(part[0]) for part in third] == [3, 50_000, 3] and scalars == [[0], [1], [2]]
    with ranks(rank_programs.exchanges, 2, kind=kind, store_address=store) as group:
        results = group.values()
    for rank, found in enumerate(results):
        assert found == [rank_programs.message(1 - rank, rank, number).numpy().tobytes() for number in (0, 1)]
    with ranks(rank_programs.mixed_calls, 2, kind=kind, seed=5, calls=20, store_address=store) as group:
        results = group.values()
    assert results[0] == results[1]


@pytest.mark.fault("K20")
def test_survivors_of_a_kill_build_a_fresh_group_on_the_same_store(store, kind, tmp_path):
    """SIGKILL inside the sums of three: PeerLost on both survivors; they then meet again under the next epoch."""
    ready = tmp_path / "ready"
    with ranks(rank_programs.rebuild_after_loss, 3, kind=kind, victim=1, deadline_s=20.0, ready=str(ready), store_address=store) as group:
        outcomes = [group.outcome(rank) for rank in (0, 2)]
    assert [outcome.error for outcome in outcomes] == [None, None], outcomes
    assert [outcome.value for outcome in outcomes] == [2.0, 2.0]
    assert max(outcome.at_s for outcome in outcomes) - float(ready.read_text()) < 1.0 * SLOWER


@pytest.mark.fault("K20")
def test_a_frozen_peer_raises_at_the_deadline_and_a_killed_one_at_once(store, kind, tmp_path):
    ready = tmp_path / "ready"
    options = {"kind": kind, "first_call": "stop", "victim": 1, "ready": str(ready), "store_address": store}
    with ranks(rank_programs.sums_until_lost, 2, deadline_s=3.0, **options) as group:
        outcome = group.outcome(0)
    assert outcome.error == "CollectiveTimeout"
    assert outcome.at_s - float(ready.read_text()) >= 0.9
    ready.unlink()
    with ranks(rank_programs.sums_until_lost, 2, deadline_s=30.0, **options) as group:
        while not ready.exists():
            time.sleep(0.01)
        group.send_signal(1, signal.SIGKILL)
        assert group.outcome(0).error == "PeerLost"


def test_fencing_ends_a_wait(store, kind, tmp_path):
    flag = tmp_path / "fenced"
    with ranks(rank_programs.fenced, 2, kind=kind, flag=str(flag), store_address=store) as group:
        time.sleep(0.3)
        flag.touch()
        assert group.outcome(0).error == "PeerLost"


def test_no_store_is_a_lost_peer(kind):
    from runtime.torch_tp.communicators.interface import PeerLost, build_communicator

    listener = listen("127.0.0.1", 0)
    address = listener.getsockname()
    listener.close()
    with pytest.raises(PeerLost, match=r"no rendezvous store at 127\.0\.0\.1"):
        build_communicator(kind, epoch=1, rank=0, members=(0, 1), store_address=address, deadline_s=0.5)


def test_a_stranger_on_the_port_is_shown_out():
    """Connections with a wrong greeting, or none, neither join the mesh nor stop it from forming."""
    import socket
    import threading

    from runtime.torch_tp.communicators import tcp

    class Notes(dict):
        """A store of this process."""

        def set(self, key, value):
            self[key] = value.encode()

        def check(self, keys):
            return all(key in self for key in keys)

    notes, found = Notes(), {}

    def connect(rank: int) -> None:
        found[rank] = tcp.connect_meshes(notes, "e1/test", "127.0.0.1", (0, 1), rank, 60.0, lambda: True)

    first = threading.Thread(target=connect, args=(0,))
    first.start()
    while "e1/test/0" not in notes:
        time.sleep(0.001)
    port = int(notes["e1/test/0"].split()[1])
    with socket.create_connection(("127.0.0.1", port)) as wrong, socket.create_connection(("127.0.0.1", port)) as silent:
        wrong.sendall(b"GET / HTTP/1.1\r\n\r\n......................")
        silent.shutdown(socket.SHUT_WR)
        second = threading.Thread(target=connect, args=(1,))
        second.start()
        first.join(60.0)
        second.join(60.0)
    assert sorted(found) == [0, 1] and [list(mesh.streams) for mesh in found[0]] == [[1]] * len(tcp.LANES)
    for meshes in found.values():
        for mesh in meshes:
            mesh.close()
