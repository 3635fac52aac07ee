"""The engine's loop over ranks in this process: what becomes of requests when steps fail, groups go and callers leave."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable

import pytest

from envs.decision.detection import FailureKind
from envs.decision.layer_cuts import layer_plans
from envs.domain.plans import LayerPlans
from envs.domain.specs import ModelSpec
from runtime.torch_tp.config import ModelConfig, RopeSettings
from runtime.torch_tp.engine import Engine, EngineSettings
from runtime.torch_tp.orders import StepDone
from runtime.torch_tp.requests import GenerationRequest, Refused
from runtime.torch_tp.steps import StepCommand, StepResult
from runtime.torch_tp.supervisor import GroupChange, GroupGone, GroupRebuilt, LostRank, Supervisor
from tests.runtime.torch_tp.toy_ranks import EOS, VOCABULARY, ToyRanks, expected_answer

MODEL = ModelSpec("toy", 2, 8, 4, 4, 2, 8, VOCABULARY)


class ToySupervisor:
    """The supervisor's methods that the engine calls, over toy ranks. `before_step(command)` may raise or wait."""

    def __init__(self, told: Callable[[GroupChange], None], before_step: Callable[[StepCommand], None]) -> None:
        self.members: tuple[int, ...] = (0, 1)
        self.spares: tuple[int, ...] = ()
        self.absent: tuple[int, ...] = ()
        self.epoch = 0
        self.plan: LayerPlans = layer_plans(MODEL, (1, 1), version=1)
        self.plans = (self.plan,)
        self._told = told
        self._before_step = before_step
        self._ranks = ToyRanks(8, 512)
        self.is_closed = False
        self.last_done: dict[int, StepDone] = {}  # what workers say of a step: toys say nothing

    def start(self) -> GroupChange:
        return self.change()

    def change(self, *lost: int) -> GroupChange:
        """A rebuilt group: the slots are empty."""
        self.epoch += 1
        self._ranks.lose()
        ranks = tuple(LostRank(worker, FailureKind.RANK_KILLED, "struck", time.monotonic(), 0.0) for worker in lost)
        change = GroupChange(self.epoch, self.members, ranks, (), self.plan, False, time.monotonic())
        self._told(change)
        return change

    def step(self, command: StepCommand) -> StepResult:
        if self.is_closed:
            raise GroupGone("closed")
        self._before_step(command)
        now_s = time.monotonic()
        return self._ranks.run(command, now_s, now_s + 1e-4)

    def raise_unreported(self) -> None:
        """Every loss of this toy is told by a step."""

    def respawn(self, worker: int) -> None:
        raise ValueError("not in this toy")

    def close(self) -> None:
        self.is_closed = True


@contextlib.contextmanager
def serving(before_step: Callable[[StepCommand, ToySupervisor], None] = lambda command, toy: None, **settings):
    made: list[ToySupervisor] = []

    def make(told: Callable[[GroupChange], None]) -> Supervisor:
        toy = ToySupervisor(told, lambda command: before_step(command, toy))
        made.append(toy)
        return toy  # type: ignore[return-value]

    config = ModelConfig(
        name="toy", family="llama", hidden=8, layers=2, query_heads=4, kv_heads=4, head_dim=2, mlp_width=8, vocabulary=VOCABULARY,
        rms_eps=1e-5, rope=RopeSettings(theta=1e4), tied=True, qkv_bias=False, qk_norm=False,
        context_tokens=256, eos_ids=(EOS,), bos_id=None,
    )  # fmt: skip
    defaults = {"kv_tokens_max": 512, "slots_max": 8, "with_text": False, "wait_deadline_s": 60.0}
    engine = Engine(make, config, None, EngineSettings(**(defaults | settings)))
    engine.toys = made  # type: ignore[attr-defined]
    try:
        yield engine
    finally:
        engine.close()
        assert made[-1].is_closed and not engine._thread.is_alive()


def make(name: str, prompt=(1, 2, 3), max_tokens: int = 20, **more) -> GenerationRequest:
    return GenerationRequest(name, tuple(prompt), max_tokens, ignore_eos=True, **more)


def requests(count: int) -> list[GenerationRequest]:
    return [make(f"r{i}", prompt=[i] * (i + 1)) for i in range(count)]


def test_answers_are_those_of_the_ranks_and_the_account_is_clean():
    with serving() as engine:
        asked = requests(12)
        for request, stream in [(request, engine.submit(request)) for request in asked]:
            answer = stream.result(60.0)
            assert answer.tokens == tuple(expected_answer(request)) and answer.finish_reason == "length"
        engine.check()
        assert engine.measured().tokens == 12 * 20
        assert engine.load().running == 0


def test_rebuilt_groups_cost_no_token():
    failed: list[int] = []

    def before_step(command: StepCommand, toy: ToySupervisor) -> None:
        if command.step % 3 == 2:
            failed.append(command.step)
            raise GroupRebuilt(toy.change(1), "struck")

    with serving(before_step, revives=False) as engine:
        asked = requests(6)
        for request, stream in [(request, engine.submit(request)) for request in asked]:
            answer = stream.result(60.0)
            assert answer.tokens == tuple(expected_answer(request))
        assert engine.measured().rebuilds == len(failed) > 2
        engine.check()


