"""Calls that wait for a group to take them; rung when something may be possible: the highest priority first, then the longest held."""

from __future__ import annotations

import asyncio
import heapq


class HeldCalls:
    """`count`: calls that wait now."""

    def __init__(self) -> None:
        self._waiters: list[tuple[int, int, asyncio.Future[bool]]] = []  # heap by priority (highest first), then by age
        self._next = 0
        self.count = 0

    def ring(self, calls: int = 1 << 30) -> None:
        """Something may have become possible: so many held calls ask again."""
        while self._waiters and calls > 0:
            waiter = heapq.heappop(self._waiters)[2]
            if not waiter.done():
                waiter.set_result(True)
                calls -= 1

    def make_room(self, priority: int) -> bool:
        """Send away the held call of the lowest priority, of those the last that came, for one of `priority`; False: none is lower."""
        last = max((entry for entry in self._waiters if not entry[2].done()), default=None)
        if last is None or -last[0] >= priority:
            return False
        last[2].set_result(False)
        self.count -= 1
        return True

    async def wait(self, wait_s: float, priority: int = 0) -> bool:
        """Until rung, or for `wait_s`; False: a call of higher priority got this one's place."""
        waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiters, (-priority, self._next, waiter))
        self._next += 1
        self.count += 1
        try:
            async with asyncio.timeout(wait_s):
                return await waiter
        except TimeoutError:
            return True
        finally:
            if not (waiter.done() and not waiter.cancelled() and waiter.result() is False):  # who was sent away counts no more
                self.count -= 1
