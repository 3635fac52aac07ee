"""Who answers a route decision in service: the policy within its deadline, else the best heuristic, else a refusal with a reason.

Encoding, mask and commands are the simulator's own (`envs.decision`). Decisions are made one after the other, so that each sees the
reservations of those before it; nobody waits longer for that than the policy's deadline. Every step down is counted with its cause.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from envs.decision.actions import DecisionPoint, Scheduler, route_point
from envs.decision.observation import encode
from envs.decision.predictor import PredictorTables
from envs.domain.commands import Command, CommandKind
from envs.domain.requests import Request
from envs.domain.snapshot import BoolArray, ClusterSnapshot, IntArray
from runtime.scheduling.policy_guard import PolicyGuard
from runtime.scheduling.recent_decisions import RecentDecisions

logger = logging.getLogger(__name__)

POLICY, HEURISTIC, REFUSED = "policy", "heuristic", "refused"


@dataclass(frozen=True, slots=True)
class Decided:
    """An answered decision. source: "policy", "heuristic" or "refused"; cause: why it was not the policy's, or why it is a refusal.

    expected_s: predicted TTFT and TPOT where a group was chosen and estimates were made, with step times `pace` x the declared ones.
    took_s: the whole decision.
    """

    command: Command
    source: str
    cause: str
    expected_s: tuple[float, float] | None
    took_s: float
    pace: float = 1.0


@dataclass(frozen=True, slots=True)
class Question:
    """What is to be decided. fits (groups,): pools that hold the call; excluded: groups that failed it already; `hits` (groups,): prompt
    tokens that each group's prefix cache is thought to hold."""

    request: Request
    fits: BoolArray
    excluded: frozenset[int]
    may_hold: bool
    hits: IntArray


def point_of(question: Question, view: ClusterSnapshot, tables: PredictorTables) -> DecisionPoint:
    """The decision point, made as the simulator makes it; groups that failed the call do not fit it."""
    fits = question.fits
    if question.excluded:
        fits = fits.copy()
        fits[list(question.excluded)] = False
    return route_point(view, tables, question.request, fits, question.hits, question.may_hold)


class OnlineScheduler:
    """`counts`: (source, cause) -> decisions. `view` makes a snapshot of the present, `tables` gives the predictor's."""

    def __init__(
        self,
        view: Callable[[], ClusterSnapshot],
        tables: Callable[[], PredictorTables],
        heuristic: Scheduler,
        guard: PolicyGuard | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._view, self._tables, self._heuristic, self.guard, self._now_s = view, tables, heuristic, guard, now_s
        self._turn = asyncio.Lock()
        self.counts: Counter[tuple[str, str]] = Counter()
        self.recent = RecentDecisions()

    async def decide(self, question: Question, reserve: Callable[[Decided], None]) -> Decided:
        """Answer `question`, and call `reserve` with the answer before anybody else decides."""
        asked_s = self._now_s()
        patience_s = self.guard.deadline_s if self.guard is not None else 0.0
        if patience_s and await self._has_turn(patience_s):
            try:
                return self._settle(await self._decide(question, asked_s, patience_s), reserve)
            finally:
                self._turn.release()
        cause = "queue" if self.guard is not None else "no_policy"
        point = point_of(question, self._view(), self._tables())
        return self._settle(self._by_heuristic(point, cause, asked_s), reserve)

    def rehearse(self, question: Question) -> None:
        """All that a decision computes here, of which nothing comes."""
        point = point_of(question, self._view(), self._tables())
        encode(point, len(point.commands))
        self._heuristic.choose(point)

    async def _has_turn(self, patience_s: float) -> bool:
        if not self._turn.locked():
            await self._turn.acquire()
            return True
        try:
            async with asyncio.timeout(patience_s):
                await self._turn.acquire()
            return True
        except TimeoutError:
            return False

    def _settle(self, decided: Decided, reserve: Callable[[Decided], None]) -> Decided:
        self.counts[decided.source, decided.cause] += 1
        reserve(decided)
        return decided

    async def _decide(self, question: Question, asked_s: float, patience_s: float) -> Decided:
        guard, point = self.guard, point_of(question, self._view(), self._tables())
        assert guard is not None
        if not point.allowed_groups.any():
            return self._by_heuristic(point, "nothing_allowed", asked_s)
        candidates, context = encode(point, len(point.commands))
        if not (np.isfinite(candidates).all() and np.isfinite(context).all()):
            return self._by_heuristic(point, "observation_not_finite", asked_s)
        index, cause = await guard.choose(candidates, context, point.mask, patience_s - (self._now_s() - asked_s))
        if index is None:
            return self._by_heuristic(point, cause, asked_s)
        return self._decided(point, index, POLICY, "", asked_s)

    def _by_heuristic(self, point: DecisionPoint, cause: str, asked_s: float) -> Decided:
        """The heuristic's choice; the first allowed group where it fails; a refusal where there is none."""
        try:
            index = int(self._heuristic.choose(point))
            if not (0 <= index < len(point.commands) and point.mask[index]):
                raise ValueError(f"candidate {index} is not allowed")
        except Exception as error:  # a bug of ours must not lose a request
            logger.exception("heuristic failed reason=%s", error)
            index, cause = int(np.argmax(point.mask)), f"{cause}+heuristic_failed"
        command = point.commands[index]
        source = REFUSED if command.kind is CommandKind.REFUSE else HEURISTIC
        return self._decided(point, index, source, cause, asked_s)

    def _decided(self, point: DecisionPoint, index: int, source: str, cause: str, asked_s: float) -> Decided:
        command, took_s = point.commands[index], self._now_s() - asked_s
        g = command.group_index
        self.recent.note(point, point.mask, index, source, cause, took_s)
        if command.kind is not CommandKind.ROUTE:
            return Decided(command, source, cause, None, took_s)
        return Decided(command, source, cause, point.expected_s(g), took_s, float(point.view.correction[g]))
