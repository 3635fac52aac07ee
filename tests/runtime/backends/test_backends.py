"""One suite for every kind of backend: what the dispatcher relies on holds for each of them."""

from __future__ import annotations

import asyncio
import time

import pytest
from msgspec.structs import replace

from runtime.backends.interface import BackendFault, BadCall, Begun, KvPart, MoveRefused
from runtime.backends.sent_text import SentText
from runtime.torch_tp.requests import SamplingSettings
from tests.runtime.backends import backend_kinds
from tests.runtime.scheduling.service_parts import call, until

KINDS = ("emulated", "torch_tp", "openai_http")
LONG = 110  # with slow ranks about a second; the small checkpoint's context is 128


@pytest.fixture(params=KINDS)
def make(request, kernels):
    """Makes a backend of the kind, slower than usual if asked."""
    if request.param == "torch_tp":
        folder = request.getfixturevalue("dreams")
        return lambda index=0, slow_factor=1.0: backend_kinds.torch_tp(folder, index, slow_factor)
    return getattr(backend_kinds, request.param)


def play(backends, body) -> None:
    async def run():
        made = backends if isinstance(backends, list) else [backends]
        try:
            await asyncio.gather(*(backend.start() for backend in made))
            await body(*made)
        finally:
            await asyncio.gather(*(backend.close() for backend in made))
            assert not any(backend.is_alive for backend in made)

    asyncio.run(run())


def ask(max_tokens: int = 24, prompt_tokens: int = 5, **more):
    """A call that every kind understands: with ids for ours, with the request as it came for foreign servers."""
    ids, sampling = tuple(range(10, 10 + prompt_tokens)), more.get("sampling", SamplingSettings())
    body = {
        "temperature": sampling.temperature,
        "seed": sampling.seed,
        "stop": list(more.get("stop_strings", ())),
        "prompt": list(ids),
    }
    return call(prompt_tokens, max_tokens, prompt_ids=ids, ignore_eos=True, body=body, **more)


def shown(pieces):
    """Those that bring something: a token, or text where ids are not told."""
    return [piece for piece in pieces if piece.token is not None or piece.text]


def begun_by(pieces):
    tokens = tuple(piece.token for piece in pieces if piece.token is not None)
    return Begun(tokens, SentText("".join(piece.text for piece in pieces)), len(shown(pieces)))


def apart(pieces):
    """A piece per token, where several came in one; signs of life, which bring nothing, are left out."""
    for piece in pieces:
        assert not piece.parts or "".join(piece.parts) == piece.text
    return [
        one
        for piece in pieces
        if piece.token is not None or piece.text or piece.finish_reason
        for i, text in enumerate(piece.parts or (piece.text,))
        for one in [replace(piece, index=piece.index + i, text=text, parts=(), finish_reason=_at_end(piece, i))]
    ]


def _at_end(piece, i):
    return piece.finish_reason if i + 1 >= len(piece.parts) else None


async def collect(backend, asked, begun=Begun()):  # noqa: B008
    return apart([piece async for piece in backend.submit(asked, begun)])


def test_an_answer_comes_piece_by_piece(make):
    """Each token once and in order, one finish reason, with the last piece; usage is exact."""

    async def body(backend):
        asked = ask()
        pieces = await collect(backend, asked)
        assert [piece.index for piece in shown(pieces)] == list(range(24))
        assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
        assert (pieces[-1].prompt_tokens, pieces[-1].output_tokens) == (5, 24)
        assert await backend.probe()

    play(make(), body)


def test_a_call_that_left_may_come_back_at_once(make):
    """Requeued by its scheduler and sent to the same group again, in the same breath: it is the same call, and no duplicate."""

    async def body(backend):
        asked = ask()
        for _ in range(10):
            left = backend.submit(asked)
            await anext(left)
            await left.aclose()
            assert len(shown(await collect(backend, asked))) == 24

    play(make(), body)


def test_the_same_call_goes_on_elsewhere_as_it_would_have(make):
    """Begun anywhere on one backend, an answer ends on another as if it had not moved: tokens and text, greedy and sampled."""

    async def body(first, second):
        for sampling in (SamplingSettings(), SamplingSettings(temperature=1.0, seed=11)):
            asked = ask(sampling=sampling)
            whole = await collect(first, asked)
            text = "".join(piece.text for piece in whole)
            for cut in (1, 5, 23):
                begun = begun_by(whole[:cut])
                assert second.continues(asked, begun)
                rest = await collect(second, asked, begun)
                assert [p.token for p in rest] == [p.token for p in whole[cut:]]
                assert "".join(p.text for p in [*whole[:cut], *rest]) == text
                assert [p.index for p in shown(rest)] == list(range(cut, 24)) and rest[-1].output_tokens == 24

    play([make(0), make(1)], body)


