"""What the ranks' steps tell about them: how fast each is per operation, how long a step takes, what another plan would gain.

Busy seconds come from the ranks themselves (`step_runner`), per operation, since attention and MLP end in barriers of their own. They are
followed by `envs.decision.online_correction`. Numbers of the controller's side; no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np

from envs.decision import online_correction
from envs.decision.online_correction import CorrectionSettings, CorrectionState
from envs.domain.plans import LayerPlans
from envs.domain.snapshot import FloatArray
from runtime.torch_tp.steps import StepCommand

OPERATIONS: tuple[str, ...] = ("attention", "mlp", "vocabulary")
"""Stretches of computing that end in a collective of their own; the order of `StepDone.busy_s`."""

# Steps are short and noisy, and a rank that is throttled shows within a few of them
STEP_SETTINGS = CorrectionSettings(prior_std=0.5, noise_std=0.15, drift_std_per_sqrt_s=0.05, surprise=3.0)


def work_units(plans: Sequence[LayerPlans], command: StepCommand, passes: int = 1) -> FloatArray:
    """Work of each rank in a step, shape (ranks, operations): head-tokens over all layers, MLP column-tokens, vocabulary row-samples.

    Attention follows each slot's own plan, the rest the newest. plans: the live ones, oldest first.
    """
    newest = plans[-1]
    units = np.zeros((newest.ranks, len(OPERATIONS)))
    tokens_by_version: dict[int, int] = {}
    sampled = 0
    for part in command.slices:
        tokens_by_version[part.plan_version] = tokens_by_version.get(part.plan_version, 0) + len(part.tokens) + passes - 1
        sampled += passes if part.wants_sample else 0
    for plan in plans:
        tokens = tokens_by_version.get(plan.version, 0)
        if tokens:
            units[:, 0] += tokens * np.array([cut.query_heads for cut in plan.layers], dtype=np.float64).sum(axis=0)
    columns = np.array([np.multiply(cut.mlp_blocks, cut.mlp_block) for cut in newest.layers], dtype=np.float64).sum(axis=0)
    units[:, 1] = sum(tokens_by_version.values()) * columns
    units[:, 2] = sampled * np.array(newest.vocabulary_rows, dtype=np.float64)
    return units


def width_shares(plan: LayerPlans) -> FloatArray:
    """Each rank's share of the work per operation under a plan, shape (ranks, operations); columns sum to 1."""
    widths = np.zeros((plan.ranks, len(OPERATIONS)))
    widths[:, 0] = np.array([cut.query_heads for cut in plan.layers], dtype=np.float64).sum(axis=0)
    widths[:, 1] = np.array([np.multiply(cut.mlp_blocks, cut.mlp_block) for cut in plan.layers], dtype=np.float64).sum(axis=0)
    widths[:, 2] = plan.vocabulary_rows
    return np.asarray(widths / widths.sum(axis=0), dtype=np.float64)


