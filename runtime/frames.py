"""Frames on a socket between our own processes: 4 bytes of length, 4 that check it, then msgpack."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import msgspec

FRAME_BYTES_MAX = 64 * 2**20
HEAD = struct.Struct("!II")
"""Of a frame: its length, and the length again, mixed with `CHECK`: wrong bytes are known at once, not when the length that they seem to
announce does not come."""
CHECK = 0x5BA11A57


def framed(payload: bytes) -> bytes:
    """`payload` behind its head."""
    return HEAD.pack(len(payload), len(payload) ^ CHECK) + payload


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
        while len(self._buffer) >= HEAD.size:
            length, check = HEAD.unpack_from(self._buffer)
            if check != length ^ CHECK:
                raise ValueError("bytes that are no frame; is this one of our processes?")
            if length > self._bytes_max:
                raise ValueError(f"frame announces {length} bytes, at most {self._bytes_max} are allowed; is this one of our processes?")
            end = HEAD.size + length
            if len(self._buffer) < end:
                return
            payload = bytes(self._buffer[HEAD.size : end])
            del self._buffer[:end]
            yield payload

    def feed(self, data: bytes) -> Iterator[list[Any]]:
        """The messages of `frame` that are complete with `data`."""
        for payload in self.payloads(data):
            yield msgspec.msgpack.decode(payload)
