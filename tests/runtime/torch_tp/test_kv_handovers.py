"""A running request goes on in another engine with its KV copied: between unlike splits and numbers of ranks, whatever fails on the way."""

from __future__ import annotations

import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from runtime.torch_tp.communicators.segment_names import segment_folder
from runtime.torch_tp.engine import Engine, EngineSettings
from runtime.torch_tp.nursery import Nursery
from runtime.torch_tp.requests import GenerationRequest, SamplingSettings
from runtime.torch_tp.supervisor import GroupError, RankSettings

SETTINGS = EngineSettings(kv_tokens_max=1024, slots_max=8, wait_deadline_s=60.0)
PROMPT = tuple(3 + (11 * i) % 400 for i in range(40))
TOKENS = 80
DEADLINE_S = 30.0


def ranks(*speeds: float) -> list[RankSettings]:
    return [RankSettings(speed=speed, slow_factor=20.0) for speed in speeds]  # slow enough that it still runs when its KV is there


@pytest.fixture(scope="module")
def engines(dreams: Path, nursery: Nursery):
    """Of one, two and three ranks, with unlike splits (4 heads each)."""
    made = [Engine.start(dreams, ranks(*speeds), SETTINGS, nursery=nursery) for speeds in ((1.0,), (3.0, 1.0), (1.0, 1.0, 2.0))]
    yield made
    for engine in made:
        engine.close()


def request(name: str, **more) -> GenerationRequest:
    return GenerationRequest(name, PROMPT, TOKENS, ignore_eos=True, **more)


@pytest.fixture(scope="module")
def unbroken(engines) -> dict[float, tuple[int, ...]]:
    """Answers of a run that nothing befalls, by temperature."""
    asked = {heat: request(f"unbroken-{heat}", sampling=SamplingSettings(temperature=heat, seed=5)) for heat in (0.0, 0.8)}
    return {heat: engines[0].submit(one).result(60.0).tokens for heat, one in asked.items()}


def begun(engine: Engine, name: str, tokens: int = 10, heat: float = 0.0):
    """A request that has so many tokens, and its stream."""
    stream = engine.submit(request(name, sampling=SamplingSettings(temperature=heat, seed=5)))
    got = [next(stream).token for _ in range(tokens)]
    return stream, got


def go_on(source: Engine, target: Engine, name: str, stream, got: list[int]):
    """What the answer is at its end in `target`, and its report there."""
    moved = source.take_out(name)
    got += [event.token for event in stream if event.token is not None]
    assert moved is not None and list(moved.answer) == got
    answer = target.submit(moved).result(60.0)
    return (*got, *answer.tokens), answer.report


def segments() -> list[str]:
    return sorted(path.name for path in segment_folder().glob("ballast-*-kv"))


@pytest.mark.parametrize(("source", "target"), [(0, 1), (1, 2), (2, 1), (2, 0)])
@pytest.mark.parametrize("heat", [0.0, 0.8])
def test_it_goes_on_as_if_nothing_had_happened(engines, unbroken, source, target, heat):
    """Only what came after the copy is computed there; nothing is left behind."""
    giver, taker = engines[source], engines[target]
    taker.batcher.drop_retained()
    name = f"moved-{source}-{target}-{heat}"
    stream, got = begun(giver, name, heat=heat)
    given = giver.give_kv(name, 0, DEADLINE_S)
    assert len(given.ids) >= len(PROMPT) + 9 and given.kv_bytes >= len(given.ids) * given.file.token_bytes
    taken = taker.take_kv(given, DEADLINE_S)
    assert taken.kv_bytes >= len(given.ids) * given.file.token_bytes  # a head that a cut divides is held twice
    more = giver.give_kv(name, len(given.ids), DEADLINE_S)
    assert more.start == len(given.ids) and more.file == given.file and more.ids[: more.start] == given.ids
    taker.take_kv(more, DEADLINE_S)
    hits = taker.measured().prefix_hit_tokens
    tokens, report = go_on(giver, taker, name, stream, got)
    assert tokens == unbroken[heat]
    assert report.hit_tokens == len(PROMPT)
    assert taker.measured().prefix_hit_tokens - hits >= len(more.ids) - 8  # tokens that the caller had not got yet were lost with it
    assert not segments()
    for engine in engines:
        engine.check()