def test_many_at_once(make):
    async def body(backend):
        asked = [ask(max_tokens=8 + i, prompt_tokens=4 + i) for i in range(12)]
        answers = await asyncio.gather(*(collect(backend, one) for one in asked))
        for one, pieces in zip(asked, answers, strict=True):
            assert pieces[-1].output_tokens == one.max_tokens

    play(make(), body)


def test_closing_the_stream_frees_the_place_at_once(make):
    """Left after two tokens, or cancelled before the first: the report shows nobody else inside long before a third one, which began
    with them, is through."""

    async def body(backend):
        stays = backend.submit(ask(max_tokens=LONG))
        seen = [await anext(stays)]
        stream = backend.submit(ask(max_tokens=LONG))
        for _ in range(2):
            await anext(stream)
        await stream.aclose()
        task = asyncio.create_task(collect(backend, ask(max_tokens=LONG)))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        async for piece in stays:
            seen.append(piece)
            if backend_kinds.inside(backend) == 1:
                break
        assert not any(piece.finish_reason for piece in seen) and len(shown(apart(seen))) < 0.9 * LONG, backend.report()
        await stays.aclose()
        await until(lambda: backend_kinds.inside(backend) == 0)

    play(make(slow_factor=30.0), body)


def test_a_report_counts_what_is_inside(make):
    async def body(backend):
        streams = [backend.submit(ask(max_tokens=LONG)) for _ in range(3)]
        for stream in streams:
            await anext(stream)
        await until(lambda: (said := backend.report()) is not None and said.running == 3)
        report = backend.report()
        assert abs(time.monotonic() - report.at_s) < 30.0
        assert report.kv_used_fraction == 0.3 if report.kv_blocks_total is None else report.kv_blocks_free < report.kv_blocks_total
        for stream in streams:
            await stream.aclose()

    play(make(slow_factor=30.0), body)


@pytest.mark.fault("K24")
def test_what_cannot_fit_is_the_callers_mistake(make):
    async def body(backend):
        with pytest.raises(BadCall):
            await collect(backend, ask(max_tokens=100_000))
        assert (await collect(backend, ask()))[-1].finish_reason == "length"

    play(make(), body)


def test_stop_strings_end_the_answer_and_are_never_shown(make):
    async def body(backend):
        whole = await collect(backend, ask())
        text = "".join(piece.text for piece in whole)
        stop = text[len(text) // 2 : len(text) // 2 + 3]
        pieces = await collect(backend, ask(stop_strings=(stop,)))
        assert pieces[-1].finish_reason == "stop"
        assert "".join(piece.text for piece in pieces) == text[: text.index(stop)]

    play(make(), body)


def test_close_ends_open_streams_with_a_fault(make):
    async def body(backend):
        stream = backend.submit(ask(max_tokens=LONG))
        await anext(stream)
        await backend.close()
        with pytest.raises(BackendFault):
            async for _ in stream:
                pass
        with pytest.raises(BackendFault):
            await collect(backend, ask())
        await backend.start()  # and it can come back
        assert (await collect(backend, ask()))[-1].finish_reason == "length"

    play(make(slow_factor=30.0), body)


def test_kv_goes_along_to_another_group_of_its_home_and_nowhere_else(make):
    """While it runs on; the call then begins there with all of its prompt, and gives the same answer. A foreign server refuses both."""

    async def body(source, target):
        asked, pieces = ask(LONG if source.keeps_prefixes else 60), []
        assert (source.kv_home is None) == (source.can == frozenset()) and source.kv_home == target.kv_home
        stream = source.submit(asked)
        async for piece in stream:
            pieces.append(piece)
            if len(shown(pieces)) == 20:
                break
        if source.kv_home is None:
            for order in (source.give_kv(asked.call_id, 0), target.take_kv(KvPart(5, 0, 0.0, None))):
                with pytest.raises(MoveRefused, match="foreign"):
                    await order
            await stream.aclose()
            return
        part = await source.give_kv(asked.call_id, 0)
        assert part.tokens >= asked.prompt_tokens + 18 and part.kv_bytes > 0 and part.seconds >= 0
        await target.take_kv(part)
        with pytest.raises(MoveRefused):
            await source.give_kv("nobody", 0)
        await stream.aclose()
        handed, again = await collect(target, asked, begun_by(pieces)), await collect(source, asked)
        assert [piece.token for piece in (*pieces, *handed) if piece.token is not None] == [p.token for p in again if p.token is not None]
        if target.keeps_prefixes:
            assert handed[-1].times.hit_tokens == asked.prompt_tokens

    play([make(0, slow_factor=20.0), make(1, slow_factor=20.0)], body)
