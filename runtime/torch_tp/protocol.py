"""Messages between controller and workers: length-prefixed msgpack, each with (epoch, plan version, step).

Knows how a frozen dataclass becomes bytes and comes back, and how frames are cut from a stream. Leaves to others what a message
means and who may send it when. Imports no torch: the controller holds none.
"""

from __future__ import annotations

import dataclasses
import hmac
import socket
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Any

import msgpack

from runtime.frames import FRAME_BYTES_MAX, FrameCutter, framed

PROTOCOL_VERSION = 2


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


# --- dataclasses to plain data and back -------------------------------------------------------------------------------------


def _plain(value: Any) -> list[Any]:
    """For what msgpack does not know: a dataclass becomes the list of its fields in order."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, name) for name in _field_names(type(value))]
    raise TypeError(f"{type(value).__name__} has no wire form; give dataclasses, numbers, text, bytes, lists, tuples or dicts")


@lru_cache(maxsize=256)
def _field_names(cls: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(cls))


def unpack(cls: Any, data: Any) -> Any:
    """The value of type `cls` whose wire form is `data`. Raises: ProtocolError when the data has another shape."""
    try:
        return _decoder(cls)(data)
    except (TypeError, ValueError, KeyError) as error:
        raise ProtocolError(f"message body is no {getattr(cls, '__name__', cls)}: {error}") from error


@lru_cache(maxsize=512)
def _decoder(cls: Any) -> Callable[[Any], Any]:
    """Bodies are made of dataclasses, tuples, lists, X | None and scalars."""
    origin, arguments = typing.get_origin(cls), typing.get_args(cls)
    if dataclasses.is_dataclass(cls):
        return _dataclass_decoder(cls)
    if origin in (typing.Union, types.UnionType):
        decoder = _decoder(arguments[0])
        return lambda data: None if data is None else decoder(data)
    if origin is tuple and arguments[-1] is not Ellipsis:
        decoders = [_decoder(argument) for argument in arguments]
        return lambda data: tuple(decoder(item) for decoder, item in zip(decoders, data, strict=True))
    if origin in (tuple, list):
        return _sequence_decoder(origin, arguments[0])
    if cls is float:
        return float  # an integral float may travel as an int
    if cls in _SCALARS:
        return _scalar_decoder(cls)
    raise TypeError(f"{cls} has no wire form")


_SCALARS = (int, str, bytes, bool)


def _scalar_decoder(cls: type) -> Callable[[Any], Any]:
    def decode(data: Any) -> Any:
        if not isinstance(data, cls):
            raise TypeError(f"{data!r} where {cls.__name__} was expected")
        return data

    return decode


def _dataclass_decoder(cls: Any) -> Callable[[Any], Any]:
    hints = typing.get_type_hints(cls)
    decoders = [_decoder(hints[field.name]) for field in dataclasses.fields(cls)]
    name, count = cls.__name__, len(decoders)

    def decode(data: Any) -> Any:
        if not isinstance(data, list | tuple) or len(data) != count:
            raise TypeError(f"{name} has {count} fields, got {data!r}")
        return cls(*[decoder(item) for decoder, item in zip(decoders, data, strict=True)])

    return decode


def _sequence_decoder(container: Any, cls: Any) -> Callable[[Any], Any]:
    decoder = _decoder(cls)

    def decode(data: Any) -> Any:
        if cls in _SCALARS and set(map(type, data)) <= {cls}:  # at once: a prompt is thousands of numbers
            return container(data)
        return container([decoder(item) for item in data])

    return decode


# --- frames -----------------------------------------------------------------------------------------------------------------


def encode(message: Message) -> bytes:
    """One frame: 4 bytes of length, then msgpack. Raises: ProtocolError for a body over FRAME_BYTES_MAX."""
    fields = [int(message.kind), message.epoch, message.plan_version, message.step, message.body]
    payload: bytes = msgpack.packb(fields, default=_plain)
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
        fields = msgpack.unpackb(payload, raw=False, strict_map_key=False)
        kind, epoch, plan_version, step, body = fields
        return Message(Kind(kind), epoch, plan_version, step, body)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
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
