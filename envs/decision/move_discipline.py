"""Which of the listed moves may be made now, so that moving never becomes the work: a budget of time, stays, and small moves before
large ones.

Pure but for what it remembers of the moves made; the clock is injected. Whoever executes commands asks `judge` before,
`smallest_sufficient`
about what was chosen, and tells `made` what it cost.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from envs.decision.move_candidates import MoveCandidates
from envs.domain.commands import Command, CommandKind
from envs.domain.snapshot import BoolArray

RELIEF = (CommandKind.REQUEUE, CommandKind.MIGRATE, CommandKind.SCALE_OUT, CommandKind.REGROUP)
"""Moves that help a pressed fleet, by how much they disturb."""
GAIN = 0  # column of MoveCandidates.moves: predicted log speed-up
MOVED_CALLS_KEPT = 1024

SPLIT, SUBSET = "split", "subset"
FAMILIES: dict[CommandKind, str] = {
    CommandKind.SET_SPLIT: SPLIT,
    CommandKind.FALL_BACK: SUBSET,
    CommandKind.RESTORE: SUBSET,
}
"""Moves that can undo one another, after which a group stays as it is for a while. Requeueing and migrating undo nothing."""
SCALES = (CommandKind.SCALE_OUT, CommandKind.SCALE_IN, CommandKind.REGROUP)
WITHOUT_PAUSE = (CommandKind.SCALE_OUT, CommandKind.SCALE_IN)
"""Moves that take nobody's serving; a group that others join is restarted."""


@dataclass(frozen=True, slots=True)
class DisciplineSettings:
    """Times in s.

    budget_fraction: of a group's time that moves may take, in the long run. split_stay_s, subset_stay_s, scale_stay_s: shortest time
    between two
    such moves of one group; each move that comes sooner than `calm` x the stay after the last one multiplies it by stay_growth, up to
    stay_max_s, so that a load that swings to and fro is followed ever less. call_stay_s: a call that was migrated stays so long.
    sufficient_gain: a
    relief with this predicted log speed-up is tried before a larger one, for settle_s at most.
    """

    budget_fraction: float = 0.05
    split_stay_s: float = 10.0
    subset_stay_s: float = 30.0
    scale_stay_s: float = 30.0
    stay_growth: float = 2.0
    stay_max_s: float = 900.0
    calm: float = 4.0
    call_stay_s: float = 30.0
    sufficient_gain: float = 0.2
    settle_s: float = 10.0

    def __post_init__(self) -> None:
        if not 0.0 < self.budget_fraction <= 1.0:
            raise ValueError(f"DisciplineSettings: budget_fraction={self.budget_fraction} must be in (0, 1]")
        if self.stay_growth < 1.0 or self.calm < 1.0:
            raise ValueError(f"DisciplineSettings: stay_growth={self.stay_growth} and calm={self.calm} must be at least 1")
        for name in ("split_stay_s", "subset_stay_s", "scale_stay_s", "stay_max_s", "call_stay_s", "settle_s"):
            if not 0.0 <= getattr(self, name) < np.inf:
                raise ValueError(f"DisciplineSettings: {name}={getattr(self, name)} must be >= 0 and finite")

    def stay_s(self, family: str) -> float:
        return {SPLIT: self.split_stay_s, SUBSET: self.subset_stay_s}[family]


@dataclass(slots=True)
class _Stay:
    made_s: float
    stay_s: float


