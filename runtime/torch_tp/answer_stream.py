"""The events of one answer on their way from the engine's thread to whoever asked: a thread or a coroutine."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

from runtime.torch_tp.requests import RequestReport, TokenEvent


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer. finish_reason, stop, detail, report: as in its last event."""

    tokens: tuple[int, ...]
    text: str
    finish_reason: str
    stop: int | str | None
    detail: str
    report: RequestReport


class AnswerStream:
    """Events of one request in order, the last one with a finish_reason. Iterate it once, with `for` or with `async for`; a coroutine
    that leaves its loop early (or is cancelled in it) cancels the request.

    It holds at most one event per token. Every wait has a deadline: TimeoutError when the engine says nothing for `wait_deadline_s`.
    """

    def __init__(self, request_id: str, cancel: Callable[[str], bool], wait_deadline_s: float) -> None:
        self.request_id = request_id
        self._cancel = cancel
        self._wait_deadline_s = wait_deadline_s
        self._events: deque[TokenEvent] = deque()
        self._changed = threading.Condition()
        self._wake_loop: Callable[[], None] | None = None
        self._is_over = False

    def push(self, event: TokenEvent) -> None:
        """From the engine's thread."""
        with self._changed:
            self._events.append(event)
            self._changed.notify()
            wake = self._wake_loop
        if wake is not None:
            wake()

    def cancel(self) -> bool:
        """End the request; its last event still comes. False where it had ended."""
        return self._cancel(self.request_id)

    def __iter__(self) -> Iterator[TokenEvent]:
        return self

    def __next__(self) -> TokenEvent:
        if self._is_over:
            raise StopIteration
        return self._taken(self._next(self._wait_deadline_s))

    def _next(self, deadline_s: float) -> TokenEvent:
        with self._changed:
            if not self._changed.wait_for(lambda: bool(self._events), deadline_s):
                raise TimeoutError(f"request {self.request_id!r}: no event for {deadline_s:g} s")
            return self._events.popleft()

    def _taken(self, event: TokenEvent) -> TokenEvent:
        self._is_over = event.finish_reason is not None
        return event

    async def __aiter__(self) -> AsyncIterator[TokenEvent]:
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(arrived.set)

        with self._changed:
            self._wake_loop = wake
            if self._events:
                arrived.set()
        try:
            while not self._is_over:
                try:
                    await asyncio.wait_for(arrived.wait(), self._wait_deadline_s)
                except TimeoutError as error:
                    raise TimeoutError(f"request {self.request_id!r}: no event for {self._wait_deadline_s:g} s") from error
                with self._changed:
                    arrived.clear()
                    events = list(self._events)
                    self._events.clear()
                for event in events:
                    yield self._taken(event)
        finally:
            with self._changed:
                self._wake_loop = None
            if not self._is_over:  # whoever listened has left, e.g. a client that closed its connection
                self.cancel()

    def result(self, deadline_s: float | None = None) -> Answer:
        """Wait for the end. Raises: TimeoutError after deadline_s (None: as long as events keep coming)."""
        tokens: list[int] = []
        text: list[str] = []
        until_s = None if deadline_s is None else time.monotonic() + deadline_s
        while True:
            left_s = self._wait_deadline_s if until_s is None else min(self._wait_deadline_s, max(until_s - time.monotonic(), 0.0))
            event = self._taken(self._next(left_s))
            tokens += [] if event.token is None else [event.token]
            text.append(event.text)
            if event.finish_reason is not None:
                assert event.report is not None
                return Answer(tuple(tokens), "".join(text), event.finish_reason, event.stop, event.detail, event.report)
