"""A parked group's ranks join a group that serves: it is emptied and started anew with them, no call is lost, and the donor is gone."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from agents.heuristics.controlling import PRICE
from envs.decision.move_candidates import rebalance_candidates
from envs.domain.commands import Command, CommandKind
from runtime.backends.emulated import EmulatedBackend
from runtime.backends.group_messages import HostSettings
from runtime.backends.interface import BackendFault, MoveRefused
from runtime.backends.openai_http import OpenAiHttpBackend
from runtime.backends.torch_tp import TorchTpBackend
from runtime.calls import Call, Piece, Refusal
from runtime.scheduling.control_settings import ControlSettings
from runtime.scheduling.metrics import SchedulingMetrics
from runtime.scheduling.move import Move
from runtime.torch_tp.communicators.segment_names import segment_folder
from tests.envs import small_worlds as W
from tests.envs.small_worlds import PAIR, SOLO, SPARE
from tests.runtime.scheduling.moving_service import MovingService, check_exact, text_of
from tests.runtime.scheduling.service_parts import LIMITS, call, check_whole, until
from tests.runtime.scheduling.test_control_loop import EmulatedService, play

K = CommandKind
SPEC = W.cluster(LIMITS)
ALONE = replace(SPEC, parked=(True, False, True))  # the pair is there for its two rank columns
SETTINGS = ControlSettings(is_on=False, drain_patience_s=2.0)


class Asked:
    """Calls under way and the pieces that they have."""

    def __init__(self, service: EmulatedService) -> None:
        self._service = service
        self.found: list[list[Piece]] = []
        self.tasks: list[asyncio.Task[None]] = []
        self._lengths: list[int] = []

    def add(self, count: int, max_tokens: int, deadline_s: float = 1e6) -> None:
        for _ in range(count):
            self.found.append([])
            self._lengths.append(max_tokens)
            self.tasks.append(asyncio.create_task(self._run(call(64, max_tokens, deadline_s, ignore_eos=True), self.found[-1])))

    async def _run(self, asked: Call, into: list[Piece]) -> None:
        async for piece in self._service.dispatcher.run(asked):
            into.append(piece)

    async def check_whole(self) -> None:
        while not all(task.done() for task in self.tasks):
            await self._service.pass_s(1.0)
        await asyncio.gather(*self.tasks)
        for pieces, tokens in zip(self.found, self._lengths, strict=True):
            check_whole(pieces, tokens)
        counts = self._service.dispatcher.counts
        assert counts["attempts_lost"] == 0 and not any(name.startswith("refused_") for name in counts)


async def carried_out(service: EmulatedService, command: Command) -> Move:
    """With time passing meanwhile."""
    task = asyncio.create_task(service.control.moves.carry_out(command, "operator", "a test"))
    while not task.done():
        await service.pass_s(0.1)
        await asyncio.sleep(0.01)
    return await task


async def into_solo(service: EmulatedService, asked: Asked) -> None:
    """Calls that run and wait in the group that others shall join."""
    service.telemetry.is_draining[PAIR] = True
    asked.add(20, 300)
    await service.pass_s(2.0)
    service.telemetry.is_draining[PAIR] = False
    flights = service.telemetry.flights
    assert flights.running[SOLO] and flights.waiting[SOLO]


def kernel_ranks(backend: EmulatedBackend) -> int:
    return backend._state.slow.shape[1]


def check_sizes(service: EmulatedService, ranks: int) -> None:
    """Everybody who describes the group says the same."""
    telemetry, plans = service.telemetry, service.dispatcher.plans
    service.dispatcher.groups.take_report_now(SOLO)
    assert len(telemetry.groups[SOLO].ranks) == plans.plans[SOLO].ranks == kernel_ranks(service.backends[SOLO]) == ranks
    assert len(telemetry.reports[SOLO].plan.query_heads) == len(plans.members(SOLO)) == len(plans.speed_factors(SOLO)) == ranks
    assert telemetry.model.has_rank[SOLO].tolist() == [True, ranks == 2]
    view = service.dispatcher.view()
    assert (view.rank_ratio[SOLO] > 0).tolist() == [True, ranks == 2]
    assert view.kv_blocks_total[SOLO] == telemetry.reports[SOLO].kv_blocks_total


def check_gone(service: EmulatedService) -> None:
    """The donor is nobody's candidate, is never started, and its metrics end."""
    dispatcher, moves = service.dispatcher, service.control.moves
    health = dispatcher.plans.declared_health(moves.may_start(), 30.0, 2.0, 60.0)
    plans, tables = dispatcher.plans.plans, service.telemetry.experience.tables
    found = rebalance_candidates(dispatcher.view(), service.telemetry.groups, plans, tables, health)
    assert SPARE not in {command.group_index for command in found.commands}
    for command in (
        Command(K.SCALE_OUT, SPARE),
        Command(K.SET_SPLIT, SPARE),
        Command(K.REGROUP, SPARE, PAIR),
        Command(K.REGROUP, PAIR, SPARE),
    ):
        assert "its ranks serve in" in moves.why_not(command)
    for order in (moves.begin_drain, moves.end_drain):
        with pytest.raises(MoveRefused, match="its ranks serve in"):
            order(SPARE)
    dispatcher.groups.take_report_now(SPARE)
    assert not service.backends[SPARE].is_alive and service.backends[SPARE].report() is None and not service.telemetry.fits(1)[SPARE]
    registry = CollectorRegistry()
    registry.register(SchedulingMetrics(dispatcher))
    names = [group.name for group in SPEC.groups]
    labels = [
        line.split("{")[1].split("}")[0]
        for line in generate_latest(registry).decode().splitlines()
        if line.startswith("ballast_rank_speed")
    ]
    assert labels == [f'group="{names[g]}",rank="{r}"' for g in (PAIR, SOLO) for r in range(2)]


