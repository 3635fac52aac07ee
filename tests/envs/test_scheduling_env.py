"""The environment: checkers, masks, endings, rewards, random streams, and what happens in worlds at the edge."""

from __future__ import annotations

import json
import multiprocessing
import os
import warnings
from dataclasses import replace

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env as check_gymnasium
from stable_baselines3.common.env_checker import check_env as check_sb3

from agents.heuristics import ROUTERS, make
from agents.training_envs import _WorkerEnv, build_training_envs
from envs.cluster.faults import FaultEvent, FaultKind, FaultRates
from envs.decision.objective import value_of
from envs.domain.requests import SERVICE_CLASSES, OutcomeKind
from envs.scheduling_env import ALL_DECISIONS, EnvSettings, SchedulingEnv
from tests.envs import small_worlds as W
from tests.envs.small_worlds import LIMITS, Shortest, traffic, world

IDS = [f"Ballast/{name}-v0" for name in ("Route", "Split", "Rebalance", "Joint")]
FAST = dict(control_tick_s=1.0, cold_start_s=4.0, rebuild_s=1.0, drain_s=40.0)


def small_world(rng: np.random.Generator, requests: int = 60):
    made = world(traffic(requests, float(rng.uniform(2, 20)), int(rng.integers(1 << 30))), seed=int(rng.integers(1 << 30)), **FAST)
    return replace(made, fault_rates=FaultRates().scaled(20.0))


def overloaded_world(rng: np.random.Generator):
    """Ten times as many requests, 60 to 300 of them a second."""
    made = world(traffic(600, float(rng.uniform(60, 300)), int(rng.integers(1 << 30))), seed=int(rng.integers(1 << 30)), **FAST)
    return replace(made, fault_rates=FaultRates().scaled(20.0))


def small_env(asked=("route",), overloaded: bool = False, **settings) -> SchedulingEnv:
    worlds = overloaded_world if overloaded else small_world
    return SchedulingEnv(worlds, lambda rng: {} if "route" in asked else {"route": Shortest()}, EnvSettings(asked=asked, **settings))


def fixed_env(spec, asked=("route",), **settings) -> SchedulingEnv:
    return SchedulingEnv(
        lambda rng: spec, lambda rng: {} if "route" in asked else {"route": Shortest()}, EnvSettings(asked=asked, **settings)
    )


@pytest.mark.fault("K06")
@pytest.mark.parametrize("env_id", IDS)
def test_environment_checkers_pass_with_warnings_as_errors(env_id):
    """The one exception: Stable-Baselines advises a flat observation "or a custom policy"; ours is a custom policy, and a
    row per candidate is what lets it share weights."""
    env = gymnasium.make(env_id).unwrapped
    env.settings = replace(env.settings, max_decisions=50)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="Your observation candidates has an unconventional shape")
        check_gymnasium(env, skip_render_check=True)
        check_sb3(env)


def walk(env, steps: int, seed: int, p_last: float = 0.02) -> dict[str, int]:
    """Random masked steps over many episodes; every observation is checked. Returns counts."""
    rng = np.random.default_rng(seed)
    counts = {"episodes": 0, "illegal": 0, "refused": 0}
    observation, _ = env.reset(seed=seed)
    for _ in range(steps):
        mask = env.action_masks()
        assert mask.any(), "empty mask"
        assert env.observation_space.contains(observation)
        assert all(part.dtype == np.float32 and np.isfinite(part).all() for part in observation.values())
        assert (observation["mask"] > 0.5).tolist() == mask.tolist()
        legal = np.flatnonzero(mask)
        weights = np.ones(legal.size)
        if legal.size > 2:
            weights[-2:] = p_last  # holds and refusals are the last candidates of a route decision
        observation, reward, terminated, truncated, info = env.step(int(rng.choice(legal, p=weights / weights.sum())))
        assert np.isfinite(reward) and info["elapsed_s"] >= 0.0
        if terminated or truncated:
            json.dumps(info["summary"], allow_nan=False)
            counts["illegal"] += info["summary"]["illegal_actions"]
            counts["refused"] += info["summary"]["counts"]["REFUSED"]
            counts["episodes"] += 1
            assert env.observation_space.contains(observation)
            observation, _ = env.reset()
    counts["illegal"] += env.cluster.illegal_actions
    return counts


