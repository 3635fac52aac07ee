"""The linear score tuned by the cross-entropy method on training worlds: the baseline a reviewer would add.

Source: Rubinstein and Kroese, The Cross-Entropy Method, 2004; elite mean and spread with smoothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from agents.heuristics.predicting import LinearScore
from envs.cluster.world import WorldSpec
from envs.domain.snapshot import FloatArray

Score = Callable[[FloatArray, Sequence[WorldSpec]], float]


def tune_linear_score(
    worlds_of: Callable[[np.random.Generator], Sequence[WorldSpec]],
    score: Score,
    rng: np.random.Generator,
    rounds: int = 6,
    candidates: int = 16,
    elites: int = 4,
    spread: float = 0.1,
    progress: Callable[[str], None] | None = None,
) -> FloatArray:
    """Tune the weights of `LinearScore`.

    Args: worlds_of draws the worlds of one round (common to all its candidates); score rates weights on worlds, higher
    is better. Returns: the mean of the last elites, shape (features,).
    """
    mean = LinearScore.start()
    deviation = np.full(len(mean), spread)
    for number in range(rounds):
        worlds = worlds_of(rng)
        drawn = mean + deviation * rng.normal(size=(candidates, len(mean)))
        drawn[0] = mean
        scores = np.array([score(weights, worlds) for weights in drawn])
        best = drawn[np.argsort(-scores, kind="stable")[:elites]]
        mean = 0.3 * mean + 0.7 * best.mean(axis=0)
        deviation = 0.3 * deviation + 0.7 * (best.std(axis=0) + 0.005)
        if progress is not None:
            progress(f"cross-entropy round {number + 1}/{rounds}: best {scores.max():.4f}, start {scores[0]:.4f}")
    return mean
