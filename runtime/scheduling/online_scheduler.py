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
from dataclasses import dataclass, field
from functools import cached_property

import msgspec
import numpy as np

from envs.decision.actions import DecisionPoint, Scheduler, route_point
from envs.decision.observation import encode
from envs.decision.overload import OverloadControl
from envs.decision.predictor import PredictorTables
from envs.domain.commands import Command, CommandKind
from envs.domain.requests import Request
from envs.domain.snapshot import BoolArray, ClusterSnapshot, IntArray
from runtime.scheduling.policy_guard import PolicyGuard
from runtime.scheduling.recent_decisions import RecentDecisions

logger = logging.getLogger(__name__)

POLICY, HEURISTIC, REFUSED = "policy", "heuristic", "refused"
OVERLOADED = "overloaded"


class Decided(msgspec.Struct, frozen=True):
    """An answered decision. source: "policy", "heuristic" or "refused"; cause: why it was not the policy's, or why it is a refusal.

    expected_s: predicted TTFT and TPOT where a group was chosen and estimates were made, with step times `pace` x the declared ones.
    took_s: the whole decision. index: of the candidate. retry_after_s: of a call that was shed.
    """

    command: Command
    source: str
    cause: str
    expected_s: tuple[float, float] | None
    took_s: float
    pace: float = 1.0
    index: int = -1
    retry_after_s: float | None = None


class Question(msgspec.Struct, frozen=True, eq=False):
    """What is to be decided. fits (groups,): pools that hold the call; excluded: groups that failed it already; `hits` (groups,): prompt
    tokens that each group's prefix cache is thought to hold. priority: of a newcomer, which may be shed; None: it was let in before.
    has_smaller: refused under pressure, it goes to the smaller model; for the record, nothing is decided by it."""

    request: Request
    fits: BoolArray
    excluded: frozenset[int]
    may_hold: bool
    hits: IntArray
    priority: int | None = None
    has_smaller: bool = False


def point_of(question: Question, view: ClusterSnapshot, tables: PredictorTables) -> DecisionPoint:
    """The decision point, made as the simulator makes it; groups that failed the call do not fit it."""
    fits = question.fits
    if question.excluded:
        fits = fits.copy()
        fits[list(question.excluded)] = False
    return route_point(view, tables, question.request, fits, question.hits, question.may_hold)


@dataclass(eq=False)
class Made:
    """A decision as it was made, for those who record it or compare another's. scores (candidates,): the policy's, where it made any."""

    question: Question
    point: DecisionPoint
    decided: Decided
    scores: np.ndarray | None = None
    encoded: tuple[np.ndarray, np.ndarray] | None = field(default=None, repr=False)

    @cached_property
    def observation(self) -> tuple[np.ndarray, np.ndarray]:
        """Candidates (C, F) and context (K,), float32: encoded now, where the decision needed none. Only while the decision is made."""
        return self.encoded if self.encoded is not None else encode(self.point, len(self.point.commands))


