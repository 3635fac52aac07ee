"""What the ranks report of their own work: attention and MLP times of recent steps, followed per rank and operation.

The world's times are noisy measurements of what its kernel does; what comes out are ratios to the declared hardware, which
correct the schedulers' own model (`GroupSet.correct_costs`). A group that does nothing reports nothing.
"""

from __future__ import annotations

import numpy as np

from envs.cluster.group_set import GroupSet
from envs.decision import online_correction as OC
from envs.domain.snapshot import FloatArray
from envs.group_kernel import layout as L
from envs.perf_model import step_time as ST
from envs.perf_model.compiled import kernel

OPERATIONS = ("attention", "mlp")
SETTINGS = OC.CorrectionSettings(prior_std=0.3, noise_std=0.05, drift_std_per_sqrt_s=0.02)
FADE_S = 60.0  # a rank that a plan leaves out is taken for well again with this time constant
PUBLISHED_STEP = 0.08  # log: planners get a group's new speeds when one of them has moved so far, lest they re-plan on noise


@kernel
def _read_ranks(state, declared, predicted, observed):
    """Attention and MLP times of the step under way, (G, R, 2): as declared hardware would take them, and as they are.
    Both stay 0 for a group between steps and for ranks without work."""
    for g in range(state.group_int.shape[0]):
        ints = state.group_int[g]
        for r in range(predicted.shape[1]):
            for k in range(2):
                predicted[g, r, k] = 0.0
                observed[g, r, k] = 0.0
        if ints[L.GI_UP] == 0 or ints[L.GI_JUMP_ACTIVE] == 0:
            continue
        kv = 0
        for place in range(ints[L.GI_RUNNING]):
            row = state.slot_int[g, state.running[g, place]]
            if row[L.SI_PHASE] == L.PHASE_DECODE:
                kv += row[L.SI_DONE]
        chunk = ints[L.GI_CHUNK_TOKENS]
        tokens = ints[L.GI_DECODING] + chunk
        pairs = 0.5 * chunk * chunk
        plan = ints[L.GI_PLAN]
        ST.rank_times(
            g, declared, state.predicted_group_cost, state.plain_residual, state.plain_slow, plan, tokens, pairs, kv, predicted[g]
        )
        ST.rank_times(g, state.rank_cost, state.group_cost, state.residual, state.slow, plan, tokens, pairs, kv, observed[g])


class RankTelemetry:
    """Follows measured / declared times per group, rank and operation; arrays of shape (groups, ranks, 2).

    ratio: as last estimated. published: what planners are told, held until it has moved by PUBLISHED_STEP.
    """

    def __init__(self, groups: GroupSet, rng: np.random.Generator, noise: float, period_s: float) -> None:
        self._groups = groups
        self._rng = rng
        self._noise = noise
        self._period_s = period_s
        self._last_s = float(groups.state.group_float[:, L.GF_CLOCK_S].max(initial=0.0))  # the kernel stands where the trace begins
        shape = (len(groups.groups), groups.ranks_max, len(OPERATIONS))
        self._state = OC.initial(shape, SETTINGS)
        self._predicted_s, self._observed_s = np.zeros(shape), np.zeros(shape)
        self._published_log = np.zeros(shape)
        self.ratio = np.ones(shape)
        self.std = np.full(shape[0], SETTINGS.prior_std)

    def is_due(self, now_s: float) -> bool:
        return now_s - self._last_s >= self._period_s

    def sample(self, now_s: float) -> None:
        """Take in what the ranks measured since the last sample; the kernel stands at `now_s`."""
        groups, state = self._groups, self._state
        elapsed_s = now_s - self._last_s
        self._last_s = now_s
        _read_ranks(groups.state, groups.declared_rank_cost, self._predicted_s, self._observed_s)
        self._observed_s *= np.exp(self._noise * self._rng.standard_normal(self._observed_s.shape))
        is_idle = ~self._predicted_s.any(axis=(1, 2))
        is_left_out = (self._predicted_s.sum(axis=2) <= 0.0) & ~is_idle[:, None]
        flat = (array.reshape(-1) for array in (state.log_ratio, state.variance, state.samples, state.surprises))
        OC.follow_ratio(
            *flat, self._predicted_s.reshape(-1), self._observed_s.reshape(-1), np.full(state.variance.size, elapsed_s),
            SETTINGS.prior_std**2, SETTINGS.noise_std**2, SETTINGS.drift_std_per_sqrt_s**2, SETTINGS.surprise,
            SETTINGS.surprises_to_restart,
        )  # fmt: skip
        if is_left_out.any():
            state.log_ratio[is_left_out] *= np.exp(-elapsed_s / FADE_S)
        self._publish()

    def _publish(self) -> None:
        state = self._state
        self.ratio = np.exp(state.log_ratio)  # a new array: snapshots hold the old one
        self.std = np.sqrt((state.variance * self._groups.has_rank[:, :, None]).max(axis=(1, 2)))
        moved = (np.abs(state.log_ratio - self._published_log) > PUBLISHED_STEP).any(axis=(1, 2))
        self._published_log[moved] = state.log_ratio[moved]
        self._groups.correct_costs(self.ratio)

    @property
    def published(self) -> FloatArray:
        """Ratios for planners, (groups, ranks, 2)."""
        return np.exp(self._published_log)

    def forget(self, group_index: int, rank_index: int = -1) -> None:
        """Other hardware stands behind a rank, or behind all of a group's (-1): what was learnt of it is void."""
        chosen = np.zeros(self._state.variance.shape, np.bool_)
        chosen[group_index, slice(None) if rank_index < 0 else rank_index] = True
        self._state = OC.restarted(self._state, chosen, SETTINGS)
        self._publish()
