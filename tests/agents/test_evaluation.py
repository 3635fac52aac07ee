"""Running contestants over worlds: the same worlds for all, the same numbers again, every request accounted for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces

from agents import heuristics
from agents.evaluation import BundleScheduler, Contestant, WorldRunner, load_one, make_scheduler, run_world
from agents.export import bundle_contents, export_bundle
from agents.heuristics.predicting import LinearScore
from agents.policies.candidate_policy import CandidatePolicy
from agents.policy_bundle import BundleError, BundlePolicy, BundleSchema
from agents.report import EvaluationResults, table_rows
from envs.cluster.cluster_process import ClusterProcess
from envs.decision.observation import CONTEXT, FEATURES, OBSERVATION_VERSION
from envs.scenario.cluster_file import load_cluster
from envs.traces.synthetic_twin import synthesize
from envs.world_sampler import WorldSampler

REQUESTS = 40


@pytest.fixture(scope="module")
def sampler() -> WorldSampler:
    """Forty requests of a made-up conversation trace on a mixed pair and a small card."""
    trace = synthesize("azure-conv", 120.0, rng=np.random.default_rng(3))
    return WorldSampler(trace, (0.0, 100.0), (load_cluster("unlike-3"),), REQUESTS, (1.0, 2.0))


@pytest.fixture(scope="module")
def worlds(sampler):
    return sampler.fixed(2, seed=5)


def without_clock(summary: dict) -> dict:
    """A summary without what depends on the machine's speed."""
    return {name: value for name, value in summary.items() if name not in ("cpu_s", "decisions_per_s")}


@pytest.mark.fault("K12")
@pytest.mark.parametrize("router", ["least_completion", "round_robin", "clairvoyant"])
def test_every_request_has_an_outcome(worlds, router):
    found = run_world(worlds[0], Contestant(router, router))
    assert sum(found["counts"].values()) == REQUESTS == found["count"]
    assert set(found["counts"]) == {"COMPLETED", "REFUSED", "UNSERVABLE", "FAILED", "UNFINISHED"}
    assert found["illegal_actions"] == 0


def test_same_world_same_numbers(worlds):
    """Also for a router that draws: its stream comes from the world's seed."""
    for router in ("least_completion", "power_of_two"):
        first, second = (without_clock(run_world(worlds[0], Contestant(router, router))) for _ in range(2))
        assert first == second


def test_contestants_meet_the_same_world(worlds):
    """Paired: requests and faults do not depend on who decides."""
    ours, theirs = (ClusterProcess(worlds[0], decisions=("route",)) for _ in range(2))
    for cluster, router in ((ours, "round_robin"), (theirs, "least_completion")):
        cluster.run({"route": heuristics.make("route", router, np.random.default_rng(0))})
    assert np.array_equal(ours.trace.arrival_s, theirs.trace.arrival_s)
    assert np.array_equal(ours.trace.output_tokens, theirs.trace.output_tokens)
    assert ours.faults == theirs.faults
    assert not np.array_equal(ours.outcomes.group_index, theirs.outcomes.group_index), "the routers did decide differently"


def test_runner_returns_the_order_of_its_pairs(worlds):
    """In this process: the summaries stand in the order asked for, progress is told once each, and equal run_world's."""
    pairs = [(world, Contestant(name, name)) for name in ("round_robin", "least_completion") for world in worlds]
    ticks = []
    with WorldRunner(processes=1) as runner:
        found = runner.map(pairs, progress=lambda: ticks.append(1))
    assert [row["world"] for row in found] == [world.name for world, _ in pairs]
    assert len(ticks) == 4
    assert without_clock(found[3]) == without_clock(run_world(*pairs[3]))


def test_worker_processes_change_no_number(worlds):
    pairs = [(world, Contestant("a", "least_completion")) for world in worlds]
    with WorldRunner(processes=1) as here, WorldRunner(processes=2) as there:
        assert [without_clock(row) for row in here.map(pairs)] == [without_clock(row) for row in there.map(pairs)]


def test_no_processes_is_refused():
    with pytest.raises(ValueError, match="processes=0 must be at least 1"):
        WorldRunner(processes=0)


def test_unknown_contestant_is_named(worlds):
    with pytest.raises(ValueError, match='did you mean "least_completion"'):
        run_world(worlds[0], Contestant("x", "least_complete"))
    with pytest.raises(BundleError, match="is not a bundle directory"):
        run_world(worlds[0], Contestant("x", "bundle:/nowhere"))


