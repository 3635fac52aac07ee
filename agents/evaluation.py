"""Running policies on the same worlds: paired, with every request accounted for, in worker processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from agents import heuristics
from agents.heuristics.predicting import LinearScore
from agents.policy_bundle import BundlePolicy, load_bundle
from agents.worker_processes import die_with_parent
from envs.cluster.clairvoyant import Clairvoyant
from envs.cluster.cluster_process import ClusterProcess
from envs.cluster.world import WorldSpec
from envs.decision.actions import Decision, DecisionPoint, Scheduler
from envs.decision.observation import encode
from envs.scheduling_env import world_summary


@dataclass(frozen=True, slots=True, eq=False)
class Contestant:
    """Who decides what, by name so that it can be sent to a worker process: a heuristic's name, `bundle:DIR`,
    `linear:w0,w1,…` or `clairvoyant` per kind of decision; kinds left out are not raised."""

    name: str
    route: str
    split: str | None = None
    rebalance: str | None = None

    def parts(self) -> dict[Decision, str]:
        chosen: dict[Decision, str | None] = {"route": self.route, "split": self.split, "rebalance": self.rebalance}
        return {decision: text for decision, text in chosen.items() if text is not None}


class BundleScheduler:
    """An exported policy as a scheduler; what it cannot decide goes to `fallback` and is counted."""

    def __init__(self, bundle: BundlePolicy, fallback: Scheduler) -> None:
        self._bundle = bundle
        self._rows = bundle.contents.schema.candidates_max
        self._fallback = fallback
        self.fallbacks = 0

    def choose(self, point: DecisionPoint) -> int:
        if len(point.commands) > self._rows:
            self.fallbacks += 1
            return self._fallback.choose(point)
        count = len(point.commands)
        candidates, context = encode(point, count)
        return self._bundle.choose(candidates, context, point.mask.astype(np.float32))


FALLBACKS: dict[Decision, str] = {"route": "net_utility", "split": "planner", "rebalance": "threshold"}


def make_scheduler(decision: Decision, text: str, rng: np.random.Generator, cluster: ClusterProcess) -> Scheduler:
    """Build what a `Contestant` names. Raises ValueError for an unknown heuristic, BundleError for a bad bundle."""
    kind, _, rest = text.partition(":")
    if kind == "bundle":
        return BundleScheduler(load_bundle(Path(rest)), heuristics.make(decision, FALLBACKS[decision], rng))
    if kind == "linear":
        return LinearScore(np.array([float(value) for value in rest.split(",")]))
    if kind == "clairvoyant":
        return Clairvoyant(cluster)
    return heuristics.make(decision, text, rng)


def run_world(world: WorldSpec, contestant: Contestant) -> dict[str, Any]:
    """Run one world to its end; returns `world_summary` plus CPU seconds and decisions per CPU second."""
    parts = contestant.parts()
    cluster = ClusterProcess(world, decisions=tuple(parts))
    streams = np.random.SeedSequence([world.seed, 7]).spawn(len(parts))
    schedulers: dict[Decision, Scheduler] = {
        decision: make_scheduler(decision, text, np.random.default_rng(stream), cluster)
        for (decision, text), stream in zip(parts.items(), streams, strict=True)
    }
    begin = time.process_time()
    cluster.run(schedulers)
    cpu_s = time.process_time() - begin
    found = world_summary(cluster)
    found["world"] = world.name
    found["cluster"] = world.cluster.name
    found["cpu_s"] = cpu_s
    found["decisions_per_s"] = len(world.trace.arrival_s) / max(cpu_s, 1e-9)
    return found


def _run_pair(pair: tuple[WorldSpec, Contestant]) -> dict[str, Any]:
    return run_world(*pair)


class WorldRunner:
    """Runs (world, contestant) pairs on `processes` workers (1 = in this process); close it or use it in a `with`."""

    def __init__(self, processes: int = 2) -> None:
        if processes < 1:
            raise ValueError(f"processes={processes} must be at least 1")
        self._pool = None
        if processes > 1:
            self._pool = ProcessPoolExecutor(processes, get_context("forkserver"), initializer=die_with_parent)

    def __enter__(self) -> WorldRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def map(self, pairs: Iterable[tuple[WorldSpec, Contestant]], progress: Callable[[], None] | None = None) -> list[dict[str, Any]]:
        """Summaries in the order of `pairs`."""
        found = []
        results = map(_run_pair, pairs) if self._pool is None else self._pool.map(_run_pair, pairs)
        for result in results:
            found.append(result)
            if progress is not None:
                progress()
        return found

    def goodput(self, worlds: Sequence[WorldSpec], contestant: Contestant) -> float:
        """Mean goodput of one contestant over worlds."""
        return float(np.mean([found["goodput"] or 0.0 for found in self.map([(world, contestant) for world in worlds])]))


def load_one(
    runner: WorldRunner, worlds_at: Callable[[float], Sequence[WorldSpec]], contestant: Contestant, low: float, high: float, rounds: int = 6
) -> float:
    """Load 1.0 of a regime (DESIGN section 8): the largest rate scale at which `contestant` keeps 95 % goodput, by bisection.

    low, high: rate scales that bracket it; the bracket is widened by factors of two where it does not.
    """
    while runner.goodput(worlds_at(high), contestant) >= 0.95 and high < 1e4:
        low, high = high, high * 2.0
    while runner.goodput(worlds_at(low), contestant) < 0.95 and low > 1e-4:
        low, high = low / 2.0, low
    for _ in range(rounds):
        middle = float(np.sqrt(low * high))
        if runner.goodput(worlds_at(middle), contestant) >= 0.95:
            low = middle
        else:
            high = middle
    return low
