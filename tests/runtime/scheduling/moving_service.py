"""A service whose groups really move: three groups (the last ones parked) in an event loop of its own, so that a module starts it once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

from envs.domain.commands import Command, CommandKind
from runtime.backends.emulated import EmulatedBackend
from runtime.backends.group_messages import HostSettings
from runtime.backends.torch_tp import TorchTpBackend
from runtime.calls import Call, Piece
from runtime.scheduling.control_loop import ControlLoop
from runtime.scheduling.control_settings import ControlSettings
from runtime.scheduling.dispatcher import Dispatcher
from runtime.scheduling.move import Move
from runtime.scheduling.telemetry import Telemetry
from tests.runtime.scheduling.service_parts import LIMITS, PATIENT, call, cluster

GROUPS = 3


class MovingService:
    """`run` a coroutine in its loop. Control ticks come by hand."""

    def __init__(
        self, kind: str, folder: str | None = None, slow_factor: float = 4.0, ranks: tuple[int, ...] = (2,) * GROUPS, parked: int = 1
    ) -> None:
        self.kind = kind
        spec = cluster(GROUPS, ranks=ranks, parked=parked)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

        async def make() -> None:
            self.telemetry = Telemetry(spec)
            if kind == "emulated":
                self.backends: list[Any] = [EmulatedBackend(group, g, LIMITS) for g, group in enumerate(spec.groups)]
            else:
                hosts = [
                    HostSettings(str(folder), ({"slow_factor": slow_factor},) * count, kv_tokens_max=2048, slots_max=8, queue_limit=32)
                    for count in ranks
                ]
                self.backends = [TorchTpBackend(f"g{g}", g, host) for g, host in enumerate(hosts)]
            self.dispatcher = Dispatcher(self.backends, self.telemetry, PATIENT, seed=3)
            self.control = ControlLoop(self.dispatcher, ControlSettings(is_on=False, drain_patience_s=0.2), seed=3)
            await self.dispatcher.start()
            while not self.dispatcher.groups.alive()[: GROUPS - parked].all():
                await asyncio.sleep(0.01)
            await self.control.start()

        self.run(make(), 300.0)

    def run(self, body: Coroutine[Any, Any, Any], deadline_s: float = 240.0) -> Any:
        return asyncio.run_coroutine_threadsafe(asyncio.wait_for(body, deadline_s), self._loop).result()

    def close(self) -> None:
        async def end() -> None:
            await self.control.close()
            await self.dispatcher.close()

        self.run(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60.0)
        self._loop.close()

    # --- within its loop ----------------------------------------------------------------------------------------------------

    def ask(self, number: int, max_tokens: int | None = None) -> Call:
        """Greedy, no end before the limit; the same number is the same prompt."""
        max_tokens = max_tokens or (100 if self.kind == "torch_tp" else 40)
        ids = tuple(3 + (7 * number + i) % 200 for i in range(5 + number % 9))
        return call(len(ids), max_tokens, deadline_s=600.0, prompt_ids=ids, ignore_eos=True)

    async def answer(self, asked: Call, into: list[Piece] | None = None) -> list[Piece]:
        pieces = [] if into is None else into
        async for piece in self.dispatcher.run(asked):
            pieces.append(piece)
        return pieces

    async def order(self, kind: CommandKind, g: int, target: int = -1, argument: int = 0, **more: Any) -> Move:
        return await self.control.moves.carry_out(Command(kind, g, target, argument), "operator", "a test", **more)

    def check_at_rest(self, lost: int = 0) -> None:
        """lost: attempts that were lost before."""
        dispatcher = self.dispatcher
        assert dispatcher.in_flight == 0 and dispatcher.held_calls.count == 0
        assert dispatcher.retries.active == 0 and dispatcher.retries.retrying == 0
        assert dispatcher.counts["attempts_lost"] == lost
        assert not self.control.moves.under_way


def text_of(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def check_exact(pieces: list[Piece], asked: Call, reference: str) -> None:
    """Each token once, in order, one finish, right usage, the text of an unbroken run."""
    tokens = [piece.index for piece in pieces if piece.token is not None]
    assert tokens == list(range(asked.max_tokens))
    assert [piece.finish_reason for piece in pieces if piece.finish_reason] == ["length"]
    assert (pieces[-1].prompt_tokens, pieces[-1].output_tokens) == (asked.prompt_tokens, asked.max_tokens)
    assert text_of(pieces) == reference
