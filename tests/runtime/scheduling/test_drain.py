"""Draining sends away only what somebody else can take: no order of an operator's loses a call."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import msgspec
import pytest

from runtime.calls import Refusal
from runtime.scheduling.control_loop import ControlLoop
from runtime.scheduling.control_settings import ControlSettings
from runtime.torch_tp.requests import SamplingSettings
from tests.runtime.backends.backend_kinds import WithServer
from tests.runtime.backends.test_backends import ask
from tests.runtime.backends.test_openai_http import with_backends
from tests.runtime.scheduling.service_parts import PATIENT, Scripted, call, check_whole, collect, dispatcher, until, with_service

IMPATIENT = ControlSettings(is_on=False, drain_patience_s=0.0)


def test_all_groups_drained_at_once_lose_no_call():
    """Those inside come to their end where they are, and then the groups are empty."""
    backends = [Scripted(f"g{i}", i, gap_s=0.01) for i in range(2)]

    async def body(service):
        moves = ControlLoop(service, IMPATIENT, seed=3).moves
        tasks = [asyncio.create_task(collect(service, call(max_tokens=60))) for _ in range(12)]
        await until(lambda: all(service.telemetry.flights.running))
        for g in range(2):
            moves.begin_drain(g)
        for pieces in await asyncio.gather(*tasks):
            check_whole(pieces, 60)
        await until(lambda: moves.is_drained(0) and moves.is_drained(1))
        for g in range(2):
            moves.end_drain(g)
        check_whole(await collect(service, call(max_tokens=3)), 3)
        await moves.close()

    asyncio.run(with_service(dispatcher(backends, replace(PATIENT, hold_max_s=0.2)), body))


@pytest.mark.fault("K22")
def test_a_service_whose_groups_are_all_drained_says_that_it_serves_nobody():
    """A new call is refused at once, as by a service without groups, and it is not ready; undrained, it serves."""
    backends = [Scripted(f"g{i}", i) for i in range(2)]

    async def body(service):
        moves = ControlLoop(service, IMPATIENT, seed=3).moves
        check_whole(await collect(service, call(max_tokens=3)), 3)  # a token made lately, which proves nothing any more
        moves.begin_drain(0)
        assert await service.is_ready()
        moves.begin_drain(1)
        assert not await service.is_ready()
        began_s = time.monotonic()
        with pytest.raises(Refusal) as refused:
            await collect(service, call(max_tokens=3))
        assert (refused.value.reason, refused.value.status) == ("no_capacity", 503)
        assert refused.value.retry_after_s is not None and time.monotonic() - began_s < 30.0  # at once, and not held for a minute
        moves.end_drain(1)
        assert await service.is_ready()
        check_whole(await collect(service, call(max_tokens=3)), 3)
        await moves.close()

    asyncio.run(with_service(dispatcher(backends, PATIENT), body))


@pytest.mark.parametrize("is_exact", [False, True])
def test_a_foreign_group_keeps_what_cannot_go_on_elsewhere(is_exact):
    """A sampled stream without a seed is another one elsewhere: it ends where it is. A greedy one leaves."""

    async def body(service):
        moves = ControlLoop(service, IMPATIENT, seed=3).moves
        backends: list[WithServer] = service.backends
        for backend in backends:
            backend.server.gap_s = 0.01
        asked = ask(max_tokens=60) if is_exact else msgspec.structs.replace(ask(max_tokens=60), sampling=SamplingSettings(temperature=1.0))
        task = asyncio.create_task(collect(service, asked))
        await until(lambda: any(service.telemetry.flights.running))
        moves.begin_drain(int(bool(service.telemetry.flights.running[1])))
        pieces = await task
        assert pieces[-1].output_tokens == 60
        assert sum(len(backend.server.requests) for backend in backends) == (2 if is_exact else 1)
        await moves.close()

    with_backends(2, body, PATIENT)
