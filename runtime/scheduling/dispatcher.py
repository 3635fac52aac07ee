"""Takes a call to its end: through the door (`door`), to a group (`placing`), tried there (`attempts`), and on elsewhere after a loss.

A stream that is cut or falls silent goes on in another group after the tokens that its caller has: each comes once. Nothing here waits
without a limit, and no group's trouble is another's: attempts share no pool and no lock.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from agents.heuristics import make as make_heuristic
from envs.decision.circuit_breaker import BreakerPanel, BreakerSettings, ClassBreaker
from envs.decision.class_timeouts import ClassTimeouts
from envs.decision.overload import OverloadControl
from envs.decision.retry_budget import RetryBudget
from envs.domain.requests import SERVICE_CLASSES, Request
from envs.domain.snapshot import ClusterSnapshot
from runtime.backends.interface import NOTHING, Backend, BackendBusy, BackendFault, BadCall, Begun, GivenBack
from runtime.backends.sent_text import SentText
from runtime.calls import Call, Piece, Refusal
from runtime.scheduling.attempts import Attempts, Lost, Silent
from runtime.scheduling.call_ledger import CallLedger
from runtime.scheduling.dispatch_settings import DispatchSettings
from runtime.scheduling.door import RETRY_AFTER_MIN_S, Door, refusal
from runtime.scheduling.group_keeper import GroupKeeper
from runtime.scheduling.held_calls import HeldCalls
from runtime.scheduling.online_scheduler import OnlineScheduler
from runtime.scheduling.placing import Placing
from runtime.scheduling.policy_guard import PolicyGuard
from runtime.scheduling.prefix_memory import PrefixMemory
from runtime.scheduling.rehearsal import rehearse_answers, rehearse_decision
from runtime.scheduling.served_plans import ServedPlans
from runtime.scheduling.telemetry import Telemetry

logger = logging.getLogger(__name__)

WENT_WELL_PIECES = 8
"""An attempt that brought so many before its group was lost is no sign that the call is what groups are lost by."""


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
        self.in_flight = 0
        self._timeouts = ClassTimeouts(chosen.limit_multiplier, chosen.class_timeout_limits)
        self.prefixes = PrefixMemory(np.array([backend.keeps_prefixes for backend in self.backends], np.bool_))
        self.held_calls = HeldCalls()
        self.plans = ServedPlans(telemetry, now_s)
        self.groups = GroupKeeper(
            self.backends, telemetry, self.panel, self.prefixes, self.held_calls, chosen, self.counts, now_s, self.plans
        )
        self.attempts = Attempts(self.backends, telemetry, self.panel, self.groups, self.held_calls, self.ledger, chosen, now_s)
        self.served, self.engine_counts = self.attempts.served, self.attempts.engine_counts
        self._door = Door(telemetry, self.panel, self.groups, self.class_breaker, self.overload, chosen, self.counts, now_s)
        self._placing = Placing(
            self.backends, telemetry, self.scheduler, self.attempts, self._door, self.groups, self.held_calls, self.prefixes, chosen,
            self.view, now_s,
        )  # fmt: skip

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
        self.settings = self.groups.settings = self.attempts.settings = self._door.settings = self._placing.settings = settings
        self.retries.attempts_max = settings.attempts_max
        self._follow(settings)

    def _follow(self, settings: DispatchSettings) -> None:
        """Nothing is judged where nobody wants to know."""
        self.overload.sheds = settings.sheds_overload
        is_wanted = settings.sheds_overload or bool(settings.degrade_max_tokens)
        self.scheduler.overload = self.overload if is_wanted else None

    @property
    def is_draining(self) -> bool:
        return self._door.is_draining

    async def drain(self, deadline_s: float) -> bool:
        """Take no new calls, wait for those inside; whether all came to their end within `deadline_s`."""
        self._door.is_draining = True
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
        for g in self.attempts.busy:  # until it has answered again, one call at a time asks whether it is still busy
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
            request, lease = self._door.admit(call, self.in_flight)
        except Refusal as told:
            self.counts[f"refused_{told.reason}"] += 1
            self.ledger.turned_away(call, told.reason)
            raise
        call = self._door.degraded(call)
        self.ledger.open(call, request)
        has_timed_out: bool | None = None
        self.in_flight += 1
        try:
            async with aclosing(self._serve(call, request)) as pieces:
                async for piece in pieces:
                    if piece.index == 0 and has_timed_out is None:
                        has_timed_out = self._is_late(request)
                    yield piece
        except Refusal as told:
            has_timed_out = True if told.reason in ("deadline", "attempts_spent") else has_timed_out
            self.counts[f"refused_{told.reason}"] += 1
            self.ledger.refused(request.request_id, told.reason)
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

    # --- one call -----------------------------------------------------------------------------------------------------------

    async def _serve(self, call: Call, request: Request) -> AsyncIterator[Piece]:
        sent, failed, attempts, is_retry, is_counted = _Sent(), set[int](), 0, False, True
        back: GivenBack | None = None
        resumed: Callable[[int], None] | None = None
        is_new = True
        self.retries.start_request()
        try:
            while True:
                begun = sent.begun()
                if attempts or back is not None:
                    begun = replace(begun, waited_s=self._now_s() - request.arrival_s)
                if back is None or (attempt := self._placing.go_on_at(back, call, request, begun)) is None:
                    attempt = await self._placing.place(call, request, begun, frozenset(failed), is_new)
                resumed = resumed if back is None else back.resumed
                attempts, back, is_new, before = attempts + 1, None, False, sent.pieces
                attempt.flight.continues_at = partial(self._continues_at, call, sent)
                try:
                    async with aclosing(self.attempts.pieces(call, begun, attempt)) as pieces:
                        async for piece in pieces:
                            if is_retry and piece.finish_reason is None:  # it runs again: an attempt like any other
                                self.retries.finish(True)
                                self.retries.start_request()
                                is_retry = False
                            if resumed is not None:
                                resumed(attempt.group_index)
                                resumed = None
                            sent.add(piece)
                            yield piece
                            if piece.finish_reason is not None:
                                return
                    raise Lost("the stream ended without a finish reason")
                except BackendBusy as busy:
                    self.counts["busy"] += 1
                    attempts -= 1  # "not now" is no try: bounded by the deadline and by the pauses that groups ask for
                    after_s = max(busy.retry_after_s, RETRY_AFTER_MIN_S)
                    if self._now_s() - request.arrival_s > self.settings.hold_max_s + after_s:
                        raise refusal("queue_full", f"every group is busy: {busy}", after_s) from busy
                    continue
                except GivenBack as given:  # by command, or since its pool shrank: nobody's fault, and no try
                    self.counts["given_back"] += 1
                    attempts, back = attempts - 1, given
                except BadCall as error:
                    raise Refusal(error.reason, str(error), status=error.status) from error
                except (BackendFault, Lost) as error:
                    logger.info("attempt lost call=%s group=%s reason=%s", call.call_id, self.backends[attempt.group_index].name, error)
                    self.counts["attempts_lost"] += 1
                    # slow groups, and those lost while it went well, spend no tries: its tokens and its deadline bound them
                    attempts -= isinstance(error, Silent) or sent.pieces - before >= WENT_WELL_PIECES
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
        return bool(self.telemetry.fits(call.prompt_tokens + call.max_tokens)[g]) and (
            not sent.pieces or self.backends[g].continues(call, sent.begun())
        )

    async def _await_retry(self, attempts: int, call: Call, reason: str) -> None:
        """Until the budget has room for one more retry. Raises: Refusal."""
        end_s = min(self._now_s() + self.settings.retry_wait_s, call.deadline_s)
        attempts_max = self.settings.attempts_of(call.class_index)
        while not self.retries.try_start_retry(attempts, attempts_max):
            if attempts >= attempts_max or self._now_s() >= end_s:
                raise refusal("attempts_spent", f"given up after {attempts} attempt(s), the last: {reason}", self._door.retry_after_s())
            await asyncio.sleep(0.01)
        self.counts["retries"] += 1


@dataclass(slots=True, eq=False)
class _Sent:
    """What the caller of one answer has so far."""

    tokens: array[int] = field(default_factory=lambda: array("i"))  # as small as may be: it grows as long as the stream is open
    text: SentText = field(default_factory=SentText)
    pieces: int = 0

    def add(self, piece: Piece) -> None:
        if piece.token is not None:
            self.tokens.append(piece.token)
        self.text.add(piece.text)
        self.pieces += piece.tokens

    def begun(self) -> Begun:
        return Begun(tuple(self.tokens), self.text.copy(), self.pieces) if self.pieces else NOTHING
