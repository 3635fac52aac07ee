"""One experiment file: what is replayed, on which cluster, how it is trained and compared. Every field has a default."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, Field, PositiveFloat, PositiveInt, ValidationError, model_validator

from agents.mixed_traffic import TracePart
from agents.row_classes import ClassSource
from envs.cluster.world import WorldOptions
from envs.domain.suggestions import unknown_name

EXPERIMENTS = Path(__file__).parent / "experiments"


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
    options: dict[str, Any] = {}


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
    """The whole experiment; `ppo` overrides fields of `PpoSettings` per agent (route, split, rebalance, joint);
    `max_candidates` is the padded size of each agent's decisions (a router needs its groups + 2)."""

    name: str = "default"
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
    ppo: dict[str, dict[str, Any]] = {}

    def world_options(self) -> WorldOptions:
        return WorldOptions(**self.worlds.options)


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
        config = ExperimentConfig(**content)
        _check_world_options(config, path)
        return config
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ExperimentError(f"{path}: {where or 'file'}: {first['msg']} (got {first.get('input')!r})") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ExperimentError(f"{path}: not readable as YAML: {' '.join(str(error).split())}") from error


def _check_world_options(config: ExperimentConfig, path: Path) -> None:
    try:
        config.world_options()
    except (TypeError, ValueError) as error:
        raise ExperimentError(f"{path}: worlds.options: {error}") from error
