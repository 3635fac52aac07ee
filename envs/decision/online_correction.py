"""Online correction of predicted times: observed / predicted per group, rank and operation, with its uncertainty.

A datasheet is only the prior (DESIGN section 2). Each ratio is followed by a scalar Kalman filter on its logarithm, a random
walk: what was learnt fades with time, so that an operation not seen for a while counts as uncertain again. Nothing measured
yet means ratio 1 (K13). Leaves to others what is predicted and what is done with the ratio.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from envs.domain.snapshot import FloatArray, IntArray
from envs.perf_model.compiled import inner_kernel, kernel

RATIO_MIN = 0.05
RATIO_MAX = 50.0


@dataclass(frozen=True, slots=True)
class CorrectionSettings:
    """Standard deviations are of the logarithm: 0.1 is about 10 %.

    prior_std: trust in the datasheet. noise_std: scatter of one step's time. drift_std_per_sqrt_s: how far a ratio wanders
    in one second. surprise: innovations beyond this many standard deviations are cut to it (one stalled step must not move
    the ratio); when `surprises_to_restart` come running with one sign, the ratio has jumped (a throttled rank): the filter
    takes it as unknown again and follows within a step.
    """

    prior_std: float = 0.5
    noise_std: float = 0.1
    drift_std_per_sqrt_s: float = 0.02
    surprise: float = 4.0
    surprises_to_restart: int = 3

    def __post_init__(self) -> None:
        for name in ("prior_std", "noise_std", "drift_std_per_sqrt_s", "surprise", "surprises_to_restart"):
            if not 0 < getattr(self, name) < np.inf:
                raise ValueError(f"CorrectionSettings: {name}={getattr(self, name)} must be positive and finite")

    @property
    def compiled(self) -> tuple[float, float, float, float, int]:
        """The last five arguments of `follow_one` and `follow_ratio`."""
        variances = (self.prior_std**2, self.noise_std**2, self.drift_std_per_sqrt_s**2)
        return (*variances, float(self.surprise), self.surprises_to_restart)


@dataclass(frozen=True, slots=True, eq=False)
class CorrectionState:
    """All arrays have one shape, e.g. (groups, ranks, operations).

    log_ratio, variance: mean and variance of log(observed / predicted). samples: measurements taken in. surprises: running
    surprising measurements, negative when they were below what was expected.
    """

    log_ratio: FloatArray
    variance: FloatArray
    samples: IntArray
    surprises: IntArray

    @property
    def ratio(self) -> FloatArray:
        """observed / predicted, within [RATIO_MIN, RATIO_MAX]; 1 where nothing was measured. Multiply predictions by it."""
        return np.clip(np.exp(self.log_ratio), RATIO_MIN, RATIO_MAX)

    @property
    def uncertainty(self) -> FloatArray:
        """Relative standard deviation of `ratio`: about the share by which it may be wrong."""
        return np.sqrt(np.expm1(self.variance))


def initial(shape: tuple[int, ...], settings: CorrectionSettings | None = None) -> CorrectionState:
    """The state before anything was measured: every ratio 1, as uncertain as the prior."""
    chosen = settings or CorrectionSettings()
    zeros = np.zeros(shape, dtype=np.int64)
    return CorrectionState(np.zeros(shape), np.full(shape, chosen.prior_std**2), zeros, zeros.copy())


@inner_kernel
def follow_one(
    i, log_ratio, variance, samples, surprises, predicted_s, observed_s, elapsed_s,
    prior_var, noise_var, drift_var_per_s, surprise, surprises_to_restart,
):  # fmt: skip
    """One Kalman step of element `i` of flat arrays, in place; for compiled callers (see `update` for the arguments)."""
    log_min, log_max = math.log(RATIO_MIN), math.log(RATIO_MAX)
    var = min(variance[i] + drift_var_per_s * max(elapsed_s, 0.0), prior_var)
    if predicted_s > 0.0 and observed_s > 0.0 and predicted_s < math.inf and observed_s < math.inf:  # False for NaN: not measured
        measured = min(max(math.log(observed_s / predicted_s), log_min), log_max)
        innovation = measured - log_ratio[i]
        limit = surprise * math.sqrt(var + noise_var)
        if abs(innovation) <= limit:
            surprises[i] = 0
        else:
            sign = 1 if innovation > 0.0 else -1
            surprises[i] = surprises[i] + sign if surprises[i] * sign > 0 else sign
            if abs(surprises[i]) >= surprises_to_restart:
                var = prior_var
                surprises[i] = 0
                limit = abs(innovation)  # a jump is believed in full
            innovation = min(max(innovation, -limit), limit)
        gain = var / (var + noise_var)
        log_ratio[i] = min(max(log_ratio[i] + gain * innovation, log_min), log_max)
        var = (1.0 - gain) * var
        samples[i] += 1
    variance[i] = var


@kernel
def follow_ratio(
    log_ratio, variance, samples, surprises, predicted_s, observed_s, elapsed_s,
    prior_var, noise_var, drift_var_per_s, surprise, surprises_to_restart,
):  # fmt: skip
    """Advance flat arrays in place, one Kalman step each; compiled, for callers that own their arrays (see `update`)."""
    for i in range(log_ratio.size):
        follow_one(
            i, log_ratio, variance, samples, surprises, predicted_s[i], observed_s[i], elapsed_s[i],
            prior_var, noise_var, drift_var_per_s, surprise, surprises_to_restart,
        )  # fmt: skip


def update(
    state: CorrectionState,
    predicted_s: npt.ArrayLike,
    observed_s: npt.ArrayLike,
    elapsed_s: npt.ArrayLike,
    settings: CorrectionSettings | None = None,
) -> CorrectionState:
    """Take in one measurement per element; returns a new state, the old one is left as it was.

    Args: predicted_s (uncorrected) and observed_s in s, elapsed_s since this element's last update, each broadcast to the
    state's shape. An element whose prediction or observation is NaN, infinite, 0 or negative was not measured: it only ages.
    Source: scalar Kalman filter for a random walk; innovations cut as in Huber, Robust Statistics, 1981.
    """
    chosen = settings or CorrectionSettings()
    shape = state.log_ratio.shape
    predicted, observed, elapsed = (
        np.broadcast_to(np.asarray(array, dtype=np.float64), shape).ravel() for array in (predicted_s, observed_s, elapsed_s)
    )
    new = CorrectionState(state.log_ratio.copy(), state.variance.copy(), state.samples.copy(), state.surprises.copy())
    follow_ratio(
        new.log_ratio.reshape(-1), new.variance.reshape(-1), new.samples.reshape(-1), new.surprises.reshape(-1),
        predicted, observed, elapsed, *chosen.compiled,
    )  # fmt: skip
    return new


def restarted(state: CorrectionState, chosen: npt.ArrayLike, settings: CorrectionSettings | None = None) -> CorrectionState:
    """Forget the elements where `chosen` (bool, broadcast to the state's shape) is True: a rank was replaced."""
    fresh = initial(state.log_ratio.shape, settings)
    mask = np.broadcast_to(np.asarray(chosen, dtype=np.bool_), state.log_ratio.shape)
    return CorrectionState(
        np.where(mask, fresh.log_ratio, state.log_ratio),
        np.where(mask, fresh.variance, state.variance),
        np.where(mask, fresh.samples, state.samples),
        np.where(mask, fresh.surprises, state.surprises),
    )
