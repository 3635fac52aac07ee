"""Whether the policy may decide: its breaker, and what becomes of each answer. The breaker closes only through shadow decisions."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable

import msgspec
import numpy as np

from envs.decision.circuit_breaker import BreakerSettings, CircuitBreaker, Outcome, ProbeLease, State
from envs.domain.snapshot import BoolArray
from runtime.scheduling.agreement import Agreement
from runtime.scheduling.policy_client import AT_ONCE_S, PolicyAnswer, PolicyClient

BAD_RUNNING = 3
SILENT_S = 0.250
AGREEMENT_EVERY = 8
SHADOW_COMPARISONS = 10  # half of what closes the breaker
SETTINGS = BreakerSettings(
    failures_to_open=BAD_RUNNING, calls_min=1_000_000, open_for_s=1.0, open_max_s=30.0, probes_max=32, probes_to_close=20, lease_s=1.0
)
"""Share rules are off (calls_min): three bad decisions running open it, twenty good ones in shadow close it."""


class PolicyChoice(msgspec.Struct, frozen=True, eq=False):
    """index: the candidate, None where the policy does not decide; cause: why not. scores (candidates,): where it made any."""

    index: int | None
    cause: str = ""
    scores: np.ndarray | None = None


class PolicyGuard:
    """Asks the policy within a deadline and judges the answer. `causes` counts why the policy did not decide.

    Every `AGREEMENT_EVERY`th good answer, and each one in shadow, is compared with the heuristic's choice.
    """

    def __init__(
        self,
        client: PolicyClient,
        deadline_s: float = 0.005,
        outside_max: int = 0,
        now_s: Callable[[], float] = time.monotonic,
        rng: np.random.Generator | None = None,
        agreement: Agreement | None = None,
    ) -> None:
        """outside_max: so many inputs may lie outside the range seen in training."""
        self.client, self.deadline_s, self.outside_max, self._now_s = client, deadline_s, outside_max, now_s
        self.breaker = CircuitBreaker(now_s=now_s, settings=SETTINGS, rng=rng)
        self.agreement = agreement or Agreement()
        self.causes: Counter[str] = Counter()
        self.shadow_decisions = 0
        self._good_answers = 0

    def expect(self) -> None:
        """It will be asked in a moment."""
        if self.breaker.state is State.CLOSED:
            self.client.expect()

    async def choose(
        self, candidates: np.ndarray, context: np.ndarray, mask: BoolArray, within_s: float, heuristic: Callable[[], int]
    ) -> PolicyChoice:
        """The policy's choice, or why there is none. Takes at most `within_s` (and never more than the deadline). heuristic: asks it what
        it would choose here; it is not asked often."""
        client = self.client
        if client.state != "ready":
            return self._none(f"bundle_{client.state}" if client.state == "refused" else f"policy_{client.state}")
        self.trip_if_silent()
        if self.breaker.state is not State.CLOSED:
            self._ask_in_shadow(candidates, context, mask, heuristic)
            return self._none("breaker_open")
        future = client.ask(candidates, context, mask)
        if future is None:
            return self._none("policy_backlog")
        patience_s = min(within_s, self.deadline_s)
        if not client.wait_briefly(future):
            await asyncio.wait((future,), timeout=max(0.0, patience_s - AT_ONCE_S))
        if not future.done():
            if patience_s < 0.5 * self.deadline_s:  # it had little time because others were before: not its fault
                return self._none("queue")
            self.breaker.record_failure("deadline")
            return self._none("deadline")
        return self._judged(future.result(), mask, heuristic)

    def _judged(self, answer: PolicyAnswer, mask: BoolArray, heuristic: Callable[[], int]) -> PolicyChoice:
        """What becomes of an answer that came in time."""
        scores = scores_of(answer, len(mask))
        fault = self.fault_of(answer, mask)
        if fault is not None:
            self.breaker.record_failure(fault)
            return self._none(fault, scores)
        self.breaker.record_success()
        if answer.outside > self.outside_max:
            return self._none("outside_training", scores)
        self._good_answers += 1
        if self._good_answers % AGREEMENT_EVERY == 0:
            self._compare(answer.index, _asked(heuristic))
            if self.agreement.is_outside():
                self.agreement.clear()
                self._trip("agreement")
                return self._none("agreement", scores)
        return PolicyChoice(answer.index, "", scores)

    def _compare(self, index: int, chosen: int | None) -> None:
        if chosen is not None:
            self.agreement.note(index == chosen)

    def _none(self, cause: str, scores: np.ndarray | None = None) -> PolicyChoice:
        self.causes[cause] += 1
        return PolicyChoice(None, cause, scores)

    def fault_of(self, answer: PolicyAnswer, mask: BoolArray) -> str | None:
        """What is wrong with an answer, by the name it is counted under; None for a good one."""
        if answer.error:
            return "not_finite" if answer.error.startswith("NonFiniteScores") else "exception"
        if not (0 <= answer.index < len(mask) and mask[answer.index]):
            return "illegal"
        return None

    def trip_if_silent(self) -> None:
        """Open the breaker when a question has been open for too long."""
        if self.client.oldest_unanswered_s > SILENT_S:
            self._trip("silent")

    def _trip(self, reason: str) -> None:
        for _ in range(BAD_RUNNING):
            if self.breaker.state is State.CLOSED:
                self.breaker.record_failure(reason)

    def _ask_in_shadow(self, candidates: np.ndarray, context: np.ndarray, mask: BoolArray, heuristic: Callable[[], int]) -> None:
        """The policy decides and nobody follows: what it would have done counts for its return."""
        lease = self.breaker.try_probe()
        if lease is None:
            return
        future = self.client.ask(candidates, context, mask)
        if future is None:
            self.breaker.release(lease)
            return
        self.shadow_decisions += 1
        began_s, allowed, chosen = self._now_s(), mask.copy(), _asked(heuristic)
        future.add_done_callback(lambda done: self._judge_shadow(done.result(), allowed, began_s, lease, chosen))

    def _judge_shadow(self, answer: PolicyAnswer, mask: BoolArray, began_s: float, lease: ProbeLease, chosen: int | None) -> None:
        fault = self.fault_of(answer, mask)
        if fault is None and answer.took_s > self.deadline_s:
            fault = "deadline"
        if fault is None:
            self._compare(answer.index, chosen)
            if self.agreement.is_outside(SHADOW_COMPARISONS):
                self.agreement.clear()
                fault = "agreement"
        self.breaker.record(Outcome.OK if fault is None else Outcome.FAULT, began_s=began_s, lease=lease, reason=fault or "")


def _asked(heuristic: Callable[[], int]) -> int | None:
    try:
        return heuristic()
    except Exception:  # its own fault is counted where it decides
        return None


def scores_of(answer: PolicyAnswer, candidates: int) -> np.ndarray | None:
    """The answer's scores (candidates,); None where it has none, or others."""
    return np.frombuffer(answer.scores, np.float32) if len(answer.scores) == 4 * candidates else None
