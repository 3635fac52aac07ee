"""Frames on a socket between our own processes: 4 bytes of length, then msgpack."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import msgspec

FRAME_BYTES_MAX = 64 * 2**20
_LENGTH = struct.Struct("!I")


def framed(payload: bytes) -> bytes:
    """`payload` behind its length."""
    return _LENGTH.pack(len(payload)) + payload


def frame(message: list[Any]) -> bytes:
    return framed(packed(message))


def packed(value: Any) -> bytes:
    """msgpack of plain values, dataclasses and numpy's numbers. Raises: TypeError for anything else."""
    return msgspec.msgpack.encode(value, enc_hook=_number)


def _number(value: Any) -> Any:
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} has no wire form; give dataclasses, numbers, text, bytes, lists, tuples or dicts")


class FrameCutter:
    """Cuts frames from whatever pieces a stream delivers; holds one unfinished frame. Raises: ValueError for what is none of ours."""

    def __init__(self, bytes_max: int = FRAME_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._buffer = bytearray()

    def payloads(self, data: bytes) -> Iterator[bytes]:
        """What is in every frame that is complete with `data`."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > self._bytes_max:
                raise ValueError(f"frame announces {length} bytes, at most {self._bytes_max} are allowed; is this one of our processes?")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            payload = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            yield payload

    def feed(self, data: bytes) -> Iterator[list[Any]]:
        """The messages of `frame` that are complete with `data`."""
        for payload in self.payloads(data):
            yield msgspec.msgpack.decode(payload)
