"""Calls come to their end whatever groups do: attempts, retries, breakers, holding, refusing."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import replace

import pytest

from envs.decision.circuit_breaker import State
from runtime.backends.interface import NOTHING, CallProgress, GroupReport, RankTimes
from runtime.calls import Refusal
from runtime.scheduling.dispatch_settings import DispatchSettings
from tests.runtime.scheduling.service_parts import PATIENT, Scripted, call, check_whole, collect, dispatcher, until, with_service

QUICK = DispatchSettings(first_token_floor_s=0.4, silence_slack_s=0.4, hold_max_s=0.5, restart_s=0.05)
"""Where a group falls silent: what a stall of this machine adds to what is lost must not matter."""
SLOW_MACHINE_S = 10.0


def groups(count: int = 3, **more) -> list[Scripted]:
    return [Scripted(f"g{i}", i, **more) for i in range(count)]


def play(backends, body, settings=PATIENT, **more) -> None:
    asyncio.run(with_service(dispatcher(backends, settings, **more), body))


def test_answers_are_whole_and_spread():
    backends = groups()

    async def body(service):
        answers = await asyncio.gather(*(collect(service, call()) for _ in range(30)))
        for pieces in answers:
            check_whole(pieces, 12)
        started = [len(backend.started) for backend in backends]
        assert sum(started) == 30
        assert min(started) >= 6, (
            started
        )  # equal groups, a burst: reservations spread it, if not to a call (what was learnt of each differs)

    play(backends, body)


@pytest.mark.fault("K25")
@pytest.mark.parametrize("kind", ["die", "hang", "wrong"])
def test_a_stream_lost_at_token_five_goes_on_elsewhere(kind):
    """24 streams, one of three groups loses each of its streams at token 5: all whole, each token once."""
    backends = groups()
    backends[1].fault = lambda asked, index: kind if index == 5 else None

    async def body(service):
        answers = await asyncio.gather(*(collect(service, call()) for _ in range(24)))
        for pieces in answers:
            check_whole(pieces, 12)
        assert service.counts["retries"] == service.counts["attempts_lost"] == len(backends[1].started) >= 1
        again = Counter(name for backend in backends for name in backend.started)
        assert max(again.values()) == 2
        assert {n for n, tries in again.items() if tries == 2} == set(backends[1].started)

    play(backends, body, replace(PATIENT, silence_slack_s=2.0 if kind == "hang" else 60.0))


def test_a_lost_stream_outwaits_the_retries_of_others():
    """The retry budget is taken for a while by others, whose groups are slow to begin: a stream lost meanwhile waits and is whole."""
    backends = groups()
    backends[0].fault = backends[1].fault = backends[2].fault = lambda asked, index: "die" if index == 5 else None

    async def body(service):
        others = [service.retries.try_start_retry(1) for _ in range(service.retries.retries_limit)]
        assert all(others)

        async def release() -> None:
            await until(lambda: service.counts["attempts_lost"])
            await asyncio.sleep(1.0)
            for backend in backends:
                backend.fault = lambda asked, index: None
            for _ in others:
                service.retries.finish(True)

        _, pieces = await asyncio.gather(release(), collect(service, call()))
        check_whole(pieces, 12)

    play(backends, body)


def test_a_silent_stream_is_found_in_time():
    """Silent after token 3: found within 3 x the median gap + 2 s, here with a slack of 0.4 s."""
    backends, seen, took_s = groups(2), set(), []

    def once(asked, index):
        if index != 3 or asked.call_id in seen:
            return None
        seen.add(asked.call_id)
        return "hang"

    for backend in backends:
        backend.fault = once

    async def body(service):
        for _ in range(6):
            began_s = time.monotonic()
            check_whole(await collect(service, call()), 12)
            took_s.append(time.monotonic() - began_s)
        assert min(took_s) < 3 * 0.05 + 0.4 + 2.5  # the last: for full cores
        assert service.counts["attempts_lost"] >= len(seen) == 6

    play(backends, body, replace(QUICK, hold_max_s=60.0))


def test_a_stream_that_falls_silent_again_and_again_comes_to_its_end():
    """Every group stands still after two more tokens, five times in all: more than a call has tries, but each brought it on."""
    backends, seen = groups(), set()

    def stand_still(asked, index):
        if index not in (2, 4, 6, 8, 10) or (asked.call_id, index) in seen:
            return None
        seen.add((asked.call_id, index))
        return "hang"

    for backend in backends:
        backend.fault = stand_still

    async def body(service):
        check_whole(await collect(service, call()), 12)
        assert service.counts["attempts_lost"] >= len(seen) == 5 > DispatchSettings().attempts_max

    play(backends, body, replace(QUICK, hold_max_s=60.0))


class Recovering(Scripted):
    """Stands still for 1.5 s before token 5 of each first attempt, and reports the calls that it has in hand, if it `tells`."""

    tells = True

    def report(self):
        progress = tuple(CallProgress(name, 5, 0, True) for name in self.started) if self.tells else None
        return GroupReport(time.monotonic(), len(self.started), 0, progress=progress)

    async def submit(self, call, begun=NOTHING):
        async for piece in super().submit(call, begun):
            if piece.index == 5 and not begun.pieces:
                await asyncio.sleep(1.5)
            yield piece


@pytest.mark.parametrize(("count", "tells", "attempts"), [(1, True, 1), (1, False, 2), (2, True, 2)])
def test_a_silent_stream_is_left_where_no_other_group_could_take_it(monkeypatch, count, tells, attempts):
    """Silent for 1.5 s, with a limit of about 0.4 s: asked again elsewhere, if there is such a place, and by a group that does not say
    that it has the call in hand; else waited for, since asking the same group again would only begin anew."""
    monkeypatch.setattr("runtime.scheduling.attempts.REPORT_FRESH_S", 60.0)  # not even a stall of this machine makes it old
    backends = [Recovering("g0", 0), *groups(2)[1:count]]
    for backend in backends:
        backend.tells = tells

    async def body(service):
        service.telemetry.is_draining[1:] = True  # the first one is chosen
        await until(lambda: service.telemetry.reports[0] is not None)
        task = asyncio.create_task(collect(service, call()))
        await until(lambda: backends[0].started)
        service.telemetry.is_draining[:] = False
        check_whole(await task, 12)
        assert len(backends[0].started) == (1 if count == 2 or tells else attempts)
        assert sum(len(backend.started) for backend in backends) == attempts

    play(backends, body, replace(PATIENT, silence_slack_s=0.4))


@pytest.mark.fault("K24")
def test_bad_calls_move_no_breaker():
    """100 calls that the groups refuse as the caller's mistake, then good ones: all served, no breaker has moved."""
    backends = groups(2)
    for backend in backends:
        backend.fault = lambda asked, index: "bad" if asked.max_tokens == 100 else None

    async def body(service):
        for _ in range(100):
            with pytest.raises(Refusal) as refusal:
                await collect(service, call(max_tokens=100))
            assert refusal.value.status == 400
        assert {breaker.state for breaker in service.panel.breakers} == {State.CLOSED}
        for pieces in await asyncio.gather(*(collect(service, call()) for _ in range(20))):
            check_whole(pieces, 12)
        assert service.counts["retries"] == 0

    play(backends, body)