class MoveDiscipline:
    """Remembers the moves of `groups` groups. A group that has spent s seconds on moves is left alone until they are worked off at
    `budget_fraction`: over any T seconds it spends at most budget_fraction x T plus its dearest move."""

    def __init__(self, groups: int, now_s: Callable[[], float], settings: DisciplineSettings | None = None) -> None:
        self.settings = settings or DisciplineSettings()
        self._now_s = now_s
        self._debt_s = np.zeros(groups)
        self._debt_at_s = now_s()
        self._stays: dict[tuple[int, str], _Stay] = {}
        self._moved_calls: OrderedDict[int, float] = OrderedDict()
        self._relief_from_s = -np.inf  # the present spell of small relief moves
        self._relief_last_s = -np.inf
        self._shrink_stay_s = self.settings.scale_stay_s
        self._shrink_from_s = -np.inf
        self._shrunk: _Stay | None = None

    def debt_s(self) -> np.ndarray:
        """Seconds of moves not yet worked off, shape (groups,)."""
        now_s = self._now_s()
        self._debt_s = np.maximum(0.0, self._debt_s - self.settings.budget_fraction * (now_s - self._debt_at_s))
        self._debt_at_s = now_s
        return self._debt_s

    def judge(self, found: MoveCandidates) -> tuple[BoolArray, list[str]]:
        """The mask (candidates,) of what may be done now, and for each candidate why not ("" where it may)."""
        debt_s, now_s = self.debt_s(), self._now_s()
        why = ["" if allowed else "not possible here" for allowed in found.mask]
        for index, command in enumerate(found.commands):
            if not why[index] and command.kind is not CommandKind.KEEP:
                why[index] = self._why_not(command, debt_s, now_s)
        return np.array([not reason for reason in why], np.bool_), why

    def _why_not(self, command: Command, debt_s: np.ndarray, now_s: float) -> str:
        for g in _groups_of(command) if command.kind is not CommandKind.REQUEUE else ():  # that one takes nobody's time
            if debt_s[g] > 0.0:
                return f"budget: {debt_s[g]:.3g} s of earlier moves must be worked off first"
        if command.kind is CommandKind.SCALE_IN and now_s < self._shrink_from_s:
            return f"stay: {self._shrink_from_s - now_s:.3g} s to go since the fleet was last changed"
        stay = self._stays.get((command.group_index, FAMILIES.get(command.kind, "")))
        if stay is not None and now_s < stay.made_s + stay.stay_s:
            return f"stay: {stay.made_s + stay.stay_s - now_s:.3g} s to go after the last one"
        if command.kind is CommandKind.MIGRATE and now_s < self._moved_calls.get(command.argument, -np.inf) + self.settings.call_stay_s:
            return "stay: this call was moved a moment ago"
        return ""

    def smallest_sufficient(self, found: MoveCandidates, mask: BoolArray, chosen: int) -> int:
        """`chosen`, or the smaller relief that is predicted to be enough and has not yet had its time."""
        kind, now_s = found.commands[chosen].kind, self._now_s()
        if kind not in RELIEF or (
            self._relief_from_s <= now_s - self.settings.settle_s and now_s - self._relief_last_s <= self.settings.settle_s
        ):
            return chosen
        best = chosen
        for index, command in enumerate(found.commands):
            is_smaller = command.kind in RELIEF and RELIEF.index(command.kind) < RELIEF.index(found.commands[best].kind)
            if is_smaller and mask[index] and found.moves[index, GAIN] >= self.settings.sufficient_gain:
                best = index
        return best

    def made(self, command: Command, cost_s: float) -> None:
        """A move was made and took its groups' serving `cost_s` seconds."""
        now_s = self._now_s()
        self.debt_s()
        if command.kind not in WITHOUT_PAUSE:
            for g in _groups_of(command):
                self._debt_s[g] += max(0.0, cost_s)
        if command.kind in RELIEF:
            if now_s - self._relief_last_s > self.settings.settle_s:
                self._relief_from_s = now_s
            self._relief_last_s = now_s
        if command.kind is CommandKind.MIGRATE:
            self._moved_calls[command.argument] = now_s
            while len(self._moved_calls) > MOVED_CALLS_KEPT:
                self._moved_calls.popitem(last=False)
        if command.kind in SCALES:
            self._scaled(command.kind, now_s, cost_s)
        elif (family := FAMILIES.get(command.kind)) is not None:
            self._begin_stay(command.group_index, family, now_s)

    def _begin_stay(self, g: int, family: str, now_s: float) -> None:
        last = self._stays.get((g, family))
        self._stays[g, family] = _Stay(now_s, self._stay_after(last, self.settings.stay_s(family), now_s))

    def _stay_after(self, last: _Stay | None, least_s: float, now_s: float) -> float:
        """A longer stay where the last one had hardly passed."""
        settings = self.settings
        if last is None or now_s - last.made_s >= settings.calm * last.stay_s:
            return least_s
        return min(settings.stay_max_s, max(least_s, last.stay_s * settings.stay_growth))

    def _scaled(self, kind: CommandKind, now_s: float, cost_s: float) -> None:
        """A fleet grows when it is pressed; what waits, and ever longer where it soon had to grow again, is its shrinking. A cold start
        takes no
        serving, but must be worth its price before it is undone."""
        if kind is CommandKind.SCALE_IN:
            self._shrunk = _Stay(now_s, self._shrink_stay_s)
            self._shrink_from_s = max(self._shrink_from_s, now_s + self.settings.scale_stay_s)
            return
        self._shrink_stay_s = self._stay_after(self._shrunk, self.settings.scale_stay_s, now_s)
        self._shrink_from_s = now_s + max(self._shrink_stay_s, cost_s / self.settings.budget_fraction)


def _groups_of(command: Command) -> tuple[int, ...]:
    """Groups whose serving the move disturbs: a migrated call is computed again, or its KV taken in, at the target; one that others join
    is restarted, and who joins it serves nobody."""
    if command.kind is CommandKind.MIGRATE:
        return command.group_index, command.target_index
    if command.kind is CommandKind.REGROUP:
        return (command.target_index,)
    return (command.group_index,)
