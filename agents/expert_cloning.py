"""Recorded decisions: fit the scaling on them, and give the policy a warm start by imitating an expert."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from agents.policies.candidate_policy import CandidatePolicy, parameters_of, require_finite
from agents.smdp_buffer import smdp_advantages
from agents.training_envs import STREAM_CLONING, SmdpVecEnv

Observation = dict[str, np.ndarray]
Expert = Callable[[Observation], int] | str
"""A function of one observation, or the name of an environment method that returns the expert's action (for an expert
that needs more than the observation, such as a heuristic on the snapshot)."""


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """Decisions of several environments: arrays of shape (steps, envs, ...)."""

    observations: Observation
    expert_actions: np.ndarray | None
    rewards: np.ndarray
    elapsed_s: np.ndarray
    ended: np.ndarray

    def returns(self, gamma_per_s: float) -> np.ndarray:
        """Discounted sums of rewards to the end of the episode or of the recording, shape (steps, envs)."""
        nothing = np.zeros(self.rewards.shape)
        return smdp_advantages(self.rewards, nothing, nothing, self.elapsed_s, self.ended, gamma_per_s, lambda_per_s=1.0)

    def flat(self) -> Observation:
        """Observations with steps and environments in one axis."""
        return {key: value.reshape(-1, *value.shape[2:]) for key, value in self.observations.items()}


@dataclass(frozen=True, slots=True)
class CloneReport:
    """`agreement_fraction`: share of recorded decisions in which the policy's greedy choice is the expert's."""

    decisions: int
    agreement_fraction: float
    value_explained_fraction: float


def _expert_actions(expert: Expert, env: SmdpVecEnv, observation: Observation) -> np.ndarray:
    if isinstance(expert, str):
        return np.array(env.env_method(expert), dtype=np.int64)
    return np.array([expert({k: v[i] for k, v in observation.items()}) for i in range(env.num_envs)], dtype=np.int64)


def record_decisions(
    env: SmdpVecEnv,
    stream: int,
    decisions: int,
    rng: np.random.Generator,
    expert: Expert | None = None,
    random_fraction: float = 1.0,
) -> Recording:
    """Run fresh episodes of `stream` for at least `decisions` decisions over all environments.

    Each action is the expert's, or with probability `random_fraction` a uniformly drawn legal one.
    Raises: ValueError when the expert is asked for nothing, or picks a forbidden candidate.
    """
    if expert is None and random_fraction < 1.0:
        raise ValueError(f"random_fraction={random_fraction} needs an expert for the other decisions")
    env.start_stream(stream)
    observation = env.reset()
    rows: list[tuple[Observation, np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []
    for _ in range(-(-decisions // env.num_envs)):
        masks = observation["mask"] > 0.5
        drawn = np.where(masks, rng.random(masks.shape), -1.0).argmax(axis=1)
        wanted = drawn if expert is None else _expert_actions(expert, env, observation)
        if not masks[np.arange(env.num_envs), wanted].all():
            raise ValueError(f"the expert chose a forbidden candidate (actions {wanted.tolist()}); it must respect the mask")
        actions = np.where(rng.random(env.num_envs) < random_fraction, drawn, wanted)
        following, rewards, dones, _ = env.step(actions)
        rows.append((observation, wanted, rewards, env.latest.elapsed_s, dones))
        observation = following
    return Recording(
        observations={key: np.stack([row[0][key] for row in rows]) for key in rows[0][0]},
        expert_actions=None if expert is None else np.stack([row[1] for row in rows]),
        rewards=np.stack([row[2] for row in rows]).astype(np.float64),
        elapsed_s=np.stack([row[3] for row in rows]),
        ended=np.stack([row[4] for row in rows]).astype(bool),
    )


def clone_from(
    policy: CandidatePolicy,
    env: SmdpVecEnv,
    expert: Expert,
    decisions: int,
    rng: np.random.Generator,
    *,
    gamma_per_s: float,
    epochs: int = 5,
    minibatch_size: int = 256,
    learning_rate: float = 1e-3,
    random_fraction: float = 0.1,
) -> CloneReport:
    """Warm start: the scorer learns the expert's choices (cross-entropy), the separate critic the expert's returns.

    A tenth of the actions taken while recording are random, so that the labels also cover states next to the expert's.
    The policy's scaling must be fitted already. Rewards are divided by the policy's `return_scale`.
    """
    recording = record_decisions(env, STREAM_CLONING, decisions, rng, expert, random_fraction)
    assert recording.expert_actions is not None
    observations = {key: torch.from_numpy(value) for key, value in recording.flat().items()}
    actions = torch.from_numpy(recording.expert_actions.reshape(-1))
    returns = torch.from_numpy(recording.returns(gamma_per_s).reshape(-1)).float() / policy.return_scale
    optimizer = policy.make_optimizer(learning_rate)
    total = len(actions)
    for _ in range(epochs):
        order = rng.permutation(total)
        for start in range(0, total, minibatch_size):
            batch = torch.from_numpy(order[start : start + minibatch_size])
            _clone_step(policy, optimizer, {k: v[batch] for k, v in observations.items()}, actions[batch], returns[batch])
    require_finite(parameters_of(policy), "weight")
    return _clone_report(policy, observations, actions, returns, minibatch_size)


def _clone_step(
    policy: CandidatePolicy,
    optimizer: torch.optim.Optimizer,
    observations: dict[str, torch.Tensor],
    actions: torch.Tensor,
    returns: torch.Tensor,
) -> None:
    values, log_prob, _ = policy.evaluate_actions(observations, actions)
    loss = -log_prob.mean() + functional.mse_loss(values.flatten(), returns)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


@torch.no_grad()
def _clone_report(
    policy: CandidatePolicy, observations: dict[str, torch.Tensor], actions: torch.Tensor, returns: torch.Tensor, size: int
) -> CloneReport:
    agreed, errors = 0, []
    for start in range(0, len(actions), size):
        batch = {key: value[start : start + size] for key, value in observations.items()}
        agreed += int((policy.get_distribution(batch).mode() == actions[start : start + size]).sum())
        errors.append(returns[start : start + size] - policy.predict_values(batch).flatten())
    spread = float(returns.var(unbiased=False))
    explained = 1.0 - float(torch.cat(errors).var(unbiased=False)) / spread if spread > 0 else 0.0
    return CloneReport(len(actions), agreed / len(actions), explained)
