"""What past traffic tells of future requests, and the predictor's tables made of it: lengths of answers, typical prompts, their cost.

Simulation and service feed it the same events (an arrival, a completed answer) and decide with the same tables.
"""

from __future__ import annotations

import numpy as np

from envs.decision import capability
from envs.decision import predictor as P
from envs.decision.length_estimator import LengthEstimator
from envs.decision.request_classes import TypicalPrompts
from envs.domain.requests import SERVICE_CLASSES
from envs.domain.snapshot import FloatArray
from envs.domain.specs import ModelSpec
from envs.group_kernel import layout as L

TABLE_REFRESH_COMPLETIONS = 64  # the predictor's length table is rebuilt this often
TYPICAL_REFRESH_COMPLETIONS = 512  # what a typical request is and costs, at first after 64, 128, 256: it changes ever less


class TrafficExperience:
    """Answer lengths and typical prompts, and `tables`, rebuilt every so many completions.

    state: kernel state whose predicted side (costs, plan in force, largest chunk) the tables show; they share its arrays.
    """

    def __init__(self, model: ModelSpec, state: L.KernelState, limit_multiplier: float = 1.0, head_start_s: float = 2.0) -> None:
        self._model = model
        self._state = state
        self._limit_multiplier = limit_multiplier
        self._head_start_s = head_start_s
        self._limits = P.class_limits(limit_multiplier)
        self.lengths = LengthEstimator()
        self.prompts = TypicalPrompts()
        self._completions = 0
        self._table_due = self._typical_due = TABLE_REFRESH_COMPLETIONS
        self._typical = self._make_typical(np.array([self.lengths.mean(c) for c in range(len(SERVICE_CLASSES))]))
        self.tables = self._make_tables()

    def observe_arrival(self, class_index: int, prompt_tokens: int) -> None:
        self.prompts.observe(class_index, prompt_tokens)

    def observe_completion(self, class_index: int, output_tokens: int) -> None:
        """An answer came to its end; call `refresh_if_due` when all that ended together are told."""
        self._completions += 1
        self.lengths.observe(class_index, output_tokens)

    def refresh_if_due(self) -> None:
        if self._completions >= self._table_due:
            self._table_due = self._completions + TABLE_REFRESH_COMPLETIONS
            self.tables = self._make_tables()

    def _make_tables(self) -> P.PredictorTables:
        state = self._state
        starts = P.bin_starts()
        classes, made, middle = np.meshgrid(
            np.arange(len(SERVICE_CLASSES)), starts, (np.arange(P.QUANTILES) + 0.5) / P.QUANTILES, indexing="ij"
        )
        remaining = self.lengths.expected_remaining(classes[..., 0], made[..., 0])
        quantiles = self.lengths.sample_remaining(classes, made, middle)
        if self._completions >= self._typical_due:
            self._typical_due = min(2 * self._typical_due, self._typical_due + TYPICAL_REFRESH_COMPLETIONS)
            self._typical = self._make_typical(np.ascontiguousarray(remaining[:, 0], np.float64))
        return P.PredictorTables(
            rank_cost=state.predicted_rank_cost,
            group_cost=state.predicted_group_cost,
            plan=state.group_int[:, L.GI_PLAN],
            baseline=self._typical[0],
            needs=self._typical[1],
            remaining_tokens=np.ascontiguousarray(remaining, np.float64),
            remaining_quantiles=np.ascontiguousarray(quantiles, np.float64),
            chunk_tokens=np.ascontiguousarray(state.group_int[:, L.GI_CHUNK_MAX]),
            residual=state.plain_residual,
            slow=state.plain_slow,
            limit_multiplier=self._limit_multiplier,
            head_start_s=self._head_start_s,
        )

    def _make_typical(self, outputs: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Baseline table and needs of a typical request of each class, whose answer has `outputs` tokens, shape (classes,)."""
        state, model, prompts = self._state, self._model, self.prompts.tokens()
        baseline = P.baselines(
            prompts, outputs, state.predicted_rank_cost, state.predicted_group_cost, state.plain_residual, state.plain_slow,
            state.group_int[:, L.GI_PLAN], np.ascontiguousarray(state.group_int[:, L.GI_CHUNK_MAX]), model.kv_bytes_per_token,
        )  # fmt: skip
        ttft_limit_s = self._limits[:, 0] + self._limits[:, 1] * prompts
        needs = capability.class_needs(model, prompts, outputs, ttft_limit_s, self._limits[:, 2])
        return P.baseline_table(baseline, self._limit_multiplier), needs
