"""Server-sent events of an OpenAI-compatible server: from bytes, cut anywhere, to what is looked at in them.

Events are read line by line, as soon as a line is whole: nearly all have one. What does not stand on one line waits for those that follow.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec

EVENT_BYTES_MAX = 1 << 20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]  # what is counted here must not go down, nor beyond 64 bits


class Delta(msgspec.Struct):
    content: Any = None


class Choice(msgspec.Struct):
    index: Any = 0
    delta: Delta | None = None
    text: Any = None
    finish_reason: Any = None

    def said(self) -> str:
        """Its text; "" for none, and for what is no text."""
        found = (self.delta.content if self.delta is not None else None) or self.text or ""
        return found if isinstance(found, str) else ""


class Usage(msgspec.Struct):
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None


class Event(msgspec.Struct):
    """What is looked at in an event; the rest is skipped unread."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: Any = None
    metrics: Any = None


_decode = msgspec.json.Decoder(Event).decode


class BadEvent(ValueError):
    """One line about what came in place of an event."""


class EventReader:
    """Of one stream."""

    __slots__ = ("_half_event", "_half_line", "_is_begun")

    def __init__(self) -> None:
        self._half_line = b""
        self._half_event: bytes | None = None
        self._is_begun = False

    def take(self, chunk: bytes) -> Iterator[Event | None]:
        """The events that `chunk` makes whole; None for the end that the stream announces. Raises: BadEvent."""
        lines = (self._half_line + chunk).split(b"\n")
        self._half_line = lines.pop()
        if len(self._half_line) > EVENT_BYTES_MAX:
            raise BadEvent(f"an event of over {EVENT_BYTES_MAX} bytes")
        if lines and not self._is_begun:
            self._is_begun = True
            lines[0] = lines[0].removeprefix(BYTE_ORDER_MARK)
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data == b"[DONE]":
                    self.end()
                    yield None
                    return
                event = self._event(data)
                if event is not None:
                    yield event
            elif not line.strip():
                self.end()

    def end(self) -> None:
        """No further line belongs to the event that was begun. Raises: BadEvent where it is no whole one."""
        if self._half_event is not None:
            self._event(b"", is_whole=True)

    def _event(self, data: bytes, is_whole: bool = False) -> Event | None:
        """None where `data` is a part of it as yet."""
        if self._half_event is not None:
            data = self._half_event + b"\n" + data
        try:
            event = _decode(data)
        except (ValueError, RecursionError) as error:  # msgspec's own errors and those of text that is no UTF-8 are ValueErrors
            if is_whole or len(data) > EVENT_BYTES_MAX:
                raise BadEvent(f"an event is not what the API says ({str(error)[:200]})") from error
            self._half_event = data
            return None
        self._half_event = None
        if event.error is not None:
            raise BadEvent(f"error event: {str(event.error)[:200]}")
        return event
