"""What requests of each class have met in each group, against what was predicted when they were routed.

The predictor is corrected by what ranks and groups measure; what is left after that belongs to the class: its answers are
longer than its kind's, its prompts hit caches, its queue is another. Followed by `online_correction` per group, class and
quantity, from answers that have ended. Knows nothing of an answer before that.
"""

from __future__ import annotations

import numpy as np

from envs.decision import online_correction as OC
from envs.domain.requests import SERVICE_CLASSES

TTFT, TPOT = range(2)
SETTINGS = OC.CorrectionSettings(prior_std=0.3, noise_std=0.5, drift_std_per_sqrt_s=0.03, surprise=3.0, surprises_to_restart=8)
"""One answer's TTFT is off by half or more even where the model is right (it cannot know who comes next), hence the noise."""


class ClassExperience:
    """Observed / predicted TTFT and TPOT, `ratio` of shape (groups, classes, 2); 1 before any answer. O(1) per answer."""

    def __init__(self, groups: int) -> None:
        shape = (groups, len(SERVICE_CLASSES), 2)
        self._state = OC.initial(shape, SETTINGS)
        self._last_s = np.zeros(shape[:2])
        self._predicted_s, self._observed_s, self._elapsed_s = np.zeros(2), np.zeros(2), np.zeros(2)
        self.ratio = np.ones(shape)

    def observe(
        self, now_s: float, group_index: int, class_index: int, predicted_s: tuple[float, float], observed_s: tuple[float, float]
    ) -> None:
        """An answer of the class has ended in the group. predicted_s, observed_s: TTFT and TPOT; NaN or 0 says nothing."""
        place = (group_index, class_index)
        state = self._state
        self._predicted_s[:] = predicted_s
        self._observed_s[:] = observed_s
        self._elapsed_s[:] = now_s - self._last_s[place]
        self._last_s[place] = now_s
        OC.follow_ratio(
            state.log_ratio[place], state.variance[place], state.samples[place], state.surprises[place],
            self._predicted_s, self._observed_s, self._elapsed_s,
            SETTINGS.prior_std**2, SETTINGS.noise_std**2, SETTINGS.drift_std_per_sqrt_s**2, SETTINGS.surprise,
            SETTINGS.surprises_to_restart,
        )  # fmt: skip
        ratio = self.ratio.copy()  # snapshots hold the old one
        ratio[place] = np.exp(state.log_ratio[place])
        self.ratio = ratio
