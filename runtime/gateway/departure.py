"""Notices that a caller is gone, or late, while a task works for it, and ends the task's work."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

DEPARTURE = "ballast.departure"
"""Under this name our own server puts a `Departure` into a request's scope."""


class Departure:
    """Tells, once, that the caller of one request is gone. Costs nothing while nobody leaves, where a task that waits for ASGI's
    `http.disconnect` costs a tenth of a short request."""

    __slots__ = ("has_happened", "tell")

    def __init__(self) -> None:
        self.has_happened = False
        self.tell: Callable[[], None] | None = None

    def happen(self) -> None:
        self.has_happened = True
        if self.tell is not None:
            self.tell()


class Watch:
    """Looks out, while a task works, for its caller's leaving and for the deadline: either cancels the task."""

    def __init__(self, scope: MutableMapping[str, Any], receive: Callable[[], Awaitable[MutableMapping[str, Any]]]) -> None:
        self._receive = receive
        self._task = asyncio.current_task()
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = False
        self.has_left = False
        self.is_late = False
        self._watcher: asyncio.Future[None] | None = None
        self._departure: Departure | None = scope.get(DEPARTURE)
        if self._departure is None:  # another server than ours
            self._watcher = asyncio.ensure_future(self._look_out())
        elif self._departure.has_happened:
            self._leave()
        else:
            self._departure.tell = self._leave

    def set_deadline(self, in_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(max(in_s, 0.0), self._expire)

    def stop(self) -> None:
        """From here on nothing is cancelled any more."""
        self._is_over = True
        if self._departure is not None:
            self._departure.tell = None
        if self._watcher is not None:
            self._watcher.cancel()
        if self._timer is not None:
            self._timer.cancel()

    def take_back(self) -> None:
        """The task's cancellation was this watch's, and is dealt with."""
        assert self._task is not None
        self._task.uncancel()

    async def _look_out(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._leave()

    def _leave(self) -> None:
        self.has_left = self._cancel()

    def _expire(self) -> None:
        self.is_late = self._cancel()

    def _cancel(self) -> bool:
        """Only the first reason counts."""
        if self._is_over or self.has_left or self.is_late or self._task is None:
            return False
        return self._task.cancel()
