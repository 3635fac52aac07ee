"""From the kernel's state to the `ClusterSnapshot` that schedulers see: what an engine would report, and what we know ourselves."""

from __future__ import annotations

import numpy as np

from envs.cluster.group_set import DETECTED_DOWN, DRAINING, PARKED, GroupSet
from envs.cluster.rank_telemetry import RankTelemetry
from envs.cluster.report_delay import DelayedReports
from envs.decision import capability, group_model
from envs.decision.arrival_rate import ArrivalRate
from envs.decision.availability import availability
from envs.decision.class_experience import ClassExperience
from envs.domain.snapshot import BoolArray, ClusterSnapshot, FloatArray, IntArray, Residents
from envs.group_kernel import reading as R


class Telemetry:
    """Builds snapshots; keeps what moves slowly (declared hardware, measured ratios) between control ticks and reports."""

    def __init__(self, groups: GroupSet, rng: np.random.Generator, requests: int) -> None:
        self._groups = groups
        delay_s = groups.options.report_delay_s
        self._delayed = DelayedReports(delay_s, requests) if delay_s > 0.0 else None
        count = len(groups.groups)
        self.rate_5s = ArrivalRate(5.0)
        self.rate_60s = ArrivalRate(60.0)
        self.usd_per_hour = np.array([sum(place.gpu.usd_per_hour for place in group.ranks) for group in groups.groups])
        self.capability = np.ones(count)
        self.static_profile = np.zeros((count, len(capability.STATIC_FEATURES)))
        self.ranks = RankTelemetry(groups, rng)
        self.class_experience = ClassExperience(count)
        self._ints = np.zeros((R.READ_INTS, count), np.int64)
        self._floats = np.zeros((R.READ_FLOATS, count))
        slots = groups.state.slot_int.shape[0] * groups.state.slot_int.shape[1]
        self._residents = 0
        self._offset = np.zeros(count + 1, np.int64)
        self._resident_ints = np.zeros((slots, R.RESIDENT_INTS), np.int64)
        self._resident_floats = np.zeros((slots, R.RESIDENT_FLOATS))
        # columns that never change; every snapshot shares them
        self._running_limit = np.full(count, groups.limits.max_running)
        self._queue_limit = np.full(count, groups.limits.queue_limit)
        self._report_age_s = np.zeros(count)
        self.refresh_slow_columns()

    def refresh_slow_columns(self) -> None:
        """Read the declared hardware again: relative speed, capability profile, a usual step's times; at control ticks."""
        groups = self._groups
        alive = [tuple(np.flatnonzero(~health.rank_is_lost).tolist()) for health in groups.health]
        self.static_profile = group_model.static_profiles(groups.groups, alive)  # a new one, since snapshots hold the old one
        reference_s, self.capability = groups.model.usual_step()
        self.ranks.refer_to(reference_s)

    def speed_factors(self, g: int) -> FloatArray:
        """Measured speed over declared speed of each rank of group `g` as planners are told, shape (ranks,); 0 for a lost rank."""
        return self.ranks.speed_factors(g, self._groups.health[g].rank_is_lost)

    def advance_and_read(self, now_s: float) -> None:
        """Bring the kernel to `now_s` and read it; `snapshot` makes the view of it."""
        if self._delayed is None:
            self._advance_and_read(now_s)
            return
        reported_s = now_s - self._delayed.delay_s
        if reported_s > self._delayed.last_s:  # nobody has looked in between: what was reported then is still to be read
            self._advance_and_read(reported_s)
            self._delayed.keep(reported_s, *self._columns())
        self._advance_and_read(now_s)
        self._delayed.keep(now_s, *self._columns())

    def _columns(self) -> tuple[IntArray, FloatArray, IntArray, IntArray, FloatArray]:
        """Copies of what was read last: group columns, and residents with their offsets."""
        residents = self._residents
        return (
            self._ints.copy(), self._floats.copy(), self._offset.copy(),
            self._resident_ints[:residents].copy(), self._resident_floats[:residents].copy(),
        )  # fmt: skip

    def _advance_and_read(self, now_s: float) -> None:
        self._residents = R.advance_and_read(
            self._groups.state, now_s, self._ints, self._floats, self._offset, self._resident_ints, self._resident_floats
        )
        if now_s >= self.ranks.due_s:
            self.ranks.report(now_s)

    def snapshot(
        self, now_s: float, breaker_allows: BoolArray, breaker_state: IntArray, hold_queue: int, hold_limit: int
    ) -> ClusterSnapshot:
        """The view at `now_s`, for which `advance_and_read` was called last."""
        groups = self._groups
        ints, floats, offset, resident_ints, resident_floats = self._columns()
        report_age_s = self._report_age_s
        if self._delayed is not None:
            report_age_s = np.full(len(offset) - 1, self._delayed.apply(now_s, ints, floats, offset, resident_ints, resident_floats))
        waiting, flags = ints[R.R_WAITING], groups.flags
        is_up, is_draining, accepts = availability(
            flags[PARKED], flags[DETECTED_DOWN], flags[DRAINING], breaker_allows, waiting, self._queue_limit
        )
        return ClusterSnapshot(
            now_s=now_s,
            is_up=is_up,
            accepts=accepts,
            is_draining=is_draining,
            running=ints[R.R_RUNNING],
            waiting=waiting,
            running_limit=self._running_limit,
            queue_limit=self._queue_limit,
            kv_blocks_free=ints[R.R_BLOCKS_FREE],
            kv_blocks_total=ints[R.R_BLOCKS_TOTAL],
            kv_block_tokens=groups.limits.kv_block_tokens,
            prefill_backlog_tokens=ints[R.R_BACKLOG_TOKENS],
            decode_kv_tokens=ints[R.R_DECODE_KV],
            decoding=ints[R.R_DECODING],
            step_s=floats[R.R_STEP_NOW_S],
            step_left_s=floats[R.R_STEP_LEFT_S],
            correction=floats[R.R_CORRECTION],
            oldest_wait_s=floats[R.R_OLDEST_WAIT_S],
            breaker_state=breaker_state,
            report_age_s=report_age_s,
            pause_left_s=floats[R.R_PAUSE_LEFT_S],
            plan_corner=groups.corners.copy(),
            rank_busy_fraction=self.ranks.rank_busy,
            capability=self.capability,
            usd_per_hour=self.usd_per_hour,
            residents=Residents(offset, resident_ints, resident_floats),
            hold_queue=hold_queue,
            hold_queue_limit=hold_limit,
            arrival_rate_5s=self.rate_5s.per_s(now_s),
            arrival_rate_60s=self.rate_60s.per_s(now_s),
            static_profile=self.static_profile,
            rank_ratio=self.ranks.rank_ratio,
            correction_std=self.ranks.std,
            class_ratio=self.class_experience.ratio,
        )
