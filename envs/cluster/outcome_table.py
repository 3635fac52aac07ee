"""What became of every request of a world, as columns; rows become `RequestOutcome` values when somebody reads them."""

from __future__ import annotations

import numpy as np

from envs.domain.requests import LATENCY_PARTS, Ended, OutcomeKind, RequestOutcome
from envs.domain.snapshot import FloatArray, IntArray
from envs.group_kernel import layout as L
from envs.group_kernel.queue import copy_row
from envs.perf_model.compiled import kernel
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
    "class_refused",
    "overloaded",
)
RECORD_REASONS = ("", "queue_timeout", "preempted_too_often", "unservable")
"""Reason of each kind of finished-request record of the kernel (`layout.RECORD_*`)."""

# columns of the two arrays behind the table
(OI_KIND, OI_REASON, OI_GROUP, OI_OUTPUT_TOKENS, OI_PREEMPTIONS, OI_ATTEMPTS, OI_HIT_TOKENS) = range(7)
OUTCOME_INTS = 7
(OF_ADMITTED_S, OF_FIRST_TOKEN_S, OF_FINISH_S, OF_PARTS) = range(4)  # then one column per latency part

_OUTCOME_KINDS = tuple(OutcomeKind)  # by value

# kernel's record kind -> outcome kind and reason
_KINDS = np.zeros(4, np.int64)
_KINDS[[L.RECORD_COMPLETED, L.RECORD_TIMEOUT, L.RECORD_PREEMPTED_OUT, L.RECORD_TOO_LARGE]] = (
    OutcomeKind.COMPLETED,
    OutcomeKind.FAILED,
    OutcomeKind.FAILED,
    OutcomeKind.UNSERVABLE,
)
_REASONS = np.array([REASONS.index(reason) for reason in RECORD_REASONS], np.int64)


@kernel
def _book(record_int, record_float, count, order, sorted_int, sorted_float, table_int, table_float):
    """Sort `count` records by (finish, group) into `sorted_*` and enter them into the table, one row per request."""
    for i in range(count):  # insertion: a handful at a time, each group's own in order already
        finish_s = record_float[i, L.RF_FINISH_S]
        group = record_int[i, L.RI_GROUP]
        place = i
        while place > 0:
            before = order[place - 1]
            before_s = record_float[before, L.RF_FINISH_S]
            if before_s < finish_s or (before_s == finish_s and record_int[before, L.RI_GROUP] <= group):
                break
            order[place] = before
            place -= 1
        order[place] = i
    for i in range(count):
        ints = record_int[order[i]]
        floats = record_float[order[i]]
        copy_row(ints, sorted_int[i])
        copy_row(floats, sorted_float[i])
        row = table_int[ints[L.RI_REQUEST]]
        row[OI_KIND] = _KINDS[ints[L.RI_KIND]]
        row[OI_REASON] = _REASONS[ints[L.RI_KIND]]
        row[OI_GROUP] = ints[L.RI_GROUP]
        row[OI_OUTPUT_TOKENS] = ints[L.RI_GENERATED]
        row[OI_PREEMPTIONS] = ints[L.RI_PREEMPTIONS]
        row[OI_ATTEMPTS] = ints[L.RI_ATTEMPTS]
        row[OI_HIT_TOKENS] = ints[L.RI_HIT]
        times = table_float[ints[L.RI_REQUEST]]
        times[OF_ADMITTED_S] = floats[L.RF_ADMITTED_S]
        times[OF_FIRST_TOKEN_S] = floats[L.RF_FIRST_S]
        times[OF_FINISH_S] = floats[L.RF_FINISH_S]
        copy_row(floats[L.RF_PARTS :], times[OF_PARTS:])


class OutcomeTable:
    """One row per request of the trace; a row that was never ended stays UNFINISHED."""

    def __init__(self, trace: TraceTable) -> None:
        count = len(trace.arrival_s)
        self.trace = trace
        self._ints = np.zeros((count, OUTCOME_INTS), np.int64)
        self._floats = np.full((count, OF_PARTS + len(LATENCY_PARTS)), np.nan)
        self._sorted = (np.zeros(0, np.int64), np.zeros((0, L.RECORD_INTS), np.int64), np.zeros((0, L.RECORD_FLOATS)))
        self.kind, self.reason, self.group_index, self.output_tokens, self.preemptions, self.attempts, self.hit_tokens = self._ints.T
        self.admitted_s, self.first_token_s, self.finish_s = self._floats.T[:OF_PARTS]
        self.parts = self._floats[:, OF_PARTS:]
        self.kind[:] = OutcomeKind.UNFINISHED
        self.reason[:] = REASONS.index("run_ended")
        self.group_index[:] = -1
        self.parts[:] = 0.0
        self.ended = 0

    def book(self, record_int: IntArray, record_float: FloatArray, count: int) -> tuple[IntArray, FloatArray]:
        """Enter the kernel's first `count` records; returns them by finish time, then group (rows valid until the next call)."""
        if len(self._sorted[0]) < count:
            rows = len(record_int)
            self._sorted = (np.zeros(rows, np.int64), np.zeros_like(record_int), np.zeros_like(record_float))
        _book(record_int, record_float, count, *self._sorted, self._ints, self._floats)
        self.ended += count
        return self._sorted[1][:count], self._sorted[2][:count]

    def end(self, request_id: int, kind: OutcomeKind, reason: str, now_s: float, rows: tuple[np.ndarray, np.ndarray] | None = None) -> None:
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

    def ended_row(self, i: int) -> Ended:
        """What `objective.value_of` reads of row `i`."""
        trace, ints, floats = self.trace, self._ints, self._floats
        return Ended(
            trace.class_index.item(i), ints.item(i, OI_KIND), trace.arrival_s.item(i), floats.item(i, OF_FIRST_TOKEN_S),
            floats.item(i, OF_FINISH_S), trace.prompt_tokens.item(i), ints.item(i, OI_OUTPUT_TOKENS),
        )  # fmt: skip

    def outcome(self, i: int) -> RequestOutcome:
        """Row `i` as a value."""
        trace = self.trace
        kind, reason, group_index, output_tokens, preemptions, attempts, hit_tokens = self._ints[i].tolist()
        admitted_s, first_token_s, finish_s, *parts = self._floats[i].tolist()
        return RequestOutcome(
            request_id=i,
            class_index=int(trace.class_index[i]),
            kind=_OUTCOME_KINDS[kind],
            reason=REASONS[reason],
            group_index=group_index,
            arrival_s=float(trace.arrival_s[i]),
            admitted_s=admitted_s,
            first_token_s=first_token_s,
            finish_s=finish_s,
            prompt_tokens=int(trace.prompt_tokens[i]),
            output_tokens=output_tokens,
            preemptions=preemptions,
            attempts=max(1, attempts),
            hit_tokens=hit_tokens,
            parts=tuple(parts),
        )

    def to_outcomes(self) -> list[RequestOutcome]:
        """Every request's outcome, in trace order."""
        return [self.outcome(i) for i in range(len(self.kind))]
