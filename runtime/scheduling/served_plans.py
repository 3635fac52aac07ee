"""Which split each group runs and what it does with its time, as it reports it; and from that what is declared to split and rebalance
decisions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from envs.decision import group_model
from envs.decision.move_candidates import DeclaredHealth
from envs.decision.split_planner import CORNERS
from envs.domain.plans import SplitPlan, TpGroup
from envs.domain.snapshot import BoolArray, FloatArray
from envs.group_kernel import reading as R
from envs.perf_model import memory_fit
from runtime.backends.emulated_kernel import KernelSettings, plan_of
from runtime.backends.interface import GroupReport, PlanReport
from runtime.scheduling.telemetry import Telemetry

RATE_MEAN_S = 2.0  # time constant of what was done "lately"
UNKNOWN_CORNER = -1
REPORT_LATE_S = 1.0
MEASURED_WEIGHT = 0.3


@dataclass(slots=True)
class WorkRates:
    """Shares of the last seconds, per rank: computing, and waiting for memory; and bytes of weights and KV read per second, all ranks."""

    compute: FloatArray
    stall: FloatArray
    bytes_per_s: float


class ServedPlans:
    """`plans`: of each group, the one that new calls get, in the scheduler's terms. `rates`: None where a group does not tell."""

    def __init__(self, telemetry: Telemetry, now_s: Callable[[], float], settings: KernelSettings | None = None) -> None:
        self._telemetry, self._now_s, self._settings = telemetry, now_s, settings or KernelSettings()
        count = len(telemetry.groups)
        self.plans: list[SplitPlan] = [self.plan_at_start(group) for group in telemetry.groups]
        self.rates: list[WorkRates | None] = [None] * count
        self.cold_start_s: float | None = None  # measured
        self._commanded: list[tuple[int, int]] = [(0, UNKNOWN_CORNER)] * count  # version and corner of the last commanded split
        self._before: list[SplitPlan] = list(self.plans)
        self._switched_s = [-math.inf] * count
        self._last: list[GroupReport | None] = [None] * count
        self._fell_back_s = np.full(count, -math.inf)
        self._split_s: dict[int, float] = {}  # measured pause of a change of split

    def take_report(self, g: int, report: GroupReport) -> None:
        """What group `g` says of its plan and work."""
        if report.plan is not None:
            self._take_plan(g, report.plan)
        last = self._last[g]
        if report.work is None or (last is not None and report.at_s <= last.at_s):
            return
        self._last[g] = report
        if last is not None and last.work is not None and report.work.passes >= last.work.passes:
            self._follow(g, last, report)

    def _take_plan(self, g: int, said: PlanReport) -> None:
        version, corner = self._commanded[g]
        if said.version < version and self._now_s() - self._switched_s[g] < REPORT_LATE_S:
            return  # said before the last command; later on it is an engine that began to count anew
        corner = corner if said.version == version else self._corner_of_start(g, said)
        plan = self._plan_of(g, said)
        if (plan.query_heads, plan.mlp_blocks, plan.vocabulary_rows) != _widths(self.plans[g]) or corner != self._telemetry.corner(g):
            self.set_plan(g, plan, corner)

    def _corner_of_start(self, g: int, said: PlanReport) -> int:
        """An emulated group starts with its corner's plan; what an engine chose has no corner."""
        is_same = said.version == 1 and _widths(self._plan_of(g, said)) == _widths(self.plan_at_start(self._telemetry.groups[g]))
        return CORNERS.index(self._settings.corner) if is_same else UNKNOWN_CORNER

    def _plan_of(self, g: int, said: PlanReport) -> SplitPlan:
        """Widths in the units of the cluster file's model that come nearest to what is reported."""
        model, block = self._telemetry.groups[g].model, self.plans[g].mlp_block
        heads = memory_fit.apportion(model.query_heads, said.query_heads)
        blocks = memory_fit.apportion(model.mlp_width // block, said.mlp_columns)
        return SplitPlan(heads, blocks, memory_fit.apportion(model.vocabulary, said.vocabulary_rows), block)

    def set_plan(self, g: int, plan: SplitPlan, corner: int) -> None:
        """New calls of group `g` get `plan`: let the schedulers' model know."""
        self._before[g], self._switched_s[g] = self.plans[g], self._now_s()
        self.plans[g] = plan
        self._telemetry.take_plan(g, plan, corner)

    def commanded(self, g: int, version: int, plan: SplitPlan, corner: int, paused_s: float) -> None:
        """A commanded split is in force as the group's plan `version`."""
        self._commanded[g] = version, corner
        self.set_plan(g, plan, corner)
        known = self._split_s.get(g)
        self._split_s[g] = paused_s if known is None else known + MEASURED_WEIGHT * (paused_s - known)

    def plan_at_start(self, group: TpGroup) -> SplitPlan:
        """The plan that a group is believed to start with. Raises: InfeasibleSplit."""
        return plan_of(group, self._settings.corner)

    def take_group(self, g: int, group: TpGroup) -> None:
        """Other hardware stands behind group `g`, which does not run. Raises: InfeasibleSplit; then nothing has changed."""
        plan = self.plan_at_start(group)
        self._telemetry.take_group(g, group)
        self.plans[g] = self._before[g] = plan
        self._switched_s[g] = self._fell_back_s[g] = -math.inf
        self._split_s.pop(g, None)
        self.forget(g)

    def forget(self, g: int) -> None:
        """Another process stands behind group `g`: its versions begin again."""
        self._commanded[g] = 0, UNKNOWN_CORNER
        self._last[g] = self.rates[g] = None

    def fell_back(self, g: int) -> None:
        self._fell_back_s[g] = self._now_s()

    def started(self, took_s: float) -> None:
        """A group took so long to come up."""
        known = self.cold_start_s
        self.cold_start_s = took_s if known is None else known + MEASURED_WEIGHT * (took_s - known)

    def split_price_s(self, g: int) -> float | None:
        """What changes of group `g`'s split have cost so far, s of pause; None before the first."""
        return self._split_s.get(g)

    def members(self, g: int) -> BoolArray:
        """Ranks that the group counts as its own now, (ranks,); all where it does not tell."""
        ranks = len(self._telemetry.groups[g].ranks)
        report = self._telemetry.reports[g]
        if report is None or report.plan is None:
            return np.ones(ranks, np.bool_)
        return np.isin(np.arange(ranks), report.plan.members)

    def speed_factors(self, g: int) -> FloatArray:
        return self._telemetry.ranks.speed_factors(g, ~self.members(g))

    def declared_health(self, may_start: BoolArray, cold_start_s: float, rebuild_s: float, fall_back_stay_s: float) -> DeclaredHealth:
        """may_start (groups,): parked ones that could be started; the rest are prices and stays until something was measured."""
        groups, fraction = self._telemetry.groups, self._settings.memory_fraction
        return DeclaredHealth(
            is_parked=may_start,
            is_draining=self._telemetry.is_draining.copy(),
            speed_factors=tuple(self.speed_factors(g) for g in range(len(groups))),
            cold_start_s=cold_start_s if self.cold_start_s is None else self.cold_start_s,
            rebuild_s=rebuild_s,
            overlaps=tuple(group_model.overlap(group, plan, fraction) for group, plan in zip(groups, self.plans, strict=True)),
            older=tuple((self._before[g], self._older_tokens(g)) for g in range(len(groups))),
            may_restore=self._now_s() >= self._fell_back_s + fall_back_stay_s,
        )

    def _older_tokens(self, g: int) -> int:
        """KV tokens of calls that came before the last switch: they keep the plan before."""
        flights = self._telemetry.flights
        old = [flight for flight in flights.running[g] if flight.sent_s < self._switched_s[g]]
        return sum(flight.request.prompt_tokens + flights.generated(flight) for flight in old)

    def _follow(self, g: int, last: GroupReport, report: GroupReport) -> None:
        assert last.work is not None and report.work is not None
        elapsed_s = report.at_s - last.at_s
        weight = 1.0 - math.exp(-elapsed_s / RATE_MEAN_S)
        compute = np.diff([last.work.compute_s, report.work.compute_s], axis=0)[0] / elapsed_s
        stall = np.diff([last.work.memory_stall_s, report.work.memory_stall_s], axis=0)[0] / elapsed_s
        group, plan = self._telemetry.groups[g], self.plans[g]
        kv_tokens = float(self._telemetry.flights.ints_of(g)[:, [R.V_PROMPT, R.V_GENERATED]].sum())
        a_pass = memory_fit.weight_bytes(group.model, plan).sum() + kv_tokens * memory_fit.kv_bytes_per_token(group.model, plan).sum()
        bytes_per_s = (report.work.passes - last.work.passes) * float(a_pass) / elapsed_s
        old = self.rates[g]
        if old is None:
            self.rates[g] = WorkRates(compute, stall, bytes_per_s)
            return
        old.compute = old.compute + weight * (compute - old.compute)
        old.stall = old.stall + weight * (stall - old.stall)
        old.bytes_per_s += weight * (bytes_per_s - old.bytes_per_s)


def _widths(plan: SplitPlan) -> tuple[tuple[int, ...], ...]:
    return plan.query_heads, plan.mlp_blocks, plan.vocabulary_rows
