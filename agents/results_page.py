"""Published results as Markdown: one section per run for `docs/results.md`, one row per run for the README.

Every section and row carries the command that makes it again, which is also its key: a run published later replaces
the one with the same command and leaves the others alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agents.report import LATENCIES, PERCENTILES, EvaluationResults, PolicyRow, format_interval, format_percent, table_rows
from agents.statistics import iqm_difference, mean_difference, probability_of_improvement

BEGIN, END = "<!-- RESULTS TABLE: begin", "<!-- RESULTS TABLE: end -->"
BEGIN_LINE = BEGIN + ". Written by `python -m agents.results RUN ...`; a row without its command is not allowed. -->"
README_TITLES = "| traffic, cluster | best heuristic (chosen on validation) | learned | difference, points of goodput | command |"
README_HEADER = f"{README_TITLES}\n|{'---|' * (README_TITLES.count('|') - 1)}"
PAGE_TITLE = """# Results

Written by `python -m agents.results RUN ...`; a later run replaces the section with its command. Simulated figures from the
calibrated model, not from hardware. Differences are points of goodput, paired by world, with 95 % bootstrap intervals; the
interquartile mean (IQM) stands beside the mean. The best heuristic was chosen on validation worlds among all but `what_if`, which
takes milliseconds a decision. Percentiles are means over worlds of each world's percentile, failed requests at the worst value;
refused and other ends are totals. A router's own row plays no control decisions. `split:x` is the best router with splitter `x`,
`rebalance:x` the two best with rebalancer `x`; a learned policy plays beside the best heuristics that it was trained beside.
"""
PREFERRED = ("ppo_route", "ppo_joint")
"""The learned policy that stands in the README's row of a run; otherwise the first."""
_COMMAND_LINE = re.compile(r"^Command: `(?P<command>[^`]+)`$", re.M)
_ROW_COMMAND = re.compile(r"`(?P<command>[^`]+)` \|$")


class ResultsPageError(ValueError):
    """A run that cannot be published, or a page without its markers; one line says what to do."""


@dataclass(frozen=True, slots=True)
class PublishedRun:
    """Results of one run and where they were read; `source` is for messages only and is not written."""

    source: str
    results: EvaluationResults

    def __post_init__(self) -> None:
        if not self.results.command:
            raise ResultsPageError(f"{self.source}: its results name no command that makes them again; say it with --command")
        if "`" in self.results.command or "\n" in self.results.command:
            raise ResultsPageError(f"{self.source}: command {self.results.command!r} holds a backquote or a line end")

    @property
    def traffic(self) -> str:
        """Traffic, cluster and size in words, with SYNTHETIC and shortened where they apply."""
        found = self.results
        clusters = sorted({str(world["cluster"]) for world in found.policies[found.best_heuristic] if "cluster" in world})
        requests = sum(sum(world["counts"].values()) for world in found.policies[found.best_heuristic])
        words = [
            ("**SYNTHETIC** " if found.is_synthetic else "") + _cell(found.trace_name),
            ", ".join(clusters) or "cluster not named",
            ("**shortened run**: " if found.is_shortened else "") + f"{len(found.world_names)} test worlds, {requests:,} requests",
        ]
        return ", ".join(words)


def section(run: PublishedRun, rng: np.random.Generator) -> str:
    """One run for the results page: what it is, how the learned policies did, every policy with its percentiles."""
    found = run.results
    lines = [f"## {run.traffic.replace('**', '')}", "", f"Command: `{found.command}`", ""]
    if found.is_synthetic:
        lines += ["**Synthetic traffic: these requests were generated, not recorded. The figures say nothing about real traffic.**", ""]
    if found.is_shortened:
        lines += ["**Shortened run: fewer decisions, worlds or requests than a result needs.**", ""]
    commit = found.provenance.get("commit")
    lines += [f"- commit {commit or 'not recorded'}, seed {found.provenance.get('seed', 'not recorded')}"]
    lines += [f"- {_cell(note)}" for note in found.notes]
    lines += [f"- best heuristic on validation: {found.best_heuristic}{_runners_up(found)}", ""]
    lines += [*_difference_table(found, rng), ""]
    lines += _policy_table(table_rows(found, rng), found)
    return "\n".join(lines) + "\n"


def readme_row(run: PublishedRun, rng: np.random.Generator) -> str:
    """The run's line of the README's table."""
    found = run.results
    best = f"{found.best_heuristic} {100 * found.goodput(found.best_heuristic).mean():.2f} %"
    learned, difference = "none", "–"
    if found.learned:
        name = next((name for name in PREFERRED if name in found.learned), found.learned[0])
        ours, theirs = found.goodput(name), found.goodput(found.best_heuristic)
        learned = f"{_title(name)} {100 * ours.mean():.2f} %"
        mean, iqm = mean_difference(ours, theirs, rng), iqm_difference(ours, theirs, rng)
        difference = f"{_points(format_interval(mean, 100, sign=True, digits=2))}; IQM {_points(f'{100 * iqm.estimate:+.2f}')}"
    return f"| {run.traffic} | {best} | {learned} | {difference} | `{found.command}` |"


