"""Name -> heuristic, per kind of decision. A name here is at once a baseline, a companion in training and a fallback in service."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from agents.heuristics import controlling, counting, predicting
from agents.heuristics.match import MatchingScore
from agents.heuristics.what_if import WhatIf
from envs.decision.actions import Scheduler
from envs.decision.split_planner import CORNERS
from envs.domain.suggestions import unknown_name

Maker = Callable[[np.random.Generator], Scheduler]

ROUTERS: dict[str, Maker] = {
    "random": counting.RandomRouter,
    "round_robin": lambda rng: counting.RoundRobin(),
    "weighted_round_robin": lambda rng: counting.WeightedRoundRobin(),
    "shortest_queue": lambda rng: counting.ShortestQueue(),
    "power_of_two": counting.PowerOfTwo,
    "least_kv": lambda rng: counting.LeastKv(),
    "least_work_left": lambda rng: predicting.LeastWorkLeft(),
    "least_completion": lambda rng: predicting.LeastCompletion(),
    "least_slack": lambda rng: predicting.LeastSlack(),
    "net_utility": lambda rng: predicting.NetUtility(),
    "prefix_affinity": lambda rng: predicting.PrefixAffinity(),
    "matching_score": lambda rng: MatchingScore(),
    "what_if": WhatIf,
}
SPLITTERS: dict[str, Maker] = {
    "even": lambda rng: controlling.TowardCorner(CORNERS.index("even")),
    "compute": lambda rng: controlling.TowardCorner(CORNERS.index("compute")),
    "bandwidth": lambda rng: controlling.TowardCorner(CORNERS.index("bandwidth")),
    "memory": lambda rng: controlling.TowardCorner(CORNERS.index("memory")),
    "planner": lambda rng: controlling.BestSplit(),
    "keep": lambda rng: controlling.Never(),
}
REBALANCERS: dict[str, Maker] = {
    "never": lambda rng: controlling.Never(),
    "threshold": lambda rng: controlling.Threshold(),
    "elastic": lambda rng: controlling.Elastic(),
    "virtual_usage": lambda rng: controlling.VirtualUsage(),
}
_TABLES = {"route": ROUTERS, "split": SPLITTERS, "rebalance": REBALANCERS}


def make(decision: str, name: str, rng: np.random.Generator) -> Scheduler:
    """Heuristic `name` for `decision` (route, split, rebalance). Raises ValueError naming the known ones."""
    table = _TABLES[decision]
    if name not in table:
        raise ValueError(unknown_name(f"{decision} heuristic", name, table))
    return table[name](rng)
