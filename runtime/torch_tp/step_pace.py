"""How long a step will take, learnt from the steps that were: base + per decoding row + per prefill token."""

from __future__ import annotations

import math

import numpy as np

from runtime.torch_tp.steps import StepCommand, StepResult

FORGETTING = 0.98  # a step counts half after 34 more
INFORMATION_MIN = 1e-3  # in every direction: what was not seen for long must not become arbitrary
SURPRISE = 4.0  # a step is never taken to be further off than this many typical errors: one stall must not move the pace


class StepPace:
    """Recursive least squares with forgetting over (1, decoding rows, prefill tokens) -> seconds of one forward pass.

    Kept as the information matrix, a sum of what is positive, so that rounding cannot make a spread negative: forgetting would let
    that grow without bound. Source: Ljung, System Identification, 2nd ed., 11.2; innovations cut as in Huber, Robust Statistics, 1981.
    """

    def __init__(self, base_s: float = 0.010, row_s: float = 0.0005, token_s: float = 0.0002) -> None:
        """Prior: what is believed before the first measurement; it weighs as much as one step."""
        self._scale = np.array([1.0, 8.0, 128.0])  # typical sizes, so that one spread fits all three
        self._coefficients = np.array([base_s, row_s, token_s]) * self._scale
        self._information = np.eye(3)  # inverse of the covariance
        self._error_s = math.inf
        self.samples = 0

    def observe(self, rows: int, prefill_tokens: int, seconds: float) -> None:
        """One pass over `rows` decoding rows and `prefill_tokens` took so long. Times that are no times are left out."""
        if not (math.isfinite(seconds) and seconds > 0):
            return
        x = np.array([1.0, rows, prefill_tokens]) / self._scale
        error_s = seconds - float(x @ self._coefficients)
        limit_s = max(SURPRISE * self._error_s, 0.5 * abs(seconds - error_s)) if self.samples >= 3 else math.inf
        self._information = FORGETTING * self._information + np.outer(x, x) + (1.0 - FORGETTING) * INFORMATION_MIN * np.eye(3)
        gain = np.linalg.solve(self._information, x)
        self._coefficients = self._coefficients + gain * min(max(error_s, -limit_s), limit_s)
        self._error_s = abs(error_s) if self.samples == 0 else 0.9 * self._error_s + 0.1 * min(abs(error_s), limit_s)
        self.samples += 1

    def learn(self, command: StepCommand, result: StepResult) -> None:
        """Observe a step that was carried out."""
        counts = [len(part.tokens) for part in command.slices]
        if counts:
            prefill_tokens = sum(count for count in counts if count > 1)
            self.observe(counts.count(1), prefill_tokens, (result.ended_s - result.began_s) / result.passes)

    @property
    def base_s(self) -> float:
        return max(float(self._coefficients[0] / self._scale[0]), 1e-6)

    @property
    def row_s(self) -> float:
        return max(float(self._coefficients[1] / self._scale[1]), 0.0)

    @property
    def token_s(self) -> float:
        return max(float(self._coefficients[2] / self._scale[2]), 1e-9)

    def step_s(self, rows: int, prefill_tokens: int = 0) -> float:
        """Expected seconds of one pass."""
        return self.base_s + self.row_s * rows + self.token_s * prefill_tokens

    def tokens_within(self, rows: int, seconds: float) -> int:
        """Prefill tokens that fit into a pass of `seconds` beside `rows` decoding rows; may be 0."""
        return max(0, int((seconds - self.step_s(rows)) / self.token_s))

    def rows_within(self, seconds: float) -> float:
        """Decoding rows that a pass of `seconds` can take; may be infinite or below 1."""
        return (seconds - self.base_s) / self.row_s if self.row_s > 0 else math.inf if seconds >= self.base_s else 0.0
