"""Routers on the predictor's estimates: work left, completion, slack, prefix affinity, matching score, linear score."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from agents.heuristics.counting import pick_lowest
from envs.decision import predictor as P
from envs.decision.actions import DecisionPoint
from envs.decision.observation import GROUP_FEATURES, ROUTE_FEATURES, route_and_group_rows
from envs.domain.snapshot import FloatArray


@dataclass(frozen=True, slots=True)
class LeastWorkLeft:
    """Group that would be empty soonest."""

    def choose(self, point: DecisionPoint) -> int:
        return pick_lowest(point, point.estimates[:, P.E_WORK_LEFT_S])


@dataclass(frozen=True, slots=True)
class LeastCompletion:
    """Group where the request is predicted to finish first."""

    def choose(self, point: DecisionPoint) -> int:
        return pick_lowest(point, point.estimates[:, P.E_COMPLETION_S])


@dataclass(frozen=True, slots=True)
class LeastSlack:
    """SLO-aware: the smallest worst ratio of predicted TTFT or TPOT to its limit; completion breaks near ties."""

    completion_weight: float = 0.02

    def choose(self, point: DecisionPoint) -> int:
        estimates = point.estimates
        worst = np.maximum(estimates[:, P.E_TTFT_RATIO], estimates[:, P.E_TPOT_RATIO])
        return pick_lowest(point, worst + self.completion_weight * np.log(np.maximum(estimates[:, P.E_COMPLETION_S], 1e-3)))


@dataclass(frozen=True, slots=True)
class NetUtility:
    """Own predicted utility plus the harm to residents, by the closed-form predictor; completion breaks ties."""

    completion_weight: float = 0.02

    def choose(self, point: DecisionPoint) -> int:
        estimates = point.estimates
        net = estimates[:, P.E_OWN] + estimates[:, P.E_HARM]
        return pick_lowest(point, self.completion_weight * np.log(np.maximum(estimates[:, P.E_COMPLETION_S], 1e-3)) - net)


@dataclass(frozen=True, slots=True)
class PrefixAffinity:
    """Longest cached prefix, unless that group is `guard` times as loaded as the least loaded one; else least completion."""

    guard: float = 1.5
    least_hit_tokens: int = 64

    def choose(self, point: DecisionPoint) -> int:
        completion = point.estimates[:, P.E_COMPLETION_S]
        allowed = point.allowed_groups
        if allowed.any():
            best = completion[allowed].min()
            eligible = allowed & (point.hits >= self.least_hit_tokens) & (completion <= self.guard * best)
            if eligible.any():
                score = np.where(eligible, -point.hits.astype(np.float64), np.inf)
                return int(score.argmin())
        return pick_lowest(point, completion)


@dataclass(frozen=True, slots=True, eq=False)
class LinearScore:
    """Highest linear score over the observation's group and route features; tuned by `agents.cross_entropy`.

    weights: shape (features,), in the order of `LinearScore.features()`.
    """

    weights: FloatArray = field(default_factory=lambda: LinearScore.start())

    @staticmethod
    def features() -> tuple[str, ...]:
        return GROUP_FEATURES + ROUTE_FEATURES

    @staticmethod
    def start() -> FloatArray:
        """Weights to tune from: those of `NetUtility`."""
        names = LinearScore.features()
        weights = np.zeros(len(names))
        weights[names.index("net_utility")] = 1.0
        weights[names.index("log_completion_s")] = -0.02
        return weights

    def choose(self, point: DecisionPoint) -> int:
        return pick_lowest(point, -(np.clip(route_and_group_rows(point), -10.0, 10.0) @ self.weights))
