"""Real groups of worker processes: generation, deaths, freezes, slides, members that come and go."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from envs.decision.detection import FailureKind
from envs.decision.layer_cuts import layer_plans
from envs.domain.plans import LayerPlans
from runtime.torch_tp.group import Group
from runtime.torch_tp.nursery import Nursery
from runtime.torch_tp.orders import Failure, Prepared, PrepareOrder
from runtime.torch_tp.protocol import Kind, Message
from runtime.torch_tp.requests import SamplingSettings
from runtime.torch_tp.resplit import SlideState
from runtime.torch_tp.steps import SliceCommand, StepCommand
from runtime.torch_tp.supervisor import GroupError, GroupGone, GroupRebuilt, RankSettings, Supervisor
from runtime.torch_tp.worker_link import WorkerLink
from tests.conftest import GUARD_S, SLOWER
from tests.runtime.torch_tp.group_driver import SETTINGS, Driver, Run, generate

SAMPLED = SamplingSettings(temperature=0.9, top_p=0.95, repetition_penalty=1.2, seed=7)


@pytest.fixture(scope="module")
def undisturbed(dreams: Path, nursery: Nursery) -> tuple[Run, Run]:
    """Greedy and sampled answers of one rank alone."""
    with Supervisor(dreams, [RankSettings()], SETTINGS, nursery=nursery) as supervisor:
        supervisor.start()
        return generate(supervisor), generate(supervisor, sampling=SAMPLED)


def group(dreams: Path, nursery: Nursery, *speeds: float) -> Supervisor:
    supervisor = Supervisor(dreams, [RankSettings(speed=speed) for speed in speeds], SETTINGS, nursery=nursery)
    supervisor.start()
    return supervisor


def until(condition: Callable[[], bool], deadline_s: float = GUARD_S) -> None:
    """Wait for something that another thread brings about."""
    end_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end_s, "did not come about"
        time.sleep(0.005)


def once_at(step: int, act: Callable[[Driver], None]) -> Callable[[Driver], None]:
    """`act` before the first step that comes after `step` steps."""
    done: list[bool] = []

    def before_step(driver: Driver) -> None:
        if driver.run.steps >= step and not done:
            done.append(True)
            act(driver)

    return before_step


def strike(worker: int, number: signal.Signals) -> Callable[[Driver], None]:
    def act(driver: Driver) -> None:
        pid = driver.supervisor.pid_of(worker)
        assert pid is not None
        os.kill(pid, number)

    return act


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def test_two_unequal_ranks_answer_like_one(dreams, nursery, undisturbed):
    greedy, sampled = undisturbed
    with group(dreams, nursery, 1.0, 0.5) as supervisor:
        assert supervisor.plan.layers[0].query_heads == (3, 1)
        assert generate(supervisor).tokens == greedy.tokens
        run = generate(supervisor, sampling=SAMPLED)
        assert run.tokens == sampled.tokens
        assert {timing.rank for timing in run.results[-1].timings} == {0, 1}


def test_half_batches_give_the_same_text(dreams, nursery, undisturbed):
    settings = replace(SETTINGS, overlap="always")
    with Supervisor(dreams, [RankSettings(), RankSettings(speed=0.5)], settings, nursery=nursery) as supervisor:
        supervisor.start()
        run = generate(supervisor)
        assert run.tokens == undisturbed[0].tokens
        assert all(timing.compute_s > 0 and timing.communication_s > 0 for timing in run.results[-1].timings)


@pytest.mark.fault("K20")
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("number", "kind"), [(signal.SIGKILL, FailureKind.RANK_KILLED), (signal.SIGSTOP, FailureKind.RANK_FROZEN)], ids=["kill", "freeze"]
)
def test_a_lost_rank_costs_no_token(dreams, nursery, undisturbed, ranks, number, kind):
    """In the middle of a step, while idle, and with the group rebuilt on the survivors: the same text, no token lost or doubled."""
    with group(dreams, nursery, *[1.0, 0.5, 0.7, 0.8][:ranks]) as supervisor:
        victim = supervisor.pid_of(1)
        run = generate(supervisor, once_at(12, strike(1, number)))
        assert run.tokens == undisturbed[0].tokens
        assert len(run.rebuilt) == 1
        (lost,) = run.rebuilt[0].change.lost
        assert (lost.worker, lost.kind) == (1, kind)
        assert supervisor.members == tuple(worker for worker in range(ranks) if worker != 1)
        assert victim is not None and is_gone(victim)


@pytest.mark.fault("K20")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "freeze"])
def test_a_rank_lost_while_idle_is_noticed_without_a_step(dreams, nursery, undisturbed, number):
    """1 s for a killed rank, 3 s for a stopped one; the next step says that its slots are empty."""
    with group(dreams, nursery, 1.0, 1.0) as supervisor:
        generate(supervisor)
        pid = supervisor.pid_of(0)
        assert pid is not None
        os.kill(pid, number)
        limit_s = SLOWER * (1.0 if number == signal.SIGKILL else 3.0)
        until(lambda: supervisor.changes[-1].epoch >= 2)
        change = supervisor.changes[-1]
        assert change.members == (1,)
        assert change.lost[0].silent_s <= limit_s
        run = generate(supervisor)
        assert run.tokens == undisturbed[0].tokens
        assert len(run.rebuilt) == 1


@pytest.mark.fault("K20")
def test_a_rank_stopped_before_the_first_step_is_left_out(dreams, nursery, undisturbed):
    with group(dreams, nursery, 1.0, 1.0) as supervisor:
        pid = supervisor.pid_of(1)
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        run = generate(supervisor)
        assert run.tokens == undisturbed[0].tokens
        assert supervisor.members == (0,)


def test_every_rank_gone_is_said(dreams, nursery):
    with group(dreams, nursery, 1.0, 1.0) as supervisor:
        for worker in (0, 1):
            pid = supervisor.pid_of(worker)
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(GroupGone, match="no rank is left"):
            for _ in range(3):
                generate(supervisor)


def test_slides_keep_the_text_and_move_no_weight(dreams, nursery, undisturbed):
    """Plan after plan while the same requests run: KV follows before a third plan, tokens stay those of one rank alone."""
    wishes = [(2, (1.0, 3.0)), (6, (1.0, 1.0)), (10, (0.0, 1.0)), (14, (3.0, 1.0))]
    drivers: list[Driver] = []

    def before_step(driver: Driver) -> None:
        drivers[:] = [driver]
        if wishes and driver.run.steps >= wishes[0][0]:
            driver.finish_slide()  # on a slow machine it may still be under way
            driver.slide(wishes.pop(0)[1])

    with group(dreams, nursery, 1.0, 0.5) as supervisor:
        run = generate(supervisor, before_step)
        drivers[0].finish_slide()
        assert [slide.state.value for slide in run.slides] == ["done"] * 4
        assert run.tokens == undisturbed[0].tokens
        assert sorted(set(run.moved)) == [0, 1, 2, 3]
        assert len(run.moved) >= 8  # every slot moved before the third and before the fourth plan
        assert len(supervisor.plans) == 2
        assert not run.rebuilt


def test_columns_slide_at_any_step(dreams, nursery, undisturbed):
    """MLP and vocabulary are stateless: their cuts change before every step, under one version, and no slot notices."""
    mlp = [(1.0, 0.0), (1.0, 2.0), (0.0, 1.0), (5.0, 1.0)]

    def before_step(driver: Driver) -> None:
        current = driver.supervisor.plan
        cut = mlp[driver.run.steps % 4]
        plan = layer_plans(driver.supervisor.model_spec, (1.0, 1.0), mlp_shares=cut, vocabulary_shares=cut[::-1], version=current.version)
        assert driver.supervisor.slide_columns(plan).kv_bytes == 0
        assert driver.supervisor.plan == plan

    with group(dreams, nursery, 1.0, 1.0) as supervisor:
        run = generate(supervisor, before_step)
        assert run.tokens == undisturbed[0].tokens
        other_heads = layer_plans(supervisor.model_spec, (1.0, 3.0), version=supervisor.plan.version)
        with pytest.raises(ValueError, match="heads of the newest"):
            supervisor.slide_columns(other_heads)


def test_a_rank_lost_while_sliding_changes_nothing_but_the_group(dreams, nursery, undisturbed):
    def act(driver: Driver) -> None:
        driver.slide((1.0, 1.0, 2.0))
        strike(2, signal.SIGKILL)(driver)

    with group(dreams, nursery, 1.0, 1.0, 1.0) as supervisor:
        run = generate(supervisor, once_at(6, act))
        assert run.tokens == undisturbed[0].tokens
        assert supervisor.members == (0, 1)
        assert len(supervisor.plans) == 1


def test_a_lost_rank_comes_back_and_no_slot_is_filled_again(dreams, nursery, undisturbed):
    """Respawned, it joins with zero width beside running requests, gets work by a slide, and leaves again."""
    seen: list[str] = []

    def before_step(driver: Driver) -> None:
        supervisor = driver.supervisor
        if driver.run.steps == 4 and not seen:
            seen.append("kill")
            strike(1, signal.SIGKILL)(driver)
        elif driver.run.steps == 8 and seen == ["kill"]:
            seen.append("respawn")
            supervisor.respawn(1)
            until(lambda: 1 in supervisor.spares)
            change = supervisor.join([1])
            assert change.keeps_kv and change.members == (0, 1)
            assert supervisor.plan.layers[0].query_heads == (4, 0)
            driver.slide((1.0, 1.0))
        elif driver.run.steps == 20 and seen == ["kill", "respawn"]:
            seen.append("back")
            driver.finish_slide()
            assert supervisor.plan.layers[0].query_heads == (2, 2)

    with group(dreams, nursery, 1.0, 1.0) as supervisor:
        run = generate(supervisor, before_step, sampling=SAMPLED)
        assert seen == ["kill", "respawn", "back"]
        assert run.tokens == undisturbed[1].tokens
        assert len(run.rebuilt) == 1


def test_a_rank_without_work_leaves(dreams, nursery, undisturbed):
    with group(dreams, nursery, 1.0, 1.0) as supervisor:
        with pytest.raises(ValueError, match="have work"):
            supervisor.leave([1])
        driver = Driver(supervisor)
        driver.slide((1.0, 0.0))
        driver.generate()
        with pytest.raises(ValueError, match=r"used by slots \[0, 1, 2, 3\]"):
            supervisor.release_plan(supervisor.plans[0].version)
        supervisor.step(StepCommand(999, (), releases=(0, 1, 2, 3)))
        supervisor.release_plan(supervisor.plans[0].version)
        change = supervisor.leave([1])
        assert change.members == (0,) and supervisor.spares == (1,)

        def before_step(driver: Driver) -> None:
            if driver.run.steps == 5:
                assert supervisor.join([1]).keeps_kv  # knows nothing any more of the slots it had
                driver.slide((1.0, 3.0))
            if driver.run.steps in (12, 20):
                driver.finish_slide()  # on a slow machine it may still be under way
            if driver.run.steps == 12:
                driver.slide((1.0, 1.0))

        run = generate(supervisor, before_step)
        assert run.tokens == undisturbed[0].tokens
        assert not run.rebuilt and len(run.moved) == 4


def test_a_wrong_command_is_refused_and_the_group_goes_on(dreams, nursery, undisturbed):
    """An error on a rank is no death: the group stands again, whole, and says what was wrong."""
    with group(dreams, nursery, 1.0, 1.0) as supervisor:
        with pytest.raises(GroupRebuilt, match="slot 5 is not allocated"):
            supervisor.step(StepCommand(1, (SliceCommand(5, "x", supervisor.plan.version, (1, 2), 0, True),)))
        assert supervisor.members == (0, 1)
        assert generate(supervisor).tokens == undisturbed[0].tokens


def test_real_weights_whose_heads_do_not_divide_survive_a_slide_and_a_kill(smollm2, nursery):
    """SmolLM2: 9 query and 3 KV heads over 2:1, then 1:2 with the KV of running requests, then one rank."""
    prompts = ((1, 300, 301, 302), (1, 450, 264, 312, 266))
    with Supervisor(smollm2, [RankSettings()], SETTINGS, nursery=nursery) as alone:
        alone.start()
        expected = generate(alone, prompts=prompts, max_tokens=12).tokens

    def before_step(driver: Driver) -> None:
        if driver.run.steps == 3 and not driver.run.slides:
            driver.slide((1.0, 2.0))
        elif driver.run.steps == 8 and len(driver.supervisor.members) == 2:
            driver.finish_slide()
            strike(0, signal.SIGKILL)(driver)

    with group(smollm2, nursery, 1.0, 0.5) as supervisor:
        assert supervisor.plan.layers[0].query_heads == (6, 3)
        run = generate(supervisor, before_step, prompts=prompts, max_tokens=12)
        assert run.tokens == expected
        assert [slide.state.value for slide in run.slides] == ["done"] and len(run.rebuilt) == 1


def test_controller_modules_load_no_torch():
    modules = ("supervisor", "protocol", "batcher", "resplit", "nursery", "orders", "liveness", "emulation")
    code = f"import sys, {', '.join('runtime.torch_tp.' + name for name in modules)}\nassert 'torch' not in sys.modules"
    project = Path(__file__).resolve().parents[3]
    done = subprocess.run([sys.executable, "-c", code], cwd=project, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "freeze"])
def test_with_buddies_a_loss_costs_no_second_prefill(dreams, nursery, undisturbed, number):
    """The neighbour goes on with the KV it kept; the step that was cut short is repeated and no caller notices."""
    settings = replace(SETTINGS, buddy_kv=True)
    with Supervisor(dreams, [RankSettings(), RankSettings(speed=0.5), RankSettings(speed=0.7)], settings, nursery=nursery) as supervisor:
        supervisor.start()
        victims = [1, 0]

        def before_step(driver: Driver) -> None:
            if driver.run.steps in (10, 30) and len(victims) > (driver.run.steps == 10):
                strike(victims.pop(0), number)(driver)

        run = generate(supervisor, before_step, sampling=SAMPLED)
        assert run.tokens == undisturbed[1].tokens
        assert supervisor.members == (2,)
        kept, lost = supervisor.changes[1:]
        assert kept.keeps_kv and not lost.keeps_kv  # whose copies were with the first one lost
        assert len(run.rebuilt) == 1


class SlowListener(Group):
    """Hears what the survivors say of a lost group only when it is about to make the next one."""

    heard = False

    def _regroup(self, plans: tuple[LayerPlans, ...] | None = None) -> None:
        order = self._rounds.get(Kind.DONE)
        if len(self.members) == 3 and not SlowListener.heard and order is not None:
            SlowListener.heard = True
            for worker in sorted(order.waiting - {1}):
                failure = Failure(int(Kind.STEP), True, "all_reduce: the process of rank 1 is dead")
                self._on_failure(self.roster.links[worker], Message(Kind.FAILED, self.epoch, step=order.number), failure)
        super()._regroup(plans)


def test_complaints_about_a_lost_group_do_not_end_the_next(dreams, nursery, undisturbed, monkeypatch):
    """Once the survivors' words came between the loss and the new group, were held against that one, and cost its KV."""
    monkeypatch.setattr("runtime.torch_tp.supervisor.Group", SlowListener)
    settings = replace(SETTINGS, buddy_kv=True)
    with Supervisor(dreams, [RankSettings()] * 3, settings, nursery=nursery) as supervisor:
        supervisor.start()
        run = generate(supervisor, once_at(10, strike(1, signal.SIGKILL)))
        assert SlowListener.heard and run.tokens == undisturbed[0].tokens
        assert [change.members for change in supervisor.changes] == [(0, 1, 2), (0, 2)]
        assert supervisor.changes[-1].keeps_kv and not run.rebuilt


