"""The capability profile of a device or a group: what it is (static) and how it is doing (dynamic), as a standardised vector.

A group's profile is that of its ranks together: rates add up, its link is the slowest. How long a step takes stands in
`envs.perf_model`. Similarity, ranking and complementarity are functions on these vectors. Datasheet numbers are only the
prior: callers pass corrected rates where they have measured them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from envs.domain.snapshot import ClusterSnapshot, FloatArray, IntArray
from envs.domain.specs import GpuSpec, LinkSpec, ModelSpec
from envs.perf_model.compiled import kernel

STATIC_FEATURES: tuple[str, ...] = ("flop_per_s", "memory_bytes", "memory_bytes_per_s", "link_bytes_per_s", "tdp_w")
DYNAMIC_FEATURES: tuple[str, ...] = ("memory_in_use", "queue_depth", "temperature", "clock", "step_time")
FEATURES: tuple[str, ...] = STATIC_FEATURES + DYNAMIC_FEATURES

MEMORY_HALF_FULL = 0.5
MEMORY_SPREAD = 0.25
QUEUE_USUAL = 8.0
TEMPERATURE_USUAL_C = 60.0
TEMPERATURE_SPREAD_C = 15.0
CLOCK_SPREAD = 0.1
STEP_SPREAD = float(np.log(1.25))
"""Centres and spreads of the dynamic features. No catalogue states them, so they are fixed: half-full memory, a queue of
8, 60 C, full clock and steps as predicted are 0; +1 is 3/4 full, a queue of 17 (2 x (8 + 1) - 1), 75 C, 10 % of the clock
lost, steps 25 % slower than predicted."""


@dataclass(frozen=True, slots=True)
class DeviceState:
    """What was last measured of one device.

    memory_in_use_fraction: 0 to 1. clock_fraction: clock now / rated clock. step_ratio: mean of recent measured step
    times / predicted ones; NaN while nothing was measured.
    """

    memory_in_use_fraction: float = 0.0
    queue_depth: float = 0.0
    temperature_c: float = TEMPERATURE_USUAL_C
    clock_fraction: float = 1.0
    step_ratio: float = float("nan")

    def __post_init__(self) -> None:
        if not 0.0 <= self.memory_in_use_fraction <= 1.0:
            raise ValueError(f"DeviceState: memory_in_use_fraction={self.memory_in_use_fraction} must be in 0 to 1, not bytes")
        for name in ("queue_depth", "clock_fraction"):
            value = getattr(self, name)
            if not (np.isfinite(value) and value >= 0):
                raise ValueError(f"DeviceState: {name}={value} must be finite and >= 0")
        if not np.isfinite(self.temperature_c):
            raise ValueError(f"DeviceState: temperature_c={self.temperature_c} must be finite; leave it out if unknown")
        if self.step_ratio <= 0 or np.isinf(self.step_ratio):
            raise ValueError(f"DeviceState: step_ratio={self.step_ratio} must be positive and finite, or NaN if not measured")


@dataclass(frozen=True, slots=True)
class CapabilityScale:
    """Mean and standard deviation of the natural logarithm of each static feature, over a catalogue."""

    log_mean: tuple[float, ...]
    log_spread: tuple[float, ...]

    def __post_init__(self) -> None:
        if not len(self.log_mean) == len(self.log_spread) == len(STATIC_FEATURES):
            raise ValueError(f"CapabilityScale: needs one mean and one spread for each of {', '.join(STATIC_FEATURES)}")
        if not (np.isfinite(self.log_mean).all() and np.isfinite(self.log_spread).all() and min(self.log_spread) > 0):
            raise ValueError(f"CapabilityScale: means {self.log_mean} must be finite and spreads {self.log_spread} positive")


CATALOGUE_SCALE = CapabilityScale((33.38, 24.80, 28.10, 25.13, 5.90), (1.04, 0.79, 0.91, 1.27, 0.66))
"""Of the 30 GPU types shipped, FLOP/s, bytes, bytes/s, bytes/s, W. Frozen: a policy trained with these numbers must meet the
same ones after a GPU was added; a test holds them near the catalogue's own."""


