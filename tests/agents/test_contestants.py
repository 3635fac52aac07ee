"""Who plays beside whom in an experiment's tests, and which row counts as the best heuristic."""

from __future__ import annotations

from pathlib import Path

import pytest

from agents.contestants import FROM_RANDOM, Best, contestants, counterparts
from agents.experiment_config import CompareChoice

COMPARE = CompareChoice(routers=["round_robin", "net_utility"], splitters=["keep", "even"], rebalancers=["never", "threshold"])
BEST = Best("linear:1,2", "even", "threshold", {"net_utility": 0.8, "linear_cem": 0.9, "split even": 0.91, "rebalance threshold": 0.92})


@pytest.fixture
def rows() -> dict[str, dict[str, str]]:
    agents = ("route", FROM_RANDOM, "split", "rebalance")
    made = contestants(COMPARE, "linear:1,2", BEST, {agent: Path("bundles") / agent for agent in agents})
    return {row.name: row.parts() for row in made}


def test_an_agent_is_tested_beside_the_heuristics_it_was_trained_beside(rows):
    for agent, decision in (("route", "route"), (FROM_RANDOM, "route"), ("split", "split"), ("rebalance", "rebalance")):
        beside = dict(rows[f"ppo_{agent}"])
        assert beside.pop(decision) == f"bundle:bundles/{agent}"
        assert beside == dict(BEST.without((decision,)))


def test_the_counterpart_has_the_best_heuristic_in_the_agents_place(rows):
    assert counterparts(BEST, rows) == {name: "rebalance:threshold" for name in rows if name.startswith("ppo")}
    assert rows["rebalance:threshold"] == {"route": BEST.route, "split": "even", "rebalance": "threshold"}


@pytest.mark.parametrize(("alone", "name"), [(0.9, "rebalance:threshold"), (0.92, "linear_cem"), (0.93, "linear_cem")])
def test_the_best_row_is_a_stack_only_where_that_adds_to_the_router(rows, alone, name):
    best = Best(BEST.route, BEST.split, BEST.rebalance, BEST.scores | {"linear_cem": alone})
    assert best.name == name and name in rows