class RankProfile:
    """Relative speeds of workers per operation. declared: what was said of each, by worker id; 1.0 is the yardstick.

    A speed is units per busy second in proportion to the others': only ratios within one step are measured, so that what a step
    contains does not matter.
    """

    def __init__(self, declared: Sequence[float], settings: CorrectionSettings = STEP_SETTINGS) -> None:
        self._declared = np.array(declared, dtype=np.float64)[:, None]
        self._settings = settings
        self._state: CorrectionState = online_correction.initial((len(declared), len(OPERATIONS)), settings)
        self._updated_s = np.full((len(declared), 1), np.nan)
        self.last_busy_s = np.zeros((len(declared), len(OPERATIONS)))

    def observe(self, members: Sequence[int], units: FloatArray, busy_s: Mapping[int, Sequence[float]], now_s: float) -> None:
        """Take in one step. units: `work_units`, rows in the order of `members`; busy_s: per worker, by operation."""
        rows = list(members)
        busy = np.array([busy_s[worker] for worker in rows], dtype=np.float64)
        self.last_busy_s[:] = 0.0
        self.last_busy_s[rows] = busy
        expected = units / self._declared[rows]
        has_work = (expected > 0) & (busy > 0)
        total = np.where(has_work, expected, 0.0).sum(axis=0)
        with np.errstate(divide="ignore", invalid="ignore"):
            per_unit_s = np.where(has_work, busy, 0.0).sum(axis=0) / total
        # an operation in which one rank alone has work tells nothing about it relative to others
        per_unit_s = np.where(has_work.sum(axis=0) >= 2, per_unit_s, np.nan)
        predicted, observed = np.full(self._state.log_ratio.shape, np.nan), np.full(self._state.log_ratio.shape, np.nan)
        predicted[rows] = np.where(has_work, expected * per_unit_s, np.nan)
        observed[rows] = busy
        elapsed = np.where(np.isnan(self._updated_s), 0.0, now_s - self._updated_s)
        self._updated_s[:] = now_s
        self._state = online_correction.update(self._state, predicted, observed, elapsed, self._settings)

    def forget(self, worker: int) -> None:
        """Another device may come back under this id."""
        chosen = np.zeros(self._state.log_ratio.shape, dtype=bool)
        chosen[worker] = True
        self._state = online_correction.restarted(self._state, chosen, self._settings)

    def speeds(self, members: Sequence[int]) -> FloatArray:
        """Relative speeds, shape (ranks, operations); what was declared where nothing was measured."""
        rows = list(members)
        return np.asarray(self._declared[rows] / self._state.ratio[rows], dtype=np.float64)

    def samples(self, members: Sequence[int]) -> FloatArray:
        return np.asarray(self._state.samples[list(members)], dtype=np.float64)


class Cuts(TypedDict):
    """Arguments of `layer_cuts.layer_plans`."""

    shares: tuple[float, ...]
    mlp_shares: tuple[float, ...]
    vocabulary_shares: tuple[float, ...]


def balanced_cuts(speeds: FloatArray) -> Cuts:
    """Work in proportion to speed, per operation; speeds: shape (ranks, operations)."""
    attention, mlp, vocabulary = (tuple(float(speed) for speed in column) for column in speeds.T)
    return Cuts(shares=attention, mlp_shares=mlp, vocabulary_shares=vocabulary)


def step_ratio(speeds: FloatArray, old_shares: FloatArray, new_shares: FloatArray, busy_s: FloatArray) -> float:
    """Expected busy time of a step under new widths ÷ under the old: per operation the slowest rank's, as all wait for it.

    speeds, shares: shape (ranks, operations), the shares by `width_shares`; busy_s: shape (operations,), the slowest rank's seconds in
    each operation now, which weighs the operations. 1.0 where nothing is busy.
    """
    total = float(busy_s.sum())
    if total <= 0:
        return 1.0
    old, new = (old_shares / speeds).max(axis=0), (new_shares / speeds).max(axis=0)
    return float((busy_s * new / old).sum()) / total


@dataclass(slots=True)
class StepForecast:
    """How long the next step should take, for the watch: moving averages of a pass and of a prompt token; 0 before the first."""

    weight: float = 0.2
    pass_s: float = 0.0
    token_s: float = 0.0

    def observe(self, command: StepCommand, passes: int, took_s: float) -> None:
        prompt_tokens = sum(len(part.tokens) - 1 for part in command.slices)
        if not command.slices:
            return
        if prompt_tokens == 0:
            self.pass_s = self._mean(self.pass_s, took_s / passes)
        else:
            self.token_s = self._mean(self.token_s, max(took_s - self.pass_s, 0.0) / prompt_tokens)

    def _mean(self, mean: float, value: float) -> float:
        return value if mean == 0.0 else mean + self.weight * (value - mean)

    def predict(self, command: StepCommand) -> float:
        """Seconds; passes in full, since only an overdue step matters."""
        prompt_tokens = sum(len(part.tokens) - 1 for part in command.slices)
        return command.decode_steps * self.pass_s + prompt_tokens * self.token_s
