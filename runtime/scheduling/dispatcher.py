"""Takes a call to its end: admission, decision, attempts with deadlines, outcomes for the breakers, and going on elsewhere.

A stream that is cut or falls silent goes on in another group after the tokens that its caller has: each comes once. Nothing here waits
without a limit, and no group's trouble is another's: attempts share no pool and no lock.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import numpy as np

from agents.heuristics import make as make_heuristic
from envs.decision import predictor as P
from envs.decision.circuit_breaker import BreakerPanel, BreakerSettings, ClassBreaker, Outcome, ProbeLease, State
from envs.decision.retry_budget import RetryBudget
from envs.domain.commands import CommandKind
from envs.domain.requests import SERVICE_CLASSES, Request
from envs.domain.snapshot import BoolArray, ClusterSnapshot
from runtime.backends.interface import NOTHING, Backend, BackendBusy, BackendError, BackendFault, BadCall, Begun
from runtime.calls import Call, Piece, Refusal
from runtime.scheduling.in_flight import Flight
from runtime.scheduling.online_scheduler import Decided, OnlineScheduler, Question
from runtime.scheduling.policy_guard import PolicyGuard
from runtime.scheduling.prefix_memory import PrefixMemory, block_keys
from runtime.scheduling.stream_pace import StreamPace
from runtime.scheduling.stream_watch import StreamWatch
from runtime.scheduling.telemetry import Telemetry

logger = logging.getLogger(__name__)

RETRY_AFTER_MIN_S = 0.1
RETRY_AFTER_MAX_S = 30.0
RUNG_PER_END = 2  # held calls that ask again when an attempt ends; all of them do every report period


@dataclass(frozen=True, slots=True)
class DispatchSettings:
    """Limits and habits; times in s.

    in_flight_max: calls inside, held ones included. hold_max_s: longest wait for a group to take a call. attempts_max: of one call.
    retry_wait_s: how long a retry waits for the budget. first_token_floor_s, first_token_multiple: an attempt without a first token is
    given up after max(floor, multiple x predicted) . silence_multiple, silence_slack_s: a started stream after multiple x its group's
    median gap + slack. report_period_s: how often groups are asked for their reports. ready_within_s: a token so young proves that
    tokens can be made, and a probe gets as long. restart_s: first wait before a dead group is started again, doubled up to restart_max_s.
    class_timeout_fraction, class_timeout_limits: as in the simulated world.
    """

    in_flight_max: int = 4096
    hold_max_s: float = 2.0
    attempts_max: int = 4
    retry_wait_s: float = 2.0
    first_token_floor_s: float = 5.0
    first_token_multiple: float = 5.0
    silence_multiple: float = 3.0
    silence_slack_s: float = 1.5
    report_period_s: float = 0.1
    restart_s: float = 0.5
    restart_max_s: float = 30.0
    heuristic: str = "net_utility"
    limit_multiplier: float = 1.0
    head_start_s: float = 2.0
    class_timeout_fraction: float = 0.8
    class_timeout_limits: float = 10.0
    ready_within_s: float = 1.4


@dataclass(slots=True, eq=False)
class _Attempt:
    """One try of a call at a group; booked in the telemetry until `over`."""

    flight: Flight
    group_index: int
    began_s: float
    expected_s: tuple[float, float] | None
    lease: ProbeLease | None
    declared_gap_s: float  # what its declared hardware takes for a token, 0 where nobody has predicted it
    first_s: float = math.nan
    last_s: float = math.nan


class _Lost(Exception):
    """The attempt came to nothing, by the group's fault; the message says how."""


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
        heuristic = make_heuristic("route", chosen.heuristic, heuristic_rng)
        self.scheduler = OnlineScheduler(self.view, lambda: telemetry.experience.tables, heuristic, guard, now_s)
        self.counts: Counter[str] = Counter()
        self.served = np.zeros(len(self.backends), np.int64)  # attempts by group
        self.in_flight = 0
        self.held = 0
        self.is_draining = False
        self._next_id = 0
        self._timeouts = (P.class_limits(chosen.limit_multiplier)[:, :2] * chosen.class_timeout_limits).tolist()
        self._pace = [StreamPace() for _ in self.backends]
        self._last_token_s = np.full(len(self.backends), -math.inf)
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._tasks: list[asyncio.Task[None]] = []
        self._was_busy: set[int] = set()
        self.prefixes = PrefixMemory(np.array([backend.keeps_prefixes for backend in self.backends], np.bool_))
        self._probing: dict[int, asyncio.Task[None]] = {}
        self._is_up = np.zeros(len(self.backends), np.bool_)

    # --- life ---------------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start every group that is not parked; returns when one can serve. The others are waited for and kept up beside."""
        if self.scheduler.guard is not None:
            await self.scheduler.guard.client.start()
        started = asyncio.Event()
        for backend in self.backends:
            if not self.telemetry.is_parked[backend.group_index]:
                self._tasks.append(asyncio.create_task(self._keep(backend, started), name=f"keeper-{backend.name}"))
        self._tasks.append(asyncio.create_task(self._watch(), name="telemetry-watch"))
        await started.wait()

    async def close(self) -> None:
        tasks = [*self._tasks, *self._probing.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(backend.close() for backend in self.backends), return_exceptions=True)
        if self.scheduler.guard is not None:
            await self.scheduler.guard.client.close()

    async def drain(self, deadline_s: float) -> bool:
        """Take no new calls, wait for those inside; whether all came to their end within `deadline_s`."""
        self.is_draining = True
        end_s = self._now_s() + deadline_s
        while self.in_flight and self._now_s() < end_s:
            await asyncio.sleep(0.05)
        return self.in_flight == 0

    async def _keep(self, backend: Backend, started: asyncio.Event) -> None:
        """Start a group, watch that its process lives, start it again; its breaker is forced open while it is gone."""
        g, wait_s = backend.group_index, self.settings.restart_s
        while True:
            try:
                await backend.start()
            except Exception as error:  # whatever it was, the others serve on
                logger.warning("group not started group=%s reason=%s", backend.name, error)
                self.panel.breakers[g].force_open(f"not started: {error}")
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, self.settings.restart_max_s)
                continue
            self.telemetry.forget(g)
            self.prefixes.forget(g)
            self._is_up[g] = True
            self.panel.breakers[g].revive()
            started.set()
            self._ring()
            began_s = self._now_s()
            while backend.is_alive:
                await asyncio.sleep(0.05)
            self._is_up[g] = False
            self.panel.breakers[g].force_open("its process is gone")
            logger.warning("group lost group=%s", backend.name)
            self.counts["groups_lost"] += 1
            self._ring()
            if self._now_s() - began_s > 60.0:
                wait_s = self.settings.restart_s
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, self.settings.restart_max_s)

    async def _watch(self) -> None:
        """Hand reports to the telemetry, and let held calls ask again when a breaker's time has come."""
        while True:
            await asyncio.sleep(self.settings.report_period_s)
            for backend in self.backends:
                try:
                    report = backend.report()
                    if report is not None:
                        self.telemetry.take_report(backend.group_index, report)
                except Exception as error:  # one group's nonsense must not blind us to the others
                    self.counts["bad_reports"] += 1
                    logger.error("report not understood group=%s reason=%s: %s", backend.name, type(error).__name__, error)
            for g in self.panel.due_probes().tolist():
                self._probe_half_open(g)
            if self.held:
                self._ring()

    def _probe_half_open(self, g: int) -> None:
        """A group on its way back is asked for a token of nobody's, so that its return does not hang on a scheduler's taste (K13)."""
        if self._probing.get(g) is not None or (lease := self.panel.breakers[g].try_probe()) is None:
            return

        async def probe() -> None:
            began_s, outcome = self._now_s(), Outcome.FAULT
            try:
                outcome = Outcome.OK if await self.backends[g].probe() else Outcome.FAULT
            finally:
                self.panel.breakers[g].record(outcome, began_s=began_s, lease=lease, reason="made no token")
                self._probing.pop(g, None)
                self._ring()

        self._probing[g] = asyncio.create_task(probe(), name=f"probe-{self.backends[g].name}")

    def _ring(self, calls: int = 1 << 30) -> None:
        """Something may have become possible: so many held calls ask again, the longest held first."""
        while self._waiters and calls > 0:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                calls -= 1

    # --- what the gateway asks ----------------------------------------------------------------------------------------------

    def view(self) -> ClusterSnapshot:
        """Snapshot of the present."""
        alive = self.alive()
        allows = self.panel.allows()
        for g in self.panel.due_probes().tolist():  # a half-open group closes only through traffic that probes it
            allows[g] = True
        flights = self.telemetry.flights
        for g in self._was_busy:  # until it has answered again, one call at a time asks whether it is still busy
            if flights.running[g] or flights.waiting[g]:
                allows[g] = False
        return self.telemetry.snapshot(
            self._now_s(), alive, allows & alive, self.panel.states(), self.held, self.telemetry.cluster.limits.hold_limit
        )

    def alive(self) -> BoolArray:
        """Groups that are started and whose process is not known to be gone, shape (groups,)."""
        return self._is_up & np.fromiter((backend.is_alive for backend in self.backends), np.bool_, len(self.backends))

    async def is_ready(self) -> bool:
        """Whether a token can really be made: one was, lately, or a probe makes one (K22)."""
        if self.is_draining:
            return False
        alive = self.alive()
        recent = self._now_s() - self._last_token_s < self.settings.ready_within_s
        if (alive & recent).any():
            return True
        probes = [asyncio.ensure_future(self.backends[g].probe()) for g in np.flatnonzero(alive).tolist()]
        try:
            for done in asyncio.as_completed(probes, timeout=self.settings.ready_within_s):
                if await done:
                    return True
        except TimeoutError:
            pass
        finally:
            for probe in probes:
                probe.cancel()
            await asyncio.gather(*probes, return_exceptions=True)
        return False

    async def run(self, call: Call) -> AsyncIterator[Piece]:
        """The answer's pieces in order, the last one with a finish reason. Raises: Refusal, at once or between two pieces.

        Closing the iterator, or cancelling the task that waits for its next piece, ends the work at once.
        """
        try:
            request, lease = self._admit(call)
        except Refusal as refusal:
            self.counts[f"refused_{refusal.reason}"] += 1
            raise
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
            raise
        finally:
            self.in_flight -= 1
            if has_timed_out is not None:
                self.class_breaker.record(request.class_index, has_timed_out, began_s=request.arrival_s, lease=lease)
            elif lease is not None:
                self.class_breaker.breakers[request.class_index].release(lease)

    def _is_late(self, request: Request) -> bool:
        base_s, per_token_s = self._timeouts[request.class_index]
        return self._now_s() - request.arrival_s > base_s + per_token_s * request.prompt_tokens

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
        if not self.alive().any():
            raise _refusal("no_capacity", "no group can serve now", self._retry_after_s())
        admission = self.class_breaker.admit(call.class_index)
        if not admission.is_allowed:
            name = SERVICE_CLASSES[call.class_index].name
            raise _refusal("class_shed", f"class {name} is shed: too many of its requests timed out", admission.retry_after_s)
        self._next_id += 1
        self.telemetry.arrived(now_s, call.class_index, call.prompt_tokens)
        return Request(self._next_id, now_s, max(1, call.prompt_tokens), call.class_index, call.session), admission.lease

    def _fits(self, call: Call) -> BoolArray:
        return np.asarray(self.telemetry.kv_tokens >= call.prompt_tokens + call.max_tokens)

    def _retry_after_s(self) -> float:
        """Until a breaker's time comes, within bounds."""
        wait_s = self.panel.next_change_s() - self._now_s()
        return min(RETRY_AFTER_MAX_S, max(RETRY_AFTER_MIN_S, wait_s)) if math.isfinite(wait_s) else 1.0

    # --- one call -----------------------------------------------------------------------------------------------------------

    async def _serve(self, call: Call, request: Request) -> AsyncIterator[Piece]:
        sent, failed, attempts, is_retry, is_counted = _Sent(), set[int](), 0, False, True
        self.retries.start_request()
        try:
            while True:
                begun = sent.begun()
                attempt = await self._place(call, request, begun, frozenset(failed))
                attempts += 1
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
                except BadCall as error:
                    raise Refusal(error.reason, str(error), status=error.status) from error
                except (BackendFault, _Lost) as error:
                    logger.info("attempt lost call=%s group=%s reason=%s", call.call_id, self.backends[attempt.group_index].name, error)
                    self.counts["attempts_lost"] += 1
                    failed.add(attempt.group_index)
                    self.retries.finish(is_retry)
                    is_counted = False
                    await self._await_retry(attempts, call, str(error))
                    is_retry = is_counted = True
                    request = replace(request, attempts=attempts)
        finally:
            if is_counted:
                self.retries.finish(is_retry)

    async def _await_retry(self, attempts: int, call: Call, reason: str) -> None:
        """Until the budget has room for one more retry. Raises: Refusal."""
        end_s = min(self._now_s() + self.settings.retry_wait_s, call.deadline_s)
        while not self.retries.try_start_retry(attempts):
            if attempts >= self.settings.attempts_max or self._now_s() >= end_s:
                raise _refusal("attempts_spent", f"given up after {attempts} attempt(s), the last: {reason}", self._retry_after_s())
            await asyncio.sleep(0.01)
        self.counts["retries"] += 1

    async def _place(self, call: Call, request: Request, begun: Begun, failed: frozenset[int]) -> _Attempt:
        """Ask where the call goes, and hold it until somebody takes it. Raises: Refusal."""
        hold_until_s = min(self._now_s() + self.settings.hold_max_s, call.deadline_s)
        keys = block_keys(call.prompt_ids)
        placed: list[_Attempt] = []

        def reserve(decided: Decided) -> None:
            if decided.command.kind is CommandKind.ROUTE:
                placed.append(self._book(call, request, begun, decided))

        while True:
            fits, excluded = self._fits(call), self._excluded(call, begun, failed)
            may_hold = self._now_s() < hold_until_s
            question = Question(request, fits, excluded, may_hold, self.prefixes.hits(keys))
            decided = await self.scheduler.decide(question, reserve)
            if placed:
                g = placed[0].group_index
                self.prefixes.remember(g, keys, int(self.telemetry.kv_tokens[g]))
                return placed[0]
            alive = self.alive() & fits
            alive[list(excluded)] = False
            if not alive.any() and not begun.pieces and not failed:
                raise _refusal("no_capacity", "no group can serve this now", self._retry_after_s())
            if decided.command.kind is CommandKind.REFUSE and (not may_hold or self.held >= self.telemetry.cluster.limits.hold_limit):
                if self._now_s() >= call.deadline_s:
                    raise _refusal("deadline", "its deadline passed while it waited")
                reason = "queue_full" if alive.any() else "no_capacity"
                raise _refusal(reason, f"no group took it within {self.settings.hold_max_s:g} s", self._retry_after_s())
            if decided.command.kind is CommandKind.REFUSE and alive.any():
                raise _refusal("queue_full", "the scheduler refused it", self._retry_after_s())
            await self._hold(hold_until_s)

    async def _hold(self, until_s: float) -> None:
        """Wait for a change, or `until_s`."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self.held += 1
        try:
            async with asyncio.timeout(max(0.0, min(until_s - self._now_s(), 1.0)) + 1e-3):
                await waiter
        except TimeoutError:
            pass
        finally:
            self.held -= 1

    def _excluded(self, call: Call, begun: Begun, failed: frozenset[int]) -> frozenset[int]:
        """Groups that may not take the call (on): those that failed it, unless no other one lives, and those that cannot go on exactly."""
        alive = self.alive()
        stuck = frozenset(g for g in failed if alive[[i for i in range(len(alive)) if i not in failed]].any() or not alive[g])
        if not begun.pieces:
            return stuck
        cannot = frozenset(b.group_index for b in self.backends if not b.continues(call, begun))
        if len(cannot) == len(self.backends):
            raise Refusal("stream_lost", "the stream was lost and cannot go on exactly where it stopped", status=502)
        return stuck | cannot

    def _book(self, call: Call, request: Request, begun: Begun, decided: Decided) -> _Attempt:
        """The reservation: from now on every decision sees the call in its group."""
        g, now_s = decided.command.group_index, self._now_s()
        key = P.queue_key(request.arrival_s, request.class_index, self.settings.head_start_s)
        flight = self.telemetry.flights.add(request, call.call_id, g, key, now_s, begun.pieces)
        breaker = self.panel.breakers[g]
        lease = breaker.try_probe() if breaker.state is State.HALF_OPEN else None
        self.served[g] += 1
        declared_gap_s = decided.expected_s[1] / decided.pace if decided.expected_s is not None else 0.0
        return _Attempt(flight, g, now_s, decided.expected_s, lease, declared_gap_s)

    async def _attempt(self, call: Call, begun: Begun, attempt: _Attempt) -> AsyncIterator[Piece]:
        """Pieces of one attempt, its deadlines kept and its outcome told to the breaker. Raises: BackendError, _Lost, Refusal."""
        g, backend = attempt.group_index, self.backends[attempt.group_index]
        outcome, reason, generated, finished = Outcome.NEUTRAL, "", begun.pieces, False
        watch = StreamWatch(self._now_s)
        try:
            async with aclosing(backend.submit(call, begun)) as pieces:
                while not finished:
                    piece = await self._next_piece(pieces, call, attempt, watch)
                    if piece.index < generated and piece.token is not None:
                        raise _Lost(f"{backend.name} sent token {piece.index} again")
                    generated = max(generated, piece.index + (piece.token is not None or bool(piece.text)))
                    self._note_piece(attempt, generated)
                    if piece.finish_reason == "error":
                        raise _Lost(f"{backend.name}: its engine gave the call up")
                    finished = piece.finish_reason is not None
                    yield piece
            outcome = Outcome.OK
        except BackendBusy as busy:
            self.panel.breakers[g].record_backpressure(max(0.0, busy.retry_after_s), attempt.lease)
            self._was_busy.add(g)
            attempt.lease = None
            raise
        except (BackendFault, _Lost) as error:
            outcome, reason = Outcome.FAULT, str(error)
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
            if call.deadline_s <= limit_s:
                raise Refusal("deadline", "its deadline passed while it was served") from None
            is_silent = not math.isnan(attempt.first_s)
            waited_s = limit_s - (attempt.last_s if is_silent else attempt.began_s)
            what = "silent" if is_silent else "no first token"
            raise _Lost(f"{self.backends[attempt.group_index].name}: {what} for {waited_s:.1f} s") from None

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
        attempt.last_s = self._last_token_s[g] = now_s
        flights.tokens(attempt.flight, generated)

    def _end_attempt(self, attempt: _Attempt, outcome: Outcome, reason: str, generated: int) -> None:
        now_s, g, flight = self._now_s(), attempt.group_index, attempt.flight
        self.telemetry.flights.remove(flight)
        took_s, expected_s = now_s - attempt.began_s, math.inf
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
        self._ring(RUNG_PER_END)


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
        self.pieces += piece.token is not None or bool(piece.text)

    def begun(self) -> Begun:
        return Begun(tuple(self.tokens), "".join(self.text), self.pieces) if self.pieces else NOTHING


def _refusal(reason: str, message: str, retry_after_s: float | None = None) -> Refusal:
    return Refusal(reason, message, retry_after_s=retry_after_s)
