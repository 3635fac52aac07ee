"""From what we have in flight ourselves and what groups report to the `ClusterSnapshot` that schedulers see, as in simulation.

Own counts come first and are always fresh; what is reported has an age. A group that has not reported, or not lately, is shown by what
we know of it: its declared memory less what our own calls hold, which is neither idle nor saturated.
"""

from __future__ import annotations

import numpy as np

from envs.decision import group_model
from envs.decision.arrival_rate import ArrivalRate
from envs.decision.class_experience import ClassExperience
from envs.decision.group_model import GroupModel
from envs.decision.rank_experience import RankExperience
from envs.decision.split_planner import CORNERS
from envs.decision.traffic_experience import TrafficExperience
from envs.domain.snapshot import BoolArray, ClusterSnapshot, FloatArray, IntArray
from envs.group_kernel import layout as L
from envs.group_kernel import reading as R
from envs.scenario.cluster_spec import ClusterSpec
from runtime.backends.emulated_kernel import KernelSettings, kernel_of, kv_tokens, plan_of
from runtime.backends.interface import GroupReport
from runtime.scheduling.in_flight import InFlight

STALE_S = 2.0
OWN_CORRECTION_SHARE = 0.1  # of one answer in a group's step-time ratio, where the group reports none
CORRECTION_MIN, CORRECTION_MAX = 0.05, 20.0


