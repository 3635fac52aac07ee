"""The policy that is tried: its process, its guard rails, and what is wrong with either."""

from __future__ import annotations

from collections.abc import Callable

from runtime.scheduling.policy_guard import PolicyGuard

READY_S = 30.0
"""Its process gets so long to become ready."""


class Candidate:
    """A guard of its own, over a process of its own. `begin_stage` forgets the faults of the stage before."""

    def __init__(self, guard: PolicyGuard, now_s: Callable[[], float]) -> None:
        self.guard, self._now_s = guard, now_s
        self._faults_before, self._asked_s = 0, now_s()

    @property
    def is_ready(self) -> bool:
        return self.guard.client.state == "ready"

    def begin_stage(self) -> None:
        self._faults_before, self._asked_s = self._all_faults, self._now_s()

    def fault(self, faults_max: int, is_at_work: bool) -> str:
        """What is wrong with it beyond what is forgiven; "" for nothing. is_at_work: it has been ready in this stage."""
        client = self.guard.client
        if client.state == "refused":
            return f"its bundle was refused: {client.detail}"
        faults = self._all_faults - self._faults_before
        if faults > faults_max:
            last = self.guard.breaker.reason or "its process ended"
            return f"its breaker opened or its process ended {faults} times; the last: {last}"
        if not is_at_work and self._now_s() - self._asked_s > READY_S:
            return f"its process was not ready within {READY_S:g} s"
        return ""

    @property
    def _all_faults(self) -> int:
        return self.guard.breaker.openings + self.guard.client.restarts
