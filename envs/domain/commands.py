"""What a scheduler may order. Both clusters, simulated and real, execute exactly these."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class CommandKind(IntEnum):
    ROUTE = 0
    HOLD = 1
    REFUSE = 2
    KEEP = 3  # leave everything as it is
    SET_SPLIT = 4  # `argument` = corner index of envs.decision.split_planner.CORNERS
    REQUEUE = 5  # waiting requests of `group_index` go back to the router
    MIGRATE = 6  # one running request moves from `group_index` to `target_index`
    SCALE_OUT = 7  # start the parked group `group_index`
    SCALE_IN = 8  # drain `group_index`, then park it
    FALL_BACK = 9  # `group_index` continues on the smallest subset of ranks that fits
    RESTORE = 10  # `group_index` returns to all of its healthy ranks
    REGROUP = 11  # the spare or donor group `group_index` gives its ranks to `target_index`


@dataclass(frozen=True, slots=True)
class Command:
    kind: CommandKind
    group_index: int = -1
    target_index: int = -1
    argument: int = 0
    reason: str = ""
