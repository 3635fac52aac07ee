"""`python -m runtime serve`: the service. `python -m runtime rollout`: a new policy, step by step into service. `python -m runtime
calibrate`: measure this machine's ranks and write a cluster file that simulates them.

Exit codes: 0 done, 1 the run failed, 2 bad input (one line on stderr), 130 interrupted.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from envs.scenario.scenario_error import ScenarioError
from runtime.rollout.command_line import add_arguments as add_rollout_arguments
from runtime.rollout.command_line import main as rollout
from runtime.serve import add_arguments
from runtime.serve import main as serve

if TYPE_CHECKING:
    from runtime.calibration_files import Calibration
    from runtime.torch_tp.config import ModelConfig
    from runtime.torch_tp.supervisor import RankSettings


CALIBRATE_BOUNDS = {"ranks": (1, 256), "repeats": (1, 10_000), "budget-s": (0.1, 1e6), "slots": (1, 4096), "context": (16, 1 << 20)}


class _OneLineParser(argparse.ArgumentParser):
    """Bad arguments: one line on stderr, exit code 2."""

    def error(self, message: str) -> None:  # type: ignore[override]
        self.exit(2, f"{self.prog}: {message}; see --help\n")


def build_parser() -> argparse.ArgumentParser:
    parser = _OneLineParser(
        prog="python -m runtime", description="Serve the OpenAI API over groups of ranks; measure the ranks of this machine."
    )
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_OneLineParser, metavar="COMMAND")
    add_arguments(commands.add_parser("serve", help="the OpenAI API over groups of ranks, decided by an exported policy"))
    add_rollout_arguments(
        commands.add_parser("rollout", help="take a bundle into service: replay, shadow, canary stages, by written gates")
    )
    calibrate = commands.add_parser("calibrate", help="measure the local ranks, fit the performance model, write a cluster file")
    calibrate.add_argument("--model", default="smollm2", help="directory, .gguf file or known name (default %(default)s)")
    calibrate.add_argument("--ranks", type=int, default=2, help="worker processes (default %(default)s)")
    calibrate.add_argument("--devices", default="cpu", help="device of each rank, or one for all (default %(default)s)")
    calibrate.add_argument(
        "--slow-factors", default="1", help="EMULATION: each rank so many times slower, or one for all (default %(default)s)"
    )
    calibrate.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"], help="default %(default)s")
    calibrate.add_argument("--out", type=Path, default=Path("calibrated"), help="folder to write into (default %(default)s)")
    calibrate.add_argument("--name", default="local", help="name of the cluster and its files (default %(default)s)")
    calibrate.add_argument("--repeats", type=int, default=5, help="steps of each size (default %(default)s)")
    calibrate.add_argument("--budget-s", type=float, default=120.0, help="no further size is begun after that (default %(default)s)")
    calibrate.add_argument("--slots", type=int, default=16, help="largest batch measured (default %(default)s)")
    calibrate.add_argument("--context", type=int, default=2048, help="longest context measured, if the model has it (default %(default)s)")
    return parser


def rank_settings(options: argparse.Namespace) -> list[RankSettings]:
    """Raises: ValueError where a list is neither of length one nor of one entry per rank."""
    from runtime.torch_tp.supervisor import RankSettings

    devices = _per_rank("--devices", options.devices, options.ranks)
    try:
        factors = [float(text) for text in _per_rank("--slow-factors", options.slow_factors, options.ranks)]
    except ValueError as error:
        raise ValueError(f"--slow-factors {options.slow_factors!r}: {error}") from None
    # speeds alike, whatever the factors: the split is even, so that every rank shows what it can do with the same work
    return [RankSettings(device=device, slow_factor=factor) for device, factor in zip(devices, factors, strict=True)]


def _check_flags(options: argparse.Namespace) -> None:
    """Raises: ValueError for a flag out of bounds, before anything is started."""
    for flag, (least, most) in CALIBRATE_BOUNDS.items():
        value = getattr(options, flag.replace("-", "_"))
        if not least <= value <= most:
            raise ValueError(f"--{flag} {value}: must be within {least:g} to {most:g}")
    if not re.fullmatch(r"[\w.-]+", options.name) or options.name.startswith("."):
        raise ValueError(f"--name {options.name!r}: letters, digits, dots, dashes; it becomes the beginning of file names")


def _make_folder(folder: Path) -> None:
    """Before minutes of measuring, whose end would find no place. Raises: ValueError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"--out {str(folder)!r}: {error}") from error


