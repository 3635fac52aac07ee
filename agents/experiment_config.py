"""One experiment file: what is replayed, on which cluster, how it is trained and compared. Every field has a default."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from pydantic import (
    BaseModel,
    Field,
    PositiveFloat,
    PositiveInt,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from agents.mixed_traffic import TracePart
from agents.row_classes import ClassSource
from envs.cluster.world import WorldOptions
from envs.domain.suggestions import unknown_name
from envs.scenario.scenario_error import shown
from envs.scenario.validation import key_path, keys_at

EXPERIMENTS = Path(__file__).parent / "experiments"
AGENT_NAMES = ("route", "route_from_random", "split", "rebalance", "joint")
CANDIDATE_KINDS = ("route", "split", "rebalance", "joint")
_WORLD_OPTIONS = tuple(entry.name for entry in fields(WorldOptions))


class ExperimentError(ValueError):
    """One line: the file, the key, the value and what to do."""


class TraceChoice(BaseModel, extra="forbid"):
    """Traffic: a named trace or a file, or `parts` laid over one another (then `name` is only what tables call them).
    Windows are (start, end) seconds in the trace's own time; they must not overlap."""

    name: str = "azure-conv"
    format: str | None = None
    parts: list[TracePart] = []
    train_s: tuple[float, float] = (0.0, 2100.0)
    validation_s: tuple[float, float] = (2100.0, 2700.0)
    test_s: tuple[float, float] = (2700.0, 3510.0)

    @model_validator(mode="after")
    def _windows_are_disjoint(self) -> TraceChoice:
        windows = sorted([("train_s", self.train_s), ("validation_s", self.validation_s), ("test_s", self.test_s)], key=lambda w: w[1])
        for name, (begin, end) in windows:
            if end <= begin:
                raise ValueError(f"{name}=({begin}, {end}) ends before it begins")
        for (left, a), (right, b) in pairwise(windows):
            if b[0] < a[1]:
                raise ValueError(f"{left}={a} and {right}={b} overlap; training and test must not share requests")
        return self


class ClassChoice(BaseModel, extra="forbid"):
    """Classes of the rows. source: trace (a row's label where it has one, else the class of its trace, DESIGN section 8),
    label (every row must have one) or classifier (label, else from features known at arrival).
    map: class to class, afterwards, e.g. {chat: code}."""

    source: ClassSource = "trace"
    map: dict[str, str] = {}


class WorldChoice(BaseModel, extra="forbid"):
    """Worlds. `train_load` and `test_load` are shares of load 1.0 (DESIGN section 8), which is found by bisection."""

    clusters: list[str] = Field(["mixed-70b"], min_length=1)
    requests: PositiveInt = 400
    train_load: tuple[PositiveFloat, PositiveFloat] = (0.5, 1.3)
    test_load: tuple[PositiveFloat, PositiveFloat] = (0.7, 1.15)
    fault_factor: tuple[float, float] = (0.0, 2.0)
    limit_multiplier: PositiveFloat | None = Field(None, description="None: the smallest integer that the median group can meet")
    train_report_delay_s: tuple[float, float] = Field((0.0, 0.1), description="range over training worlds; others: options.report_delay_s")
    options: dict[str, Any] = Field({}, description="fields of envs.cluster.world.WorldOptions")

    @field_validator("options")
    @classmethod
    def _options_are_of_a_world(cls, options: dict[str, Any]) -> dict[str, Any]:
        made = _world_options(options)
        return {name: getattr(made, name) for name in options}