class Telemetry:
    """Builds snapshots. `flights` holds what is in flight, `experience` and `classes` what past answers taught."""

    def __init__(self, cluster: ClusterSpec, settings: KernelSettings | None = None, limit_multiplier: float = 1.0) -> None:
        self.cluster, self.groups = cluster, cluster.groups
        chosen = settings or KernelSettings()
        count = len(self.groups)
        ranks = max(len(group.ranks) for group in self.groups)
        self.model = GroupModel(L.allocate(count, ranks, 1))
        self.model.state.group_int[:, L.GI_CHUNK_MAX] = chosen.chunk_tokens_max
        self.kv_tokens = np.zeros(count, np.int64)  # tokens of KV of an empty group: declared, then as reported
        for g, group in enumerate(self.groups):
            plan = plan_of(group, chosen.corner)
            self.model.write_group(g, group)
            for slot in (0, 1):
                self.model.write_plan(g, slot, group, plan)
            self.kv_tokens[g] = kv_tokens(kernel_of(group, cluster.limits, chosen, 0.0))
        self.flights = InFlight(count)
        self.ranks = RankExperience(self.model)
        self.classes = ClassExperience(count)
        self.experience = TrafficExperience(cluster.model, self.model.state, limit_multiplier)
        self.rate_5s, self.rate_60s = ArrivalRate(5.0), ArrivalRate(60.0)
        self.is_draining = np.zeros(count, np.bool_)
        self.is_parked = np.array(cluster.parked, np.bool_)
        self.reports: list[GroupReport | None] = [None] * count
        self._corner = np.full(count, CORNERS.index(chosen.corner), np.int64)
        self._usd_per_hour = np.array([sum(place.gpu.usd_per_hour for place in group.ranks) for group in self.groups])
        self._static = group_model.static_profiles(self.groups, [()] * count)
        reference_s, self._capability = self.model.usual_step()
        self.ranks.refer_to(reference_s)
        limits = cluster.limits
        self._running_limit = np.full(count, limits.max_running)
        self._queue_limit = np.full(count, limits.queue_limit)
        self._reported = np.full(count, -np.inf)  # when
        self._heard = np.zeros((4, count))  # step_s, step_left_s, correction, pause_left_s as reported
        self._heard[2] = 1.0
        self._has_pace = np.zeros(count, np.bool_)  # whose correction anybody has measured
        self._blocks = np.stack([self.kv_tokens // limits.kv_block_tokens] * 2)  # free, total
        self._foreign = np.zeros((2, count), np.int64)  # running and waiting that are not ours

    def arrived(self, now_s: float, class_index: int, prompt_tokens: int) -> None:
        self.rate_5s.count(now_s)
        self.rate_60s.count(now_s)
        self.experience.observe_arrival(class_index, max(1, prompt_tokens))

    def take_report(self, g: int, report: GroupReport) -> None:
        """Take in what group `g` says; an older one than the last is dropped."""
        old = self.reports[g]
        if old is not None and report.at_s <= old.at_s:
            return
        self.reports[g] = report
        elapsed_s = report.at_s - old.at_s if old is not None else 0.0
        self._reported[g] = report.at_s
        said = float(self._heard[2, g]) if report.correction is None else report.correction
        self._has_pace[g] |= report.correction is not None
        correction = min(CORRECTION_MAX, max(CORRECTION_MIN, said))
        self._heard[:, g] = report.step_s, report.step_left_s, correction, report.pause_left_s
        self._take_blocks(g, report)
        if report.progress is not None:
            self.flights.take_progress(g, report.progress)
        own = len(self.flights.running[g]), len(self.flights.waiting[g])
        self._foreign[:, g] = max(0, report.running - own[0]), max(0, report.running + report.waiting - sum(own))
        self._foreign[1, g] = max(0, self._foreign[1, g] - self._foreign[0, g])
        times = report.rank_times
        if times is not None:
            measured = np.stack([times.attention_s, times.mlp_s], axis=1)
            self.ranks.observe(g, times.tokens, times.pairs, times.kv_tokens, measured, elapsed_s)

    def _take_blocks(self, g: int, report: GroupReport) -> None:
        tokens = self.cluster.limits.kv_block_tokens
        if report.kv_blocks_total is not None:
            self._blocks[1, g] = report.kv_blocks_total
            self.kv_tokens[g] = report.kv_blocks_total * tokens
        if report.kv_blocks_free is not None:
            self._blocks[0, g] = report.kv_blocks_free
        elif report.kv_used_fraction is not None:
            self._blocks[0, g] = int(self._blocks[1, g] * (1.0 - min(1.0, max(0.0, report.kv_used_fraction))))

    def answer_ended(
        self,
        now_s: float,
        g: int,
        class_index: int,
        output_tokens: int,
        expected_s: tuple[float, float] | None,
        seen_s: tuple[float, float],
    ) -> None:
        """A whole answer came from group `g`: its length, and its TTFT and TPOT against what was predicted."""
        if output_tokens >= 1:
            self.experience.observe_completion(class_index, output_tokens)
            self.experience.refresh_if_due()
        if expected_s is not None:
            report = self.reports[g]
            if output_tokens > 1 and (report is None or report.correction is None):  # nobody else says how fast it is
                seen = min(CORRECTION_MAX, max(CORRECTION_MIN, self._heard[2, g] * seen_s[1] / max(expected_s[1], 1e-6)))
                share = OWN_CORRECTION_SHARE if self._has_pace[g] else 1.0
                self._heard[2, g] += share * (seen - self._heard[2, g])
                self._has_pace[g] = True
            self.classes.observe(now_s, g, class_index, expected_s, seen_s)

    def forget(self, g: int) -> None:
        """Another process stands behind group `g`: what it reported is void, but for its pace, which is the hardware's."""
        self.reports[g] = None
        self._reported[g] = -np.inf
        self._heard[[0, 1, 3], g] = 0.0
        self._blocks[0, g] = self._blocks[1, g]
        self._foreign[:, g] = 0
        self.ranks.forget(g)

    def snapshot(
        self, now_s: float, is_alive: BoolArray, breaker_allows: BoolArray, breaker_state: IntArray, hold_queue: int, hold_limit: int
    ) -> ClusterSnapshot:
        """The view at `now_s`. is_alive (groups,): processes that are not known to be gone."""
        count = len(self.groups)
        age_s = now_s - self._reported
        is_stale = age_s > STALE_S
        for g in np.flatnonzero(is_stale).tolist():
            self.flights.guess_admissions(g, int(self._running_limit[g]))
        residents = self.flights.residents()
        running = np.fromiter(map(len, self.flights.running), np.int64, count)
        waiting = np.fromiter(map(len, self.flights.waiting), np.int64, count)
        backlog, decode_kv, decoding, held = self._sums(residents.ints, residents.offset)
        fresh = ~is_stale
        step_s, step_left_s, correction, pause_left_s = self._heard.copy()
        if not self._has_pace.all() and self._has_pace.any():  # a newcomer is taken for as far off as the others are (K13)
            correction[~self._has_pace] = np.exp(np.log(correction[self._has_pace]).mean())
        clipped_age_s = np.where(np.isfinite(age_s), np.maximum(0.0, age_s), 1e6)
        own_free = np.maximum(0, self._blocks[1] - held)
        is_up = is_alive & ~self.is_parked
        waiting = waiting + np.where(fresh, self._foreign[1], 0)
        return ClusterSnapshot(
            now_s=now_s,
            is_up=is_up,
            accepts=is_up & ~self.is_draining & breaker_allows & (waiting < self._queue_limit),
            is_draining=self.is_draining.copy(),
            running=running + np.where(fresh, self._foreign[0], 0),
            waiting=waiting,
            running_limit=self._running_limit,
            queue_limit=self._queue_limit,
            kv_blocks_free=np.where(fresh, self._blocks[0], own_free),
            kv_blocks_total=self._blocks[1].copy(),
            kv_block_tokens=self.cluster.limits.kv_block_tokens,
            prefill_backlog_tokens=backlog,
            decode_kv_tokens=decode_kv,
            decoding=decoding,
            step_s=np.where(fresh, step_s, 0.0),
            step_left_s=np.where(fresh, np.maximum(0.0, step_left_s - clipped_age_s), 0.0),
            correction=correction,
            oldest_wait_s=self._oldest_waits(now_s),
            breaker_state=breaker_state,
            report_age_s=clipped_age_s,
            pause_left_s=np.where(fresh, np.maximum(0.0, pause_left_s - clipped_age_s), 0.0),
            plan_corner=self._corner.copy(),
            rank_busy_fraction=self.ranks.rank_busy,
            capability=self._capability,
            usd_per_hour=self._usd_per_hour,
            residents=residents,
            hold_queue=hold_queue,
            hold_queue_limit=hold_limit,
            arrival_rate_5s=self.rate_5s.per_s(now_s),
            arrival_rate_60s=self.rate_60s.per_s(now_s),
            static_profile=self._static,
            rank_ratio=self.ranks.rank_ratio,
            correction_std=self.ranks.std,
            class_ratio=self.classes.ratio,
        )

    def _sums(self, ints: IntArray, offset: IntArray) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """Per group: prompt tokens to compute, KV tokens read by the next decode step, sequences that decode, KV blocks our calls hold."""
        left = ints[:, R.V_PREFILL_LEFT]
        decodes = (ints[:, R.V_ADMITTED] == 1) & (left == 0)
        tokens = ints[:, R.V_PROMPT] + ints[:, R.V_GENERATED]
        block = self.cluster.limits.kv_block_tokens
        columns = np.stack(
            [left, np.where(decodes, tokens - 1, 0), decodes, np.where(ints[:, R.V_ADMITTED] == 1, -(-(tokens - left) // block), 0)]
        )
        total = np.concatenate([np.zeros((4, 1), np.int64), np.cumsum(columns, axis=1)], axis=1)
        sums = total[:, offset[1:]] - total[:, offset[:-1]]
        return sums[0], sums[1], sums[2], sums[3]

    def _oldest_waits(self, now_s: float) -> FloatArray:
        oldest = [min((flight.sent_s for flight in waiting), default=now_s) for waiting in self.flights.waiting]
        return np.maximum(0.0, now_s - np.array(oldest))
