"""Experiment files: the shipped ones load, every default holds, and each mistake is one line that names its place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from agents import heuristics
from agents.experiment import DEFAULT_PPO
from agents.experiment_config import EXPERIMENTS, ExperimentConfig, ExperimentError, load_experiment
from agents.ppo_training import PpoSettings
from envs.cluster.world import WorldOptions
from envs.scenario.cluster_file import load_cluster
from envs.traces.default_traces import FILES

SHIPPED = sorted(path.stem for path in EXPERIMENTS.glob("*.yaml"))


def written(folder: Path, text: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_experiment_names_what_exists(name):
    """Name, trace, clusters, heuristics and PPO settings of each file are known to the parts that will read them."""
    config = load_experiment(name)
    assert config.name == name
    assert all(name in FILES for name in [part.name for part in config.trace.parts if part.name != "batch"] or [config.trace.name])
    for cluster in config.worlds.clusters:
        groups = len(load_cluster(cluster).groups)
        assert groups + 2 <= config.max_candidates["route"], "a route decision has every group, hold and refuse"
    for decision, names in (
        ("route", config.compare.routers), ("split", config.compare.splitters), ("rebalance", config.compare.rebalancers),
    ):  # fmt: skip
        tables = {"route": heuristics.ROUTERS, "split": heuristics.SPLITTERS, "rebalance": heuristics.REBALANCERS}
        assert set(names) <= set(tables[decision])
    for agent, overrides in config.ppo.items():
        PpoSettings(**(DEFAULT_PPO[agent] | overrides))


def test_default_and_smoke_are_shipped():
    assert {"default", "smoke"} <= set(SHIPPED)


def test_empty_file_is_the_defaults(tmp_path):
    assert load_experiment(written(tmp_path, "")) == ExperimentConfig()


def test_windows_of_the_defaults_share_no_request():
    trace = ExperimentConfig().trace
    assert trace.train_s[1] <= trace.validation_s[0] < trace.validation_s[1] <= trace.test_s[0]


def test_file_beats_defaults_field_by_field(tmp_path):
    config = load_experiment(written(tmp_path, "seed: 5\nworlds: {requests: 7}\n"))
    assert (config.seed, config.worlds.requests, config.worlds.clusters) == (5, 7, ExperimentConfig().worlds.clusters)


def test_world_options_reach_the_world(tmp_path):
    """Whole numbers stand for seconds, a list for one value per class."""
    config = load_experiment(written(tmp_path, "worlds: {options: {drain_s: 12, hold_max_s: 0.25, default_output_tokens: [9, 8, 7]}}"))
    options = config.world_options()
    assert (options.drain_s, options.hold_max_s, options.default_output_tokens) == (12.0, 0.25, (9, 8, 7))
    assert options == replace(WorldOptions(), drain_s=12.0, hold_max_s=0.25, default_output_tokens=(9, 8, 7))


MISTAKES = {
    "unknown key": ("seeed: 3", "seeed"),
    "unknown inner key": ("worlds: {requsts: 3}", 'worlds.requsts: key "requsts" unknown; did you mean "requests"'),
    "wrong type": ("seed: many", "seed: .*'many'"),
    "negative seed": ("seed: -1", "seed: .*-1"),
    "no requests": ("worlds: {requests: 0}", "worlds.requests: .*0"),
    "windows overlap": ("trace: {train_s: [0, 2200]}", "overlap; training and test must not share requests"),
    "train and test are one window": ("trace: {train_s: [2700, 3510]}", "overlap"),
    "window ends before it begins": ("trace: {test_s: [3000, 2900]}", "ends before it begins"),
    "a list, not keys": ("- seed: 3", "expected keys and values, found list"),
    "not YAML": ("seed: [1", "not readable as YAML"),
    "unknown world option": ("worlds: {options: {drain: 3}}", 'worlds.options: .*"drain" unknown; did you mean "drain_s"'),
    "world option of another type": ("worlds: {options: {hold_max_s: soon}}", "worlds.options: hold_max_s: 'soon' refused"),
    "number as text in a world option": ("worlds: {options: {drain_s: '12'}}", "worlds.options: drain_s: '12' refused"),
    "truth for a number": ("worlds: {options: {attempts_max: true}}", "worlds.options: attempts_max: True refused"),
    "broken number of steps": ("worlds: {options: {stall_events: 1.5}}", "worlds.options: stall_events: 1.5 refused"),
    "world option out of range": ("worlds: {options: {control_tick_s: 0}}", "worlds.options: control_tick_s=0.0 must lie between"),
    "world option not a number": ("worlds: {options: {drain_s: .nan}}", "worlds.options: drain_s=nan must lie between"),
    "unknown start corner": ("worlds: {options: {start_corner: planer}}", '"planer" unknown; did you mean "planner"'),
    "too few default lengths": ("worlds: {options: {default_output_tokens: [256, 256]}}", "must be 3 numbers >= 1: chat, code, batch"),
    "limit multiplier in two places": ("worlds: {options: {limit_multiplier: 2}}", "limit_multiplier is a key of `worlds` itself"),
    "unknown agent of PPO": ("ppo: {rout: {}}", 'ppo: agent "rout" unknown; did you mean "route"'),
    "unknown agent of sizes": ("max_candidates: {joined: 8}", 'max_candidates: agent "joined" unknown'),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_one_line_that_names_its_place(tmp_path, mistake):
    text, said = MISTAKES[mistake]
    with pytest.raises(ExperimentError, match=said) as caught:
        load_experiment(written(tmp_path, text))
    assert "\n" not in str(caught.value) and "mine.yaml" in str(caught.value)


def test_binary_file_is_refused(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"\xff\xfe\x00seed: 3")
    with pytest.raises(ExperimentError, match="not readable as YAML"):
        load_experiment(str(path))


def test_yaml_cannot_build_objects(tmp_path):
    """The safe loader alone: a tag that would call a function is an error."""
    marker = tmp_path / "made"
    with pytest.raises(ExperimentError, match="not readable as YAML"):
        load_experiment(written(tmp_path, f"name: !!python/object/apply:os.mkdir ['{marker}']"))
    assert not marker.exists()


def test_unknown_name_lists_the_known():
    with pytest.raises(ExperimentError, match=r'"defualt" unknown; did you mean "default"\? known: .*smoke.*or give a YAML file'):
        load_experiment("defualt")


def test_written_configuration_loads_to_the_same_experiment(tmp_path):
    """`experiment.yaml` of a run, every default included, is an experiment file that means the same."""
    config = load_experiment("smoke")
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    assert load_experiment(str(path)) == config
    assert config.shortened and not load_experiment("default").shortened


def test_parts_and_classes_are_checked(tmp_path):
    with pytest.raises(ExperimentError, match=r'trace.parts.0.: .*service class "chatt" unknown; did you mean "chat"'):
        load_experiment(written(tmp_path, "trace: {parts: [{name: azure-conv, label: chatt}]}"))
    with pytest.raises(ExperimentError, match=r"classes.source: .*'trace', 'label' or 'classifier'"):
        load_experiment(written(tmp_path, "classes: {source: guess}"))
    with pytest.raises(ExperimentError, match=r"worlds.options.*report_delay_s=-1"):
        load_experiment(written(tmp_path, "worlds: {options: {report_delay_s: -1}}"))
