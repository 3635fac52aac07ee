"""Parts for tests of the service's inside: calls, a small cluster, backends that do what a script says."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace

from envs.domain.commands import CommandKind
from envs.scenario.cluster_file import load_cluster
from envs.scenario.cluster_spec import ClusterLimits, ClusterSpec
from runtime.backends.interface import NOTHING, BackendBusy, BackendFault, BadCall, Begun, GroupReport
from runtime.calls import Call, Piece
from runtime.scheduling.dispatch_settings import DispatchSettings
from runtime.scheduling.dispatcher import Dispatcher
from runtime.scheduling.telemetry import Telemetry
from runtime.torch_tp.requests import SamplingSettings
from tests.conftest import GUARD_S

LIMITS = ClusterLimits(max_running=16, queue_limit=32, hold_limit=64, context_tokens=4096, kv_blocks=512)
PATIENT = DispatchSettings(
    first_token_floor_s=60.0, silence_slack_s=60.0, hold_max_s=60.0, retry_wait_s=60.0, ready_within_s=30.0, restart_s=0.05
)  # fmt: skip
"""For tests in which no group falls silent: an event loop that itself stands still for a while is not to be taken for a silent group."""
_NUMBERS = itertools.count()


def cluster(groups: int = 2, limits: ClusterLimits = LIMITS, ranks: int | Sequence[int] = 1, parked: int = 0) -> ClusterSpec:
    """So many small groups, equal but for their ranks where those are given one by one; the last `parked` ones are switched off."""
    counts = [ranks] * groups if isinstance(ranks, int) else ranks
    spec = load_cluster("unlike-3")
    solo = spec.groups[1]
    return replace(
        spec, groups=tuple(replace(solo, name=f"g{i}", ranks=solo.ranks * counts[i]) for i in range(groups)),
        parked=tuple(i >= groups - parked for i in range(groups)), limits=limits, faults=(),
    )  # fmt: skip


def call(prompt_tokens: int = 8, max_tokens: int = 12, deadline_s: float = 60.0, **more) -> Call:
    number = next(_NUMBERS)
    defaults = {
        "call_id": f"call-{number}", "model": "m", "kind": "completion", "prompt_ids": tuple(range(prompt_tokens)),
        "prompt_tokens": prompt_tokens, "max_tokens": max_tokens, "sampling": SamplingSettings(), "stop_strings": (), "logprobs": None,
        "class_index": 0, "priority": 0, "session": None, "user": None, "deadline_s": time.monotonic() + deadline_s,
    }  # fmt: skip
    return Call(**(defaults | more))


@dataclass(eq=False)
class Scripted:
    """A backend that makes tokens 0, 1, 2 ... `gap_s` apart and fails as it is told: `fault` is asked at every token (index -1: before
    any) and may name "die", "hang", "busy", "bad", "end" (end without a finish) or "wrong" (an exception that is none of ours)."""

    name: str
    group_index: int
    gap_s: float = 0.001
    fault: Callable[[Call, int], str | None] = lambda call, index: None
    is_emulation: bool = True
    can: frozenset[CommandKind] = frozenset()
    kv_home: str | None = None
    keeps_prefixes: bool = False
    is_alive: bool = False
    inside: int = 0
    started: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    makes_tokens: bool = True
    pause_s: float = 0.05  # that it asks for when it is busy

    async def start(self) -> None:
        self.is_alive = True

    async def close(self) -> None:
        self.is_alive = False

    def continues(self, call: Call, begun: Begun) -> bool:
        return len(begun.tokens) == begun.pieces

    def report(self) -> GroupReport | None:
        return None

    async def probe(self) -> bool:
        return self.is_alive and self.makes_tokens

    async def submit(self, call: Call, begun: Begun = NOTHING) -> AsyncIterator[Piece]:
        self.started.append(call.call_id)
        self.inside += 1
        is_whole = False
        try:
            await self._strike(call, -1)
            for index in range(begun.pieces, call.max_tokens):
                await self._strike(call, index)
                await asyncio.sleep(self.gap_s)
                if not self.is_alive:
                    raise BackendFault(f"{self.name} is gone")
                is_whole = index + 1 == call.max_tokens
                yield Piece(index, index, f" t{index}", None, "length" if is_whole else None, *((8, index + 1) if is_whole else ()))
        finally:
            self.inside -= 1
            if not is_whole:
                self.cancelled.append(call.call_id)

    async def _strike(self, call: Call, index: int) -> None:
        kind = self.fault(call, index)
        if kind == "die":
            raise BackendFault(f"{self.name} died at {index}")
        if kind == "hang":
            await asyncio.sleep(3600.0)
        if kind == "busy":
            raise BackendBusy(f"{self.name} is busy", self.pause_s)
        if kind == "bad":
            raise BadCall("too large for us", reason="too_long")
        if kind == "wrong":
            raise RuntimeError("something that no backend should raise")


def dispatcher(backends: list[Scripted], settings: DispatchSettings | None = None, guard=None, limits=LIMITS, **more) -> Dispatcher:
    telemetry = Telemetry(cluster(len(backends), limits))
    return Dispatcher(backends, telemetry, settings or DispatchSettings(), guard, seed=3, **more)


async def collect(service: Dispatcher, asked: Call) -> list[Piece]:
    return [piece async for piece in service.run(asked)]


def check_whole(pieces: list[Piece], tokens: int) -> None:
    """Every token once, in order, one finish reason."""
    assert [piece.index for piece in pieces] == list(range(tokens))
    assert [piece.finish_reason for piece in pieces] == [None] * (tokens - 1) + ["length"]
    assert pieces[-1].output_tokens == tokens


async def until(condition: Callable[[], object], limit_s: float = GUARD_S) -> None:
    """Raises: AssertionError when it has not come to pass by then."""
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, "it never came to pass"
        await asyncio.sleep(0.005)


async def with_service(service: Dispatcher, body) -> None:
    """Start, run `body(service)`, close; nothing is left in flight."""
    await service.start()
    try:
        await asyncio.sleep(0)
        while not service.groups.alive().all():
            await asyncio.sleep(0.001)
        await body(service)
        assert service.in_flight == 0 and service.held_calls.count == 0
        assert service.retries.active == 0 and service.retries.retrying == 0
        assert service.telemetry.flights.residents().ints.size == 0
    finally:
        await service.close()
