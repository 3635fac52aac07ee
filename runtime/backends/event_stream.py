"""What an OpenAI-compatible server sends: its event stream cut into events, what is looked at in one, and the words of its errors."""

from __future__ import annotations

import math
from typing import Annotated, Any

import msgspec

EVENT_BYTES_MAX = 1 << 20
DONE = b"[DONE]"
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
    """Cuts a stream's bytes, as they come, into the data of its events."""

    __slots__ = ("_begun",)

    def __init__(self) -> None:
        self._begun = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """Data of the events that are whole now. Raises: ValueError for one that has no end."""
        lines = (self._begun + chunk).split(b"\n") if self._begun else chunk.split(b"\n")
        self._begun = lines.pop()
        if len(self._begun) > EVENT_BYTES_MAX:
            raise ValueError(f"an event of over {EVENT_BYTES_MAX} bytes")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


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
