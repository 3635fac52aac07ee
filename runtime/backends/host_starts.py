"""How a group host comes to be: forked by the service's nursery in milliseconds, or, where there is none, as a fresh interpreter."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Protocol

from runtime.backends.host_nursery import HostNursery
from runtime.revival import Revivals
from runtime.torch_tp.forked_process import ForkedProcess
from runtime.torch_tp.nursery import NurseryGone

logger = logging.getLogger(__name__)

AWAIT_S = 120.0
"""So long a start waits for a nursery that imports: the same imports, and after an installation compiling, would take longer beside it."""
WATCH_S = 0.2


class HostProcess(Protocol):
    """The part of `subprocess.Popen` that a backend needs of its host."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def kill(self) -> None: ...


Started = tuple[HostProcess, socket.socket]
"""A host, and our end of its connection."""


def start_afresh(group: str) -> Started:
    """A host that imports everything itself. Raises: OSError."""
    ours, theirs = _pair()
    with theirs:
        command = [sys.executable, "-m", "runtime.backends.group_host", str(theirs.fileno()), str(os.getpid()), group]
        return subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL), ours


def _fork(nursery: HostNursery, group: str) -> tuple[ForkedProcess, socket.socket]:
    ours, theirs = _pair()
    with theirs:
        try:
            return nursery.fork(["{0}", str(os.getpid()), group.replace("{", "{{").replace("}", "}}")], None, [theirs.fileno()]), ours
        except BaseException:
            ours.close()  # one that was forked all the same ends with it
            raise


def _pair() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    return ours, theirs


class HostStarts:
    """Of one service, on one event loop. The nursery begins with the first start, and is started anew beside what runs should it end."""

    def __init__(self) -> None:
        self._ready: HostNursery | None = None
        self._is_settled = asyncio.Event()  # it has imported, or failed to
        self._keeping: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, "host-nursery")  # all that waits for it happens there, one after another

    @property
    def nursery_pid(self) -> int | None:
        """None while there is none that could fork."""
        return None if self._ready is None else self._ready.pid

    def begin(self) -> None:
        """Have the nursery import, in the background."""
        if self._keeping is None:
            self._keeping = asyncio.create_task(self._keep(), name="host-nursery")

    async def start(self, group: str) -> Started:
        """Raises: OSError where the system has no room for another process."""
        self.begin()
        with suppress(TimeoutError):
            async with asyncio.timeout(AWAIT_S):
                await self._is_settled.wait()
        if (nursery := self._ready) is None:
            return start_afresh(group)
        forking = asyncio.get_running_loop().run_in_executor(self._thread, _fork, nursery, group)
        try:
            return await asyncio.shield(forking)
        except asyncio.CancelledError:
            forking.add_done_callback(self._end_unwanted)
            raise
        except (NurseryGone, OSError) as error:
            logger.warning("host not forked group=%s reason=%s", group, error)
            if isinstance(error, NurseryGone):
                nursery.kill()  # stopped, perhaps
            return start_afresh(group)

    async def close(self) -> None:
        """May be called without a start."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        self._thread.shutdown(wait=False)

    async def _keep(self) -> None:
        loop, revivals = asyncio.get_running_loop(), Revivals()
        while True:
            while not revivals.due((0,), time.monotonic()):
                await asyncio.sleep(WATCH_S)
            self._is_settled.clear()
            nursery = HostNursery()
            try:
                await loop.run_in_executor(self._thread, nursery.start)
                await loop.run_in_executor(self._thread, nursery.await_ready)
                self._ready = nursery
                self._is_settled.set()
                while nursery.is_alive:
                    await asyncio.sleep(WATCH_S)
                logger.warning("host nursery lost pid=%s; starting another", nursery.pid)
            except (NurseryGone, OSError) as error:
                logger.warning("host nursery not started reason=%s", error)
            finally:
                self._ready = None
                self._is_settled.set()
                nursery.kill()
                await loop.run_in_executor(self._thread, nursery.close)

    def _end_unwanted(self, forking: asyncio.Future[tuple[ForkedProcess, socket.socket]]) -> None:
        """Nobody waits for this host any more."""
        if not forking.cancelled() and forking.exception() is None:
            process, ours = forking.result()
            ours.close()
            process.kill()
            self._thread.submit(process.wait, 1.0)
