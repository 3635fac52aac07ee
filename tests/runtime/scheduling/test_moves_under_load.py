"""Groups are split anew, drained, started and stopped, and calls moved, while calls run: none is lost, each token comes once, same
greedy text."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator

import msgspec
import pytest

from envs.decision.split_planner import CORNERS
from envs.domain.commands import Command, CommandKind
from runtime.calls import Call
from runtime.scheduling.prefix_memory import block_keys
from runtime.torch_tp.communicators.segment_names import segment_folder
from tests.conftest import GUARD_S, SLOWER
from tests.runtime.scheduling.moving_service import MovingService, check_exact, text_of
from tests.runtime.scheduling.service_parts import until

CALLS = 10
TRIES = 5


@pytest.fixture(scope="module", params=["emulated", "torch_tp"])
def service(request: pytest.FixtureRequest, kernels: None) -> Iterator[MovingService]:
    folder = str(request.getfixturevalue("dreams")) if request.param == "torch_tp" else None
    made = MovingService(request.param, folder)
    yield made
    made.close()


@pytest.fixture(scope="module")
def references(service: MovingService) -> list[str]:
    """The texts of unbroken runs."""

    async def body() -> list[str]:
        return [text_of(pieces) for pieces in await asyncio.gather(*(service.answer(service.ask(i)) for i in range(CALLS)))]

    return service.run(body())


async def _under_load(service: MovingService, references: list[str], moves) -> None:
    """Run all calls, `moves()` once all of them have tokens; check every answer."""
    lost = service.dispatcher.counts["attempts_lost"]
    asked = [service.ask(i) for i in range(CALLS)]
    found: list[list] = [[] for _ in asked]
    tasks = [asyncio.create_task(service.answer(one, pieces)) for one, pieces in zip(asked, found, strict=True)]
    while not all(found):
        await asyncio.sleep(0.002)
    await moves()
    await asyncio.gather(*tasks)
    for one, pieces, reference in zip(asked, found, references, strict=True):
        check_exact(pieces, one, reference)
    service.check_at_rest(lost)


def test_a_resplit_loses_nothing(service: MovingService, references: list[str]):
    """Three splits in a row, so that the oldest plan's residents must move: by shares, by a corner, back. The group reports what was
    asked."""
    moves = service.control.moves

    async def body() -> None:
        async def split() -> None:
            for shares in ([3.0, 1.0], [1.0, 3.0]):
                move = await service.order(CommandKind.SET_SPLIT, 0, plan=moves.shares_plan(0, shares))
                assert (move.outcome, move.error) == ("done", "")
                while service.backends[0].report().plan.is_moving:
                    await asyncio.sleep(0.01)
                said = service.backends[0].report().plan.query_heads
                assert said[0] / sum(said) == pytest.approx(shares[0] / 4.0)
            move = await service.order(CommandKind.SET_SPLIT, 0, argument=CORNERS.index("even"))
            assert move.outcome == "done" and move.paused_s is not None and 0.0 <= move.paused_s < SLOWER * 1.0
            assert service.telemetry.corner(0) == CORNERS.index("even")
            reports = service.telemetry.reports
            for _ in range(2):  # two more reports say the same
                last_s = reports[0].at_s
                await until(lambda: reports[0].at_s > last_s)  # noqa: B023
            assert service.telemetry.corner(0) == CORNERS.index("even")
            assert service.dispatcher.plans.plans[0].query_heads[0] == service.dispatcher.plans.plans[0].query_heads[1]

        await _under_load(service, references, split)

    service.run(body())


def test_a_rank_left_out_and_taken_back(service: MovingService, references: list[str]):
    """Fall back gives the slower rank nothing to do, restore gives it work again; calls go on through both."""

    async def body() -> None:
        async def there_and_back() -> None:
            assert (await service.order(CommandKind.FALL_BACK, 0)).outcome == "done"
            assert sorted(service.dispatcher.plans.plans[0].query_heads)[0] == 0
            assert (await service.order(CommandKind.RESTORE, 0)).outcome == "done"
            assert min(service.dispatcher.plans.plans[0].query_heads) > 0

        await _under_load(service, references, there_and_back)

    service.run(body())


def test_running_calls_migrate(service: MovingService, references: list[str]):
    """Every running call of the fuller group moves to the other: moved_calls counts them, nothing counts as a fault or a retry."""
    flights, is_done = service.telemetry.flights, []

    async def body() -> None:
        retries, moved = service.dispatcher.counts["retries"], 0

        async def migrate() -> None:
            source = int(len(flights.running[1]) > len(flights.running[0]))
            leaving = [flight.request.request_id for flight in flights.running[source]]
            done = [await service.order(CommandKind.MIGRATE, source, 1 - source, number) for number in leaving]
            gone = [move for move in done if move.outcome == "done"]
            assert all("ended" in move.error for move in done if move.outcome != "done")
            is_done.extend(gone)
            await asyncio.sleep(0)
            assert service.dispatcher.counts["moved_calls"] - moved == len(gone)
            assert all(move.detail.startswith(("KV copied", "computed again")) for move in gone)

        for _ in range(TRIES):  # where this machine is slow, all of them may have ended first
            if not is_done:
                moved = service.dispatcher.counts["moved_calls"]
                await _under_load(service, references, migrate)
        assert is_done and service.dispatcher.counts["retries"] == retries

    service.run(body())


async def _begun(service: MovingService, asked: Call) -> tuple[asyncio.Task, list, int, int]:
    """A call that has some tokens: its task and pieces, its group, its number."""
    pieces: list = []
    task = asyncio.create_task(service.answer(asked, pieces))
    while len(pieces) < 5:
        await asyncio.sleep(0.002)
    flights = service.telemetry.flights
    flight = next(f for flights_of in (*flights.running, *flights.waiting) for f in flights_of if f.call_id == asked.call_id)
    while not flight.is_admitted:
        await asyncio.sleep(0.002)
    return task, pieces, flight.group_index, flight.request.request_id


def _priced_for(service: MovingService, copied: bool) -> None:
    """Prices as if they had been measured."""
    service.control.moves.migration.prices._again_factor[:] = 50.0 if copied else 0.05
    service.control.moves.migration.prices._has_left[:] = True
    for price in service.control.moves.migration.prices._copies:
        price.pause_s, price.bytes_per_s = (1e-6, 1e12) if copied else (10.0, 1e3)


@pytest.mark.parametrize("copied", [True, False], ids=["copied", "again"])
def test_a_moved_call_takes_its_kv_along_where_that_is_cheaper(service: MovingService, references: list[str], copied: bool):
    """The log says which it was and why, and for how long the call stood still; prices follow what was measured; the text is the same."""
    moves = service.control.moves

    async def body() -> None:
        for prompt in range(26 if copied else 35, 200, 20):  # that no group has seen
            if await moved(prompt):
                return
        raise AssertionError("the call always ended first")

    async def moved(prompt: int) -> bool:
        """False: it had ended before, since this machine is slow."""
        _priced_for(service, copied)
        asked, lost = service.ask(prompt), service.dispatcher.counts["attempts_lost"]
        task, pieces, home, number = await _begun(service, asked)
        prices = moves.migration.prices
        before = prices._copies[home].pause_s, float(prices._again_factor[1 - home])
        counted = service.dispatcher.counts["moved_calls_copied"]
        listed_s = moves.migration.measured_price_s(Command(CommandKind.MIGRATE, home, 1 - home, number))
        move = await service.order(CommandKind.MIGRATE, home, 1 - home, number)
        if "ended" in move.error:
            await task
            return False
        assert (move.outcome, move.error) == ("done", "")
        assert listed_s is not None and 0.0 < listed_s <= move.price_s < 1.5 * listed_s  # it has a few more tokens by now
        assert move.detail.startswith("KV copied" if copied else "computed again: dearer") and " s against " in move.detail
        assert service.dispatcher.counts["moved_calls_copied"] == counted + copied
        expected_s = move.price_s
        await task
        check_exact(pieces, asked, text_of(await service.answer(service.ask(prompt))))
        if service.kind == "torch_tp":
            assert pieces[-1].times.hit_tokens == (asked.prompt_tokens if copied else 0)
        assert move.paused_s is not None and move.paused_s != expected_s and 0 < move.paused_s < GUARD_S
        after = prices._copies[home].pause_s, float(prices._again_factor[1 - home])
        assert (before[0] != after[0], before[1] != after[1]) == (copied, not copied)
        service.check_at_rest(lost)
        return True

    service.run(body())


@pytest.mark.parametrize("lost", ["source", "target"])
def test_an_engine_that_dies_while_kv_is_copied_costs_no_token(service: MovingService, references: list[str], lost: str):
    """Killed once the file with the KV is there; its end sweeps the file, and whoever is left goes on with the call (K20, K25)."""
    if service.kind == "emulated":
        pytest.skip("an emulated group has no process to kill")

    def files() -> list[str]:
        return [path.name for path in segment_folder().glob(f"ballast-{source_pid}-*-kv")]

    async def body() -> None:
        nonlocal source_pid
        _priced_for(service, True)
        reference = text_of(await service.answer(service.ask(8)))
        asked = service.ask(8)
        task, pieces, source, number = await _begun(service, asked)
        source_pid = service.backends[source].pid
        struck = source if lost == "source" else 1 - source
        moving = asyncio.create_task(service.order(CommandKind.MIGRATE, source, 1 - source, number))
        while not files() and not moving.done():
            await asyncio.sleep(0)
        service.backends[struck]._process.kill()
        move = await moving
        assert move.outcome in ("done", "refused")
        await task
        check_exact(pieces, asked, reference)
        while not service.dispatcher.groups.alive()[:2].all() or files():
            await asyncio.sleep(0.02)

    source_pid = 0
    service.run(body())


def test_a_drained_group_empties_without_an_error(service: MovingService, references: list[str]):
    """After drain_patience_s its calls go on elsewhere; it takes none until undrained, and then does."""

    async def body() -> None:
        moves, telemetry = service.control.moves, service.telemetry

        async def drain() -> None:
            moves.begin_drain(0)
            await until(lambda: moves.is_drained(0))
            assert not telemetry.flights.running[0] and not telemetry.flights.waiting[0]

        await _under_load(service, references, drain)
        served = service.dispatcher.served.copy()
        assert text_of(await service.answer(service.ask(0))) == references[0]
        assert service.dispatcher.served[0] == served[0]
        moves.end_drain(0)
        moves.begin_drain(1)
        assert text_of(await service.answer(service.ask(0))) == references[0]
        assert service.dispatcher.served[0] == served[0] + 1
        moves.end_drain(1)

    service.run(body())


def test_groups_are_started_and_stopped_under_load(service: MovingService, references: list[str]):
    """The parked group comes up and serves, then another is drained and parked; nobody notices."""

    async def body() -> None:
        telemetry, groups = service.telemetry, service.dispatcher.groups

        async def swap() -> None:
            out = await service.order(CommandKind.SCALE_OUT, 2)
            assert out.outcome == "done" and groups.alive()[2] and not telemetry.is_parked[2]
            inside = await service.order(CommandKind.SCALE_IN, 0)
            assert inside.outcome == "done" and telemetry.is_parked[0] and not service.backends[0].is_alive

        await _under_load(service, references, swap)
        service.control.moves.begin_drain(1)  # now the newcomer is alone
        assert [text_of(await service.answer(service.ask(i))) for i in range(3)] == references[:3]
        assert service.dispatcher.served[2] >= 3
        service.control.moves.end_drain(1)
        assert (await service.order(CommandKind.SCALE_OUT, 0)).outcome == "done"  # as the next test found it
        assert (await service.order(CommandKind.SCALE_IN, 2)).outcome == "done"

    service.run(body())


def test_what_is_not_possible_is_refused_by_name(service: MovingService, references: list[str]):
    async def body() -> None:
        regroup = await service.order(CommandKind.REGROUP, 2, 0)
        assert regroup.outcome == "refused" and regroup.error.startswith("together 4 ranks; a group may have 2")
        gone = await service.order(CommandKind.MIGRATE, 0, 1, 123456)
        assert gone.outcome == "refused" and "ended" in gone.error
        again = await service.order(CommandKind.SCALE_OUT, 0)
        assert again.outcome == "refused" and "not parked" in again.error
        assert [move.outcome for move in list(service.control.moves.log)[:3]] == ["refused"] * 3

    service.run(body())


def test_a_lost_rank_is_seen_and_comes_back(service: MovingService, references: list[str]):
    """A rank of group 1 is killed under load: decisions know it by its group's report (no member, no width, speed 0), the group goes on
    serially, and when the engine has taken the rank back it has work again. No call fails."""
    if service.kind == "emulated":
        pytest.skip("an emulated group has no rank to kill")

    async def body() -> None:
        plans = service.dispatcher.plans

        async def strike() -> None:
            # once is too little: a rank is back in less time than lies between two reports
            while plans.members(1)[1] or plans.plans[1].query_heads[1]:
                service.backends[1].strike(1, signal.SIGKILL)
                await asyncio.sleep(0.05)
            assert plans.speed_factors(1)[1] == 0.0
            await until(lambda: plans.members(1)[1] and plans.plans[1].query_heads[1] > 0)

        service.control.moves.begin_drain(0)  # all of them are in group 1 when it is struck
        try:
            await _under_load(service, references, strike)
        finally:
            service.control.moves.end_drain(0)

    service.run(body())


def test_a_rank_lost_while_nothing_runs_gets_its_work_back(service: MovingService, references: list[str]):
    """With no step to hear of the loss, the slide that gives the returned rank its work was ended by the report of it, for good."""
    if service.kind == "emulated":
        pytest.skip("an emulated group has no rank to kill")

    async def body() -> None:
        for _ in range(2):
            await until(lambda: (plan := service.backends[1].report().plan) is not None and not plan.is_moving)
            before = service.backends[1].report().plan
            service.backends[1].strike(1, signal.SIGKILL)
            while (now := service.backends[1].report().plan) is None or now.version < before.version + 2 or not now.query_heads[1]:
                await asyncio.sleep(0.01)
            assert now.members == (0, 1)

    service.run(body())


def test_a_conversation_survives_the_drain_and_the_loss_of_its_group(service: MovingService, references: list[str]):
    """Its next turn is computed elsewhere with the same text, and the one after that finds its beginning there; what a lost group held
    is forgotten."""
    if service.kind == "emulated":
        pytest.skip("emulated groups keep no prefixes")
    prompt = tuple(3 + i % 200 for i in range(70))

    def turn(extra: int) -> Call:
        return msgspec.structs.replace(service.ask(0, 8), prompt_ids=prompt + (9,) * extra, prompt_tokens=70 + extra)

    async def body() -> None:
        dispatcher, moves = service.dispatcher, service.control.moves
        first = text_of(await service.answer(turn(0)))
        home = int(dispatcher.prefixes.hits(block_keys(prompt)).argmax())
        alone = text_of(await service.answer(turn(3)))
        moves.begin_drain(home)
        served = dispatcher.served.copy()
        assert text_of(await service.answer(turn(3))) == alone
        other = int((dispatcher.served - served).argmax())
        assert other != home and dispatcher.prefixes.hits(block_keys(prompt))[other] == 64
        assert text_of(await service.answer(turn(0))) == first
        assert dispatcher.served[other] == served[other] + 2
        moves.end_drain(home)
        service.backends[other]._process.kill()
        assert text_of(await service.answer(turn(3))) == alone
        while not dispatcher.groups.alive()[other] or dispatcher.prefixes.hits(block_keys(prompt))[other]:
            await asyncio.sleep(0.05)
        assert dispatcher.prefixes.hits(block_keys(prompt))[home] == 64

    service.run(body())
