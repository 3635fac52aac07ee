"""A stage at work in the service: the candidate beside the incumbent, in shadow or in a canary. Hooks in when it begins, out when it
ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import numpy as np

from envs.decision import predictor as P
from envs.domain.snapshot import BoolArray, FloatArray
from runtime.rollout.gates import Verdict, canary_gates, shadow_gates, verdict
from runtime.rollout.settings import CanaryGate, RolloutEntry
from runtime.rollout.stage_stats import CanaryStats, ShadowStats
from runtime.rollout.switchback import CANDIDATE, Switchback, counts
from runtime.scheduling.call_ledger import DONE, CallAccount
from runtime.scheduling.dispatcher import Dispatcher
from runtime.scheduling.online_scheduler import POLICY, Made, Question
from runtime.scheduling.policy_client import PolicyAnswer
from runtime.scheduling.policy_guard import PolicyGuard

UNCOUNTED = frozenset(("nothing_allowed", "queue", "no_policy", "breaker_open", "policy_gone", "policy_starting"))
"""Causes of a fallback that say nothing about the policy, or nothing new: openings of its breaker and ends of its process are counted."""


class Trial(Protocol):
    """One stage. `look` is called several times a second."""

    stats: Any

    def attach(self) -> None: ...
    def detach(self) -> None: ...
    def look(self, seconds: float) -> None: ...
    def verdict(self, policy_fault: str) -> Verdict: ...
    def kept(self) -> dict[str, Any]: ...
    def shown(self) -> dict[str, Any]: ...


class ShadowTrial:
    """Asks the candidate what it would have done, after each decision; nobody waits for it, and no request is copied."""

    def __init__(self, dispatcher: Dispatcher, guard: PolicyGuard, settings: Callable[[], RolloutEntry], stats: ShadowStats) -> None:
        self._scheduler, self._guard, self._settings, self.stats = dispatcher.scheduler, guard, settings, stats
        self._seen = 0
        self._is_attached = False

    def attach(self) -> None:
        self._is_attached = True
        self._scheduler.listeners.append(self._decided)

    def detach(self) -> None:
        self._is_attached = False
        self._scheduler.listeners.remove(self._decided)

    def look(self, seconds: float) -> None:
        self.stats.seconds += seconds

    def verdict(self, policy_fault: str) -> Verdict:
        return verdict(shadow_gates(self._settings().shadow, self.stats, policy_fault))

    def kept(self) -> dict[str, Any]:
        return dict(msgspec.to_builtins(self.stats))

    def shown(self) -> dict[str, Any]:
        stats = self.stats
        derived = {"agreement": stats.agreement, "predicted_regret": stats.regret, "fallback_share": stats.fallback_share}
        return {"shadow": self.kept() | derived}

    def _decided(self, made: Made) -> None:
        self._seen += 1
        point = made.point
        if self._seen % self._settings().shadow.every or not point.allowed_groups.any():
            return
        candidates, context = made.observation
        if not (np.isfinite(candidates).all() and np.isfinite(context).all()):
            return
        future = self._guard.client.ask(candidates, context, point.mask)
        if future is None:
            self.stats.skipped += 1
            return
        mask, utility, acted = point.mask.copy(), point.estimates[:, P.E_UTILITY].copy(), made.decided.index
        future.add_done_callback(lambda done: self._answered(done.result(), mask, utility, acted))

    def _answered(self, answer: PolicyAnswer, mask: BoolArray, utility: FloatArray, acted: int) -> None:
        if not self._is_attached:
            return
        stats, guard = self.stats, self._guard
        fault = guard.fault_of(answer, mask) or ("deadline" if answer.took_s > guard.deadline_s else None)
        stats.decisions += 1
        if fault is not None:
            guard.breaker.record_failure(fault)
            stats.note_fallback(fault)
            return
        guard.breaker.record_success()
        if answer.outside > guard.outside_max:
            stats.note_fallback("outside_training")
            return
        stats.good += 1
        stats.agreed += answer.index == acted
        if max(answer.index, acted) < len(utility):  # both chose a group
            stats.regrets += 1
            stats.regret_total += float(utility[acted] - utility[answer.index])


class CanaryTrial:
    """The candidate decides for its arm's calls."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        guard: PolicyGuard,
        settings: Callable[[], RolloutEntry],
        gate: Callable[[], CanaryGate],
        stats: CanaryStats,
        switchback: Switchback,
    ) -> None:
        self._ledger, self._scheduler = dispatcher.ledger, dispatcher.scheduler
        self._guard, self._settings, self._gate, self.stats, self.switchback = guard, settings, gate, stats, switchback

    def attach(self) -> None:
        self._ledger.listeners.append(self._call_ended)
        self._scheduler.listeners.append(self._decided)
        self._scheduler.guard_of = self._guard_of
        self._ledger.arm_of = self.switchback.arm_of

    def detach(self) -> None:
        self._ledger.arm_of = None
        self._scheduler.guard_of = None
        self._scheduler.listeners.remove(self._decided)
        self._ledger.listeners.remove(self._call_ended)

    def look(self, seconds: float) -> None:
        self.stats.seconds += seconds
        for pair in self.switchback.pairs_over():
            self.stats.take_pair(pair, self._settings().calls_per_slice_min)

    def verdict(self, policy_fault: str) -> Verdict:
        agreement = self._guard.agreement
        share = agreement.share if agreement.is_full else None
        return verdict(canary_gates(self._settings(), self._gate(), self.stats, policy_fault, share))

    def kept(self) -> dict[str, Any]:
        return dict(msgspec.to_builtins(self.stats))

    def shown(self) -> dict[str, Any]:
        stats, now = self.stats, self.switchback
        arms = {
            name: msgspec.to_builtins(arm)
            | {"goodput": arm.goodput, "served_share": arm.served_share, "fallback_share": arm.fallback_share}
            for name, arm in (("incumbent", stats.incumbent), ("candidate", stats.candidate))
        }
        tests = {
            name: {"mean": test.mean, "low": test.low, "high": test.high, "pairs": test.count, "error_chance": test.error_chance}
            for name, test in (("goodput", stats.goodput), ("served", stats.served))
        }
        current = {"arm": now.current_arm(), "next_in_s": round(now.next_switch_s(), 3), "pairs_left_out": stats.pairs_left_out}
        return {"arms": arms, "tests": tests, "slice": current}

    def _guard_of(self, question: Question) -> PolicyGuard | None:
        return self._guard if self._ledger.arm(question.request.request_id) == CANDIDATE else self._scheduler.guard

    def _decided(self, made: Made) -> None:
        arm = self._ledger.arm(made.question.request.request_id)
        if not arm:
            return
        stats, decided = self.stats.arm(arm), made.decided
        stats.decisions += 1
        if decided.source != POLICY and decided.cause not in UNCOUNTED:
            stats.fallbacks[decided.cause] = stats.fallbacks.get(decided.cause, 0) + 1

    def _call_ended(self, account: CallAccount) -> None:
        if not account.arm:
            return
        self.switchback.call_ended(account)
        self.stats.arm(account.arm).all_calls += 1
        if account.arm == CANDIDATE and counts(account):
            self.stats.failures_running = 0 if account.end == DONE else self.stats.failures_running + 1
