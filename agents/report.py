"""Results of an evaluation as values (`EvaluationResults`), as a table in the terminal, and as one HTML file.

The file needs nothing from outside: plots are inline, there is no script and no link. Plots are drawn in `report_plots`.
"""

from __future__ import annotations

import html
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from agents.statistics import Interval, bootstrap_interval, iqm_difference, mean_difference, probability_of_improvement
from agents.whole_files import replace_file
from envs.decision.capability import FEATURES, STATIC_FEATURES

WorldSummary = Mapping[str, Any]
"""One policy in one world: {"goodput": float, "per_class": {name: {"goodput": float | None, "count": int}},
"ttft_s" / "tpot_s" / "e2e_s": {"p50", "p95", "p99": float | None}, "counts": {"COMPLETED": int, "REFUSED": int, ...},
"parts_mean_s": {part: s}, "decisions_per_s": float | None, and optionally "ttft_quantiles_s": 101 numbers or None, the
0 to 100 % quantiles with failures at the worst value}. None: nothing was measured."""

RESULTS_FILE = "results.json"
"""Name of the results in a run's directory."""
PERCENTILES = ("p50", "p95", "p99")
LATENCIES = ("ttft_s", "tpot_s", "e2e_s")


@dataclass(frozen=True, slots=True)
class EvaluationResults:
    """What an evaluation found. Every policy has one summary per world, the worlds in the same order for all.

    `best_heuristic` was chosen on validation worlds, before these; `validation`: goodput there, by heuristic.
    `counterparts`: learned policy -> the best heuristic that answers the same kinds of decision (default: `best_heuristic`).
    `learning_curve`: rows with `decisions` and a score. `command`: what makes these results again. `is_shortened`: a look, not a result.
    `capability`: profiles of devices and groups, rows of `agents.capability_table`.
    """

    trace_name: str
    is_synthetic: bool
    world_names: tuple[str, ...]
    policies: dict[str, tuple[WorldSummary, ...]]
    best_heuristic: str
    learned: tuple[str, ...] = ()
    learning_curve: tuple[dict[str, float], ...] = ()
    score_name: str = "validation goodput"
    notes: tuple[str, ...] = ()
    capability: tuple[dict[str, Any], ...] = ()
    provenance: dict[str, Any] = field(default_factory=dict)
    validation: dict[str, float] = field(default_factory=dict)
    counterparts: dict[str, str] = field(default_factory=dict)
    command: str = ""
    is_shortened: bool = False

    def __post_init__(self) -> None:
        if not self.policies or not self.world_names:
            raise ValueError("EvaluationResults needs at least one policy and one world")
        for name, worlds in self.policies.items():
            if len(worlds) != len(self.world_names):
                raise ValueError(f"policy {name!r} has {len(worlds)} worlds, there are {len(self.world_names)}; all meet the same worlds")
        for name in (self.best_heuristic, *self.learned, *self.counterparts, *self.counterparts.values()):
            if name not in self.policies:
                raise ValueError(f"policy {name!r} has no results; known: {', '.join(sorted(self.policies))}")

    def goodput(self, policy: str) -> np.ndarray:
        """Goodput per world, shape (worlds,)."""
        return np.array([world["goodput"] for world in self.policies[policy]], dtype=np.float64)

    def to_json(self) -> str:
        """Strict JSON: None for what was not measured, never NaN."""
        return json.dumps(asdict(self), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> EvaluationResults:
        """Raises: ValueError naming a field that is missing or unknown."""
        values = json.loads(text)
        known = {entry.name for entry in fields(cls)}
        if not isinstance(values, dict) or set(values) - known:
            raise ValueError(f"evaluation results must be an object of {', '.join(sorted(known))}")
        for name in ("world_names", "learned", "learning_curve", "notes", "capability"):
            values[name] = tuple(values.get(name, ()))
        values["policies"] = {name: tuple(worlds) for name, worlds in values.get("policies", {}).items()}
        try:
            return cls(**values)
        except TypeError as error:
            raise ValueError(f"evaluation results are incomplete: {error}") from error


@dataclass(frozen=True, slots=True)
class PolicyRow:
    """One line of the table. Percentiles and parts are means over the worlds in which they were measured."""

    name: str
    goodput: Interval
    per_class: dict[str, float | None]
    percentiles_s: dict[str, dict[str, float | None]]
    counts: dict[str, int]
    parts_mean_s: dict[str, float]
    decisions_per_s: float | None
    reasons: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One policy against the best heuristic, over the same worlds."""

    name: str
    mean: Interval
    interquartile_mean: Interval
    improvement_probability: Interval


def _mean(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return float(np.mean(present)) if present else None


def _totals(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    names = sorted({name for row in counts for name in row})
    return {name: sum(int(row.get(name, 0)) for row in counts) for name in names}


def table_rows(results: EvaluationResults, rng: np.random.Generator) -> list[PolicyRow]:
    """One row per policy, best mean goodput first."""
    rows = []
    for name, worlds in results.policies.items():
        classes = sorted({key for world in worlds for key in world.get("per_class", {})})
        outcomes = sorted({key for world in worlds for key in world.get("counts", {})})
        parts = list(dict.fromkeys(key for world in worlds for key in world.get("parts_mean_s", {})))
        rows.append(
            PolicyRow(
                name=name,
                goodput=bootstrap_interval(results.goodput(name), rng),
                per_class={key: _mean([world["per_class"].get(key, {}).get("goodput") for world in worlds]) for key in classes},
                percentiles_s={
                    latency: {p: _mean([(world.get(latency) or {}).get(p) for world in worlds]) for p in PERCENTILES}
                    for latency in LATENCIES
                },
                counts={key: sum(int(world["counts"].get(key, 0)) for world in worlds) for key in outcomes},
                parts_mean_s={key: _mean([world.get("parts_mean_s", {}).get(key) for world in worlds]) or 0.0 for key in parts},
                decisions_per_s=_mean([world.get("decisions_per_s") for world in worlds]),
                reasons=_totals([world.get("failure_reasons", {}) for world in worlds]),
            )
        )
    return sorted(rows, key=lambda row: -row.goodput.estimate)


def comparisons(results: EvaluationResults, rng: np.random.Generator) -> list[Comparison]:
    """Every other policy against the best heuristic; learned ones first."""
    baseline = results.goodput(results.best_heuristic)
    others = [name for name in results.policies if name != results.best_heuristic]
    others.sort(key=lambda name: (name not in results.learned, -float(results.goodput(name).mean())))
    return [
        Comparison(
            name,
            mean_difference(results.goodput(name), baseline, rng),
            iqm_difference(results.goodput(name), baseline, rng),
            probability_of_improvement(results.goodput(name), baseline, rng),
        )
        for name in others
    ]


def format_interval(interval: Interval, scale: float = 1.0, sign: bool = False, digits: int = 1) -> str:
    """`91.2 [90.1, 92.0]`."""
    spec = f"{'+' if sign else ''}.{digits}f"
    return f"{interval.estimate * scale:{spec}} [{interval.low * scale:{spec}}, {interval.high * scale:{spec}}]"


def format_seconds(value_s: float | None) -> str:
    """Three significant digits; a dash where nothing was measured."""
    return "–" if value_s is None else f"{value_s:.3g}"


def format_percent(fraction: float | None) -> str:
    return "–" if fraction is None else f"{100 * fraction:.1f}"


def headline(results: EvaluationResults, rows: Sequence[Comparison]) -> list[str]:
    """One sentence per learned policy: mean difference over worlds, interquartile mean beside it."""
    sentences = []
    for row in rows:
        if row.name not in results.learned:
            continue
        verdict = "better" if row.mean.low > 0 else "worse" if row.mean.high < 0 else "not distinguishable"
        sentences.append(
            f"{row.name} against {results.best_heuristic} (the best heuristic on validation): "
            f"{format_interval(row.mean, 100, sign=True)} points of goodput, mean over {row.mean.worlds} worlds "
            "with 95 % interval "
            f"({verdict}); interquartile mean {format_interval(row.interquartile_mean, 100, sign=True)}; "
            f"better in {100 * row.improvement_probability.estimate:.0f} % of worlds."
        )
    return sentences


def table_header(rows: Sequence[PolicyRow]) -> list[str]:
    """Column titles, units included."""
    classes = sorted({name for row in rows for name in row.per_class})
    titles = ["policy", "goodput %"] + [f"{name} %" for name in classes]
    titles += [f"{latency.removesuffix('_s').upper()} {p} s" for latency in LATENCIES for p in PERCENTILES]
    return [*titles, "refused", "requests", "other ends", "decisions/s"]


def table_cells(row: PolicyRow, classes: Sequence[str]) -> list[str]:
    """One text per column of `table_header`."""
    cells = [row.name, format_interval(row.goodput, 100)]
    cells += [format_percent(row.per_class.get(name)) for name in classes]
    cells += [format_seconds(row.percentiles_s[latency][p]) for latency in LATENCIES for p in PERCENTILES]
    other = {name: count for name, count in row.counts.items() if name not in ("COMPLETED", "REFUSED") and count}
    cells += [str(row.counts.get("REFUSED", 0)), str(sum(row.counts.values()))]
    cells.append(", ".join(f"{name.lower()} {count}" for name, count in other.items()) or "0")
    cells.append("–" if row.decisions_per_s is None else f"{row.decisions_per_s:,.0f}")
    return cells


def _terminal_columns(rows: Sequence[PolicyRow], width: int) -> list[list[tuple[str, list[str]]]]:
    """Columns (title, cells) of one or more tables that each fit `width` characters beside the policy's name.

    Everything in one table where there is room; else the columns that decide, packed in order.
    """
    classes = sorted({name for row in rows for name in row.per_class})
    everything = list(zip(table_header(rows), zip(*(table_cells(row, classes) for row in rows), strict=True), strict=True))
    columns = [(title, list(cells)) for title, cells in everything[1:]]
    room = width - _column_width("policy", [row.name for row in rows]) - 1
    if sum(_column_width(title, cells) for title, cells in columns) <= room:
        return [columns]
    wanted = {"goodput %", *(f"{name} %" for name in classes), "refused", "TTFT p50 s", "TTFT p95 s", "TTFT p99 s", "TPOT p99 s"}
    short = [(title.replace(" ", "\n", 1), cells) for title, cells in columns if title in wanted]
    unserved = [str(sum(n for name, n in row.counts.items() if name not in ("COMPLETED", "REFUSED"))) for row in rows]
    short.append(("failed", unserved))
    short.sort(key=lambda column: column[0][:4] in ("TTFT", "TPOT"))  # goodput and outcomes first, latencies after
    tables: list[list[tuple[str, list[str]]]] = [[]]
    left = room
    latency_width = sum(_column_width(title, cells) for title, cells in short if title[:4] in ("TTFT", "TPOT"))
    for title, cells in short:
        needed = _column_width(title, cells)
        is_first_latency = title.startswith("TTFT\np50")  # latencies stay together where a table of their own holds them
        if (needed > left or (is_first_latency and left < latency_width <= room)) and tables[-1]:
            tables.append([])
            left = room
        tables[-1].append((title, cells))
        left -= needed
    return tables


def _column_width(title: str, cells: Sequence[str]) -> int:
    """Characters that a column takes in the terminal: its longest line, two of padding, one border."""
    return max(len(text) for text in (*title.split("\n"), *cells)) + 3


def print_table(results: EvaluationResults, console: Any = None, rng: np.random.Generator | None = None) -> None:
    """Print the table, folded to the console's width, and the headline; `console` is a rich Console (None: standard output)."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    output = console if console is not None else Console()
    generator = rng if rng is not None else np.random.default_rng(0)
    rows = table_rows(results, generator)
    names = [row.name + (" *" if row.name == results.best_heuristic else "") for row in rows]
    requests = sum(rows[0].counts.values())
    synthetic = (", SYNTHETIC trace" if results.is_synthetic else "") + (", SHORTENED run" if results.is_shortened else "")
    output.print(
        f"{results.trace_name}: {len(results.world_names)} worlds, {requests:,} requests for each policy{synthetic}",
        markup=False, highlight=False, soft_wrap=True,
    )  # fmt: skip
    for columns in _terminal_columns([replace(row, name=name) for row, name in zip(rows, names, strict=True)], output.width):
        table = Table()
        table.add_column("policy", overflow="fold")
        for title, _ in columns:
            table.add_column(title, justify="right", no_wrap=True)
        for index, row in enumerate(rows):
            cells = [cells[index] for _, cells in columns]
            table.add_row(*(escape(cell) for cell in (names[index], *cells)), style="bold" if row.name in results.learned else None)
        output.print(table)
    output.print(
        "* best heuristic on validation. failed: lost, unservable or unfinished. Failures stand at the worst value in percentiles.",
        highlight=False,
    )
    for sentence in headline(results, comparisons(results, generator)):
        output.print(sentence, markup=False)


def write_report(results: EvaluationResults, path: str | os.PathLike[str], rng: np.random.Generator | None = None) -> Path:
    """Write the HTML report in one step; returns its path. The interval's resampling draws from `rng`."""
    from agents import report_plots  # matplotlib is heavy, and only the report needs it

    generator = rng if rng is not None else np.random.default_rng(0)
    rows = table_rows(results, generator)
    compared = comparisons(results, generator)
    figures = report_plots.all_figures(results, rows, compared)
    replace_file(path, _page(results, rows, compared, figures).encode())
    return Path(path)


_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:75rem;padding:0 1rem;color:#1c2430}
h1{margin-bottom:.2rem}table{border-collapse:collapse;font-size:13px}.wide{overflow-x:auto}
th,td{padding:.3rem .6rem;text-align:right;border-bottom:1px solid #d8dee6;white-space:nowrap}
th:first-child,td:first-child{text-align:left}tr.learned{font-weight:600}
.banner{background:#b3261e;color:#fff;padding:.7rem 1rem;font-weight:600;border-radius:4px}
.headline{background:#eef3f9;padding:.7rem 1rem;border-left:4px solid #2f6db3;margin:1rem 0}
figure{margin:1.5rem 0}figcaption,.note{color:#526071}
figure svg{max-width:100%;height:auto}pre{white-space:pre-wrap;font-size:12px}
"""


def _page(results: EvaluationResults, rows: Sequence[PolicyRow], compared: Sequence[Comparison], figures: Sequence[tuple[str, str]]) -> str:
    title = html.escape(results.trace_name)
    banner = (
        '<p class="banner">Synthetic trace: these requests were generated, not recorded. The figures say nothing about real traffic.</p>'
        if results.is_synthetic
        else ""
    )
    if results.is_shortened:
        banner += '<p class="banner">Shortened run: fewer decisions, worlds or requests than a result needs.</p>'
    sentences = headline(results, compared) or ["No learned policy was evaluated."]
    body = [
        f"<h1>{title}</h1><p>{len(results.policies)} policies, {len(results.world_names)} worlds, the same worlds for all.</p>",
        banner,
        *(f'<p class="headline">{html.escape(sentence)}</p>' for sentence in sentences),
        *(f'<p class="note">{html.escape(note)}</p>' for note in results.notes),
        "<h2>Results</h2>",
        _results_table(results, rows),
        '<p class="note">Goodput: weighted share of requests that met every limit of their class, mean over worlds with a '
        "95 % bootstrap interval by world. Percentiles are means over worlds of each world's percentile, failed requests at the "
        "worst value; a dash means nothing was measured. Refused, requests and other ends are totals.</p>",
        *_reasons_section(rows),
        f"<h2>Difference to {html.escape(results.best_heuristic)}</h2>",
        _comparison_table(compared),
        *(f"<figure>{svg}<figcaption>{html.escape(caption)}</figcaption></figure>" for caption, svg in figures),
    ]
    if results.capability:
        body += [
            "<h2>Devices and groups</h2>",
            _capability_table(results.capability),
            f'<p class="note">{html.escape(CAPABILITY_NOTE)}</p>',
        ]
    if results.provenance:
        text = html.escape(json.dumps(results.provenance, indent=1, default=str))
        body.append(f"<details><summary>Where this came from</summary><pre>{text}</pre></details>")
    page = "\n".join(body)
    head = f'<meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{page}</body></html>\n'


def _html_table(header: Sequence[str], lines: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Table from a header and (CSS class, cells) lines; every text is escaped."""
    head = "".join(f"<th>{html.escape(title)}</th>" for title in header)
    body = "".join(f'<tr class="{css}">' + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>" for css, cells in lines)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _results_table(results: EvaluationResults, rows: Sequence[PolicyRow]) -> str:
    classes = sorted({name for row in rows for name in row.per_class})
    lines = [("learned" if row.name in results.learned else "", table_cells(row, classes)) for row in rows]
    return _html_table(table_header(rows), lines)


def _reasons_section(rows: Sequence[PolicyRow]) -> list[str]:
    """Requests without an answer by reason, where there are any."""
    reasons = sorted({name for row in rows for name in row.reasons})
    if not reasons:
        return []
    lines = [("", (row.name, *(str(row.reasons.get(name, 0)) for name in reasons))) for row in rows]
    note = "scheduler: the policy refused; queue_full: its group had no slot; class_refused: its class's breaker was open."
    return ["<h2>Not served, by reason</h2>", _html_table(("policy", *reasons), lines), f'<p class="note">{note}</p>']


def _comparison_table(compared: Sequence[Comparison]) -> str:
    header = ("policy", "mean difference, points", "interquartile mean, points", "share of worlds better, %")
    lines = [
        (
            "",
            (
                row.name,
                format_interval(row.mean, 100, sign=True),
                format_interval(row.interquartile_mean, 100, sign=True),
                format_interval(row.improvement_probability, 100, digits=0),
            ),
        )
        for row in compared
    ]
    return _html_table(header, lines)


CAPABILITY_NOTE = (
    "Capability profile: rates in logs, standardised over the catalogue (0 is its geometric mean, +1 one spread above); a group's "
    "rates are its ranks' together, its link the slowest. step_time: measured steps of the slowest rank against the declared "
    "ones, mean over the test worlds (+1 is 25 % slower). Ranks: by what prefill (compute) and decode (bandwidth) are bound by. "
    "suits: cosine of the group with what the class's median request needs, both relative to the cluster's and the classes' mean."
)


def _capability_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Profiles of devices and groups: static features and measured steps, two rankings, affinities."""
    classes = sorted({name for row in rows for name in row["affinity"]})
    shown = [(index, name) for index, name in enumerate(FEATURES) if name in STATIC_FEATURES or name == "step_time"]
    header = ["", "cluster", *(name for _, name in shown), "prefill rank", "decode rank", *(f"suits {name}" for name in classes)]
    lines = [
        (
            "",
            (
                f"{row['kind']} {row['name']}",
                row["cluster"],
                *(f"{row['vector'][index]:+.2f}" for index, _ in shown),
                str(row["prefill_rank"]),
                str(row["decode_rank"]),
                *("–" if name not in row["affinity"] else f"{row['affinity'][name]:+.2f}" for name in classes),
            ),
        )
        for row in rows
    ]
    return _html_table(header, lines)
