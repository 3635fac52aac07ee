"""One try of a call at a group: booked where every decision sees it, its pieces in time, and what came of it told to the breaker, the
telemetry and the ledger. Which group, and what comes after a lost attempt, is others' business."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing

import msgspec
import numpy as np

from envs.decision import predictor as P
from envs.decision.circuit_breaker import BreakerPanel, Outcome, ProbeLease, State
from envs.domain.requests import Request
from runtime.backends.interface import Backend, BackendBusy, BackendError, BackendFault, BadCall, Begun, GivenBack
from runtime.calls import Call, Piece, Refusal
from runtime.request_notes import AttemptNotes
from runtime.scheduling.call_ledger import CallLedger
from runtime.scheduling.dispatch_settings import DispatchSettings
from runtime.scheduling.group_keeper import GroupKeeper
from runtime.scheduling.held_calls import HeldCalls
from runtime.scheduling.in_flight import Flight
from runtime.scheduling.online_scheduler import Decided
from runtime.scheduling.stream_pace import StreamPace
from runtime.scheduling.stream_watch import StreamWatch
from runtime.scheduling.telemetry import Telemetry

REPORT_FRESH_S = 1.0
RUNG_PER_END = 2  # held calls that ask again when an attempt ends; all of them do every report period


class Attempt(msgspec.Struct, eq=False):
    """One try of a call at a group; booked in the telemetry until `over`."""

    flight: Flight
    group_index: int
    began_s: float
    expected_s: tuple[float, float] | None
    lease: ProbeLease | None
    declared_gap_s: float  # what its declared hardware takes for a token, 0 where nobody has predicted it
    notes: AttemptNotes
    first_s: float = math.nan
    last_s: float = math.nan


class Lost(Exception):
    """The attempt came to nothing, by the group's fault; the message says how."""


class Silent(Lost):
    """It stood still after some tokens: what comes next in another group is progress all the same."""


