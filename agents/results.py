"""`python -m agents.results RUN...`: publish finished runs in `docs/results.md` and in the README's table.

RUN is a directory of `train.py`, or a file of `agents.evaluate`, whose digest is checked.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from agents.evaluation_file import read_evaluation_file
from agents.report import RESULTS_FILE, EvaluationResults
from agents.results_page import PublishedRun, ResultsPageError, kept_commands, with_rows, with_sections
from agents.whole_files import replace_file

PROJECT = Path(__file__).resolve().parent.parent


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m agents.results",
        description="Publish finished runs: a section each in the results page, a row each in the README, with the command of each.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="directory of train.py, or file of agents.evaluate")
    parser.add_argument("--page", type=Path, default=PROJECT / "docs" / "results.md", help="results page (default: docs/results.md)")
    parser.add_argument("--readme", type=Path, default=PROJECT / "README.md", help="page with the marked table (default: README.md)")
    parser.add_argument("--only", action="store_true", help="drop rows and sections of other runs (default: they stay)")
    parser.add_argument("--command", default=None, metavar="TEXT", help="the line that made RUN, for one run that did not record it")
    return parser.parse_args(arguments)


def read_run(path: Path, command: str | None = None) -> PublishedRun:
    """Read a run's directory or an evaluation file; `command` stands in for one that was not recorded. Raises ValueError, one line."""
    results = read_results(path)
    if command is not None:
        if results.command:
            raise ResultsPageError(f"{path}: it recorded `{results.command}`; leave --command out")
        results = replace(results, command=command)
    return PublishedRun(str(path), results)


def read_results(path: Path) -> EvaluationResults:
    """Results of a run's directory or of an evaluation file. Raises ValueError, one line."""
    if path.is_dir():
        file = path / RESULTS_FILE
        if not file.is_file():
            raise ResultsPageError(f"{path}: no {RESULTS_FILE} in it; the run is not finished (train.py --resume --run-dir {path})")
        try:
            return EvaluationResults.from_json(file.read_text(encoding="utf-8"))
        except (ValueError, KeyError) as error:
            raise ResultsPageError(f"{file}: {error}") from error
    if not path.is_file():
        raise ResultsPageError(f"{path}: neither a run's directory nor an evaluation file")
    return EvaluationResults.from_json(json.dumps(dict(read_evaluation_file(path).results)))


def read_runs(paths: Sequence[Path], command: str | None = None) -> list[PublishedRun]:
    """All runs, in order. Raises ValueError when two are made by one command, or `command` is given for several."""
    if command is not None and len(paths) > 1:
        raise ResultsPageError(f"--command is for one run, {len(paths)} were given")
    runs: dict[str, PublishedRun] = {}
    for path in paths:
        run = read_run(path, command)
        known = runs.get(run.results.command)
        if known is not None:
            raise ResultsPageError(f"{path} and {known.source} are both made by `{run.results.command}`; give one of them")
        runs[run.results.command] = run
    return list(runs.values())


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0 written, 2 bad input (nothing written)."""
    options = parse(arguments)
    try:
        runs = read_runs(options.runs, options.command)
        readme = options.readme.read_text(encoding="utf-8")
        before = options.page.read_text(encoding="utf-8") if options.page.exists() else None
        try:
            rows = with_rows(readme, runs, not options.only)
        except ResultsPageError as error:
            raise ResultsPageError(f"{options.readme}: {error}") from error
        after = with_sections(before, runs, not options.only)
    except (OSError, ValueError) as error:
        print(f"results: {error}", file=sys.stderr)
        return 2
    replace_file(options.page, after.encode())
    replace_file(options.readme, rows.encode())
    published = {run.results.command for run in runs}
    for run in runs:
        print(f"published {run.source}: {run.results.command}")
    for command in kept_commands(before or "", after):
        if command not in published:
            print(f"kept      {command}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
