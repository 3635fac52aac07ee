"""`python -m agents.evaluate`: policy bundles against heuristics on an experiment's test worlds, without training.

The worlds are those of `train.py` with the same experiment and seed: every contestant meets the same requests and faults.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

import numpy as np

from agents import heuristics
from agents.evaluation import FALLBACKS
from agents.evaluation_file import KEY_BYTES_MIN, EvaluationFile, bundle_digests
from agents.experiment_config import ExperimentConfig, load_experiment
from agents.policy_bundle import BundleSchema, load_bundle
from agents.provenance import command_line
from agents.report import EvaluationResults, comparisons, print_table
from agents.worker_processes import end_workers
from envs.decision.observation import CONTEXT, FEATURES, OBSERVATION_VERSION
from envs.domain.suggestions import unknown_name
from envs.scheduling_env import ALL_DECISIONS

BUNDLE_KINDS = (*ALL_DECISIONS, "joint")
_LISTS = {"route": "routers", "split": "splitters", "rebalance": "rebalancers"}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m agents.evaluate",
        description="Compare policy bundles with heuristics on the test worlds of an experiment, without training.",
    )
    parser.add_argument("--experiment", default="default", help="name in agents/experiments, or a YAML file (default: default)")
    parser.add_argument(
        "--bundle", action="append", default=[], metavar="KIND=DIR", help=f"a bundle; KIND is {', '.join(BUNDLE_KINDS)}; repeatable"
    )
    parser.add_argument(
        "--heuristic", action="append", default=[], metavar="KIND=NAME",
        help="a baseline; KIND is route, split or rebalance; repeatable (default: what the service falls back to)",
    )  # fmt: skip
    parser.add_argument("--all-heuristics", action="store_true", help="every baseline of the experiment, and the clairvoyant ceiling")
    parser.add_argument("--worlds", type=int, default=None, help="number of test worlds; replaces the experiment's")
    parser.add_argument("--seed", type=int, default=None, help="root seed; replaces the experiment's")
    parser.add_argument(
        "--load-one", type=float, default=None, metavar="SCALE",
        help="rate scale of load 1.0, as train.py printed it (default: found again)",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, default=None, help="evaluation file (default: runs/evaluation-NAME-DATE-TIME.json)")
    parser.add_argument("--key-file", type=Path, default=None, help="sign the file: HMAC-SHA256 with this file's bytes as key")
    parser.add_argument("--processes", type=int, default=2, help="worker processes (default: 2)")
    return parser.parse_args(arguments)


def pairs_of(texts: Sequence[str], flag: str, kinds: Sequence[str]) -> list[tuple[str, str]]:
    """Split KIND=VALUE texts. Raises ValueError naming the flag."""
    pairs = []
    for text in texts:
        kind, separator, value = text.partition("=")
        if not separator or not value:
            raise ValueError(f"{flag} {text!r}: expected KIND=VALUE, e.g. {flag} {kinds[0]}=...")
        if kind not in kinds:
            raise ValueError(f"{flag}: " + unknown_name("kind", kind, kinds))
        pairs.append((kind, value))
    return pairs


def checked_bundles(texts: Sequence[str], config: ExperimentConfig) -> dict[str, Path]:
    """Kind -> directory of bundles that this program's encoder can feed. Raises ValueError or BundleError, one line."""
    bundles: dict[str, Path] = {}
    for kind, directory in pairs_of(texts, "--bundle", BUNDLE_KINDS):
        if kind in bundles:
            raise ValueError(f"--bundle {kind} given twice; evaluate one bundle of a kind at a time, on the same worlds")
        rows = load_bundle(directory).schema.candidates_max
        load_bundle(directory, BundleSchema(kind, FEATURES, CONTEXT, OBSERVATION_VERSION, rows))
        bundles[kind] = Path(directory)
    return bundles


