"""From the kernel's state to the `ClusterSnapshot` that schedulers see: what an engine would report, and what we know ourselves."""

from __future__ import annotations

import math

import numpy as np

from envs.cluster.group_set import GroupSet
from envs.domain.snapshot import BoolArray, ClusterSnapshot, IntArray, Residents
from envs.group_kernel import reading as R
from envs.perf_model import step_time as ST

REFERENCE_BATCH = 16
REFERENCE_CONTEXT = 1024


class ArrivalRate:
    """Exponentially forgotten arrivals per second."""

    def __init__(self, time_constant_s: float) -> None:
        self._time_constant_s = time_constant_s
        self._weight = 0.0
        self._last_s = 0.0

    def count(self, now_s: float) -> None:
        self._weight = self._weight * math.exp((self._last_s - now_s) / self._time_constant_s) + 1.0
        self._last_s = now_s

    def per_s(self, now_s: float) -> float:
        return self._weight * math.exp((self._last_s - now_s) / self._time_constant_s) / self._time_constant_s


class Telemetry:
    """Builds snapshots; keeps the slow-moving columns (capability, balance inside groups) between control ticks."""

    def __init__(self, groups: GroupSet) -> None:
        self._groups = groups
        count = len(groups.groups)
        self.rate_5s = ArrivalRate(5.0)
        self.rate_60s = ArrivalRate(60.0)
        self.usd_per_hour = np.array([sum(place.gpu.usd_per_hour for place in group.ranks) for group in groups.groups])
        self.capability = np.ones(count)
        self.rank_busy = np.zeros((count, groups.ranks_max))
        self._ints = np.zeros((count, R.READ_INTS), np.int64)
        self._floats = np.zeros((count, R.READ_FLOATS))
        self.refresh_slow_columns()

    def refresh_slow_columns(self) -> None:
        """Re-measure relative speed (declared hardware) and the ranks' busy shares (profiler); at control ticks."""
        groups = self._groups
        steps_s = np.empty(len(groups.groups))
        self.rank_busy = np.zeros_like(self.rank_busy)  # a new array: earlier snapshots keep the old one
        for g in range(len(groups.groups)):
            kv = REFERENCE_BATCH * REFERENCE_CONTEXT
            declared = groups.rank_times_s(g, REFERENCE_BATCH, 0.0, kv, truth=False)
            steps_s[g] = declared.max(axis=0).sum() + groups.state.predicted_group_cost[g, ST.GC_COMM_ALPHA_S]
            measured = groups.rank_times_s(g, REFERENCE_BATCH, 0.0, kv, truth=True)
            barrier = measured.max(axis=0).sum()
            self.rank_busy[g, : len(measured)] = measured.sum(axis=1) / max(barrier, 1e-12)
        speed = 1.0 / steps_s
        self.capability = speed / speed.mean()

    def snapshot(
        self, now_s: float, breaker_allows: BoolArray, breaker_state: IntArray, hold_queue: int, hold_limit: int
    ) -> ClusterSnapshot:
        """The view at `now_s`; the kernel must have been advanced to it."""
        groups = self._groups
        state = groups.state
        R.read_groups(state, now_s, self._ints, self._floats)
        ints, floats = self._ints.copy(), self._floats.copy()
        residents = R.count_residents(state)
        offset = np.empty(len(groups.groups) + 1, np.int64)
        resident_ints = np.empty((residents, R.RESIDENT_INTS), np.int64)
        resident_floats = np.empty((residents, R.RESIDENT_FLOATS))
        R.read_residents(state, now_s, offset, resident_ints, resident_floats)
        is_up = np.array([not (h.is_parked or h.detected_down) for h in groups.health])
        is_draining = np.array([h.is_draining for h in groups.health])
        queue_limit = groups.limits.queue_limit
        waiting = ints[:, R.R_WAITING]
        zeros = np.zeros(len(groups.groups))
        return ClusterSnapshot(
            now_s=now_s,
            is_up=is_up,
            accepts=is_up & ~is_draining & breaker_allows & (waiting < queue_limit),
            is_draining=is_draining,
            running=ints[:, R.R_RUNNING],
            waiting=waiting,
            running_limit=np.full(len(groups.groups), groups.limits.max_running),
            queue_limit=np.full(len(groups.groups), queue_limit),
            kv_blocks_free=ints[:, R.R_BLOCKS_FREE],
            kv_blocks_total=ints[:, R.R_BLOCKS_TOTAL],
            kv_block_tokens=groups.limits.kv_block_tokens,
            prefill_backlog_tokens=ints[:, R.R_BACKLOG_TOKENS],
            decode_kv_tokens=ints[:, R.R_DECODE_KV],
            decoding=ints[:, R.R_DECODING],
            step_s=floats[:, R.R_STEP_NOW_S],
            step_left_s=floats[:, R.R_STEP_LEFT_S],
            correction=floats[:, R.R_CORRECTION],
            oldest_wait_s=floats[:, R.R_OLDEST_WAIT_S],
            breaker_state=breaker_state,
            report_age_s=zeros,
            pause_left_s=floats[:, R.R_PAUSE_LEFT_S],
            plan_corner=groups.corners.copy(),
            rank_busy_fraction=self.rank_busy,
            capability=self.capability,
            usd_per_hour=self.usd_per_hour,
            residents=Residents(offset, resident_ints, resident_floats),
            hold_queue=hold_queue,
            hold_queue_limit=hold_limit,
            arrival_rate_5s=self.rate_5s.per_s(now_s),
            arrival_rate_60s=self.rate_60s.per_s(now_s),
        )
