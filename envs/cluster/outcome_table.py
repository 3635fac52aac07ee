"""What became of every request of a world, as columns; rows become `RequestOutcome` values when somebody reads them."""

from __future__ import annotations

import numpy as np

from envs.domain.requests import LATENCY_PARTS, OutcomeKind, RequestOutcome
from envs.group_kernel import layout as L
from envs.traces.trace_table import TraceTable

REASONS = (
    "",
    "scheduler",
    "queue_full",
    "queue_timeout",
    "unservable",
    "group_lost",
    "retries_spent",
    "run_ended",
    "breaker_open",
    "preempted_too_often",
)
RECORD_REASONS = ("", "queue_timeout", "preempted_too_often", "unservable")
"""Reason of each kind of finished-request record of the kernel (`layout.RECORD_*`)."""


class OutcomeTable:
    """One row per request of the trace; a row that was never ended stays UNFINISHED."""

    def __init__(self, trace: TraceTable) -> None:
        count = len(trace.arrival_s)
        self.trace = trace
        self.kind = np.full(count, OutcomeKind.UNFINISHED, np.int8)
        self.reason = np.full(count, REASONS.index("run_ended"), np.int8)
        self.group_index = np.full(count, -1, np.int32)
        self.admitted_s = np.full(count, np.nan)
        self.first_token_s = np.full(count, np.nan)
        self.finish_s = np.full(count, np.nan)
        self.output_tokens = np.zeros(count, np.int32)
        self.preemptions = np.zeros(count, np.int32)
        self.attempts = np.zeros(count, np.int32)
        self.hit_tokens = np.zeros(count, np.int32)
        self.parts = np.zeros((count, len(LATENCY_PARTS)))
        self.ended = 0

    def end(
        self, request_id: int, kind: OutcomeKind, reason: str, now_s: float, rows: tuple[np.ndarray, np.ndarray] | None = None
    ) -> None:
        """End a request that did not complete; `rows` are its slot rows (int, float) if it has been in a group."""
        self.kind[request_id] = kind
        self.reason[request_id] = REASONS.index(reason)
        self.finish_s[request_id] = now_s
        self.ended += 1
        if rows is not None:
            ints, floats = rows
            self.admitted_s[request_id], self.first_token_s[request_id] = floats[L.SF_ADMITTED_S], floats[L.SF_FIRST_S]
            self.output_tokens[request_id] = ints[L.SI_GENERATED]
            self.preemptions[request_id], self.attempts[request_id] = ints[L.SI_PREEMPTIONS], ints[L.SI_ATTEMPTS]

    def outcome(self, i: int) -> RequestOutcome:
        """Row `i` as a value."""
        trace = self.trace
        return RequestOutcome(
            request_id=i,
            class_index=int(trace.class_index[i]),
            kind=OutcomeKind(int(self.kind[i])),
            reason=REASONS[self.reason[i]],
            group_index=int(self.group_index[i]),
            arrival_s=float(trace.arrival_s[i]),
            admitted_s=float(self.admitted_s[i]),
            first_token_s=float(self.first_token_s[i]),
            finish_s=float(self.finish_s[i]),
            prompt_tokens=int(trace.prompt_tokens[i]),
            output_tokens=int(self.output_tokens[i]),
            preemptions=int(self.preemptions[i]),
            attempts=max(1, int(self.attempts[i])),
            hit_tokens=int(self.hit_tokens[i]),
            parts=tuple(float(part) for part in self.parts[i]),
        )

    def to_outcomes(self) -> list[RequestOutcome]:
        """Every request's outcome, in trace order."""
        return [self.outcome(i) for i in range(len(self.kind))]
