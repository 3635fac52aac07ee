"""Carries out split and rebalance commands, and an operator's orders, by the groups' backends: each at its price, one at a time per group.

No call is lost by a move: one that must leave a group is given back (`GivenBack`) and goes on elsewhere from the tokens that its caller
has.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from envs.decision.move_candidates import fallback_plan, planned_split
from envs.decision.split_planner import CORNERS, InfeasibleSplit
from envs.domain.commands import Command, CommandKind
from envs.domain.plans import SplitPlan
from envs.domain.snapshot import BoolArray
from envs.perf_model.memory_fit import proportional_plan
from runtime.backends.interface import GivenBack, MoveRefused
from runtime.scheduling.call_migration import CallMigration
from runtime.scheduling.control_settings import ControlSettings
from runtime.scheduling.dispatcher import Dispatcher
from runtime.scheduling.in_flight import Flight
from runtime.scheduling.served_plans import UNKNOWN_CORNER

logger = logging.getLogger(__name__)

MOVES_KEPT = 64
LOOK_AGAIN_S = 0.05  # at a group that drains or starts
NO_REGROUP = "two engines' ranks cannot be joined while they serve: change the cluster file"
FOREIGN = "a foreign server's own business: only routing and requeueing are possible"


@dataclass(slots=True, eq=False)
class Move:
    """One move, as it is told. at_s: Unix time. price_s: expected, took_s: from order to end, paused_s: serving it took; of a moved call,
    for how long it made no token, once the next one is there. outcome: "done", "refused" (nothing changed), "failed", None while it is
    under way. calls: moved or asked again."""

    at_s: float
    command: Command
    source: str
    reason: str
    detail: str = ""
    price_s: float | None = None
    took_s: float | None = None
    paused_s: float | None = None
    calls: int = 0
    outcome: str | None = None
    error: str = ""


class MoveExecution:
    """`log`: the last moves, newest first; `under_way`: by group. `made` is told of each move that was carried out, with the
    seconds of serving that it took."""

    def __init__(
        self, dispatcher: Dispatcher, settings: ControlSettings, now_s: Callable[[], float], made: Callable[[Command, float], None]
    ) -> None:
        self._dispatcher, self._settings, self._now_s, self._made = dispatcher, settings, now_s, made
        self.log: deque[Move] = deque(maxlen=MOVES_KEPT)
        self.under_way: dict[int, Move] = {}
        self.migration = CallMigration(dispatcher, now_s)
        self._drains: dict[int, asyncio.Task[None]] = {}
        self._handlers = {
            CommandKind.SET_SPLIT: self._set_split,
            CommandKind.REQUEUE: self._requeue,
            CommandKind.MIGRATE: self._migrate,
            CommandKind.SCALE_OUT: self._scale_out,
            CommandKind.SCALE_IN: self._scale_in,
            CommandKind.FALL_BACK: self._fall_back,
            CommandKind.RESTORE: self._restore,
        }

    async def close(self) -> None:
        drains = list(self._drains.values())
        for task in drains:
            task.cancel()
        await asyncio.gather(*drains, return_exceptions=True)

    # --- what is possible ---------------------------------------------------------------------------------------------------

    def why_not(self, command: Command) -> str:
        """Why a command is not possible now, whatever it is worth; "" where it is."""
        g, target = command.group_index, command.target_index
        if command.kind is CommandKind.KEEP:
            return ""
        if command.kind is CommandKind.REGROUP:
            return NO_REGROUP
        concerned = [g, target] if command.kind is CommandKind.MIGRATE else [g]
        if any(i in self.under_way for i in concerned):
            return "another move of this group is under way"
        if command.kind is not CommandKind.REQUEUE and any(command.kind not in self._dispatcher.backends[i].can for i in concerned):
            return FOREIGN
        if g in self._drains and command.kind in (CommandKind.SCALE_OUT, CommandKind.SCALE_IN):
            return "an operator drains it"
        return ""

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
        self.under_way[g] = move
        try:
            move.paused_s = await (
                self._set_plan(g, plan, UNKNOWN_CORNER) if plan is not None else self._handlers[command.kind](command, move)
            )
            self._made(command, move.paused_s)
            outcome, error = "done", ""
        except (MoveRefused, InfeasibleSplit) as refused:
            outcome, error = "refused", str(refused)
        except Exception as failed:  # a move that fails must not end the loop that ordered it
            logger.exception("move failed kind=%s group=%s", command.kind.name, self._name(g))
            outcome, error = "failed", f"{type(failed).__name__}: {failed}"
        finally:
            self.under_way.pop(g, None)
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

    def _recall(self, flights: list[Flight], back: GivenBack) -> int:
        found = [flight for flight in flights if flight.recall is not None]
        for flight in found:
            assert flight.recall is not None
            flight.recall(back)
        return len(found)

    def _requeue_waiting(self, flights: list[Flight], g: int, why: str) -> int:
        count = self._recall(flights, GivenBack(f"{self._name(g)}: {why}"))
        self._dispatcher.counts["requeued_calls"] += count
        return count

    async def _requeue(self, command: Command, move: Move) -> float:
        g = command.group_index
        move.calls = self._requeue_waiting(list(self._dispatcher.telemetry.flights.waiting[g]), g, "its queue is asked again")
        return 0.0

    def _with_another_home(self, flights: list[Flight]) -> list[Flight]:
        """Those that another group would take now and could go on with exactly; to any other call, being sent away is being lost."""
        others = np.flatnonzero(self._dispatcher.view().accepts) if flights else []
        return [flight for flight in flights if (at := flight.continues_at) is not None and any(at(int(g)) for g in others)]

    async def _migrate(self, command: Command, move: Move) -> float:
        def resumed(paused_s: float) -> None:
            move.paused_s = paused_s

        self.under_way[command.target_index] = move
        try:
            migrated = await self.migration.migrate(command, resumed)
        finally:
            self.under_way.pop(command.target_index, None)
        move.detail, move.price_s, move.calls = migrated.detail, migrated.price_s, 1
        return migrated.price_s

    # --- groups -------------------------------------------------------------------------------------------------------------

    async def _scale_out(self, command: Command, move: Move) -> float:
        """Start a parked group; it takes calls once it has made a token."""
        dispatcher, g, began_s = self._dispatcher, command.group_index, self._now_s()
        if not dispatcher.telemetry.is_parked[g]:
            raise MoveRefused("it is not parked")
        dispatcher.groups.start_group(g)
        while not dispatcher.groups.alive()[g]:
            if self._now_s() - began_s > self._settings.start_deadline_s:
                await dispatcher.groups.stop_group(g)
                raise MoveRefused(f"not up within {self._settings.start_deadline_s:g} s")
            await asyncio.sleep(LOOK_AGAIN_S)
        dispatcher.telemetry.is_parked[g] = False
        dispatcher.telemetry.is_draining[g] = False
        dispatcher.plans.started(self._now_s() - began_s)
        dispatcher.held_calls.ring()
        return self._now_s() - began_s

    async def _scale_in(self, command: Command, move: Move) -> float:
        """Drain, then park."""
        g = command.group_index
        await self._drain(g, move)
        self._dispatcher.telemetry.is_parked[g] = True
        self._dispatcher.telemetry.is_draining[g] = False
        await self._dispatcher.groups.stop_group(g)
        return 0.0

    async def _drain(self, g: int, move: Move | None = None) -> None:
        """No new calls, waiting ones go elsewhere, running ones end, or go on elsewhere after a while; where there is no elsewhere, they
        end here. Returns when nobody is inside."""
        dispatcher, until_s = self._dispatcher, self._now_s() + self._settings.drain_patience_s
        flights = dispatcher.telemetry.flights
        dispatcher.telemetry.is_draining[g] = True
        while True:
            count = self._requeue_waiting(self._with_another_home(list(flights.waiting[g])), g, "it is being drained")
            if self._now_s() >= until_s:
                leaving = self._with_another_home(list(flights.running[g]))
                count += self._recall(leaving, GivenBack(f"{self._name(g)}: it is being drained"))
            if move is not None:
                move.calls += count
            await asyncio.sleep(LOOK_AGAIN_S)  # also lets decisions that were under way end
            if not flights.running[g] and not flights.waiting[g]:
                return

    def begin_drain(self, g: int) -> None:
        """By an operator: until `end_drain`. Raises: MoveRefused."""
        if g in self.under_way:
            raise MoveRefused("another move of this group is under way")
        if self._dispatcher.telemetry.is_parked[g]:
            raise MoveRefused("it is parked")
        if g not in self._drains:
            self._dispatcher.telemetry.is_draining[g] = True
            self._drains[g] = asyncio.create_task(self._drain(g), name=f"drain-{self._name(g)}")
            self.log.appendleft(
                Move(time.time(), Command(CommandKind.SCALE_IN, g), "operator", "drain", "drained, not parked", outcome="done")
            )

    def end_drain(self, g: int) -> None:
        """Let a group that an operator drains take calls again. Raises: MoveRefused where none does."""
        if (task := self._drains.pop(g, None)) is None:
            raise MoveRefused("no operator drains it")
        task.cancel()
        self._dispatcher.telemetry.is_draining[g] = False
        self._dispatcher.held_calls.ring()

    def is_drained(self, g: int) -> bool:
        """Whether an operator's drain has come to its end."""
        return g in self._drains and self._drains[g].done()
