"""The schedulers' own model of every group: what declared hardware costs under the plans in force, corrected by what was measured.

Simulation and service fill the same arrays by the same functions. Knows nothing of requests, nor of what hardware really does; the
world's coefficients (residual tables, interference, faults) come from `rank_rows(..., with_residuals=True)` and stay with the world.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from envs.decision import capability, split_planner
from envs.decision.move_candidates import IDLE_MIX, overlap_of
from envs.domain.plans import SplitPlan, TpGroup
from envs.domain.snapshot import FloatArray
from envs.group_kernel import layout as L
from envs.perf_model import all_reduce, group_cost, memory_fit
from envs.perf_model import step_time as ST
from envs.perf_model.compiled import kernel
from envs.perf_model.memory_fit import NO_OVERLAP, Overlap

OPERATIONS = ("attention", "mlp")
REFERENCE_BATCH = 16
REFERENCE_CONTEXT = 1024

# What follows from hardware and plan alone is kept: a training environment starts a new world every few hundred decisions,
# mostly on the same groups. The arrays are read only.
_kept = lru_cache(maxsize=1024)


@_kept
def planned(group: TpGroup, corner: str, speed_factors: tuple[float, ...]) -> SplitPlan:
    """Plan of one corner for a usual mix; 0 in speed_factors (ranks,) leaves a rank out. Raises InfeasibleSplit when it does not fit."""
    return split_planner.corner_plan(group, corner, IDLE_MIX, speed_factors=np.array(speed_factors))


@_kept
def overlap(group: TpGroup, plan: SplitPlan, memory_fraction: float) -> Overlap:
    """What the group's ranks hold beyond their shares: none where even one head more would not fit."""
    window = overlap_of(group, plan)
    return window if memory_fit.fits(group, plan, 1024, memory_fraction, window) else NO_OVERLAP


@_kept
def group_row(group: TpGroup) -> FloatArray:
    """Group-wide coefficients, shape (GROUP_COLUMNS,)."""
    reduce = all_reduce.affine_coefficients(group)
    return _read_only(group_cost.group_cost_row(group, reduce.alpha_s, reduce.beta_s_per_byte))


@_kept
def rank_rows(group: TpGroup, plan: SplitPlan, with_residuals: bool) -> FloatArray:
    """Coefficients of each rank under `plan`, shape (ranks, RANK_COLUMNS)."""
    return _read_only(group_cost.rank_cost_rows(group, plan, with_residuals=with_residuals))


@_kept
def kv_bytes_per_token(group: TpGroup, plan: SplitPlan) -> FloatArray:
    """KV bytes of one token on each rank, shape (ranks,)."""
    return _read_only(memory_fit.kv_bytes_per_token(group.model, plan))


@_kept
def kv_bytes(group: TpGroup, plan: SplitPlan, memory_fraction: float) -> FloatArray:
    """Bytes per rank that weights and workspace leave for KV, never negative."""
    weights = memory_fit.weight_bytes(group.model, plan, overlap(group, plan, memory_fraction))
    left = memory_fit.usable_bytes(group, memory_fraction) - weights - memory_fit.workspace_bytes(group.model, plan)
    return _read_only(np.maximum(left, 0.0))


def _read_only(array: FloatArray) -> FloatArray:
    array.setflags(write=False)
    return array


@lru_cache(maxsize=1024)
def static_profile(group: TpGroup, alive: tuple[int, ...]) -> FloatArray:
    """Standardised rates of the ranks `alive` of a group together, shape (5,)."""
    ranks = [group.ranks[r] for r in alive]
    rates = capability.static_rates([place.gpu for place in ranks], [group.slowest_link] * len(ranks))
    found = capability.static_vector(capability.group_rates(rates)[None], capability.CATALOGUE_SCALE)[0]
    return _read_only(found)


@kernel
def _correct_costs(declared, ratio, out):
    """Costs (G, 2, R, RANK_COLUMNS) of declared hardware times what was measured of each rank's attention and MLP (G, R, 2);
    the output head reads weights as the MLP does and follows it."""
    for g in range(declared.shape[0]):
        for slot in range(declared.shape[1]):
            for r in range(declared.shape[2]):
                for column in range(declared.shape[3]):
                    is_mlp = ST.RC_MLP_TOKEN_S <= column <= ST.RC_HEAD_WEIGHT_S
                    out[g, slot, r, column] = declared[g, slot, r, column] * ratio[g, r, 1 if is_mlp else 0]