def with_sections(page: str | None, runs: Sequence[PublishedRun], keep: bool = True) -> str:
    """The results page with the runs' sections first; sections of other commands stay behind them if `keep`.

    page: the present text, or None for a new page. Text above the first section is kept.
    """
    head, *others = re.split(r"^(?=## )", page if page is not None else PAGE_TITLE, flags=re.M)
    fresh = [section(run, np.random.default_rng(0)) for run in runs]
    commands = {run.results.command for run in runs}
    kept = [text for text in others if keep and _section_command(text) not in commands]
    return "\n".join(part.rstrip("\n") + "\n" for part in [head, *fresh, *kept])


def with_rows(page: str, runs: Sequence[PublishedRun], keep: bool = True) -> str:
    """The README with the runs' rows first between its markers; rows of other commands stay behind them if `keep`.

    Raises: ResultsPageError when the markers are missing.
    """
    found = re.search(re.escape(BEGIN) + r"[^\n]*\n(?P<table>.*?)" + re.escape(END), page, flags=re.S)
    if found is None:
        raise ResultsPageError(f"no lines '{BEGIN} ... -->' and '{END}' around the table; put them where the rows belong")
    rows = [line for line in found["table"].splitlines() if line.startswith("|")][2:]
    commands = {run.results.command for run in runs}
    kept = [line for line in rows if keep and _row_command(line) not in commands]
    fresh = [readme_row(run, np.random.default_rng(0)) for run in runs]
    table = "\n".join([BEGIN_LINE, README_HEADER, *fresh, *kept, END])
    return page[: found.start()] + table + page[found.end() :]


def kept_commands(before: str, after: str) -> list[str]:
    """Commands of the sections that stand in both texts of a page, in the order of `after`."""
    earlier = set(_COMMAND_LINE.findall(before))
    return [command for command in _COMMAND_LINE.findall(after) if command in earlier]


def _section_command(text: str) -> str | None:
    found = _COMMAND_LINE.search(text)
    return None if found is None else found["command"]


def _row_command(line: str) -> str | None:
    found = _ROW_COMMAND.search(line.rstrip())
    return None if found is None else found["command"]


def _runners_up(found: EvaluationResults) -> str:
    """How close the choice was: the next two routers on validation, worst case a coin toss that the reader should know of."""
    routers = {
        name: score for name, score in found.validation.items() if name != "what_if" and not name.startswith(("split ", "rebalance "))
    }
    best = found.validation.get(found.best_heuristic.replace(":", " ", 1))
    if best is None:
        return ""
    others = sorted((name for name in routers if name != found.best_heuristic), key=lambda name: -routers[name])[:2]
    behind = [f"{name} {100 * (best - routers[name]):.2f}" for name in others]
    return f" ({100 * best:.2f} %; points behind it there: {', '.join(behind)})" if behind else ""


def _difference_table(found: EvaluationResults, rng: np.random.Generator) -> list[str]:
    """Each learned policy against the best row of heuristics, and against the best splitter and rebalancer with the best router."""
    if not found.learned:
        return ["No learned policy was evaluated."]
    lines = ["| learned | against | mean difference, points | IQM, points | better in % of worlds |", "|---|---|---|---|---|"]
    for name in found.learned:
        for baseline in dict.fromkeys((found.best_heuristic, found.counterparts.get(name, found.best_heuristic))):
            ours, theirs = found.goodput(name), found.goodput(baseline)
            mean, iqm = mean_difference(ours, theirs, rng), iqm_difference(ours, theirs, rng)
            share = probability_of_improvement(ours, theirs, rng)
            cells = [
                _title(name),
                baseline,
                _points(format_interval(mean, 100, sign=True, digits=2)),
                _points(format_interval(iqm, 100, sign=True, digits=2)),
                f"{100 * share.estimate:.0f}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _policy_table(rows: Sequence[PolicyRow], found: EvaluationResults) -> list[str]:
    classes = sorted({name for row in rows for name in row.per_class})
    titles = ["policy", "goodput %", *(f"{name} %" for name in classes)]
    titles += [f"{latency.removesuffix('_s').upper()} {' / '.join(PERCENTILES)} {_unit(latency)}" for latency in LATENCIES]
    titles += ["refused", "other ends"]
    lines = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    for row in rows:
        other = [f"{name.lower()} {count}" for name, count in row.counts.items() if name not in ("COMPLETED", "REFUSED") and count]
        cells = [f"**{row.name}**" if row.name in found.learned else row.name, format_interval(row.goodput, 100, digits=2)]
        cells += [format_percent(row.per_class.get(name)) for name in classes]
        cells += [" / ".join(_latency(row.percentiles_s[latency][p], latency) for p in PERCENTILES) for latency in LATENCIES]
        cells += [str(row.counts.get("REFUSED", 0)), ", ".join(other) or "0"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _unit(latency: str) -> str:
    return "ms" if latency == "tpot_s" else "s"


def _latency(value_s: float | None, latency: str) -> str:
    if value_s is None:
        return "–"
    return f"{1e3 * value_s:.0f}" if latency == "tpot_s" else f"{value_s:.2f}"


def _title(name: str) -> str:
    return name.replace("ppo_", "PPO ")


def _points(text: str) -> str:
    """A true minus sign, as in running text."""
    return text.replace("-", "−")


def _cell(text: str) -> str:
    """Text that cannot end a table cell or a line."""
    return " ".join(text.replace("|", "/").split())
