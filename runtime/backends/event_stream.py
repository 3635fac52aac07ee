"""What an OpenAI-compatible server sends: its event stream cut into events, what is looked at in one, and the words of its errors."""

from __future__ import annotations

import math
from typing import Annotated, Any

import msgspec

EVENT_BYTES_MAX = 1 << 20
DONE = b"[DONE]"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
RETRY_AFTER_DEFAULT_S = 1.0

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]  # what is counted here must not go down, nor beyond 64 bits


class Delta(msgspec.Struct):
    content: Any = None


class EventChoice(msgspec.Struct):
    index: Any = 0
    delta: Delta | None = None
    text: Any = None
    finish_reason: Any = None

    @property
    def shown(self) -> str:
        """The text that it brings."""
        found = (self.delta.content if self.delta is not None else None) or self.text or ""
        return found if isinstance(found, str) else ""


class Usage(msgspec.Struct):
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None


class Event(msgspec.Struct):
    """What is looked at in an event of a stream, or in a whole answer; the rest is skipped unread."""

    model: Any = None
    choices: list[EventChoice] | None = None
    usage: Usage | None = None
    error: Any = None
    metrics: Any = None


decode_json = msgspec.json.Decoder().decode
decode_event = msgspec.json.Decoder(Event).decode
"""Raises: ValueError, RecursionError."""


class EventLines:
    """Cuts a stream's bytes, as they come, into the data of its events.

    An event's data nearly always stands on one line, and is handed on with its end. A line that cannot be all of it waits for those that
    belong to it, up to the empty line after them.
    """

    __slots__ = ("_begun", "_held", "_is_first")

    def __init__(self) -> None:
        self._begun = b""
        self._held: list[bytes] = []
        self._is_first = True

    @property
    def is_whole(self) -> bool:
        """Whether no event is begun: at the end of a stream, that nothing of it is missing."""
        return not self._held

    def feed(self, chunk: bytes) -> list[bytes]:
        """Data of the events that are whole now. Raises: ValueError for one that has no end."""
        lines = (self._begun + chunk).split(b"\n") if self._begun else chunk.split(b"\n")
        self._begun = lines.pop()
        if len(self._begun) + sum(map(len, self._held)) > EVENT_BYTES_MAX:
            raise ValueError(f"an event of over {EVENT_BYTES_MAX} bytes")
        if lines and self._is_first:
            self._is_first = False
            lines[0] = lines[0].removeprefix(BYTE_ORDER_MARK)
        found = []
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data != DONE and (self._held or not data.endswith(b"}")):
                    self._held.append(data)
                    continue
                found += self._joined()
                found.append(data)
            elif self._held and not line.strip():
                found += self._joined()
        return found

    def _joined(self) -> list[bytes]:
        """The event on several lines that is whole now, if there is one."""
        held, self._held = self._held, []
        return [b"\n".join(held)] if held else []


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
