"""What the gateway process and the policy process say to one another: a length, then msgpack; arrays as float32 bytes."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import msgpack
import numpy as np

FRAME_BYTES_MAX = 16 * 2**20
_LENGTH = struct.Struct("!I")

READY, REFUSED, ANSWER = "ready", "refused", "answer"


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


def question(number: int, candidates: np.ndarray, context: np.ndarray, mask: np.ndarray) -> bytes:
    """Ask for a choice among `candidates` (C, F) in `context` (K,), allowed where `mask` (C,)."""
    return frame([number, len(candidates), candidates.tobytes(), context.tobytes(), mask.astype(np.bool_).tobytes()])


def read_question(message: list[Any]) -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
    number, rows, candidates, context, mask = message
    return (
        int(number), np.frombuffer(candidates, np.float32).reshape(rows, -1), np.frombuffer(context, np.float32),
        np.frombuffer(mask, np.bool_),
    )  # fmt: skip


def answer(number: int, index: int, outside: int, error: str) -> bytes:
    """index: the choice, -1 with an `error`. outside: inputs outside the range seen in training."""
    return frame([ANSWER, number, index, outside, error])
