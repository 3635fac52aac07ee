"""Which service class a request belongs to, from what is known when it arrives, and what one request of a class costs a group.

A label decides where there is one. Otherwise naive Bayes over prompt length, shared prefix, session turn and arrival
burstiness, with the constants below: deterministic, O(1), nothing learnt while serving. Leaves output lengths to
`length_estimator` and limits to `objective`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from envs.domain.requests import CLASS_INDEX, LABEL_ALIASES, SERVICE_CLASSES, class_of_label
from envs.domain.snapshot import FloatArray
from envs.domain.suggestions import unknown_name


@dataclass(frozen=True, slots=True)
class ClassFeatures:
    """What tells one class from another. Probabilities and lognormals (natural logarithm).

    prompt: mixture of (weight, mu, sigma) of prompt tokens. reuses_prefix, continues_session: probability of a prefix shared
    over at least a third of the prompt, and of a turn after the first. burst_mu, burst_sigma: of the coefficient of variation
    of its client's inter-arrival times.
    """

    prompt: tuple[tuple[float, float, float], ...]
    reuses_prefix: float
    continues_session: float
    burst_mu: float
    burst_sigma: float


CLASS_FEATURES: dict[str, ClassFeatures] = {
    "chat": ClassFeatures(
        ((0.633, 6.27, 1.00), (0.291, 6.98, 0.06), (0.076, 8.32, 0.03)), 0.37, 0.50, math.log(1.09), 0.5
    ),
    "code": ClassFeatures(
        ((0.325, 5.58, 1.29), (0.625, 7.57, 0.63), (0.050, 8.91, 0.03)), 0.65, 0.65, math.log(12.7), 1.0
    ),
    "batch": ClassFeatures(
        ((0.093, 6.11, 1.53), (0.546, 7.71, 0.30), (0.362, 8.13, 0.10)), 0.05, 0.02, math.log(3.0), 1.0
    ),
}  # fmt: skip
"""Measured: the prompt mixtures (fits to Azure 2023 conversation and code, arXiv summarization lengths: KS .11, .03, .04), chat's
0.37 (Mooncake conversations that reuse more than the common block), chat's 1.09 and code's 12.7 (Azure 2023 inter-arrivals).
Judgement: the other probabilities, the widths, and batch's burstiness, for which no public trace has arrival times."""

CLASS_PRIOR: dict[str, float] = {"chat": 0.5, "code": 0.3, "batch": 0.2}
"""Judgement: without features, a request is taken to be interactive, which has the stricter limits."""

PREFIX_SHARE_REUSED = 1.0 / 3.0


def label_class(label: str) -> int:
    """Class index of a label or alias, case ignored. Raises ValueError with the known ones."""
    index = class_of_label(label)
    if index is None:
        raise ValueError(unknown_name("service class", label, [*CLASS_INDEX, *LABEL_ALIASES]))
    return index


def class_log_scores(
    prompt_tokens: int, prefix_share: float | None = None, session_turn: int | None = None, burstiness: float | None = None
) -> FloatArray:
    """Log posterior of each class up to a constant, shape (classes,); a feature that is None says nothing.

    prompt_tokens >= 1; prefix_share: cached or shared part of the prompt, 0 to 1; session_turn: 0 for the first;
    burstiness: coefficient of variation of the client's inter-arrival times, > 0.
    Raises: ValueError when a feature is out of its range.
    """
    if prompt_tokens < 1:
        raise ValueError(f"class_log_scores: prompt_tokens={prompt_tokens} must be at least 1")
    if prefix_share is not None and not 0.0 <= prefix_share <= 1.0:
        raise ValueError(f"class_log_scores: prefix_share={prefix_share} must be a fraction in [0, 1]")
    if (session_turn is not None and session_turn < 0) or (burstiness is not None and not 0.0 < burstiness < math.inf):
        raise ValueError(f"class_log_scores: session_turn={session_turn} must be >= 0, burstiness={burstiness} > 0; or None")
    log_prompt = math.log(prompt_tokens)
    scores = np.empty(len(SERVICE_CLASSES))
    for index, service in enumerate(SERVICE_CLASSES):
        features = CLASS_FEATURES[service.name]
        # The narrow components sit on single templates of one trace; elsewhere they would be noise, hence at least 0.15 wide.
        density = sum(
            weight / max(sigma, 0.15) * math.exp(-0.5 * ((log_prompt - mu) / max(sigma, 0.15)) ** 2)
            for weight, mu, sigma in features.prompt
        )
        # The floor: a prompt far beyond every trace says nothing, and the other features decide.
        score = math.log(CLASS_PRIOR[service.name]) + math.log(density + 1e-6)
        if prefix_share is not None:
            reuses = prefix_share >= PREFIX_SHARE_REUSED
            score += math.log(features.reuses_prefix if reuses else 1.0 - features.reuses_prefix)
        if session_turn is not None:
            score += math.log(features.continues_session if session_turn > 0 else 1.0 - features.continues_session)
        if burstiness is not None:
            z = (math.log(burstiness) - features.burst_mu) / features.burst_sigma
            score += -0.5 * z * z - math.log(features.burst_sigma)
        scores[index] = score
    return scores


def classify(
    label: str | None,
    prompt_tokens: int,
    prefix_share: float | None = None,
    session_turn: int | None = None,
    burstiness: float | None = None,
) -> int:
    """Class index of a request: by its label where it has one, else the most likely class; ties go to the lowest index."""
    if label is not None:
        return label_class(label)
    return int(class_log_scores(prompt_tokens, prefix_share, session_turn, burstiness).argmax())


