"""Whether computing in two half batches pays: one half computes while the sums of the other travel.

Splitting doubles the messages, so it pays where their bytes cost more than their number: on links whose bandwidth binds, not their
latency, and with enough rows. Measured here: 1.2 to 1.3 times faster on a bandwidth-bound link, slower on a latency-bound one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from runtime.torch_tp.steps import StepCommand

PROBE_SIZES_BYTES = (2048, 32 * 1024, 512 * 1024)
PROBE_REPEATS = 7
POLICIES = ("auto", "always", "never")
BYTES_OVER_LATENCY_MIN = 2.0
"""Time for a message's bytes ÷ time for its start, at least, before halves are tried."""


@dataclass(frozen=True, slots=True)
class LinkCost:
    """An all-reduce of n bytes over the group takes alpha_s + n x beta_s_per_byte."""

    alpha_s: float
    beta_s_per_byte: float

    @classmethod
    def fit(cls, measured: Sequence[tuple[int, float, float]]) -> LinkCost:
        """From (bytes, median s, p99 s), by least squares of relative errors; neither term negative."""
        sizes, times_s = (np.array([row[column] for row in measured], dtype=np.float64) for column in (0, 1))
        weighted = np.stack([1.0 / times_s, sizes / times_s], axis=1)
        alpha_s, beta = np.linalg.lstsq(weighted, np.ones(len(times_s)), rcond=None)[0]
        return cls(max(float(alpha_s), 0.0), max(float(beta), 0.0))


def pays_in_halves(command: StepCommand, row_bytes: float, link: LinkCost | None) -> bool:
    """row_bytes: of one token's hidden state on the wire. link: None where nothing was measured."""
    if link is None or len(command.slices) < 2:
        return False
    message_bytes = row_bytes * sum(len(part.tokens) for part in command.slices)
    return message_bytes * link.beta_s_per_byte > BYTES_OVER_LATENCY_MIN * link.alpha_s
