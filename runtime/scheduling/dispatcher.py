"""Takes a call to its end: admission, decision, attempts with deadlines, outcomes for the breakers, and going on elsewhere.

A stream that is cut or falls silent goes on in another group after the tokens that its caller has: each comes once. Nothing here waits
without a limit, and no group's trouble is another's: attempts share no pool and no lock.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from agents.heuristics import make as make_heuristic
from envs.decision import predictor as P
from envs.decision.circuit_breaker import BreakerPanel, BreakerSettings, ClassBreaker, Outcome, ProbeLease, State
from envs.decision.class_timeouts import ClassTimeouts
from envs.decision.overload import OverloadControl
from envs.decision.retry_budget import RetryBudget
from envs.domain.commands import Command, CommandKind
from envs.domain.requests import SERVICE_CLASSES, Request
from envs.domain.snapshot import BoolArray, ClusterSnapshot
from runtime.backends.interface import NOTHING, Backend, BackendBusy, BackendError, BackendFault, BadCall, Begun, GivenBack
from runtime.calls import Call, Piece, Refusal
from runtime.request_notes import AttemptNotes
from runtime.scheduling.call_ledger import CallLedger
from runtime.scheduling.dispatch_settings import DispatchSettings
from runtime.scheduling.group_keeper import GroupKeeper
from runtime.scheduling.held_calls import HeldCalls
from runtime.scheduling.in_flight import Flight
from runtime.scheduling.online_scheduler import OVERLOADED, Decided, OnlineScheduler, Question
from runtime.scheduling.policy_guard import PolicyGuard
from runtime.scheduling.prefix_memory import PrefixMemory, block_keys
from runtime.scheduling.rehearsal import rehearse_answers, rehearse_decision
from runtime.scheduling.served_plans import ServedPlans
from runtime.scheduling.stream_pace import StreamPace
from runtime.scheduling.stream_watch import StreamWatch
from runtime.scheduling.telemetry import Telemetry

logger = logging.getLogger(__name__)

RETRY_AFTER_MIN_S = 0.1
RETRY_AFTER_MAX_S = 30.0
HELD_AT_ONCE_S = 1.0  # a held call looks again after so long, whatever happens
REPORT_FRESH_S = 1.0
RUNG_PER_END = 2  # held calls that ask again when an attempt ends; all of them do every report period


@dataclass(slots=True, eq=False)
class _Attempt:
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


class _Lost(Exception):
    """The attempt came to nothing, by the group's fault; the message says how."""


class _Silent(_Lost):
    """It stood still after some tokens: what comes next in another group is progress all the same."""


