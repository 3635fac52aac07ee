"""How long a failure goes unnoticed, and how long its requests then wait for their next token (DESIGN section 7).

The runtime keeps to these figures and the simulated world plays them, so that a policy meets the blind time in training.
Leaves to others what fails and when. Slow ranks and links are not here: they are only ever seen as measured step times.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from envs.domain.snapshot import FloatArray


class FailureKind(IntEnum):
    RANK_KILLED = 0  # its process is gone: the socket ends, an exit code is there
    RANK_FROZEN = 1  # its process lives and makes no progress
    GROUP_GONE = 2  # every rank, or the node or its network: no socket need end


@dataclass(frozen=True, slots=True)
class DetectionRule:
    """noticed_s, steps: noticed after max(noticed_s, steps x predicted step), in s; noticed_limit_s: the promise that is
    tested; next_token_s: from detection (of a frozen rank: from its kill) to the next token of its requests."""

    noticed_s: float
    steps: float
    noticed_limit_s: float
    next_token_s: float


DETECTION: tuple[DetectionRule, ...] = (
    DetectionRule(noticed_s=0.050, steps=0.0, noticed_limit_s=1.0, next_token_s=0.150),
    DetectionRule(noticed_s=0.250, steps=5.0, noticed_limit_s=3.0, next_token_s=0.600),
    DetectionRule(noticed_s=1.0, steps=0.0, noticed_limit_s=1.0, next_token_s=2.0),
)
"""By FailureKind. Killed: the hoped-for 50 ms. Group gone: the promise itself, since DESIGN states no hoped-for value."""


def detection_delay_s(kind: FailureKind, predicted_step_s: npt.ArrayLike = 0.0) -> FloatArray:
    """Seconds from the failure until it is noticed; shape of `predicted_step_s` (s).

    A frozen rank is suspected after max(250 ms, 5 x the predicted step). This is not cut at the promised 3 s: a step
    predicted to take longer than 0.6 s would else get healthy ranks killed (`within_promise` tells where it is not kept).
    Raises: ValueError when a predicted step is negative or not finite.
    """
    step_s = np.asarray(predicted_step_s, dtype=np.float64)
    if not (np.isfinite(step_s).all() and (step_s >= 0).all()):
        raise ValueError(f"detection_delay_s: predicted_step_s={step_s} must be finite and >= 0; 0 where nothing runs")
    rule = DETECTION[kind]
    return np.maximum(rule.noticed_s, rule.steps * step_s)


def next_token_delay_s(kind: FailureKind, predicted_step_s: npt.ArrayLike = 0.0) -> FloatArray:
    """Seconds from the failure until its requests get their next token; shape of `predicted_step_s` (s)."""
    return detection_delay_s(kind, predicted_step_s) + DETECTION[kind].next_token_s


def within_promise(kind: FailureKind, predicted_step_s: npt.ArrayLike = 0.0) -> npt.NDArray[np.bool_]:
    """Whether the failure is noticed within the promised time; shape of `predicted_step_s` (s)."""
    return np.asarray(detection_delay_s(kind, predicted_step_s) <= DETECTION[kind].noticed_limit_s, dtype=np.bool_)
