"""A running request goes on in another engine with its KV copied: between unlike splits and numbers of ranks, whatever fails on the way."""

from __future__ import annotations

import os
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
from tests.conftest import GUARD_S

SETTINGS = EngineSettings(kv_tokens_max=1024, slots_max=8, wait_deadline_s=60.0)
PROMPT = tuple(3 + (11 * i) % 400 for i in range(40))
TOKENS = 80
DEADLINE_S = 60.0


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
    return {heat: engines[0].submit(one).result(GUARD_S).tokens for heat, one in asked.items()}


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
    answer = target.submit(moved).result(GUARD_S)
    return (*got, *answer.tokens), answer.report


def segments() -> list[str]:
    """Of these engines: others may be at work on this machine."""
    return sorted(path.name for path in segment_folder().glob(f"ballast-{os.getpid()}-*-kv"))


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


def finish(stream, got: list[int]) -> tuple[int, ...]:
    return (*got, *(event.token for event in stream if event.token is not None))


@pytest.mark.parametrize("end", ["source", "target"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_a_rank_that_is_lost_meanwhile_costs_a_copy_and_no_more(engines, unbroken, end, number):
    """The copy fails by name, or was whole before; the request goes on in either engine, from its token ids at worst."""
    giver, taker = engines[1], engines[2]
    name = f"lost-{end}-{number}"
    stream, got = begun(giver, name)
    failed: list[str] = []
    struck = giver if end == "source" else taker
    rebuilds = struck.measured().rebuilds

    def strike() -> None:
        struck.signal_rank(struck.supervisor.members[-1], number)

    def copy() -> None:
        try:
            given = giver.give_kv(name, 0, DEADLINE_S)
            if end == "target":
                strike()
            taker.take_kv(given, DEADLINE_S)
        except GroupError as error:
            failed.append(str(error))

    if end == "source":
        strike()
    copy()
    # a kill may be noticed after the copy; a taker that lost a rank lost its slots, and may stand again before the copy begins
    assert failed or end == "source" or struck.measured().rebuilds > rebuilds
    tokens, _ = go_on(giver, taker, name, stream, got)
    assert tokens == unbroken[0.0]
    until_whole(struck)
    assert not segments()
    giver.check(), taker.check()


def until_whole(engine: Engine) -> None:
    end_s = time.monotonic() + GUARD_S
    ranks_all = len(engine.supervisor._group.roster.links)
    while len(engine.supervisor.members) < ranks_all or engine.is_changing_plan:
        assert time.monotonic() < end_s, "the lost rank did not come back"
        time.sleep(0.02)


def test_a_request_that_ends_meanwhile_leaves_nothing(engines):
    giver, taker = engines[1], engines[2]
    with pytest.raises(GroupError, match="does not run here"):
        giver.give_kv("nobody", 0, DEADLINE_S)
    stream, _ = begun(giver, "leaves")
    given = giver.give_kv("leaves", 0, DEADLINE_S)
    assert segments() == [given.file.name]
    stream.cancel()
    assert not segments()
    with pytest.raises(GroupError, match="No such file"):
        taker.take_kv(given, DEADLINE_S)
    wait_idle(taker)
    assert taker.load().kv_tokens_running == 0
    taker.check()


def wait_idle(engine: Engine) -> None:
    end_s = time.monotonic() + GUARD_S
    while engine._kv_handovers.has_work:
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_what_does_not_fit_is_refused_by_name(engines):
    """Another model's KV, a file of another size, no room: in each case nothing has changed here."""
    giver, taker = engines[0], engines[1]
    stream, _ = begun(giver, "misfit")
    given = giver.give_kv("misfit", 0, DEADLINE_S)
    for field, value in (("dtype", "bfloat16"), ("layers", 5), ("head_dim", 8)):
        with pytest.raises(GroupError, match="KV of another model"):
            taker.take_kv(replace(given, file=replace(given.file, **{field: value})), DEADLINE_S)
    with pytest.raises(GroupError, match="instead of"):
        taker.take_kv(replace(given, file=replace(given.file, tokens=given.file.tokens - 1)), DEADLINE_S)
    with pytest.raises(GroupError, match="no room"):
        taker.take_kv(replace(given, file=replace(given.file, tokens=SETTINGS.kv_tokens_max + 1)), DEADLINE_S)
    with pytest.raises(GroupError, match="given already"):
        giver.give_kv("misfit", len(PROMPT) + TOKENS, DEADLINE_S)
    stream.cancel()
    taker.check()


def test_changes_of_the_split_and_copies_wait_for_one_another(engines, unbroken):
    """Both ends slide to and fro while KV crosses: everything is done in the end, and the text is the same."""
    giver, taker = engines[1], engines[2]
    stream, got = begun(giver, "sliding")
    errors: list[Exception] = []

    def slide() -> None:
        try:
            giver.set_plan((1.0, 3.0))
            taker.set_plan((1.0, 3.0, 1.0))
            giver.set_plan((1.0, 1.0))  # a third plan: what it has moves
        except Exception as error:
            errors.append(error)

    sliding = threading.Thread(target=slide)
    sliding.start()
    for _ in range(2):
        taker.take_kv(giver.give_kv("sliding", 0, DEADLINE_S), DEADLINE_S)
    tokens, _ = go_on(giver, taker, "sliding", stream, got)
    sliding.join()
    assert not errors and tokens == unbroken[0.0]
    taker.check()
