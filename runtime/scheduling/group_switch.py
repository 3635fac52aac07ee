"""Empties, starts and stops groups without losing a call: for commands, and for an operator who drains one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np

from runtime.backends.interface import GivenBack, MoveRefused
from runtime.scheduling.control_settings import ControlSettings
from runtime.scheduling.dispatcher import Dispatcher
from runtime.scheduling.in_flight import Flight
from runtime.scheduling.move import Move

LOOK_AGAIN_S = 0.05  # at a group that drains or starts


class GroupSwitch:
    """`drains`: by group, those that an operator has ordered and not ended."""

    def __init__(self, dispatcher: Dispatcher, settings: ControlSettings, now_s: Callable[[], float]) -> None:
        self._dispatcher, self._settings, self._now_s = dispatcher, settings, now_s
        self.drains: dict[int, asyncio.Task[None]] = {}

    async def close(self) -> None:
        drains = list(self.drains.values())
        for task in drains:
            task.cancel()
        await asyncio.gather(*drains, return_exceptions=True)

    # --- start and stop -----------------------------------------------------------------------------------------------------

    async def scale_out(self, g: int) -> float:
        """Start a parked group; it takes calls once it has made a token. Returns: seconds. Raises: MoveRefused."""
        telemetry = self._dispatcher.telemetry
        if not telemetry.is_parked[g]:
            raise MoveRefused("it is not parked")
        took_s = await self.start(g)
        telemetry.is_parked[g] = False
        self.open(g)
        return took_s

    async def scale_in(self, g: int, move: Move) -> float:
        """Drain, then park."""
        await self.drain(g, move)
        self._dispatcher.telemetry.is_parked[g] = True
        self._dispatcher.telemetry.is_draining[g] = False
        await self._dispatcher.groups.stop_group(g)
        return 0.0

    async def start(self, g: int, tries_again: bool = True) -> float:
        """Until group `g` has made a token; seconds. Raises: MoveRefused, and it is stopped again: at the deadline, or, unless it
        tries_again, when its first start has failed."""
        groups = self._dispatcher.groups
        groups.start_group(g)
        try:
            took_s = await self.until_up(g, tries_again)
        except MoveRefused:
            await groups.stop_group(g)
            raise
        self._dispatcher.plans.started(took_s)
        return took_s

    async def until_up(self, g: int, tries_again: bool = True) -> float:
        """The same of one that is being started, which is left as it is."""
        groups, began_s = self._dispatcher.groups, self._now_s()
        while not groups.alive()[g]:
            why = groups.not_started.get(g, "")
            if self._now_s() - began_s > self._settings.start_deadline_s:
                raise MoveRefused(f"not up within {self._settings.start_deadline_s:g} s{why and f': {why}'}")
            if why and not tries_again:
                raise MoveRefused(why)
            await asyncio.sleep(LOOK_AGAIN_S)
        return self._now_s() - began_s

    def open(self, g: int) -> None:
        """Let it take calls."""
        self._dispatcher.telemetry.is_draining[g] = False
        self._dispatcher.held_calls.ring()

    # --- who is inside ------------------------------------------------------------------------------------------------------

    async def drain(self, g: int, move: Move | None = None) -> None:
        """No new calls, waiting ones go elsewhere, running ones end, or go on elsewhere after a while; where there is no elsewhere, they
        end here. Returns when nobody is inside."""
        dispatcher, until_s = self._dispatcher, self._now_s() + self._settings.drain_patience_s
        flights = dispatcher.telemetry.flights
        dispatcher.telemetry.is_draining[g] = True
        while True:
            count = self.requeue(self._with_another_home(list(flights.waiting[g])), g, "it is being drained")
            if self._now_s() >= until_s:
                leaving = self._with_another_home(list(flights.running[g]))
                count += self._recall(leaving, g, "it is being drained")
            if move is not None:
                move.calls += count
            await asyncio.sleep(LOOK_AGAIN_S)  # also lets decisions that were under way end
            if not flights.running[g] and not flights.waiting[g]:
                return

    def requeue(self, flights: list[Flight], g: int, why: str) -> int:
        """Waiting calls of group `g` are asked about again; how many."""
        count = self._recall(flights, g, why)
        self._dispatcher.counts["requeued_calls"] += count
        return count

    def _recall(self, flights: list[Flight], g: int, why: str) -> int:
        back = GivenBack(f"{self._dispatcher.backends[g].name}: {why}")
        found = [flight for flight in flights if flight.recall is not None]
        for flight in found:
            assert flight.recall is not None
            flight.recall(back)
        return len(found)

    def _with_another_home(self, flights: list[Flight]) -> list[Flight]:
        """Those that another group would take now and could go on with exactly; to any other call, being sent away is being lost."""
        others = np.flatnonzero(self._dispatcher.view().accepts) if flights else []
        return [flight for flight in flights if (at := flight.continues_at) is not None and any(at(int(g)) for g in others)]

    # --- an operator's drain ------------------------------------------------------------------------------------------------

    def begin_drain(self, g: int) -> bool:
        """Until `end_drain`; whether it begins only now. Raises: MoveRefused."""
        if self._dispatcher.telemetry.is_parked[g]:
            raise MoveRefused("it is parked")
        if g in self.drains:
            return False
        self._dispatcher.telemetry.is_draining[g] = True
        self.drains[g] = asyncio.create_task(self.drain(g), name=f"drain-{self._dispatcher.backends[g].name}")
        return True

    def end_drain(self, g: int) -> None:
        """Let a group that an operator drains take calls again. Raises: MoveRefused where none does."""
        if (task := self.drains.pop(g, None)) is None:
            raise MoveRefused("no operator drains it")
        task.cancel()
        self.open(g)

    def is_drained(self, g: int) -> bool:
        """Whether an operator's drain has come to its end."""
        return g in self.drains and self.drains[g].done()
