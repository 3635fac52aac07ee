"""Carries out split and rebalance commands, and an operator's orders, by the groups' backends: each at its price, one at a time per group.

No call is lost by a move: one that must leave a group is given back (`GivenBack`) and goes on elsewhere from the tokens that its caller
has.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from envs.decision.move_candidates import fallback_plan, planned_split
from envs.decision.move_discipline import SCALES
from envs.decision.split_planner import CORNERS, InfeasibleSplit
from envs.domain.commands import Command, CommandKind
from envs.domain.plans import SplitPlan
from envs.domain.snapshot import BoolArray
from envs.perf_model.memory_fit import proportional_plan
from runtime.backends.interface import MoveRefused
from runtime.scheduling.call_migration import CallMigration
from runtime.scheduling.control_settings import ControlSettings
from runtime.scheduling.dispatcher import Dispatcher
from runtime.scheduling.group_switch import GroupSwitch
from runtime.scheduling.move import FOREIGN, Move, MoveUndone
from runtime.scheduling.regroup import Regroup
from runtime.scheduling.served_plans import UNKNOWN_CORNER

logger = logging.getLogger(__name__)

MOVES_KEPT = 64


class MoveExecution:
    """`log`: the last moves, newest first; `under_way`: by each group concerned. `made` is told of each move that was carried out, with the
    seconds of serving that it took."""

    def __init__(
        self, dispatcher: Dispatcher, settings: ControlSettings, now_s: Callable[[], float], made: Callable[[Command, float], None]
    ) -> None:
        self._dispatcher, self._settings, self._now_s, self._made = dispatcher, settings, now_s, made
        self.log: deque[Move] = deque(maxlen=MOVES_KEPT)
        self.under_way: dict[int, Move] = {}
        self.migration = CallMigration(dispatcher, now_s)
        self._switch = GroupSwitch(dispatcher, settings, now_s)
        self.regroup = Regroup(dispatcher, self._switch, now_s)
        self._handlers = {
            CommandKind.SET_SPLIT: self._set_split,
            CommandKind.REQUEUE: self._requeue,
            CommandKind.MIGRATE: self._migrate,
            CommandKind.SCALE_OUT: self._scale_out,
            CommandKind.SCALE_IN: self._scale_in,
            CommandKind.FALL_BACK: self._fall_back,
            CommandKind.RESTORE: self._restore,
            CommandKind.REGROUP: self.regroup.carry_out,
        }

    async def close(self) -> None:
        await self._switch.close()

    # --- what is possible ---------------------------------------------------------------------------------------------------

    def why_not(self, command: Command) -> str:
        """Why a command is not possible now, whatever it is worth; "" where it is."""
        if command.kind is CommandKind.KEEP:
            return ""
        concerned = _concerned(command)
        if gone := [why for i in concerned if (why := self.why_gone(i))]:
            return gone[0]
        if any(i in self.under_way for i in concerned):
            return "another move of this group is under way"
        if command.kind is not CommandKind.REQUEUE and any(command.kind not in self._dispatcher.backends[i].can for i in concerned):
            return FOREIGN
        if command.kind in SCALES and any(i in self._switch.drains for i in concerned):
            return "an operator drains it"
        return self.regroup.why_not(*concerned) if command.kind is CommandKind.REGROUP else ""

    def why_gone(self, g: int) -> str:
        """Where the ranks of a group are that has given them away; "" of any other."""
        target = self._dispatcher.telemetry.joined.get(g)
        return "" if target is None else f"its ranks serve in {self._name(target)} until the service is started again"

    def may_start(self) -> BoolArray:
        """Parked groups that could be switched on, shape (groups,)."""
        backends, is_parked = self._dispatcher.backends, self._dispatcher.telemetry.is_parked
        return np.array([is_parked[g] and CommandKind.SCALE_OUT in b.can and g not in self.under_way for g, b in enumerate(backends)])

    # --- carrying out -------------------------------------------------------------------------------------------------------

    async def carry_out(
        self, command: Command, source: str, reason: str, price_s: float | None = None, plan: SplitPlan | None = None
    ) -> Move:
        """Do it; never raises. plan: of a SET_SPLIT by explicit widths. Returns: what came of it."""
        move = Move(time.time(), command, source, reason, self._detail(command, plan), price_s)
        began_s, g = self._now_s(), command.group_index
        if error := self.why_not(command):
            return self._ended(move, "refused", error)
        self.under_way |= dict.fromkeys(_concerned(command), move)
        try:
            move.paused_s = await (
                self._set_plan(g, plan, UNKNOWN_CORNER) if plan is not None else self._handlers[command.kind](command, move)
            )
            self._made(command, move.paused_s)
            outcome, error = "done", ""
        except (MoveRefused, InfeasibleSplit) as refused:
            outcome, error = "refused", str(refused)
        except MoveUndone as undone:
            move.paused_s = undone.paused_s
            self._made(command, undone.paused_s)  # it must not be tried again and again
            outcome, error = "failed", str(undone)
        except Exception as failed:  # a move that fails must not end the loop that ordered it
            logger.exception("move failed kind=%s group=%s", command.kind.name, self._name(g))
            outcome, error = "failed", f"{type(failed).__name__}: {failed}"
        finally:
            for i in _concerned(command):
                self.under_way.pop(i, None)
        move.took_s = self._now_s() - began_s
        return self._ended(move, outcome, error)

    def _ended(self, move: Move, outcome: str, error: str) -> Move:
        move.outcome, move.error = outcome, error
        self.log.appendleft(move)
        self._dispatcher.counts[f"moves_{outcome}"] += 1
        log = logger.info if outcome == "done" else logger.warning
        log(
            "move kind=%s group=%s detail=%s outcome=%s source=%s reason=%s calls=%d error=%s", move.command.kind.name,
            self._name(move.command.group_index), move.detail, outcome, move.source, move.reason, move.calls, error,
        )  # fmt: skip
        return move

    def _name(self, g: int) -> str:
        return self._dispatcher.backends[g].name

    def _detail(self, command: Command, plan: SplitPlan | None) -> str:
        if plan is not None:
            return f"query heads {list(plan.query_heads)}"
        return CORNERS[command.argument] if command.kind is CommandKind.SET_SPLIT else ""

    # --- splits -------------------------------------------------------------------------------------------------------------

    def corner_now(self, g: int, corner: str) -> SplitPlan:
        """The plan of a corner for the present mix and the measured speeds. Raises: InfeasibleSplit."""
        dispatcher = self._dispatcher
        plan = planned_split(dispatcher.view(), g, dispatcher.telemetry.groups[g], corner, dispatcher.plans.speed_factors(g))
        if plan is None:
            raise InfeasibleSplit(f"group {self._name(g)!r} has no {corner} split now: its ranks cannot hold it")
        return plan

    def shares_plan(self, g: int, shares: list[float]) -> SplitPlan:
        """The plan of explicit shares, one per rank. Raises: ValueError."""
        group = self._dispatcher.telemetry.groups[g]
        if len(shares) != len(group.ranks):
            raise ValueError(f"{len(shares)} shares for the {len(group.ranks)} ranks of group {group.name!r}")
        return proportional_plan(group.model, shares)

    async def _set_split(self, command: Command, move: Move) -> float:
        return await self._set_plan(command.group_index, self.corner_now(command.group_index, CORNERS[command.argument]), command.argument)

    async def _set_plan(self, g: int, plan: SplitPlan, corner: int) -> float:
        dispatcher = self._dispatcher
        done = await dispatcher.backends[g].set_split(plan)
        dispatcher.plans.commanded(g, done.version, plan, corner, done.paused_s)
        dispatcher.groups.take_report_now(g)
        return done.paused_s

    async def _fall_back(self, command: Command, move: Move) -> float:
        """Go on over the smallest subset of ranks that holds the model, serially if that is one."""
        g = command.group_index
        plan = fallback_plan(self._dispatcher.telemetry.groups[g], self._dispatcher.plans.speed_factors(g))
        paused_s = await self._set_plan(g, plan, self._dispatcher.telemetry.corner(g))
        self._dispatcher.plans.fell_back(g)
        return paused_s

    async def _restore(self, command: Command, move: Move) -> float:
        return await self._set_plan(command.group_index, self.corner_now(command.group_index, "planner"), CORNERS.index("planner"))

    # --- calls --------------------------------------------------------------------------------------------------------------

    async def _requeue(self, command: Command, move: Move) -> float:
        g = command.group_index
        move.calls = self._switch.requeue(list(self._dispatcher.telemetry.flights.waiting[g]), g, "its queue is asked again")
        return 0.0

    async def _migrate(self, command: Command, move: Move) -> float:
        def resumed(paused_s: float) -> None:
            move.paused_s = paused_s

        migrated = await self.migration.migrate(command, resumed)
        move.detail, move.price_s, move.calls = migrated.detail, migrated.price_s, 1
        return migrated.price_s

    # --- groups -------------------------------------------------------------------------------------------------------------

    async def _scale_out(self, command: Command, move: Move) -> float:
        return await self._switch.scale_out(command.group_index)

    async def _scale_in(self, command: Command, move: Move) -> float:
        return await self._switch.scale_in(command.group_index, move)

    def begin_drain(self, g: int) -> None:
        """By an operator: until `end_drain`. Raises: MoveRefused."""
        if why := self.why_gone(g) or ("another move of this group is under way" if g in self.under_way else ""):
            raise MoveRefused(why)
        if self._switch.begin_drain(g):
            self.log.appendleft(
                Move(time.time(), Command(CommandKind.SCALE_IN, g), "operator", "drain", "drained, not parked", outcome="done")
            )

    def end_drain(self, g: int) -> None:
        """Let a group that an operator drains take calls again. Raises: MoveRefused where none does."""
        if why := self.why_gone(g):
            raise MoveRefused(why)
        self._switch.end_drain(g)

    def is_drained(self, g: int) -> bool:
        """Whether an operator's drain has come to its end."""
        return self._switch.is_drained(g)


def _concerned(command: Command) -> tuple[int, ...]:
    """Groups that a move occupies."""
    has_target = command.kind in (CommandKind.MIGRATE, CommandKind.REGROUP)
    return (command.group_index, command.target_index) if has_target else (command.group_index,)