class Dispatcher:
    """Serves calls by `backends`, one per group of the cluster, in its order. `counts`: what happened, by name."""

    def __init__(
        self,
        backends: Sequence[Backend],
        telemetry: Telemetry,
        settings: DispatchSettings | None = None,
        guard: PolicyGuard | None = None,
        breaker_settings: BreakerSettings | None = None,
        now_s: Callable[[], float] = time.monotonic,
        seed: int | None = None,
    ) -> None:
        if len(backends) != len(telemetry.groups):
            raise ValueError(f"Dispatcher: {len(backends)} backends for {len(telemetry.groups)} groups; give one each")
        self.backends, self.telemetry, self.settings, self._now_s = list(backends), telemetry, settings or DispatchSettings(), now_s
        chosen = self.settings
        rng = np.random.default_rng(seed)
        breaker_rng, class_rng, heuristic_rng = rng.spawn(3)
        self.panel = BreakerPanel(len(self.backends), now_s=now_s, settings=breaker_settings, rng=breaker_rng)
        self.class_breaker = ClassBreaker([chosen.class_timeout_fraction] * len(SERVICE_CLASSES), now_s=now_s, rng=class_rng)
        self.retries = RetryBudget(attempts_max=chosen.attempts_max)
        self._heuristic_rng = heuristic_rng
        heuristic = make_heuristic("route", chosen.heuristic, heuristic_rng)
        self.scheduler = OnlineScheduler(self.view, lambda: telemetry.experience.tables, heuristic, guard, now_s)
        self.overload = OverloadControl()
        self._follow(chosen)
        self.ledger = CallLedger(now_s)
        self.counts: Counter[str] = Counter()
        self.served = np.zeros(len(self.backends), np.int64)  # attempts by group
        self.engine_counts = np.zeros((len(self.backends), 3), np.int64)  # preemptions, prompt tokens looked up and found in a prefix cache
        self.in_flight = 0
        self.is_draining = False
        self._next_id = 0
        self._timeouts = ClassTimeouts(chosen.limit_multiplier, chosen.class_timeout_limits)
        self._pace = [StreamPace() for _ in self.backends]
        self._was_busy: set[int] = set()
        self.prefixes = PrefixMemory(np.array([backend.keeps_prefixes for backend in self.backends], np.bool_))
        self.held_calls = HeldCalls()
        self.plans = ServedPlans(telemetry, now_s)
        self.groups = GroupKeeper(
            self.backends, telemetry, self.panel, self.prefixes, self.held_calls, chosen, self.counts, now_s, self.plans
        )

    # --- life ---------------------------------------------------------------------------------------------------------------

    def load_kernels(self) -> None:
        """Do once what will be computed for calls, so that none waits for the compiled code to be loaded (a second)."""
        rehearse_decision(self.scheduler, len(self.backends), self._now_s())
        rehearse_answers(self.telemetry.cluster)

    async def start(self) -> None:
        """Start every group that is not parked; returns when one can serve. The others are waited for and kept up beside."""
        if self.scheduler.guard is not None:
            await self.scheduler.guard.client.start()
        await self.groups.start()

    async def close(self) -> None:
        await self.groups.close()
        if self.scheduler.guard is not None:
            await self.scheduler.guard.client.close()

    def apply(self, settings: DispatchSettings) -> None:
        """Live by other limits from now on; calls under way keep the deadlines they have. Those of `FIXED` are the old ones'."""
        if settings.heuristic != self.settings.heuristic:
            self.scheduler.heuristic = make_heuristic("route", settings.heuristic, self._heuristic_rng)
        self.settings = self.groups.settings = settings
        self.retries.attempts_max = settings.attempts_max
        self._follow(settings)

    def _follow(self, settings: DispatchSettings) -> None:
        """Nothing is judged where nobody wants to know."""
        self.overload.sheds = settings.sheds_overload
        is_wanted = settings.sheds_overload or bool(settings.degrade_max_tokens)
        self.scheduler.overload = self.overload if is_wanted else None

    async def drain(self, deadline_s: float) -> bool:
        """Take no new calls, wait for those inside; whether all came to their end within `deadline_s`."""
        self.is_draining = True
        end_s = self._now_s() + deadline_s
        while self.in_flight and self._now_s() < end_s:
            await asyncio.sleep(0.05)
        return self.in_flight == 0

    # --- what the gateway asks ----------------------------------------------------------------------------------------------

    def view(self) -> ClusterSnapshot:
        """Snapshot of the present."""
        alive = self.groups.alive()
        allows = self.panel.admits()
        flights = self.telemetry.flights
        for g in self._was_busy:  # until it has answered again, one call at a time asks whether it is still busy
            if flights.running[g] or flights.waiting[g]:
                allows[g] = False
        return self.telemetry.snapshot(
            self._now_s(), alive, allows & alive, self.panel.states(), self.held_calls.count, self.telemetry.cluster.limits.hold_limit
        )

    async def is_ready(self) -> bool:
        """Whether a token can really be made (K22), and new calls are taken."""
        return not self.is_draining and await self.groups.is_ready()

    async def run(self, call: Call) -> AsyncIterator[Piece]:
        """The answer's pieces in order, the last one with a finish reason. Raises: Refusal, at once or between two pieces.

        Closing the iterator, or cancelling the task that waits for its next piece, ends the work at once.
        """
        if (guard := self.scheduler.guard) is not None:
            guard.expect()
        try:
            request, lease = self._admit(call)
        except Refusal as refusal:
            self.counts[f"refused_{refusal.reason}"] += 1
            self.ledger.turned_away(call, refusal.reason)
            raise
        call = self._degraded(call)
        self.ledger.open(call, request)
        has_timed_out: bool | None = None
        self.in_flight += 1
        try:
            async with aclosing(self._serve(call, request)) as pieces:
                async for piece in pieces:
                    if piece.index == 0 and has_timed_out is None:
                        has_timed_out = self._is_late(request)
                    yield piece
        except Refusal as refusal:
            has_timed_out = True if refusal.reason in ("deadline", "attempts_spent") else has_timed_out
            self.counts[f"refused_{refusal.reason}"] += 1
            self.ledger.refused(request.request_id, refusal.reason)
            raise
        finally:
            self.in_flight -= 1
            self.ledger.close(request.request_id)
            if has_timed_out is not None:
                self.class_breaker.record(request.class_index, has_timed_out, began_s=request.arrival_s, lease=lease)
            elif lease is not None:
                self.class_breaker.breakers[request.class_index].release(lease)

    def _is_late(self, request: Request) -> bool:
        return self._timeouts.is_late(request.class_index, request.prompt_tokens, self._now_s() - request.arrival_s)

    # --- the door -----------------------------------------------------------------------------------------------------------

    def _admit(self, call: Call) -> tuple[Request, ProbeLease | None]:
        """Raises: Refusal for what cannot be served, or not now; nothing was queued then."""
        now_s = self._now_s()
        tokens = call.prompt_tokens + call.max_tokens
        context = self.telemetry.cluster.limits.context_tokens
        if tokens > context or not self._fits(call).any():
            most = min(context, int(self.telemetry.kv_tokens.max(initial=0)))
            asked = f"{call.prompt_tokens} prompt tokens and max_tokens={call.max_tokens}"
            raise Refusal("too_long", f"{asked} need {tokens}; at most {most} can be served")
        if self.is_draining:
            raise _refusal("draining", "the service is shutting down", 1.0)
        if self.in_flight >= self.settings.in_flight_max:
            raise _refusal("queue_full", f"{self.in_flight} calls are being served; at most that many", 1.0)
        if not self.groups.any_alive():
            raise _refusal("no_capacity", "no group can serve now", self._retry_after_s())
        admission = self.class_breaker.admit(call.class_index)
        if not admission.is_allowed:
            name = SERVICE_CLASSES[call.class_index].name
            raise _refusal("class_shed", f"class {name} is shed: too many of its requests timed out", admission.retry_after_s)
        self._next_id += 1
        self.telemetry.arrived(now_s, call.class_index, call.prompt_tokens)
        return Request(self._next_id, now_s, max(1, call.prompt_tokens), call.class_index, call.session), admission.lease

    def _degraded(self, call: Call) -> Call:
        """The call as it is served: with a shorter answer where its class may be degraded and the pressure is high."""
        most = self.settings.degrade_max_tokens.get(SERVICE_CLASSES[call.class_index].name)
        if most is None or self.overload.strain(call.priority, self._now_s()) < self.settings.degrade_above:
            return call
        most = max(most, call.min_tokens)
        if call.max_tokens <= most:
            return call
        self.counts["degraded"] += 1
        call.notes.degraded = f"max_tokens={most}"
        return replace(call, max_tokens=most)

    def _fits(self, call: Call) -> BoolArray:
        return np.asarray(self.telemetry.kv_tokens >= call.prompt_tokens + call.max_tokens)

    def _retry_after_s(self) -> float:
        """Until a breaker's time comes, within bounds."""
        wait_s = self.panel.next_change_s() - self._now_s()
        return min(RETRY_AFTER_MAX_S, max(RETRY_AFTER_MIN_S, wait_s)) if math.isfinite(wait_s) else 1.0

    # --- one call -----------------------------------------------------------------------------------------------------------

    async def _serve(self, call: Call, request: Request) -> AsyncIterator[Piece]:
        sent, failed, attempts, is_retry, is_counted = _Sent(), set[int](), 0, False, True
        back: GivenBack | None = None
        is_new = True
        self.retries.start_request()
        try:
            while True:
                begun = sent.begun()
                if attempts or back is not None:
                    begun = replace(begun, waited_s=self._now_s() - request.arrival_s)
                if back is None or (attempt := await self._go_on_at(back, call, request, begun)) is None:
                    attempt = await self._place(call, request, begun, frozenset(failed), is_new)
                elif back.copy_s is not None:
                    begun = replace(begun, kv_tokens=call.prompt_tokens + begun.pieces)
                attempts, back, is_new = attempts + 1, None, False
                attempt.flight.continues_at = partial(self._continues_at, call, sent)
                try:
                    async with aclosing(self._attempt(call, begun, attempt)) as pieces:
                        async for piece in pieces:
                            if is_retry and piece.finish_reason is None:  # it runs again: an attempt like any other
                                self.retries.finish(True)
                                self.retries.start_request()
                                is_retry = False
                            sent.add(piece)
                            yield piece
                            if piece.finish_reason is not None:
                                return
                    raise _Lost("the stream ended without a finish reason")
                except BackendBusy as busy:
                    self.counts["busy"] += 1
                    attempts -= 1  # "not now" is no try: bounded by the deadline and by the pauses that groups ask for
                    after_s = max(busy.retry_after_s, RETRY_AFTER_MIN_S)
                    if self._now_s() - request.arrival_s > self.settings.hold_max_s + after_s:
                        raise _refusal("queue_full", f"every group is busy: {busy}", after_s) from busy
                    continue
                except GivenBack as given:  # by command, or since its pool shrank: nobody's fault, and no try
                    self.counts["given_back"] += 1
                    attempts, back = attempts - 1, given
                except BadCall as error:
                    raise Refusal(error.reason, str(error), status=error.status) from error
                except (BackendFault, _Lost) as error:
                    logger.info("attempt lost call=%s group=%s reason=%s", call.call_id, self.backends[attempt.group_index].name, error)
                    self.counts["attempts_lost"] += 1
                    attempts -= isinstance(error, _Silent)  # slow groups spend no tries: its tokens and its deadline bound those
                    failed.add(attempt.group_index)
                    self.retries.finish(is_retry)
                    is_counted = False
                    await self._await_retry(attempts, call, str(error))
                    is_retry = is_counted = True
                    request = replace(request, attempts=attempts)
        finally:
            if is_counted:
                self.retries.finish(is_retry)

    def _continues_at(self, call: Call, sent: _Sent, g: int) -> bool:
        return bool(self._fits(call)[g]) and (not sent.pieces or self.backends[g].continues(call, sent.begun()))

    async def _go_on_at(self, back: GivenBack, call: Call, request: Request, begun: Begun) -> _Attempt | None:
        """An attempt at the group that a moved call was promised, its KV copied if that was the cheaper way; None where it takes no
        calls."""
        asked_s = self._now_s()
        if back.copy_s:
            await asyncio.sleep(min(back.copy_s, max(0.0, call.deadline_s - self._now_s())))
        g = back.target
        if (
            g is None
            or not (self.view().accepts[g] and self._fits(call)[g])
            or (begun.pieces and not self.backends[g].continues(call, begun))
        ):
            return None
        self.prefixes.remember(g, block_keys(call.prompt_ids), int(self.telemetry.kv_tokens[g]))
        return self._book(call, request, begun, Decided(Command(CommandKind.ROUTE, g), "moved", "", None, 0.0), asked_s)

    async def _await_retry(self, attempts: int, call: Call, reason: str) -> None:
        """Until the budget has room for one more retry. Raises: Refusal."""
        end_s = min(self._now_s() + self.settings.retry_wait_s, call.deadline_s)
        attempts_max = self.settings.attempts_of(call.class_index)
        while not self.retries.try_start_retry(attempts, attempts_max):
            if attempts >= attempts_max or self._now_s() >= end_s:
                raise _refusal("attempts_spent", f"given up after {attempts} attempt(s), the last: {reason}", self._retry_after_s())
            await asyncio.sleep(0.01)
        self.counts["retries"] += 1

    async def _place(self, call: Call, request: Request, begun: Begun, failed: frozenset[int], is_new: bool) -> _Attempt:
        """Ask where the call goes, and hold it until somebody takes it; is_new: it may be shed. Raises: Refusal."""
        asked_s = self._now_s()
        hold_until_s = min(asked_s + self.settings.hold_max_s, call.deadline_s)
        keys = block_keys(call.prompt_ids)
        placed: list[_Attempt] = []

        def reserve(decided: Decided) -> None:
            if decided.command.kind is CommandKind.ROUTE:
                placed.append(self._book(call, request, begun, decided, asked_s))

        while True:
            fits, excluded = self._fits(call), self._excluded(call, begun, failed)
            may_hold = self._now_s() < hold_until_s
            # a parked group is started for a queue: where there is one, that must be seen
            may_shed = is_new and not self.telemetry.is_parked.any()
            question = Question(request, fits, excluded, may_hold, self.prefixes.hits(keys), call.priority if may_shed else None)
            decided = await self.scheduler.decide(question, reserve)
            if placed:
                g = placed[0].group_index
                self.prefixes.remember(g, keys, int(self.telemetry.kv_tokens[g]))
                return placed[0]
            if decided.cause == OVERLOADED:
                raise _refusal("overloaded", "more is asked than can be served in time", decided.retry_after_s)
            alive = self.groups.alive() & fits
            alive[list(excluded)] = False
            if not alive.any() and not begun.pieces and not failed:
                raise _refusal("no_capacity", "no group can serve this now", self._retry_after_s())
            is_full = self.held_calls.count >= self.telemetry.cluster.limits.hold_limit
            is_refused = decided.command.kind is CommandKind.REFUSE
            if is_refused and may_hold and is_full and self.held_calls.make_room(call.priority):
                is_refused = is_full = False
            if is_refused and (not may_hold or is_full):
                if self._now_s() >= call.deadline_s:
                    raise _refusal("deadline", "its deadline passed while it waited")
                reason = "queue_full" if alive.any() else "no_capacity"
                raise _refusal(reason, f"no group took it within {self.settings.hold_max_s:g} s", self._retry_after_s())
            if is_refused and alive.any():
                raise _refusal("queue_full", "the scheduler refused it", self._retry_after_s())
            wait_s = max(0.0, min(hold_until_s - self._now_s(), HELD_AT_ONCE_S)) + 1e-3
            if not await self.held_calls.wait(wait_s, call.priority):
                raise _refusal("overloaded", "calls of higher priority wait in its place", self._retry_after_s())

    def _excluded(self, call: Call, begun: Begun, failed: frozenset[int]) -> frozenset[int]:
        """Groups that may not take the call (on): those that failed it, unless no other one lives, and those that cannot go on exactly."""
        if not failed and not begun.pieces:
            return failed
        alive = self.groups.alive()
        stuck = frozenset(g for g in failed if alive[[i for i in range(len(alive)) if i not in failed]].any() or not alive[g])
        if not begun.pieces:
            return stuck
        cannot = frozenset(b.group_index for b in self.backends if not b.continues(call, begun))
        if len(cannot) == len(self.backends):
            raise Refusal("stream_lost", "the stream was lost and cannot go on exactly where it stopped", status=502)
        return stuck | cannot

    def _book(self, call: Call, request: Request, begun: Begun, decided: Decided, asked_s: float) -> _Attempt:
        """The reservation: from now on every decision sees the call in its group."""
        g, now_s = decided.command.group_index, self._now_s()
        key = P.queue_key(request.arrival_s, request.class_index, self.settings.head_start_s)
        flight = self.telemetry.flights.add(request, call.call_id, g, key, now_s, begun.pieces)
        breaker = self.panel.breakers[g]
        lease = breaker.try_probe() if breaker.state is State.HALF_OPEN else None
        self.served[g] += 1
        declared_gap_s = decided.expected_s[1] / decided.pace if decided.expected_s is not None else 0.0
        noted = AttemptNotes(self.backends[g].name, decided.source, decided.cause, asked_s, now_s, decided.expected_s)
        return _Attempt(flight, g, now_s, decided.expected_s, lease, declared_gap_s, call.notes.begin(noted))

    async def _attempt(self, call: Call, begun: Begun, attempt: _Attempt) -> AsyncIterator[Piece]:
        """Pieces of one attempt, its deadlines kept and its outcome told to the breaker. Raises: BackendError, _Lost, Refusal."""
        g, backend = attempt.group_index, self.backends[attempt.group_index]
        outcome, reason, generated, finished = Outcome.NEUTRAL, "", begun.pieces, False
        watch = StreamWatch(self._now_s, lambda: self._prolonged_s(call, attempt))
        attempt.flight.recall = watch.interrupt
        try:
            async with aclosing(backend.submit(call, begun)) as pieces:
                while not finished:
                    piece = await self._next_piece(pieces, call, attempt, watch)
                    if piece.index < generated and piece.token is not None:
                        raise _Lost(f"{backend.name} sent token {piece.index} again")
                    generated = max(generated, piece.index + piece.tokens)
                    self._note_piece(attempt, generated)
                    if piece.finish_reason == "error":
                        raise _Lost(f"{backend.name}: its engine gave the call up")
                    finished = piece.finish_reason is not None
                    if finished:
                        attempt.notes.times = piece.times
                    yield piece
            outcome = Outcome.OK
        except BackendBusy as busy:
            self.panel.breakers[g].record_backpressure(max(0.0, busy.retry_after_s), attempt.lease)
            self._was_busy.add(g)
            attempt.lease = None
            attempt.notes.outcome = "busy"
            raise
        except (BackendFault, _Lost) as error:
            outcome, reason = Outcome.FAULT, str(error)
            raise
        except GivenBack:
            attempt.notes.outcome = "moved"
            raise
        except BadCall:
            raise
        except BackendError as error:
            outcome, reason = Outcome.FAULT, str(error)
            raise _Lost(str(error)) from error
        except (OSError, ValueError, RuntimeError) as error:  # a backend that breaks its word is no better than one that broke
            outcome, reason = Outcome.FAULT, f"{type(error).__name__}: {error}"
            raise _Lost(reason) from error
        finally:
            watch.close()
            if finished:
                outcome = Outcome.OK
            self._end_attempt(attempt, outcome, reason, generated)

    async def _next_piece(self, pieces: AsyncIterator[Piece], call: Call, attempt: _Attempt, watch: StreamWatch) -> Piece:
        """Raises: _Lost when it does not come in time or the stream ends; Refusal when the caller's deadline passes."""
        limit_s = self._patience_s(attempt)
        until_s = min(limit_s, call.deadline_s)
        try:
            return await watch.next(pieces, until_s)
        except StopAsyncIteration:
            raise _Lost("the stream ended without a finish reason") from None
        except TimeoutError:
            now_s = self._now_s()
            if call.deadline_s <= max(limit_s, now_s):
                raise Refusal("deadline", "its deadline passed while it was served") from None
            is_silent = not math.isnan(attempt.first_s)
            waited_s = max(limit_s, now_s) - (attempt.last_s if is_silent else attempt.began_s)
            what = "silent" if is_silent else "no first token"
            kind = _Silent if is_silent else _Lost
            raise kind(f"{self.backends[attempt.group_index].name}: {what} for {waited_s:.1f} s") from None

    def _prolonged_s(self, call: Call, attempt: _Attempt) -> float:
        """Until when a silent attempt may go on all the same: where no other group could take the call and its own reports that it has it
        in hand, asking that one again would only begin anew what it is about to do. 0 elsewhere."""
        g, now_s, settings = attempt.group_index, self._now_s(), self.settings
        others = self.groups.alive() & self._fits(call)
        others[g] = False
        report = self.telemetry.reports[g]
        if others.any() or report is None or report.progress is None or now_s - report.at_s > REPORT_FRESH_S:
            return 0.0
        if not any(item.call_id == call.call_id for item in report.progress):
            return 0.0
        since_s = attempt.began_s if math.isnan(attempt.last_s) else attempt.last_s
        return min(now_s + REPORT_FRESH_S, since_s + settings.silence_alone_s, call.deadline_s)

    def _patience_s(self, attempt: _Attempt) -> float:
        """Clock time until which the next piece must be here."""
        settings = self.settings
        if math.isnan(attempt.first_s):
            predicted_s = attempt.expected_s[0] if attempt.expected_s is not None else 0.0
            return attempt.began_s + max(settings.first_token_floor_s, settings.first_token_multiple * predicted_s)
        pace = self._pace[attempt.group_index]
        return attempt.last_s + pace.silence_limit_s(settings.silence_multiple, settings.silence_slack_s)

    def _note_piece(self, attempt: _Attempt, generated: int) -> None:
        now_s, g = self._now_s(), attempt.group_index
        flights = self.telemetry.flights
        if math.isnan(attempt.first_s):
            attempt.first_s = now_s
            flights.first_token(attempt.flight, now_s)
        else:
            gap_s = now_s - attempt.last_s
            self._pace[g].observe(gap_s)
            self.telemetry.gap_seen(g, gap_s, attempt.declared_gap_s)
        attempt.last_s = now_s
        self.groups.token_made(g, now_s)
        flights.tokens(attempt.flight, generated)

    def _end_attempt(self, attempt: _Attempt, outcome: Outcome, reason: str, generated: int) -> None:
        now_s, g, flight = self._now_s(), attempt.group_index, attempt.flight
        self.telemetry.flights.remove(flight)
        self.ledger.attempt_ended(flight.request.request_id, attempt.first_s, attempt.last_s, generated, outcome is Outcome.OK)
        took_s, expected_s = now_s - attempt.began_s, math.inf
        notes = attempt.notes
        notes.first_s, notes.last_s, notes.ended_s, notes.tokens = attempt.first_s, attempt.last_s, now_s, generated - flight.started
        notes.outcome, notes.reason = notes.outcome or outcome.name.lower(), reason
        if notes.times is not None and notes.times.hit_tokens is not None:
            self.engine_counts[g] += (notes.times.preemptions or 0, flight.request.prompt_tokens, notes.times.hit_tokens)
        if outcome is Outcome.OK and not flight.started:
            request = flight.request
            seen_s = (attempt.first_s - request.arrival_s, (attempt.last_s - attempt.first_s) / max(1, generated - 1))
            self.telemetry.answer_ended(now_s, g, request.class_index, generated, attempt.expected_s, seen_s)
            if attempt.expected_s is not None:
                expected_s = attempt.expected_s[0] + generated * attempt.expected_s[1] + 0.1
        self.panel.breakers[g].record(
            outcome, began_s=attempt.began_s, took_s=took_s, expected_s=expected_s, lease=attempt.lease, reason=reason or "fault"
        )
        if outcome is Outcome.OK:
            self._was_busy.discard(g)
        self.held_calls.ring(RUNG_PER_END)


@dataclass(slots=True, eq=False)
class _Sent:
    """What the caller of one answer has so far."""

    tokens: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    pieces: int = 0

    def add(self, piece: Piece) -> None:
        if piece.token is not None:
            self.tokens.append(piece.token)
        self.text.append(piece.text)
        self.pieces += piece.tokens

    def begun(self) -> Begun:
        return Begun(tuple(self.tokens), "".join(self.text), self.pieces) if self.pieces else NOTHING


def _refusal(reason: str, message: str, retry_after_s: float | None = None) -> Refusal:
    return Refusal(reason, message, retry_after_s=retry_after_s)
