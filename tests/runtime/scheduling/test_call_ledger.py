"""What the ledger tells of a call is what the call's own notes say: a call that moved is told of where it ended."""

from __future__ import annotations

import asyncio

from runtime.backends.interface import GivenBack
from runtime.request_notes import ATTEMPTS_NOTED_MAX, AttemptNotes
from runtime.scheduling.call_ledger import DONE, CallAccount
from tests.runtime.scheduling.service_parts import Scripted, call, check_whole, collect, dispatcher, with_service


def test_a_moved_call_is_told_of_where_it_ended():
    backends = [Scripted(f"g{i}", i, gap_s=0.005) for i in range(2)]
    told: list[CallAccount] = []

    async def body(service):
        service.ledger.listeners.append(told.append)
        answer = asyncio.create_task(collect(service, asked := call(max_tokens=20)))
        while not (flying := [flight for group in service.telemetry.flights.running for flight in group]):
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.03)
        first = flying[0].group_index
        flying[0].recall(GivenBack("moved by the test", 1 - first))
        check_whole(await answer, 20)
        (account,) = told
        assert account.end == DONE and account.tokens == 20
        assert [attempt.group for attempt in asked.notes.attempts] == [f"g{first}", f"g{1 - first}"]
        assert account.last.group == f"g{1 - first}"
        assert (account.last.source, account.attempts) == ("moved", 2)
        assert account.first_s == asked.notes.attempts[0].first_s and account.last_s == asked.notes.attempts[1].last_s

    asyncio.run(with_service(dispatcher(backends), body))


def test_attempts_are_counted_beyond_those_that_are_noted():
    asked = call()
    for number in range(ATTEMPTS_NOTED_MAX + 4):
        asked.notes.begin(AttemptNotes(f"g{number}", "heuristic", "", 0.0, 0.0))
    account = CallAccount(asked, 0.0)
    assert account.attempts == ATTEMPTS_NOTED_MAX + 4 and len(asked.notes.attempts) == ATTEMPTS_NOTED_MAX
    assert account.last.group == f"g{ATTEMPTS_NOTED_MAX + 3}"
