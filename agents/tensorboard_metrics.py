"""What training shows in TensorBoard: tags `family/name` from the episodes' summaries. docs/tensorboard.md defines each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback

FAMILIES = ("serve", "split", "rebalance", "fallback", "train")
_PERCENTILE_GROUPS = ("ttft_s", "tpot_s", "e2e_s")


def summary_tags(summary: Mapping[str, Any]) -> dict[str, float]:
    """Flatten one episode's summary to tags. None (nothing measured) gives no tag: an absent value is not a zero.

    Known parts: `per_class`, `counts`, `parts_mean_s`, percentiles, and one mapping per family (`split`, `rebalance`,
    `fallback`). Any other number at the top goes to `serve/`; lists (quantiles) are left to the report.
    """
    tags: dict[str, float] = {}
    for key, value in summary.items():
        if key == "per_class":
            for name, entry in value.items():
                _add(tags, f"serve/class_{name}_goodput_fraction", entry.get("goodput"))
                _add(tags, f"serve/class_{name}_requests", entry.get("count"))
        elif key == "counts":
            total = sum(value.values())
            for name, count in value.items():
                _add(tags, f"serve/outcome_{name.lower()}_fraction", count / total if total else None)
        elif key == "parts_mean_s":
            for name, part_s in value.items():
                _add(tags, f"serve/time_{name}", part_s)
        elif key in _PERCENTILE_GROUPS:
            for name, percentile_s in value.items():
                _add(tags, f"serve/{key}_{name}", percentile_s)
        elif key in FAMILIES and isinstance(value, Mapping):
            for name, number in value.items():
                _add(tags, f"{key}/{name}", number)
        elif key == "goodput":
            _add(tags, "serve/goodput_fraction", value)
        else:
            _add(tags, f"serve/{key}", value)
    return tags


def _add(tags: dict[str, float], tag: str, value: Any) -> None:
    if isinstance(value, (int, float, np.number)) and not isinstance(value, bool) and np.isfinite(value):
        tags[tag] = float(value)


class EpisodeMetrics(BaseCallback):
    """Collects finished episodes while MaskablePPO gathers a rollout; `take` hands over their means and starts anew."""

    def __init__(self, num_envs: int) -> None:
        super().__init__()
        self._running_reward = np.zeros(num_envs)
        self._summaries: list[Mapping[str, Any]] = []
        self._episode_rewards: list[float] = []
        self._cut_episodes = 0
        self._elapsed_s: list[float] = []

    def _on_step(self) -> bool:
        self._running_reward += self.locals["rewards"]
        for index, (done, info) in enumerate(zip(self.locals["dones"], self.locals["infos"], strict=True)):
            self._elapsed_s.append(float(info["elapsed_s"]))
            if done:
                self._episode_rewards.append(float(self._running_reward[index]))
                self._running_reward[index] = 0.0
                self._cut_episodes += bool(info.get("was_truncated", False))
                if "summary" in info:
                    self._summaries.append(info["summary"])
        return True

    def running_rewards(self) -> list[float]:
        """Undiscounted reward so far of each running episode, for a checkpoint."""
        return [float(value) for value in self._running_reward]

    def restore_running_rewards(self, values: Sequence[float]) -> None:
        self._running_reward = np.array(values, dtype=np.float64)

    def take(self) -> dict[str, float]:
        """Means over the episodes that ended since the last call; without any, only `train/` values remain."""
        collected: dict[str, list[float]] = defaultdict(list)
        for summary in self._summaries:
            for tag, value in summary_tags(summary).items():
                collected[tag].append(value)
        tags = {tag: float(np.mean(values)) for tag, values in collected.items()}
        episodes = len(self._episode_rewards)
        tags["train/episodes"] = float(episodes)
        if episodes:
            tags["train/episode_reward_mean"] = float(np.mean(self._episode_rewards))
            tags["train/episodes_cut_fraction"] = self._cut_episodes / episodes
        if self._elapsed_s:
            tags["train/decision_interval_s_mean"] = float(np.mean(self._elapsed_s))
        self._summaries, self._episode_rewards, self._cut_episodes, self._elapsed_s = [], [], 0, []
        return tags


class TensorboardWriter:
    """Scalars of one run. After a resume, what an interrupted run wrote beyond its checkpoint is purged."""

    def __init__(self, directory: Path, config: Mapping[str, Any], from_step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter  # heavy, and only training needs it

        self._writer = SummaryWriter(str(directory), purge_step=from_step)
        if from_step == 0:
            rows = "\n".join(f"|{name}|{value}|" for name, value in config.items())
            self._writer.add_text("config", f"|setting|value|\n|-|-|\n{rows}")

    def write(self, step: int, tags: Mapping[str, float]) -> None:
        """One point per tag. Raises: ValueError for a tag outside the documented families."""
        for tag, value in tags.items():
            if tag.partition("/")[0] not in FAMILIES:
                raise ValueError(f'tag "{tag}" has no known family; known: {", ".join(FAMILIES)}')
            self._writer.add_scalar(tag, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
