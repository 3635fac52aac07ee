"""Messages between controller and workers: length-prefixed msgpack, each with (epoch, plan version, step).

Knows how a frozen dataclass becomes bytes and comes back, and how frames are cut from a stream. Leaves to others what a message
means and who may send it when. Imports no torch: the controller holds none.
"""

from __future__ import annotations

import dataclasses
import hmac
import socket
import struct
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from functools import lru_cache
from typing import Any

import msgpack

PROTOCOL_VERSION = 1
FRAME_BYTES_MAX = 64 * 2**20
_LENGTH = struct.Struct("!I")


class Kind(IntEnum):
    """What a message is; after the colon its body."""

    HELLO = 0  # worker: Hello
    LOAD = 1  # controller: LoadOrder
    LOADED = 2  # worker: Loaded
    CONFIGURE = 3  # controller: Configuration
    CONFIGURED = 4  # worker: seconds taken
    STEP = 5  # controller: the batcher's StepCommand
    DONE = 6  # worker: StepDone
    FAILED = 7  # worker: Failure; what it was told to do did not happen
    PREPARE = 8  # controller: the plan to get ready for
    READY = 9  # worker: Prepared
    SWITCH = 10  # controller: Switch; from the next step on
    SWITCHED = 11  # worker: Switched
    RELEASE = 12  # controller: plan version that nobody uses any more
    PROFILE = 13  # controller: a ProfileOrder; worker: its rows
    FENCE = 14  # controller: abandon everything of this epoch
    BEAT = 15  # worker: a Beat, where no page is shared
    DIE = 16  # controller: leave


class ProtocolError(RuntimeError):
    """Bytes that are no message of ours: the connection is not to be trusted any further."""


@dataclass(frozen=True, slots=True)
class Message:
    """One frame. `epoch`, `plan_version` and `step` say what it belongs to; `body` is plain msgpack data (see `pack`)."""

    kind: Kind
    epoch: int = 0
    plan_version: int = 0
    step: int = 0
    body: Any = None


# --- dataclasses to plain data and back -------------------------------------------------------------------------------------


def pack(value: Any) -> Any:
    """Plain msgpack data of a value: a dataclass becomes the list of its fields in order, an enum its value."""
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [pack(getattr(value, name)) for name in _field_names(type(value))]
    if isinstance(value, str | bytes | int | float | bool) or value is None:
        return value
    if isinstance(value, Mapping):
        return {pack(key): pack(item) for key, item in value.items()}
    if isinstance(value, Sequence | set | frozenset):
        return [pack(item) for item in value]
    raise TypeError(f"pack: {type(value).__name__} has no wire form; give dataclasses, numbers, text, bytes, sequences or mappings")


@lru_cache(maxsize=256)
def _field_names(cls: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(cls))


def unpack(cls: Any, data: Any) -> Any:
    """The value of type `cls` that `pack` made `data` from. Raises: ProtocolError when the data has another shape."""
    try:
        return _decoder(cls)(data)
    except (TypeError, ValueError, KeyError) as error:
        raise ProtocolError(f"message body is no {getattr(cls, '__name__', cls)}: {error}") from error


@lru_cache(maxsize=512)
def _decoder(cls: Any) -> Callable[[Any], Any]:
    origin, arguments = typing.get_origin(cls), typing.get_args(cls)
    if isinstance(cls, type) and dataclasses.is_dataclass(cls):
        return _dataclass_decoder(cls)
    if origin in (typing.Union, types.UnionType):
        return _union_decoder(arguments)
    if origin in (tuple, list, set, frozenset) or (isinstance(origin, type) and issubclass(origin, Sequence)):
        return _sequence_decoder(tuple if origin not in (list, set, frozenset) else origin, arguments)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        key, value = _decoder(arguments[0]), _decoder(arguments[1])
        return lambda data: {key(k): value(v) for k, v in data.items()}
    if isinstance(cls, type) and issubclass(cls, Enum):
        return cls
    if cls is float:
        return float  # an integral float may travel as an int
    if isinstance(cls, type) and cls in (int, str, bytes, bool):
        return lambda data: _checked(cls, data)
    return lambda data: data


def _checked(cls: type, data: Any) -> Any:
    if not isinstance(data, cls):
        raise TypeError(f"{data!r} where {cls.__name__} was expected")
    return data


def _dataclass_decoder(cls: type) -> Callable[[Any], Any]:
    hints = typing.get_type_hints(cls)
    decoders = [_decoder(hints[field.name]) for field in dataclasses.fields(cls)]
    name, count = cls.__name__, len(decoders)

    def decode(data: Any) -> Any:
        if not isinstance(data, list | tuple) or len(data) != count:
            raise TypeError(f"{name} has {count} fields, got {data!r}")
        return cls(*[decoder(item) for decoder, item in zip(decoders, data, strict=True)])

    return decode


def _union_decoder(arguments: tuple[Any, ...]) -> Callable[[Any], Any]:
    others = [argument for argument in arguments if argument is not type(None)]
    if len(others) != 1:  # only X | None carries its type on the wire
        return lambda data: data
    decoder = _decoder(others[0])
    return lambda data: None if data is None else decoder(data)


def _sequence_decoder(container: Any, arguments: tuple[Any, ...]) -> Callable[[Any], Any]:
    if container is tuple and arguments and arguments[-1] is not Ellipsis and len(arguments) > 1:
        decoders = [_decoder(argument) for argument in arguments]
        return lambda data: tuple(decoder(item) for decoder, item in zip(decoders, data, strict=True))
    decoder = _decoder(arguments[0]) if arguments else (lambda item: item)
    if decoder is float or not arguments or arguments[0] is Any:
        return lambda data: container(data)
    return lambda data: container([decoder(item) for item in data])


# --- frames -----------------------------------------------------------------------------------------------------------------


def encode(message: Message) -> bytes:
    """One frame: 4 bytes of length, then msgpack. Raises: ProtocolError for a body over FRAME_BYTES_MAX."""
    fields = [int(message.kind), message.epoch, message.plan_version, message.step, pack(message.body)]
    payload: bytes = msgpack.packb(fields, use_bin_type=True)
    if len(payload) > FRAME_BYTES_MAX:
        raise ProtocolError(f"{message.kind.name} of {len(payload)} bytes is over {FRAME_BYTES_MAX}; move bulk data by the communicator")
    return _LENGTH.pack(len(payload)) + payload


class FrameReader:
    """Cuts messages from whatever pieces a stream delivers; holds at most one unfinished frame."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """Yield every message that is complete with `data`. Raises: ProtocolError for anything that is none of ours."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > FRAME_BYTES_MAX:
                raise ProtocolError(f"frame announces {length} bytes, at most {FRAME_BYTES_MAX} are allowed; is this one of our workers?")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            payload = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            yield _message(payload)


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
