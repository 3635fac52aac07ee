"""The Gymnasium environment: run a simulated cluster to its next decision, ask, carry out, pay.

| observation | shape | meaning | bounds |
|---|---|---|---|
| candidates | (max_candidates, features) | one row per candidate, `envs.decision.observation.FEATURES`; rows beyond are 0 | [-10, 10] |
| context | (context features,) | `envs.decision.observation.CONTEXT` | [-10, 10] |
| mask | (max_candidates,) | 1 where the candidate may be chosen; never all 0 | {0, 1} |

Action: index of a candidate. Reward: the objective of evaluation (`envs.decision.objective`) less the request's full weight
(a constant per request: 0 is perfect, everything else negative) for every request that ended since the last decision, each
discounted from its own time by `discount_per_s`, plus potential-based shaping discount^dt Phi(s') - Phi(s) with Phi what
the predictor expects everybody inside to lose. info["elapsed_s"] is dt.
Ending: terminated when every request of the world has ended and the drain is over; truncated when `max_decisions`
cuts the episode (the last observation's value must be carried on, K04).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from envs.cluster.cluster_process import ClusterProcess
from envs.cluster.world import WorldSpec
from envs.decision.actions import Decision, DecisionPoint, Scheduler
from envs.decision.candidate_bounds import too_many_candidates
from envs.decision.objective import PERCENTILES, summary, value_of
from envs.decision.observation import BOUND, CONTEXT, FEATURES, encode
from envs.domain.requests import SERVICE_CLASSES, Ended, OutcomeKind, RequestOutcome
from envs.scenario.cluster_spec import ClusterSpec

WorldSource = Callable[[np.random.Generator], WorldSpec]
"""Draws a world. One that has `clusters` (`envs.world_sampler.WorldSampler` does) says which clusters it can draw, so that an
environment too small for one of them is refused when it is made."""
CompanionSource = Callable[[np.random.Generator], dict[Decision, Scheduler]]
PERCENTILE_NAMES = tuple(f"p{percent}" for percent in PERCENTILES)
ALL_DECISIONS: tuple[Decision, ...] = ("route", "split", "rebalance")


@dataclass(frozen=True, slots=True)
class EnvSettings:
    """asked: decisions put to the agent; the others go to the companions, or are not raised where there is none.
    lateness_price: weighted goodput per limit of lateness in the reward. shaping: weight of the potential (0 = off).

    discount_per_s: of the objective. 1 is what evaluation reports, the plain sum over a world; a loss is then booked when it
    is foreseen (Phi falls) and corrected when it is known, so a learner may look ahead by seconds only (its own gamma
    and lambda trade bias for variance, Schulman et al. 2016, section 3). A discount here below 1 would make losses
    cheaper by postponing them beyond the horizon: tried, and the policy learnt to strand requests."""

    asked: tuple[Decision, ...] = ("route",)
    max_candidates: int = 48
    max_decisions: int = 1_000_000
    discount_per_s: float = 1.0
    lateness_price: float = 0.05
    shaping: float = 1.0


class SchedulingEnv(gymnasium.Env[dict[str, np.ndarray], int]):
    """One world per episode. `worlds` draws a world from a Generator; `reset(options={"world": spec})` sets it outright.

    Raises: ValueError when made, or at the reset to a world of another cluster, if a decision can have more candidates than
    `max_candidates`."""

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012

    def __init__(self, worlds: WorldSource, companions: CompanionSource | None = None, settings: EnvSettings | None = None) -> None:
        self.settings = settings or EnvSettings()
        for cluster in getattr(worlds, "clusters", ()):
            self._check_size(cluster)
        self._worlds = worlds
        self._companions_from = companions
        rows = self.settings.max_candidates
        self.observation_space = spaces.Dict(
            {
                "candidates": spaces.Box(-BOUND, BOUND, (rows, len(FEATURES)), np.float32),
                "context": spaces.Box(-BOUND, BOUND, (len(CONTEXT),), np.float32),
                "mask": spaces.Box(0.0, 1.0, (rows,), np.float32),
            }
        )
        self.action_space = spaces.Discrete(rows)
        self.cluster: ClusterProcess | None = None
        self.point: DecisionPoint | None = None
        self._mask = np.zeros(rows, np.bool_)
        self._last_observation: dict[str, np.ndarray] = {}

    def _check_size(self, cluster: ClusterSpec) -> None:
        """Raise ValueError when `cluster` can list more candidates than the padded maximum holds."""
        rows = self.settings.max_candidates
        ranks = [len(group.ranks) for group in cluster.groups]
        if problem := too_many_candidates(cluster.name, self.settings.asked, ranks, sum(cluster.parked), rows):
            raise ValueError(f"max_candidates={rows}: {problem}")

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Start a new world; a world that ends before its first decision yields an all-keep observation."""
        super().reset(seed=seed)
        world_rng, companion_rng = self.np_random.spawn(2)
        world = options["world"] if options and "world" in options else self._worlds(world_rng)
        self._check_size(world.cluster)
        self._companions = self._companions_from(companion_rng) if self._companions_from else {}
        raised = tuple(d for d in ALL_DECISIONS if d in self.settings.asked or d in self._companions)
        self.cluster = ClusterProcess(world, decisions=raised)
        self._decisions = 0
        self._reward = 0.0
        self.point = self._next_point()
        self._from_s = self.cluster.env.now
        self._potential = self.point.potential if self.point and self.settings.shaping else 0.0
        return self._observe(), {"elapsed_s": 0.0, "world": world.name}

    def action_masks(self) -> np.ndarray:
        """Allowed candidates, bool (max_candidates,); never all false."""
        return self._mask.copy()

    def step(self, action: int) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        """Choose candidate `action`; an index that the mask forbids is refused and counted in info["illegal_actions"]."""
        assert self.cluster is not None, "call reset() first"
        if self.point is None:
            return self._observe(), 0.0, True, False, self._final_info(0.0)
        from_s, before = self._from_s, self._potential
        self.cluster.apply(self.point, int(action))
        self._decisions += 1
        truncated = self._decisions >= self.settings.max_decisions
        self.point = self._next_point()
        now_s = self.cluster.env.now
        elapsed_s = now_s - from_s
        reward = self._pay(from_s)
        if self.settings.shaping:
            after = self.point.potential if self.point else 0.0
            reward += self.settings.shaping * (self.settings.discount_per_s**elapsed_s * after - before)
            self._potential = after
        self._from_s = now_s
        terminated = self.point is None
        truncated = truncated and not terminated
        if terminated or truncated:
            return self._observe(), reward, terminated, truncated, self._final_info(elapsed_s)
        return self._observe(), reward, False, False, {"elapsed_s": elapsed_s}

    def _next_point(self) -> DecisionPoint | None:
        """Run to the next decision that is the agent's; companions answer theirs."""
        assert self.cluster is not None
        while True:
            point = self.cluster.next_decision()
            if point is None or point.decision in self.settings.asked:
                return point
            self.cluster.apply(point, self._companions[point.decision].choose(point))

    def _pay(self, from_s: float) -> float:
        """Reward of what ended since the last decision, discounted from its own time."""
        assert self.cluster is not None
        total = 0.0
        settings, options = self.settings, self.cluster.options
        for request_id in self.cluster.ended_requests:
            outcome = self.cluster.outcomes.ended_row(request_id)
            worth = value_of(outcome, options.drain_s, options.limit_multiplier, settings.lateness_price)
            total += settings.discount_per_s ** max(0.0, outcome.finish_s - from_s) * (worth - _weight(outcome))
        self.cluster.ended_requests.clear()
        if self.point is None:
            total += settings.discount_per_s ** (self.cluster.env.now - from_s) * self._pay_unfinished()
        return total

    def _pay_unfinished(self) -> float:
        """Whatever is still inside when the world ends counts as unserved."""
        assert self.cluster is not None
        outcomes, options = self.cluster.outcomes, self.cluster.options
        unfinished = np.flatnonzero(outcomes.kind == OutcomeKind.UNFINISHED)
        price = self.settings.lateness_price
        rows = [outcomes.ended_row(int(i)) for i in unfinished]
        return sum(value_of(row, options.drain_s, options.limit_multiplier, price) - _weight(row) for row in rows)

    def _observe(self) -> dict[str, np.ndarray]:
        rows = self.settings.max_candidates
        self._mask[:] = False
        if self.point is None:
            self._mask[0] = True
            candidates = np.zeros((rows, len(FEATURES)), np.float32)
            context = np.zeros(len(CONTEXT), np.float32)
        else:
            candidates, context = encode(self.point, rows)
            self._mask[: len(self.point.mask)] = self.point.mask
        return {"candidates": candidates, "context": context, "mask": self._mask.astype(np.float32)}

    def _final_info(self, elapsed_s: float) -> dict[str, Any]:
        assert self.cluster is not None
        return {"elapsed_s": elapsed_s, "summary": world_summary(self.cluster)}

    def outcomes(self) -> list[RequestOutcome]:
        """Outcomes of the present world so far."""
        assert self.cluster is not None
        return self.cluster.outcomes.to_outcomes()