def test_a_plan_that_could_not_be_prepared_is_not_held_against_a_later_loss(dreams, nursery, undisturbed):
    """The order came to nothing and nothing changed: what buddies keep is still whole when a rank is lost after it."""
    settings = replace(SETTINGS, buddy_kv=True)

    def act(driver: Driver) -> None:
        failed = driver.supervisor.prepare(PrepareOrder(moves=(0,), to_version=99)).exception(GUARD_S)
        assert isinstance(failed, GroupError) and "nothing has changed" in str(failed)
        strike(1, signal.SIGKILL)(driver)

    with Supervisor(dreams, [RankSettings()] * 3, settings, nursery=nursery) as supervisor:
        supervisor.start()
        run = generate(supervisor, once_at(10, act))
        assert run.tokens == undisturbed[0].tokens
        assert supervisor.changes[-1].members == (0, 2) and supervisor.changes[-1].keeps_kv and not run.rebuilt


@pytest.mark.parametrize("up_to_date_s", [60.0, 0.0], ids=["copied once", "brought up to date"])
def test_slots_that_grow_while_their_kv_is_copied_move_all_the_same(dreams, nursery, undisturbed, monkeypatch, up_to_date_s):
    """With portions of one token every slot grows in every step; once the copies kept the room of the moment at which they began."""
    monkeypatch.setattr("runtime.torch_tp.resplit.UP_TO_DATE_S", up_to_date_s)
    plans = [(3, (3.0, 1.0)), (20, (1.0, 3.0)), (40, (3.0, 1.0)), (60, (1.0, 3.0))]

    def before_step(driver: Driver) -> None:
        if plans and driver.run.steps >= plans[0][0]:
            driver.finish_slide()
            driver.slide(plans.pop(0)[1])

    with group(dreams, nursery, 1.0, 1.0) as supervisor:
        driver = Driver(supervisor, before_step, growth_tokens=1)
        for _ in range(500):
            driver.batcher.lengths.observe(0, 1)  # answers are expected to be short
        run = driver.generate(max_tokens=90)
        driver.finish_slide()
        assert [answer[:40] for answer in run.tokens] == undisturbed[0].tokens and not run.rebuilt
        assert len(run.slides) == 4 and len(run.moved) >= 4


