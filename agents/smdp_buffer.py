"""Advantages for decisions at uneven times: discount and trace decay are per elapsed second (semi-Markov), and an
episode cut by the clock keeps the value of its last observation, exactly once."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from sb3_contrib.common.maskable.buffers import MaskableDictRolloutBuffer, MaskableDictRolloutBufferSamples

from agents.policies.candidate_policy import NonFiniteTraining

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Transitions:
    """What one vector step adds to the usual tuple. Arrays of shape (envs,).

    `elapsed_s`: seconds from this decision to the next (or to the end). `truncated`: cut by the clock, not ended.
    `final_observations`: by environment index, the observation at the cut.
    """

    elapsed_s: FloatArray
    truncated: BoolArray
    final_observations: dict[int, dict[str, np.ndarray]]


class TransitionSource(Protocol):
    """Whoever steps the environments and remembers the latest `Transitions`."""

    latest: Transitions


def smdp_advantages(
    rewards: np.ndarray,
    values: np.ndarray,
    next_values: np.ndarray,
    elapsed_s: np.ndarray,
    ended: np.ndarray,
    gamma_per_s: float,
    lambda_per_s: float,
) -> FloatArray:
    """Generalised advantage estimates with discount gamma^dt and decay lambda^dt.

    Args: arrays of shape (steps, envs). `next_values`: value of the state after the step; 0 after a real end, the value
        of the final observation after a cut. `ended`: the episode stops after this step, for either reason.
    Returns: float64 (steps, envs): A_t = delta_t + (gamma lambda)^dt_t A_{t+1} unless ended, where
        delta_t = r_t + gamma^dt_t V(s_{t+1}) - V(s_t). With dt = 0 (a tie) both factors are 1.
    Source: Schulman et al., arXiv 1506.02438, eq. 16; discount over elapsed time as in Bradtke & Duff, NIPS 1994.
    """
    discount = np.power(gamma_per_s, elapsed_s)
    carry = discount * np.power(lambda_per_s, elapsed_s) * ~ended.astype(bool)
    deltas = rewards.astype(np.float64) + discount * next_values - values
    advantages = np.zeros(rewards.shape, dtype=np.float64)
    following = np.zeros(rewards.shape[1], dtype=np.float64)
    for step in reversed(range(len(rewards))):
        following = deltas[step] + carry[step] * following
        advantages[step] = following
    return advantages


class SmdpRolloutBuffer(MaskableDictRolloutBuffer):
    """Rollout buffer of MaskablePPO whose `gamma` and `gae_lambda` are per second.

    `transitions` supplies elapsed seconds and cuts; the vector environment must hide `TimeLimit.truncated` from the
    algorithm, which would otherwise add a bootstrap of its own. Shuffling draws from `rng`, not from a global stream.
    """

    def __init__(self, *args: Any, transitions: TransitionSource, rng: np.random.Generator, **kwargs: Any) -> None:
        self.transitions = transitions
        self.rng = rng
        self.predict_values: Callable[[dict[str, torch.Tensor]], torch.Tensor] | None = None
        self.reward_scale = 1.0
        super().__init__(*args, **kwargs)

    def reset(self) -> None:
        super().reset()
        shape = (self.buffer_size, self.n_envs)
        self.elapsed_s = np.zeros(shape, dtype=np.float64)
        self.truncated = np.zeros(shape, dtype=bool)
        self.final_values = np.zeros(shape, dtype=np.float64)

    def add(self, obs: Any, action: Any, reward: np.ndarray, *args: Any, **kwargs: Any) -> None:
        if not np.isfinite(reward).all():
            raise NonFiniteTraining(f"reward {np.asarray(reward).tolist()} is not finite; the environment must give finite rewards")
        latest, at = self.transitions.latest, self.pos
        self.elapsed_s[at] = latest.elapsed_s
        self.truncated[at] = latest.truncated
        for index, observation in latest.final_observations.items():
            self.final_values[at, index] = self._value_of(observation)
        super().add(obs, action, np.asarray(reward) / self.reward_scale, *args, **kwargs)

    def _value_of(self, observation: dict[str, np.ndarray]) -> float:
        if self.predict_values is None:
            raise RuntimeError("the buffer needs predict_values before the first episode is cut")
        batch = {key: torch.as_tensor(np.asarray(value)).unsqueeze(0) for key, value in observation.items()}
        with torch.no_grad():
            return float(self.predict_values(batch).item())

    def compute_returns_and_advantage(self, last_values: torch.Tensor, dones: np.ndarray) -> None:
        ended = np.concatenate([self.episode_starts[1:], np.asarray(dones, dtype=np.float32)[None]]) > 0.5
        following = np.concatenate([self.values[1:], last_values.detach().cpu().numpy().reshape(1, -1)])
        next_values = np.where(self.truncated, self.final_values, np.where(ended, 0.0, following))
        advantages = smdp_advantages(self.rewards, self.values, next_values, self.elapsed_s, ended, self.gamma, self.gae_lambda)
        self.advantages = advantages.astype(np.float32)
        self.returns = self.advantages + self.values

    def get(self, batch_size: int | None = None) -> Generator[MaskableDictRolloutBufferSamples, None, None]:  # type: ignore[override]
        """Shuffled minibatches, from this buffer's own random stream."""
        total = self.buffer_size * self.n_envs
        if not self.generator_ready:
            self.observations = {key: self.swap_and_flatten(value) for key, value in self.observations.items()}
            for name in ("actions", "values", "log_probs", "advantages", "returns", "action_masks"):
                setattr(self, name, self.swap_and_flatten(getattr(self, name)))
            self.generator_ready = True
        order = self.rng.permutation(total)
        size = batch_size or total
        for start in range(0, total, size):
            yield self._get_samples(order[start : start + size])
