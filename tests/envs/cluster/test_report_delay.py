"""Late reports: groups are shown as they were, our own requests as they are; the world itself runs as ever."""

from __future__ import annotations

import numpy as np
import pytest

from envs.cluster.cluster_process import ClusterProcess
from envs.cluster.report_delay import DelayedReports
from envs.cluster.world import WorldOptions
from envs.group_kernel import reading as R
from tests.envs import small_worlds as W
from tests.envs.small_worlds import PAIR, SOLO, traffic, world

DELAY_S = 0.4


class BySlot:
    """Odd requests to the single card, even ones to the pair: looks at no view, so that two worlds are routed alike."""

    def choose(self, point):
        index = SOLO if point.request.request_id % 2 else PAIR
        return index if point.mask[index] else point.view.groups + 1


def views(delay_s: float):
    """(view, requests inside each group in truth) at every decision, and the process at its end."""
    process = ClusterProcess(world(traffic(150, 6.0, 3, output_mean=120), report_delay_s=delay_s))
    seen = []
    while (point := process.next_decision()) is not None:
        inside = [[int(process.state.slot_int[g, slot, 0]) for slot in process.residents(g)] for g in range(3)]
        seen.append((point.view, inside))
        process.apply(point, BySlot().choose(point))
    return seen, process


def test_reports_are_old_and_own_requests_are_fresh():
    """Against the twin without delay: the world runs the same; what a report shows at age a is what the twin saw a seconds
    before; who is inside is known at once."""
    late, process = views(DELAY_S)
    fresh, twin = views(0.0)
    assert process.log.digest() == twin.log.digest()
    by_time = {view.now_s: view for view, _ in fresh}
    compared = 0
    for view, inside in late[10:]:
        assert (view.report_age_s == view.report_age_s[0]).all()
        assert DELAY_S - 1e-9 <= view.report_age_s[0] <= 2 * DELAY_S
        residents, offset = view.residents, view.residents.offset
        assert [set(residents.ints[offset[g] : offset[g + 1], 0]) for g in range(3)] == [set(ids) for ids in inside]
        assert (view.running + view.waiting == [len(ids) for ids in inside]).all()
        reported = by_time.get(view.now_s - view.report_age_s[0])
        if reported is not None:
            compared += 1
            assert (view.kv_blocks_free == reported.kv_blocks_free).all()
            assert (view.step_s == reported.step_s).all() and (view.oldest_wait_s == reported.oldest_wait_s).all()
    assert compared > 20
    assert (fresh[50][0].report_age_s == 0.0).all()


def test_progress_is_the_reports_and_newcomers_wait():
    """Tokens of residents never exceed the truth; a request sent since the report counts as waiting with its whole prompt."""
    late, _ = views(DELAY_S)
    fresh, _ = views(0.0)
    newcomers = behind = 0
    for (view, _), (true, _) in zip(late, fresh, strict=True):
        made = dict(zip(true.residents.ints[:, 0], true.residents.ints[:, 3], strict=True))
        for row in view.residents.ints:
            assert row[3] <= made[row[0]]
            behind += row[3] < made[row[0]]
            newcomers += row[5] == 0 and row[4] == row[2]
        assert view.prefill_backlog_tokens.sum() == view.residents.ints[:, 4].sum()
        decoding = (view.residents.ints[:, 5] == 1) & (view.residents.ints[:, 4] == 0)
        assert view.decoding.sum() == decoding.sum()
    assert newcomers > 20 and behind > 100


def test_an_idle_gap_is_looked_into():
    """Two requests 3 s apart: the second's view is exactly the delay old, not as old as the last look at the groups."""
    process = ClusterProcess(world(W.trace([0.0, 3.0], 500, 400), report_delay_s=0.2))
    process.apply(process.next_decision(), PAIR)
    view = process.next_decision().view
    assert view.report_age_s[0] == pytest.approx(0.2)
    assert view.residents.ints[0, 3] > 10


def test_kept_reports_are_bounded():
    reports = DelayedReports(50.0, 1, kept_max=16)
    for i in range(200):
        empty = np.zeros((0, 6), np.int64)
        reports.keep(i * 0.1, np.zeros((R.READ_INTS, 1), np.int64), np.zeros((R.READ_FLOATS, 1)), np.zeros(2, np.int64), empty, empty * 1.0)
    assert len(reports._kept) <= 16 and reports._kept[0][0] == 0.0


def test_bad_delays_are_refused():
    with pytest.raises(ValueError, match="report_delay_s=-1"):
        WorldOptions(report_delay_s=-1)