class LateAnswers(Group):
    """Gets what ranks 1 and 2 say of the first PREPARE only while the second is under way."""

    held: ClassVar[list[tuple[WorkerLink, Message]]] = []
    is_holding = True

    def on_message(self, link: WorkerLink, message: Message) -> None:
        if message.kind is Kind.FAILED and self.is_holding and link.worker > 0:
            self.held.append((link, message))
        else:
            super().on_message(link, message)

    def order(self, kind: Kind, *rest: Any) -> None:
        super().order(kind, *rest)
        if kind is Kind.PREPARE and self.held:
            LateAnswers.is_holding = False
            for link, message in self.held:
                self.on_message(
                    link, replace(message, kind=Kind.READY, body={"moves": [7], "weight_bytes": 0, "kv_bytes": 0, "seconds": 0.0})
                )  # as if that rank had been able to
                self.on_message(link, message)


def test_late_answers_to_an_order_given_up_are_not_taken_for_those_to_the_next(dreams, nursery, undisturbed, monkeypatch):
    """A PREPARE ends with the first rank's failure; what the others say of it comes during the next one, and neither ends nor fills it."""
    monkeypatch.setattr("runtime.torch_tp.supervisor.Group", LateAnswers)
    prepared: list[Prepared] = []

    def act(driver: Driver) -> None:
        assert driver.supervisor.prepare(PrepareOrder(moves=(0,), to_version=99)).exception(GUARD_S) is not None
        until(lambda: len(LateAnswers.held) == 2)
        prepared.append(driver.supervisor.prepare(PrepareOrder(driver.supervisor.next_plan((1.0, 2.0, 3.0)))).result(GUARD_S))

    with Supervisor(dreams, [RankSettings()] * 3, SETTINGS, nursery=nursery) as supervisor:
        supervisor.start()
        run = generate(supervisor, once_at(10, act))
        assert not LateAnswers.is_holding and run.tokens == undisturbed[0].tokens
        assert supervisor.members == (0, 1, 2) and not run.rebuilt
    assert len(prepared) == 1 and prepared[0].moves == ()


