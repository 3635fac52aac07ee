"""A group of our own ranks: the tensor-parallel engine in a process of its own, one per group (`group_host`)."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

from envs.domain.plans import SplitPlan, TpGroup
from runtime.backends import group_messages as M
from runtime.backends.host_starts import HostProcess, HostStarts, start_afresh
from runtime.backends.interface import (
    NOTHING,
    OWN_GROUP_COMMANDS,
    Backend,
    BackendBusy,
    BackendError,
    BackendFault,
    BadCall,
    Begun,
    GroupReport,
    KvPart,
    MoveRefused,
    SplitDone,
)
from runtime.calls import Call, Piece
from runtime.frames import FrameCutter, frame

logger = logging.getLogger(__name__)

START_DEADLINE_S = 120.0
PROBE_DEADLINE_S = 3.0
RESPLIT_DEADLINE_S, KV_DEADLINE_S = 65.0, 12.0  # the engine's own are shorter
STOP_DEADLINE_S = 10.0
SILENT_S = 5.0  # a host that has not reported for fifty periods is stopped or stuck: it is started anew
CALLERS_FAULT = ("too_long", "invalid", "duplicate")


class _Asked:
    """One attempt inside: what came of it, and a bell."""

    def __init__(self) -> None:
        self.items: asyncio.Queue[Piece | BackendError] = asyncio.Queue()  # at most one per token


class TorchTpBackend(asyncio.Protocol):
    """Implements `Backend` over a group host."""

    keeps_prefixes = True
    can = OWN_GROUP_COMMANDS

    def __init__(self, name: str, group_index: int, settings: M.HostSettings, starts: HostStarts | None = None) -> None:
        """starts: who starts its host, None: always a fresh interpreter."""
        self.name, self.group_index, self._starts = name, group_index, starts
        self._settle(settings)
        self._process: HostProcess | None = None
        self._transport: asyncio.Transport | None = None
        self._cutter = FrameCutter()
        self._up: asyncio.Future[dict[str, Any]] | None = None
        self._asked: dict[int, _Asked] = {}
        self._probes: dict[int, asyncio.Future[bool]] = {}
        self._orders: dict[int, asyncio.Future[list[Any]]] = {}
        self._number = 0
        self._heard_s = 0.0  # when its process last sent a whole message

    def _settle(self, settings: M.HostSettings) -> None:
        """What the next start starts, and what follows from that."""
        self._settings = settings
        is_here = not any(rank.get("is_remote") or rank.get("node") for rank in settings.ranks)
        self.kv_home = f"{settings.model} {settings.dtype}" if is_here else None  # KV crosses in this host's memory
        self.is_emulation = any(rank.get("slow_factor", 1.0) > 1.0 for rank in settings.ranks)
        self._report: GroupReport | None = None  # of other ranks

    # --- Backend ------------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        await self._end_process(deadline_s=0.0)
        self._cutter, self._report = FrameCutter(), None
        self._process, ours = start_afresh(self.name) if self._starts is None else await self._starts.start(self.name)
        loop = asyncio.get_running_loop()
        self._up = loop.create_future()
        self._transport, _ = await loop.create_connection(lambda: self, sock=ours)
        self._say(self._settings.to_wire())
        try:
            async with asyncio.timeout(START_DEADLINE_S):
                await asyncio.shield(self._up)
        except TimeoutError:
            self._up.cancel()  # nobody waits for it any more
            await self._end_process(deadline_s=0.0)
            raise BackendFault(f"{self.name}: not up within {START_DEADLINE_S:g} s") from None
        except BackendFault:
            await self._end_process(deadline_s=0.0)
            raise
        except asyncio.CancelledError:  # the service ends meanwhile
            self._up.cancel()
            raise

    async def close(self) -> None:
        """One that is not up yet has nothing to put in order, and would not hear of it while it loads."""
        if self._transport is not None:
            self._say([M.STOP])
        await self._end_process(deadline_s=STOP_DEADLINE_S if self._is_up() else 0.0)
        self._report = None  # of a process that is let go nothing is true any more

    def _is_up(self) -> bool:
        return self._up is not None and self._up.done() and not self._up.cancelled() and self._up.exception() is None

    @property
    def is_alive(self) -> bool:
        """Its process is there and speaks: liveness is progress, and a host that is frozen makes none."""
        is_up = self._is_up()
        has_process = self._transport is not None and self._process is not None and self._process.poll() is None
        return is_up and has_process and time.monotonic() - self._heard_s < SILENT_S

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def strike(self, rank: int, number: signal.Signals) -> None:
        """For drills: a signal to one rank's process."""
        self._say([M.STRIKE, rank, int(number)])

    def continues(self, call: Call, begun: Begun) -> bool:
        return len(begun.tokens) == begun.pieces

    def report(self) -> GroupReport | None:
        return self._report

    async def probe(self) -> bool:
        if not self.is_alive:
            return False
        self._number += 1
        number = self._number
        self._probes[number] = future = asyncio.get_running_loop().create_future()
        self._say([M.PROBE, number])
        try:
            async with asyncio.timeout(PROBE_DEADLINE_S):
                return await future
        except TimeoutError:
            return False
        finally:
            self._probes.pop(number, None)

    async def set_split(self, plan: SplitPlan) -> SplitDone:
        version, paused_s = await self._order(M.RESPLIT, *M.widths_to_wire(plan), deadline_s=RESPLIT_DEADLINE_S)
        return SplitDone(version, paused_s)

    def why_not_join(self, donor: Backend) -> str:
        if not isinstance(donor, TorchTpBackend):
            return f"{donor.name} is of another kind"
        ours, theirs = self._settings, donor._settings
        for what in ("model", "dtype", "communicator", "supervisor"):  # all that an engine's ranks must agree on
            if getattr(ours, what) != getattr(theirs, what):
                return f"{what} differs: {getattr(ours, what)!r} in {self.name}, {getattr(theirs, what)!r} in {donor.name}"
        return ""

    def join(self, donor: Backend, merged: TpGroup) -> Callable[[], None]:
        assert isinstance(donor, TorchTpBackend)
        old = self._settings
        self._settle(replace(old, ranks=old.ranks + donor._settings.ranks))
        return lambda: self._settle(old)

    async def give_kv(self, call_id: str, after: int) -> KvPart:
        (place,) = await self._order(M.GIVE_KV, call_id, after, deadline_s=KV_DEADLINE_S)
        return KvPart(len(place["ids"]), place["kv_bytes"], place["seconds"], place)

    async def take_kv(self, part: KvPart) -> None:
        await self._order(M.TAKE_KV, part.place, deadline_s=KV_DEADLINE_S)

    async def _order(self, kind: str, *needs: Any, deadline_s: float) -> list[Any]:
        """Have the host carry out an order; returns what it brought. Raises: MoveRefused."""
        if not self.is_alive:
            raise MoveRefused(f"{self.name}: its process is gone")
        self._number += 1
        number = self._number
        self._orders[number] = future = asyncio.get_running_loop().create_future()
        self._say([kind, number, *needs])
        try:
            async with asyncio.timeout(deadline_s):
                return await future
        except TimeoutError:
            raise MoveRefused(f"{self.name}: no answer to {kind} within {deadline_s:g} s") from None
        finally:
            self._orders.pop(number, None)

    async def submit(self, call: Call, begun: Begun = NOTHING) -> AsyncIterator[Piece]:
        if not self.is_alive:
            raise BackendFault(f"{self.name}: its process is gone")
        if not call.prompt_ids:
            raise BadCall("this group wants token ids", reason="unsupported")
        self._number += 1
        number, asked, is_over = self._number, _Asked(), False
        self._asked[number] = asked
        self._say(M.submit(number, call, begun))
        try:
            while True:
                item = await asked.items.get()
                is_over = isinstance(item, BackendError) or item.finish_reason is not None
                if isinstance(item, BackendError):
                    raise item
                yield item
                if is_over:
                    return
        finally:
            self._asked.pop(number, None)
            if not is_over:
                self._say([M.CANCEL, number])

    # --- asyncio.Protocol ---------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._cutter.feed(data):
                self._heard_s = time.monotonic()  # bytes alone are no sign of life
                self._on_message(message)
        except (ValueError, TypeError, KeyError, IndexError) as error:
            logger.error("group host speaks nonsense group=%s reason=%s", self.name, error)
            if self._transport is not None:
                self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        lost = BackendFault(f"{self.name}: the connection to its process was lost")
        if self._up is not None and not self._up.done():
            self._up.set_exception(lost)
        for asked in self._asked.values():
            asked.items.put_nowait(lost)
        for future in self._probes.values():
            if not future.done():
                future.set_result(False)
        for order in self._orders.values():
            if not order.done():
                order.set_exception(MoveRefused(str(lost)))

    # ------------------------------------------------------------------------------------------------------------------------

    def _on_message(self, message: list[Any]) -> None:
        kind = message[0]
        if kind == M.PIECE:
            if (asked := self._asked.get(message[1])) is not None:
                asked.items.put_nowait(M.piece_of(message))
        elif kind == M.ENDED:
            if (asked := self._asked.get(message[1])) is not None:
                asked.items.put_nowait(self._error_of(message[2], message[3]))
        elif kind == M.REPORT:
            self._report = M.report_of(message)
        elif kind == M.PROBED:
            future = self._probes.get(message[1])
            if future is not None and not future.done():
                future.set_result(bool(message[2]))
        elif kind == M.CARRIED_OUT:
            self._on_carried_out(*message[1:3], result=message[3:])
        elif kind in (M.UP, M.FAILED) and self._up is not None and not self._up.done():
            if kind == M.UP:
                self._up.set_result(message[1])
            else:
                self._up.set_exception(BackendFault(f"{self.name}: {message[1]}"))

    def _on_carried_out(self, number: int, error: str, result: list[Any]) -> None:
        order = self._orders.get(number)
        if order is None or order.done():
            return
        if error:
            order.set_exception(MoveRefused(f"{self.name}: {error}"))
        else:
            order.set_result(result)

    def _error_of(self, reason: str, text: str) -> BackendError:
        if reason in CALLERS_FAULT:
            return BadCall(text, reason="too_long" if reason == "too_long" else "invalid")
        return BackendBusy(text) if reason == "queue_full" else BackendFault(f"{self.name}: {text}")

    def _say(self, message: list[Any]) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(message))

    async def _end_process(self, deadline_s: float) -> None:
        """Let it leave by itself for `deadline_s`, then kill it."""
        process, self._process = self._process, None
        if process is None:
            return
        end_s = asyncio.get_running_loop().time() + deadline_s
        while process.poll() is None and asyncio.get_running_loop().time() < end_s:
            await asyncio.sleep(0.02)
        if process.poll() is None:
            process.kill()
            while process.poll() is None:
                await asyncio.sleep(0.01)
        if self._transport is not None:
            self._transport.abort()
            self._transport = None