def static_rates(devices: Sequence[GpuSpec], links: Sequence[LinkSpec]) -> FloatArray:
    """Static features in STATIC_FEATURES order, shape (devices, 5), in FLOP/s, bytes, bytes/s, bytes/s, W.

    `links`: each device's link. Raises: ValueError when their counts differ.
    """
    if len(devices) != len(links):
        raise ValueError(f"static_rates: {len(devices)} devices and {len(links)} links; give one link per device")
    rows = [
        (device.flop_per_s, device.memory_bytes, device.memory_bytes_per_s, 1.0 / link.beta_s_per_byte, device.tdp_w)
        for device, link in zip(devices, links, strict=True)
    ]
    return np.array(rows, dtype=np.float64).reshape(-1, len(STATIC_FEATURES))


def scale_of(rates: FloatArray) -> CapabilityScale:
    """The scale of a catalogue, from its `static_rates`, shape (devices, 5).

    A feature in which all devices are equal gets the spread 1, so that it is 0 for them and finite for others.
    Raises: ValueError for no devices, or a rate that is not positive.
    """
    logs = _logs(rates)
    if not logs.shape[0]:
        raise ValueError("scale_of: no devices; give the static_rates of a catalogue")
    spread = logs.std(axis=0)
    spread[spread < 1e-9] = 1.0  # equal values leave rounding noise in place of 0, which must not be divided by
    return CapabilityScale(tuple(map(float, logs.mean(axis=0))), tuple(map(float, spread)))


def static_vector(rates: FloatArray, scale: CapabilityScale) -> FloatArray:
    """(ln rate - mean) / spread per static feature, shape (devices, 5): 0 is the catalogue's geometric mean."""
    return np.asarray((_logs(rates) - np.array(scale.log_mean)) / np.array(scale.log_spread), dtype=np.float64)


def dynamic_vector(states: Sequence[DeviceState]) -> FloatArray:
    """Standardised dynamic features, shape (devices, 5); higher is fuller, busier, hotter, more throttled, slower.

    Queue depth and step ratio are log-scaled. Nothing measured yet counts as "as predicted" (0), so a device that has
    just joined is neither favoured nor shunned.
    """
    rows = [
        (
            (state.memory_in_use_fraction - MEMORY_HALF_FULL) / MEMORY_SPREAD,
            np.log2((1.0 + state.queue_depth) / (1.0 + QUEUE_USUAL)),
            (state.temperature_c - TEMPERATURE_USUAL_C) / TEMPERATURE_SPREAD_C,
            (1.0 - state.clock_fraction) / CLOCK_SPREAD,
            0.0 if np.isnan(state.step_ratio) else np.log(state.step_ratio) / STEP_SPREAD,
        )
        for state in states
    ]
    return np.array(rows, dtype=np.float64).reshape(-1, len(DYNAMIC_FEATURES))


def capability_vector(rates: FloatArray, states: Sequence[DeviceState], scale: CapabilityScale) -> FloatArray:
    """Static and dynamic features in FEATURES order, shape (devices, 10). Raises: ValueError when counts differ."""
    if len(rates) != len(states):
        raise ValueError(f"capability_vector: {len(rates)} rows of rates, {len(states)} states; give one state per device")
    return np.concatenate([static_vector(rates, scale), dynamic_vector(states)], axis=1)


def group_rates(rates: FloatArray) -> FloatArray:
    """Static features of a group from those of its ranks, shape (ranks, 5) -> (5,): sums, but the slowest link.

    Raises: ValueError for no ranks.
    """
    if not rates.shape[0]:
        raise ValueError("group_rates: no ranks; give the static_rates of at least one")
    total = rates.sum(axis=0)
    link = STATIC_FEATURES.index("link_bytes_per_s")
    total[link] = rates[:, link].min()
    return np.asarray(total, dtype=np.float64)


def group_states(view: ClusterSnapshot) -> list[DeviceState]:
    """How every group is doing: KV pool in use, requests that wait, and the steps of its slowest rank.

    Temperature and clock stay as usual where nobody reports them; a throttled rank then shows in its step times.
    """
    in_use = 1.0 - view.kv_blocks_free / np.maximum(1, view.kv_blocks_total)
    return [
        DeviceState(min(1.0, max(0.0, float(used))), float(waiting), step_ratio=float(ratio))
        for used, waiting, ratio in zip(in_use, view.waiting, view.rank_ratio.max(axis=1), strict=True)
    ]