@pytest.mark.fault("K10")
def test_what_can_never_fit_is_refused_at_the_door():
    backends = groups(2)

    async def body(service):
        began_s = time.monotonic()
        with pytest.raises(Refusal) as refusal:
            await collect(service, call(prompt_tokens=4000, max_tokens=97))
        assert (refusal.value.reason, refusal.value.status) == ("too_long", 400)
        assert "4096" in str(refusal.value)
        assert time.monotonic() - began_s < 30.0  # it was not held, which lasts a minute
        assert not backends[0].started + backends[1].started

    play(backends, body)


def test_busy_is_neutral_and_honoured():
    """One of three groups answers "busy" to everything: no client error, its breaker stays closed for the spell, few calls go there."""
    backends, asked = groups(), []
    backends[2].fault, backends[2].pause_s = (lambda asked, index: "busy" if index == -1 else None), 600.0

    async def body(service):
        for _ in range(3):
            for pieces in await asyncio.gather(*(collect(service, call()) for _ in range(20))):
                check_whole(pieces, 12)
            asked.append(len(backends[2].started))
        assert service.panel.breakers[2].state is State.CLOSED
        assert service.counts["attempts_lost"] == service.counts["retries"] == 0
        assert 1 <= asked[0] < 20 and asked == asked[:1] * 3  # those sent before it had said so, and nobody in its pause

    play(backends, body)