def test_the_whole_way(kernels):
    """Waiting and running calls leave, the group comes back with two ranks and serves; then it dies, and comes back with two again."""

    async def body(service: EmulatedService) -> None:
        asked, telemetry = Asked(service), service.telemetry
        check_sizes(service, 1)
        await into_solo(service, asked)
        before_s, capability = service.clock.now_s, service.dispatcher.view().capability[SOLO]
        move = await carried_out(service, Command(K.REGROUP, SPARE, SOLO))
        assert (move.outcome, move.error, move.detail) == ("done", "", "1 + 1 ranks") and move.calls > 0
        assert 0.0 < move.paused_s < move.took_s <= service.clock.now_s - before_s
        assert telemetry.joined == {SPARE: SOLO} and not telemetry.is_draining[SOLO] and not telemetry.is_parked.any()
        check_sizes(service, 2)
        check_gone(service)
        assert service.dispatcher.view().capability[SOLO] > capability
        assert service.dispatcher.plans.cold_start_s is not None and service.control.discipline.debt_s()[SOLO] > 0.0
        served = service.dispatcher.served[SOLO]
        telemetry.is_draining[PAIR] = True
        asked.add(4, 50)
        await service.pass_s(1.0)
        assert service.dispatcher.served[SOLO] == served + 4
        telemetry.is_draining[PAIR] = False
        await asked.check_whole()
        service.backends[SOLO].kill()
        await service.pass_s(0.1)
        while not service.dispatcher.groups.alive()[SOLO]:
            await asyncio.sleep(0.05)
        await service.pass_s(0.5)
        check_sizes(service, 2)

    play(SPEC, body, SETTINGS)


