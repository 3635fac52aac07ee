"""Progress of training for people: one plain line per rollout, or a bar where there is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import IO, Any

from agents.ppo_training import RolloutProgress


def progress_line(report: RolloutProgress) -> str:
    """`decisions=8192/400000 speed=3012/s reward=-1.25 goodput=0.913 kl=0.008 entropy=0.36`; what is unknown is left out."""
    shown = [f"decisions={report.decisions}/{report.total_decisions}", f"speed={report.decisions_per_s:.0f}/s"]
    for label, tag, sign in (
        ("reward", "train/episode_reward_mean", 1),
        ("goodput", "serve/goodput_fraction", 1),
        ("kl", "train/approx_kl", 1),
        ("entropy", "train/entropy_loss", -1),
        ("validation", "train/validation_score", 1),
    ):
        if tag in report.tags:
            shown.append(f"{label}={sign * report.tags[tag]:.4g}")
    return " ".join(shown)


class TrainingProgress:
    """Context manager to pass as `progress`: a rich bar on a terminal, plain lines anywhere else (logs stay readable)."""

    def __init__(self, stream: IO[str] | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._bar: Any = None
        self._task: Any = None
        self._show: Callable[[RolloutProgress], None] = self._plain

    def __enter__(self) -> TrainingProgress:
        if self._stream.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(file=self._stream))
            self._bar.start()
            self._show = self._advance
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, report: RolloutProgress) -> None:
        self._show(report)

    def _plain(self, report: RolloutProgress) -> None:
        self._stream.write(progress_line(report) + "\n")
        self._stream.flush()

    def _advance(self, report: RolloutProgress) -> None:
        if self._task is None:
            self._task = self._bar.add_task("", total=report.total_decisions)
        self._bar.update(self._task, completed=report.decisions, description=progress_line(report))
