"""One fit per family of operations: GEMM roofline and residual, attention, small kernels, all-reduce.

Every function takes arrays in seconds, bytes, FLOP and returns coefficients; every score is on rows not fitted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.optimize import isotonic_regression, least_squares

from calibration.measurements import NUMBER_BYTES, BoolArray, FloatArray, LayerGemms, Peaks, Timings
from envs.perf_model.coefficients import CONTEXT_KNOTS, TOKEN_KNOTS, residual_at

HELD_OUT_FRACTION = 1.0 / 3.0
SMOOTHNESS = 0.3
"""Weight of the second difference of log residuals against one row's log error, per row of an average knot."""

OVERHEAD_US_MAX = 5.0
"""A kernel's fixed cost on the device; more than that is shape-dependent inefficiency, which the residual table holds."""


def split_rows(count: int, rng: np.random.Generator) -> tuple[BoolArray, BoolArray]:
    """(fitted, held out) masks: a random third is held out."""
    held = rng.random(count) < HELD_OUT_FRACTION
    return ~held, held


def score(predicted_s: FloatArray, measured_s: FloatArray) -> dict[str, float]:
    """Mean, median and 90th percentile of the absolute relative error, and the row count."""
    error = np.abs(predicted_s / measured_s - 1.0)
    return {
        "mean": float(error.mean()),
        "median": float(np.median(error)),
        "p90": float(np.quantile(error, 0.9)),
        "rows": float(len(error)),
    }


def fit_residual(quantity: FloatArray, ratio: FloatArray, knots: int, weight: FloatArray | None = None) -> FloatArray:
    """Multiplier table at 2**i (i < knots), linear over log2(quantity), that best explains `ratio` in log error.

    Least squares on hat functions with a penalty on second differences, which also extends the table to knots without
    rows; a faint pull toward no change per knot keeps the ends flat. Returns shape (knots,), clipped to [0.2, 5].
    """
    position = np.clip(np.log2(np.maximum(quantity, 1.0)), 0, knots - 1)
    low = np.minimum(position.astype(int), knots - 2)
    basis = np.zeros((len(ratio), knots))
    rows = np.arange(len(ratio))
    basis[rows, low] = 1.0 - (position - low)
    basis[rows, low + 1] = position - low
    root = np.sqrt(np.ones(len(ratio)) if weight is None else weight)[:, None]
    per_knot = np.sqrt(max(len(ratio) / knots, 1.0))
    bend = SMOOTHNESS * 0.1 * per_knot * np.diff(np.eye(knots), n=2, axis=0)
    slope = 0.1 * per_knot * np.diff(np.eye(knots), axis=0)
    system = np.vstack([basis * root, bend, slope])
    target = np.concatenate([np.log(ratio) * root[:, 0], np.zeros(len(bend) + len(slope))])
    solution: FloatArray = np.linalg.lstsq(system, target, rcond=None)[0]
    return np.clip(np.exp(solution), 0.2, 5.0)


def never_faster_with_more_tokens(residual: FloatArray, peaks: Peaks, compute: float, memory: float) -> FloatArray:
    """The nearest table (isotonic in log time) under which no GEMM gets faster by growing; shape (TOKEN_KNOTS,).

    The bound max(2 tokens / F, 2 / B) per weight holds for every shape, so one projection serves all.
    """
    tokens = 2.0 ** np.arange(TOKEN_KNOTS)
    roof = np.maximum(2.0 * tokens / (peaks.flop_per_s * compute), NUMBER_BYTES / (peaks.memory_bytes_per_s * memory))
    return np.asarray(np.exp(isotonic_regression(np.log(roof * residual)).x) / roof)


@dataclass(frozen=True, slots=True)
class GemmFit:
    """Roofline coefficients and residual table; `weight_bytes` is n * k * 2, recovered from FLOP and tokens."""

    compute_efficiency: float
    memory_efficiency: float
    overhead_s: float
    residual: FloatArray

    def layer_s(self, gemms: LayerGemms, peaks: Peaks, with_residual: bool = True) -> FloatArray:
        """Seconds of the GEMMs of each row, summed over its ops; shape (rows,)."""
        roof = roofline_s(gemms, peaks, self.compute_efficiency, self.memory_efficiency)
        bend = residual_at(self.residual, gemms.tokens) if with_residual else np.ones_like(gemms.tokens)
        return np.asarray(bend * roof.sum(axis=1) + self.overhead_s * gemms.flop.shape[1])


def roofline_s(gemms: LayerGemms, peaks: Peaks, compute_efficiency: float, memory_efficiency: float) -> FloatArray:
    """max(FLOP bound, weight-reading bound) of every op, shape (rows, ops)."""
    weight_bytes = NUMBER_BYTES * gemms.flop / (2.0 * gemms.tokens[:, None])
    return np.maximum(gemms.flop / (peaks.flop_per_s * compute_efficiency), weight_bytes / (peaks.memory_bytes_per_s * memory_efficiency))


