"""A wait that is told to end ends with what it was told, once, whoever else speaks; a caller's own cancellation stays one."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator

import pytest
import uvloop

from runtime.scheduling.stream_watch import StreamWatch
from tests.conftest import GUARD_S


class Told(Exception):
    pass


async def silence() -> AsyncIterator[int]:
    await asyncio.sleep(3600.0)
    yield 0


async def numbers() -> AsyncIterator[int]:
    for number in range(3):
        yield number


def run(body) -> None:
    asyncio.run(asyncio.wait_for(body(), GUARD_S))


@pytest.mark.parametrize("is_late", [False, True])
def test_the_first_word_stands(is_late):
    """Told twice in one go, and its deadline passing in the same: it ends with the first of them and the task is not cancelled."""

    async def body() -> None:
        watch = StreamWatch(time.monotonic)
        task = asyncio.create_task(watch.next(silence(), time.monotonic() + (0.02 if is_late else 3600.0)))
        await asyncio.sleep(0)
        if is_late:
            time.sleep(0.03)
            watch._look()
        watch.interrupt(Told("first"))
        watch.interrupt(Told("second"))
        with pytest.raises(TimeoutError if is_late else Told, match=None if is_late else "first"):
            await task
        assert not task.cancelled()
        watch.close()

    run(body)


def test_told_between_two_waits():
    async def body() -> None:
        watch, items = StreamWatch(time.monotonic), numbers()
        assert await watch.next(items, time.monotonic() + 3600.0) == 0
        watch.interrupt(Told())
        with pytest.raises(Told):
            await watch.next(items, time.monotonic() + 3600.0)
        watch.close()

    run(body)


def test_a_callers_cancellation_stays_one():
    async def body() -> None:
        watch = StreamWatch(time.monotonic)
        task = asyncio.create_task(watch.next(silence(), time.monotonic() + 3600.0))
        await asyncio.sleep(0)
        watch.interrupt(Told())
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        watch.close()

    run(body)


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("has_come", [True, False], ids=["unread", "silent"])
def test_a_loop_that_stood_still_blames_no_stream(new_loop, has_come):
    """Past the limit, but its piece came in time and lies unread in the socket; without one, the limit still ends the wait."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)

    async def pieces() -> AsyncIterator[bytes]:
        while True:
            yield await asyncio.get_running_loop().sock_recv(ours, 10)

    async def body() -> None:
        watch = StreamWatch(time.monotonic)
        task = asyncio.create_task(watch.next(pieces(), time.monotonic() + 0.05))
        await asyncio.sleep(0.01)
        if has_come:
            theirs.send(b"piece")
        time.sleep(0.3)
        if has_come:
            assert await task == b"piece"
        else:
            with pytest.raises(TimeoutError):
                await task
        watch.close()

    with ours, theirs, asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(asyncio.wait_for(body(), GUARD_S))