def _weight(outcome: Ended) -> float:
    """What the request would have been worth at best."""
    return SERVICE_CLASSES[outcome.class_index].weight


def _short(share: Mapping[str, Any]) -> dict[str, Any]:
    """One share of `objective.summary` under the names that tables, plots and TensorBoard use."""
    latency = share["latency"]
    return {
        "goodput": share["goodput_share"],
        "goodput_per_s": share["goodput_per_s"],
        "value_mean": share["value_mean"],
        "count": share["arrived"],
        "counts": {name.upper(): count for name, count in share["outcomes"].items()},  # as OutcomeKind spells them
        "ttft_s": {name: latency["ttft_s"][name] for name in PERCENTILE_NAMES},
        "tpot_s": {name: latency["tpot_s"][name] for name in PERCENTILE_NAMES},
        "e2e_s": {name: latency["e2e_s"][name] for name in PERCENTILE_NAMES},
    }


def _ttft_quantiles(cluster: ClusterProcess) -> list[float] | None:
    """101 quantiles of TTFT with failures at the drain time; None without requests."""
    outcomes = cluster.outcomes
    if not len(outcomes.kind):
        return None
    ttft_s = outcomes.first_token_s - outcomes.trace.arrival_s
    worst_s = max(cluster.options.drain_s, float(np.nanmax(ttft_s, initial=0.0)))
    return np.percentile(np.where(outcomes.kind == OutcomeKind.COMPLETED, ttft_s, worst_s), np.arange(101)).tolist()