def test_a_group_that_is_gone_is_started_anew_a_bounded_number_of_times():
    """Twice it comes back; then it goes at every first step, and after three attempts in a row every request is told."""
    steps: list[int] = []

    def before_step(command: StepCommand, toy: ToySupervisor) -> None:
        steps.append(command.step)
        if len(steps) in (3, 6) or len(steps) > 12:
            toy.close()
            raise GroupGone("all struck")

    with serving(before_step) as engine:
        first = make("first", max_tokens=5)
        assert engine.submit(first).result(60.0).tokens == tuple(expected_answer(first))
        streams = [engine.submit(make(f"r{i}", max_tokens=200)) for i in range(3)]
        for stream in streams:
            answer = stream.result(60.0)
            assert answer.finish_reason == "error" and "all struck" in answer.detail
        assert len(engine.toys) == 1 + 2 + 3
        assert not engine.is_serving
        with pytest.raises(Refused):
            engine.submit(make("late"))


def test_a_request_that_breaks_every_step_ends_alone():
    """No rank is lost, yet each step with "poison" in it fails: those that had tokens before go on, and so do later ones."""

    def before_step(command: StepCommand, toy: ToySupervisor) -> None:
        time.sleep(0.001)
        if any(part.request_id == "poison" for part in command.slices):
            raise GroupRebuilt(toy.change(), "worker 0: ValueError")

    with serving(before_step) as engine:
        good = make("good", max_tokens=150)
        stream = engine.submit(good)
        first = next(stream)
        poison = engine.submit(make("poison")).result(60.0)
        assert poison.finish_reason == "error" and "ValueError" in poison.detail
        assert (first.token, *stream.result(60.0).tokens) == tuple(expected_answer(good))
        later = make("later")
        assert engine.submit(later).result(60.0).tokens == tuple(expected_answer(later))
        engine.check()


def test_a_bug_in_the_loop_ends_every_request_with_an_error_and_closes_the_door():
    def before_step(command: StepCommand, toy: ToySupervisor) -> None:
        raise KeyError("a bug")

    with serving(before_step) as engine:
        answer = engine.submit(make("r")).result(60.0)
        assert answer.finish_reason == "error" and "KeyError" in answer.detail
        with pytest.raises(Refused) as caught:
            engine.submit(make("s"))
        assert caught.value.reason == "closed"


def test_a_coroutine_that_leaves_cancels_its_request():
    held = threading.Event()

    def before_step(command: StepCommand, toy: ToySupervisor) -> None:
        held.wait(0.002)

    async def leave_early(engine: Engine) -> None:
        stream = engine.submit(make("left", max_tokens=200))
        async for _ in stream:
            break

    async def is_cancelled(engine: Engine) -> None:
        async def read() -> None:
            async for _ in engine.submit(make("cancelled", max_tokens=200)):
                pass

        task = asyncio.create_task(read())
        await asyncio.sleep(0.02)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    with serving(before_step) as engine:
        asyncio.run(leave_early(engine))
        asyncio.run(is_cancelled(engine))
        end_s = time.monotonic() + 60.0
        while engine.load().running:
            assert time.monotonic() < end_s
            time.sleep(0.005)
        engine.check()


def test_a_silent_engine_is_noticed_by_its_readers():
    held = threading.Event()
    with serving(lambda command, toy: held.wait(10.0) and None, wait_deadline_s=0.05) as engine:
        stream = engine.submit(make("r"))
        with pytest.raises(TimeoutError, match="no event"):
            next(stream)

        async def read() -> None:
            async for _ in engine.submit(make("s")):
                pass

        with pytest.raises(TimeoutError, match="no event"):
            asyncio.run(read())
        held.set()


def test_a_request_moves_from_one_engine_to_another():
    slow = threading.Event()
    with serving(lambda command, toy: slow.wait(0.01) and None) as here, serving() as there:  # slow enough to be still there
        request = make("r", max_tokens=240)
        stream = here.submit(request)
        seen = [next(stream), next(stream)]
        moved = here.take_out("r")
        assert moved is not None
        seen += list(stream)
        assert seen[-1].finish_reason == "moved"
        seen += list(there.submit(moved))
        tokens = [event.token for event in seen if event.token is not None]
        assert tokens == expected_answer(request)
        assert here.take_out("r") is None


def test_many_threads_submit_and_cancel_at_once():
    with serving(batcher={"queue_limit": 10}) as engine:
        outcomes: list[str] = []
        lock = threading.Lock()

        def client(number: int) -> None:
            for turn in range(15):
                request = make(f"c{number}-{turn}", prompt=[number] * (1 + turn), max_tokens=1 + turn)
                try:
                    stream = engine.submit(request)
                except Refused as error:
                    reason = error.reason
                else:
                    if turn % 4 == 3:
                        stream.cancel()
                    answer = stream.result(60.0)
                    reason = answer.finish_reason
                    assert answer.tokens == tuple(expected_answer(request))[: len(answer.tokens)]
                    assert reason == "cancelled" or len(answer.tokens) == request.max_tokens
                with lock:
                    outcomes.append(reason)

        threads = [threading.Thread(target=client, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120.0)
        assert len(outcomes) == 16 * 15 and set(outcomes) <= {"length", "cancelled", "queue_full"}
        engine.check()