def test_with_buddies_slots_move_and_are_still_kept(dreams, nursery, undisturbed):
    """Slots that followed a slide lie with their new buddies: a loss after it costs nothing either."""
    settings = replace(SETTINGS, buddy_kv=True)
    acts = [(3, lambda driver: driver.slide((1.0, 1.0, 2.0))), (8, lambda driver: driver.slide((2.0, 1.0, 1.0)))]

    def before_step(driver: Driver) -> None:
        if acts and driver.run.steps >= acts[0][0]:
            driver.finish_slide()
            acts.pop(0)[1](driver)
        elif not acts and driver.run.steps == 16 and len(driver.supervisor.members) == 3:
            driver.finish_slide()
            strike(1, signal.SIGKILL)(driver)

    with Supervisor(dreams, [RankSettings()] * 3, settings, nursery=nursery) as supervisor:
        supervisor.start()
        run = generate(supervisor, before_step, decode_steps_max=1)
        assert run.tokens == undisturbed[0].tokens
        assert supervisor.members == (0, 2) and supervisor.changes[-1].keeps_kv
        assert not run.rebuilt and len(run.moved) == 4


class FailingNursery(Nursery):
    """Its workers' stores fail as `failing_nursery` is told."""

    PROGRAM = "tests.runtime.torch_tp.failing_nursery"


