"""Messages between controller and workers: length-prefixed msgpack, each with (epoch, plan version, step).

Knows how a dataclass becomes bytes and comes back, checked, and how frames are cut from a stream. Leaves to others what a message
means and who may send it when. Imports no torch: the controller holds none.
"""

from __future__ import annotations

import hmac
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import msgspec

from runtime.frames import FRAME_BYTES_MAX, FrameCutter, framed, packed

PROTOCOL_VERSION = 5


class Kind(IntEnum):
    """What a message is; after the colon its body."""

    HELLO = 0  # worker: Hello
    LOAD = 1  # controller: LoadOrder
    LOADED = 2  # worker: Loaded
    CONFIGURE = 3  # controller: Configuration
    CONFIGURED = 4  # worker: Configured
    STEP = 5  # controller: StepOrder
    DONE = 6  # worker: StepDone
    FAILED = 7  # worker: Failure; what it was told to do did not happen
    PREPARE = 8  # controller: PrepareOrder
    READY = 9  # worker: Prepared
    SWITCH = 10  # controller: SwitchOrder
    SWITCHED = 11  # worker: Switched
    RELEASE = 12  # controller: plan version that nobody uses any more
    PROFILE = 13  # controller: ReduceOrder; worker: its rows
    FENCE = 14  # controller: abandon everything of this epoch
    BEAT = 15  # worker: Beat, where no page is shared
    DIE = 16  # controller: leave
    CARRY = 17  # controller: CarryOrder
    CARRIED = 18  # worker: Carried


class ProtocolError(RuntimeError):
    """Bytes that are no message of ours: the connection is not to be trusted any further."""


@dataclass(frozen=True, slots=True)
class Message:
    """One frame. `epoch`, `plan_version` and `step` say what it belongs to; `body` is
    a dataclass on its way out, and what `unpack` takes on its way in."""

    kind: Kind
    epoch: int = 0
    plan_version: int = 0
    step: int = 0
    body: Any = None


def unpack(cls: Any, data: Any) -> Any:
    """The value of type `cls` whose wire form is `data`. Raises: ProtocolError when the data has another shape."""
    try:
        return msgspec.convert(data, cls)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"message body is no {getattr(cls, '__name__', cls)}: {error}") from error


def encode(message: Message) -> bytes:
    """One frame of `runtime.frames`. Raises: ProtocolError for a body over FRAME_BYTES_MAX."""
    fields = (message.kind, message.epoch, message.plan_version, message.step, message.body)
    payload = packed(fields)
    if len(payload) > FRAME_BYTES_MAX:
        raise ProtocolError(f"{message.kind.name} of {len(payload)} bytes is over {FRAME_BYTES_MAX}; move bulk data by the communicator")
    return framed(payload)


class FrameReader:
    """Cuts messages from whatever pieces a stream delivers; holds at most one unfinished frame."""

    def __init__(self) -> None:
        self._cutter = FrameCutter(FRAME_BYTES_MAX)

    def feed(self, data: bytes) -> Iterator[Message]:
        """Yield every message that is complete with `data`. Raises: ProtocolError for anything that is none of ours."""
        try:
            for payload in self._cutter.payloads(data):
                yield _message(payload)
        except ValueError as error:
            raise ProtocolError(str(error)) from error


def _message(payload: bytes) -> Message:
    try:
        return Message(*msgspec.msgpack.decode(payload, type=tuple[Kind, int, int, int, Any]))
    except msgspec.DecodeError as error:
        raise ProtocolError(f"{len(payload)} bytes are no message: {error}") from error


def receive(connection: socket.socket, reader: FrameReader) -> list[Message] | None:
    """Block for the next bytes and return the messages they complete; None when the other side has closed."""
    try:
        data = connection.recv(1 << 16)
    except (ConnectionError, OSError):
        return None
    return list(reader.feed(data)) if data else None


def tokens_match(given: str, expected: str) -> bool:
    """Compare two secrets in constant time."""
    return hmac.compare_digest(given.encode(), expected.encode())
