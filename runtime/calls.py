"""What a caller asked of the service and what comes back, free of HTTP: one call is one answer. No torch, no sockets.

The gateway makes calls out of requests (n > 1 is n calls), the dispatcher takes them to a backend, and pieces come back the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from envs.domain.requests import SERVICE_CLASSES
from runtime.request_notes import AnswerTimes, CallNotes
from runtime.torch_tp.requests import SamplingSettings, TokenLogprobs

KINDS: tuple[str, ...] = ("chat", "completion")

REFUSAL_STATUS: dict[str, int] = {
    "invalid": 400,
    "too_long": 400,
    "unsupported": 400,
    "model_not_found": 404,
    "queue_full": 429,
    "class_shed": 429,
    "overloaded": 429,
    "no_capacity": 503,
    "starting": 503,
    "draining": 503,
    "attempts_spent": 503,
    "deadline": 504,
    "stream_lost": 502,
}
"""Why a call is not served, and the HTTP status that says so by default. The first four are the caller's to mend; the others pass."""
PRESSURE = frozenset(("queue_full", "class_shed", "overloaded"))
"""Refusals for which there is no other reason than that too much is asked just now."""


class Call(msgspec.Struct, frozen=True, eq=False):
    """One answer asked for. A Struct, as whatever is made for every call: a frozen dataclass runs code of its own for each field, which at
    a few calls a second finds every cache cold.

    call_id: unique in this process, begins with the request's id. prompt_ids: empty where the tokenizer is not ours; prompt_tokens: exact
    with ids, else an estimate. max_tokens: of the answer, at least 1. logprobs: None, or how many of the likeliest tokens to report beside
    the chosen one's. class_index: into SERVICE_CLASSES. priority: higher first. deadline_s: on the monotonic clock. body: the request as it
    came, for foreign backends (n, stream and the like are the gateway's business: a backend sets them anew). ignore_eos, min_tokens,
    stop_ids: as in GenerationRequest. notes: what befalls it on its way.
    """

    call_id: str
    model: str
    kind: str
    prompt_ids: tuple[int, ...]
    prompt_tokens: int
    max_tokens: int
    sampling: SamplingSettings
    stop_strings: tuple[str, ...]
    logprobs: int | None
    class_index: int
    priority: int
    session: str | None
    user: str | None
    deadline_s: float
    body: Mapping[str, Any] = msgspec.field(default_factory=dict)
    ignore_eos: bool = False
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    notes: CallNotes = msgspec.field(default_factory=CallNotes)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"Call {self.call_id!r}: kind={self.kind!r} unknown; known: {', '.join(KINDS)}")
        if self.max_tokens < 1:
            raise ValueError(f"Call {self.call_id!r}: max_tokens={self.max_tokens} must be at least 1")
        if self.prompt_ids and len(self.prompt_ids) != self.prompt_tokens:
            raise ValueError(f"Call {self.call_id!r}: prompt_tokens={self.prompt_tokens}, but there are {len(self.prompt_ids)} ids")
        if not 0 <= self.class_index < len(SERVICE_CLASSES):
            raise ValueError(f"Call {self.call_id!r}: class_index={self.class_index} unknown; there are {len(SERVICE_CLASSES)} classes")


class Piece(msgspec.Struct, frozen=True):
    """One token of an answer, or several that came together, or its end, or both.

    index: place of its first token in the answer, from 0; of an end without a token, the number of tokens. token: None in an end without
    one, where there are several, or where the backend does not say. text: what may be shown now. parts: the texts of several, one each.
    finish_reason: with the last piece ("stop", "length", …), else None. prompt_tokens, output_tokens: with the last piece; times
    too, where the backend tells them.
    """

    index: int
    token: int | None
    text: str
    logprobs: TokenLogprobs | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    parts: tuple[str, ...] = ()
    times: AnswerTimes | None = None

    @property
    def tokens(self) -> int:
        """How many it brings, as far as one can see."""
        return len(self.parts) or int(self.token is not None or bool(self.text))


class Refusal(Exception):
    """The call is not served, or not to its end; `reason` is a short name (see REFUSAL_STATUS), the message says what to do.

    retry_after_s: when it may be worth asking again; None for what asking again does not mend.
    """

    def __init__(self, reason: str, message: str, *, status: int | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.status = REFUSAL_STATUS.get(reason, 500) if status is None else status
        self.message = message
        self.retry_after_s = retry_after_s
