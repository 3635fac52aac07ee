"""Moves one running call to another group: its KV copied there while it runs on, or computed again, whichever is cheaper by what such
moves have cost here. A copy that fails is a call computed again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from envs.decision.move_prices import CallMovePrices
from envs.domain.commands import Command
from runtime.backends.interface import GivenBack, MoveRefused
from runtime.scheduling.dispatcher import Dispatcher
from runtime.scheduling.in_flight import Flight

logger = logging.getLogger(__name__)

COPIED, NOT_COPIED, COMPUTED_AGAIN = "KV copied", "not copied", "computed again"
PARTS_MAX = 4
FEW_TOKENS = 32
"""So many that came while a part was copied are computed there: one more part would take longer than that."""


@dataclass(frozen=True, slots=True)
class Migrated:
    """detail: how, and why so. price_s: expected pause of the call, and what a copy takes from the steps beside it."""

    detail: str
    price_s: float


class CallMigration:
    """`prices` learns from every call that was moved."""

    def __init__(self, dispatcher: Dispatcher, now_s: Callable[[], float]) -> None:
        self._dispatcher, self._now_s = dispatcher, now_s
        self.prices = CallMovePrices(dispatcher.telemetry.groups)

    async def migrate(self, command: Command, on_resumed: Callable[[float], None]) -> Migrated:
        """Move the running call `command.argument`. on_resumed: told for how long it stood still, once its next token is there.

        Raises: MoveRefused.
        """
        dispatcher, g, target = self._dispatcher, command.group_index, command.target_index
        flight = self._running(g, command.argument)
        if flight is None:
            raise MoveRefused("the call has ended, or waits again")
        kv_tokens = self._kv_tokens(flight)
        copied_s = self.prices.copied_s(g, kv_tokens)
        again_s = self.prices.again_s(dispatcher.telemetry.model.state, target, kv_tokens)
        home, why_not = dispatcher.backends[g].kv_home, ""
        if home is None or home != dispatcher.backends[target].kv_home:
            why_not = "KV cannot be copied between these groups"
        elif copied_s < again_s:
            why_not = await self._copy(flight, target)
        else:
            why_not = "dearer"
        is_copied = not why_not
        if self._running(g, command.argument) is not flight or flight.recall is None:
            raise MoveRefused("the call has ended, or waits again")
        if why_not.startswith(NOT_COPIED) and not dispatcher.view().accepts[target]:
            raise MoveRefused(why_not)  # it would leave a group that serves it for one that takes nobody
        recalled_s = self._now_s()

        def resumed(where: int) -> None:
            paused_s = self._now_s() - recalled_s
            if where == target and is_copied:
                self.prices.copied_call_paused(g, paused_s)
            elif where == target:
                self.prices.computed_call_paused(target, again_s, paused_s)
            name = dispatcher.backends[where].name
            logger.info("moved call goes on call=%s group=%s is_copied=%s paused_s=%.4f", flight.call_id, name, is_copied, paused_s)
            on_resumed(paused_s)

        flight.recall(GivenBack(f"{dispatcher.backends[g].name}: moved", target, resumed))
        dispatcher.counts["moved_calls"] += 1
        dispatcher.counts["moved_calls_copied"] += is_copied
        prices = f"{copied_s:.4f} s against {again_s:.4f} s"
        if is_copied:
            return Migrated(f"{COPIED}: {prices} for computing {kv_tokens} tokens again", copied_s)
        return Migrated(f"{COMPUTED_AGAIN}: {why_not}; copying {kv_tokens} tokens {prices}", again_s)

    def _running(self, g: int, request_id: int) -> Flight | None:
        return next((f for f in self._dispatcher.telemetry.flights.running[g] if f.request.request_id == request_id), None)

    def _kv_tokens(self, flight: Flight) -> int:
        return flight.request.prompt_tokens + self._dispatcher.telemetry.flights.generated(flight)

    async def _copy(self, flight: Flight, target: int) -> str:
        """Bring the call's KV to the target but for the last few tokens; returns why that was not possible, or ""."""
        source = self._dispatcher.backends[flight.group_index]
        taker, copied, began_s = self._dispatcher.backends[target], 0, self._now_s()
        try:
            for _ in range(PARTS_MAX):
                part = await source.give_kv(flight.call_id, copied)
                await taker.take_kv(part)
                copied = part.tokens
                if self._kv_tokens(flight) - copied <= FEW_TOKENS:
                    break
        except MoveRefused as refused:
            logger.info("KV not copied call=%s tokens=%d reason=%s", flight.call_id, copied, refused)
            return "" if copied else f"{NOT_COPIED}: {refused}"  # what came is of use, be it not all
        self.prices.was_copied(flight.group_index, copied, self._now_s() - began_s)
        return ""
