"""The control loop decides as the simulator does, from the service's own snapshot, and never makes moving the work. Clock injected, no
sleeping."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np

from agents.policy_bundle import write_bundle
from envs.decision.move_candidates import rebalance_candidates
from envs.decision.move_discipline import DisciplineSettings, MoveDiscipline
from envs.decision.observation import FEATURES
from envs.decision.split_planner import CORNERS
from envs.domain.commands import Command, CommandKind
from envs.scenario.cluster_file import load_cluster
from runtime.backends.emulated import EmulatedBackend
from runtime.backends.openai_http import OpenAiHttpBackend
from runtime.scheduling.control_loop import ControlLoop
from runtime.scheduling.control_settings import ControlSettings
from runtime.scheduling.dispatch_settings import DispatchSettings
from runtime.scheduling.dispatcher import Dispatcher
from runtime.scheduling.move import Move
from runtime.scheduling.policy_client import PolicyClient
from runtime.scheduling.policy_guard import PolicyGuard
from runtime.scheduling.telemetry import Telemetry
from tests.runtime.scheduling.service_parts import LIMITS, Scripted, call, cluster
from tests.runtime.scheduling.test_policy_faults import contents

K = CommandKind


class Clock:
    def __init__(self) -> None:
        self.now_s = 5000.0

    def __call__(self) -> float:
        return self.now_s


class EmulatedService:
    """Emulated groups that live by an injected clock: `pass_s` moves it and lets everybody do what is due."""

    def __init__(self, spec, settings: ControlSettings) -> None:
        self.clock = Clock()
        self.backends = [EmulatedBackend(group, g, spec.limits, now_s=self.clock) for g, group in enumerate(spec.groups)]
        self.telemetry = Telemetry(spec)
        dispatch = DispatchSettings(hold_max_s=600.0, first_token_floor_s=1e6, silence_slack_s=1e6, class_timeout_limits=1e6)
        self.dispatcher = Dispatcher(self.backends, self.telemetry, dispatch, now_s=self.clock, seed=3)
        self.control = ControlLoop(self.dispatcher, settings, now_s=self.clock, seed=3)
        self.tasks: list[asyncio.Task] = []

    async def start(self) -> None:
        await self.dispatcher.start()
        await self.pass_s(0.2)

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.control.close()
        await self.dispatcher.close()

    async def pass_s(self, seconds: float, step_s: float = 0.1) -> None:
        for _ in range(round(seconds / step_s)):
            self.clock.now_s += step_s
            for backend in self.backends:
                self.dispatcher.groups.take_report_now(backend.group_index)
            for _ in range(4):
                await asyncio.sleep(0)

    async def tick(self) -> None:
        """Both decisions, and what they order, with time passing meanwhile."""
        await self.control.tick()
        while self.control.moves.under_way:
            await self.pass_s(0.1)
            await asyncio.sleep(0.01)
        await self.control.settle()

    def ask(self, count: int, prompt_tokens: int, max_tokens: int) -> None:
        for _ in range(count):
            asked = call(prompt_tokens, max_tokens, deadline_s=1e6, ignore_eos=True)

            async def run(one=asked) -> None:
                async for _ in self.dispatcher.run(one):
                    pass

            self.tasks.append(asyncio.create_task(run()))


def play(spec, body, settings: ControlSettings | None = None) -> None:
    async def run() -> None:
        service = EmulatedService(spec, settings or ControlSettings(is_on=False))
        await service.start()
        try:
            await body(service)
        finally:
            await service.close()

    asyncio.run(run())


def unlike_pair():
    """A 3090 and a 4090 in one group: one long answer wants another split than a hundred short ones, by a third of the step."""
    spec = load_cluster("consumer-2")
    limits = replace(LIMITS, max_running=160, queue_limit=160, kv_blocks=8192)
    return replace(spec, groups=spec.groups[:1], parked=(False,), limits=limits, faults=())


async def square_wave(service: EmulatedService) -> list[Move]:
    """Few calls and many in turns of 10 s for 200 s, a tick every 5 s; returns the splits that were made."""
    for turn in range(20):
        for _ in range(2):
            service.ask(*((48, 16, 40) if turn % 2 else (1, 2000, 80)))
            await service.pass_s(0.5)
            await service.tick()
            await service.pass_s(4.5, step_s=0.5)
    assert {move.outcome for move in service.control.moves.log} == {"done"}
    assert service.dispatcher.counts["attempts_lost"] == 0
    return [move for move in service.control.moves.log if move.command.kind is K.SET_SPLIT]


def test_a_square_wave_of_load_makes_no_oscillation(kernels):
    """Undisciplined, the planner would follow every swing; disciplined, it follows the first ones, then ever fewer, in less than 5 % of
    the time."""
    counts = {}

    async def body(service: EmulatedService) -> None:
        began_s = service.clock.now_s
        splits = await square_wave(service)
        paused_s = [move.paused_s or 0.0 for move in splits]
        assert sum(paused_s) <= 0.05 * (service.clock.now_s - began_s) + max(paused_s)
        counts["disciplined"] = len(splits)

    async def free(service: EmulatedService) -> None:
        settings = DisciplineSettings(budget_fraction=1.0, split_stay_s=0.0, stay_growth=1.0)
        service.control.discipline = MoveDiscipline(1, service.clock, settings)
        counts["free"] = len(await square_wave(service))

    play(unlike_pair(), body)
    play(unlike_pair(), free)
    assert counts["free"] >= 14
    assert 1 <= counts["disciplined"] <= 7


def test_a_pressed_fleet_requeues_first_then_starts_the_parked_group(kernels):
    """Group 0 is flooded while group 1 is nearly idle: its queue is asked again before a cold start is paid. Pressed on, the parked
    group comes."""
    limits = replace(LIMITS, max_running=2, queue_limit=64)

    async def body(service: EmulatedService) -> None:
        for g in (1,):
            service.telemetry.is_draining[g] = True
        service.ask(24, 2000, 100)
        await service.pass_s(2.0)
        service.telemetry.is_draining[1] = False
        assert len(service.telemetry.flights.waiting[0]) >= 20
        kinds = []
        for _ in range(12):
            service.ask(8, 2000, 100)
            await service.pass_s(5.0)
            await service.tick()
            kinds = [move.command.kind for move in reversed(service.control.moves.log)]
            if K.SCALE_OUT in kinds:
                break
        assert kinds[0] is K.REQUEUE and K.SCALE_OUT in kinds
        assert service.dispatcher.counts["requeued_calls"] >= 10
        assert service.telemetry.flights.running[1] and not service.telemetry.is_parked[2]
        assert service.dispatcher.counts["attempts_lost"] == 0

    play(cluster(3, limits, parked=1), body, ControlSettings(is_on=False, cold_start_s=10.0))


def test_a_fleet_that_breathes_does_not_pant(kernels):
    """Crowds and silence in turns of a minute, for a quarter of an hour, with `elastic`: the parked group comes and goes, but ever more
    seldom;
    no error."""
    limits = replace(LIMITS, max_running=2, queue_limit=64)

    async def body(service: EmulatedService) -> None:
        for turn in range(15):
            for _ in range(6):
                if turn % 2 == 0:
                    service.ask(6, 2000, 60)
                await service.pass_s(10.0, step_s=0.5)
                await service.tick()
        done = [move.command.kind for move in service.control.moves.log if move.outcome == "done"]
        assert 1 <= done.count(K.SCALE_OUT) <= 5 and 1 <= done.count(K.SCALE_IN) <= 4
        assert service.dispatcher.counts["attempts_lost"] == 0
        await asyncio.gather(*service.tasks)

    play(cluster(3, limits, parked=1), body, ControlSettings(is_on=False, rebalance="elastic"))


def test_the_candidates_are_the_simulators(kernels):
    """What the loop lists is what `rebalance_candidates` makes of its own snapshot; no group of two where the largest has one rank."""

    async def body(service: EmulatedService) -> None:
        service.ask(6, 200, 200)
        await service.pass_s(2.0)
        dispatcher, control = service.dispatcher, service.control
        health = dispatcher.plans.declared_health(control.moves.may_start(), 30.0, 2.0, 60.0)
        assert health.is_parked.tolist() == [False, False, True]
        found = rebalance_candidates(
            dispatcher.view(), service.telemetry.groups, dispatcher.plans.plans, service.telemetry.experience.tables, health
        )
        kinds = {command.kind for command in found.commands}
        assert {K.KEEP, K.SCALE_OUT, K.SCALE_IN} <= kinds
        assert K.REGROUP not in kinds and "together 2 ranks" in control.moves.why_not(Command(K.REGROUP, 2, 0))
        assert control.moves.why_not(Command(K.SCALE_OUT, 2)) == ""

    play(cluster(3, parked=1), body)


def test_a_very_slow_rank_is_left_out_and_taken_back(kernels):
    """One rank of two at a tenth of its speed: the group falls back to the other by itself; when it is well again and the stay is over,
    both serve."""

    async def body(service: EmulatedService) -> None:
        backend, plans = service.backends[0], service.dispatcher.plans
        backend.slow_down([1.0, 12.0], [1.0, 12.0])
        kinds: list[K] = []
        for _ in range(20):
            service.ask(4, 200, 60)
            await service.pass_s(5.0)
            await service.tick()
            kinds = [move.command.kind for move in service.control.moves.log if move.outcome == "done"]
            if plans.plans[0].query_heads[1] == 0:
                break
        assert K.FALL_BACK in kinds or K.SET_SPLIT in kinds
        assert plans.plans[0].query_heads[1] <= plans.plans[0].query_heads[0] // 4
        backend.slow_down([1.0, 1.0], [1.0, 1.0])
        for _ in range(80):
            service.ask(2, 200, 60)
            await service.pass_s(5.0)
            await service.tick()
            if plans.plans[0].query_heads[1] >= plans.plans[0].query_heads[0] // 2:
                break
        assert plans.plans[0].query_heads[1] >= plans.plans[0].query_heads[0] // 2
        assert service.dispatcher.counts["attempts_lost"] == 0

    spec = cluster(1, replace(LIMITS, kv_blocks=256), ranks=2)
    play(spec, body, ControlSettings(is_on=False, rebalance="threshold"))


def test_foreign_groups_are_routed_and_requeued_only():
    """A group behind somebody else's server: all other commands are refused, and say so."""

    async def body() -> None:
        foreign = OpenAiHttpBackend("g0", 0, "http://127.0.0.1:9", "m")
        own = Scripted("g1", 1)
        telemetry = Telemetry(cluster(2))
        control = ControlLoop(Dispatcher([foreign, own], telemetry, seed=1), ControlSettings(is_on=False))
        for kind in (K.SET_SPLIT, K.MIGRATE, K.SCALE_IN, K.SCALE_OUT, K.FALL_BACK, K.RESTORE, K.REGROUP):
            assert "foreign" in control.moves.why_not(Command(kind, 0, 1))
        assert control.moves.why_not(Command(K.REQUEUE, 0, 1)) == ""
        move = await control.moves.carry_out(Command(K.SET_SPLIT, 0, argument=CORNERS.index("even")), "operator", "")
        assert move.outcome == "refused"

    asyncio.run(body())


