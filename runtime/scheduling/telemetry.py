"""From what we have in flight ourselves and what groups report to the `ClusterSnapshot` that schedulers see, as in simulation.

Own counts come first and are always fresh; what is reported has an age. A group that has not reported, or not lately, is shown by what
we know of it: its declared memory less what our own calls hold, which is neither idle nor saturated.
"""

from __future__ import annotations

import math

import numpy as np

from envs.decision import group_model
from envs.decision.arrival_rate import ArrivalRate
from envs.decision.availability import availability
from envs.decision.class_experience import ClassExperience
from envs.decision.group_model import GroupModel
from envs.decision.rank_experience import RankExperience
from envs.decision.shared_pace import mean_variance, shrink
from envs.decision.split_planner import CORNERS
from envs.decision.traffic_experience import TrafficExperience
from envs.domain.plans import SplitPlan, TpGroup
from envs.domain.snapshot import BoolArray, ClusterSnapshot, FloatArray, IntArray
from envs.group_kernel import layout as L
from envs.group_kernel import reading as R
from envs.perf_model.compiled import kernel
from envs.scenario.cluster_spec import ClusterSpec
from runtime.backends.emulated_kernel import KernelSettings, kernel_of, kv_tokens, plan_of
from runtime.backends.interface import GroupReport
from runtime.scheduling.in_flight import InFlight

STALE_S = 2.0
GAPS_TRUSTED, BURST_MAX = 20, 16.0
GAPS_KEPT = 200  # so many gaps between tokens make a group's pace, where it reports none
SHRUNK_EVERY = 64  # gaps
CORRECTION_MIN, CORRECTION_MAX = 0.05, 20.0


INTS, FLOATS = 7, 5
(I_RUNNING, I_WAITING, I_FREE, I_TOTAL, I_BACKLOG, I_DECODE_KV, I_DECODING) = range(INTS)
(F_STEP_S, F_STEP_LEFT_S, F_CORRECTION, F_AGE_S, F_PAUSE_LEFT_S) = range(FLOATS)
AGE_MAX_S = 1e6  # of a group that never reported


