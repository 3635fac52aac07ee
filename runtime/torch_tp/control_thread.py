"""One thread that owns sockets and state: others post what they want done there and wait for what comes of it."""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from runtime.torch_tp.group_values import GroupGone

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")
ANSWER_SLACK_S = 30.0
"""The thread keeps the deadlines of what it was asked; whoever asked only stops waiting for a thread that hangs."""


class ControlThread:
    """Calls whoever registered with `selector`, then what was posted, then `turn`, which says how long to sleep; `finish` at its end."""

    def __init__(self, turn: Callable[[], float], finish: Callable[[str], None]) -> None:
        """finish: gets the reason why nothing can be asked any more."""
        self.selector = selectors.DefaultSelector()
        self.gone: str | None = None
        self._turn, self._finish = turn, finish
        self._is_closing = False
        self._lock = threading.Lock()
        self._posted: deque[Callable[[], None]] = deque()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self.selector.register(self._wake_receiver, selectors.EVENT_READ, self._drain_wake)
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)

    def start(self, first: Callable[[], None]) -> None:
        self._posted.append(first)
        self._thread.start()

    def ask(self, begin: Callable[[Future[Answer]], None], deadline_s: float) -> Answer:
        """Have `begin` see to it that its future gets an answer, and wait for that."""
        future: Future[Answer] = Future()
        self.post(lambda: begin(future), future)
        return future.result(deadline_s + ANSWER_SLACK_S)

    def post(self, act: Callable[[], None], future: Future[Any]) -> None:
        """Have the thread do `act`; what it raises goes to `future`. Raises: GroupGone when the thread has ended."""

        def run() -> None:
            try:
                if self.gone is not None:
                    raise GroupGone(self.gone)
                act()
            except Exception as error:
                if not future.done():
                    future.set_exception(error)

        with self._lock:
            if self._is_closing or not self._thread.is_alive():
                raise GroupGone(self.gone or "the supervisor is closed")
            self._posted.append(run)
        self._wake()

    def close(self, deadline_s: float) -> None:
        """End the thread, or finish in its place where it never started. May be called twice, and from a signal handler."""
        if self._is_closing:
            return
        self._is_closing = True
        if self._thread.ident is None:
            self._end()
        else:
            self._wake()
            self._thread.join(deadline_s)

    def _run(self) -> None:
        pause_s = 0.0
        try:
            while not self._is_closing:
                for key, mask in self.selector.select(pause_s):
                    key.data(mask)
                self._do_posted()
                pause_s = self._turn()
        except Exception as error:
            logger.exception("supervisor stopped reason=%s", error)
            self.gone = f"the supervisor failed: {type(error).__name__}: {error}"
        finally:
            with self._lock:
                self._is_closing = True
            self._end()

    def _end(self) -> None:
        self.gone = self.gone or "the supervisor is closed"
        self._do_posted()
        self._finish(self.gone)
        self.selector.close()
        self._wake_receiver.close()
        self._wake_sender.close()

    def _do_posted(self) -> None:
        while self._posted:
            self._posted.popleft()()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_sender.send(b"\0")

    def _drain_wake(self, _: int) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_receiver.recv(4096)
