"""The engine over real worker processes: answers, streams, cancellation, plans, deaths, the end."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from runtime.torch_tp.engine import Engine, EngineSettings, request_for
from runtime.torch_tp.nursery import Nursery
from runtime.torch_tp.requests import GenerationRequest, Refused, SamplingSettings
from runtime.torch_tp.supervisor import GroupError, RankSettings
from tests.conftest import GUARD_S

PROMPT = "I sense a gentle hum"
KNOWN = ", a gentle hum of probability unfolding. Contrast edges sharpen, a kaleidoscope of probability."
TRIES = 5
SETTINGS = EngineSettings(kv_tokens_max=1024, slots_max=8, wait_deadline_s=60.0)


@pytest.fixture(scope="module")
def engine(dreams: Path, nursery: Nursery):
    with Engine.start(dreams, [RankSettings(speed=1.0), RankSettings(speed=0.5)], SETTINGS, nursery=nursery) as engine:
        yield engine


def ask(engine: Engine, name: str, prompt=PROMPT, max_tokens: int = 60, **more) -> GenerationRequest:
    return request_for(engine.tokenizer, name, prompt, max_tokens, **more)


def until(condition, deadline_s: float = GUARD_S) -> None:
    """Wait for something that another process or thread brings about."""
    end_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end_s, "did not come about"
        time.sleep(0.01)


def test_text_is_the_checkpoints_known_text(engine):
    """The model's README gives its greedy text, made with transformers and llama2.c."""
    answer = engine.submit(ask(engine, "known")).result(60.0)
    assert answer.text.startswith(KNOWN)
    report = answer.report
    assert report.output_tokens == len(answer.tokens)
    assert abs(report.unexplained_s) <= 0.02 * report.e2e_s
    assert report.part("communication_s") > 0 and report.part("decode_compute_s") > 0


def test_thread_and_coroutine_streams_agree(engine):
    plain = [event.token for event in engine.submit(ask(engine, "plain"))]

    async def collect(name: str) -> list[int | None]:
        return [event.token async for event in engine.submit(ask(engine, name))]

    async def several() -> list[list[int | None]]:
        return await asyncio.gather(*(collect(f"co-{i}") for i in range(4)))

    for tokens in asyncio.run(several()):
        assert tokens == plain


def test_logprobs_and_sampling_come_through(engine):
    sampling = SamplingSettings(temperature=0.8, top_p=0.9, seed=3)
    first = list(engine.submit(ask(engine, "a", max_tokens=20, sampling=sampling, logprobs=2, ignore_eos=True)))
    again = engine.submit(ask(engine, "b", max_tokens=20, sampling=sampling, ignore_eos=True)).result(60.0)
    assert tuple(event.token for event in first) == again.tokens
    for event in first:
        assert event.logprobs.chosen <= event.logprobs.top[0][1] + 1e-9 and len(event.logprobs.top) == 2


def test_stop_string_ends_the_text_before_it(engine):
    whole = engine.submit(ask(engine, "whole")).result(60.0)
    cut = engine.submit(ask(engine, "cut", stop_strings=("edges",))).result(60.0)
    assert cut.finish_reason == "stop" and cut.stop == "edges"
    assert cut.text == whole.text[: whole.text.index("edges")]


def test_cancel_ends_the_stream_and_refusals_are_raised(engine):
    for number in range(TRIES):  # on a slow machine it may have come to its end first
        stream = engine.submit(ask(engine, f"c-{number}", max_tokens=100, ignore_eos=True))
        next(stream)
        if stream.cancel():
            break
    assert stream.result(60.0).finish_reason == "cancelled"
    assert not stream.cancel()
    with pytest.raises(Refused, match="exceed 128"):
        engine.submit(ask(engine, "d", max_tokens=200))
    until(lambda: engine.load().running == 0)