def test_the_only_group_is_waited_for(kernels):
    """Nobody else is there: those inside end there; those that come meanwhile wait beyond hold_max_s, for the restart, and are served. One
    whose deadline is sooner is told so."""

    async def body(service: EmulatedService) -> None:
        dispatcher, asked, may_start = service.dispatcher, Asked(service), asyncio.Event()
        dispatcher.apply(replace(dispatcher.settings, hold_max_s=0.5))
        backend, start = service.backends[SOLO], service.backends[SOLO].start

        async def slowly() -> None:
            await may_start.wait()
            await start()

        backend.start = slowly
        asked.add(4, 200)
        await service.pass_s(1.0)
        task = asyncio.create_task(carried_out(service, Command(K.REGROUP, SPARE, SOLO)))
        await service.pass_s(1.0)
        asked.add(3, 20)
        while backend.is_alive:
            await asyncio.sleep(0.01)
        assert all(len(pieces) == 200 for pieces in asked.found[:4]) and not any(asked.found[4:])
        asked.add(3, 20)
        late = Asked(service)
        late.add(1, 20, deadline_s=service.clock.now_s + 3.0 - asyncio.get_running_loop().time())
        await service.pass_s(5.0)
        with pytest.raises(Refusal, match="its deadline passed"):
            await late.tasks[0]
        await until(lambda: dispatcher.held_calls.count == 6)  # but for the moment in which they are asked about again
        assert not any(asked.found[4:])
        del dispatcher.counts["refused_deadline"]
        may_start.set()
        assert (await task).outcome == "done"
        await asked.check_whole()
        assert not dispatcher.groups.is_returning.any()
        dispatcher.telemetry.is_draining[SOLO] = True  # nobody returns any more
        late.add(1, 20)
        await service.pass_s(0.1)
        with pytest.raises(Refusal, match="no group can serve"):
            await late.tasks[-1]

    play(ALONE, body, SETTINGS)


def test_a_start_that_fails_goes_back(kernels):
    """The old group serves again, says why, and is left alone for a while; the donor stays parked and can be started."""

    async def body(service: EmulatedService) -> None:
        dispatcher, asked, backend = service.dispatcher, Asked(service), service.backends[SOLO]
        start, tries = backend.start, []

        async def unless_merged() -> None:
            tries.append(kernel_ranks(backend))
            if tries[-1] == 2:
                raise BackendFault("rank 1 has no memory")
            await start()

        backend.start = unless_merged
        await into_solo(service, asked)
        move = await carried_out(service, Command(K.REGROUP, SPARE, SOLO))
        assert move.outcome == "failed" and move.error.endswith("rank 1 has no memory") and "went back: rank 1" in move.detail
        assert tries == [2, 1]
        check_sizes(service, 1)
        telemetry = service.telemetry
        assert not telemetry.joined and telemetry.is_parked.tolist() == [False, False, True]
        assert dispatcher.groups.alive()[SOLO] and not telemetry.is_draining.any() and not dispatcher.groups.is_returning.any()
        assert service.control.discipline.debt_s()[SOLO] > 0.0 and not service.control.moves.under_way
        await asked.check_whole()
        served = dispatcher.served[SOLO]
        telemetry.is_draining[PAIR] = True
        asked.add(2, 20)
        await asked.check_whole()
        assert dispatcher.served[SOLO] == served + 2
        assert (await carried_out(service, Command(K.SCALE_OUT, SPARE))).outcome == "done"

    play(SPEC, body, SETTINGS)


def test_those_who_waited_for_a_start_that_fails_are_served_too(kernels):
    """They have waited longer than hold_max_s when the old group is back, whose breaker lets one in at first."""

    async def body(service: EmulatedService) -> None:
        dispatcher, asked, may_fail = service.dispatcher, Asked(service), asyncio.Event()
        dispatcher.apply(replace(dispatcher.settings, hold_max_s=1.5))
        backend, start = service.backends[SOLO], service.backends[SOLO].start

        async def unless_merged() -> None:
            if kernel_ranks(backend) == 2:
                await may_fail.wait()
                raise BackendFault("rank 1 has no memory")
            await start()

        backend.start = unless_merged
        task = asyncio.create_task(carried_out(service, Command(K.REGROUP, SPARE, SOLO)))
        while backend.is_alive:
            await asyncio.sleep(0.01)
        asked.add(3, 20)
        await service.pass_s(5.0)
        may_fail.set()
        assert (await task).outcome == "failed"
        await asked.check_whole()

    play(ALONE, body, SETTINGS)


