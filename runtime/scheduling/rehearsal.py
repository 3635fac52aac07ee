"""What a call's way through the service computes, done once for nobody: compiled code is loaded at its first use, and on a new installation
compiled then, which takes seconds. No caller shall wait for that, nor a stream stand still."""

from __future__ import annotations

import numpy as np

from envs.decision.traffic_experience import TABLE_REFRESH_COMPLETIONS
from envs.domain.requests import Request
from envs.scenario.cluster_spec import ClusterSpec
from runtime.backends.interface import CallProgress, GroupReport, RankTimes
from runtime.scheduling.online_scheduler import OnlineScheduler, Question
from runtime.scheduling.telemetry import Telemetry


def rehearse_decision(scheduler: OnlineScheduler, groups: int, now_s: float) -> None:
    """A route decision."""
    request = Request(0, now_s, 128, 0)
    scheduler.rehearse(Question(request, np.ones(groups, np.bool_), frozenset(), True, np.zeros(groups, np.int64)))


def rehearse_answers(cluster: ClusterSpec) -> None:
    """What a group's reports and answers teach, on a telemetry that is thrown away."""
    telemetry, now_s, name = Telemetry(cluster), 1.0, "rehearsal"
    telemetry.flights.add(Request(0, now_s, 128, 0), name, 0, 0.0, now_s)
    times = (1e-3,) * len(cluster.groups[0].ranks)
    progress = (CallProgress(name, 1, 0, True),)
    for at_s in (now_s, now_s + 1.0):
        telemetry.take_report(0, GroupReport(at_s, 1, 0, rank_times=RankTimes(1, 1.0, 128, times, times), progress=progress))
    telemetry.gap_seen(0, 1e-3, 1e-3)
    for _ in range(TABLE_REFRESH_COMPLETIONS):  # the last one makes the predictor's tables anew
        telemetry.answer_ended(now_s, 0, 0, 1, (1.0, 1.0), (1.0, 1.0))
