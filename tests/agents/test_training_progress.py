"""Progress lines."""

from __future__ import annotations

import io

from agents.ppo_training import RolloutProgress
from agents.training_progress import TrainingProgress, progress_line

REPORT = RolloutProgress(8192, 400_000, 3012.4, {"train/episode_reward_mean": -1.25, "train/entropy_loss": -0.36})


def test_line_shows_what_is_known():
    assert progress_line(REPORT) == "decisions=8192/400000 speed=3012/s reward=-1.25 entropy=0.36"


def test_plain_lines_without_a_terminal_and_a_bar_with_one():
    plain = io.StringIO()
    with TrainingProgress(plain) as progress:
        progress(REPORT)
    assert plain.getvalue() == progress_line(REPORT) + "\n"

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    with TrainingProgress(terminal) as progress:
        progress(REPORT)
    assert "8192/400000" in terminal.getvalue()
