"""What ranks have shown of themselves: measured / declared times per group, rank and operation, followed and published.

Snapshots and planners read it, and it corrects the schedulers' model. Leaves to others where measured times come from.
"""

from __future__ import annotations

import math

import numpy as np

from envs.decision import online_correction as OC
from envs.decision.group_model import GroupModel
from envs.domain.snapshot import BoolArray, FloatArray
from envs.group_kernel import layout as L
from envs.perf_model import step_time as ST
from envs.perf_model.compiled import inner_kernel, kernel

SETTINGS = OC.CorrectionSettings(prior_std=0.3, noise_std=0.05, drift_std_per_sqrt_s=0.02, surprises_to_restart=2)
COMPILED = SETTINGS.compiled
FADE_S = 60.0  # a rank that a plan leaves out is taken for well again with this time constant
PUBLISHED_STEP = 0.08  # log: planners get a group's new speeds when one of them has moved so far, lest they re-plan on noise


@inner_kernel
def follow_group(g, is_busy, predicted, observed, scatter, elapsed_s, fade, log_ratio, variance, samples, surprises, settings):
    """Take in one report of group `g`: declared and measured times (R, 2) of its step, `scatter` (R, 2) a factor on the measured.

    Without a step under way (is_busy False) everything only ages; the ratio of a rank without work fades by `fade`.
    """
    ranks = predicted.shape[0]
    for r in range(ranks):
        works = is_busy and predicted[r, 0] + predicted[r, 1] > 0.0
        for k in range(2):
            i = (g * ranks + r) * 2 + k
            said = predicted[r, k] if works else 0.0
            OC.follow_one(i, log_ratio, variance, samples, surprises, said, observed[r, k] * scatter[r, k], elapsed_s, *settings)
            if is_busy and not works:
                log_ratio[i] *= fade


@kernel
def _follow_step(
    g, declared, group_cost, residual, slow, plan, tokens, pairs, kv, is_busy, observed, scatter, elapsed_s, fade,
    log_ratio, variance, samples, surprises, predicted, settings,
):  # fmt: skip
    if is_busy:
        ST.rank_times(g, declared, group_cost, residual, slow, plan, tokens, pairs, kv, predicted)
    follow_group(g, is_busy, predicted, observed, scatter, elapsed_s, fade, log_ratio, variance, samples, surprises, settings)


@kernel
def _publish(log_ratio, variance, has_rank, reference, published, ratio, std, rank_ratio, rank_busy):
    """From what was followed (flat) to what snapshots and planners get; see `RankExperience`."""
    groups, ranks = has_rank.shape
    for g in range(groups):
        moved = 0.0
        std[g] = 0.0
        attention_s = mlp_s = 0.0
        for r in range(ranks):
            for k in range(2):
                i = (g * ranks + r) * 2 + k
                moved = max(moved, abs(log_ratio[i] - published[g, r, k]))
                ratio[g, r, k] = math.exp(log_ratio[i])
                if has_rank[g, r]:
                    std[g] = max(std[g], math.sqrt(variance[i]))
            attention_s = max(attention_s, reference[g, r, 0] * ratio[g, r, 0])
            mlp_s = max(mlp_s, reference[g, r, 1] * ratio[g, r, 1])
        for r in range(ranks):
            if moved > PUBLISHED_STEP:
                for k in range(2):
                    published[g, r, k] = log_ratio[(g * ranks + r) * 2 + k]
            declared_s = reference[g, r, 0] + reference[g, r, 1]
            measured_s = reference[g, r, 0] * ratio[g, r, 0] + reference[g, r, 1] * ratio[g, r, 1]
            rank_busy[g, r] = measured_s / max(attention_s + mlp_s, 1e-12)
            rank_ratio[g, r] = (measured_s / declared_s if declared_s > 0.0 else 1.0) if has_rank[g, r] else 0.0


