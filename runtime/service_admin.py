"""The service as `/admin` sees it: its state in full, and an operator's orders on its groups."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from envs.decision.split_planner import CORNERS, InfeasibleSplit
from envs.domain.commands import Command, CommandKind
from envs.domain.suggestions import unknown_name
from runtime.backends.interface import MoveRefused
from runtime.gateway.admin import OrderRefused
from runtime.scheduling.admin_state import plan_told, stamped, state_of
from runtime.scheduling.move import FOREIGN
from runtime.service import Service


class ServiceAdmin:
    """Implements the gateway's `Administered`."""

    def __init__(self, service: Service, version: str) -> None:
        self._service, self._version = service, version
        self._began_s = time.monotonic()

    def admin_state(self) -> dict[str, Any]:
        service, dispatcher, config = self._service, self._service.dispatcher, self._service.config
        states = [(status.state, status.detail) for status in service.status()]
        kinds = [entry.kind for entry in config.groups]
        bundles = {"route": config.bundle, "split": config.split_bundle, "rebalance": config.rebalance_bundle}
        line = {
            "model": config.model_name, "version": self._version, "is_draining": dispatcher.is_draining, "in_flight": dispatcher.in_flight,
            "held": dispatcher.held_calls.count, "uptime_s": time.monotonic() - self._began_s,
        }  # fmt: skip
        return stamped(state_of(dispatcher, service.control, kinds, states, bundles), line)

    async def drain_group(self, name: str) -> dict[str, Any]:
        return self._turned(name, self._service.control.moves.begin_drain, "draining")

    async def undrain_group(self, name: str) -> dict[str, Any]:
        return self._turned(name, self._service.control.moves.end_drain, "serving")

    def _turned(self, name: str, order: Callable[[int], None], state: str) -> dict[str, Any]:
        try:
            order(self._index(name))
        except MoveRefused as refused:
            raise OrderRefused("conflict", f"{name}: {refused}") from refused
        return {"group": name, "state": state}

    async def resplit_group(self, name: str, corner: str | None, shares: list[float] | None) -> dict[str, Any]:
        g, moves, dispatcher = self._index(name), self._service.control.moves, self._service.dispatcher
        command = Command(CommandKind.SET_SPLIT, g, argument=CORNERS.index(corner) if corner is not None else -1)
        if CommandKind.SET_SPLIT not in dispatcher.backends[g].can:
            raise OrderRefused("not_possible", f"{name}: {moves.why_not(command)}")
        if error := moves.why_not(command):
            raise OrderRefused("conflict", f"{name}: {error}")
        if not dispatcher.groups.alive()[g] or dispatcher.telemetry.is_parked[g]:
            raise OrderRefused("conflict", f"{name}: it is not running")
        try:
            plan = moves.shares_plan(g, shares) if shares is not None else None
        except (ValueError, InfeasibleSplit) as error:
            raise OrderRefused("invalid", f"{name}: {error}") from error
        move = await moves.carry_out(command, "operator", "ordered", plan=plan)
        if move.outcome != "done":
            raise OrderRefused("not_possible", f"{name}: {move.error}")
        return {"group": name, "plan": plan_told(dispatcher, g), "seconds": move.took_s, "paused_s": move.paused_s}

    async def join_group(self, name: str, target: str) -> dict[str, Any]:
        donor, g, moves, dispatcher = self._index(name), self._index(target), self._service.control.moves, self._service.dispatcher
        command = Command(CommandKind.REGROUP, donor, g)
        if error := moves.why_not(command):
            is_lasting = error in (FOREIGN, moves.regroup.why_never(donor, g))
            raise OrderRefused("not_possible" if is_lasting else "conflict", f"{name}: {error}")
        move = await moves.carry_out(command, "operator", "ordered")
        if move.outcome != "done":
            raise OrderRefused("not_possible", f"{name}: {move.error}")
        ranks = len(dispatcher.telemetry.groups[g].ranks)
        return {"group": name, "state": "joined", "target": target, "ranks": ranks, "seconds": move.took_s, "paused_s": move.paused_s}

    def _index(self, name: str) -> int:
        names = [backend.name for backend in self._service.dispatcher.backends]
        if name not in names:
            raise OrderRefused("unknown_group", unknown_name("group", name[:128], names))
        return names.index(name)
