"""Made-up arrivals: renewal processes with a given rate and burstiness, for data that has none of its own."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from envs.domain.suggestions import unknown_name
from envs.traces.trace_row import TraceError

FloatArray = npt.NDArray[np.float64]
PROCESSES: tuple[str, ...] = ("gamma", "weibull", "poisson", "constant")
_BATCH = 4096


@dataclass(frozen=True, slots=True)
class ArrivalProcess:
    """Gamma renewal arrivals. `burstiness` is the gamma shape as in vLLM's `bench serve`: 1 Poisson, below 1 burstier."""

    rate_per_s: float
    burstiness: float = 1.0

    def __post_init__(self) -> None:
        for name in ("rate_per_s", "burstiness"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise TraceError(f"arrival process: {name}={value} must be positive and finite")

    def arrivals_s(self, rng: np.random.Generator) -> Iterator[float]:
        """Yield arrival times in seconds without end; the first is one gap after 0."""
        now_s = 0.0
        while True:
            gaps_s = rng.gamma(self.burstiness, 1.0 / (self.rate_per_s * self.burstiness), _BATCH)
            times_s = now_s + np.cumsum(gaps_s)
            yield from times_s.tolist()
            now_s = float(times_s[-1])


def weibull_shape_of_cv(cv: float) -> float:
    """Weibull shape whose coefficient of variation is `cv`, by bisection of sqrt(G(1+2/k)/G(1+1/k)^2 - 1), 0.01..10.4."""
    if not 0.01 <= cv <= 10.4:
        raise TraceError(f"weibull: cv={cv} must lie in 0.01..10.4")
    low, high = 0.1, 200.0
    for _ in range(80):
        shape = math.sqrt(low * high)
        log_ratio = math.lgamma(1 + 2 / shape) - 2 * math.lgamma(1 + 1 / shape)
        if math.expm1(log_ratio) > cv * cv:
            low = shape
        else:
            high = shape
    return math.sqrt(low * high)


def _gaps(process: str, shape: float, size: int, rng: np.random.Generator) -> FloatArray:
    """Gaps of mean 1."""
    if process == "gamma":
        return rng.gamma(shape, 1.0 / shape, size)
    if process == "weibull":
        return rng.weibull(shape, size) / math.gamma(1 + 1 / shape)
    if process == "poisson":
        return rng.exponential(1.0, size)
    return np.ones(size)


def stationary_arrivals_s(
    process: str, shape: float, rate_per_s: float, start_s: float, end_s: float, rng: np.random.Generator
) -> FloatArray:
    """Arrivals in [start_s, end_s) of a renewal process that has been running for ever, so the mean count is rate x span.

    process: one of PROCESSES; shape: of gamma or weibull (ignored otherwise). The first arrival comes after the residual
    of a gap chosen in proportion to its length (inspection paradox): without it, bursty clients would open every
    window with a burst. Raises TraceError for an unknown process or a shape or rate that is not positive.
    """
    if process not in PROCESSES:
        raise TraceError(unknown_name("arrival process", process, PROCESSES))
    if not (rate_per_s > 0 and shape > 0 and math.isfinite(rate_per_s) and math.isfinite(shape)):
        raise TraceError(f"arrival process {process}: rate={rate_per_s} and shape={shape} must be positive and finite")
    span = (end_s - start_s) * rate_per_s  # in units of the mean gap
    if process == "gamma":  # a length-biased gamma(k) is a gamma(k + 1)
        long_gap = float(rng.gamma(shape + 1.0, 1.0 / shape))
    else:
        choice = _gaps(process, shape, 256, rng)
        long_gap = float(rng.choice(choice, p=choice / choice.sum()))
    now = long_gap * rng.random()
    pieces: list[FloatArray] = []
    while now < span:
        batch = np.concatenate(([now], now + np.cumsum(_gaps(process, shape, max(16, int(span - now) + 16), rng))))
        pieces.append(batch[:-1])
        now = float(batch[-1])
    if not pieces:
        return np.empty(0)
    times = np.concatenate(pieces)
    return start_s + times[times < span] / rate_per_s
