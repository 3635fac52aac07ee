"""Where a call goes: it is asked about until a group takes it, held as long as that may be worth it, and refused with a reason."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from envs.decision.circuit_breaker import State
from envs.domain.commands import Command, CommandKind
from envs.domain.requests import Request
from envs.domain.snapshot import BoolArray, ClusterSnapshot
from runtime.backends.interface import Backend, Begun, GivenBack
from runtime.calls import Call, Refusal
from runtime.scheduling.attempts import Attempt, Attempts
from runtime.scheduling.dispatch_settings import DispatchSettings
from runtime.scheduling.door import Door, refusal
from runtime.scheduling.group_keeper import GroupKeeper
from runtime.scheduling.held_calls import HeldCalls
from runtime.scheduling.online_scheduler import OVERLOADED, Decided, OnlineScheduler, Question
from runtime.scheduling.prefix_memory import PrefixMemory, block_keys
from runtime.scheduling.telemetry import Telemetry

HELD_AT_ONCE_S = 1.0  # a held call looks again after so long, whatever happens


class Placing:
    """Books attempts in `attempts` for calls that `scheduler` gives a group. `settings` may be replaced at any time."""

    def __init__(
        self,
        backends: Sequence[Backend],
        telemetry: Telemetry,
        scheduler: OnlineScheduler,
        attempts: Attempts,
        door: Door,
        groups: GroupKeeper,
        held_calls: HeldCalls,
        prefixes: PrefixMemory,
        settings: DispatchSettings,
        view: Callable[[], ClusterSnapshot],
        now_s: Callable[[], float],
    ) -> None:
        self._backends, self._telemetry, self._scheduler, self._attempts, self._door = backends, telemetry, scheduler, attempts, door
        self._groups, self._held_calls, self._prefixes = groups, held_calls, prefixes
        self.settings, self._view, self._now_s = settings, view, now_s

    async def place(self, call: Call, request: Request, begun: Begun, failed: frozenset[int], is_new: bool) -> Attempt:
        """Ask where the call goes, and hold it until somebody takes it; is_new: it may be shed. Raises: Refusal."""
        asked_s = waits_since_s = self._now_s()
        # a caller that has half an answer cannot ask again for the rest: it waits as long as for the retry budget
        patience_s = max(self.settings.hold_max_s, self.settings.retry_wait_s) if begun.pieces else self.settings.hold_max_s
        keys = block_keys(call.prompt_ids)
        placed: list[Attempt] = []

        def reserve(decided: Decided) -> None:
            if decided.command.kind is CommandKind.ROUTE:
                placed.append(self._attempts.book(call, request, begun, decided, asked_s))

        while True:
            fits, excluded = self._telemetry.fits(call.prompt_tokens + call.max_tokens), self._excluded(call, begun, failed)
            is_awaited = self._is_awaited(fits, excluded)
            if is_awaited:
                waits_since_s = self._now_s()  # once it is back, its breaker may let in one call at a time
            hold_until_s = min(math.inf if is_awaited else waits_since_s + patience_s, call.deadline_s)
            may_hold = self._now_s() < hold_until_s
            # a parked group is started for a queue: where there is one, that must be seen
            may_shed = is_new and not self._telemetry.is_parked.any()
            question = Question(
                request, fits, excluded, may_hold, self._prefixes.hits(keys), call.priority if may_shed else None, call.notes.has_smaller
            )
            decided = await self._scheduler.decide(question, reserve)
            if placed:
                g = placed[0].group_index
                self._prefixes.remember(g, keys, int(self._telemetry.kv_tokens[g]))
                return placed[0]
            if decided.cause == OVERLOADED:
                raise refusal("overloaded", "more is asked than can be served in time", decided.retry_after_s)
            alive = self._groups.open_to_new() & fits
            alive[list(excluded)] = False
            is_possible = is_awaited or bool(alive.any())
            if not is_possible and not begun.pieces and not failed:
                raise refusal("no_capacity", "no group can serve this now", self._door.retry_after_s())
            is_full = self._held_calls.count >= self._telemetry.cluster.limits.hold_limit
            is_refused = decided.command.kind is CommandKind.REFUSE
            if is_refused and may_hold and is_full and self._held_calls.make_room(call.priority):
                is_refused = is_full = False
            if is_refused and (not may_hold or is_full):
                if self._now_s() >= call.deadline_s:
                    raise refusal("deadline", "its deadline passed while it waited")
                can_take = alive & (self._view().breaker_state == State.CLOSED)
                reason = "queue_full" if is_awaited or can_take.any() else "no_capacity"
                raise refusal(reason, f"no group took it within {patience_s:g} s", self._door.retry_after_s())
            if is_refused and is_possible:
                raise refusal("queue_full", "the scheduler refused it", self._door.retry_after_s())
            wait_s = max(0.0, min(hold_until_s - self._now_s(), HELD_AT_ONCE_S)) + 1e-3
            if not await self._held_calls.wait(wait_s, call.priority):
                raise refusal("overloaded", "calls of higher priority wait in its place", self._door.retry_after_s())

    def _is_awaited(self, fits: BoolArray, excluded: frozenset[int]) -> bool:
        """Whether nobody else than a group that is just being started again could take the call: that is worth its whole deadline."""
        returning = self._groups.is_returning
        if not returning.any():
            return False
        could = fits.copy()
        could[list(excluded)] = False
        return bool((could & returning).any() and not (could & self._groups.open_to_new() & ~returning).any())

    def go_on_at(self, back: GivenBack, call: Call, request: Request, begun: Begun) -> Attempt | None:
        """An attempt at the group that a moved call was promised; None where it takes no calls."""
        asked_s, g = self._now_s(), back.target
        if (
            g is None
            or not (self._view().accepts[g] and self._telemetry.fits(call.prompt_tokens + call.max_tokens)[g])
            or (begun.pieces and not self._backends[g].continues(call, begun))
        ):
            return None
        self._prefixes.remember(g, block_keys(call.prompt_ids), int(self._telemetry.kv_tokens[g]))
        return self._attempts.book(call, request, begun, Decided(Command(CommandKind.ROUTE, g), "moved", "", None, 0.0), asked_s)

    def _excluded(self, call: Call, begun: Begun, failed: frozenset[int]) -> frozenset[int]:
        """Groups that may not take the call (on): those that failed it, unless no other one lives, and those that cannot go on exactly."""
        if not failed and not begun.pieces:
            return failed
        alive = self._groups.alive()
        stuck = frozenset(g for g in failed if alive[[i for i in range(len(alive)) if i not in failed]].any() or not alive[g])
        if not begun.pieces:
            return stuck
        cannot = frozenset(b.group_index for b in self._backends if not b.continues(call, begun))
        if len(cannot) == len(self._backends):
            raise Refusal("stream_lost", "the stream was lost and cannot go on exactly where it stopped", status=502)
        return stuck | cannot