def test_plan_slides_under_load_and_text_stays(engine):
    expected = engine.submit(ask(engine, "before", ignore_eos=True, max_tokens=100)).result(60.0).tokens
    streams = [engine.submit(ask(engine, f"s{i}", ignore_eos=True, max_tokens=100)) for i in range(4)]
    for shares in ((1, 3), (1, 1), (3, 1)):
        plan = engine.set_plan(shares)
        assert plan == engine.supervisor.plan
    for stream in streams:
        assert stream.result(60.0).tokens == expected
    with pytest.raises(ValueError, match="3 shares"):
        engine.set_plan((1, 1, 1))
    assert engine.measured().slides >= 3


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_killed_or_frozen_rank_costs_no_token_and_comes_back(engine, number):
    expected = engine.submit(ask(engine, f"calm-{number}", ignore_eos=True, max_tokens=100)).result(60.0).tokens
    rebuilds = engine.measured().rebuilds
    streams = [engine.submit(ask(engine, f"{number}-{i}", ignore_eos=True, max_tokens=100)) for i in range(3)]
    next(streams[0])
    assert engine.signal_rank(1, number)
    answers = [stream.result(60.0) for stream in streams]
    assert tuple(streams_tokens(answers[0], expected)) == expected
    assert [answer.tokens for answer in answers[1:]] == [expected] * 2
    until(lambda: engine.supervisor.members == (0, 1) and engine.measured().rebuilds > rebuilds)
    until(lambda: min(engine.supervisor.plan.layers[0].query_heads) > 0)


def test_a_rank_that_dies_while_it_comes_back_is_started_again(engine):
    """No step and no new group tells of it: it was in none yet."""
    killed = {engine.supervisor.pid_of(1)}
    assert engine.signal_rank(1, signal.SIGKILL)
    for _ in range(2):
        until(lambda: engine.supervisor.pid_of(1) not in {None, *killed})
        killed.add(engine.supervisor.pid_of(1))
        if 1 not in engine.supervisor.members:
            assert engine.signal_rank(1, signal.SIGKILL)
    until(lambda: engine.supervisor.pid_of(1) not in {None, *killed} and engine.supervisor.members == (0, 1))
    until(lambda: min(engine.supervisor.plan.layers[0].query_heads) > 0)
    assert engine.submit(ask(engine, "after", ignore_eos=True, max_tokens=20)).result(60.0).finish_reason == "length"


def streams_tokens(answer, expected):
    """The first token was read before."""
    return (expected[0], *answer.tokens)


def test_a_group_lost_whole_is_started_anew_and_goes_on(engine):
    expected = engine.submit(ask(engine, "calm", ignore_eos=True, max_tokens=100)).result(60.0).tokens
    for number in range(TRIES):  # on a slow machine it may have come to its end first
        stream = engine.submit(ask(engine, f"struck-{number}", ignore_eos=True, max_tokens=100))
        first = next(stream)
        for worker in engine.supervisor.members:
            engine.signal_rank(worker, signal.SIGKILL)
        answer = stream.result(60.0)
        assert (first.token, *answer.tokens) == expected and answer.finish_reason == "length"
        assert engine.submit(ask(engine, f"after-{number}", ignore_eos=True, max_tokens=100)).result(60.0).tokens == expected
        until(lambda: engine.supervisor.members == (0, 1))
        if answer.report.recoveries:
            break
    assert answer.report.recoveries >= 1


def test_without_any_rank_left_requests_end_with_an_error(dreams, nursery):
    settings = EngineSettings(kv_tokens_max=512, slots_max=4, revives=False, with_text=False)
    with Engine.start(dreams, [RankSettings(slow_factor=20.0)], settings, nursery=nursery) as engine:  # it runs when it is struck
        stream = engine.submit(GenerationRequest("r", (1, 300), 100, ignore_eos=True))
        next(stream)
        engine.signal_rank(0, signal.SIGKILL)
        answer = stream.result(60.0)
        assert answer.finish_reason == "error" and answer.detail
        until(lambda: not engine.is_serving)
        with pytest.raises(Refused) as caught:
            engine.submit(GenerationRequest("s", (1,), 1))
        assert caught.value.reason == "closed"
        with pytest.raises(GroupError):
            engine.set_plan((1,))


def test_close_ends_open_streams(dreams, nursery):
    settings = EngineSettings(kv_tokens_max=512, slots_max=4, with_text=False)
    engine = Engine.start(dreams, [RankSettings(), RankSettings()], settings, nursery=nursery)
    streams = [engine.submit(GenerationRequest(f"r{i}", (1, 300), 100, ignore_eos=True)) for i in range(3)]
    pids = [engine.supervisor.pid_of(worker) for worker in (0, 1)]
    closer = threading.Thread(target=engine.close)
    closer.start()
    for stream in streams:
        assert stream.result(60.0).finish_reason in ("error", "length")
    closer.join(60.0)
    assert not closer.is_alive()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    engine.close()


def test_the_controllers_half_imports_no_torch():
    code = "import sys, runtime.torch_tp.engine; print('torch' in sys.modules, 'simpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["False", "False"]
