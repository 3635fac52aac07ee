"""What a rollout shows to Prometheus: stage, calls and decisions by arm, and the tests' intervals. Read when somebody scrapes."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from runtime.rollout.control import RolloutControl
from runtime.rollout.stage_stats import CanaryStats
from runtime.rollout.state import STAGES
from runtime.rollout.switchback import ARMS


class RolloutMetrics(Collector):
    """Labels are stages, arms and tests: known names all."""

    def __init__(self, control: RolloutControl) -> None:
        self._control = control

    def collect(self) -> Iterator[Metric]:
        state = self._control.state
        stage = GaugeMetricFamily("ballast_rollout_stage", "1 for the stage that the rollout is in.", labels=("stage",))
        for name in STAGES:
            stage.add_metric((name,), float(state.stage == name))
        step = GaugeMetricFamily(
            "ballast_rollout_canary", "The canary stage, from 1; 0 outside.", value=state.step + 1 if state.stage == "canary" else 0
        )
        yield from (stage, step)
        stats = self._control.stats
        if isinstance(stats, CanaryStats):
            yield from _of_canary(stats)


def _of_canary(stats: CanaryStats) -> Iterator[Metric]:
    calls = CounterMetricFamily("ballast_rollout_calls", "Calls of this stage by arm, compared or not.", labels=("arm",))
    decisions = CounterMetricFamily("ballast_rollout_decisions", "Decisions of this stage by arm.", labels=("arm",))
    for arm in ARMS:
        calls.add_metric((arm,), float(stats.arm(arm).all_calls))
        decisions.add_metric((arm,), float(stats.arm(arm).decisions))
    difference = GaugeMetricFamily(
        "ballast_rollout_difference", "Candidate less incumbent: interval that holds at any time.", labels=("test", "end")
    )
    for name, test in (("goodput", stats.goodput), ("served", stats.served)):
        difference.add_metric((name, "low"), test.low)
        difference.add_metric((name, "high"), test.high)
    yield from (calls, decisions, difference)
