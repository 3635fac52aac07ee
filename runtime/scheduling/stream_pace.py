"""How long a stream of a group may be silent: from the gaps between its tokens, O(1) per token."""

from __future__ import annotations

GAP_FIRST_S = 0.05
STEP = 0.05
GAP_MIN_S, GAP_MAX_S = 1e-4, 10.0


class StreamPace:
    """Running median of the gaps between tokens, by a multiplicative step toward each gap (Robbins and Monro, 1951, on its sign)."""

    def __init__(self) -> None:
        self.median_gap_s = GAP_FIRST_S

    def observe(self, gap_s: float) -> None:
        factor = 1.0 + STEP if gap_s > self.median_gap_s else 1.0 / (1.0 + STEP)
        self.median_gap_s = min(GAP_MAX_S, max(GAP_MIN_S, self.median_gap_s * factor))

    def silence_limit_s(self, multiple: float, slack_s: float) -> float:
        """A stream silent for so long is taken for dead."""
        return multiple * self.median_gap_s + slack_s
