"""The last requests as plain data, for `/admin/requests`: where the time of each went, try by try. Made when asked; says nothing of what
was asked or answered."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import Any

from envs.domain.requests import LATENCY_PARTS, SERVICE_CLASSES
from runtime.request_notes import AttemptNotes, RequestNotes

REASON_CHARS_MAX = 256


def requests_told(recent: Iterable[RequestNotes]) -> dict[str, Any]:
    """Newest first; a number that nobody knows is None."""
    now_s, now_unix_s = time.monotonic(), time.time()
    return {"requests": [_request(notes, now_unix_s - now_s) for notes in reversed(list(recent))]}


def _request(notes: RequestNotes, epoch_s: float) -> dict[str, Any]:
    return {
        "request_id": notes.request_id,
        "at_s": epoch_s + notes.ended_s,
        "kind": notes.kind,
        "model": notes.model,
        "service_class": SERVICE_CLASSES[notes.class_index].name if notes.class_index >= 0 else None,
        "stream": notes.is_stream,
        "status": notes.status,
        "error": notes.error,
        "degraded": notes.degraded,
        "prompt_tokens": notes.prompt_tokens,
        "output_tokens": notes.output_tokens,
        "took_s": notes.ended_s - notes.arrival_s,
        "prompt_s": _known(notes.prompt_made_s - notes.arrival_s),
        "ttft_s": _known(notes.first_text_s - notes.arrival_s),
        "answers": [{"attempts": [_attempt(attempt, notes) for attempt in call.attempts]} for call in notes.calls],
    }


def _attempt(attempt: AttemptNotes, notes: RequestNotes) -> dict[str, Any]:
    ended_s = attempt.ended_s if math.isfinite(attempt.ended_s) else notes.ended_s
    times = attempt.times
    return {
        "group": attempt.group,
        "source": attempt.source,
        "cause": attempt.cause,
        "outcome": attempt.outcome or "abandoned",
        "reason": attempt.reason[:REASON_CHARS_MAX],
        "began_s": attempt.placed_s - notes.arrival_s,
        "held_s": attempt.placed_s - attempt.asked_s,
        "took_s": ended_s - attempt.placed_s,
        "first_s": _known(attempt.first_s - attempt.placed_s),
        "tokens": attempt.tokens,
        "queue_s": None if times is None else times.queue_s,
        "prefill_s": None if times is None else times.prefill_s,
        "decode_s": None if times is None else times.decode_s,
        "parts": None if times is None or not times.parts else dict(zip(LATENCY_PARTS, times.parts, strict=True)),
    }


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None