class GapStatistics:
    """Burstiness of one client's arrivals: coefficient of variation of the gaps, exponentially weighted. O(1), fixed memory."""

    def __init__(self, gaps_min: int = 8, memory_gaps: float = 64.0) -> None:
        if gaps_min < 2 or memory_gaps < gaps_min:
            raise ValueError(f"GapStatistics: gaps_min={gaps_min} must be >= 2 and memory_gaps={memory_gaps} at least as large")
        self._gaps_min = gaps_min
        self._memory_gaps = memory_gaps
        self._last_s: float | None = None
        self._gaps = 0
        self._mean_s = 0.0
        self._square_s2 = 0.0

    def arrive(self, now_s: float) -> None:
        """A request of the client arrives; `now_s` must not go back."""
        if self._last_s is not None:
            gap_s = now_s - self._last_s
            if gap_s < 0.0:
                raise ValueError(f"GapStatistics: arrival at {now_s} s after one at {self._last_s} s; give them in time order")
            self._gaps += 1
            # 1/n until the memory is full: a plain mean first, then an exponential one.
            share = 1.0 / min(self._gaps, self._memory_gaps)
            self._mean_s += share * (gap_s - self._mean_s)
            self._square_s2 += share * (gap_s * gap_s - self._square_s2)
        self._last_s = now_s

    @property
    def burstiness(self) -> float | None:
        """Coefficient of variation; None until `gaps_min` gaps were seen, or when they all are 0 (K13)."""
        if self._gaps < self._gaps_min or self._mean_s <= 0.0:
            return None
        variance_s2 = max(0.0, self._square_s2 - self._mean_s**2)
        return max(math.sqrt(variance_s2) / self._mean_s, 1e-3)


@dataclass(frozen=True, slots=True, eq=False)
class ClassBaseline:
    """What one typical request of a class costs a group that does nothing else.

    prompt_tokens, output_tokens: the typical request, shape (classes,). ttft_s, step_s (one decode step), time_s, kv_bytes:
    shape (classes, groups).
    """

    prompt_tokens: FloatArray
    output_tokens: FloatArray
    ttft_s: FloatArray
    step_s: FloatArray
    time_s: FloatArray
    kv_bytes: FloatArray


def class_baseline(
    prompt_tokens: npt.ArrayLike,
    output_tokens: npt.ArrayLike,
    prefill_tokens_per_s: npt.ArrayLike,
    step_s: npt.ArrayLike,
    kv_bytes_per_token: npt.ArrayLike,
) -> ClassBaseline:
    """Unloaded time and peak KV memory per class and group.

    Args: prompt_tokens and output_tokens, shape (classes,), output_tokens >= 1; prefill_tokens_per_s, step_s (one decode
    step of one request) and kv_bytes_per_token (over all ranks), shape (groups,), (classes, groups) or a scalar.
    Returns: ttft_s = prompt / prefill rate; time_s = ttft_s + (output - 1) x step; kv_bytes = (prompt + output) x bytes per
    token. A group that does not serve (rate 0) has infinite times.
    Raises: ValueError for negative inputs or fewer than one output token.
    """
    prompt = np.asarray(prompt_tokens, dtype=np.float64)[:, None]
    output = np.asarray(output_tokens, dtype=np.float64)[:, None]
    rate = np.atleast_2d(np.asarray(prefill_tokens_per_s, dtype=np.float64))
    step = np.atleast_2d(np.asarray(step_s, dtype=np.float64))
    token_bytes = np.atleast_2d(np.asarray(kv_bytes_per_token, dtype=np.float64))
    if (prompt < 0).any() or (output < 1).any() or (rate < 0).any() or (step < 0).any() or (token_bytes < 0).any():
        raise ValueError("class_baseline: an input is negative, or output_tokens is under 1; give counts, rates and seconds")
    ttft_s = np.divide(prompt, rate, out=np.full(np.broadcast_shapes(prompt.shape, rate.shape), np.inf), where=rate > 0)
    time_s = ttft_s + (output - 1.0) * step
    kv_bytes = np.broadcast_to((prompt + output) * token_bytes, time_s.shape)
    return ClassBaseline(prompt[:, 0], output[:, 0], ttft_s, np.broadcast_to(step, time_s.shape), time_s, kv_bytes)


class TypicalPrompts:
    """Prompt length of a typical request per class: exponential mean of its logarithm, begun from the published mixtures.

    O(1) per arrival, fixed memory; the last `memory_arrivals` of a class count.
    """

    def __init__(self, prior_arrivals: float = 20.0, memory_arrivals: float = 500.0) -> None:
        if not 0 < prior_arrivals <= memory_arrivals:
            raise ValueError(f"TypicalPrompts: need 0 < prior_arrivals={prior_arrivals} <= memory_arrivals={memory_arrivals}")
        mixtures = [CLASS_FEATURES[service.name].prompt for service in SERVICE_CLASSES]
        self._log_mean = [sum(weight * mu for weight, mu, _ in mixture) / sum(row[0] for row in mixture) for mixture in mixtures]
        self._counts = [prior_arrivals] * len(mixtures)
        self._memory_arrivals = memory_arrivals

    def observe(self, class_index: int, prompt_tokens: int) -> None:
        """A request of the class has arrived; prompt_tokens >= 1."""
        self._counts[class_index] = count = min(self._counts[class_index] + 1.0, self._memory_arrivals)
        self._log_mean[class_index] += (math.log(prompt_tokens) - self._log_mean[class_index]) / count

    def tokens(self) -> FloatArray:
        """Geometric mean of the prompt lengths of each class, shape (classes,), >= 1."""
        return np.asarray(np.exp(np.array(self._log_mean)), dtype=np.float64)
