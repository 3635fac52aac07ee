"""Limits and habits of the control loop and of who carries its commands out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from agents.heuristics import REBALANCERS, SPLITTERS
from envs.decision.move_discipline import DisciplineSettings
from envs.domain.suggestions import unknown_name
from runtime.setting_bounds import Bounds, check_bounds

PERIOD_S: Bounds = (0.001, 1e6)
WAIT_S: Bounds = (0.0, 1e7)
BOUNDS: Mapping[str, Bounds] = {
    "budget_fraction": (0.0, 1.0),
    "tick_s": PERIOD_S, "deadline_s": PERIOD_S, "start_deadline_s": PERIOD_S, "cold_start_s": WAIT_S, "rebuild_s": WAIT_S,
    "fall_back_stay_s": WAIT_S, "drain_patience_s": WAIT_S, "split_stay_s": WAIT_S, "scale_stay_s": WAIT_S,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ControlSettings:
    """Times in s.

    is_on: whether split and rebalance decisions are made at all. tick_s: how often. split, rebalance: heuristics that answer where no
    policy does.
    deadline_s: what a policy gets for a decision. budget_fraction, split_stay_s, scale_stay_s: as in DisciplineSettings. cold_start_s,
    rebuild_s: prices
    until some were measured. fall_back_stay_s: a group that fell back is offered its other ranks again only after so long.
    start_deadline_s:
    until a group that was switched on must serve. drain_patience_s: calls still running in a draining group after that go on elsewhere.
    """

    is_on: bool = True
    tick_s: float = 5.0
    split: str = "planner"
    rebalance: str = "threshold"
    deadline_s: float = 0.05
    budget_fraction: float = 0.05
    split_stay_s: float = 10.0
    scale_stay_s: float = 30.0
    cold_start_s: float = 30.0
    rebuild_s: float = 2.0
    fall_back_stay_s: float = 60.0
    start_deadline_s: float = 180.0
    drain_patience_s: float = 30.0

    def __post_init__(self) -> None:
        for name, table in (("split", SPLITTERS), ("rebalance", REBALANCERS)):
            if getattr(self, name) not in table:
                raise ValueError(unknown_name(f"{name} heuristic", getattr(self, name), table))
        check_bounds(self, BOUNDS)
        self.discipline()

    def discipline(self) -> DisciplineSettings:
        return DisciplineSettings(budget_fraction=self.budget_fraction, split_stay_s=self.split_stay_s, scale_stay_s=self.scale_stay_s)
