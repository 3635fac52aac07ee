"""Command line of the main job: experiment file -> trained policies, exported bundles, honest comparison."""

from __future__ import annotations

import argparse
import logging
import shlex
import shutil
import sys
from datetime import datetime
from pathlib import Path


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train schedulers on a trace, compare them with every baseline on unseen worlds, export policy bundles.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--experiment", default="default", help="name in agents/experiments, or a YAML file")
    parser.add_argument(
        "--agent",
        default="all",
        choices=("all", "route", "route_from_random", "split", "rebalance", "joint"),
        help="which policy to train; all trains every one but joint in turn",
    )
    parser.add_argument("--run-dir", type=Path, default=None, help="new directory for results (default: runs/NAME-DATE-TIME)")
    parser.add_argument("--seed", type=int, default=None, help="root seed; replaces the experiment's")
    parser.add_argument("--decisions", type=int, default=None, help="training decisions of each agent; replaces the experiment's")
    parser.add_argument("--processes", type=int, default=2, help="worker processes for evaluation")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoints in --run-dir")
    return parser.parse_args(arguments)


def interpreter() -> str:
    """How to call this interpreter here: `make` uses an environment that the caller's shell may not have active."""
    if shutil.which("python") == sys.executable:
        return "python"
    path = Path(sys.executable)
    return shlex.quote(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0 finished, 1 failed run, 2 bad input."""
    options = parse(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s %(message)s")
    from rich.console import Console

    from agents.experiment import AGENTS, DEFAULT_PPO, Experiment
    from agents.experiment_config import load_experiment
    from agents.provenance import command_line
    from agents.report import print_table
    from agents.worker_processes import end_workers

    console = Console()
    try:
        config = load_experiment(options.experiment)
        if options.seed is not None:
            if options.seed < 0:
                raise ValueError(f"--seed {options.seed} must be at least 0")
            config = config.model_copy(update={"seed": options.seed})
        agents = AGENTS if options.agent == "all" else (options.agent,)
        if options.decisions is not None:
            settings = {agent: DEFAULT_PPO[agent] | config.ppo.get(agent, {}) for agent in agents}
            is_shortened = config.shortened or any(options.decisions < found["total_decisions"] for found in settings.values())
            ppo = {agent: config.ppo.get(agent, {}) | {"total_decisions": options.decisions} for agent in agents}
            config = config.model_copy(update={"ppo": config.ppo | ppo, "shortened": is_shortened})
        run_dir = options.run_dir or Path("runs") / f"{config.name}-{datetime.now():%Y%m%d-%H%M%S}"
        if options.resume and not run_dir.is_dir():
            raise ValueError(f"--resume: {run_dir} is not a directory; name the interrupted run with --run-dir")
        if not options.resume and run_dir.exists() and any(run_dir.iterdir()):
            raise ValueError(f"--run-dir {run_dir} is not empty; name a new directory or pass --resume")
        flags = {
            "--experiment": options.experiment,
            "--agent": None if options.agent == "all" else options.agent,
            "--seed": options.seed,
            "--decisions": options.decisions,
        }
        experiment = Experiment(config, run_dir, console, options.processes, command_line("python train.py", flags))
        experiment.check(agents)
    except ValueError as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2
    run_dir.mkdir(parents=True, exist_ok=True)
    try:
        results = experiment.run(agents, resume=options.resume)
    except KeyboardInterrupt:
        end_workers()
        print(f"train.py: interrupted; go on with --resume --run-dir {run_dir}", file=sys.stderr)
        return 1
    finally:
        experiment.runner.close()
    print_table(results, console)
    python = interpreter()
    for line in (
        f"report   {run_dir / 'report.html'}",
        f"bundles  {run_dir / 'bundle'}",
        "next:",
        f"  {python} -m tensorboard.main --logdir {shlex.quote(str(run_dir))}",
        f"  {python} -m agents.inspect_bundle {shlex.quote(str(run_dir / 'bundle' / agents[0]))}",
        f"  {python} train.py --experiment {shlex.quote(options.experiment)} --seed {config.seed + 1}",
    ):
        console.print(line, soft_wrap=True, markup=False, highlight=False)  # whole lines, to be copied
    return 0


if __name__ == "__main__":
    sys.exit(main())
