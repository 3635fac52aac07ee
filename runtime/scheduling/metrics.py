"""What the scheduling shows to Prometheus: decisions with their sources and causes, attempts, breakers, the policy's state."""

from __future__ import annotations

import math
from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from envs.domain.requests import SERVICE_CLASSES
from runtime.scheduling.dispatcher import Dispatcher
from runtime.scheduling.rank_metrics import RankMetrics

EVENTS = (
    "retries", "attempts_lost", "busy", "groups_lost", "bad_reports", "given_back", "requeued_calls", "moved_calls", "moves_done",
    "moves_refused", "moves_failed", "degraded",
)  # fmt: skip
POLICY_STATES = ("starting", "ready", "refused", "gone")


class SchedulingMetrics(Collector):
    """Read when somebody scrapes; nothing is added to a request's way. Labels are groups and known names: never a caller's."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher, self._ranks = dispatcher, RankMetrics(dispatcher)

    def collect(self) -> Iterator[Metric]:
        yield self._decisions()
        yield self._events()
        yield from self._groups()
        yield from self._overload()
        yield from self._policy()
        yield from self._ranks.collect()

    def _decisions(self) -> Metric:
        family = CounterMetricFamily(
            "ballast_decisions", "Route decisions by who made them and why not the policy.", labels=("source", "cause")
        )
        for (source, cause), count in list(self._dispatcher.scheduler.counts.items()):
            family.add_metric((source, cause), float(count))
        return family

    def _events(self) -> Metric:
        family = CounterMetricFamily("ballast_attempt_events", "What befell attempts and groups.", labels=("event",))
        for event in EVENTS:
            family.add_metric((event,), float(self._dispatcher.counts[event]))
        return family

    def _groups(self) -> Iterator[Metric]:
        dispatcher = self._dispatcher
        attempts = CounterMetricFamily("ballast_group_attempts", "Attempts sent to a group.", labels=("group",))
        breaker = GaugeMetricFamily(
            "ballast_group_breaker_state", "0 closed, 1 open, 2 half open, 3 its process is gone.", labels=("group",)
        )
        age = GaugeMetricFamily("ballast_group_report_age_seconds", "Age of the group's last report; absent if never.", labels=("group",))
        pace = GaugeMetricFamily("ballast_group_step_ratio", "Observed / predicted step time.", labels=("group",))
        view, states = dispatcher.view(), dispatcher.panel.states()
        for g, backend in enumerate(dispatcher.backends):
            attempts.add_metric((backend.name,), float(dispatcher.served[g]))
            breaker.add_metric((backend.name,), float(states[g]))
            pace.add_metric((backend.name,), float(view.correction[g]))
            if dispatcher.telemetry.reports[g] is not None:
                age.add_metric((backend.name,), float(view.report_age_s[g]))
        yield from (attempts, breaker, age, pace)
        held = GaugeMetricFamily("ballast_held", "Calls that wait for a group to take them.", value=float(dispatcher.held_calls.count))
        retries = GaugeMetricFamily("ballast_retries_under_way", "Of the retry budget.", value=float(dispatcher.retries.retrying))
        yield from (held, retries)

    def _overload(self) -> Iterator[Metric]:
        overload = self._dispatcher.overload
        pressure = GaugeMetricFamily(
            "ballast_overload_pressure", "Predicted over permitted time in the best group, at the last call.", labels=("service_class",)
        )
        shed = CounterMetricFamily("ballast_shed", "Calls turned away for want of time.", labels=("service_class",))
        for c, service in enumerate(SERVICE_CLASSES):
            pressure.add_metric((service.name,), float(overload.pressure[c]))
            shed.add_metric((service.name,), float(overload.shed[c]))
        yield from (pressure, shed)

    def _policy(self) -> Iterator[Metric]:
        guard = self._dispatcher.scheduler.guard
        if guard is None:
            return
        state = GaugeMetricFamily("ballast_policy_state", "1 for the state that the policy process is in.", labels=("state",))
        for name in POLICY_STATES:
            state.add_metric((name,), float(guard.client.state == name))
        yield state
        yield GaugeMetricFamily("ballast_policy_breaker_state", "0 closed, 1 open, 2 half open.", value=float(guard.breaker.state))
        yield CounterMetricFamily("ballast_policy_shadow_decisions", "Decided and not followed.", value=float(guard.shadow_decisions))
        yield CounterMetricFamily("ballast_policy_restarts", "Of the policy process.", value=float(guard.client.restarts))
        if (share := guard.agreement.share) is not None:
            yield GaugeMetricFamily("ballast_policy_agreement", "Share of compared decisions equal to the heuristic's.", value=share)
        silent_s = guard.client.oldest_unanswered_s
        yield GaugeMetricFamily(
            "ballast_policy_silent_seconds", "Age of its oldest question.", value=silent_s if math.isfinite(silent_s) else 0.0
        )
