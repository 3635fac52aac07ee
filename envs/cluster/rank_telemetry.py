"""What the ranks report of their own work: attention and MLP times of recent steps, followed per rank and operation.

The world's times are noisy measurements of what its kernel does; what comes out are ratios to the declared hardware, which
correct the schedulers' own model (`envs.decision.rank_experience`). A group that does nothing reports nothing.
"""

from __future__ import annotations

import math

import numpy as np

from envs.cluster.group_set import GroupSet
from envs.decision.rank_experience import COMPILED, FADE_S, RankExperience, follow_group
from envs.group_kernel import layout as L
from envs.group_kernel.reading import step_under_way
from envs.perf_model import step_time as ST
from envs.perf_model.compiled import kernel


@kernel
def _follow_ranks(state, declared, scatter, elapsed_s, fade, log_ratio, variance, samples, surprises, times, settings):
    """Take in one report: measured against declared times of the step under way, per group, rank and operation.

    scatter (G, R, 2): factors on what is measured. times (2, R, 2): scratch. A group between steps reports nothing and only
    ages; the ratio of a rank without work fades by `fade`. log_ratio to surprises: flat, see `online_correction`.
    """
    predicted, observed = times[0], times[1]
    for g in range(scatter.shape[0]):
        ints = state.group_int[g]
        is_busy = ints[L.GI_UP] == 1 and ints[L.GI_JUMP_ACTIVE] == 1
        if is_busy:
            tokens, pairs, kv = step_under_way(state, g)
            plan = ints[L.GI_PLAN]
            ST.rank_times(
                g, declared, state.predicted_group_cost, state.plain_residual, state.plain_slow, plan, tokens, pairs, kv, predicted
            )
            ST.rank_times(g, state.rank_cost, state.group_cost, state.residual, state.slow, plan, tokens, pairs, kv, observed)
        follow_group(g, is_busy, predicted, observed, scatter[g], elapsed_s, fade, log_ratio, variance, samples, surprises, settings)


class RankTelemetry(RankExperience):
    """Reports of the simulated ranks, every `report_period_s`, with `report_noise` of scatter."""

    def __init__(self, groups: GroupSet, rng: np.random.Generator) -> None:
        super().__init__(groups.model)
        self._groups = groups
        self._rng = rng
        self._noise = groups.options.report_noise
        self._period_s = groups.options.report_period_s
        self._last_s = float(groups.state.group_float[:, L.GF_CLOCK_S].max(initial=0.0))  # the kernel stands where the trace begins
        self.due_s = self._last_s + self._period_s

    def report(self, now_s: float) -> None:
        """Take in what the ranks measured since the last report; the kernel stands at `now_s`, which is `due_s` or later."""
        elapsed_s = now_s - self._last_s
        self._last_s = now_s
        self.due_s = now_s + self._period_s
        scatter = np.exp(self._noise * self._rng.standard_normal(self.ratio.shape))
        fade = math.exp(-elapsed_s / FADE_S)
        model = self._groups.model
        _follow_ranks(self._groups.state, model.declared_rank_cost, scatter, elapsed_s, fade, *self._flat, self._times, COMPILED)
        self._publish()
