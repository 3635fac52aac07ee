"""The report's plots, each as inline SVG text. Drawn with matplotlib's object interface: no window, no global state."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from agents.report import Comparison, EvaluationResults, PolicyRow

CDF_POLICIES_MAX = 6
_LEARNED, _HEURISTIC, _BEST = "#2f6db3", "#8a94a3", "#c77d1a"
_PARTS = ("#2f6db3", "#5aa9a3", "#c77d1a", "#9b5fb5", "#b3423a", "#7c8a3a", "#4a5a6a", "#d08fb0", "#a8a8a8")


def _color(results: EvaluationResults, name: str) -> str:
    if name in results.learned:
        return _LEARNED
    return _BEST if name == results.best_heuristic else _HEURISTIC


def to_svg(figure: Figure) -> str:
    """SVG element without XML prologue, metadata or references outside itself; the same figure gives the same text."""
    buffer = io.StringIO()
    with rc_context({"svg.hashsalt": "ballast", "svg.fonttype": "path"}):
        figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    return re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)


def all_figures(results: EvaluationResults, rows: Sequence[PolicyRow], compared: Sequence[Comparison]) -> list[tuple[str, str]]:
    """(caption, SVG) of every plot that has data."""
    drawn = [
        ("Goodput by policy, mean over worlds with 95 % interval.", goodput_figure(results, rows)),
        (f"Learning curve: {results.score_name} over decisions of training.", learning_figure(results)),
        (
            "Time to first token: share of requests served within the time, mean over worlds of each quantile.",
            ttft_figure(results, rows),
        ),
        ("Where a request's time goes, mean per request.", parts_figure(rows)),
        (f"Each world's difference in goodput to {results.best_heuristic}, sorted.", differences_figure(results, compared)),
    ]
    return [(caption, to_svg(figure)) for caption, figure in drawn if figure is not None]


def goodput_figure(results: EvaluationResults, rows: Sequence[PolicyRow]) -> Figure:
    figure = Figure(figsize=(8, 0.9 + 0.34 * len(rows)))
    axes = figure.subplots()
    ordered = list(reversed(rows))
    for position, row in enumerate(ordered):
        estimate = 100 * row.goodput.estimate
        # Rounding can put an interval's end a hair beyond the estimate when all worlds agree.
        errors = [[max(0.0, estimate - 100 * row.goodput.low)], [max(0.0, 100 * row.goodput.high - estimate)]]
        axes.barh(position, estimate, color=_color(results, row.name), xerr=errors, ecolor="#1c2430", capsize=3)
    axes.set_yticks(range(len(ordered)), [row.name for row in ordered])
    axes.set_xlabel("goodput, %")
    axes.set_xlim(0, 100)
    return figure


def learning_figure(results: EvaluationResults) -> Figure | None:
    """Scores over decisions; None when no run was recorded."""
    points = [(row["decisions"], row["score"]) for row in results.learning_curve if row.get("score") is not None]
    if not points:
        return None
    figure = Figure(figsize=(8, 3.2))
    axes = figure.subplots()
    axes.plot(*zip(*points, strict=True), color=_LEARNED, marker="o", markersize=3)
    axes.set_xlabel("decisions")
    axes.set_ylabel(results.score_name)
    return figure


def ttft_figure(results: EvaluationResults, rows: Sequence[PolicyRow]) -> Figure | None:
    """Distribution of time to first token from the worlds' quantiles, learned policies and the best heuristics only."""
    shown = [row.name for row in rows if row.name in results.learned or row.name == results.best_heuristic]
    shown += [row.name for row in rows if row.name not in shown][: max(0, CDF_POLICIES_MAX - len(shown))]
    figure = Figure(figsize=(8, 3.6))
    axes = figure.subplots()
    for name in shown:
        recorded = [world["ttft_quantiles_s"] for world in results.policies[name] if world.get("ttft_quantiles_s")]
        if recorded:
            quantiles_s = np.maximum(np.mean(np.asarray(recorded, dtype=np.float64), axis=0), 1e-4)
            style = "-" if name in results.learned else "--"
            axes.plot(quantiles_s, np.linspace(0, 100, len(quantiles_s)), style, label=name, linewidth=1.4)
    if not axes.lines:
        return None
    axes.set_xscale("log")
    axes.set_xlabel("time to first token, s")
    axes.set_ylabel("requests, %")
    axes.legend(fontsize=8)
    return figure


def parts_figure(rows: Sequence[PolicyRow]) -> Figure | None:
    """Stacked bars of the parts of a request's time."""
    parts = list(dict.fromkeys(part for row in rows for part in row.parts_mean_s))
    if not parts:
        return None
    figure = Figure(figsize=(8, 1.3 + 0.34 * len(rows)))
    axes = figure.subplots()
    ordered = list(reversed(rows))
    left = np.zeros(len(ordered))
    for index, part in enumerate(parts):
        widths = np.array([row.parts_mean_s.get(part, 0.0) for row in ordered])
        label = part.removesuffix("_s").replace("_", " ")
        axes.barh(range(len(ordered)), widths, left=left, color=_PARTS[index % len(_PARTS)], label=label)
        left += widths
    axes.set_yticks(range(len(ordered)), [row.name for row in ordered])
    axes.set_xlabel("s per request")
    axes.legend(fontsize=8, ncols=5, loc="upper center", bbox_to_anchor=(0.45, -0.22))
    return figure


def differences_figure(results: EvaluationResults, compared: Sequence[Comparison]) -> Figure | None:
    """Per world, learned minus best heuristic (or, without a learned policy, the best of the others)."""
    names = [row.name for row in compared if row.name in results.learned] or [row.name for row in compared[:1]]
    if not names:
        return None
    figure = Figure(figsize=(8, 3.2))
    axes = figure.subplots()
    for index, name in enumerate(names):
        differences = np.sort(100 * (results.goodput(name) - results.goodput(results.best_heuristic)))
        axes.plot(range(1, len(differences) + 1), differences, ".", label=name, color=_PARTS[index % len(_PARTS)])
    axes.axhline(0.0, color="#1c2430", linewidth=0.8)
    axes.set_xlabel("world, sorted by difference")
    axes.set_ylabel("points of goodput")
    axes.legend(fontsize=8)
    return figure
