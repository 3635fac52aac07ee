"""Whether the policy may decide: its breaker, and what becomes of each answer. The breaker closes only through shadow decisions."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable

import numpy as np

from envs.decision.circuit_breaker import BreakerSettings, CircuitBreaker, Outcome, ProbeLease, State
from envs.domain.snapshot import BoolArray
from runtime.scheduling.policy_client import AT_ONCE_S, PolicyAnswer, PolicyClient

BAD_RUNNING = 3
SILENT_S = 0.250
SETTINGS = BreakerSettings(
    failures_to_open=BAD_RUNNING, calls_min=1_000_000, open_for_s=1.0, open_max_s=30.0, probes_max=32, probes_to_close=20, lease_s=1.0
)
"""Share rules are off (calls_min): three bad decisions running open it, twenty good ones in shadow close it."""


class PolicyGuard:
    """Asks the policy within a deadline and judges the answer. `causes` counts why the policy did not decide."""

    def __init__(
        self,
        client: PolicyClient,
        deadline_s: float = 0.005,
        outside_max: int = 0,
        now_s: Callable[[], float] = time.monotonic,
        rng: np.random.Generator | None = None,
    ) -> None:
        """outside_max: so many inputs may lie outside the range seen in training."""
        self.client, self.deadline_s, self._outside_max, self._now_s = client, deadline_s, outside_max, now_s
        self.breaker = CircuitBreaker(now_s=now_s, settings=SETTINGS, rng=rng)
        self.causes: Counter[str] = Counter()
        self.shadow_decisions = 0

    async def choose(self, candidates: np.ndarray, context: np.ndarray, mask: BoolArray, within_s: float) -> tuple[int | None, str]:
        """The policy's choice, or None and why there is none. Takes at most `within_s` (and never more than the deadline)."""
        client = self.client
        if client.state != "ready":
            return self._none(f"bundle_{client.state}" if client.state == "refused" else f"policy_{client.state}")
        if client.oldest_unanswered_s > SILENT_S:
            self._trip()
        if self.breaker.state is not State.CLOSED:
            self._ask_in_shadow(candidates, context, mask)
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
        answer = future.result()
        fault = self._fault_of(answer, mask)
        if fault is not None:
            self.breaker.record_failure(fault)
            return self._none(fault)
        self.breaker.record_success()
        if answer.outside > self._outside_max:
            return self._none("outside_training")
        return answer.index, ""

    def _none(self, cause: str) -> tuple[None, str]:
        self.causes[cause] += 1
        return None, cause

    def _fault_of(self, answer: PolicyAnswer, mask: BoolArray) -> str | None:
        """What is wrong with an answer, by the name it is counted under; None for a good one."""
        if answer.error:
            return "not_finite" if answer.error.startswith("NonFiniteScores") else "exception"
        if not (0 <= answer.index < len(mask) and mask[answer.index]):
            return "illegal"
        return None

    def _trip(self) -> None:
        for _ in range(BAD_RUNNING):
            if self.breaker.state is State.CLOSED:
                self.breaker.record_failure("silent")

    def _ask_in_shadow(self, candidates: np.ndarray, context: np.ndarray, mask: BoolArray) -> None:
        """The policy decides and nobody follows: what it would have done counts for its return."""
        lease = self.breaker.try_probe()
        if lease is None:
            return
        future = self.client.ask(candidates, context, mask)
        if future is None:
            self.breaker.release(lease)
            return
        self.shadow_decisions += 1
        began_s, allowed = self._now_s(), mask.copy()
        future.add_done_callback(lambda done: self._judge_shadow(done.result(), allowed, began_s, lease))

    def _judge_shadow(self, answer: PolicyAnswer, mask: BoolArray, began_s: float, lease: ProbeLease) -> None:
        fault = self._fault_of(answer, mask)
        if fault is None and answer.took_s > self.deadline_s:
            fault = "deadline"
        self.breaker.record(Outcome.OK if fault is None else Outcome.FAULT, began_s=began_s, lease=lease, reason=fault or "")
