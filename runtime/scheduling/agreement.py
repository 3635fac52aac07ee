"""How often a policy chooses what the heuristic would have chosen: a guard rail that needs no outcome.

A policy that all but never agrees with the best heuristic, or always does although it should not, is broken or fed with numbers that mean
something else. The share is that of the last `window` comparisons; with fewer nothing is said.
"""

from __future__ import annotations

from collections import deque


class Agreement:
    """`low` and `high`: the band, shares from 0 to 1. Each comparison is O(1)."""

    def __init__(self, low: float = 0.0, high: float = 1.0, window: int = 100) -> None:
        if not 0.0 <= low <= high <= 1.0 or window < 1:
            raise ValueError(
                f"Agreement: low={low}, high={high}, window={window}; a band within 0 to 1 over at least one comparison is needed"
            )
        self.low, self.high = low, high
        self._last: deque[bool] = deque(maxlen=window)
        self._agreed = 0

    def note(self, agrees: bool) -> None:
        if len(self._last) == self._last.maxlen:
            self._agreed -= self._last[0]
        self._last.append(agrees)
        self._agreed += agrees

    @property
    def count(self) -> int:
        return len(self._last)

    @property
    def share(self) -> float | None:
        """None before the first comparison."""
        return self._agreed / len(self._last) if self._last else None

    @property
    def is_full(self) -> bool:
        return len(self._last) == self._last.maxlen

    def is_outside(self, least: int | None = None) -> bool:
        """Whether the share of at least so many comparisons (default: a full window) lies outside the band."""
        share = self.share
        return self.count >= (least or self._last.maxlen or 1) and share is not None and not self.low <= share <= self.high

    def clear(self) -> None:
        """Begin anew: what was does not speak for what will be."""
        self._last.clear()
        self._agreed = 0
