"""Overload: the lowest priority is turned away first and early, an idle cluster turns nobody away; the simulator has the same rule."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.cluster.cluster_process import ClusterProcess
from envs.decision.actions import route_point
from envs.decision.overload import OverloadControl, OverloadSettings
from envs.domain.requests import CLASS_INDEX, SERVICE_CLASSES, Request
from envs.scheduling_env import world_summary
from tests.envs import small_worlds as W
from tests.envs.small_worlds import LIMITS, Shortest, check_laws, world

CHAT, CODE, BATCH = (CLASS_INDEX[name] for name in ("chat", "code", "batch"))


@pytest.fixture(scope="module")
def idle():
    """The first decision of a world: nobody is inside."""
    return ClusterProcess(world(W.traffic(10, 8.0, 2), W.cluster(LIMITS))).next_decision()


def judge(control, idle, class_index, at_s, pause_s=0.0, prompt_tokens=300, **view):
    """What becomes of a request that comes at `at_s`, when every group does nothing before `at_s` + pause_s."""
    groups = idle.view.groups
    seen = idle.view._replace(now_s=at_s, pause_left_s=np.full(groups, pause_s), **view)
    request = Request(1, at_s, prompt_tokens, class_index)
    point = route_point(seen, idle.tables, request, np.ones(groups, np.bool_), np.zeros(groups, np.int64), True)
    return control.judge(point, SERVICE_CLASSES[class_index].priority), point


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2), st.floats(0.05, 20.0), st.floats(0.1, 20.0))
def test_an_idle_cluster_turns_nobody_away(idle, class_index, correction, ratio):
    """However slow it is, or was when it was last seen: there is nobody to wait for."""
    slow = {"correction": np.full(idle.view.groups, correction), "class_ratio": np.full_like(idle.view.class_ratio, ratio)}
    found, point = judge(OverloadControl(), idle, class_index, 10.0, **slow)
    assert found is None and point.allowed_groups.any()


def test_lower_levels_give_way_before_the_higher_one_has_to(idle):
    """Code with 1,500 tokens of prompt has 1.1 s. A wait of 0.6 s leaves it time, though not much, and is nothing to the others by
    themselves; 2 s are too long for it."""
    control = OverloadControl()
    assert judge(control, idle, BATCH, 10.0, 0.6)[0] is None, "nobody above it has asked"
    assert judge(control, idle, CODE, 10.1, 0.6, 1500)[0] is None
    assert judge(control, idle, CHAT, 10.2, 0.6)[0] == 1.0, "seconds to wait: at least one"
    assert judge(control, idle, BATCH, 10.3, 0.6)[0] is not None
    assert judge(control, idle, CODE, 10.4, 2.0, 1500)[0] is not None
    assert judge(control, idle, BATCH, 11.3, 0.0)[0] is not None, "a second after code was turned away at the earliest"
    assert judge(control, idle, BATCH, 11.5, 0.0)[0] is None
    assert control.shed == [1, 1, 2] and control.levels()[0] == (2, CODE, False)
    assert judge(control, idle, BATCH, 22.0, 2.0)[0] is None, "10 s without code protect it no more"


def test_a_group_without_time_is_taken_out_of_the_mask(idle):
    pauses_s = np.zeros(idle.view.groups)
    pauses_s[0] = 5.0
    view = idle.view._replace(pause_left_s=pauses_s)
    point = route_point(view, idle.tables, Request(1, view.now_s, 300, CODE), view.accepts, np.zeros(view.groups, np.int64), True)
    assert OverloadControl().judge(point, 2) is None
    assert not point.mask[0] and point.mask[1 : view.groups].any()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.floats(0.0, 0.4), st.floats(0.0, 3.0)), max_size=60))
def test_none_is_let_in_while_higher_ones_are_turned_away(idle, events):
    control, now_s = OverloadControl(), 100.0
    turned_away: list[tuple[float, int]] = []
    for class_index, gap_s, pause_s in events:
        now_s += gap_s
        priority = SERVICE_CLASSES[class_index].priority
        if judge(control, idle, class_index, now_s, pause_s)[0] is not None:
            turned_away.append((now_s, priority))
        else:
            assert not any(other > priority and now_s - at_s < 1.0 for at_s, other in turned_away)


def test_settings_in_a_wrong_order_are_refused():
    with pytest.raises(ValueError, match="tight_below"):
        OverloadSettings(tight_below=0.95)


def rush(sheds: bool) -> dict:
    """Three times what the groups can take, for 40 s."""
    table = replace(W.traffic(2000, 50.0, 3), class_index=np.tile([CHAT, CODE, CHAT, BATCH], 500))
    process = ClusterProcess(world(table, W.cluster(LIMITS), sheds_overload=sheds))
    process.run({"route": Shortest()})
    check_laws(process)
    return world_summary(process)


def test_the_simulator_sheds_by_the_same_rule():
    shed, whole = rush(True), rush(False)
    assert shed["failure_reasons"]["overloaded"] > 100 and "overloaded" not in whole["failure_reasons"]
    assert shed["goodput"] > 2.0 * whole["goodput"]