def schema_for(candidates_max: int) -> BundleSchema:
    return BundleSchema("route", FEATURES, CONTEXT, OBSERVATION_VERSION, candidates_max)


def small_policy(candidates_max: int) -> CandidatePolicy:
    """An untrained policy over this program's own observation."""
    space = spaces.Dict(
        {
            "candidates": spaces.Box(-10, 10, (candidates_max, len(FEATURES)), np.float32),
            "context": spaces.Box(-10, 10, (len(CONTEXT),), np.float32),
            "mask": spaces.Box(0, 1, (candidates_max,), np.float32),
        }
    )
    torch.manual_seed(0)
    policy = CandidatePolicy(space, spaces.Discrete(candidates_max), lambda _: 1e-3, hidden=16)
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(64, candidates_max, len(FEATURES))).astype(np.float32)
    policy.normaliser.fit(rows, rng.normal(size=(64, len(CONTEXT))).astype(np.float32), np.ones((64, candidates_max), np.float32))
    return policy


def route_with(world, candidates_max: int, fallback) -> tuple[ClusterProcess, BundleScheduler]:
    policy = BundlePolicy(bundle_contents(small_policy(candidates_max), schema_for(candidates_max), {}, {}))
    cluster = ClusterProcess(world, decisions=("route",))
    router = BundleScheduler(policy, fallback)
    cluster.run({"route": router})
    return cluster, router


class Forbidden:
    def choose(self, point):
        raise AssertionError("the fallback was asked although the bundle can decide")


def test_bundle_decides_without_its_fallback(worlds):
    cluster, router = route_with(worlds[0], 24, Forbidden())
    assert router.fallbacks == 0 and cluster.illegal_actions == 0


def test_more_candidates_than_the_bundle_knows_go_to_the_fallback(worlds):
    """Two groups, hold and refuse are four candidates; a bundle for three leaves every request to the heuristic, counted."""
    cluster, router = route_with(worlds[0], 3, heuristics.make("route", "least_completion", np.random.default_rng(0)))
    assert router.fallbacks >= REQUESTS
    reference = ClusterProcess(worlds[0], decisions=("route",))
    reference.run({"route": heuristics.make("route", "least_completion", np.random.default_rng(0))})
    assert np.array_equal(cluster.outcomes.group_index, reference.outcomes.group_index)


def test_linear_weights_travel_as_text(worlds):
    """`linear:` and the same weights in place give one choice; the text is what a worker process receives."""
    weights = np.round(np.random.default_rng(0).normal(size=len(LinearScore.features())), 3)
    cluster = ClusterProcess(worlds[0], decisions=("route",))
    made = make_scheduler("route", "linear:" + ",".join(map(str, weights)), np.random.default_rng(0), cluster)
    point = cluster.next_decision()
    assert np.array_equal(made.weights, weights)
    assert made.choose(point) == LinearScore(weights).choose(point)


class Halving:
    """A runner whose contestant keeps 95 % up to rate 3.7 and no further."""

    def goodput(self, worlds, contestant):
        return 0.99 if worlds <= 3.7 else 0.5


@pytest.mark.parametrize("bracket", [(1.0, 4.0), (0.01, 0.02), (50.0, 90.0)])
def test_load_one_finds_the_edge_from_any_bracket(bracket):
    """Six halvings of a factor of two, in logarithms: within 2 ** (1 / 64) - 1 = 1.1 % below the edge; 4 / 1 is two factors."""
    found = load_one(Halving(), lambda scale: scale, Contestant("x", "least_completion"), *bracket)
    assert 3.7 / 2 ** (2 / 64) <= found <= 3.7


@pytest.mark.fault("K12")
def test_counts_reach_the_table(worlds):
    """A world's own summary, in the report's table: what completed and what was refused are the world's numbers."""
    summaries = tuple(run_world(world, Contestant("r", "round_robin")) for world in worlds)
    rows = table_rows(EvaluationResults("t", True, ("a", "b"), {"r": summaries}, "r"), np.random.default_rng(0))
    assert rows[0].counts["COMPLETED"] == sum(s["counts"]["COMPLETED"] for s in summaries) > 0
    assert sum(rows[0].counts.values()) == 2 * REQUESTS


def test_exported_bundle_runs_by_name(worlds, tmp_path):
    export_bundle(small_policy(24), tmp_path / "route", schema_for(24), observations=200)
    found = run_world(worlds[0], Contestant("ppo", f"bundle:{tmp_path / 'route'}"))
    assert sum(found["counts"].values()) == REQUESTS and found["illegal_actions"] == 0
