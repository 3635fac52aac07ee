"""What the ranks report of their own work: attention and MLP times of recent steps, followed per rank and operation.

The world's times are noisy measurements of what its kernel does; what comes out are ratios to the declared hardware, which
correct the schedulers' own model (`GroupSet.correct_costs`). A group that does nothing reports nothing.
"""

from __future__ import annotations

import math

import numpy as np

from envs.cluster.group_set import GroupSet
from envs.decision import online_correction as OC
from envs.domain.snapshot import FloatArray
from envs.group_kernel import layout as L
from envs.perf_model import step_time as ST
from envs.perf_model.compiled import kernel

OPERATIONS = ("attention", "mlp")
SETTINGS = OC.CorrectionSettings(prior_std=0.3, noise_std=0.05, drift_std_per_sqrt_s=0.02, surprises_to_restart=2)
_COMPILED = SETTINGS.compiled
FADE_S = 60.0  # a rank that a plan leaves out is taken for well again with this time constant
PUBLISHED_STEP = 0.08  # log: planners get a group's new speeds when one of them has moved so far, lest they re-plan on noise


@kernel
def _step_under_way(state, g):
    """(tokens, prefill query-key pairs, KV tokens) of group `g`'s step."""
    ints = state.group_int[g]
    kv = 0
    for place in range(ints[L.GI_RUNNING]):
        row = state.slot_int[g, state.running[g, place]]
        if row[L.SI_PHASE] == L.PHASE_DECODE:
            kv += row[L.SI_DONE]
    chunk = ints[L.GI_CHUNK_TOKENS]
    return ints[L.GI_DECODING] + chunk, 0.5 * chunk * chunk, kv


@kernel
def _follow_ranks(state, declared, scatter, elapsed_s, fade, log_ratio, variance, samples, surprises, times, settings):
    """Take in one report: measured against declared times of the step under way, per group, rank and operation.

    scatter (G, R, 2): factors on what is measured. times (2, R, 2): scratch. A group between steps reports nothing and only
    ages; the ratio of a rank without work fades by `fade`. log_ratio to surprises: flat, see `online_correction`.
    """
    ranks = scatter.shape[1]
    predicted, observed = times[0], times[1]
    for g in range(scatter.shape[0]):
        ints = state.group_int[g]
        is_busy = ints[L.GI_UP] == 1 and ints[L.GI_JUMP_ACTIVE] == 1
        if is_busy:
            tokens, pairs, kv = _step_under_way(state, g)
            plan = ints[L.GI_PLAN]
            ST.rank_times(
                g, declared, state.predicted_group_cost, state.plain_residual, state.plain_slow, plan, tokens, pairs, kv, predicted
            )
            ST.rank_times(g, state.rank_cost, state.group_cost, state.residual, state.slow, plan, tokens, pairs, kv, observed)
        for r in range(ranks):
            works = is_busy and predicted[r, 0] + predicted[r, 1] > 0.0
            for k in range(2):
                i = (g * ranks + r) * 2 + k
                said = predicted[r, k] if works else 0.0
                OC.follow_one(i, log_ratio, variance, samples, surprises, said, observed[r, k] * scatter[g, r, k], elapsed_s, *settings)
                if is_busy and not works:
                    log_ratio[i] *= fade


@kernel
def _publish(log_ratio, variance, has_rank, reference, published, ratio, std, rank_ratio, rank_busy):
    """From what was followed (flat) to what snapshots and planners get; see `RankTelemetry`."""
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


class RankTelemetry:
    """Follows measured / declared times per group, rank and operation.

    ratio (groups, ranks, 2): as last estimated. published, of the same shape: what planners are told, held until it has moved
    by PUBLISHED_STEP. For snapshots, and never changed in place: rank_ratio (groups, ranks) over both operations of a usual
    step, 0 for absent ranks; rank_busy (groups, ranks), each rank's share of that step; std (groups,), the largest of its
    ranks' uncertainties.
    """

    def __init__(self, groups: GroupSet, rng: np.random.Generator) -> None:
        self._groups = groups
        self._rng = rng
        self._noise = groups.options.report_noise
        self._period_s = groups.options.report_period_s
        self._last_s = float(groups.state.group_float[:, L.GF_CLOCK_S].max(initial=0.0))  # the kernel stands where the trace begins
        self.due_s = self._last_s + self._period_s
        shape = (len(groups.groups), groups.ranks_max, len(OPERATIONS))
        self._state = OC.initial(shape, SETTINGS)
        state = self._state
        self._flat = tuple(array.reshape(-1) for array in (state.log_ratio, state.variance, state.samples, state.surprises))
        self._times = np.zeros((2, *shape[1:]))
        self.reference_s = np.zeros(shape)
        self._published_log = np.zeros(shape)
        self.ratio = np.ones(shape)
        self.std, self.rank_ratio, self.rank_busy = np.zeros(shape[0]), np.zeros(shape[:2]), np.zeros(shape[:2])

    def refer_to(self, reference_s: FloatArray) -> None:
        """Weigh operations by these declared times of a usual step, shape (groups, ranks, 2)."""
        self.reference_s = reference_s
        self._publish()

    def report(self, now_s: float) -> None:
        """Take in what the ranks measured since the last report; the kernel stands at `now_s`, which is `due_s` or later."""
        elapsed_s = now_s - self._last_s
        self._last_s = now_s
        self.due_s = now_s + self._period_s
        scatter = np.exp(self._noise * self._rng.standard_normal(self.ratio.shape))
        fade = math.exp(-elapsed_s / FADE_S)
        groups = self._groups
        _follow_ranks(groups.state, groups.declared_rank_cost, scatter, elapsed_s, fade, *self._flat, self._times, _COMPILED)
        self._publish()

    def _publish(self) -> None:
        self.std, self.rank_ratio, self.rank_busy = (np.empty_like(a) for a in (self.std, self.rank_ratio, self.rank_busy))
        _publish(
            *self._flat[:2], self._groups.has_rank, self.reference_s, self._published_log,
            self.ratio, self.std, self.rank_ratio, self.rank_busy,
        )  # fmt: skip
        self._groups.correct_costs(self.ratio)

    @property
    def published(self) -> FloatArray:
        """Ratios for planners, (groups, ranks, 2)."""
        return np.exp(self._published_log)

    def forget(self, group_index: int, rank_index: int = -1) -> None:
        """Other hardware stands behind a rank, or behind all of a group's (-1): what was learnt of it is void."""
        chosen = (group_index, slice(None) if rank_index < 0 else rank_index)
        fresh = OC.initial(self.ratio.shape, SETTINGS)
        for name in ("log_ratio", "variance", "samples", "surprises"):
            getattr(self._state, name)[chosen] = getattr(fresh, name)[chosen]
        self._publish()
