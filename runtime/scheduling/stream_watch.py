"""A deadline for each piece of a stream that costs a float per piece: one timer per stream, armed again only when it fires.

`asyncio.timeout` around every piece makes and cancels a timer each time, which is a third of what a token costs here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

T = TypeVar("T")

LATE_S = 0.05
"""A look that comes so late tells of a loop that stood still, not of a silent stream: what came meanwhile lies unread."""


class StreamWatch:
    """`next` waits for the next item until a clock time. Close it when the stream is over. prolong: asked when that time has come, until
    when the wait may go on; a time that is past ends it."""

    def __init__(self, now_s: Callable[[], float], prolong: Callable[[], float] = lambda: 0.0) -> None:
        self._now_s, self._prolong = now_s, prolong
        self._loop = asyncio.get_running_loop()
        self._until_s = 0.0
        self._waiting: asyncio.Task[object] | None = None
        self._has_fired = False
        self._error: Exception | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._armed_for_s = 0.0
        self._has_looked_late = False

    def interrupt(self, error: Exception) -> None:
        """Let the wait under way, or the next one, end with `error`; the first error stands."""
        if self._error is not None or self._has_fired:
            return  # it ends already, and a second cancel would pass for somebody else's
        self._error = error
        if self._waiting is not None:
            self._waiting.cancel()

    async def next(self, items: AsyncIterator[T], until_s: float) -> T:
        """The next item. Raises: TimeoutError when it is not there by `until_s`, StopAsyncIteration at the end, or what `interrupt` was
        told."""
        if self._error is not None:
            raise self._error
        task = asyncio.current_task()
        assert task is not None
        self._until_s, self._waiting, self._has_looked_late = until_s, task, False
        if self._timer is None or until_s < self._armed_for_s:
            self._arm(until_s)
        try:
            return await anext(items)
        except asyncio.CancelledError:
            is_ours = self._has_fired or self._error is not None
            if is_ours and task.uncancel() <= 0:
                raise (TimeoutError() if self._error is None else self._error) from None
            raise
        finally:
            self._waiting = None

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, until_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._armed_for_s = until_s
        self._timer = self._loop.call_later(max(0.0, until_s - self._now_s()), self._look)

    def _look(self) -> None:
        self._timer = None
        if self._waiting is None or self._error is not None:
            return  # whoever asks next arms it
        now_s = self._now_s()
        if now_s - self._armed_for_s > LATE_S and not self._has_looked_late:
            self._has_looked_late = True
            self._arm(now_s + LATE_S)
            return
        if now_s >= self._until_s:
            self._until_s = self._prolong()
        if self._now_s() >= self._until_s:
            self._has_fired = True
            self._waiting.cancel()
        else:
            self._arm(self._until_s)