def class_needs(
    model: ModelSpec, prompt_tokens: FloatArray, output_tokens: FloatArray, ttft_limit_s: FloatArray, tpot_limit_s: FloatArray
) -> FloatArray:
    """What a typical request of each class asks of a group, as a vector in FEATURES order, shape (classes, 10).

    Args of shape (classes,), positive. Static part: the rates at which one such request would just meet its limits (FLOP/s
    and link for its prompt within the TTFT limit, bytes/s for its weights and KV within the TPOT limit, bytes for its KV),
    in logs, standardised, relative to the mean class: what this class wants more or less of than the others. Power is
    nobody's need (0). Dynamic part: -1, every class wants idle memory, no queue, a cool device, full clock, fast steps.
    """
    weights = model.weight_bytes
    active = weights / model.weight_number_bytes * (model.experts_active / model.experts if model.experts else 1.0)
    tokens = prompt_tokens + output_tokens
    kv_bytes = model.kv_bytes_per_token * tokens
    columns = {
        "flop_per_s": 2.0 * active * prompt_tokens / ttft_limit_s,
        "memory_bytes": kv_bytes,
        "memory_bytes_per_s": (weights + kv_bytes) / tpot_limit_s,
        "link_bytes_per_s": 4.0 * model.layers * model.hidden * prompt_tokens / ttft_limit_s,
        "tdp_w": np.ones_like(tokens),
    }
    logs = _logs(np.stack([columns[name] for name in STATIC_FEATURES], axis=1))
    static = (logs - logs.mean(axis=0)) / np.array(CATALOGUE_SCALE.log_spread)
    return np.concatenate([static, np.full((len(static), len(DYNAMIC_FEATURES)), -1.0)], axis=1)


@kernel
def _fill_profile(static, waiting, free, total, rank_ratio, profile):
    """Profile of every group; the compiled twin of `capability_vector` on `group_states`."""
    rates = static.shape[1]
    for g in range(static.shape[0]):
        row = profile[g]
        slowest = 0.0
        for r in range(rank_ratio.shape[1]):
            slowest = max(slowest, rank_ratio[g, r])
        for k in range(rates):
            row[k] = static[g, k]
        used = min(1.0, max(0.0, 1.0 - free[g] / max(1, total[g])))
        row[rates] = (used - MEMORY_HALF_FULL) / MEMORY_SPREAD
        row[rates + 1] = np.log2((1.0 + waiting[g]) / (1.0 + QUEUE_USUAL))
        row[rates + 2] = 0.0
        row[rates + 3] = 0.0
        row[rates + 4] = np.log(slowest) / STEP_SPREAD if slowest > 0.0 else 0.0


@kernel
def _cosines(profile, rates, need, square, out):
    """Cosine of every profile with `need` into `out`; the first `rates` features count from their mean over the groups."""
    groups = profile.shape[0]
    need_square = 0.0
    for k in range(need.shape[0]):
        need_square += need[k] * need[k]
        mean = 0.0
        if k < rates:
            for g in range(groups):
                mean += profile[g, k]
            mean /= groups
        for g in range(groups):
            value = profile[g, k] - mean
            square[g] += value * value
            out[g] += value * need[k]
    for g in range(groups):
        length = np.sqrt(square[g] * need_square)
        out[g] = min(1.0, max(-1.0, out[g] / length)) if length > 0.0 else 0.0


@kernel
def profiles_and_cosines(static, waiting, free, total, rank_ratio, need, profile, square, out):
    """`profile_and_affinity` on arrays, for compiled callers; `square` and `out` (groups,) hold zeros."""
    _fill_profile(static, waiting, free, total, rank_ratio, profile)
    _cosines(profile, static.shape[1], need, square, out)