@pytest.mark.fault("K02")
@pytest.mark.fault("K06")
@pytest.mark.parametrize("asked, steps", [(("route",), 14_000), (ALL_DECISIONS, 6_000)])
def test_random_masked_steps_stay_legal_and_inside_the_space(asked, steps):
    """20,000 random masked steps under faults twenty times the usual rate: 0 illegal, no empty mask, all observations inside."""
    counts = walk(small_env(asked), steps, 11)
    assert counts["illegal"] == 0
    assert counts["episodes"] > 20


@pytest.mark.slow
@pytest.mark.fault("K02")
@pytest.mark.fault("K06")
@pytest.mark.timeout(7200)
@pytest.mark.skipif(not os.environ.get("BALLAST_SLOW_TESTS"), reason="a million steps take an hour; set BALLAST_SLOW_TESTS=1")
@pytest.mark.parametrize("part", range(10))
def test_a_million_random_masked_steps(part):
    """Ten parts of 100,000 steps, every second one in overload: arrivals beyond what batches, queues and the hold queue take."""
    counts = walk(small_env(ALL_DECISIONS, overloaded=part % 2 == 1), 100_000, part)
    assert counts["illegal"] == 0
    assert (counts["refused"] > 10_000) == (part % 2 == 1), f"part {part}: {counts}"
    print(f"part {part}: {counts}")


def test_overload_fills_every_queue():
    """The overloaded worlds of the long target do what they claim: full groups and a full hold queue are seen, and refusals."""
    env = small_env(ALL_DECISIONS, overloaded=True)
    env.reset(seed=0)
    rng, full = np.random.default_rng(0), set()
    for _ in range(600):
        view = env.point.view
        full |= {"group"} if (view.waiting >= view.queue_limit).any() else set()
        full |= {"hold"} if view.hold_queue >= view.hold_queue_limit else set()
        _, _, terminated, truncated, _ = env.step(int(rng.choice(np.flatnonzero(env.action_masks()))))
        if terminated or truncated:
            break
    assert full == {"group", "hold"}


def test_an_illegal_action_is_counted_and_refused():
    env = fixed_env(world(W.trace([0.0, 1.0], 64, 4)))
    env.reset(seed=0)
    *_, info = env.step(W.SPARE)  # parked
    *_, info = env.step(env.action_space.n - 1)
    assert info["summary"]["illegal_actions"] == 2
    assert info["summary"]["counts"]["REFUSED"] == 2


def all_down(at_s: float = 0.0):
    return tuple(FaultEvent(FaultKind.LOST_GROUP, at_s, 1e4, g) for g in (W.PAIR, W.SOLO))


@pytest.mark.fault("K02")
@pytest.mark.fault("K06")
@pytest.mark.parametrize("asked", [("route",), ALL_DECISIONS])
def test_the_extreme_states_stay_inside_the_space(asked):
    """50,000 queued requests; a prompt of a million tokens; all workers down; none up; the clock at a billion seconds."""
    many = replace(LIMITS, queue_limit=50_000, hold_limit=50_000)
    overload = world(W.trace(np.zeros(50_020), 512, 64), W.cluster(many), queue_timeout_s=1e9)
    env = fixed_env(overload, asked)
    observation, _ = env.reset(seed=0)
    for i in range(50_020):
        if i % 2000 == 0 or i > 50_000:
            assert env.observation_space.contains(observation) and np.isfinite(observation["candidates"]).all()
            observation = env.step(W.SOLO if env.action_masks()[W.SOLO] else W.PAIR)[0]
        else:  # the same without encoding, which costs O(residents)
            env.cluster.apply(env.point, W.SOLO if env.point.mask[W.SOLO] else W.PAIR)
            env.point = env.cluster._ready and _cheap_point(env)
    huge = replace(LIMITS, context_tokens=2_000_000, kv_blocks=200_000)
    long_prompt = world(W.trace([0.0, 1.0, 2.0], [1_000_000, 100, 1_000_000], 64), W.cluster(huge))
    late = world(
        W.trace(1e9 + np.arange(40) * 0.1, 300, 30),
        faults=(FaultEvent(FaultKind.LOST_GROUP, 1e9 + 1, 2.0, W.PAIR),),
    )
    down = world(W.trace(np.arange(30) * 0.5, 300, 30), faults=all_down(), drain_s=20.0)
    for spec in (long_prompt, late, down):
        assert walk_once(fixed_env(spec, asked)) == 0


def _cheap_point(env):
    """The next route point of the same instant, without asking the kernel for everybody inside."""
    held = env.cluster._ready.popleft()
    env.cluster._asking = held
    view = env.point.view
    waiting = env.cluster.state.group_int[:, 1]
    view.accepts[:] = view.is_up & (waiting < view.queue_limit)
    mask = np.concatenate([view.accepts, [True, True]])
    return replace_point(env.point, held.request, mask)


