"""The door: which calls come in, and which of those under pressure are served with a shorter answer. Nothing was queued for one that is
turned away."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import msgspec

from envs.decision.circuit_breaker import BreakerPanel, ClassBreaker, ProbeLease
from envs.decision.overload import OverloadControl
from envs.domain.requests import SERVICE_CLASSES, Request
from runtime.calls import Call, Refusal
from runtime.scheduling.dispatch_settings import DispatchSettings
from runtime.scheduling.group_keeper import GroupKeeper
from runtime.scheduling.telemetry import Telemetry

RETRY_AFTER_MIN_S = 0.1
RETRY_AFTER_MAX_S = 30.0


class Door:
    """`settings` may be replaced at any time. is_draining: no new calls. counts: what happened, by name."""

    def __init__(
        self,
        telemetry: Telemetry,
        panel: BreakerPanel,
        groups: GroupKeeper,
        class_breaker: ClassBreaker,
        overload: OverloadControl,
        settings: DispatchSettings,
        counts: Counter[str],
        now_s: Callable[[], float],
    ) -> None:
        self._telemetry, self._panel, self._groups, self._class_breaker = telemetry, panel, groups, class_breaker
        self._overload, self.settings, self._counts, self._now_s = overload, settings, counts, now_s
        self.is_draining = False
        self._next_id = 0

    def admit(self, call: Call, in_flight: int) -> tuple[Request, ProbeLease | None]:
        """The request, and the leave of its class where that is on probation. in_flight: calls inside already.

        Raises: Refusal for what cannot be served, or not now.
        """
        now_s = self._now_s()
        tokens = call.prompt_tokens + call.max_tokens
        context = self._telemetry.cluster.limits.context_tokens
        if tokens > context or not self._telemetry.fits(tokens).any():
            most = min(context, int(self._telemetry.kv_tokens.max(initial=0)))
            asked = f"{call.prompt_tokens} prompt tokens and max_tokens={call.max_tokens}"
            raise Refusal("too_long", f"{asked} need {tokens}; at most {most} can be served")
        if self.is_draining:
            raise refusal("draining", "the service is shutting down", 1.0)
        if in_flight >= self.settings.in_flight_max:
            raise refusal("queue_full", f"{in_flight} calls are being served; at most that many", 1.0)
        if not (self._groups.open_to_new() | self._groups.is_returning).any():
            raise refusal("no_capacity", "no group can serve now", self.retry_after_s())
        admission = self._class_breaker.admit(call.class_index)
        if not admission.is_allowed:
            name = SERVICE_CLASSES[call.class_index].name
            raise refusal("class_shed", f"class {name} is shed: too many of its requests timed out", admission.retry_after_s)
        self._next_id += 1
        self._telemetry.arrived(now_s, call.class_index, call.prompt_tokens)
        return Request(self._next_id, now_s, max(1, call.prompt_tokens), call.class_index, call.session), admission.lease

    def degraded(self, call: Call) -> Call:
        """The call as it is served: with a shorter answer where its class may be degraded and the pressure is high."""
        most = self.settings.degrade_max_tokens.get(SERVICE_CLASSES[call.class_index].name)
        if most is None or self._overload.strain(call.priority, self._now_s()) < self.settings.degrade_above:
            return call
        most = max(most, call.min_tokens)
        if call.max_tokens <= most:
            return call
        self._counts["degraded"] += 1
        call.notes.degraded = f"max_tokens={most}"
        return msgspec.structs.replace(call, max_tokens=most)

    def retry_after_s(self) -> float:
        """Until a breaker's time comes, within bounds."""
        wait_s = self._panel.next_change_s() - self._now_s()
        return min(RETRY_AFTER_MAX_S, max(RETRY_AFTER_MIN_S, wait_s)) if math.isfinite(wait_s) else 1.0


def refusal(reason: str, message: str, retry_after_s: float | None = None) -> Refusal:
    return Refusal(reason, message, retry_after_s=retry_after_s)