class OnlineScheduler:
    """`counts`: (source, cause) -> decisions. `view` makes a snapshot of the present, `tables` gives the predictor's.

    `listeners` are told each decision; a fault of theirs is logged. `guard_of`: which policy answers a question, where not all have one.
    """

    def __init__(
        self,
        view: Callable[[], ClusterSnapshot],
        tables: Callable[[], PredictorTables],
        heuristic: Scheduler,
        guard: PolicyGuard | None = None,
        now_s: Callable[[], float] = time.monotonic,
        overload: OverloadControl | None = None,
    ) -> None:
        self.overload = overload
        self._view, self._tables, self.heuristic, self.guard, self._now_s = view, tables, heuristic, guard, now_s
        self._turn = asyncio.Lock()
        self.counts: Counter[tuple[str, str]] = Counter()
        self.recent = RecentDecisions()
        self.listeners: list[Callable[[Made], None]] = []
        self.guard_of: Callable[[Question], PolicyGuard | None] | None = None

    async def decide(self, question: Question, reserve: Callable[[Decided], None]) -> Decided:
        """Answer `question`, and call `reserve` with the answer before anybody else decides."""
        asked_s = self._now_s()
        guard = self.guard if self.guard_of is None else self.guard_of(question)
        if guard is not None and await self._has_turn(guard.deadline_s):
            try:
                return self._settle(await self._decide(question, guard, asked_s), reserve)
            finally:
                self._turn.release()
        cause = "queue" if guard is not None else "no_policy"
        point = point_of(question, self._view(), self._tables())
        made = self._shed(question, point, asked_s) or self._by_heuristic(question, point, cause, asked_s)
        return self._settle(made, reserve)

    def rehearse(self, question: Question) -> None:
        """All that a decision computes here, of which nothing comes."""
        point = point_of(question, self._view(), self._tables())
        encode(point, len(point.commands))
        self.heuristic.choose(point)
        OverloadControl().judge(point, 0)

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

    def _settle(self, made: Made, reserve: Callable[[Decided], None]) -> Decided:
        decided = made.decided
        self.counts[decided.source, decided.cause] += 1
        reserve(decided)
        for listener in self.listeners:
            try:
                listener(made)
            except Exception:  # a bug of ours must not lose a request
                logger.exception("listener of decisions failed")
        return decided

    async def _decide(self, question: Question, guard: PolicyGuard, asked_s: float) -> Made:
        point = point_of(question, self._view(), self._tables())
        if not point.allowed_groups.any():
            return self._by_heuristic(question, point, "nothing_allowed", asked_s)
        if (shed := self._shed(question, point, asked_s)) is not None:
            return shed
        encoded = encode(point, len(point.commands))
        candidates, context = encoded
        if not (np.isfinite(candidates).all() and np.isfinite(context).all()):
            return self._by_heuristic(question, point, "observation_not_finite", asked_s)
        within_s = guard.deadline_s - (self._now_s() - asked_s)
        choice = await guard.choose(candidates, context, point.mask, within_s, lambda: self.heuristic_index(point))
        if choice.index is None:
            return self._by_heuristic(question, point, choice.cause, asked_s, encoded, choice.scores)
        return Made(question, point, self._decided(point, choice.index, POLICY, "", asked_s, choice.scores), choice.scores, encoded)

    def _shed(self, question: Question, point: DecisionPoint, asked_s: float) -> Made | None:
        """The refusal of a newcomer for which there is no time; None where it may come in."""
        if self.overload is None or question.priority is None:
            return None
        retry_after_s = self.overload.judge(point, question.priority)
        if retry_after_s is None:
            return None
        decided = self._decided(point, len(point.commands) - 1, REFUSED, OVERLOADED, asked_s, None)
        return Made(question, point, msgspec.structs.replace(decided, retry_after_s=retry_after_s))

    def heuristic_index(self, point: DecisionPoint) -> int:
        """The heuristic's candidate. Raises: ValueError where it is not allowed."""
        index = int(self.heuristic.choose(point))
        if not (0 <= index < len(point.commands) and point.mask[index]):
            raise ValueError(f"candidate {index} is not allowed")
        return index

    def _by_heuristic(
        self,
        question: Question,
        point: DecisionPoint,
        cause: str,
        asked_s: float,
        encoded: tuple[np.ndarray, np.ndarray] | None = None,
        scores: np.ndarray | None = None,
    ) -> Made:
        """The heuristic's choice; the first allowed group where it fails; a refusal where there is none."""
        try:
            index = self.heuristic_index(point)
        except Exception as error:  # a bug of ours must not lose a request
            logger.exception("heuristic failed reason=%s", error)
            index, cause = int(np.argmax(point.mask)), f"{cause}+heuristic_failed"
        source = REFUSED if point.commands[index].kind is CommandKind.REFUSE else HEURISTIC
        return Made(question, point, self._decided(point, index, source, cause, asked_s, scores), scores, encoded)

    def _decided(self, point: DecisionPoint, index: int, source: str, cause: str, asked_s: float, scores: np.ndarray | None) -> Decided:
        command, took_s = point.commands[index], self._now_s() - asked_s
        g = command.group_index
        told = b"" if scores is None else scores.astype(np.float32).tobytes()
        self.recent.note(point, point.mask, index, source, cause, took_s, scores=told)
        if command.kind is not CommandKind.ROUTE:
            return Decided(command, source, cause, None, took_s, index=index)
        return Decided(command, source, cause, point.expected_s(g), took_s, float(point.view.correction[g]), index)
