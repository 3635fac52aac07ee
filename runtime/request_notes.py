"""What befell a request on its way, noted once by whoever carries it: traces, the last requests on the page and vLLM's histograms read it.

A note costs a few attributes; nothing is formatted, looked up or sent here. All times are of this process's monotonic clock, NaN where the
event never came.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

ATTEMPTS_NOTED_MAX = 16
"""Of one call. A busy fleet may be asked more often: then the last place is used again."""


@dataclass(frozen=True, slots=True)
class AnswerTimes:
    """Where an answer's time went in its group, as that group's own clock has it; seconds.

    queue_s: from its coming to its admission; prefill_s: to its first token; decode_s: to its last. parts: by LATENCY_PARTS, empty where
    the engine does not tell them. preemptions, hit_tokens (prompt tokens that the prefix cache held): None where it does not count.
    """

    queue_s: float
    prefill_s: float
    decode_s: float
    parts: tuple[float, ...] = ()
    preemptions: int | None = None
    hit_tokens: int | None = None


class AttemptNotes(msgspec.Struct, eq=False):
    """One try of a call at a group. source, cause: who chose the group, and why not the policy. asked_s: when the call began to look for a
    group; placed_s: when it had one. expected_s: predicted TTFT and TPOT. outcome: "ok", "fault", "neutral", "busy" or "moved", "" while
    under way. span_id: 0 where nobody traces."""

    group: str
    source: str
    cause: str
    asked_s: float
    placed_s: float
    expected_s: tuple[float, float] | None = None
    first_s: float = math.nan
    last_s: float = math.nan
    ended_s: float = math.nan
    tokens: int = 0
    outcome: str = ""
    reason: str = ""
    times: AnswerTimes | None = None
    span_id: int = 0


class CallNotes(msgspec.Struct, eq=False):
    """One answer. made: attempts so far, of which the first ones and the last are kept. trace: where it is traced. degraded: what was
    taken from it under pressure, as `x-ballast-degraded` tells it. has_smaller: refused under pressure, it may go to the smaller model.
    when_over: told when its request is over, whatever came after a refusal."""

    attempts: list[AttemptNotes] = msgspec.field(default_factory=list)
    made: int = 0
    trace: TraceIds | None = None
    degraded: str = ""
    has_smaller: bool = False
    when_over: Callable[[], None] | None = None

    def begin(self, attempt: AttemptNotes) -> AttemptNotes:
        if self.trace is not None:
            attempt.span_id = self.trace.next_span_id()
        self.made += 1
        if len(self.attempts) == ATTEMPTS_NOTED_MAX:
            self.attempts.pop()
        self.attempts.append(attempt)
        return attempt

    def traceparent(self) -> str | None:
        """W3C Trace Context of the attempt under way, for a server that traces too; None where nobody traces."""
        if self.trace is None or not self.attempts:
            return None
        return f"00-{self.trace.trace_id:032x}-{self.attempts[-1].span_id:016x}-01"


class TraceIds:
    """A request's place in a trace. parent_id: the caller's span, 0 for none."""

    __slots__ = ("_draw", "parent_id", "span_id", "trace_id")

    def __init__(self, trace_id: int, parent_id: int, draw: Callable[[int], int]) -> None:
        """draw: so many random bits."""
        self.trace_id, self.parent_id, self._draw = trace_id, parent_id, draw
        self.span_id = self.next_span_id()

    def next_span_id(self) -> int:
        return self._draw(64) or 1


class RequestNotes(msgspec.Struct, eq=False):
    """One request, from its head to its answer's last byte. error: reason of a refusal, "" for none; "departed" for a caller that left.
    answered_by: the smaller model that answered it, "" where its own did."""

    request_id: str
    kind: str
    arrival_s: float
    prompt_made_s: float = math.nan
    first_text_s: float = math.nan
    ended_s: float = math.nan
    model: str = ""
    class_index: int = -1
    is_stream: bool = False
    status: int = 0
    error: str = ""
    finish_reasons: tuple[str, ...] = ()
    prompt_tokens: int = 0
    output_tokens: int = 0
    calls: list[CallNotes] = msgspec.field(default_factory=list)
    trace: TraceIds | None = None
    answered_by: str = ""

    @property
    def degraded(self) -> str:
        """What was taken from its answers under pressure, as `x-ballast-degraded` tells it; "" for nothing, nearly always."""
        return ", ".join(sorted({call.degraded for call in self.calls if call.degraded}))
