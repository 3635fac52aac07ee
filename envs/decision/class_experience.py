"""What requests of each class have met in each group, against what was predicted when they were routed.

The predictor is corrected by what ranks and groups measure; what is left after that belongs to the class: its answers are
longer than its kind's, its prompts hit caches, its queue is another. Followed by `online_correction` per group, class and
quantity, from answers that have ended. Knows nothing of an answer before that.
"""

from __future__ import annotations

import math

import numpy as np

from envs.decision import online_correction as OC
from envs.domain.requests import SERVICE_CLASSES
from envs.perf_model.compiled import kernel

TTFT, TPOT = range(2)
SETTINGS = OC.CorrectionSettings(prior_std=0.3, noise_std=0.5, drift_std_per_sqrt_s=0.03, surprise=3.0, surprises_to_restart=8)
"""One answer's TTFT is off by half or more even where the model is right (it cannot know who comes next), hence the noise."""


@kernel
def _observe(
    group_index, class_index, now_s, predicted_ttft_s, predicted_tpot_s, observed_ttft_s, observed_tpot_s,
    log_ratio, variance, samples, surprises, last_s, ratio, settings,
):  # fmt: skip
    place = (group_index * last_s.shape[1] + class_index) * 2
    elapsed_s = now_s - last_s[group_index, class_index]
    last_s[group_index, class_index] = now_s
    OC.follow_one(place, log_ratio, variance, samples, surprises, predicted_ttft_s, observed_ttft_s, elapsed_s, *settings)
    OC.follow_one(place + 1, log_ratio, variance, samples, surprises, predicted_tpot_s, observed_tpot_s, elapsed_s, *settings)
    ratio[group_index, class_index, 0] = math.exp(log_ratio[place])
    ratio[group_index, class_index, 1] = math.exp(log_ratio[place + 1])


_COMPILED = SETTINGS.compiled


class ClassExperience:
    """Observed / predicted TTFT and TPOT, `ratio` of shape (groups, classes, 2); 1 before any answer. O(1) per answer."""

    def __init__(self, groups: int) -> None:
        shape = (groups, len(SERVICE_CLASSES), 2)
        state = OC.initial(shape, SETTINGS)
        self._flat = tuple(array.reshape(-1) for array in (state.log_ratio, state.variance, state.samples, state.surprises))
        self._last_s = np.zeros(shape[:2])
        self.ratio = np.ones(shape)

    def observe(
        self, now_s: float, group_index: int, class_index: int, predicted_s: tuple[float, float], observed_s: tuple[float, float]
    ) -> None:
        """An answer of the class has ended in the group. predicted_s, observed_s: TTFT and TPOT; NaN or 0 says nothing."""
        self.ratio = self.ratio.copy()  # snapshots hold the old one
        _observe(group_index, class_index, now_s, *predicted_s, *observed_s, *self._flat, self._last_s, self.ratio, _COMPILED)
