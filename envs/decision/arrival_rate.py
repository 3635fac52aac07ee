"""How many requests arrive per second, forgotten exponentially: one number per time constant, O(1) per arrival."""

from __future__ import annotations

import math


class ArrivalRate:
    """Exponentially forgotten arrivals per second."""

    def __init__(self, time_constant_s: float) -> None:
        self._time_constant_s = time_constant_s
        self._weight = 0.0
        self._last_s = 0.0

    def count(self, now_s: float) -> None:
        self._weight = self._weight * math.exp((self._last_s - now_s) / self._time_constant_s) + 1.0
        self._last_s = now_s

    def per_s(self, now_s: float) -> float:
        return self._weight * math.exp((self._last_s - now_s) / self._time_constant_s) / self._time_constant_s