def test_what_cannot_join(kernels):
    """Refused by name: too many ranks for the snapshot's columns, a donor that serves, a target that does not, or that is being drained."""

    async def body(service: EmulatedService) -> None:
        moves = service.control.moves
        for donor, target, said in (
            (SPARE, PAIR, "together 3 ranks; a group may have 2"), (SPARE, SPARE, "cannot join itself"), (SOLO, PAIR, "together 3 ranks"),
        ):  # fmt: skip
            assert said in (await carried_out(service, Command(K.REGROUP, donor, target))).error
        moves.begin_drain(SOLO)
        assert "an operator drains it" in moves.why_not(Command(K.REGROUP, SPARE, SOLO))
        moves.end_drain(SOLO)
        assert (await carried_out(service, Command(K.SCALE_OUT, SPARE))).outcome == "done"
        assert "it is not parked" in moves.why_not(Command(K.REGROUP, SPARE, SOLO))
        for g in (SPARE, SOLO):
            assert (await carried_out(service, Command(K.SCALE_IN, g))).outcome == "done"
        assert "is not running" in moves.why_not(Command(K.REGROUP, SPARE, SOLO))

    play(SPEC, body, SETTINGS)


def test_it_is_offered_at_the_price_of_a_start(kernels):
    """The simulator's candidate; its price is the declared one until a start was measured; after one move its group is left alone."""

    async def body(service: EmulatedService) -> None:
        dispatcher, control = service.dispatcher, service.control

        def offered(cold_start_s: float | None):
            dispatcher.plans.cold_start_s = cold_start_s
            health = dispatcher.plans.declared_health(control.moves.may_start(), 30.0, 2.0, 60.0)
            plans, tables = dispatcher.plans.plans, service.telemetry.experience.tables
            view = dispatcher.view()
            view.is_up[PAIR] = False  # the simulator offers the first group that has room
            found = rebalance_candidates(view, service.telemetry.groups, plans, tables, health)
            found = control._with_measured_prices(found)
            index = found.commands.index(Command(K.REGROUP, SPARE, SOLO))
            return found, index, float(np.expm1(found.moves[index, PRICE]))

        assert offered(None)[2] == pytest.approx(2.0) and offered(7.0)[2] == pytest.approx(7.0)
        found, index, _ = offered(7.0)
        assert control.discipline.judge(found)[0][index]
        control.discipline.made(found.commands[index], 7.0)
        assert control.discipline.judge(found)[1][index].startswith("budget: 7 s")

    play(SPEC, body, SETTINGS)


def test_only_ranks_that_agree_join():
    """Same kind, model and number type; foreign servers' ranks never."""
    host = HostSettings("a-model", ({"speed": 1.0},), 2048, 8, 32)
    own = TorchTpBackend("own", 0, host)
    assert own.why_not_join(TorchTpBackend("like", 1, replace(host, ranks=({"slow_factor": 2.0},)))) == ""
    assert "dtype differs: 'float32' in own, 'bfloat16' in other" in own.why_not_join(
        TorchTpBackend("other", 1, replace(host, dtype="bfloat16"))
    )
    assert "model differs" in own.why_not_join(TorchTpBackend("other", 1, replace(host, model="b-model")))
    played = [EmulatedBackend(group, g, LIMITS) for g, group in enumerate(SPEC.groups)]
    assert played[SOLO].why_not_join(played[SPARE]) == ""
    smaller = replace(SPEC.groups[SPARE], model=replace(SPEC.model, name="smaller"))
    assert "model differs" in played[SOLO].why_not_join(EmulatedBackend(smaller, 1, LIMITS))
    foreign = OpenAiHttpBackend("foreign", 1, "http://127.0.0.1:9", "m")
    assert "another kind" in own.why_not_join(foreign) and "another kind" in played[SOLO].why_not_join(own)
    assert "foreign" in foreign.why_not_join(own)
    before = own.kv_home, own.is_emulation
    undo = own.join(TorchTpBackend("like", 1, replace(host, ranks=({"slow_factor": 2.0},))), SPEC.groups[SOLO])
    assert len(own._settings.ranks) == 2 and own.is_emulation
    undo()
    assert len(own._settings.ranks) == 1 and (own.kv_home, own.is_emulation) == before


