"""What an all-reduce over some links costs: a time to start and a time per byte, fitted to measured times. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

PROBE_SIZES_BYTES = (2048, 32 * 1024, 512 * 1024)
PROBE_REPEATS = 7


@dataclass(frozen=True, slots=True)
class LinkCost:
    """Time of an all-reduce of n bytes: alpha_s + n x beta_s_per_byte."""

    alpha_s: float
    beta_s_per_byte: float

    @classmethod
    def fit(cls, sizes_bytes: Sequence[float], times_s: Sequence[float]) -> LinkCost:
        """Least squares on relative errors, so that small messages count as much as large ones; no term is negative.

        Raises: ValueError for fewer than two different sizes, or a time that is not positive.
        """
        sizes, times = np.asarray(sizes_bytes, float), np.asarray(times_s, float)
        if len(set(sizes.tolist())) < 2 or sizes.shape != times.shape:
            raise ValueError(f"alpha and beta need times of at least two sizes; got sizes {list(sizes_bytes)} and {len(times)} times")
        if not (times > 0).all():
            raise ValueError(f"times_s={list(times_s)}: all must be positive")
        weighted = np.stack([1.0 / times, sizes / times], axis=1)
        alpha, beta = np.linalg.lstsq(weighted, np.ones(len(times)), rcond=None)[0]
        if alpha < 0:
            alpha, beta = 0.0, _single(weighted[:, 1])
        elif beta < 0:
            alpha, beta = _single(weighted[:, 0]), 0.0
        return cls(float(alpha), float(beta))

    def time_s(self, size_bytes: float) -> float:
        return self.alpha_s + size_bytes * self.beta_s_per_byte


def _single(column: np.ndarray) -> float:
    """The one factor by which `column` comes closest to ones."""
    return float(column.sum() / (column @ column))