@pytest.fixture(scope="module")
def failing_nursery():
    nursery = FailingNursery()
    nursery.start()
    yield nursery
    nursery.close()


@pytest.mark.parametrize("fault", ["allocate 1 2", "export 1 9", "import_ 1 8", "import_ 0 16", "grow 2 1"])
def test_a_rank_that_fails_in_mid_copy_ends_it_for_all_at_once(dreams, failing_nursery, undisturbed, monkeypatch, fault):
    """One rank of three has no memory for a copy. Once the others waited 30 s for what it did not send, and what they had sent lay in the
    way of the next copy. Now the slide fails within a chunk, nothing changes, the group goes on, and the next slide gets through."""
    monkeypatch.setenv("BALLAST_TEST_FAULT", fault)
    monkeypatch.setattr("runtime.torch_tp.resplit.UP_TO_DATE_S", 0.0)
    plans = [(1.0, 1.0, 3.0), (1.0, 3.0, 1.0), (2.0, 1.0, 1.0)]
    took_s: list[float] = []

    def before_step(driver: Driver) -> None:
        if len(driver.run.slides) < 3 and driver.run.steps >= (3, 25, 50)[len(driver.run.slides)]:
            driver.finish_slide()
            took_s.append(time.monotonic())
            driver.slide(plans[len(driver.run.slides)])

    with group(dreams, failing_nursery, 1.0, 1.0, 1.0) as supervisor:
        driver = Driver(supervisor, before_step, growth_tokens=1)
        for _ in range(500):
            driver.batcher.lengths.observe(0, 1)  # answers are expected to be short, so that slots grow while they are copied
        run = driver.generate(max_tokens=90)
        driver.finish_slide()
        assert [answer[:40] for answer in run.tokens] == undisturbed[0].tokens and not run.rebuilt
        assert [slide.state for slide in run.slides] == [SlideState.DONE, SlideState.FAILED, SlideState.DONE]
        assert "MemoryError" in run.slides[1].reason or "could not go on" in run.slides[1].reason
        assert took_s[2] - took_s[1] < 25.0 and len(run.moved) >= 4
        assert supervisor.members == (0, 1, 2)