def replace_point(point, request, mask):
    return type(point)(point.decision, point.view, point.commands, mask, point.tables, request, point.hits)


def walk_once(env, seed: int = 0) -> int:
    """One episode of random legal actions; returns the number of illegal ones."""
    rng = np.random.default_rng(seed)
    observation, _ = env.reset(seed=seed)
    ended = False
    while not ended:
        assert env.observation_space.contains(observation), {k: v[~np.isfinite(v)] for k, v in observation.items()}
        legal = np.flatnonzero(env.action_masks())
        observation, reward, terminated, truncated, _ = env.step(int(rng.choice(legal)))
        assert np.isfinite(reward)
        ended = terminated or truncated
    return env.cluster.illegal_actions


@pytest.mark.fault("K13")
@pytest.mark.parametrize("asked", [("route",), ("split",), ALL_DECISIONS])
def test_a_world_without_requests_or_decisions_ends_at_once(asked):
    """Reset before any arrival gives a legal all-zero observation with one allowed candidate; one step ends the episode."""
    env = fixed_env(world(W.trace([], 1, 1)), asked)
    observation, _ = env.reset(seed=0)
    assert env.observation_space.contains(observation) and env.action_masks().sum() >= 1
    _, reward, terminated, truncated, info = env.step(0)
    assert (reward, terminated, truncated) == (0.0, True, False)
    assert json.loads(json.dumps(info["summary"], allow_nan=False))["e2e_s"]["p99"] is None


@pytest.mark.fault("K04")
def test_a_cut_is_truncation_and_hands_over_the_last_observation():
    """Cut after 20 decisions with requests inside: terminated False, truncated True, the open decision is observed, and
    nobody inside is paid as unserved; the same world played out ends with terminated True."""
    spec = world(W.trace(np.arange(60) * 0.05, 300, 200))
    env = fixed_env(spec, max_decisions=20, shaping=0.0)
    env.reset(seed=0)
    total = 0.0
    for i in range(20):
        observation, reward, terminated, truncated, info = env.step(Shortest().choose(env.point))
        total += reward
        assert (terminated, truncated) == (False, i == 19)
    assert "summary" in info and env.cluster.in_system > 0
    assert observation["mask"].sum() > 1 and np.abs(observation["candidates"]).sum() > 0
    assert total == 0.0  # nothing had ended yet
    env = fixed_env(spec, shaping=0.0)
    env.reset(seed=0)
    terminated = False
    while not terminated:
        _, _, terminated, truncated, _ = env.step(Shortest().choose(env.point))
        assert not truncated


@pytest.mark.fault("K04")
def test_rewards_are_the_objective_discounted_from_each_ending():
    """Undiscounted and unshaped, the rewards of an episode sum to the objective of its outcomes less its best value; with
    shaping and a discount they differ by the potential of the first state alone, since discounted shaping telescopes."""
    spec = world(traffic(60, 8.0, 4), drain_s=30.0)
    totals = {}
    for discount, shaping in ((1.0, 0.0), (0.95, 0.0), (0.95, 1.0)):
        env = fixed_env(spec, discount_per_s=discount, shaping=shaping)
        env.reset(seed=0)
        first = env.point.potential
        clock, total, ended = 0.0, 0.0, False
        while not ended:
            _, reward, ended, _, info = env.step(Shortest().choose(env.point))
            total += discount**clock * reward
            clock += info["elapsed_s"]
        totals[discount, shaping] = (total, first, env.outcomes())
    total, _, outcomes = totals[1.0, 0.0]
    assert total == pytest.approx(sum(value_of(o, 30.0, 1.0, 0.05) - SERVICE_CLASSES[o.class_index].weight for o in outcomes), rel=1e-9)
    assert totals[0.95, 1.0][0] == pytest.approx(totals[0.95, 0.0][0] - totals[0.95, 1.0][1], rel=1e-9, abs=1e-9)


def first_arrivals(env_count: int, seed: int, method: str | None) -> list[bytes]:
    """The first observation of each environment and 30 more under fixed actions: a fingerprint of its stream."""
    venv = build_training_envs([small_env] * env_count, seed, worker_processes=method is not None, start_method=method or "spawn")
    try:
        observation = venv.reset()
        prints = [[] for _ in range(env_count)]
        for _ in range(12):
            for i in range(env_count):
                prints[i].append(b"".join(observation[key][i].tobytes() for key in sorted(observation)))
            observation = venv.step(observation["mask"].argmax(axis=1))[0]
        return [b"".join(rows) for rows in prints]
    finally:
        venv.close()


