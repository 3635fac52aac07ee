"""What the gateway process and the policy process say to one another; arrays travel as float32 bytes."""

from __future__ import annotations

from typing import Any

import numpy as np

from runtime.frames import frame

READY, REFUSED, ANSWER = "ready", "refused", "answer"


def question(number: int, candidates: np.ndarray, context: np.ndarray, mask: np.ndarray) -> bytes:
    """Ask for a choice among `candidates` (C, F) in `context` (K,), allowed where `mask` (C,)."""
    return frame([number, len(candidates), candidates.tobytes(), context.tobytes(), mask.astype(np.bool_).tobytes()])


def read_question(message: list[Any]) -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
    number, rows, candidates, context, mask = message
    return (
        int(number), np.frombuffer(candidates, np.float32).reshape(rows, -1), np.frombuffer(context, np.float32),
        np.frombuffer(mask, np.bool_),
    )  # fmt: skip


def answer(number: int, index: int, outside: int, error: str, scores: np.ndarray | None = None) -> bytes:
    """index: the choice, -1 with an `error`. outside: inputs outside the range seen in training. scores (C,): where there are any."""
    return frame([ANSWER, number, index, outside, error, b"" if scores is None else scores.astype(np.float32).tobytes()])
