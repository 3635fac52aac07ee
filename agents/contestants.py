"""Who is compared in an experiment's tests: heuristics alone and together, and each learned policy beside those it was trained beside."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agents.evaluation import Contestant
from agents.experiment_config import CompareChoice
from envs.decision.actions import Decision
from envs.scheduling_env import ALL_DECISIONS

CEILING = "clairvoyant (unreachable)"
FROM_RANDOM = "route_from_random"
"""The agent that routes by PPO alone; `route` imitates first."""


@dataclass(slots=True)
class Best:
    """Best heuristic of each kind on validation, as contestant texts. scores: mean goodput there, by router, "split x", "rebalance x"."""

    route: str = "least_completion"
    split: str = "planner"
    rebalance: str = "threshold"
    scores: dict[str, float] = field(default_factory=dict)

    def without(self, asked: Sequence[str]) -> tuple[tuple[Decision, str], ...]:
        return tuple((decision, getattr(self, decision)) for decision in ALL_DECISIONS if decision not in asked)

    @property
    def route_name(self) -> str:
        return "linear_cem" if self.route.startswith("linear") else self.route

    @property
    def stack_name(self) -> str:
        """The row in which the best heuristics answer every kind of decision."""
        return f"rebalance:{self.rebalance}"

    @property
    def name(self) -> str:
        """The best row on validation: the router alone, or with splitter and rebalancer where they add to it."""
        stack, router = self.scores.get(f"rebalance {self.rebalance}", 0.0), self.scores.get(self.route_name, 0.0)
        return self.stack_name if stack > router else self.route_name


def contestants(compare: CompareChoice, linear: str, best: Best, bundles: Mapping[str, Path]) -> list[Contestant]:
    """linear: text of the tuned linear score, "" where none was tuned; bundles: by agent."""
    rows = [Contestant(name, name) for name in compare.routers]
    if linear:
        rows.append(Contestant("linear_cem", linear))
    rows += [Contestant(f"split:{name}", best.route, name) for name in compare.splitters]
    rows += [Contestant(f"rebalance:{name}", best.route, best.split, name) for name in compare.rebalancers]
    if compare.clairvoyant:
        rows.append(Contestant(CEILING, "clairvoyant"))
    texts = {agent: f"bundle:{path}" for agent, path in bundles.items()}
    if "route" in texts:
        rows.append(Contestant("ppo_route", texts["route"], best.split, best.rebalance))
    if FROM_RANDOM in texts:
        rows.append(Contestant(f"ppo_{FROM_RANDOM}", texts[FROM_RANDOM], best.split, best.rebalance))
    if "split" in texts:
        rows.append(Contestant("ppo_split", best.route, texts["split"], best.rebalance))
    if "rebalance" in texts:
        rows.append(Contestant("ppo_rebalance", best.route, best.split, texts["rebalance"]))
    if {"route", "split", "rebalance"} <= set(texts):
        rows.append(Contestant("ppo_together", texts["route"], texts["split"], texts["rebalance"]))
    if "joint" in texts:
        rows.append(Contestant("ppo_joint", texts["joint"], texts["joint"], texts["joint"]))
    return rows


def counterparts(best: Best, rows: Collection[str]) -> dict[str, str]:
    """Learned policy -> the row of the heuristics that it had beside it, with the best one in its own place."""
    return {name: best.stack_name for name in rows if name.startswith("ppo") and best.stack_name in rows}
