"""Lets the ranks of a parked group join one that serves, for good (until the service is started again): the group is emptied, stopped, and
started anew with the donor's ranks behind its own, at the price of a start. Where that fails it is the old one again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

import numpy as np

from envs.domain.commands import Command
from envs.domain.plans import TpGroup
from runtime.backends.interface import MoveRefused
from runtime.scheduling.dispatcher import Dispatcher
from runtime.scheduling.group_switch import LOOK_AGAIN_S, GroupSwitch
from runtime.scheduling.move import Move, MoveUndone

logger = logging.getLogger(__name__)

FIRST_REPORT_S = 10.0  # after its start a group has reported many times over by then


class Regroup:
    """The donor is the command's group, the target its target."""

    def __init__(self, dispatcher: Dispatcher, switch: GroupSwitch, now_s: Callable[[], float]) -> None:
        self._dispatcher, self._switch, self._now_s = dispatcher, switch, now_s

    def why_not(self, donor: int, target: int) -> str:
        """Why the donor's ranks cannot join the target now; "" where they can."""
        dispatcher, telemetry = self._dispatcher, self._dispatcher.telemetry
        if why := self.why_never(donor, target):
            return why
        if not telemetry.is_parked[donor]:
            return "it is not parked: only the ranks of a group that serves nobody can be given away"
        if telemetry.is_parked[target] or not dispatcher.groups.alive()[target]:
            return f"{dispatcher.backends[target].name} is not running"
        return ""

    def why_never(self, donor: int, target: int) -> str:
        """What no waiting changes of that."""
        backends, telemetry = self._dispatcher.backends, self._dispatcher.telemetry
        if donor == target:
            return "a group cannot join itself"
        count, most = sum(len(telemetry.groups[g].ranks) for g in (donor, target)), telemetry.model.ranks_max
        if count > most:
            return f"together {count} ranks; a group may have {most}, as many as the cluster file's largest"
        return backends[target].why_not_join(backends[donor])

    async def carry_out(self, command: Command, move: Move) -> float:
        """Returns: seconds without the target. Raises: InfeasibleSplit, and nothing has changed; MoveUndone."""
        dispatcher, donor, target = self._dispatcher, command.group_index, command.target_index
        telemetry, groups = dispatcher.telemetry, dispatcher.groups
        old, given = telemetry.groups[target], telemetry.groups[donor]
        merged = old.with_ranks_of(given)
        move.detail = f"{len(old.ranks)} + {len(given.ranks)} ranks"
        await asyncio.to_thread(dispatcher.plans.plan_at_start, merged)  # whether it fits, before anybody is disturbed
        groups.is_returning[target] = True
        try:
            await self._switch.drain(target, move)
            began_s = self._now_s()
            await groups.stop_group(target)
            if why := await self._restarted(donor, target, merged):
                move.detail += f"; went back: {why}"
                raise MoveUndone(f"not started with the ranks of {given.name}: {why}", self._now_s() - began_s)
            telemetry.gave_ranks(donor, target)
            return self._now_s() - began_s
        finally:
            groups.is_returning[target] = False
            self._switch.open(target)

    async def _restarted(self, donor: int, target: int, merged: TpGroup) -> str:
        """Start the stopped target as `merged`; why that failed, and then it is started as it was, or ""."""
        dispatcher, backends = self._dispatcher, self._dispatcher.backends
        old, undo = dispatcher.telemetry.groups[target], None
        try:
            undo = backends[target].join(backends[donor], merged)
            dispatcher.plans.take_group(target, merged)
            await self._switch.start(target, tries_again=False)
            await self._check_members(target)
            return ""
        except Exception as error:  # whatever it was, the old group must serve again
            why = str(error) if isinstance(error, MoveRefused) else f"{type(error).__name__}: {error}"
        logger.error("ranks not joined group=%s donor=%s reason=%s", merged.name, backends[donor].name, why)
        await dispatcher.groups.stop_group(target)
        if undo is not None:
            undo()
        dispatcher.plans.take_group(target, old)
        dispatcher.groups.start_group(target)
        with contextlib.suppress(MoveRefused):  # then it is kept being started, as after a crash
            await self._switch.until_up(target)
        return why

    async def _check_members(self, target: int) -> None:
        """An engine starts without the ranks that fail it, which is not what was ordered. Raises: MoveRefused."""
        dispatcher, until_s = self._dispatcher, self._now_s() + FIRST_REPORT_S
        while True:
            dispatcher.groups.take_report_now(target)
            report = dispatcher.telemetry.reports[target]
            if report is not None and report.plan is not None:
                break
            if self._now_s() > until_s:
                raise MoveRefused("up, but it does not say with which ranks")
            await asyncio.sleep(LOOK_AGAIN_S)
        if (missing := np.flatnonzero(~dispatcher.plans.members(target))).size:
            raise MoveRefused(f"up, but without rank {', '.join(map(str, missing.tolist()))}")
