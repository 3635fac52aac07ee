"""Under pressure low priorities leave first and are told when to come again; critical ones get more tries; degraded answers say so."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from functools import partial

import pytest

from runtime.calls import Refusal
from runtime.scheduling.dispatch_settings import DispatchSettings
from runtime.scheduling.held_calls import HeldCalls
from tests.runtime.scheduling.service_parts import LIMITS, Scripted, call, collect, dispatcher, until, with_service

CHAT, CODE, BATCH = 0, 1, 2


def play(backends, body, settings, limits=LIMITS, **more) -> None:
    asyncio.run(with_service(dispatcher(backends, settings, limits=limits, **more), body))


def test_critical_classes_get_more_tries():
    """Every attempt dies: chat is given up after 4, code after 6."""
    backends = [Scripted(f"g{i}", i, fault=lambda asked, index: "die") for i in range(8)]
    tries = {}

    async def body(service):
        for class_index in (CHAT, CODE):
            before = sum(len(backend.started) for backend in backends)
            with pytest.raises(Refusal, match="given up"):
                await collect(service, call(class_index=class_index))
            tries[class_index] = sum(len(backend.started) for backend in backends) - before

    play(backends, body, DispatchSettings(sheds_overload=True))
    assert tries == {CHAT: 4, CODE: 6}


def test_a_held_call_gives_its_place_to_a_higher_one():
    """One place among the held: batch waits in it until code comes, and is told that it was shed."""

    clock_s = [time.monotonic()]  # stands still: the pauses last until they have been seen

    async def body(service):
        pause = partial(service.panel.breakers[0].record_backpressure, 0.2)  # longer, and it would be shed for want of time
        pause()
        low = asyncio.create_task(collect(service, call(class_index=BATCH, priority=0)))
        await until(lambda: service.held_calls.count)
        pause()
        equal = asyncio.create_task(collect(service, call(class_index=BATCH, priority=0)))
        with pytest.raises(Refusal) as refused:
            await equal
        assert refused.value.reason == "queue_full", "an equal one does not displace"
        pause()
        high = asyncio.create_task(collect(service, call(class_index=CODE, priority=2)))
        with pytest.raises(Refusal) as shed:
            await low
        assert (shed.value.reason, shed.value.status) == ("overloaded", 429) and shed.value.retry_after_s > 0.0
        await until(lambda: service.held_calls.count == 1)
        clock_s[0] += 0.3
        assert len(await high) == 12
        assert service.counts["refused_overloaded"] == 1

    settings = DispatchSettings(sheds_overload=True)
    play([Scripted("g0", 0)], body, settings, replace(LIMITS, hold_limit=1), now_s=lambda: clock_s[0])


def test_held_calls_are_rung_by_priority_then_age():
    async def body() -> list[str]:
        held, order = HeldCalls(), []

        async def wait(name: str, priority: int) -> None:
            assert await held.wait(60.0, priority)
            order.append(name)

        tasks = [asyncio.create_task(wait(name, priority)) for name, priority in (("a", 0), ("b", 2), ("c", 0), ("d", 2))]
        await asyncio.sleep(0)
        for _ in tasks:
            held.ring(1)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        assert held.count == 0
        return order

    assert asyncio.run(body()) == ["b", "d", "a", "c"]


def test_answers_are_shorter_under_pressure_and_say_so():
    settings = DispatchSettings(sheds_overload=True, degrade_max_tokens={"batch": 5}, degrade_above=0.5)

    async def body(service):
        calm = call(class_index=BATCH)
        assert len(await collect(service, calm)) == 12 and calm.notes.degraded == ""
        service.overload.pressure[BATCH] = 0.6  # as the last call found it
        service.overload.at_s = service.view().now_s
        asked = call(class_index=BATCH)
        pieces = await collect(service, asked)
        assert len(pieces) == 5 and pieces[-1].finish_reason == "length" and asked.notes.degraded == "max_tokens=5"
        service.overload.pressure[BATCH] = 0.6
        chat = call(class_index=CHAT)
        assert len(await collect(service, chat)) == 12, "a class that is not named stays whole"
        assert service.counts["degraded"] == 1

    play([Scripted("g0", 0)], body, settings)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("attempts_by_class", {"cod": 3}, "did you mean 'code'|code"),
        ("degrade_max_tokens", {"batch": 0}, "degrade_max_tokens.batch=0"),
        ("attempts_by_class", {"code": True}, "attempts_by_class.code=True"),
    ],
)
def test_settings_by_class_are_checked(key, value, said):
    with pytest.raises(ValueError, match=said):
        DispatchSettings(**{key: value})