def _per_rank(flag: str, text: str, ranks: int) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    if len(parts) not in (1, ranks):
        raise ValueError(f"{flag} {text!r}: {len(parts)} entries for {ranks} ranks; give one, or one per rank")
    return parts * ranks if len(parts) == 1 else parts


def run_calibration(
    options: argparse.Namespace, ranks: Sequence[RankSettings], folder: Path, config: ModelConfig
) -> tuple[Calibration, str]:
    """Returns what was written, and a remark on how the run is to be taken."""
    from runtime.calibration_files import write_calibration
    from runtime.local_measurement import measure
    from runtime.torch_tp.emulation import CpuSample, verdict
    from runtime.torch_tp.nursery import Nursery
    from runtime.torch_tp.supervisor import Supervisor, SupervisorSettings

    context_tokens = min(options.context, config.context_tokens)
    kv_tokens_max = options.slots * (context_tokens + 16)
    settings = SupervisorSettings(kv_tokens_max=kv_tokens_max, slots_max=options.slots, dtype=options.dtype)
    nursery = Nursery()
    try:
        nursery.start()
        with Supervisor(folder, ranks, settings, nursery=nursery) as supervisor:
            supervisor.start()
            before = CpuSample.take()
            measurement = measure(
                supervisor, context_tokens=context_tokens, slots_max=options.slots, repeats=options.repeats, budget_s=options.budget_s
            )
            judged = verdict(before, CpuSample.take(), [rank.slow_factor for rank in ranks])
    finally:
        nursery.close()
    written = write_calibration(measurement, options.out, options.name, slots_max=options.slots, kv_tokens_max=kv_tokens_max)
    return written, f"machine CPU {judged.busy_fraction:.0%} busy; {judged}"


def main(arguments: Sequence[str] | None = None) -> int:
    _open_standard_descriptors()
    options = build_parser().parse_args(arguments)
    if options.command == "serve":
        return serve(options)
    if options.command == "rollout":
        return rollout(options)
    return calibrate(options)


def _open_standard_descriptors() -> None:
    """Where they were closed for us, the next file or socket would get their numbers, and what is meant for stderr."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free


def calibrate(options: argparse.Namespace) -> int:
    """What it needs is loaded here: the gateway's process would hold it for nothing."""
    from runtime.torch_tp.config import CheckpointError, read_config
    from runtime.torch_tp.model_folder import model_folder
    from runtime.torch_tp.supervisor import GroupError

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s %(message)s", stream=sys.stderr)
    try:
        _check_flags(options)
        ranks = rank_settings(options)
        folder = model_folder(options.model)
        config = read_config(folder)
        _make_folder(options.out)
    except (CheckpointError, ValueError) as error:
        print(f"python -m runtime: {error}", file=sys.stderr)
        return 2
    try:
        written, remark = run_calibration(options, ranks, folder, config)
    except (GroupError, ScenarioError, ValueError, OSError) as error:
        print(f"python -m runtime: calibration failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    off = written.held_out_error
    print(f"cluster   {written.cluster}")
    print(f"profiles  {written.profiles}")
    print(f"tables    {', '.join(str(path) for path in written.tables)}")
    print(f"error     simulated steps against {off['rows']:.0f} held-out sizes: mean {off['mean']:.1%}, median {off['median']:.1%}, "
          f"p90 {off['p90']:.1%}")  # fmt: skip
    print(f"run       {remark}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