def _world_options(options: Mapping[str, Any]) -> WorldOptions:
    """The options of a world. Raises ValueError, one line, for an unknown name or a value of another type or out of range."""
    for name in options:
        if name not in _WORLD_OPTIONS:
            raise ValueError(unknown_name("world option", str(name), _WORLD_OPTIONS))
    if "limit_multiplier" in options:
        raise ValueError("limit_multiplier is a key of `worlds` itself; move it there")
    try:
        # as JSON: lists for tuples and whole numbers for floats pass, text for a number or true for 1 does not
        return TypeAdapter(WorldOptions).validate_json(json.dumps(options, default=str), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where, said = key_path(first["loc"]), first["msg"].removeprefix("Value error, ")
        raise ValueError(f"{where}: {shown(first['input'])} refused, {said[0].lower()}{said[1:]}" if where else said) from error


class CompareChoice(BaseModel, extra="forbid"):
    """How many worlds, which baselines, how many resamplings."""

    validation_worlds: PositiveInt = 8
    test_worlds: PositiveInt = 16
    routers: list[str] = [
        "random", "round_robin", "weighted_round_robin", "shortest_queue", "power_of_two", "least_kv", "least_work_left",
        "least_completion", "least_slack", "net_utility", "prefix_affinity", "matching_score", "what_if",
    ]  # fmt: skip
    splitters: list[str] = ["keep", "even", "compute", "bandwidth", "memory", "planner"]
    rebalancers: list[str] = ["never", "threshold", "virtual_usage"]
    clairvoyant: bool = True
    bootstrap: PositiveInt = 2000


class TuneChoice(BaseModel, extra="forbid"):
    """Cross-entropy tuning of the linear score."""

    rounds: PositiveInt = 8
    candidates: PositiveInt = 16
    worlds: PositiveInt = 3


class ExperimentConfig(BaseModel, extra="forbid"):
    """The whole experiment; `ppo` overrides fields of `PpoSettings` per agent; `imitate`: the heuristic that an agent with
    `clone_decisions` imitates before PPO; `max_candidates` is the padded size of each kind of decision (a router needs its groups + 2)."""

    name: str = "default"
    shortened: bool = Field(False, description="a look at the stages or a cut run: tables and reports say so")
    seed: int = Field(1, ge=0)
    trace: TraceChoice = TraceChoice()
    classes: ClassChoice = ClassChoice()
    worlds: WorldChoice = WorldChoice()
    compare: CompareChoice = CompareChoice()
    tune: TuneChoice = TuneChoice()
    max_candidates: dict[str, PositiveInt] = {"route": 16, "split": 48, "rebalance": 48, "joint": 48}
    discount_per_s: float = Field(1.0, gt=0, le=1)
    lateness_price: float = Field(0.05, ge=0)
    shaping: float = Field(1.0, ge=0)
    training_environments: PositiveInt = 6
    imitate: dict[str, str] = {"route": "what_if"}
    ppo: dict[str, dict[str, Any]] = {}

    @field_validator("ppo", "imitate", "max_candidates")
    @classmethod
    def _agents_are_known(cls, by_agent: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        known = CANDIDATE_KINDS if info.field_name == "max_candidates" else AGENT_NAMES
        for name in by_agent:
            if name not in known:
                raise ValueError(unknown_name("agent", name, known))
        return by_agent

    def world_options(self) -> WorldOptions:
        return _world_options(self.worlds.options)


def _problem(fault: Any) -> str:
    """pydantic's first complaint as `key: what is wrong (got value)`."""
    location = fault["loc"]
    where = key_path(location) or "file"
    if fault["type"] == "extra_forbidden":
        return f"{where}: " + unknown_name("key", str(location[-1]), keys_at(ExperimentConfig, location[:-1]))
    return f"{where}: {fault['msg'].removeprefix('Value error, ')} (got {shown(fault['input'])})"


def load_experiment(name_or_path: str) -> ExperimentConfig:
    """Read an experiment by name (a file of `agents/experiments`) or path. Raises ExperimentError with one line."""
    known = {path.stem: path for path in EXPERIMENTS.glob("*.yaml")}
    path = known.get(name_or_path, Path(name_or_path))
    if not path.is_file():
        raise ExperimentError(unknown_name("experiment", name_or_path, known) + "; or give a YAML file")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        if not isinstance(content, dict):
            raise ExperimentError(f"{path}: expected keys and values, found {type(content).__name__}")
        return ExperimentConfig.model_validate(content)
    except ValidationError as error:
        raise ExperimentError(f"{path}: {_problem(error.errors(include_url=False, include_context=False)[0])}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ExperimentError(f"{path}: not readable as YAML: {' '.join(str(error).split())}") from error