def profile_and_affinity(view: ClusterSnapshot, need: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Profile of every group in FEATURES order, shape (groups, 10), and its cosine with a class's `need` (10,), shape (groups,).

    The static part of a profile is `view.static_profile`, the dynamic one that of `group_states`. For the cosine the static
    part counts relative to the cluster's mean group. Compiled, since it is asked on every decision.
    """
    profile = np.empty((view.groups, len(FEATURES)))
    work = np.zeros((2, view.groups))
    profiles_and_cosines(
        view.static_profile, view.waiting, view.kv_blocks_free, view.kv_blocks_total, view.rank_ratio, need, profile, work[0], work[1]
    )
    return profile, work[1]


PRESENT_WEIGHTS: dict[str, float] = {"memory_in_use": -0.1, "queue_depth": -0.2, "temperature": -0.05, "clock": -CLOCK_SPREAD}
"""Part of a device's declared strength (log) that one unit of a dynamic feature takes; `step_time` counts in full."""


def present_strength(profile: FloatArray) -> FloatArray:
    """What is left of declared speed as things are, shape (devices,): 1 for a device whose dynamic features are all 0.

    Steps 25 % slower than predicted leave 1 / 1.25; a fuller, busier, hotter or throttled device counts less.
    """
    score = -STEP_SPREAD * profile[:, FEATURES.index("step_time")]
    for name, weight in PRESENT_WEIGHTS.items():
        score = score + weight * profile[:, FEATURES.index(name)]
    return np.asarray(np.exp(score), dtype=np.float64)


def similarity(left: FloatArray, right: FloatArray) -> FloatArray:
    """Cosine between every row of `left` (m, features) and of `right` (n, features); shape (m, n), in -1 to 1.

    A row of zeros is the catalogue's mean device and has no direction: its cosine is 0.
    """
    lengths = np.linalg.norm(left, axis=1)[:, None] * np.linalg.norm(right, axis=1)[None, :]
    product = left @ right.T
    cosine = np.divide(product, lengths, out=np.zeros_like(product), where=lengths > 0)
    return np.asarray(np.clip(cosine, -1.0, 1.0), dtype=np.float64)


def rank_by(vectors: FloatArray, weights: Mapping[str, float]) -> IntArray:
    """Device indices from best to worst by the weighted sum of features; ties go to the lower index.

    vectors: (devices, 10) in FEATURES order. weights: by feature name, negative where less is better, e.g.
    {"memory_bytes_per_s": 1, "queue_depth": -0.5}.
    Raises: ValueError for an unknown feature or no weight at all.
    """
    unknown = sorted(set(weights) - set(FEATURES))
    if unknown or not weights:
        what = f"{', '.join(unknown)} unknown" if unknown else "no weights"
        raise ValueError(f"rank_by: {what}; give weights for some of {', '.join(FEATURES)}")
    columns = [FEATURES.index(name) for name in weights]
    score = vectors[:, columns] @ np.array(list(weights.values()), dtype=np.float64)
    return np.asarray(np.argsort(-score, kind="stable"), dtype=np.int64)


def pair_shares(rates: FloatArray) -> FloatArray:
    """Share of the first of each pair of devices in compute, bandwidth and memory: shape (devices, devices, 3).

    shares[a, b] = rate of a / (rate of a + rate of b), in the order compute, bandwidth, memory: where the compute-,
    bandwidth- and memory-proportional corners would cut a split over the two.
    """
    columns = [STATIC_FEATURES.index(name) for name in ("flop_per_s", "memory_bytes_per_s", "memory_bytes")]
    chosen = np.exp(_logs(rates))[:, columns]
    return np.asarray(chosen[:, None, :] / (chosen[:, None, :] + chosen[None, :, :]), dtype=np.float64)


def complementarity(rates: FloatArray) -> FloatArray:
    """How far each pair's strengths lie apart, shape (devices, devices): 0 for proportional devices, always below 1.

    It is |compute share - bandwidth share| (`pair_shares`): how much the right cut of a split differs between prefill,
    which wants compute, and decode, which wants bandwidth. High: give the phases to different devices, or let the cut
    slide; low: one fixed cut serves both. Symmetric, since the shares of b are 1 - those of a.
    """
    shares = pair_shares(rates)
    return np.asarray(np.abs(shares[:, :, 0] - shares[:, :, 1]), dtype=np.float64)


def _logs(rates: FloatArray) -> FloatArray:
    if rates.ndim != 2 or rates.shape[1] != len(STATIC_FEATURES):
        raise ValueError(f"capability: rates of shape {rates.shape}, expected (devices, 5); make them with static_rates")
    if not (np.isfinite(rates) & (rates > 0)).all():
        raise ValueError("capability: a rate is not finite and positive; check the GPU and link rows")
    return np.asarray(np.log(rates), dtype=np.float64)
