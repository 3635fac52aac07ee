"""Tags: which number becomes which tag, absent stays absent, and every tag is documented."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_ppo_training import SMALL
from toy_env import ObviousChoiceEnv

from agents.ppo_training import train_ppo
from agents.tensorboard_metrics import TensorboardWriter, summary_tags

SUMMARY = {
    "goodput": 0.75,
    "per_class": {"chat": {"goodput": 0.5, "count": 8}, "code": {"goodput": None, "count": 0}},
    "ttft_s": {"p50": 0.2, "p95": None, "p99": float("nan")},
    "counts": {"COMPLETED": 6, "REFUSED": 2},
    "parts_mean_s": {"queue_s": 0.1},
    "decisions_per_s": 900.0,
    "ttft_quantiles_s": [0.0, 1.0],
    "split": {"rank_imbalance_fraction": 0.3},
    "fallback": {"decisions_fraction": 0.01},
}


@pytest.mark.fault("K13")
def test_summary_becomes_these_tags_and_nothing_measured_gives_none():
    assert summary_tags(SUMMARY) == {
        "serve/goodput_fraction": 0.75,
        "serve/class_chat_goodput_fraction": 0.5,
        "serve/class_chat_requests": 8.0,
        "serve/class_code_requests": 0.0,
        "serve/ttft_s_p50": 0.2,
        "serve/outcome_completed_fraction": 0.75,
        "serve/outcome_refused_fraction": 0.25,
        "serve/time_queue_s": 0.1,
        "serve/decisions_per_s": 900.0,
        "split/rank_imbalance_fraction": 0.3,
        "fallback/decisions_fraction": 0.01,
    }
    assert summary_tags({"counts": {"COMPLETED": 0}}) == {}


def test_writer_refuses_an_unknown_family(tmp_path):
    writer = TensorboardWriter(tmp_path, {"seed": "0"})
    with pytest.raises(ValueError, match='"speed/x" has no known family; known: serve, split'):
        writer.write(1, {"speed/x": 1.0})
    writer.close()


def test_training_writes_documented_tags(tmp_path):
    """Every tag that a run writes is explained in docs/tensorboard.md (patterns in <> stand for names)."""
    train_ppo([ObviousChoiceEnv] * 2, dataclasses.replace(SMALL, total_decisions=400), tmp_path, evaluate=lambda policy: 1.0)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    written = events.Tags()["scalars"]
    assert {"serve/goodput_fraction", "split/rank_imbalance_fraction", "train/approx_kl", "train/validation_score"} <= set(written)
    assert [event.step for event in events.Scalars("train/approx_kl")] == [200, 400]
    text = (Path(__file__).parents[2] / "docs" / "tensorboard.md").read_text()
    documented = {line.split("`")[1] for line in text.splitlines() if line.startswith("| `")}
    for tag in written:
        parts = [pattern for pattern in documented if _fits(pattern, tag)]
        assert parts, f"{tag} is not in docs/tensorboard.md"


def _fits(pattern: str, tag: str) -> bool:
    import re

    return re.fullmatch(re.sub(r"<\w+>", r"\\w+", pattern), tag) is not None