# --- real ranks, and emulated ones in real time -----------------------------------------------------------------------------

CALLS = 4


@pytest.mark.parametrize("kind", ["emulated", "torch_tp"])
def test_ranks_join_under_load(kind: str, request: pytest.FixtureRequest, kernels: None):
    """The greedy text is the same before, across and after, each token once; killed, the group comes back with both ranks. The third
    group, for whose sake there are two rank columns, never runs."""
    folder = str(request.getfixturevalue("dreams")) if kind == "torch_tp" else None
    tokens = 60 if kind == "torch_tp" else 15
    service, pids = MovingService(kind, folder, slow_factor=1.0, ranks=(1, 1, 2), parked=2), list[int]()

    async def body() -> None:
        dispatcher, backend = service.dispatcher, service.backends[0]
        asked = [service.ask(i, tokens) for i in range(CALLS)]
        references = [text_of(pieces) for pieces in await asyncio.gather(*(service.answer(one) for one in asked))]

        def again(number: int):
            return service.ask(number, tokens)

        if kind == "torch_tp":  # the engine would go on over the rank that works
            good = service.backends[1]._settings
            service.backends[1]._settings = replace(good, ranks=({"device": "cuda:63"},))
            failed = await service.order(K.REGROUP, 1, 0)
            assert failed.outcome == "failed" and failed.error.endswith("up, but without rank 1"), failed
            assert text_of(await service.answer(again(2))) == references[2] and len(backend.report().plan.query_heads) == 1
            service.backends[1]._settings = good
        inside: list[list[Piece]] = [[] for _ in asked]
        tasks = [asyncio.create_task(service.answer(again(i), pieces)) for i, pieces in enumerate(inside)]
        while not all(inside):
            await asyncio.sleep(0.002)
        joining = asyncio.create_task(service.order(K.REGROUP, 1, 0))
        await asyncio.sleep(0)
        while not dispatcher.groups.is_returning[0]:
            await asyncio.sleep(0.002)
        waiting = [asyncio.create_task(service.answer(again(i))) for i in range(CALLS)]
        move = await joining
        assert (move.outcome, move.error, move.detail) == ("done", "", "1 + 1 ranks")
        assert dispatcher.telemetry.joined == {1: 0}
        for pieces, one, reference in zip(inside, asked, references, strict=True):
            check_exact(pieces, one, reference)
        await asyncio.gather(*tasks)
        for task, one, reference in zip(waiting, asked, references, strict=True):
            check_exact(await task, one, reference)
        service.check_at_rest()
        await two_ranks()
        assert [text_of(pieces) for pieces in await asyncio.gather(*(service.answer(again(i)) for i in range(CALLS)))] == references
        lost = dispatcher.counts["groups_lost"]
        if kind == "torch_tp":
            pids.append(backend.pid)
            backend._process.kill()
        else:
            backend.kill()
        await until(lambda: dispatcher.counts["groups_lost"] > lost and dispatcher.groups.alive()[0])
        await two_ranks()
        assert text_of(await service.answer(again(1))) == references[1]
        if kind == "torch_tp":
            pids.append(backend.pid)

    async def two_ranks() -> None:
        """The group itself says that both work."""
        while (said := service.backends[0].report()) is None or said.plan is None or said.plan.is_moving:
            await asyncio.sleep(0.01)
        assert said.plan.members == (0, 1) and min(said.plan.query_heads) > 0
        service.dispatcher.groups.take_report_now(0)
        assert min(service.dispatcher.plans.plans[0].query_heads) > 0

    try:
        service.run(body())
    finally:
        service.close()
    left = [path.name for pid in pids for path in segment_folder().glob(f"ballast-{pid}-*")]
    assert not left and not any(backend.is_alive for backend in service.backends)
