"""What an OpenAI-compatible server sends: its event stream, from bytes cut anywhere to what is looked at in an event, and the words of its
errors.

Events are read line by line, as soon as a line is whole: nearly all have one. What does not stand on one line waits for those that follow.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec

EVENT_BYTES_MAX = 1 << 20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
RETRY_AFTER_DEFAULT_S = 1.0
TOKEN_CHARS_MAX = 512
"""More than any token of a real vocabulary has. A server that goes on for ever would fill the memory of an answer that is not streamed."""
OF_THE_OPERATOR = (401, 403, 404, 405, 408)
"""A wrong key, a model that is not there, a path that is not: nothing of these is the caller's, who is served elsewhere."""

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
    """What is looked at in an event of a stream, or in a whole answer; the rest is skipped unread."""

    model: Any = None
    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: Any = None
    metrics: Any = None


decode_json = msgspec.json.Decoder().decode
_decode = msgspec.json.Decoder(Event).decode


class BadEvent(ValueError):
    """One line about what came in place of an event."""


def event_of(data: bytes) -> Event:
    """Raises: BadEvent for what the API does not know, and for an error."""
    try:
        event = _decode(data)
    except (ValueError, RecursionError) as error:  # msgspec's own errors and those of text that is no UTF-8 are ValueErrors
        raise BadEvent(f"an event is not what the API says ({str(error)[:200]})") from error
    if event.error is not None:
        raise BadEvent(f"error event: {str(event.error)[:200]}")
    return event


class EventReader:
    """Of one stream."""

    __slots__ = ("_half_line", "_held", "_held_bytes", "_is_begun")

    def __init__(self) -> None:
        self._half_line = b""
        self._held: list[bytes] = []  # lines of an event that is not whole yet
        self._held_bytes = 0
        self._is_begun = False

    def take(self, chunk: bytes) -> Iterator[tuple[bytes, Event] | None]:
        """The events that `chunk` makes whole, each with its data on one line; None for the end that the stream announces. Raises:
        BadEvent."""
        lines = (self._half_line + chunk).split(b"\n")
        self._half_line = lines.pop()
        if len(self._half_line) + self._held_bytes > EVENT_BYTES_MAX:
            raise BadEvent(f"an event of over {EVENT_BYTES_MAX} bytes")
        if lines and not self._is_begun:
            self._is_begun = True
            lines[0] = lines[0].removeprefix(BYTE_ORDER_MARK)
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data == b"[DONE]":
                    yield from self._released()
                    yield None
                    return
                if (found := self._whole(data)) is not None:
                    yield found
            elif not line.strip():
                yield from self._released()

    def end(self) -> None:
        """Nothing more comes. Raises: BadEvent where an event was begun."""
        if self._held:
            raise BadEvent("it ended in the middle of an event")

    def _whole(self, data: bytes) -> tuple[bytes, Event] | None:
        """None where `data` is a part of an event, which then waits for its end: looked at with every line of it, a long one would take
        the square of its length."""
        if not self._held:
            try:
                event = _decode(data)
            except (ValueError, RecursionError):
                pass
            else:
                return data, event if event.error is None else event_of(data)
        self._held.append(data)
        self._held_bytes += len(data)
        if self._held_bytes > EVENT_BYTES_MAX:
            raise BadEvent(f"an event of over {EVENT_BYTES_MAX} bytes")
        return None

    def _released(self) -> Iterator[tuple[bytes, Event]]:
        """The event on several lines, if there is one. Between its lines there is nothing but space, as far as JSON goes."""
        if self._held:
            data = b" ".join(self._held)
            self._held, self._held_bytes = [], 0
            yield data, event_of(data)


def seconds_of(retry_after: str | None) -> float:
    """Of a Retry-After header, finite and >= 0; the default for none, for a date and for nonsense."""
    try:
        after_s = float(retry_after) if retry_after is not None else RETRY_AFTER_DEFAULT_S
    except ValueError:
        return RETRY_AFTER_DEFAULT_S
    return max(0.0, after_s) if math.isfinite(after_s) else RETRY_AFTER_DEFAULT_S


def message_of(text: str) -> str:
    """The message of an error body, whatever its shape."""
    try:
        body = decode_json(text.encode())
    except (msgspec.DecodeError, RecursionError):
        return " ".join(text.split())[:300]
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)[:300]
