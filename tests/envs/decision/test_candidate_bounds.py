"""No decision ever lists more candidates than the bound, and a policy that is too small is refused before the first world."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from envs.cluster.faults import FaultRates
from envs.cluster.world import WorldOptions
from envs.decision.actions import CORNER_COUNT
from envs.decision.candidate_bounds import candidates_max, too_many_candidates
from envs.scheduling_env import EnvSettings, SchedulingEnv
from envs.world_sampler import WorldSampler
from tests.envs import small_worlds as W
from tests.envs.small_worlds import ALL, RandomLegal, play, traffic, world


def test_bounds_by_hand():
    """Pair, single card, no spare: keep + 5 corners of the pair; keep, the one that is not the target requeues or migrates, the
    pair falls back or is restored. With a parked card, REGROUP may make the single one a pair."""
    assert candidates_max("route", [2, 1], 0) == 4
    assert candidates_max("split", [2, 1], 0) == 1 + CORNER_COUNT
    assert candidates_max("rebalance", [2, 1], 0) == 1 + 1 + 1 + 1
    assert candidates_max("split", [2, 1, 1], 1) == 1 + 3 * CORNER_COUNT
    # all up: 2 requeue, 2 migrate, 1 scale in, 3 subsets; two off: 2 x (start, give away), 1 scale in, 1 subset
    assert candidates_max("rebalance", [2, 1, 1], 1) == 1 + max(2 + 2 + 1 + 3, 1 + 1 + 2 + 1 + 2, 0 + 0 + 4 + 1 + 1)
    assert candidates_max("split", [1, 1], 1) == 1, "a group of one card stays one where no group is larger"


@pytest.mark.parametrize("seed", range(3))
def test_no_world_lists_more(seed):
    """Random legal answers under faults of every kind, spares included: every decision stays within its bound."""
    spec = W.cluster(copies=2)
    ranks, parked = [len(group.ranks) for group in spec.groups], sum(spec.parked)
    made = world(traffic(90, 6.0, seed), spec, seed=seed, control_tick_s=0.5, cold_start_s=2.0, drain_s=30.0, fall_back_stay_s=1.0)
    made = replace(made, fault_rates=FaultRates(60, 60, 60, 60, 60, 60, length_mean_s=5.0))
    most: dict[str, int] = {}

    def see(process, point):
        most[point.decision] = max(most.get(point.decision, 0), len(point.commands))

    play(made, dict.fromkeys(ALL, RandomLegal(seed)), on_point=see)
    assert most["route"] == candidates_max("route", ranks, parked)
    for decision in ("split", "rebalance"):
        assert 1 < most[decision] <= candidates_max(decision, ranks, parked)


def test_an_environment_that_is_too_small_is_refused_when_it_is_made():
    """One line that names the cluster, the decision and the size that would do; that size is taken."""
    spec = W.cluster(copies=2)
    worlds = WorldSampler(traffic(20, 5.0, 1), (0.0, 100.0), (spec,), 10, (1.0, 1.0), WorldOptions())
    said = "max_candidates=8: cluster 'unlike-3' can list 31 candidates in a split decision; raise it to 31"
    with pytest.raises(ValueError, match=f"^{said}$"):
        SchedulingEnv(worlds, settings=EnvSettings(asked=ALL, max_candidates=8))
    SchedulingEnv(worlds, settings=EnvSettings(asked=ALL, max_candidates=31)).reset(seed=0)
    SchedulingEnv(worlds, settings=EnvSettings(asked=("route",), max_candidates=8)).reset(seed=0)


def test_a_world_of_a_larger_cluster_is_refused_at_its_reset():
    small, large = world(traffic(10, 5.0, 1)), world(traffic(10, 5.0, 1), W.cluster(copies=3))
    env = SchedulingEnv(lambda rng: small, settings=EnvSettings(max_candidates=8))
    env.reset(seed=0)
    with pytest.raises(ValueError, match=r"max_candidates=8: .* 11 candidates in a route decision; raise it to 11"):
        env.reset(seed=0, options={"world": large})
    assert too_many_candidates("x", ("route",), [1] * 6, 0, 8) is None


def test_ready_clusters_fit_the_shipped_sizes():
    """The default experiment's cluster stays within the default sizes for every agent."""
    from agents.experiment_config import ExperimentConfig
    from envs.scenario.cluster_file import load_cluster

    config = ExperimentConfig()
    for cluster in map(load_cluster, config.worlds.clusters):
        ranks = [len(group.ranks) for group in cluster.groups]
        for decision in ALL:
            assert candidates_max(decision, ranks, sum(cluster.parked)) <= config.max_candidates[decision]
    assert np.isfinite(candidates_max("rebalance", [1] * 64, 3))