class Attempts:
    """Makes attempts at `backends`. served (groups,): attempts so far; engine_counts (groups, 3): preemptions, and prompt tokens looked up
    and found in a prefix cache; busy: groups that said so and have answered nobody since. `settings` may be replaced at any time."""

    def __init__(
        self,
        backends: Sequence[Backend],
        telemetry: Telemetry,
        panel: BreakerPanel,
        groups: GroupKeeper,
        held_calls: HeldCalls,
        ledger: CallLedger,
        settings: DispatchSettings,
        now_s: Callable[[], float],
    ) -> None:
        self._backends, self._telemetry, self._panel, self._groups = backends, telemetry, panel, groups
        self._held_calls, self._ledger, self.settings, self._now_s = held_calls, ledger, settings, now_s
        self.served = np.zeros(len(backends), np.int64)
        self.engine_counts = np.zeros((len(backends), 3), np.int64)
        self.busy: set[int] = set()
        self._pace = [StreamPace() for _ in backends]

    def book(self, call: Call, request: Request, begun: Begun, decided: Decided, asked_s: float) -> Attempt:
        """The reservation: from now on every decision sees the call in its group."""
        g, now_s = decided.command.group_index, self._now_s()
        key = P.queue_key(request.arrival_s, request.class_index, self.settings.head_start_s)
        flight = self._telemetry.flights.add(request, call.call_id, g, key, now_s, begun.pieces)
        breaker = self._panel.breakers[g]
        lease = breaker.try_probe() if breaker.state is State.HALF_OPEN else None
        self.served[g] += 1
        declared_gap_s = decided.expected_s[1] / decided.pace if decided.expected_s is not None else 0.0
        noted = AttemptNotes(self._backends[g].name, decided.source, decided.cause, asked_s, now_s, decided.expected_s)
        return Attempt(flight, g, now_s, decided.expected_s, lease, declared_gap_s, call.notes.begin(noted))

    async def pieces(self, call: Call, begun: Begun, attempt: Attempt) -> AsyncIterator[Piece]:
        """Pieces of one attempt, its deadlines kept and its outcome told to the breaker. Raises: BackendError, Lost, Refusal."""
        g, backend = attempt.group_index, self._backends[attempt.group_index]
        outcome, reason, generated, finished = Outcome.NEUTRAL, "", begun.pieces, False
        watch = StreamWatch(self._now_s, lambda: self._prolonged_s(call, attempt))
        attempt.flight.recall = watch.interrupt
        try:
            async with aclosing(backend.submit(call, begun)) as pieces:
                while not finished:
                    piece = await self._next_piece(pieces, call, attempt, watch)
                    if piece.index < generated and piece.token is not None:
                        raise Lost(f"{backend.name} sent token {piece.index} again")
                    generated = max(generated, piece.index + piece.tokens)
                    self._note_piece(attempt, generated)
                    if piece.finish_reason == "error":
                        raise Lost(f"{backend.name}: its engine gave the call up")
                    finished = piece.finish_reason is not None
                    if finished:
                        attempt.notes.times = piece.times
                    yield piece
            outcome = Outcome.OK
        except BackendBusy as busy:
            self._panel.breakers[g].record_backpressure(max(0.0, busy.retry_after_s), attempt.lease)
            self.busy.add(g)
            attempt.lease = None
            attempt.notes.outcome = "busy"
            raise
        except (BackendFault, Lost) as error:
            outcome, reason = Outcome.FAULT, str(error)
            raise
        except GivenBack:
            attempt.notes.outcome = "moved"
            raise
        except BadCall:
            raise
        except BackendError as error:
            outcome, reason = Outcome.FAULT, str(error)
            raise Lost(str(error)) from error
        except (OSError, ValueError, RuntimeError) as error:  # a backend that breaks its word is no better than one that broke
            outcome, reason = Outcome.FAULT, f"{type(error).__name__}: {error}"
            raise Lost(reason) from error
        finally:
            watch.close()
            if finished:
                outcome = Outcome.OK
            self._end_attempt(attempt, outcome, reason, generated)

    async def _next_piece(self, pieces: AsyncIterator[Piece], call: Call, attempt: Attempt, watch: StreamWatch) -> Piece:
        """Raises: Lost when it does not come in time or the stream ends; Refusal when the caller's deadline passes."""
        limit_s = self._patience_s(attempt)
        until_s = min(limit_s, call.deadline_s)
        try:
            return await watch.next(pieces, until_s)
        except StopAsyncIteration:
            raise Lost("the stream ended without a finish reason") from None
        except TimeoutError:
            now_s = self._now_s()
            if call.deadline_s <= max(limit_s, now_s):
                raise Refusal("deadline", "its deadline passed while it was served") from None
            is_silent = not math.isnan(attempt.first_s)
            waited_s = max(limit_s, now_s) - (attempt.last_s if is_silent else attempt.began_s)
            what = "silent" if is_silent else "no first token"
            kind = Silent if is_silent else Lost
            raise kind(f"{self._backends[attempt.group_index].name}: {what} for {waited_s:.1f} s") from None

    def _prolonged_s(self, call: Call, attempt: Attempt) -> float:
        """Until when a silent attempt may go on all the same: where no other group could take the call and its own reports that it has it
        in hand, asking that one again would only begin anew what it is about to do. 0 elsewhere."""
        g, now_s, settings = attempt.group_index, self._now_s(), self.settings
        others = self._groups.alive() & self._telemetry.fits(call.prompt_tokens + call.max_tokens)
        others[g] = False
        report = self._telemetry.reports[g]
        if others.any() or report is None or report.progress is None or now_s - report.at_s > REPORT_FRESH_S:
            return 0.0
        if not any(item.call_id == call.call_id for item in report.progress):
            return 0.0
        since_s = attempt.began_s if math.isnan(attempt.last_s) else attempt.last_s
        return min(now_s + REPORT_FRESH_S, since_s + settings.silence_alone_s, call.deadline_s)

    def _patience_s(self, attempt: Attempt) -> float:
        """Clock time until which the next piece must be here."""
        settings = self.settings
        if math.isnan(attempt.first_s):
            predicted_s = attempt.expected_s[0] if attempt.expected_s is not None else 0.0
            return attempt.began_s + max(settings.first_token_floor_s, settings.first_token_multiple * predicted_s)
        pace = self._pace[attempt.group_index]
        return attempt.last_s + pace.silence_limit_s(settings.silence_multiple, settings.silence_slack_s)

    def _note_piece(self, attempt: Attempt, generated: int) -> None:
        now_s, g = self._now_s(), attempt.group_index
        flights = self._telemetry.flights
        if math.isnan(attempt.first_s):
            attempt.first_s = now_s
            flights.first_token(attempt.flight, now_s)
        else:
            gap_s = now_s - attempt.last_s
            self._pace[g].observe(gap_s)
            self._telemetry.gap_seen(g, gap_s, attempt.declared_gap_s)
        attempt.last_s = now_s
        self._groups.token_made(g, now_s)
        flights.tokens(attempt.flight, generated)

    def _end_attempt(self, attempt: Attempt, outcome: Outcome, reason: str, generated: int) -> None:
        now_s, g, flight = self._now_s(), attempt.group_index, attempt.flight
        self._telemetry.flights.remove(flight)
        self._ledger.attempt_ended(flight.request.request_id, attempt.first_s, attempt.last_s, generated, outcome is Outcome.OK)
        took_s, expected_s = now_s - attempt.began_s, math.inf
        notes = attempt.notes
        notes.first_s, notes.last_s, notes.ended_s, notes.tokens = attempt.first_s, attempt.last_s, now_s, generated - flight.started
        notes.outcome, notes.reason = notes.outcome or outcome.name.lower(), reason
        if notes.times is not None and notes.times.hit_tokens is not None:
            self.engine_counts[g] += (notes.times.preemptions or 0, flight.request.prompt_tokens, notes.times.hit_tokens)
        if outcome is Outcome.OK and not flight.started:
            request = flight.request
            seen_s = (attempt.first_s - request.arrival_s, (attempt.last_s - attempt.first_s) / max(1, generated - 1))
            self._telemetry.answer_ended(now_s, g, request.class_index, generated, attempt.expected_s, seen_s)
            if attempt.expected_s is not None:
                expected_s = attempt.expected_s[0] + generated * attempt.expected_s[1] + 0.1
        self._panel.breakers[g].record(
            outcome, began_s=attempt.began_s, took_s=took_s, expected_s=expected_s, lease=attempt.lease, reason=reason or "fault"
        )
        if outcome is Outcome.OK:
            self.busy.discard(g)
        self._held_calls.ring(RUNG_PER_END)
