"""A wait that is told to end ends with what it was told, once, whoever else speaks; a caller's own cancellation stays one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

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