def test_all_busy_then_well_recovers_at_once():
    backends = groups()
    is_busy = [True]
    for backend in backends:
        backend.fault = lambda asked, index: "busy" if is_busy[0] and index == -1 else None

    async def body(service):
        done = await asyncio.gather(*(collect(service, call()) for _ in range(30)), return_exceptions=True)
        assert all(isinstance(one, Refusal) and one.status == 429 and one.retry_after_s > 0 for one in done)
        is_busy[0] = False
        began_s = time.monotonic()
        while True:
            try:
                check_whole(await collect(service, call()), 12)
                break
            except Refusal:
                await asyncio.sleep(0.05)
        assert time.monotonic() - began_s < SLOW_MACHINE_S

    play(backends, body, QUICK)


@pytest.mark.fault("K23")
def test_one_stuck_group_stalls_nobody():
    """One of four accepts and never answers; 64 callers. Calls that land elsewhere never wait for it; after the breaker's threshold no
    further call pays for it, apart from probes."""
    backends = groups(4)
    backends[0].fault = lambda asked, index: "hang" if index == -1 else None
    backends[0].makes_tokens = False
    floor_s = 2.0

    async def body(service):
        async def timed():
            began_s, asked = time.monotonic(), call()
            check_whole(await collect(service, asked), 12)
            return time.monotonic() - began_s, asked.call_id in backends[0].started

        first = await asyncio.gather(*(timed() for _ in range(64)))
        assert service.panel.breakers[0].openings and any(hit for _, hit in first)
        assert sorted(took_s for took_s, hit in first if not hit)[32] < floor_s  # the middle one or later: all of them, on a free core
        before, openings = len(backends[0].started), service.panel.breakers[0].openings
        for _ in range(5):
            await asyncio.gather(*(timed() for _ in range(20)))
        probes = service.panel.breakers[0].settings.probes_max
        assert len(backends[0].started) - before <= probes * (1 + service.panel.breakers[0].openings - openings)

    play(backends, body, replace(PATIENT, first_token_floor_s=floor_s))


def test_a_dead_process_is_out_at_once_and_comes_back():
    backends = groups(2)

    async def body(service):
        streams = [asyncio.create_task(collect(service, call(max_tokens=60))) for _ in range(8)]
        await asyncio.sleep(0.02)
        backends[0].is_alive = False
        for pieces in await asyncio.gather(*streams):
            check_whole(pieces, 60)
        await until(lambda: service.groups.alive()[0])  # the keeper started it again
        before = len(backends[0].started)
        while len(backends[0].started) == before:  # its breaker lets it in again
            for pieces in await asyncio.gather(*(collect(service, call()) for _ in range(20))):
                check_whole(pieces, 12)

    play(backends, body)


@pytest.mark.fault("K13")
def test_no_group_at_all_is_said_at_once():
    backends = groups(2)

    async def body(service):
        for backend in backends:
            backend.is_alive = False
            backend.start = None  # stays gone
        began_s = time.monotonic()
        with pytest.raises(Refusal) as refusal:
            await collect(service, call())
        assert refusal.value.status == 503 and refusal.value.retry_after_s > 0
        assert time.monotonic() - began_s < 30.0  # it was not held, which lasts a minute
        assert not await service.is_ready()

    play(backends, body)


def test_leaving_early_ends_the_work():
    """A caller that closes its stream, or is cancelled while it waits, frees its place at once."""
    backends = groups(1)

    async def body(service):
        asked = call(max_tokens=2000)
        stream = service.run(asked)
        await anext(stream)
        assert backends[0].inside == 1
        await stream.aclose()
        assert backends[0].inside == 0 and backends[0].cancelled == [asked.call_id]
        task = asyncio.create_task(collect(service, call(max_tokens=2000)))
        await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert backends[0].inside == 0
        assert service.panel.breakers[0].state is State.CLOSED

    play(backends, body)


def test_the_callers_deadline_ends_the_call():
    backends = groups(1)
    backends[0].fault = lambda asked, index: "hang" if index == 2 else None

    async def body(service):
        with pytest.raises(Refusal) as refusal:
            await collect(service, call(deadline_s=0.1))
        assert refusal.value.status == 504
        assert backends[0].inside == 0

    play(backends, body)


