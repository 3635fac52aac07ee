"""One simulated state, seen by the simulator and by the service's telemetry: the same observation, byte for byte."""

from __future__ import annotations

import numpy as np
import pytest

from envs.cluster.cluster_process import ClusterProcess
from envs.decision.actions import DecisionPoint
from envs.decision.observation import encode
from envs.domain.commands import Command, CommandKind
from envs.group_kernel import layout as L
from envs.group_kernel import reading as R
from envs.perf_model import step_time as ST
from runtime.backends.emulated_kernel import KernelSettings
from runtime.backends.interface import GroupReport, RankTimes
from runtime.backends.kernel_report import KernelReader
from runtime.scheduling.online_scheduler import Question, point_of
from runtime.scheduling.telemetry import Telemetry
from tests.envs import small_worlds as W


class Mirror:
    """Feeds a `Telemetry` with the events of a simulated world: what was sent where, which tokens came, what groups reported."""

    def __init__(self, process: ClusterProcess) -> None:
        self.process = process
        self.telemetry = Telemetry(process.world.cluster, KernelSettings())
        self.flights = {}
        self.ended = 0
        self.reader = KernelReader(process.state)
        for name in ("observe_arrival", "observe_completion", "refresh_if_due"):  # the same events in the same order
            self._echo(name)

    def _echo(self, name: str) -> None:
        theirs, ours = getattr(self.process.experience, name), getattr(self.telemetry.experience, name)

        def both(*args):
            theirs(*args)
            ours(*args)

        setattr(self.process.experience, name, both)
        if name == "observe_arrival":
            rates = self.telemetry.rate_5s, self.telemetry.rate_60s

            def counted(*args):
                both(*args)
                for rate in rates:
                    rate.count(self.process.env.now)

            self.process.experience.observe_arrival = counted

    def see(self, point: DecisionPoint) -> None:
        """The present: who has left, how far those inside are; one report of each group."""
        process, telemetry = self.process, self.telemetry
        for request_id in process.ended_requests[self.ended :]:
            flight = self.flights.pop(request_id, None)
            if flight is not None:
                telemetry.flights.remove(flight)
        self.ended = len(process.ended_requests)
        now_s = process.env.now
        self.reader.advance(now_s)
        names = {request_id: str(request_id) for request_id in self.flights}
        for g in range(len(process.groups.groups)):
            for row, floats in zip(self.reader.residents(g), self.reader._row_floats[self.reader._offset[g] :], strict=False):
                flight = self.flights[int(row[R.V_REQUEST])]
                if row[R.V_GENERATED]:
                    telemetry.flights.first_token(flight, float(floats[R.V_FIRST_S]))
                    telemetry.flights.tokens(flight, int(row[R.V_GENERATED]))
            report = self.reader.report(g, now_s, names)
            telemetry.take_report(g, report)
        telemetry.classes = process.telemetry.class_experience  # fed by predictions that the simulator made itself

    def sent(self, point: DecisionPoint, index: int) -> None:
        request = point.request
        if index < point.view.groups:
            key = request.arrival_s - request.service.priority * self.process.options.head_start_s
            self.flights[request.request_id] = self.telemetry.flights.add(request, str(request.request_id), index, key, point.view.now_s)

    def observe(self, point: DecisionPoint) -> tuple[np.ndarray, np.ndarray]:
        process, telemetry = self.process, self.telemetry
        groups = len(process.groups.groups)
        view = telemetry.snapshot(
            process.env.now, np.array([g not in telemetry.joined for g in range(groups)]), np.ones(groups, np.bool_),
            np.zeros(groups, np.int64), point.view.hold_queue, point.view.hold_queue_limit,
        )  # fmt: skip
        request = point.request
        fits = telemetry.kv_tokens >= process._tokens_max[request.request_id]
        question = Question(request, fits, frozenset(), bool(point.mask[groups]), point.hits)
        ours = point_of(question, view, telemetry.experience.tables)
        assert (ours.mask == point.mask).all()
        return encode(ours, groups + 2)

    def regroup(self, donor: int, target: int) -> None:
        """In both; the simulator looks at its groups' hardware again at control ticks, the service at once."""
        process, telemetry = self.process, self.telemetry
        process.moves.apply(Command(CommandKind.REGROUP, donor, target))
        process.telemetry.refresh_slow_columns()
        telemetry.take_group(target, telemetry.groups[target].with_ranks_of(telemetry.groups[donor]))
        telemetry.gave_ranks(donor, target)
        blocks = telemetry._blocks[:, target] * telemetry.cluster.limits.kv_block_tokens  # before any report: free, total
        assert (blocks == process.groups.kv_tokens[target]).all() and telemetry.kv_tokens[target] == blocks[1]


@pytest.mark.parametrize("rate_per_s", [0.5, 4.0])
def test_the_same_observation_bytes(rate_per_s):
    """Ranks' reports are left out on both sides (period beyond the world): the service gets them at other times. 300 decisions, light
    and heavy load; in the middle the spare's rank joins the single one."""
    process = ClusterProcess(W.world(W.traffic(300, rate_per_s, 5, output_mean=120), report_period_s=1e6))
    mirror, router, compared = Mirror(process), W.RouteTo(W.PAIR), 0
    mirror.telemetry.ranks.observe = lambda *args: None
    groups = len(process.groups.groups)
    while (point := process.next_decision()) is not None:
        mirror.see(point)
        theirs, ours = encode(point, groups + 2), mirror.observe(point)
        for mine, said in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(mine, said)
            assert mine.tobytes() == said.tobytes()
        index = router.choose(point) if compared % 3 else int(np.flatnonzero(point.mask)[compared % 2])
        compared += 1
        mirror.sent(point, index)
        if compared == 150:
            mirror.regroup(W.SPARE, W.SOLO)
        process.apply(point, index)
    assert compared >= 300
    view = process.view()
    assert (view.rank_ratio[W.SOLO] > 0).sum() == 2 and not view.is_up[W.SPARE]


def test_ranks_reports_end_in_the_same_ratios():
    """A rank reported twice as slow as declared: after a few reports the ratio is 2 and the model's costs are the declared ones twice."""
    process = ClusterProcess(W.world(W.traffic(50, 4.0, 5)))
    telemetry = Mirror(process).telemetry
    g, state = W.PAIR, telemetry.model.state
    declared = np.zeros((2, 2))
    costs = (telemetry.model.declared_rank_cost, state.predicted_group_cost, state.plain_residual, state.plain_slow)
    ST.rank_times(g, *costs, int(state.group_int[g, L.GI_PLAN]), 8, 0.0, 4096, declared)
    measured = declared * np.array([[1.0], [2.0]])
    for i in range(1, 20):
        times = RankTimes(8, 0.0, 4096, tuple(measured[:, 0]), tuple(measured[:, 1]))
        telemetry.take_report(g, GroupReport(float(i), 1, 0, rank_times=times))
    assert telemetry.ranks.ratio[g] == pytest.approx(np.array([[1.0, 1.0], [2.0, 2.0]]), rel=0.02)
    ratio = telemetry.experience.tables.rank_cost[g, 0, 1] / telemetry.model.declared_rank_cost[g, 0, 1]
    assert ratio == pytest.approx(2.0, rel=0.02)
