"""A confidence sequence for a mean of bounded values: an interval that may be looked at after every value, and acted on, without its error
chance growing.

Source: I. Waudby-Smith and A. Ramdas, "Estimating means of bounded random variables by betting", Journal of the Royal Statistical Society B
86(1), 2024, theorem 2 (predictable plug-in empirical Bernstein). With values X in [0, 1], each of mean mu given those before it,

    mu in  sum(lambda_i X_i) / sum(lambda_i)  +-  (log(2/alpha) + sum(v_i psi(lambda_i))) / sum(lambda_i)    for all t at once

with probability 1 - alpha, where v_i = 4 (X_i - m_{i-1})^2, psi(l) = (-log(1 - l) - l) / 4, m and s2 are running mean and variance, and
lambda_t = min(BET_MAX, sqrt(2 log(2/alpha) / (s2_{t-1} t log(1 + t)))).
"""

from __future__ import annotations

import math

import msgspec

BET_MAX = 0.75


class MeanTest(msgspec.Struct):
    """Values in [-1, 1], fed one by one; `low` and `high` hold for the mean at any time with probability 1 - error_chance. O(1)."""

    error_chance: float
    count: int = 0
    low: float = -1.0
    high: float = 1.0
    total: float = 0.0
    squares: float = 0.0
    bets: float = 0.0
    bets_by_value: float = 0.0
    spread: float = 0.0

    def add(self, value: float) -> None:
        """Raises: ValueError for a value outside [-1, 1]."""
        if not -1.0 <= value <= 1.0:
            raise ValueError(f"MeanTest: value={value} must be within -1 to 1")
        x = (value + 1.0) / 2.0
        mean = (0.5 + self.total) / (self.count + 1)
        variance = (0.25 + self.squares) / (self.count + 1)
        self.count += 1
        log_2_alpha = math.log(2.0 / self.error_chance)
        bet = min(BET_MAX, math.sqrt(2.0 * log_2_alpha / (variance * self.count * math.log1p(self.count))))
        self.bets += bet
        self.bets_by_value += bet * x
        self.spread += 4.0 * (x - mean) ** 2 * (-math.log1p(-bet) - bet) / 4.0
        self.total += x
        self.squares += (x - (0.5 + self.total) / (self.count + 1)) ** 2
        centre, radius = self.bets_by_value / self.bets, (log_2_alpha + self.spread) / self.bets
        # what was once shut out stays out: the intervals hold all at once
        self.low = max(self.low, 2.0 * (centre - radius) - 1.0)
        self.high = min(self.high, 2.0 * (centre + radius) - 1.0)

    @property
    def mean(self) -> float | None:
        return 2.0 * self.total / self.count - 1.0 if self.count else None
