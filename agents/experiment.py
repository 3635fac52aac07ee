"""The main job, stage by stage: load, baselines on validation, tuning, PPO for each decision, bundles, test, report.

The best heuristic of each kind is chosen on validation worlds and never on test worlds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from agents import heuristics
from agents.advised_env import AdvisedEnv
from agents.capability_table import capability_rows
from agents.contestants import FROM_RANDOM, Best, contestants, counterparts
from agents.cross_entropy import tune_linear_score
from agents.evaluation import Contestant, WorldRunner, load_one
from agents.experiment_config import ExperimentConfig
from agents.export import export_bundle
from agents.mixed_traffic import mixed_traffic
from agents.policy_bundle import BundleSchema
from agents.ppo_training import PpoSettings, RolloutProgress, TrainedPolicy, train_ppo
from agents.provenance import provenance
from agents.report import RESULTS_FILE, EvaluationResults, write_report
from agents.row_classes import class_shares, with_classes
from agents.whole_files import replace_file
from envs.cluster.warm_up import compile_kernels
from envs.cluster.world import WorldSpec
from envs.decision.actions import Decision, Scheduler
from envs.decision.candidate_bounds import too_many_candidates
from envs.decision.objective import smallest_limit_multiplier
from envs.decision.observation import CONTEXT, FEATURES, OBSERVATION_VERSION
from envs.scenario.cluster_file import load_cluster
from envs.scheduling_env import ALL_DECISIONS, EnvSettings, SchedulingEnv
from envs.traces import load_trace
from envs.traces.default_traces import FILES, default_trace
from envs.traces.trace_table import TraceTable
from envs.unloaded import unloaded_times
from envs.world_sampler import WorldSampler

EXPERIMENT_FILE = "experiment.yaml"
REFERENCE = "net_utility"  # the strongest closed-form router on every validation set so far; it defines load 1.0
AGENTS: tuple[str, ...] = ("route", FROM_RANDOM, "split", "rebalance")
DEFAULT_PPO: dict[str, dict[str, Any]] = {
    # the start is as good as its adviser; steps large enough to learn from nothing would forget that
    "route": {
        "total_decisions": 18_432,
        "n_steps": 1024,
        "minibatch_size": 1024,
        "learning_rate": 5e-5,
        "kl_stop": 0.005,
        "entropy_coefficient": 0.0,
        "gamma_per_s": 0.8,
        "lambda_per_s": 0.8,
        "clone_decisions": 20_000,
        "clone_epochs": 8,
    },
    FROM_RANDOM: {
        "total_decisions": 120_000,
        "n_steps": 512,
        "minibatch_size": 256,
        "learning_rate": 1e-3,
        "epochs": 5,
        "kl_stop": 0.03,
        "entropy_coefficient": 5e-4,
        # a third of a second: losses are booked when foreseen, so the critic need not carry them far
        "gamma_per_s": 0.05,
        "lambda_per_s": 0.05,
    },
    "split": {
        "total_decisions": 6_000,
        "n_steps": 128,
        "minibatch_size": 64,
        "gamma_per_s": 0.98,
        "lambda_per_s": 0.95,
        "scaling_decisions": 256,
    },
    "rebalance": {
        "total_decisions": 8_000,
        "n_steps": 128,
        "minibatch_size": 64,
        "gamma_per_s": 0.98,
        "lambda_per_s": 0.95,
        "scaling_decisions": 256,
    },
    "joint": {"total_decisions": 120_000, "n_steps": 512, "minibatch_size": 256, "gamma_per_s": 0.9, "lambda_per_s": 0.7},
}


@dataclass(frozen=True, slots=True)
class Companions:
    """Picklable maker of the heuristics that answer what the agent is not asked. `names`: decision -> text of a Contestant."""

    names: tuple[tuple[Decision, str], ...]

    def __call__(self, rng: np.random.Generator) -> dict[Decision, Scheduler]:
        from agents.heuristics.predicting import LinearScore

        made: dict[Decision, Scheduler] = {}
        for decision, text in self.names:
            if text.startswith("linear:"):
                made[decision] = LinearScore(np.array([float(value) for value in text[7:].split(",")]))
            else:
                made[decision] = heuristics.make(decision, text, rng)
        return made


def make_training_env(worlds: WorldSampler, companions: Companions, settings: EnvSettings, advisor: str | None) -> SchedulingEnv:
    """Top-level so that worker processes can build it."""
    return SchedulingEnv(worlds, companions, settings) if advisor is None else AdvisedEnv(worlds, companions, settings, advisor)


class Experiment:
    """One run of an experiment file in `run_dir`; call the stages in order or `run()` for all."""

    def __init__(self, config: ExperimentConfig, run_dir: Path, console: Console, processes: int = 2, command: str = "") -> None:
        """command: the line that makes this run again; results and reports name it."""
        self.config = config
        self.command = command
        self.run_dir = run_dir
        self.console = console
        self.say("compiling kernels: a minute or two on the first run, seconds afterwards")
        self.say(f"kernels ready after {compile_kernels():.1f} CPU s")  # once, before worker processes start
        self.runner = WorldRunner(processes)
        self.trace = self._load_trace()
        self.best = Best()
        self.history: dict[str, list[dict[str, float]]] = {}
        seeds = np.random.SeedSequence(config.seed).generate_state(4)
        self._validation_seed, self._test_seed, self._tune_seed, self._ppo_seed = (int(seed) for seed in seeds)
        self.sampler = self._sampler()
        self.load_one = 1.0
        self.linear = ""
        self.validation: tuple[WorldSpec, ...] = ()
        self.test: tuple[WorldSpec, ...] = ()

    def check(self, agents: Sequence[str]) -> None:
        """Raise ValueError now for names and settings that would fail after minutes of work."""
        compare, rng = self.config.compare, np.random.default_rng(0)
        for decision, names in (("route", compare.routers), ("split", compare.splitters), ("rebalance", compare.rebalancers)):
            if not names:
                raise ValueError(f"compare: no {decision} heuristic is listed; give at least one")
            for name in names:
                heuristics.make(decision, name, rng)
        for agent in agents:
            settings = self._ppo_settings(agent)
            settings.check_rollout(self.config.training_environments)
            if settings.clone_decisions:
                if agent not in self.config.imitate:
                    raise ValueError(f"ppo.{agent}.clone_decisions={settings.clone_decisions}: name whom to imitate, imitate.{agent}")
                heuristics.make(_asked(agent)[0], self.config.imitate[agent], rng)
        for agent in agents:
            rows = self.config.max_candidates.get(_kind(agent))
            if rows is None:
                raise ValueError(f"max_candidates: no size for {_kind(agent)}; name every kind of agent that is trained")
            for cluster in self.sampler.clusters:
                ranks = [len(group.ranks) for group in cluster.groups]
                if problem := too_many_candidates(cluster.name, _asked(agent), ranks, sum(cluster.parked), rows):
                    raise ValueError(f"max_candidates.{agent}={rows}: {problem}")
        choice = self.config.trace
        for name, window_s in (("train_s", choice.train_s), ("validation_s", choice.validation_s), ("test_s", choice.test_s)):
            first, last = np.searchsorted(self.trace.arrival_s, window_s)
            if last - first < 2:
                raise ValueError(f"trace.{name}={window_s} holds {last - first} requests of {self.trace_label}; choose a longer window")

    def _ppo_settings(self, agent: str) -> PpoSettings:
        overrides = DEFAULT_PPO[agent] | self.config.ppo.get(agent, {})
        try:
            return PpoSettings(**({"seed": self._ppo_seed} | overrides))
        except TypeError as error:
            raise ValueError(f"ppo.{agent}: {error}") from error

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)  # a path stays whole, whatever is in it

    # -- stages

    def run(self, agents: Sequence[str] = AGENTS, resume: bool = False) -> EvaluationResults:
        """All stages; returns the results that the report shows."""
        begin = time.monotonic()
        self.write_config()
        self.find_load()
        self.choose_heuristics()
        bundles = {agent: self.train(agent, resume) for agent in agents}
        results = self.evaluate(bundles)
        write_report(results, self.run_dir / "report.html")
        replace_file(self.run_dir / RESULTS_FILE, results.to_json().encode())
        self.say(f"finished in {(time.monotonic() - begin) / 60:.1f} min")
        return results

    def write_config(self) -> None:
        """Write the whole configuration, defaults and flags included, as an experiment file that can be run again."""
        text = yaml.safe_dump(self.config.model_dump(mode="json"), sort_keys=False)
        replace_file(self.run_dir / EXPERIMENT_FILE, text.encode())

    def find_load(self, load_one_scale: float | None = None) -> None:
        """Load 1.0 by bisection on validation worlds (unless given as a rate scale), then the validation and test worlds."""
        choice = self.config.worlds
        sampler = self._window(self.config.trace.validation_s, "validation")
        reference = Contestant("reference", REFERENCE)

        def worlds_at(scale: float) -> Sequence[WorldSpec]:
            return sampler.at_rate(scale).fixed(4, self._validation_seed)

        if load_one_scale is None:
            # rounded before use, so that the printed number asks for the same worlds again
            self.load_one = float(f"{load_one(self.runner, worlds_at, reference, 1.0, 4.0):.4g}")
            self.say(f"load 1.0 = trace x {self.load_one:g} ({REFERENCE} keeps 95 % goodput on validation worlds)")
        else:
            self.load_one = load_one_scale
        scales = tuple(load * self.load_one for load in choice.test_load)
        self.validation = replace(sampler, rate_scales=scales).fixed(self.config.compare.validation_worlds, self._validation_seed)
        test = self._window(self.config.trace.test_s, "test")
        self.test = replace(test, rate_scales=scales).fixed(self.config.compare.test_worlds, self._test_seed)

    def choose_heuristics(self) -> None:
        """Tune the linear score on training worlds; pick the best router, splitter and rebalancer on validation."""
        self.linear = self._tune_linear()
        self.pick_heuristics()

    def pick_heuristics(self) -> None:
        """The best router, splitter and rebalancer of the compared ones, on validation worlds."""
        compare = self.config.compare
        routers = {name: name for name in compare.routers} | ({"linear_cem": self.linear} if self.linear else {})
        contestants = [Contestant(name, text) for name, text in routers.items()]
        scores = self._mean_goodput(self.validation, contestants, "routers on validation")
        self.best.scores = {name: round(score, 4) for name, score in scores.items()}
        deciding = {name: score for name, score in scores.items() if name != "what_if"}  # it costs milliseconds a decision
        deciding = deciding or scores  # nothing else was compared
        self.best.route = routers[max(deciding, key=deciding.__getitem__)]
        splitters = [Contestant(name, self.best.route, name) for name in compare.splitters]
        split_scores = self._mean_goodput(self.validation, splitters, "splits on validation")
        self.best.split = max(split_scores, key=split_scores.__getitem__)
        rebalancers = [Contestant(name, self.best.route, self.best.split, name) for name in compare.rebalancers]
        rebalance_scores = self._mean_goodput(self.validation, rebalancers, "rebalancing on validation")
        self.best.rebalance = max(rebalance_scores, key=rebalance_scores.__getitem__)
        self.best.scores |= {f"split {k}": round(v, 4) for k, v in split_scores.items()}
        self.best.scores |= {f"rebalance {k}": round(v, 4) for k, v in rebalance_scores.items()}
        self.say(f"best on validation: route {self.best.route_name}, split {self.best.split}, rebalance {self.best.rebalance}")

    def train(self, agent: str, resume: bool = False) -> Path:
        """Train one agent, export its bundle; returns the bundle's directory."""
        config = self.config
        asked = _asked(agent)
        settings = self._ppo_settings(agent)
        env_settings = EnvSettings(
            asked=asked, max_candidates=config.max_candidates[_kind(agent)], discount_per_s=config.discount_per_s,
            lateness_price=config.lateness_price, shaping=config.shaping,
        )  # fmt: skip
        scales = tuple(load * self.load_one for load in config.worlds.train_load)
        worlds = replace(
            self._window(config.trace.train_s, "train"), rate_scales=scales, report_delays_s=config.worlds.train_report_delay_s
        )
        companions = Companions(self.best.without(asked))
        advisor = config.imitate.get(agent) if settings.clone_decisions else None
        factories = [partial(make_training_env, worlds, companions, env_settings, advisor)] * config.training_environments
        run_dir = self.run_dir / agent
        with self._bar() as bar:
            task = bar.add_task(f"PPO {agent}", total=settings.total_decisions)

            def progress(step: RolloutProgress) -> None:
                bar.update(task, completed=step.decisions, total=step.total_decisions)

            trained = train_ppo(
                factories, settings, run_dir, evaluate=partial(self._validate, companions, env_settings), progress=progress,
                expert=None if advisor is None else "expert_action", resume=resume,
            )  # fmt: skip
        self.history[agent] = [dict(row) for row in trained.history]
        return self._export(agent, trained)

    def evaluate(self, bundles: dict[str, Path]) -> EvaluationResults:
        """Every contestant on every test world, paired."""
        rows = contestants(self.config.compare, self.linear, self.best, bundles)
        pairs = [(world, contestant) for world in self.test for contestant in rows]
        with self._bar() as bar:
            task = bar.add_task("test worlds", total=len(pairs))
            found = self.runner.map(pairs, progress=lambda: bar.advance(task))
        policies: dict[str, list[dict[str, Any]]] = {contestant.name: [] for contestant in rows}
        for (_, contestant), summary in zip(pairs, found, strict=True):
            policies[contestant.name].append(summary)
        return EvaluationResults(
            trace_name=self.trace_label,
            is_synthetic=self.trace.synthetic,
            world_names=tuple(world.name for world in self.test),
            policies={name: tuple(rows) for name, rows in policies.items()},
            best_heuristic=self.best.name,
            learned=tuple(name for name in policies if name.startswith("ppo")),
            learning_curve=self._learning_curve(),
            notes=tuple(self._notes()),
            capability=capability_rows(self.sampler.clusters, self.trace, policies[self.best.name]),
            provenance=provenance(self.config.model_dump(), self.config.seed),
            validation=self.best.scores,
            counterparts=counterparts(self.best, policies),
            command=self.command,
            is_shortened=self.config.shortened,
        )

    def _learning_curve(self) -> tuple[dict[str, float], ...]:
        """Validation goodput over training decisions of the router (or the joint agent)."""
        rows = self.history.get(FROM_RANDOM) or self.history.get("route") or self.history.get("joint") or []
        tag = "train/validation_score"
        return tuple({"decisions": row["decisions"], "score": row[tag]} for row in rows if tag in row)

    @property
    def trace_label(self) -> str:
        """Name of the traffic for reports: without the folder, which is the machine's own."""
        return f"{Path(self.config.trace.name).name} ({Path(self.trace.source).name})"

    # -- parts

    def _load_trace(self) -> TraceTable:
        choice = self.config.trace
        if choice.parts:
            table = mixed_traffic(choice.parts, self.config.classes.source, self.config.seed)
            table = with_classes(table, mapping=self.config.classes.map)
        else:
            table = load_trace(choice.name, choice.format) if _is_file(choice.name) else default_trace(choice.name)
            table = with_classes(table, self.config.classes.source, self.config.classes.map)
        label = "real trace"
        if table.synthetic:
            label = "holds SYNTHETIC requests" if choice.parts else "SYNTHETIC twin"
        shares = ", ".join(f"{name} {share:.0%}" for name, share in class_shares(table).items())
        self.say(f"traffic: {choice.name} ({label}): {len(table.arrival_s):,} requests over {table.arrival_s[-1]:,.0f} s; {shares}")
        return table

    def _sampler(self) -> WorldSampler:
        config = self.config
        clusters = tuple(load_cluster(name) for name in config.worlds.clusters)
        options = config.world_options()
        multiplier = config.worlds.limit_multiplier
        if multiplier is None:
            multiplier = float(smallest_limit_multiplier(*unloaded_times(clusters[0], options, self.trace)))
        if multiplier != 1:
            self.say(f"limits x {multiplier:g}: the median group cannot meet the frozen limits unloaded")
        options = replace(options, limit_multiplier=multiplier)
        return WorldSampler(
            self.trace, config.trace.train_s, clusters, config.worlds.requests, (1.0, 1.0), options,
            fault_factors=config.worlds.fault_factor,
        )  # fmt: skip

    def _window(self, window_s: tuple[float, float], name: str) -> WorldSampler:
        return replace(self.sampler, window_s=window_s, name=name)

    def _tune_linear(self) -> str:
        tune = self.config.tune
        scales = tuple(load * self.load_one for load in self.config.worlds.test_load)
        sampler = replace(self._window(self.config.trace.train_s, "train"), rate_scales=scales)

        def worlds_of(rng: np.random.Generator) -> Sequence[WorldSpec]:
            return sampler.fixed(tune.worlds, int(rng.integers(2**32)))

        def score(weights: np.ndarray, worlds: Sequence[WorldSpec]) -> float:
            return self.runner.goodput(worlds, Contestant("linear", _linear(weights)))

        rng = np.random.default_rng(self._tune_seed)
        weights = tune_linear_score(worlds_of, score, rng, tune.rounds, tune.candidates, progress=self.say)
        return _linear(weights)

    def _mean_goodput(self, worlds: Sequence[WorldSpec], contestants: Sequence[Contestant], label: str) -> dict[str, float]:
        pairs = [(world, contestant) for contestant in contestants for world in worlds]
        with self._bar() as bar:
            task = bar.add_task(label, total=len(pairs))
            found = self.runner.map(pairs, progress=lambda: bar.advance(task))
        shares = np.array([row["goodput"] or 0.0 for row in found]).reshape(len(contestants), len(worlds))
        return {contestant.name: float(row.mean()) for contestant, row in zip(contestants, shares, strict=True)}

    def _validate(self, companions: Companions, settings: EnvSettings, policy: Callable[[dict[str, np.ndarray]], int]) -> float:
        """Mean goodput of a greedy policy on the validation worlds."""
        env = SchedulingEnv(self.sampler, companions, settings)
        shares = []
        for index, world in enumerate(self.validation):
            observation, _ = env.reset(seed=index, options={"world": world})
            done = False
            info: dict[str, Any] = {}
            while not done:
                observation, _, terminated, truncated, info = env.step(policy(observation))
                done = terminated or truncated
            shares.append(info["summary"]["goodput"] or 0.0)
        return float(np.mean(shares))

    def _export(self, agent: str, trained: TrainedPolicy) -> Path:
        kind = _kind(agent)
        schema = BundleSchema(kind, FEATURES, CONTEXT, OBSERVATION_VERSION, self.config.max_candidates[kind])
        directory = self.run_dir / "bundle" / agent
        directory.parent.mkdir(parents=True, exist_ok=True)
        report = export_bundle(
            trained.policy, directory, schema,
            evaluation={"validation_goodput": trained.best_score, "heuristics_on_validation": self.best.scores},
            provenance=provenance(self.config.model_dump(), self.config.seed)
            | {"trace": self.trace_label, "synthetic": self.trace.synthetic},
        )  # fmt: skip
        self.say(
            f"PPO {agent}: validation goodput {trained.best_score:.4f}; bundle {directory} "
            f"({report.observations} observations, {report.decisions_different} different decisions)"
        )
        return directory

    def _notes(self) -> list[str]:
        choice = self.config.trace
        windows = f"windows: train {choice.train_s}, validation {choice.validation_s}, test {choice.test_s} s of the trace"
        simulated = "all figures are simulated; latencies come from the calibrated model, not from hardware"
        load = f"load 1.0 = trace x {self.load_one:.2f}; test worlds at {self.config.worlds.test_load} of it"
        multiplier = f"limits x {self.sampler.options.limit_multiplier:g}"
        return [windows, load, multiplier, simulated]

    def _bar(self) -> Progress:
        return Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=self.console)


def _kind(agent: str) -> str:
    """What kind of bundle an agent becomes: two agents route."""
    return "route" if agent == FROM_RANDOM else agent


def _asked(agent: str) -> tuple[Decision, ...]:
    """The decisions that an agent answers."""
    return ALL_DECISIONS if agent == "joint" else (_kind(agent),)  # type: ignore[return-value]


def _is_file(name: str) -> bool:
    """Whether `name` means a trace file rather than one of the named traces."""
    return name not in FILES and Path(name).is_file()


def _linear(weights: np.ndarray) -> str:
    return "linear:" + ",".join(f"{value:.6g}" for value in weights)
