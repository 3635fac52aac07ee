"""Group hosts that the service's own nursery forks: how soon they are back, what they share and what not, and that nothing hangs on it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from benchmarks.drill_service import children, words
from runtime.backends.host_nursery import HostNursery
from runtime.backends.host_starts import HostStarts
from runtime.torch_tp.communicators.segments import segment_folder
from runtime.torch_tp.process_name import process_name
from tests.conftest import PROJECT
from tests.runtime.backends import backend_kinds
from tests.runtime.scheduling.service_parts import call
from tests.runtime.torch_tp.test_parent_death import await_nothing_left, end_session, processes_in_session

WITHIN_S = 10.0
"""Of things that take milliseconds where the cores are free."""


@asynccontextmanager
async def groups(dreams: Path, count: int):
    """Backends of one service, all up."""
    starts = HostStarts()
    backends = [backend_kinds.torch_tp(str(dreams), index, starts=starts) for index in range(count)]
    try:
        await asyncio.gather(*(backend.start() for backend in backends))
        yield starts, backends
    finally:
        await asyncio.gather(*(backend.close() for backend in backends))
        await starts.close()


async def until(condition) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not condition():
            await asyncio.sleep(0.01)


def is_there(pid: int) -> bool:
    """Zombies are: nobody has reaped them."""
    return Path(f"/proc/{pid}").exists()


def below(pid: int) -> list[int]:
    family = [pid]
    for member in family:
        family += children(member)
    return family[1:]


def sockets(pid: int) -> list[str]:
    found = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    return [name for name in found if name.startswith("socket:")]


async def answer(backend) -> list[int]:
    return [piece.token async for piece in backend.submit(call(max_tokens=8, ignore_eos=True))]


def test_hosts_are_forks_of_one_process_and_share_no_socket(dreams):
    """Two groups of two ranks: one process has imported torch for all of them and has one thread. Every host has a nursery of its own. An
    end of a socket is in one process only: a copy would keep a dead peer alive. A killed host takes its ranks with it, is reaped, is back
    under another id, and the other group does not notice."""

    async def drive() -> None:
        async with groups(dreams, 2) as (starts, (first, second)):
            mother = starts.nursery_pid
            assert sorted(children(mother)) == sorted([first.pid, second.pid]) and len(os.listdir(f"/proc/{mother}/task")) == 1
            assert [process_name(pid) for pid in (first.pid, second.pid)] == ["host tp0", "host tp1"]
            family = below(mother)
            assert Counter(process_name(pid).split()[0] for pid in family) == {"host": 2, "nursery": 2, "rank": 4}
            assert len({" ".join(words(pid)) for pid in family}) == 1  # nobody was started as a program
            counts = Counter(name for pid in (mother, *family) for name in sockets(pid))
            assert len(counts) > 12 and set(counts.values()) == {1}
            texts = await answer(first), await answer(second)
            lost, family = first.pid, [first.pid, *below(first.pid)]
            os.kill(lost, signal.SIGKILL)
            await until(lambda: not first.is_alive)
            assert second.is_alive
            await first.start()
            await until(lambda: not any(map(is_there, family)))
            assert first.pid != lost and children(mother).count(first.pid) == 1
            assert (await answer(first), await answer(second)) == texts

    asyncio.run(drive())


def test_groups_outlive_the_nursery_and_start_without_it(dreams, monkeypatch):
    """The nursery killed: the group serves on, and another nursery comes. That one stopped: a start gives up on it after a deadline during
    which the event loop goes on, and starts the host as an interpreter of its own; a third nursery comes, which forks the next."""
    monkeypatch.setattr(HostNursery, "FORK_DEADLINE_S", 0.5)

    async def drive() -> None:
        async with groups(dreams, 1) as (starts, (group,)):
            text, host, first = await answer(group), group.pid, starts.nursery_pid
            os.kill(first, signal.SIGKILL)
            await until(lambda: starts.nursery_pid not in (first, None))
            assert group.is_alive and group.pid == host and await answer(group) == text
            second = starts.nursery_pid
            os.kill(second, signal.SIGSTOP)
            ticking = asyncio.create_task(ticks())
            await group.start()
            ticking.cancel()
            assert await ticking > 20  # of the 50 that fit into the deadline alone
            assert "runtime.backends.group_host" in words(group.pid) and await answer(group) == text
            await until(lambda: starts.nursery_pid not in (second, None) and not is_there(second))
            await group.start()
            assert "runtime.backends.host_nursery" in words(group.pid) and await answer(group) == text

    asyncio.run(drive())


async def ticks() -> int:
    """How often the event loop came round, every 10 ms at best, until cancelled."""
    count = 0
    try:
        while True:
            await asyncio.sleep(0.01)
            count += 1
    except asyncio.CancelledError:
        return count


def test_a_start_that_nobody_waits_for_leaves_no_host(dreams):
    async def drive() -> None:
        async with groups(dreams, 1) as (starts, (group,)):
            other = backend_kinds.torch_tp(str(dreams), 1, starts=starts)
            starting = asyncio.create_task(other.start())
            await asyncio.sleep(0)  # it asks to be forked
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            await other.close()
            await asyncio.sleep(0.2)
            await until(lambda: children(starts.nursery_pid) == [group.pid])

    asyncio.run(drive())


class Hosts:
    """`hosts_program` in a session of its own, up."""

    def __init__(self, dreams: Path) -> None:
        command = [sys.executable, "-m", "tests.runtime.backends.hosts_program", str(dreams)]
        environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
        self.process = subprocess.Popen(command, cwd=PROJECT, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
        assert self.process.stdout is not None
        said = self.process.stdout.readline().split()
        assert said[0] == "up"
        self.nursery, *self.hosts = map(int, said[1:])
        self.nurseries = [child for host in self.hosts for child in children(host)]
        self.ranks = [child for nursery in self.nurseries for child in children(nursery)]
        self._segments = [f"ballast-{host}-*" for host in self.hosts]

    def leftovers(self) -> list[str]:
        found = [path.name for pattern in self._segments for path in segment_folder().glob(pattern)]
        return processes_in_session(self.process.pid) + found


@pytest.fixture
def hosts(dreams) -> Iterator[Hosts]:
    hosts = Hosts(dreams)
    yield hosts
    end_session(hosts.process)


@pytest.mark.fault("K21")
@pytest.mark.parametrize("stopped", ["nobody", "everybody", "hosts without a nursery"])
def test_nothing_outlives_a_killed_gateway_not_even_who_is_stopped(hosts, stopped):
    assert len(hosts.leftovers()) == 1 + 1 + 2 * 4
    if stopped.endswith("without a nursery"):
        os.kill(hosts.nursery, signal.SIGKILL)
    chosen = {"everybody": [hosts.nursery, *hosts.hosts, *hosts.nurseries, *hosts.ranks], "hosts without a nursery": hosts.hosts}
    for pid in chosen.get(stopped, []):
        os.kill(pid, signal.SIGSTOP)
    hosts.process.kill()
    assert await_nothing_left(hosts) == []


@pytest.mark.fault("K21")
def test_a_killed_host_takes_its_nursery_and_ranks_along_not_even_who_is_stopped(hosts):
    """And nobody of the other group."""
    family = [hosts.hosts[0], *below(hosts.hosts[0])]
    others = [hosts.hosts[1], *below(hosts.hosts[1])]
    assert len(family) == len(others) == 4
    for pid in family:
        os.kill(pid, signal.SIGSTOP)
    hosts.process.send_signal(signal.SIGSTOP)  # nobody reaps; zombies count as gone
    os.kill(hosts.hosts[0], signal.SIGKILL)
    end_s = time.monotonic() + WITHIN_S
    while alive(family):
        assert time.monotonic() < end_s, alive(family)
        time.sleep(0.02)
    assert alive(others) == others


def alive(pids: list[int]) -> list[int]:
    found = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state not in "ZX":
            found.append(pid)
    return found