@kernel
def _columns(now_s, reported, heard, has_pace, blocks, foreign, offset, rows, block_tokens, ints, floats):
    """Group columns of a snapshot from our own rows and what was reported; see `Telemetry`."""
    measured = 0
    pace = 0.0
    for g in range(reported.shape[0]):
        if has_pace[g]:
            measured += 1
            pace += math.log(heard[2, g])
    for g in range(reported.shape[0]):
        age_s = now_s - reported[g]
        is_fresh = age_s <= STALE_S
        age_s = min(max(age_s, 0.0), AGE_MAX_S)
        running = waiting = backlog = kv = decoding = held = 0
        for i in range(offset[g], offset[g + 1]):
            left = rows[i, R.V_PREFILL_LEFT]
            backlog += left
            if rows[i, R.V_ADMITTED] == 1:
                running += 1
                tokens = rows[i, R.V_PROMPT] + rows[i, R.V_GENERATED]
                held += -(-(tokens - left) // block_tokens)
                if left == 0:
                    decoding += 1
                    kv += tokens - 1
            else:
                waiting += 1
        ints[I_RUNNING, g] = running + (foreign[0, g] if is_fresh else 0)
        ints[I_WAITING, g] = waiting + (foreign[1, g] if is_fresh else 0)
        ints[I_FREE, g] = blocks[0, g] if is_fresh else max(0, blocks[1, g] - held)
        ints[I_TOTAL, g] = blocks[1, g]
        ints[I_BACKLOG, g] = backlog
        ints[I_DECODE_KV, g] = kv
        ints[I_DECODING, g] = decoding
        floats[F_STEP_S, g] = heard[0, g] if is_fresh else 0.0
        floats[F_STEP_LEFT_S, g] = max(0.0, heard[1, g] - age_s) if is_fresh else 0.0
        # a newcomer is taken for as far off as the others are (K13)
        floats[F_CORRECTION, g] = heard[2, g] if has_pace[g] or measured == 0 else math.exp(pace / measured)
        floats[F_AGE_S, g] = age_s
        floats[F_PAUSE_LEFT_S, g] = max(0.0, heard[3, g] - age_s) if is_fresh else 0.0


class Telemetry:
    """Builds snapshots. `flights` holds what is in flight, `experience` and `classes` what past answers taught."""

    def __init__(
        self, cluster: ClusterSpec, settings: KernelSettings | None = None, limit_multiplier: float = 1.0, head_start_s: float = 2.0
    ) -> None:
        self.cluster, self.groups, self._settings = cluster, cluster.groups, settings or KernelSettings()
        count = len(self.groups)
        ranks = max(len(group.ranks) for group in self.groups)
        self.model = GroupModel(L.allocate(count, ranks, 1))
        self.model.state.group_int[:, L.GI_CHUNK_MAX] = self._settings.chunk_tokens_max
        self.kv_tokens = np.zeros(count, np.int64)  # tokens of KV of an empty group: declared, then as reported
        self._corner = np.zeros(count, np.int64)
        for g in range(count):
            self._declare(g)
        self.flights = InFlight(count)
        self.ranks = RankExperience(self.model)
        self.classes = ClassExperience(count)
        self.experience = TrafficExperience(cluster.model, self.model.state, limit_multiplier, head_start_s)
        self.rate_5s, self.rate_60s = ArrivalRate(5.0), ArrivalRate(60.0)
        self.is_draining = np.zeros(count, np.bool_)
        self.is_parked = np.array(cluster.parked, np.bool_)
        self.joined: dict[int, int] = {}  # groups that are no more -> the group that has their ranks
        self.reports: list[GroupReport | None] = [None] * count
        self._usd_per_hour = np.array([sum(place.gpu.usd_per_hour for place in group.ranks) for group in self.groups])
        self._static = group_model.static_profiles(self.groups, [()] * count)
        self._refer()
        limits = cluster.limits
        self._running_limit = np.full(count, limits.max_running)
        self._queue_limit = np.full(count, limits.queue_limit)
        self._reported = np.full(count, -np.inf)  # when
        self._heard = np.zeros((4, count))  # step_s, step_left_s, correction, pause_left_s as reported
        self._heard[2] = 1.0
        self._gaps = [0] * count
        self._seen = [(1.0, 1.0)] * count  # mean and mean square of the last gaps, over what they were declared to be
        self._pace_var = np.ones(count)
        self._turn = 0
        self._has_pace = np.zeros(count, np.bool_)  # whose correction anybody has measured
        self._blocks = np.stack([self.kv_tokens // limits.kv_block_tokens] * 2)  # free, total
        self._foreign = np.zeros((2, count), np.int64)  # running and waiting that are not ours

    def _declare(self, g: int) -> None:
        """Write what is declared of group `g` into the schedulers' model."""
        group = self.groups[g]
        plan = plan_of(group, self._settings.corner)
        self.model.write_group(g, group)
        for slot in (0, 1):
            self.model.write_plan(g, slot, group, plan)
        self.kv_tokens[g] = kv_tokens(kernel_of(group, self.cluster.limits, self._settings, 0.0))
        self._corner[g] = CORNERS.index(self._settings.corner)

    def fits(self, tokens: int) -> BoolArray:
        """Groups whose empty pool holds so many tokens, shape (groups,)."""
        return np.asarray(self.kv_tokens >= tokens)

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
            self.classes.observe(now_s, g, class_index, expected_s, seen_s)

    def gap_seen(self, g: int, gap_s: float, declared_s: float) -> None:
        """Two tokens of a stream of group `g` came so far apart, where its declared hardware takes `declared_s`; tells its pace where the
        group does not: long before an answer ends. O(1)."""
        report = self.reports[g]
        if declared_s <= 0.0 or (report is not None and report.correction is not None):
            return
        mean, square_mean = self._seen[g]
        seen = gap_s / declared_s  # a mean, since engines hand over several tokens at once
        if self._gaps[g] >= GAPS_TRUSTED:
            seen = min(seen, BURST_MAX * mean)  # one hiccup of this machine is not the group's
        self._gaps[g] = gaps = min(self._gaps[g] + 1, GAPS_KEPT)
        self._turn = (self._turn + 1) % SHRUNK_EVERY
        self._seen[g] = mean + (seen - mean) / gaps, square_mean + (seen * seen - square_mean) / gaps
        self._has_pace[g] = True
        if gaps < GAPS_TRUSTED or not self._turn:
            self._shrink_paces()

    def _shrink_paces(self) -> None:
        """Take paces that differ within their noise for alike; the streams of one step are one measurement."""
        told = [report is not None and report.correction is not None for report in self.reports]
        measured = (np.array(self._gaps) > 0) & ~np.array(told)
        paces = np.clip([mean for mean, _ in self._seen], CORRECTION_MIN, CORRECTION_MAX)
        for g in np.flatnonzero(measured).tolist():
            together = max(1, len(self.flights.running[g]))
            self._pace_var[g] = mean_variance(*self._seen[g], self._gaps[g] / together)
        found = np.log(paces)
        shrink(np.log(paces), self._pace_var, measured, found)
        self._heard[2, measured] = np.exp(found)[measured]

    def corner(self, g: int) -> int:
        """Of the split in force, an index into CORNERS; -1 unknown."""
        return int(self._corner[g])

    def take_plan(self, g: int, plan: SplitPlan, corner: int) -> None:
        """New calls of group `g` get another split: predictions follow it."""
        for slot in (0, 1):
            self.model.write_plan(g, slot, self.groups[g], plan)
        self._corner[g] = corner
        self._refer()

    def _refer(self) -> None:
        """What a usual step takes has changed."""
        reference_s, self._capability = self.model.usual_step()
        self.ranks.refer_to(reference_s)

    def take_group(self, g: int, group: TpGroup) -> None:
        """Other hardware stands behind group `g`, which does not run: only what is declared is known of it, its pace is not."""
        self.groups = (*self.groups[:g], group, *self.groups[g + 1 :])  # a new one: planning beside us holds the old one
        self._declare(g)
        self._blocks[:, g] = self.kv_tokens[g] // self.cluster.limits.kv_block_tokens
        self._static = group_model.static_profiles(self.groups, [()] * len(self.groups))
        self._heard[2, g], self._has_pace[g], self._gaps[g], self._seen[g], self._pace_var[g] = 1.0, False, 0, (1.0, 1.0), 1.0
        self.forget(g)
        self._refer()

    def gave_ranks(self, g: int, target: int) -> None:
        """Group `g` is no more: its ranks serve in `target`."""
        self.joined[g] = target
        self.is_parked[g] = False
        self.kv_tokens[g] = 0  # no call fits into it any more

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
        flights = self.flights
        for g in range(count):
            if now_s - self._reported[g] > STALE_S and flights.waiting[g]:
                flights.guess_admissions(g, int(self._running_limit[g]))
        residents = flights.residents()
        ints, floats = np.empty((INTS, count), np.int64), np.empty((FLOATS, count))
        _columns(
            now_s, self._reported, self._heard, self._has_pace, self._blocks, self._foreign, residents.offset, residents.ints,
            self.cluster.limits.kv_block_tokens, ints, floats,
        )  # fmt: skip
        waiting = ints[I_WAITING]
        is_up, is_draining, accepts = availability(self.is_parked, ~is_alive, self.is_draining, breaker_allows, waiting, self._queue_limit)
        return ClusterSnapshot(
            now_s=now_s,
            is_up=is_up,
            accepts=accepts,
            is_draining=is_draining,
            running=ints[I_RUNNING],
            waiting=waiting,
            running_limit=self._running_limit,
            queue_limit=self._queue_limit,
            kv_blocks_free=ints[I_FREE],
            kv_blocks_total=ints[I_TOTAL],
            kv_block_tokens=self.cluster.limits.kv_block_tokens,
            prefill_backlog_tokens=ints[I_BACKLOG],
            decode_kv_tokens=ints[I_DECODE_KV],
            decoding=ints[I_DECODING],
            step_s=floats[F_STEP_S],
            step_left_s=floats[F_STEP_LEFT_S],
            correction=floats[F_CORRECTION],
            oldest_wait_s=self._oldest_waits(now_s),
            breaker_state=breaker_state,
            report_age_s=floats[F_AGE_S],
            pause_left_s=floats[F_PAUSE_LEFT_S],
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

    def _oldest_waits(self, now_s: float) -> FloatArray:
        oldest = [min((flight.sent_s for flight in waiting), default=now_s) for waiting in self.flights.waiting]
        return np.maximum(0.0, now_s - np.array(oldest))