def world_summary(cluster: ClusterProcess) -> dict[str, Any]:
    """What became of a world: goodput, outcomes and latencies (overall and per class), latency parts, moves, illegal actions."""
    options = cluster.options
    report = summary(cluster.outcomes.to_outcomes(), max(cluster.span_s, 1e-9), options.drain_s, multiplier=options.limit_multiplier)
    found = _short(report)
    classes: Any = report["classes"]
    found["per_class"] = {name: _short(share) for name, share in classes.items() if share["arrived"]}
    found["ttft_quantiles_s"] = _ttft_quantiles(cluster)
    found["parts_mean_s"] = report["latency_parts_mean_s"]
    found["failure_reasons"] = report["failure_reasons"]
    found["preemptions"] = report["preemptions"]
    counts = cluster.moves.counts
    found["split"] = {"moves": counts["set_split"], "pause_s": cluster.moves.pause_s}
    found["rebalance"] = {name: n for name, n in counts.items() if name not in ("route", "hold", "refuse", "keep", "set_split")}
    found["illegal_actions"] = cluster.illegal_actions
    found["slowest_rank_ratio"] = cluster.telemetry.ranks.rank_ratio.max(axis=1).tolist()
    return found


def register() -> None:
    """Register the ids `Ballast/Route-v0`, `Split-v0`, `Rebalance-v0` and `Joint-v0` with Gymnasium; idempotent."""
    for name, asked in (("Route", ("route",)), ("Split", ("split",)), ("Rebalance", ("rebalance",)), ("Joint", ALL_DECISIONS)):
        env_id = f"Ballast/{name}-v0"
        if env_id not in gymnasium.registry:
            gymnasium.register(env_id, "envs.default_worlds:make_env", kwargs={"asked": asked}, disable_env_checker=True)


register()
