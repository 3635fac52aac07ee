"""The what-if router: for each candidate group play the calibrated model forward with and without the request, with sampled
output lengths, and pick the largest change of everybody's utility. Milliseconds per decision; needs no future."""

from __future__ import annotations

import numpy as np

from agents.heuristics.counting import fall_through
from envs.decision import predictor as P
from envs.decision.actions import DecisionPoint
from envs.group_kernel.layout import KernelState
from envs.group_kernel.play_forward import scratch_group, what_if_gain

DRAWS = 256


class WhatIf:
    """samples: length samples per candidate; shortlist: only the best by closed-form net utility and completion are played."""

    def __init__(self, rng: np.random.Generator, samples: int = 2, shortlist: int = 4, horizon_s: float = 120.0) -> None:
        self._rng = rng
        self._samples = samples
        self._shortlist = shortlist
        self._horizon_s = horizon_s
        self._scratch: KernelState | None = None

    def choose(self, point: DecisionPoint) -> int:
        allowed = np.flatnonzero(point.allowed_groups)
        if not len(allowed):
            return fall_through(point)
        estimates = point.estimates
        quick = estimates[:, P.E_OWN] + estimates[:, P.E_HARM] - 0.02 * np.log(np.maximum(estimates[:, P.E_COMPLETION_S], 1e-3))
        candidates = allowed[np.argsort(-quick[allowed], kind="stable")][: self._shortlist]
        if len(candidates) == 1:
            return int(candidates[0])
        gains = self.gains(point, candidates)
        return int(candidates[int((gains + 1e-3 * quick[candidates]).argmax())])

    def gains(self, point: DecisionPoint, candidates: np.ndarray) -> np.ndarray:
        """Expected change of summed utility for each candidate group, shape (candidates,)."""
        view, tables, request = point.view, point.tables, point.request
        assert request is not None
        slots = int(np.diff(view.residents.offset).max(initial=0)) + 2
        ranks = tables.rank_cost.shape[2]
        if self._scratch is None or self._scratch.slot_int.shape[1] < slots or self._scratch.slow.shape[1] != ranks:
            self._scratch = scratch_group(ranks, max(64, 2 * slots))
        uniforms = self._rng.random((self._samples, DRAWS))
        ints, floats = point.packed
        key = P.queue_key(request.arrival_s, request.class_index, tables.head_start_s)
        asked = np.array([request.arrival_s, request.prompt_tokens, request.class_index], np.float64)
        limits = P.class_limits(tables.limit_multiplier)
        residents = view.residents
        return np.array(
            [
                what_if_gain(
                    self._scratch, view.now_s, int(g), ints, floats, residents.offset, residents.ints, residents.floats,
                    view.kv_block_tokens, asked, key, int(point.hits[g]), limits, tables.rank_cost, tables.group_cost,
                    tables.plan, tables.remaining_quantiles, tables.chunk_tokens, uniforms, self._horizon_s,
                )
                for g in candidates
            ]
        )  # fmt: skip
