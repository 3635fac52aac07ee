"""`python -m envs.scenario list|show|check`: look at catalogues and clusters, and check a cluster file.

Exit codes: 0 fine, 2 bad input (one line on stderr).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from envs.scenario import tables
from envs.scenario.cluster_file import cluster_path, load_cluster, ready_clusters
from envs.scenario.scenario_error import ScenarioError

LISTS: dict[str, Callable[[], str]] = {
    "clusters": lambda: tables.cluster_list([load_cluster(name) for name in ready_clusters()]),
    "gpus": tables.gpu_table,
    "models": tables.model_table,
    "links": tables.link_table,
}


class _OneLineParser(argparse.ArgumentParser):
    """Bad arguments: one line on stderr, exit code 2."""

    def error(self, message: str) -> None:  # type: ignore[override]
        self.exit(2, f"{self.prog}: {message}; see --help\n")


def build_parser() -> argparse.ArgumentParser:
    parser = _OneLineParser(prog="python -m envs.scenario", description="Look at GPU, model and link catalogues and at clusters.")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_OneLineParser)
    listing = commands.add_parser("list", help="table of ready clusters, or of a catalogue")
    listing.add_argument("what", nargs="?", choices=tuple(LISTS), default="clusters")
    show = commands.add_parser("show", help="one cluster in full")
    show.add_argument("cluster", help="name of a ready cluster, or a cluster file")
    show.add_argument("--yaml", action="store_true", help="print the file itself, to start your own from")
    check = commands.add_parser("check", help="read a cluster file and say whether it can be used")
    check.add_argument("file", help="cluster file (or the name of a ready cluster)")
    return parser


def run(arguments: Sequence[str]) -> str:
    """Text that the command prints. Raises: ScenarioError."""
    options = build_parser().parse_args(arguments)
    if options.command == "list":
        return LISTS[options.what]()
    if options.command == "show":
        spec = load_cluster(options.cluster)
        return cluster_path(options.cluster).read_text(encoding="utf-8").rstrip() if options.yaml else tables.cluster_table(spec)
    spec = load_cluster(options.file)
    groups = f"{len(spec.groups)} group(s), {sum(spec.parked)} of them parked"
    return f"ok: {spec.name}: {groups}, {spec.gpus} GPU(s), model {spec.model.name}"


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        print(run(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
    except ScenarioError as error:
        print(error, file=sys.stderr)
        return 2
    except BrokenPipeError:  # `... | head`: not a fault; keep the interpreter from flushing into the closed pipe at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
