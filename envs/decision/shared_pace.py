"""Paces of several groups, each measured with noise: what differs within the noise is taken for alike.

A router that compares predictions to the last digit sends everything to whichever of equal groups was lucky; shrinking each pace towards
the
fleet's by its own uncertainty keeps true differences and drops the lucky ones.
"""

from __future__ import annotations

import math

import numpy as np

from envs.domain.snapshot import BoolArray, FloatArray
from envs.perf_model.compiled import inner_kernel, kernel

ALIKE_STDS = 3.0  # further apart than so many standard deviations of their difference, two paces say nothing of one another


@inner_kernel
def _shrunk(g, log_pace, variance, is_measured):
    """The pace of group `g` given those that may be like it."""
    weights = squares = total = 0.0
    count = 0
    for j in range(log_pace.shape[0]):
        if is_measured[j] and _may_be_alike(g, j, log_pace, variance):
            count += 1
            weights += 1.0 / variance[j]
            squares += 1.0 / (variance[j] * variance[j])
            total += log_pace[j] / variance[j]
    mean = total / weights
    scatter = 0.0
    for j in range(log_pace.shape[0]):
        if is_measured[j] and _may_be_alike(g, j, log_pace, variance):
            scatter += (log_pace[j] - mean) ** 2 / variance[j]
    spare = weights - squares / weights
    between = max(0.0, (scatter - (count - 1)) / spare) if count > 1 else 0.0
    return mean + between / (between + variance[g]) * (log_pace[g] - mean)


@inner_kernel
def _may_be_alike(g, j, log_pace, variance):
    return (log_pace[g] - log_pace[j]) ** 2 <= ALIKE_STDS * ALIKE_STDS * (variance[g] + variance[j])


@kernel
def shrink(log_pace, variance, is_measured, out):
    """Shrunk log paces of the measured groups into `out`, all (groups,); variance: of each measured mean, positive.

    Source: random-effects model over the groups that may be alike; between-group variance by DerSimonian and Laird, Controlled Clinical
    Trials 7(3), 1986, and the empirical Bayes mean of each group (Efron and Morris, JASA 70, 1975).
    """
    for g in range(log_pace.shape[0]):
        if is_measured[g]:
            out[g] = _shrunk(g, log_pace, variance, is_measured)


def shrunk_paces(pace: FloatArray, relative_std: FloatArray, is_measured: BoolArray) -> FloatArray:
    """Paces (groups,) with those that are measured shrunk towards each other; relative_std: of each measured mean, as a share of it."""
    out = np.log(pace)
    shrink(np.log(pace), np.maximum(relative_std, 1e-3) ** 2, is_measured, out)
    return np.exp(out)


PRIOR_VARIANCE = 0.02  # of one measurement's relative error, beyond the scatter that was seen


def mean_variance(mean: float, square_mean: float, count: float) -> float:
    """Variance of the log of a mean of `count` independent measurements with these first two moments."""
    relative = max(0.0, square_mean / (mean * mean) - 1.0) if mean > 0.0 else math.inf
    return (PRIOR_VARIANCE + relative) / max(1.0, count)
