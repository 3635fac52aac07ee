"""Messages between processes of the service: a length, then msgpack, over a socket pair."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import msgpack

FRAME_BYTES_MAX = 64 * 2**20
_LENGTH = struct.Struct("!I")


def frame(message: list[Any]) -> bytes:
    payload: bytes = msgpack.packb(message, use_bin_type=True)
    return _LENGTH.pack(len(payload)) + payload


class FrameCutter:
    """Cuts messages from whatever pieces a stream delivers. Raises: ValueError for what is none of ours."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[list[Any]]:
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > FRAME_BYTES_MAX:
                raise ValueError(f"frame announces {length} bytes, at most {FRAME_BYTES_MAX} are allowed")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            payload = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            yield msgpack.unpackb(payload, raw=False)
