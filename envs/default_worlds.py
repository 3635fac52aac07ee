"""The environment that the registered ids make: the default cluster and traffic, for a first look and for tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from envs.decision.actions import Decision, DecisionPoint, Scheduler
from envs.decision.predictor import E_COMPLETION_S
from envs.scenario.cluster_file import load_cluster
from envs.scheduling_env import EnvSettings, SchedulingEnv
from envs.traces.default_traces import default_trace
from envs.world_sampler import WorldSampler


class _Companion:
    """Routes to the group with the least predicted completion, and keeps everything else as it is."""

    def choose(self, point: DecisionPoint) -> int:
        if point.decision != "route":
            return 0
        groups = point.view.groups
        if point.allowed_groups.any():
            return int(np.where(point.allowed_groups, point.estimates[:, E_COMPLETION_S], np.inf).argmin())
        return groups if point.mask[groups] else groups + 1


def make_env(
    asked: tuple[Decision, ...] = ("route",),
    cluster: str = "mixed-8",
    trace: str = "azure-conv",
    requests: int = 400,
    rate_scales: tuple[float, float] = (1.0, 4.0),
    **settings: Any,
) -> SchedulingEnv:
    """Default worlds: slices of `requests` requests of a trace on one of the ready clusters."""
    table = default_trace(trace)
    window_s = (0.0, float(table.arrival_s[-1]) * 0.6)
    worlds = WorldSampler(table, window_s, (load_cluster(cluster),), requests, rate_scales)

    def companions(rng: np.random.Generator) -> dict[Decision, Scheduler]:
        return {} if "route" in asked else {"route": _Companion()}

    return SchedulingEnv(worlds, companions, EnvSettings(asked=tuple(asked), **settings))