@pytest.mark.fault("K05")
def test_eight_environments_have_eight_streams_and_neighbouring_seeds_share_none():
    seven, again, eight = (first_arrivals(8, seed, None) for seed in (7, 7, 8))
    assert seven == again
    assert len(set(seven)) == 8 and len(set(seven) | set(eight)) == 16
    for method in ("fork", "spawn"):
        assert first_arrivals(2, 7, method) == seven[:2], method


def stream_of(env_index: int) -> bytes:
    """Fingerprint of one training environment of a run with seed 7: its first observation and twelve more."""
    env = _WorkerEnv(small_env, 7, env_index)()
    observation, _ = env.reset()
    seen = []
    for _ in range(12):
        seen += [observation[key].tobytes() for key in sorted(observation)]
        observation, *_ = env.step(int(observation["mask"].argmax()))
    return b"".join(seen)


@pytest.mark.fault("K05")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_all_eight_streams_are_the_same_in_other_processes(method):
    """Environments 0 to 7, built in two processes that were forked or spawned, are those of this process, one by one."""
    here = [stream_of(i) for i in range(8)]
    with multiprocessing.get_context(method).Pool(2) as pool:
        assert pool.map(stream_of, range(8), chunksize=4) == here
    assert len(set(here)) == 8


def arrivals_of(seed: int) -> list[float]:
    env = small_env()
    env.reset(seed=seed)
    return env.cluster.trace.arrival_s[:50].tolist()


@pytest.mark.fault("K05")
def test_a_reset_seed_gives_one_world_whatever_the_process():
    for method in ("fork", "spawn"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            assert pool.apply(arrivals_of, (3,)) == arrivals_of(3)
    assert arrivals_of(3) != arrivals_of(4)


class RefuseAll:
    def choose(self, point):
        return point.view.groups + 1


class StarveLong:
    """Serves short prompts, holds long ones as long as it may and then refuses them."""

    def choose(self, point):
        if point.request.prompt_tokens < 400:
            return Shortest().choose(point)
        return point.view.groups if point.mask[point.view.groups] else point.view.groups + 1


class HoldToTheEnd:
    def choose(self, point):
        return point.view.groups if point.mask[point.view.groups] else point.view.groups + 1


def reward_of(spec, router) -> float:
    env = fixed_env(spec, shaping=0.0)
    env.reset(seed=0)
    total, clock, ended = 0.0, 0.0, False
    while not ended:
        _, reward, ended, _, info = env.step(router.choose(env.point))
        total += 0.9999**clock * reward
        clock += info["elapsed_s"]
    return total


@pytest.mark.fault("K12")
@pytest.mark.parametrize("rate_per_s, seed, faulty", [(2.0, 1, False), (12.0, 2, False), (30.0, 3, False), (6.0, 4, True)])
def test_failing_fast_earns_less_than_every_serving_baseline(rate_per_s, seed, faulty):
    """Quiet, busy, hopelessly overloaded and failing: refusing all, starving long prompts and holding to the end each earn
    less than every router that serves."""
    spec = world(traffic(80, rate_per_s, seed), drain_s=120.0, **({} if not faulty else {"cold_start_s": 3.0}))
    if faulty:
        spec = replace(spec, faults=(FaultEvent(FaultKind.LOST_GROUP, 2.0, 5.0, W.PAIR),))
    serving = {name: reward_of(spec, make("route", name, np.random.default_rng(0))) for name in ROUTERS}
    cheating = {type(router).__name__: reward_of(spec, router) for router in (RefuseAll(), StarveLong(), HoldToTheEnd())}
    worst = min(serving, key=serving.get)
    assert max(cheating.values()) < serving[worst], (cheating, worst, serving[worst])


def test_the_summary_counts_every_request_once():
    spec = replace(world(traffic(80, 20.0, 6), **FAST), fault_rates=FaultRates().scaled(60.0))
    env = fixed_env(spec, ALL_DECISIONS)
    assert walk_once(env) == 0
    kinds = [outcome.kind for outcome in env.outcomes()]
    assert len(kinds) == 80
    from envs.scheduling_env import world_summary

    counts = world_summary(env.cluster)["counts"]
    assert sum(counts.values()) == 80
    assert counts["COMPLETED"] == sum(kind is OutcomeKind.COMPLETED for kind in kinds)
