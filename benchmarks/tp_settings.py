"""What every measurement of `benchmarks.tp_engine` is told."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """rounds: repetitions of every pair; size: factor on the length of a round, below 1 only to try things out."""

    model: str = "smollm2"
    rounds: int = 5
    size: float = 1.0

    def scaled(self, count: int, least: int = 1) -> int:
        return max(least, round(count * self.size))
