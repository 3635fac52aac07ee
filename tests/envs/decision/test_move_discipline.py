"""Moves are bounded whatever is asked for: a budget of time, stays that grow under a swinging load, small moves first."""

from __future__ import annotations

import numpy as np
import pytest

from envs.decision.actions import MOVE_COLUMNS
from envs.decision.move_candidates import MoveCandidates
from envs.decision.move_discipline import DisciplineSettings, MoveDiscipline
from envs.domain.commands import Command, CommandKind

K = CommandKind
KEEP = Command(K.KEEP)


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def listed(*commands: Command, gains: tuple[float, ...] = ()) -> MoveCandidates:
    moves = np.zeros((len(commands) + 1, MOVE_COLUMNS))
    moves[1 : 1 + len(gains), 0] = gains
    return MoveCandidates((KEEP, *commands), np.ones(len(commands) + 1, np.bool_), moves)


def test_time_in_moves_stays_within_the_budget():
    """Asked at every second to spend 2 s on a split for an hour: at most 5 % of the hour and one move more is spent."""
    clock = Clock()
    discipline = MoveDiscipline(2, clock, DisciplineSettings(split_stay_s=0.0, stay_growth=1.0))
    spent_s, split = 0.0, Command(K.SET_SPLIT, 1)
    for _ in range(3600):
        clock.now_s += 1.0
        if discipline.judge(listed(split))[0][1]:
            discipline.made(split, 2.0)
            spent_s += 2.0
    assert 0.9 * 0.05 * 3600 <= spent_s <= 0.05 * 3600 + 2.0


def test_a_swinging_load_is_followed_ever_less():
    """A load that wants another split every 20 s gets fewer than one in ten of 180 within the hour; after a long calm it is followed
    again."""
    clock = Clock()
    discipline = MoveDiscipline(1, clock)
    made = 0
    for swing in range(180):
        clock.now_s += 20.0
        split = Command(K.SET_SPLIT, 0, argument=swing % 2)
        if discipline.judge(listed(split))[0][1]:
            discipline.made(split, 0.01)
            made += 1
    assert 3 <= made < 18
    clock.now_s += 3600.0
    for _ in range(2):
        assert discipline.judge(listed(Command(K.SET_SPLIT, 0)))[0][1]
        discipline.made(Command(K.SET_SPLIT, 0), 0.01)
        clock.now_s += 10.0


def test_a_cold_start_is_kept_until_it_was_worth_its_price():
    """30 s of start at 5 %: what was scaled out may not be scaled in for 600 s; other moves of the group are free."""
    clock = Clock()
    discipline = MoveDiscipline(2, clock)
    discipline.made(Command(K.SCALE_OUT, 1), 30.0)
    commands = (Command(K.SCALE_IN, 1), Command(K.SET_SPLIT, 1), Command(K.REQUEUE, 1, 0))
    clock.now_s += 599.0
    mask, why = discipline.judge(listed(*commands))
    assert mask.tolist() == [True, False, True, True]
    assert why[1].startswith("stay: 1 s to go")
    clock.now_s += 1.0
    assert discipline.judge(listed(*commands))[0].all()


def test_a_fleet_grows_at_once_and_shrinks_ever_more_slowly():
    """Pressed and idle in turns of 60 s for an hour: growing is never denied; of 30 wishes to shrink those are granted that stays of 30,
    60, 120, 240,
    480, 900 and 900 s leave room for."""
    clock = Clock()
    discipline = MoveDiscipline(2, clock)
    out, into, shrunk, is_out = Command(K.SCALE_OUT, 1), Command(K.SCALE_IN, 1), 0, False
    for turn in range(60):
        clock.now_s += 60.0
        wanted = into if turn % 2 else out
        if (wanted is out) == is_out:
            continue
        is_allowed = bool(discipline.judge(listed(wanted))[0][1])
        assert is_allowed or wanted is into
        if is_allowed:
            discipline.made(wanted, 1.0)
            is_out = wanted is out
            shrunk += wanted is into
    assert 2 <= shrunk <= 7


def test_a_migrated_call_stays_and_its_target_pays():
    clock = Clock()
    discipline = MoveDiscipline(3, clock)
    discipline.made(Command(K.MIGRATE, 0, 1, 77), 1.0)
    back, other = Command(K.MIGRATE, 1, 2, 77), Command(K.MIGRATE, 1, 2, 78)
    assert not discipline.judge(listed(other))[0][1]  # 1 s of debt at 5 %: 20 s
    clock.now_s += 20.0
    assert discipline.judge(listed(back, other))[0].tolist() == [True, False, True]
    clock.now_s += 10.0
    assert discipline.judge(listed(back))[0][1]


def test_who_is_joined_pays_for_its_restart():
    """Group 2's ranks joined group 1, which took 1 s of its serving: 20 s at 5 % until its next move; the others are free, and a start
    takes nobody's serving."""
    clock = Clock()
    discipline = MoveDiscipline(4, clock)
    discipline.made(Command(K.REGROUP, 2, 1), 1.0)
    discipline.made(Command(K.SCALE_OUT, 0), 30.0)
    assert discipline.debt_s().tolist() == [0.0, 1.0, 0.0, 0.0]
    again, split, other = Command(K.REGROUP, 3, 1), Command(K.SET_SPLIT, 1), Command(K.REGROUP, 3, 0)
    assert discipline.judge(listed(again, split, other))[0].tolist() == [True, False, False, True]
    clock.now_s += 20.0
    assert discipline.judge(listed(again, split, other))[0].all()


def test_the_smallest_sufficient_relief_comes_first():
    """Scale out was chosen while requeueing promises 1.5 times sooner: requeue it is, until that has had its 10 s; a hopeless requeue is
    no bar."""
    clock = Clock()
    discipline = MoveDiscipline(3, clock)
    requeue, migrate, out = Command(K.REQUEUE, 0, 1), Command(K.MIGRATE, 0, 1, 5), Command(K.SCALE_OUT, 2)
    found = listed(out, migrate, requeue, gains=(0.0, 0.3, 0.4))
    everything = np.ones(4, np.bool_)
    assert discipline.smallest_sufficient(found, everything, 1) == 3
    assert discipline.smallest_sufficient(found, np.array([True, True, True, False]), 1) == 2
    assert discipline.smallest_sufficient(listed(out, requeue, gains=(0.0, 0.1)), everything[:3], 1) == 1
    for _ in range(3):
        discipline.made(requeue, 0.0)
        clock.now_s += 5.0
    assert discipline.smallest_sufficient(found, everything, 1) == 1  # still pressed
    clock.now_s += 60.0
    assert discipline.smallest_sufficient(found, everything, 1) == 3
    assert discipline.smallest_sufficient(found, everything, 0) == 0


def test_what_is_masked_stays_masked_with_a_reason():
    discipline = MoveDiscipline(1, Clock())
    found = listed(Command(K.REGROUP, 0, 0))
    mask, why = discipline.judge(MoveCandidates(found.commands, np.array([True, False]), found.moves))
    assert mask.tolist() == [True, False] and why == ["", "not possible here"]


@pytest.mark.parametrize("bad", [{"budget_fraction": 0.0}, {"stay_growth": 0.5}, {"settle_s": -1.0}, {"scale_stay_s": float("inf")}])
def test_settings_are_checked(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        DisciplineSettings(**bad)