@kernel
def _reference_times(declared, group_cost, residual, slow, plan, batch, kv, out, steps_s):
    for g in range(out.shape[0]):
        ST.rank_times(g, declared, group_cost, residual, slow, plan[g], batch, 0.0, kv, out[g])
        attention_s = mlp_s = 0.0
        for r in range(out.shape[1]):
            attention_s = max(attention_s, out[g, r, 0])
            mlp_s = max(mlp_s, out[g, r, 1])
        steps_s[g] = attention_s + mlp_s + group_cost[g, ST.GC_COMM_ALPHA_S]


class GroupModel:
    """Fills the predicted side of a kernel state, and keeps beside it the datasheets' prior and what was measured.

    declared_rank_cost: shaped as `state.predicted_rank_cost`, before any correction. rank_ratio (groups, ranks, 2): measured /
    declared time of attention and MLP. has_rank (groups, ranks): which ranks there are.
    """

    def __init__(self, state: L.KernelState) -> None:
        self.state = state
        groups, _, ranks, _ = state.predicted_rank_cost.shape
        self.declared_rank_cost = np.zeros_like(state.predicted_rank_cost)
        self.rank_ratio = np.ones((groups, ranks, len(OPERATIONS)))
        self.has_rank = np.zeros((groups, ranks), np.bool_)

    @property
    def groups(self) -> int:
        return int(self.has_rank.shape[0])

    @property
    def ranks_max(self) -> int:
        return int(self.has_rank.shape[1])

    def write_group(self, g: int, group: TpGroup) -> None:
        self.state.predicted_group_cost[g] = group_row(group)

    def write_plan(self, g: int, slot: int, group: TpGroup, plan: SplitPlan) -> None:
        """Put `plan`'s coefficients into plan slot `slot` of group `g`."""
        ranks = len(group.ranks)
        self.declared_rank_cost[g, slot] = 0.0
        self.declared_rank_cost[g, slot, :ranks] = rank_rows(group, plan, False)
        self.has_rank[g] = np.arange(self.ranks_max) < ranks
        _correct_costs(self.declared_rank_cost[g : g + 1], self.rank_ratio[g : g + 1], self.state.predicted_rank_cost[g : g + 1])

    def correct(self, ratio: FloatArray) -> None:
        """Let the model take each rank's attention and MLP `ratio` (groups, ranks, 2) times as long as declared."""
        self.rank_ratio[:] = ratio
        _correct_costs(self.declared_rank_cost, self.rank_ratio, self.state.predicted_rank_cost)

    def reference_times(self, batch: int, kv: int, out: FloatArray, steps_s: FloatArray) -> None:
        """A decode step of `batch` sequences and `kv` KV tokens on the declared hardware under the plans in force: attention and
        MLP seconds per rank into `out` (groups, ranks, 2), the slowest ranks' with communication latency into `steps_s` (groups,)."""
        state = self.state
        _reference_times(
            self.declared_rank_cost, state.predicted_group_cost, state.plain_residual, state.plain_slow,
            state.group_int[:, L.GI_PLAN], batch, kv, out, steps_s,
        )  # fmt: skip

    def usual_step(self) -> tuple[FloatArray, FloatArray]:
        """Declared times of a usual decode step, (groups, ranks, 2) s, and each group's relative speed in it, mean 1, (groups,)."""
        reference_s, steps_s = np.zeros((self.groups, self.ranks_max, len(OPERATIONS))), np.empty(self.groups)
        self.reference_times(REFERENCE_BATCH, REFERENCE_BATCH * REFERENCE_CONTEXT, reference_s, steps_s)
        speed = 1.0 / steps_s
        return reference_s, speed / speed.mean()


def static_profiles(groups: Sequence[TpGroup], alive: Sequence[tuple[int, ...]]) -> FloatArray:
    """Profile rows of all groups, shape (groups, 5); a group none of whose ranks lives is shown with all of them."""
    rows = np.empty((len(groups), len(capability.STATIC_FEATURES)))
    for g, group in enumerate(groups):
        rows[g] = static_profile(group, alive[g] or tuple(range(len(group.ranks))))
    return rows