def test_attempts_are_bounded():
    """Every group fails everything: the call ends with 503 after attempts_max tries, each at another group as long as there is one."""
    backends = groups(3)
    for backend in backends:
        backend.fault = lambda asked, index: "die" if index == 2 else None

    async def body(service):
        with pytest.raises(Refusal) as refusal:
            await collect(service, call())
        assert refusal.value.reason == "attempts_spent"
        assert sum(len(backend.started) for backend in backends) == 3
        assert all(len(backend.started) == 1 for backend in backends)

    play(backends, body, replace(PATIENT, attempts_max=3))


def test_groups_lost_while_it_went_well_spend_no_tries():
    """A long answer outlives more groups than it has tries, where each brought some of it."""
    backends, left = groups(3), {9, 19, 29, 39}

    def once(asked, index):
        if index not in left:
            return None
        left.remove(index)
        return "die"

    for backend in backends:
        backend.fault = once

    async def body(service):
        check_whole(await collect(service, call(max_tokens=50)), 50)
        assert service.counts["attempts_lost"] == 4 and not left

    play(backends, body, replace(PATIENT, attempts_max=2))


class SlowToRise(Scripted):
    """Its next start takes `start_s`."""

    start_s = 0.0

    async def start(self) -> None:
        await asyncio.sleep(self.start_s)
        await super().start()


def test_a_begun_answer_outlives_the_loss_of_all_groups():
    """Its caller cannot ask for the rest alone: it waits for the first group that is back, longer than a new call would."""
    backends = [SlowToRise(f"g{i}", i) for i in range(2)]

    async def body(service):
        struck = []

        def fault(asked, index):
            if index == 5 and not struck:
                struck.append(index)
                for backend in backends:
                    backend.is_alive, backend.start_s = False, 1.0
                return "die"
            return None

        for backend in backends:
            backend.fault = fault
        check_whole(await collect(service, call(max_tokens=20)), 20)
        assert struck

    play(backends, body, replace(PATIENT, hold_max_s=0.1))


def test_ejected_groups_are_no_full_ones():
    """503 while all groups fail, for those that find them ejected too: 429 would say that the caller asks too much."""
    backends = groups(2)
    for backend in backends:
        backend.fault, backend.makes_tokens = (lambda asked, index: "die"), False

    async def body(service):
        reasons = Counter()
        for _ in range(12):
            with pytest.raises(Refusal) as refused:
                await collect(service, call())
            assert refused.value.status == 503
            reasons[refused.value.reason] += 1
        assert reasons["no_capacity"] and set(reasons) == {"attempts_spent", "no_capacity"}

    play(backends, body, DispatchSettings(hold_max_s=0.1, retry_wait_s=0.1))


def test_a_full_hold_queue_refuses_with_429():
    """One group whose queue takes 32 beside the 16 that run; what comes beyond is held, and refused when it may wait no longer."""
    backends = groups(1)
    backends[0].fault = lambda asked, index: "hang" if index == -1 else None

    async def body(service):
        tasks = [asyncio.create_task(collect(service, call(deadline_s=3.0))) for _ in range(70)]
        done = await asyncio.gather(*tasks, return_exceptions=True)
        statuses = Counter(one.status for one in done if isinstance(one, Refusal))
        assert statuses[429] >= 10 and sum(statuses.values()) == 70

    play(backends, body, DispatchSettings(first_token_floor_s=10.0, hold_max_s=0.3))


@pytest.mark.fault("K22")
def test_ready_rests_on_tokens():
    """Groups that accept and make nothing: not ready, whatever their processes say; ready as soon as one makes a token."""
    backends = groups(2)

    async def body(service):
        for backend in backends:
            backend.makes_tokens = False
        assert not await service.is_ready()
        backends[1].makes_tokens = True
        assert await service.is_ready()

    play(backends, body)


def test_a_report_of_nonsense_blinds_nobody():
    """One group's report cannot be taken in: the others' still are, and it is counted."""
    backends = groups(2)
    backends[0].report = lambda: GroupReport(time.monotonic(), 1, 0, rank_times=RankTimes(1, 0.0, 1, (0.1,) * 9, (0.1,) * 9))
    backends[1].report = lambda: GroupReport(time.monotonic(), 0, 0, kv_blocks_free=7, kv_blocks_total=512)

    async def body(service):
        await until(lambda: service.counts["bad_reports"] >= 2 and service.view().kv_blocks_free[1] == 7)
        check_whole(await collect(service, call()), 12)

    play(backends, body)