def with_heuristics(config: ExperimentConfig, texts: Sequence[str], take_all: bool) -> ExperimentConfig:
    """The experiment with the chosen baselines; a kind that none was chosen for gets the service's fallback."""
    chosen: dict[str, list[str]] = {kind: [] for kind in ALL_DECISIONS}
    for kind, name in pairs_of(texts, "--heuristic", ALL_DECISIONS):
        heuristics.make(kind, name, np.random.default_rng(0))  # an unknown name is told now, not in a worker
        if name not in chosen[kind]:
            chosen[kind].append(name)
    if take_all:
        return config
    names = {_LISTS[kind]: found or [FALLBACKS[kind]] for kind, found in chosen.items()}
    return config.model_copy(update={"compare": config.compare.model_copy(update={**names, "clairvoyant": False})})


def configured(options: argparse.Namespace) -> tuple[ExperimentConfig, dict[str, Path], bytes | None]:
    """Experiment, bundles and key from the command line. Raises ValueError, one line."""
    config = load_experiment(options.experiment)
    if options.seed is not None:
        if options.seed < 0:
            raise ValueError(f"--seed {options.seed} must be at least 0")
        config = config.model_copy(update={"seed": options.seed})
    for flag, value in (("--worlds", options.worlds), ("--load-one", options.load_one), ("--processes", options.processes)):
        if value is not None and not value > 0:
            raise ValueError(f"{flag} {value} must be positive")
    if options.worlds is not None:
        is_shortened = config.shortened or options.worlds < config.compare.test_worlds
        compare = config.compare.model_copy(update={"test_worlds": options.worlds})
        config = config.model_copy(update={"compare": compare, "shortened": is_shortened})
    if options.all_heuristics and options.heuristic:
        raise ValueError("--all-heuristics and --heuristic exclude each other; give one of them")
    config = with_heuristics(config, options.heuristic, options.all_heuristics)
    key = None
    if options.key_file is not None:
        try:
            key = options.key_file.read_bytes().strip()
        except OSError as error:
            raise ValueError(f"--key-file {options.key_file}: {error.strerror}") from error
        if len(key) < KEY_BYTES_MIN:
            raise ValueError(f"--key-file {options.key_file} holds {len(key)} bytes; at least {KEY_BYTES_MIN} are needed")
    return config, checked_bundles(options.bundle, config), key


def evaluation_file(config: ExperimentConfig, results: EvaluationResults, bundles: Mapping[str, Path]) -> EvaluationFile:
    """Results with the paired differences to the best heuristic and the digests of the bundles' files."""
    rows = [asdict(row) for row in comparisons(results, np.random.default_rng(config.seed))]
    return EvaluationFile(config.name, asdict(results), tuple(rows), {kind: bundle_digests(path) for kind, path in bundles.items()})


def command_of(options: argparse.Namespace) -> str:
    """The line that makes this evaluation again."""
    flags = {
        "--experiment": options.experiment,
        "--bundle": options.bundle,
        "--heuristic": options.heuristic,
        "--all-heuristics": options.all_heuristics,
        "--worlds": options.worlds,
        "--seed": options.seed,
        "--load-one": options.load_one,
    }
    return command_line("python -m agents.evaluate", flags)


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0 finished, 1 interrupted, 2 bad input."""
    options = parse(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s %(message)s")
    from rich.console import Console

    from agents.experiment import Experiment  # loads torch: not before the command line is known to be good

    console = Console()
    try:
        config, bundles, key = configured(options)
        output = options.output or Path("runs") / f"evaluation-{config.name}-{datetime.now():%Y%m%d-%H%M%S}.json"
        if output.exists():
            raise ValueError(f"--output {output} exists; name a new file")
        experiment = Experiment(config, output.parent, console, options.processes, command_of(options))
        experiment.check(())
    except ValueError as error:
        print(f"evaluate: {error}", file=sys.stderr)
        return 2
    try:
        experiment.find_load(options.load_one)
        experiment.pick_heuristics()
        results = experiment.evaluate(bundles)
    except KeyboardInterrupt:
        end_workers()
        print("evaluate: interrupted; nothing was written", file=sys.stderr)
        return 1
    finally:
        experiment.runner.close()
    output.parent.mkdir(parents=True, exist_ok=True)
    evaluation_file(config, results, bundles).write(output, key)
    print_table(results, console)
    console.print(f"evaluation file {output}{' (signed)' if key else ''}", highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
