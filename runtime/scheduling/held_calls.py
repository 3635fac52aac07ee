"""Calls that wait for a group to take them: rung when something may have become possible, the longest held first."""

from __future__ import annotations

import asyncio
from collections import deque


class HeldCalls:
    """`count`: calls that wait now."""

    def __init__(self) -> None:
        self._waiters: deque[asyncio.Future[None]] = deque()
        self.count = 0

    def ring(self, calls: int = 1 << 30) -> None:
        """Something may have become possible: so many held calls ask again, the longest held first."""
        while self._waiters and calls > 0:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                calls -= 1

    async def wait(self, wait_s: float) -> None:
        """Until rung, or for `wait_s`."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self.count += 1
        try:
            async with asyncio.timeout(wait_s):
                await waiter
        except TimeoutError:
            pass
        finally:
            self.count -= 1
