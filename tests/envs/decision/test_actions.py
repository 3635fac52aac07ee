"""Candidates and masks: never empty, in step with the tables they index, legal to carry out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.cluster.cluster_process import ClusterProcess
from envs.cluster.faults import FaultEvent, FaultKind
from envs.decision.actions import CORNER_COUNT, MOVE_COLUMNS, route_commands, route_mask
from envs.decision.observation import MOVE_FEATURES
from envs.decision.split_planner import CORNERS
from envs.domain.commands import CommandKind
from tests.envs import small_worlds as W
from tests.envs.small_worlds import ALL, RandomLegal, play, traffic, world


def test_constants_agree_with_what_they_count():
    assert len(CORNERS) == CORNER_COUNT
    assert len(MOVE_FEATURES) == MOVE_COLUMNS


@pytest.mark.fault("K02")
@given(st.lists(st.booleans(), max_size=20), st.integers(0, 5), st.integers(0, 5), st.booleans())
def test_a_route_mask_is_never_empty_and_holds_only_where_there_is_room(accepts, held, limit, may_hold):
    mask = route_mask(np.array(accepts, np.bool_), held, limit, may_hold)
    assert mask[-1] and mask.any()
    assert mask[-2] == (may_hold and held < limit)
    assert mask[:-2].tolist() == accepts


def test_route_commands_are_groups_then_hold_then_refuse():
    kinds = [command.kind for command in route_commands(3)]
    assert kinds == [CommandKind.ROUTE] * 3 + [CommandKind.HOLD, CommandKind.REFUSE]
    assert [command.group_index for command in route_commands(3)[:3]] == [0, 1, 2]


@pytest.mark.fault("K02")
def test_every_listed_move_makes_sense_when_it_is_listed():
    """Under faults and random moves: keep comes first; sources are up (or parked, to be started or given away), targets
    accept and differ from their source, a migrant is resident, nobody drains the last open group, all features finite."""

    def see(process: ClusterProcess, point):
        assert point.mask.any() and len(point.mask) == len(point.commands)
        if point.decision == "route":
            return
        view, health = point.view, process.groups.health
        assert point.commands[0].kind is CommandKind.KEEP and point.mask.all() and np.isfinite(point.moves).all()
        for command in point.commands[1:]:
            g, target = command.group_index, command.target_index
            if command.kind in (CommandKind.SCALE_OUT, CommandKind.REGROUP):
                assert health[g].is_parked and not (health[g].is_starting or health[g].is_gone or health[g].detected_down)
            else:
                assert view.is_up[g]
            if command.kind in (CommandKind.MIGRATE, CommandKind.REQUEUE):
                assert view.accepts[target] and target != g
            if command.kind is CommandKind.MIGRATE:
                residents = view.residents
                assert command.argument in residents.ints[residents.offset[g] : residents.offset[g + 1], 0]
            if command.kind is CommandKind.SCALE_IN:
                assert (view.is_up & ~view.is_draining).sum() > 1
            if command.kind is CommandKind.SET_SPLIT:
                assert len(process.groups.groups[g].ranks) > 1 and 0 <= command.argument < len(CORNERS)

    faults = tuple(
        FaultEvent(kind, 2.0 + 3 * k, 4.0, W.PAIR, 0 if kind is FaultKind.LOST_RANK else -1, 2.5) for k, kind in enumerate(FaultKind)
    )
    spec = world(traffic(200, 10.0, 3), faults=faults, control_tick_s=0.5, cold_start_s=2.0, rebuild_s=0.5, drain_s=30.0)
    for seed in range(3):
        play(spec, dict.fromkeys(ALL, RandomLegal(seed)), on_point=see)