def test_a_heuristic_that_fails_changes_nothing(kernels):
    class Broken:
        def choose(self, point) -> int:
            raise RuntimeError("a bug")

    async def body(service: EmulatedService) -> None:
        for decider in service.control.deciders.values():
            decider._heuristic = Broken()
        service.ask(6, 200, 200)
        await service.pass_s(1.0)
        await service.tick()
        assert service.control.ticks == 1 and not service.control.moves.log
        assert np.isfinite(service.control.discipline.debt_s()).all()

    play(cluster(3, parked=1), body)


def test_a_policy_decides_and_what_it_does_is_told(kernels, tmp_path):
    """A rebalance bundle that likes requeueing best, in its own process: the loop follows it, the decision is told with its source. A route
    bundle is refused in its place."""
    shape = contents()
    schema = replace(shape.schema, decision_kind="rebalance")
    weights = dict(shape.weights)
    weights["residual.weight"] = weights["residual.weight"].copy()
    weights["residual.weight"][0, FEATURES.index("kind_requeue")] = 50.0
    write_bundle(tmp_path / "rebalance", replace(shape, schema=schema, weights=weights))
    write_bundle(tmp_path / "route", shape)

    async def body(service: EmulatedService) -> None:
        clients = [PolicyClient(str(tmp_path / name), 12, decision="rebalance") for name in ("rebalance", "route")]
        try:
            for client in clients:
                await client.start()
            while "starting" in [client.state for client in clients]:
                await asyncio.sleep(0.02)
            assert [client.state for client in clients] == ["ready", "refused"] and "decides route" in clients[1].detail
            service.control.deciders["rebalance"].guard = PolicyGuard(clients[0], deadline_s=5.0, outside_max=1000)
            service.telemetry.is_draining[1] = True
            service.ask(30, 100, 50)
            await service.pass_s(0.5)
            service.telemetry.is_draining[1] = False
            service.control.deciders["rebalance"]._deadline_s = 5.0
            await service.tick()
        finally:
            for client in clients:
                await client.close()
        move = service.control.moves.log[0]
        assert (move.command.kind, move.source, move.outcome) == (K.REQUEUE, "policy", "done") and move.calls >= 10
        told = service.control.recent.told(["g0", "g1"])[0]
        assert (told["decision"], told["source"], told["cause"]) == ("rebalance", "policy", "")
        assert told["candidates"][told["chosen"]]["kind"] == "requeue"

    play(cluster(2), body)
