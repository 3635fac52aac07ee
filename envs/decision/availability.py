"""Which groups may be given a request: the rule behind `ClusterSnapshot.accepts`, one for simulation and service."""

from __future__ import annotations

import numpy as np

from envs.domain.snapshot import BoolArray, IntArray
from envs.perf_model.compiled import kernel


@kernel
def _availability(is_parked, is_down, draining, breaker_allows, waiting, queue_limit, is_up, is_draining, accepts):
    for g in range(is_up.shape[0]):
        is_up[g] = not (is_parked[g] or is_down[g])
        is_draining[g] = draining[g]
        accepts[g] = is_up[g] and not draining[g] and breaker_allows[g] and waiting[g] < queue_limit[g]


def availability(
    is_parked: BoolArray, is_down: BoolArray, draining: BoolArray, breaker_allows: BoolArray, waiting: IntArray, queue_limit: IntArray
) -> tuple[BoolArray, BoolArray, BoolArray]:
    """(is_up, is_draining, accepts) of every group, as in `ClusterSnapshot`; arguments and results of shape (groups,), results fresh."""
    is_up, is_draining, accepts = np.empty_like(breaker_allows), np.empty_like(breaker_allows), np.empty_like(breaker_allows)
    _availability(is_parked, is_down, draining, breaker_allows, waiting, queue_limit, is_up, is_draining, accepts)
    return is_up, is_draining, accepts