def fit_gemm(
    gemms: LayerGemms,
    peaks: Peaks,
    rows_max: int = 6000,
    overhead_us_max: float = OVERHEAD_US_MAX,
    rng: np.random.Generator | None = None,
) -> GemmFit:
    """Robust log-error fit of efficiencies and overhead per op, then the residual table on the sums of each row."""
    fitted = gemms
    if rng is not None and len(gemms.tokens) > rows_max:
        fitted = gemms.rows(np.isin(np.arange(len(gemms.tokens)), rng.choice(len(gemms.tokens), rows_max, replace=False)))
    log_measured = np.log(fitted.measured_s)

    def errors(theta: FloatArray) -> FloatArray:
        predicted = roofline_s(fitted, peaks, theta[0], theta[1]) + theta[2] * 1e-6
        return np.asarray((np.log(predicted) - log_measured).ravel())

    solved = least_squares(
        errors,
        x0=[0.65, 0.8, 0.5 * overhead_us_max],
        bounds=([0.05, 0.05, 0.0], [1.15, 1.1, overhead_us_max]),
        loss="soft_l1",
        f_scale=0.1,
    )
    compute, memory, overhead_us = (float(value) for value in solved.x)
    overhead_s = round(overhead_us * 1e-6, 9)
    roof = roofline_s(gemms, peaks, compute, memory).sum(axis=1)
    # The overhead can exceed a tiny measured op; keep the ratio positive by a floor of 20 % of the measurement.
    left_s = np.maximum(gemms.measured_s.sum(axis=1) - overhead_s * gemms.flop.shape[1], 0.2 * gemms.measured_s.sum(axis=1))
    # Larger ops weigh more: the table must be right for the sum of a layer, not for the mean of its ops.
    weight = np.ones_like(left_s) if gemms.flop.shape[1] > 1 else _weights_by_size(gemms)
    residual = fit_residual(gemms.tokens, left_s / roof, TOKEN_KNOTS, weight)
    return GemmFit(compute, memory, overhead_s, never_faster_with_more_tokens(residual, peaks, compute, memory))


def _weights_by_size(gemms: LayerGemms) -> FloatArray:
    size = gemms.flop[:, 0] / gemms.tokens
    return np.asarray(size / size.mean())


@dataclass(frozen=True, slots=True)
class AttentionFit:
    """time = residual(context) * work / (peak * efficiency) + overhead."""

    efficiency: float
    overhead_s: float
    residual: FloatArray

    def time_s(self, timings: Timings, peak: float, with_residual: bool = True) -> FloatArray:
        bend = residual_at(self.residual, timings.context) if with_residual else np.ones_like(timings.context)
        return np.asarray(bend * timings.work / (peak * self.efficiency) + self.overhead_s)


def fit_attention(timings: Timings, peak: float, overhead_s: float | None = None) -> AttentionFit:
    """Fit efficiency and (unless given) overhead, then the residual over context on rows where work dominates overhead."""
    log_measured = np.log(timings.measured_s)

    def errors(theta: FloatArray) -> FloatArray:
        fixed_s = theta[1] * 1e-6 if overhead_s is None else overhead_s
        return np.asarray(np.log(timings.work / (peak * theta[0]) + fixed_s) - log_measured)

    solved = least_squares(errors, x0=[0.5, 5.0], bounds=([0.01, 0.0], [1.1, 100.0]), loss="soft_l1", f_scale=0.1)
    efficiency = float(solved.x[0])
    fixed_s = float(solved.x[1]) * 1e-6 if overhead_s is None else overhead_s
    work_s = timings.work / (peak * efficiency)
    ratio = np.clip((timings.measured_s - fixed_s) / work_s, 0.4, 2.5)
    # A log error of the residual moves the whole time by work's share of it; rows that are all overhead say nothing.
    weight = (work_s / (work_s + fixed_s)) ** 2
    return AttentionFit(efficiency, fixed_s, fit_residual(timings.context, ratio, CONTEXT_KNOTS, weight))


def fit_affine(timings: Timings, alpha_max_s: float = 1e-2) -> tuple[float, float]:
    """(alpha_s, beta) of measured = alpha + beta * work in relative error, robustly."""
    start_alpha_s = float(timings.measured_s[timings.work <= np.quantile(timings.work, 0.25)].min())
    start_beta = float(timings.measured_s[timings.work.argmax()] / timings.work.max())

    def errors(theta: FloatArray) -> FloatArray:
        predicted = theta[0] * start_alpha_s + theta[1] * start_beta * timings.work
        return np.asarray(np.log(predicted / timings.measured_s))

    bounds = ([1e-3, 1e-3], [max(alpha_max_s / start_alpha_s, 2.0), 10.0])
    solved = least_squares(errors, x0=[1.0, 1.0], bounds=bounds, loss="soft_l1", f_scale=0.1)
    return float(solved.x[0]) * start_alpha_s, float(solved.x[1]) * start_beta


def affine_s(alpha_s: float, beta: float) -> Callable[[Timings], FloatArray]:
    return lambda timings: alpha_s + beta * timings.work
