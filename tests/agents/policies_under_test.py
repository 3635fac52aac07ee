"""Policies with known, non-trivial weights for bundle and export tests."""

from __future__ import annotations

import numpy as np
import torch
from gymnasium import spaces

from agents.export import bundle_contents
from agents.policies.candidate_policy import CandidatePolicy
from agents.policy_bundle import BundleContents, BundleSchema

FEATURES, CONTEXT, CANDIDATES_MAX = 12, 7, 24

SCHEMA = BundleSchema(
    decision_kind="route",
    feature_names=tuple(f"feature_{i}" for i in range(FEATURES)),
    context_names=tuple(f"context_{i}" for i in range(CONTEXT)),
    observation_version=907,  # no version of ours
    candidates_max=CANDIDATES_MAX,
)


def fitted_policy(seed: int = 0, activation: str = "tanh", fitted: bool = True) -> CandidatePolicy:
    """Random weights of the size training gives, scaling fitted on skewed features of unlike sizes."""
    box = lambda *shape: spaces.Box(-10, 10, shape, np.float32)  # noqa: E731
    observation_space = spaces.Dict(
        {
            "candidates": box(CANDIDATES_MAX, FEATURES),
            "context": box(CONTEXT),
            "mask": spaces.Box(0, 1, (CANDIDATES_MAX,), np.float32),
        }
    )
    torch.manual_seed(seed)
    policy = CandidatePolicy(observation_space, spaces.Discrete(CANDIDATES_MAX), lambda _: 1e-3, hidden=32, activation=activation)
    with torch.no_grad():
        torch.nn.init.normal_(policy.scorer.out.weight, std=0.5)
        torch.nn.init.normal_(policy.scorer.residual.weight, std=0.3)
    if fitted:
        rng = np.random.default_rng(seed)
        policy.normaliser.fit(*(recorded_batch(rng, 200)[key] for key in ("candidates", "context", "mask")))
    return policy


def recorded_batch(rng: np.random.Generator, count: int) -> dict[str, np.ndarray]:
    """Observations as an environment would give them, batched."""
    scale = np.geomspace(0.05, 3.0, FEATURES)
    mask = np.zeros((count, CANDIDATES_MAX), np.float32)
    for row in mask:
        row[: int(rng.integers(1, CANDIDATES_MAX + 1))] = 1.0
    candidates = rng.gamma(2.0, scale, (count, CANDIDATES_MAX, FEATURES)) * mask[..., None]
    context = rng.normal(2.0, 0.5, (count, CONTEXT))
    return {
        "candidates": np.clip(candidates, -10, 10).astype(np.float32),
        "context": np.clip(context, -10, 10).astype(np.float32),
        "mask": mask,
    }


def recorded_observations(count: int, seed: int = 11) -> list[dict[str, np.ndarray]]:
    batch = recorded_batch(np.random.default_rng(seed), count)
    return [{key: value[i] for key, value in batch.items()} for i in range(count)]


def contents(seed: int = 0, activation: str = "tanh") -> BundleContents:
    return bundle_contents(fitted_policy(seed, activation), SCHEMA, {"goodput_fraction": 0.9}, {"commit": "abc"})
