"""How well each group suits a request: five named sub-scores in [0, 1] and their weighted mean.

Pure arrays over groups. Predictions come from the caller; `observed_over_predicted` corrects them by what was measured since.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

SUB_SCORES: tuple[str, ...] = (
    "compute_fit",
    "memory_headroom",
    "communication_efficiency",
    "latency_expectation",
    "internal_balance",
)
DEFAULT_WEIGHTS: tuple[float, ...] = (0.20, 0.20, 0.10, 0.40, 0.10)
"""Latency weighs most: the reported objective is goodput under latency limits; the others say how robust the forecast is."""


def matching_scores(
    *,
    ttft_s: npt.ArrayLike,
    tpot_s: npt.ArrayLike,
    ttft_limit_s: npt.ArrayLike,
    tpot_limit_s: npt.ArrayLike,
    kv_tokens_needed: npt.ArrayLike,
    kv_tokens_free: npt.ArrayLike,
    comm_fraction: npt.ArrayLike,
    rank_busy_fraction: npt.ArrayLike,
    compute_ratio: npt.ArrayLike,
    rank_is_present: npt.ArrayLike | None = None,
    observed_over_predicted: npt.ArrayLike = 1.0,
    baseline_ttft_ratio: npt.ArrayLike = 0.0,
    baseline_tpot_ratio: npt.ArrayLike = 0.0,
    profile_affinity: npt.ArrayLike = 1.0,
) -> FloatArray:
    """Sub-scores per group in the order of SUB_SCORES, shape (groups, 5), each in [0, 1], larger is better.

    Args, shape (groups,) or scalar unless stated:
        ttft_s, tpot_s: predicted for this request on the group; ttft_limit_s, tpot_limit_s: its class's limits.
        kv_tokens_needed, kv_tokens_free: KV of the whole request, and the group's free KV.
        comm_fraction: share of a step that is communication not hidden behind compute.
        rank_busy_fraction: (groups, ranks), share of a step each rank computes. rank_is_present: same shape, padding False;
            None takes every rank as present.
        compute_ratio: the group's compute rate over what it must deliver with this request.
        observed_over_predicted: measured / predicted step time; > 1 lengthens the predicted times and lowers the rate.
        baseline_ttft_ratio, baseline_tpot_ratio: what a typical request of the class meets on the group alone, over its
            limits; a floor for the expected ratios. 0: no baseline.
        profile_affinity: cosine of the group's capability profile with the class's need, -1 to 1; 1 leaves compute_fit as it is.

    compute_fit = min(1, ratio / correction) x (3 + affinity) / 4. memory_headroom = 1 - needed / free, 0 when it does not fit.
    communication_efficiency = 1 - comm_fraction. latency_expectation = the worse of 1 / (1 + time / limit) for TTFT and TPOT,
    no better than the baselines': 1/2 exactly at the limit. internal_balance = mean / max of busy ranks, 1 when all idle.
    Raises: ValueError naming the argument that is not finite, negative, or out of its range.
    """
    busy = _checked("rank_busy_fraction", rank_busy_fraction, 0.0)
    if busy.ndim != 2:
        raise ValueError(f"rank_busy_fraction has shape {busy.shape}; give (groups, ranks)")
    correction = _checked("observed_over_predicted", observed_over_predicted, 0.0, is_open=True)
    ttft = _checked("ttft_s", ttft_s, 0.0) * correction / _checked("ttft_limit_s", ttft_limit_s, 0.0, is_open=True)
    tpot = _checked("tpot_s", tpot_s, 0.0) * correction / _checked("tpot_limit_s", tpot_limit_s, 0.0, is_open=True)
    needed, free = _checked("kv_tokens_needed", kv_tokens_needed, 0.0), _checked("kv_tokens_free", kv_tokens_free, 0.0)
    communication = _checked("comm_fraction", comm_fraction, 0.0)
    if (communication > 1.0).any():
        raise ValueError(f"comm_fraction has a maximum of {communication.max()}; give a fraction of the step in [0, 1]")
    ttft = np.maximum(ttft, _checked("baseline_ttft_ratio", baseline_ttft_ratio, 0.0))
    tpot = np.maximum(tpot, _checked("baseline_tpot_ratio", baseline_tpot_ratio, 0.0))
    affinity = _checked("profile_affinity", profile_affinity, -1.0)
    if (affinity > 1.0).any():
        raise ValueError(f"profile_affinity has a maximum of {affinity.max()}; give a cosine in [-1, 1]")
    parts = (
        np.minimum(1.0, _checked("compute_ratio", compute_ratio, 0.0) / correction) * (0.75 + 0.25 * affinity),
        _headroom(needed, free),
        1.0 - communication,
        1.0 / (1.0 + np.maximum(ttft, tpot)),
        _balance(busy, rank_is_present),
    )
    return np.stack([np.broadcast_to(part, (busy.shape[0],)) for part in parts], axis=1)


def total(scores: FloatArray, weights: npt.ArrayLike = DEFAULT_WEIGHTS) -> FloatArray:
    """Weighted mean of sub-scores, shape (groups,), in [0, 1]. Raises: ValueError unless five weights >= 0, not all zero."""
    weight = np.asarray(weights, dtype=np.float64)
    if weight.shape != (len(SUB_SCORES),) or not np.isfinite(weight).all() or weight.min() < 0 or weight.sum() <= 0:
        raise ValueError(f"weights={weight.tolist()}: give {len(SUB_SCORES)} finite weights >= 0, not all zero, for {SUB_SCORES}")
    return np.asarray(scores @ (weight / weight.sum()), dtype=np.float64)


def _checked(name: str, values: npt.ArrayLike, least: float, is_open: bool = False) -> FloatArray:
    array = np.asarray(values, dtype=np.float64)
    is_bad = ~np.isfinite(array) | (array <= least if is_open else array < least)
    if is_bad.any():
        bound = f"> {least}" if is_open else f">= {least}"
        raise ValueError(f"{name} has {array[is_bad].ravel()[0]} among its values; all must be finite and {bound}")
    return array


def _headroom(needed: FloatArray, free: FloatArray) -> FloatArray:
    needed, free = np.broadcast_arrays(needed, free)
    used = np.ones(free.shape)
    np.divide(needed, free, out=used, where=free > 0)
    return np.maximum(0.0, 1.0 - used)


def _balance(busy: FloatArray, is_present: npt.ArrayLike | None) -> FloatArray:
    """Mean / max of the present ranks' busy fraction, shape (groups,)."""
    present = np.ones(busy.shape, dtype=np.bool_) if is_present is None else np.asarray(is_present, dtype=np.bool_)
    if present.shape != busy.shape or not present.any(axis=1).all():
        raise ValueError(f"rank_is_present has shape {present.shape}; give {busy.shape} with a present rank in every group")
    counted = np.where(present, busy, 0.0)
    slowest = counted.max(axis=1)
    balance = np.ones(busy.shape[0])
    np.divide(counted.sum(axis=1) / present.sum(axis=1), slowest, out=balance, where=slowest > 0)
    # The mean of equal numbers may round to just above them.
    return np.minimum(balance, 1.0)