class RankExperience:
    """Follows measured / declared times per group, rank and operation.

    ratio (groups, ranks, 2): as last estimated. published, of the same shape: what planners are told, held until it has moved
    by PUBLISHED_STEP. For snapshots, and never changed in place: rank_ratio (groups, ranks) over both operations of a usual
    step, 0 for absent ranks; rank_busy (groups, ranks), each rank's share of that step; std (groups,), the largest of its
    ranks' uncertainties.
    """

    def __init__(self, model: GroupModel) -> None:
        self._model = model
        shape = model.rank_ratio.shape
        self._state = OC.initial(shape, SETTINGS)
        state = self._state
        self._flat = tuple(array.reshape(-1) for array in (state.log_ratio, state.variance, state.samples, state.surprises))
        self._times = np.zeros((2, *shape[1:]))
        self._plain = np.ones(shape[1:])
        self.reference_s = np.zeros(shape)
        self._published_log = np.zeros(shape)
        self.ratio = np.ones(shape)
        self.std, self.rank_ratio, self.rank_busy = np.zeros(shape[0]), np.zeros(shape[:2]), np.zeros(shape[:2])

    def refer_to(self, reference_s: FloatArray) -> None:
        """Weigh operations by these declared times of a usual step, shape (groups, ranks, 2)."""
        self.reference_s = reference_s
        self._publish()

    def observe(self, g: int, tokens: int, pairs: float, kv_tokens: int, observed_s: FloatArray | None, elapsed_s: float) -> None:
        """One step of group `g` (tokens computed, query-key pairs of prompts, KV tokens read) as its ranks measured it, (ranks, 2) s;
        None: it had none. elapsed_s: since its last report."""
        state = self._model.state
        predicted, observed = self._times
        is_busy = observed_s is not None
        if observed_s is not None:
            observed[:] = 0.0
            observed[: len(observed_s)] = observed_s
        _follow_step(
            g, self._model.declared_rank_cost, state.predicted_group_cost, state.plain_residual, state.plain_slow,
            int(state.group_int[g, L.GI_PLAN]), tokens, float(pairs), kv_tokens, is_busy, observed, self._plain, elapsed_s,
            math.exp(-elapsed_s / FADE_S), *self._flat, predicted, COMPILED,
        )  # fmt: skip
        self._publish()

    def _publish(self) -> None:
        self.std, self.rank_ratio, self.rank_busy = (np.empty_like(a) for a in (self.std, self.rank_ratio, self.rank_busy))
        _publish(
            *self._flat[:2], self._model.has_rank, self.reference_s, self._published_log,
            self.ratio, self.std, self.rank_ratio, self.rank_busy,
        )  # fmt: skip
        self._model.correct(self.ratio)

    @property
    def published(self) -> FloatArray:
        """Ratios for planners, (groups, ranks, 2)."""
        return np.exp(self._published_log)

    def speed_factors(self, g: int, is_lost: BoolArray) -> FloatArray:
        """Measured over declared speed of each rank of group `g` as planners are told, shape (ranks,) as is_lost; 0 for a lost rank."""
        ranks = len(is_lost)
        declared_s, ratio = self.reference_s[g, :ranks], self.published[g, :ranks]
        whole_s, measured_s = declared_s.sum(axis=1), (declared_s * ratio).sum(axis=1)
        factor = 1.0 / ratio.mean(axis=1)  # a rank that the plan leaves out has no times to weigh by
        np.divide(whole_s, measured_s, out=factor, where=measured_s > 0.0)
        factor[is_lost] = 0.0
        return np.asarray(factor, dtype=np.float64)

    def forget(self, group_index: int, rank_index: int = -1) -> None:
        """Other hardware stands behind a rank, or behind all of a group's (-1): what was learnt of it is void."""
        chosen = (group_index, slice(None) if rank_index < 0 else rank_index)
        fresh = OC.initial(self.ratio.shape, SETTINGS)
        for name in ("log_ratio", "variance", "samples", "surprises"):
            getattr(self._state, name)[chosen] = getattr(fresh, name)[chosen]
        self._publish()
