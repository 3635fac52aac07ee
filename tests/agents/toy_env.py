"""Small environments of the scheduling contract, with answers known in advance."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

CANDIDATES_MAX, FEATURES, CONTEXT = 6, 3, 2


def toy_spaces(candidates_max: int = CANDIDATES_MAX) -> tuple[spaces.Dict, spaces.Discrete]:
    observation = spaces.Dict(
        {
            "candidates": spaces.Box(-10, 10, (candidates_max, FEATURES), np.float32),
            "context": spaces.Box(-10, 10, (CONTEXT,), np.float32),
            "mask": spaces.Box(0, 1, (candidates_max,), np.float32),
        }
    )
    return observation, spaces.Discrete(candidates_max)


class ObviousChoiceEnv(gymnasium.Env):
    """The allowed candidate with the largest first feature is the best; the reward is that feature minus the best.

    Two to six candidates, one of them masked now and then; ties (elapsed 0) happen; 40 decisions, ended by a cut.
    """

    def __init__(self, episode_decisions: int = 40, pid_dir: str | None = None) -> None:
        self.observation_space, self.action_space = toy_spaces()
        self.episode_decisions = episode_decisions
        if pid_dir is not None:
            (Path(pid_dir) / str(os.getpid())).touch()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._step, self._regret = 0, 0.0
        self.first_draw = float(self.np_random.random())
        return self._draw(), {}

    def _draw(self) -> dict[str, np.ndarray]:
        rng = self.np_random
        count = int(rng.integers(2, CANDIDATES_MAX + 1))
        candidates = np.zeros((CANDIDATES_MAX, FEATURES), dtype=np.float32)
        candidates[:count] = rng.normal(0.0, 1.0, (count, FEATURES))
        mask = np.zeros(CANDIDATES_MAX, dtype=np.float32)
        mask[:count] = 1.0
        if rng.random() < 0.3:
            mask[int(rng.integers(count))] = 0.0
        self._observation = {"candidates": candidates, "context": rng.normal(0, 1, CONTEXT).astype(np.float32), "mask": mask}
        return {key: value.copy() for key, value in self._observation.items()}

    def action_masks(self) -> np.ndarray:
        return self._observation["mask"] > 0.5

    def best_action(self) -> int:
        return int(np.where(self.action_masks(), self._observation["candidates"][:, 0], -np.inf).argmax())

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_masks()[int(action)], "illegal action"
        quality = self._observation["candidates"][:, 0]
        reward = float(quality[int(action)] - quality[self.best_action()])
        self._step += 1
        self._regret -= reward
        info: dict[str, Any] = {"elapsed_s": float(self.np_random.choice([0.0, 0.5, 1.0]))}
        truncated = self._step >= self.episode_decisions
        if truncated:
            info["summary"] = {
                "goodput": 1.0 / (1.0 + self._regret),
                "per_class": {"chat": {"goodput": 0.5, "count": 4}},
                "ttft_s": {"p50": 0.1, "p95": 0.2, "p99": None},
                "counts": {"COMPLETED": 3, "REFUSED": 1},
                "split": {"rank_imbalance_fraction": 0.25},
            }
        return self._draw(), reward, False, truncated, info


class TwoStateEnv(gymnasium.Env):
    """A pays 1 and leads to B after 1 s; B pays 0 and leads to A after 2 s; for ever, but cut after `cut_after` steps.

    With a discount of g per second V(A) = 1 + g V(B) and V(B) = g^2 V(A), so V(A) = 1 / (1 - g^3).
    """

    def __init__(self, cut_after: int = 3) -> None:
        self.observation_space, self.action_space = toy_spaces(2)
        self.cut_after = cut_after

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.in_b, self._step = bool(self.np_random.integers(2)), 0
        return two_state_observation(self.in_b), {}

    def action_masks(self) -> np.ndarray:
        return np.array([True, True])

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward, elapsed_s = (0.0, 2.0) if self.in_b else (1.0, 1.0)
        self.in_b = not self.in_b
        self._step += 1
        return two_state_observation(self.in_b), reward, False, self._step >= self.cut_after, {"elapsed_s": elapsed_s}


def two_state_observation(in_b: bool) -> dict[str, np.ndarray]:
    return {
        "candidates": np.zeros((2, FEATURES), dtype=np.float32),
        "context": np.array([1.0, 0.0] if in_b else [0.0, 1.0], dtype=np.float32),
        "mask": np.ones(2, dtype=np.float32),
    }


class PoisonedEnv(ObviousChoiceEnv):
    """Its reward is not a number from the 100th step on."""

    total_steps = 0

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = super().step(action)
        self.total_steps += 1
        return observation, reward if self.total_steps < 100 else float("nan"), terminated, truncated, info
