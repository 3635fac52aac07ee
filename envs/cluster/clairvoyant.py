"""A ceiling for comparison only: a router that sees the simulated world itself, true lengths, true speeds and the next
arrivals. It cannot exist in service, and every table that shows it says "unreachable"."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from envs.decision import predictor as P
from envs.decision.actions import DecisionPoint
from envs.group_kernel import layout as L
from envs.group_kernel.advance import advance_group
from envs.group_kernel.jump import cut_jump
from envs.group_kernel.play_forward import total_score
from envs.group_kernel.queue import enqueue

if TYPE_CHECKING:
    from envs.cluster.cluster_process import ClusterProcess

LOOK_AHEAD_S = 5.0
ARRIVALS_MAX = 40


class Clairvoyant:
    """For each candidate group: clone its true state, add the request and a fair share of the true next arrivals, play to
    the end, count everybody's utility. Greedy in its own choice, so a strong reference, not a proven upper bound."""

    def __init__(self, cluster: ClusterProcess, shortlist: int = 4) -> None:
        self._cluster = cluster
        self._shortlist = shortlist
        self._scratch: L.KernelState | None = None

    def choose(self, point: DecisionPoint) -> int:
        allowed = np.flatnonzero(point.allowed_groups)
        groups = point.view.groups
        if not len(allowed):
            return groups if point.mask[groups] else groups + 1
        estimates = point.estimates
        quick = estimates[:, P.E_OWN] + estimates[:, P.E_HARM] - 0.02 * np.log(np.maximum(estimates[:, P.E_COMPLETION_S], 1e-3))
        candidates = allowed[np.argsort(-quick[allowed], kind="stable")][: self._shortlist]
        share = point.view.capability * point.view.accepts
        gains = [self._gain(point, int(g), float(share[g] / share.sum())) for g in candidates]
        return int(candidates[int(np.argmax(np.array(gains) + 1e-3 * quick[candidates]))])

    def _gain(self, point: DecisionPoint, g: int, share: float) -> float:
        request = point.request
        assert request is not None
        return self._play(point, g, share, True) - self._play(point, g, share, False)

    def _play(self, point: DecisionPoint, g: int, share: float, joins: bool) -> float:
        cluster, request = self._cluster, point.request
        assert request is not None
        scratch = self._clone(g)
        now_s = point.view.now_s
        if joins:
            self._enqueue(scratch, request.request_id, now_s)
        trace = cluster.trace
        first = request.request_id + 1
        last = min(int(np.searchsorted(trace.arrival_s, now_s + LOOK_AHEAD_S)), first + ARRIVALS_MAX)
        credit = 0.0
        for i in range(first, last):
            credit += share
            if credit >= 1.0:
                credit -= 1.0
                advance_group(scratch, 0, float(trace.arrival_s[i]))
                self._enqueue(scratch, i, float(trace.arrival_s[i]))
        horizon_s = now_s + 120.0
        advance_group(scratch, 0, horizon_s)
        return float(total_score(scratch, P.class_limits(point.tables.limit_multiplier), horizon_s))

    def _enqueue(self, scratch: L.KernelState, i: int, now_s: float) -> None:
        cluster, trace = self._cluster, self._cluster.trace
        class_index = int(trace.class_index[i])
        key = P.queue_key(float(trace.arrival_s[i]), class_index, cluster.options.head_start_s)
        limit_s = float(P.class_limits(cluster.options.limit_multiplier)[class_index, 2])
        enqueue(
            scratch, 0, now_s, i, class_index, int(trace.prompt_tokens[i]), int(trace.output_tokens[i]),
            float(trace.arrival_s[i]), key, limit_s,
        )  # fmt: skip
        cut_jump(scratch, 0, now_s)

    def _clone(self, g: int) -> L.KernelState:
        """Copy group `g`'s true state into the scratch group."""
        state = self._cluster.state
        if self._scratch is None:
            self._scratch = L.allocate(1, state.slow.shape[1], state.slot_int.shape[1], state.prefix_offset, state.prefix_ids)
        shared = {"prefix_offset", "prefix_ids", "record_int", "record_float", "record_count"}
        for name in L.KernelState._fields:
            if name not in shared:
                getattr(self._scratch, name)[0] = getattr(state, name)[g]
        self._scratch.record_count[0] = 0
        return self._scratch
