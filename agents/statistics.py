"""Comparing policies over worlds: paired bootstrap intervals, interquartile mean, probability of improvement.

The world is the unit: two policies meet the same worlds, so their differences are paired, and runs with several
training seeds on one world are averaged (or resampled together) rather than counted as more worlds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]

RESAMPLES = 10_000


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its confidence interval, over `worlds` worlds."""

    estimate: float
    low: float
    high: float
    worlds: int
    confidence: float = 0.95

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0.0 or self.high < 0.0


def _by_world(values: ArrayLike, what: str) -> FloatArray:
    """One number per world: (worlds,) as it is, (worlds, seeds) averaged over the seeds."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim == 2:
        array = array.mean(axis=1)
    if array.ndim != 1 or len(array) == 0:
        raise ValueError(f"{what} must have shape (worlds,) or (worlds, seeds) with at least one world; got {np.shape(values)}")
    if not np.isfinite(array).all():
        raise ValueError(f"{what} holds a value that is not finite; leave out the world in both policies, and say so")
    return array


def interquartile_mean(values: ArrayLike, axis: int = -1) -> np.ndarray | float:
    """Mean of the middle half: floor(n/4) values are cut at each end.

    Source: Agarwal et al., "Deep RL at the Edge of the Statistical Precipice", NeurIPS 2021 (trimmed mean of 25 %).
    """
    ordered = np.sort(np.asarray(values, dtype=np.float64), axis=axis)
    count = ordered.shape[axis]
    if count == 0:
        raise ValueError("interquartile_mean of no values; give at least one world")
    cut = count // 4
    middle = np.take(ordered, np.arange(cut, count - cut), axis=axis).mean(axis=axis)
    return float(middle) if np.ndim(middle) == 0 else middle


def bootstrap_interval(
    values: ArrayLike,
    rng: np.random.Generator,
    statistic: Callable[..., np.ndarray | float] = np.mean,
    resamples: int = RESAMPLES,
    confidence: float = 0.95,
) -> Interval:
    """Percentile bootstrap over worlds of `statistic(array, axis=...)`; one world gives an interval of no width.

    Source: Efron & Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13.
    """
    array = _by_world(values, "values")
    if not 0.0 < confidence < 1.0 or resamples < 1:
        raise ValueError(f"confidence={confidence} must be between 0 and 1, resamples={resamples} at least 1")
    drawn = array[rng.integers(0, len(array), size=(resamples, len(array)))]
    estimates = np.asarray(statistic(drawn, axis=1))
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(estimates, [tail, 1.0 - tail])
    return Interval(float(statistic(array, axis=0)), float(low), float(high), len(array), confidence)


def paired_differences(policy: ArrayLike, baseline: ArrayLike) -> FloatArray:
    """Policy minus baseline per world. Both of shape (worlds,) or (worlds, seeds), same worlds in the same order."""
    ours, theirs = _by_world(policy, "policy"), _by_world(baseline, "baseline")
    if len(ours) != len(theirs):
        raise ValueError(f"policy has {len(ours)} worlds, baseline {len(theirs)}; a paired comparison needs the same worlds")
    return ours - theirs


def mean_difference(policy: ArrayLike, baseline: ArrayLike, rng: np.random.Generator, resamples: int = RESAMPLES) -> Interval:
    """Mean over worlds of (policy - baseline) with its paired bootstrap interval: the headline."""
    return bootstrap_interval(paired_differences(policy, baseline), rng, np.mean, resamples)


def iqm_difference(policy: ArrayLike, baseline: ArrayLike, rng: np.random.Generator, resamples: int = RESAMPLES) -> Interval:
    """Interquartile mean over worlds of (policy - baseline); it ignores the worlds where most was won or lost."""
    return bootstrap_interval(paired_differences(policy, baseline), rng, interquartile_mean, resamples)


def probability_of_improvement(
    policy: ArrayLike, baseline: ArrayLike, rng: np.random.Generator, tie_below: float = 0.0, resamples: int = RESAMPLES
) -> Interval:
    """Share of worlds in which the policy beats the baseline, ties (difference at most `tie_below`) counted half."""
    differences = paired_differences(policy, baseline)
    wins = np.where(np.abs(differences) <= tie_below, 0.5, (differences > 0).astype(np.float64))
    return bootstrap_interval(wins, rng, np.mean, resamples)
