"""Foreign servers as groups: faults of their streams, what their answers mean, resuming by asking again, their metrics pages."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from contextlib import asynccontextmanager
from dataclasses import replace

import msgspec
import pytest

from envs.decision.circuit_breaker import State
from runtime.backends.event_stream import BadEvent, EventReader
from runtime.backends.interface import BackendBusy, BackendFault, BadCall, Begun
from runtime.backends.load_metrics import load_of
from runtime.backends.openai_http import OpenAiHttpBackend
from runtime.backends.sent_text import SentText
from runtime.calls import Refusal
from runtime.scheduling.dispatcher import Dispatcher
from runtime.scheduling.telemetry import Telemetry
from runtime.torch_tp.requests import SamplingSettings
from tests.conftest import GUARD_S, SLOWER
from tests.runtime.backends.backend_kinds import WithServer
from tests.runtime.backends.test_backends import apart, ask, shown
from tests.runtime.scheduling.service_parts import PATIENT, cluster, collect, with_service


async def alone(backend, asked, begun=Begun()):  # noqa: B008
    return apart([piece async for piece in backend.submit(asked, begun)])


def with_backends(count: int, body, settings=PATIENT) -> None:
    backends = [WithServer(i, 1.0) for i in range(count)]
    asyncio.run(with_service(Dispatcher(backends, Telemetry(cluster(count)), settings, seed=3), body))


@pytest.mark.fault("K25")
@pytest.mark.parametrize("number", range(5))
def test_the_five_stream_faults_are_saved(shared, number):
    """`stream_faults.json`: cut at 40, silent at 20, garbled at 10, closed before the first token, closed after the last one but before
    the finish event. The answer goes on elsewhere: 60 words, each once, the text of an unbroken run, one finish, usage 60."""
    case = json.loads((shared / "cases/inputs/stream_faults.json").read_text())["faults"][number]
    kind = {"cut": "die", "silent": "hang", "garbled": "garble", "early": "die", "late": "die"}[case["id"]]
    at = case["after_tokens"] if case["id"] != "late" else 59

    async def body(service):
        struck = []

        def fault(request, index):
            if not struck and index == (at or -1):
                struck.append(index)
                return kind
            return None

        for backend in service.backends:
            backend.server.fault = fault
        asked = ask(max_tokens=60)
        pieces = await collect(service, asked)
        assert struck and service.counts["attempts_lost"] == 1
        first, second = (backend.server.requests[0] for backend in service.backends)
        assert first["prompt"] == second["prompt"]  # another group carried on
        assert [piece.index for piece in shown(apart(pieces))] == list(range(60))
        assert "".join(piece.text for piece in pieces) == "".join(service.backends[0].server.words(first))
        assert [piece.finish_reason for piece in pieces if piece.finish_reason] == ["length"]
        assert pieces[-1].output_tokens == 60

    with_backends(2, body, replace(PATIENT, silence_slack_s=2.0 if kind == "hang" else 60.0))


def test_what_cannot_go_on_exactly_ends_in_an_error():
    """Sampled without a seed: another group would say something else; the stream ends in a refusal, never in other words."""

    async def body(service):
        for backend in service.backends:
            backend.server.fault = lambda request, index: "die" if index == 5 else None
            backend.server.gap_s = 0.05  # what is unread when a connection is reset is gone, and with it the reason to refuse
        asked = msgspec.structs.replace(ask(), sampling=SamplingSettings(temperature=1.0))
        pieces = []
        with pytest.raises(Refusal) as refusal:
            async for piece in service.run(asked):
                pieces.append(piece)
        assert refusal.value.reason == "stream_lost" and 1 <= sum(piece.tokens for piece in pieces) <= 5

    with_backends(2, body)


@pytest.mark.parametrize("at", [-1, 0, 7, 23])
def test_an_answer_whose_words_come_together_is_saved_too(at):
    """Several words in one piece; a cut anywhere loses and doubles nothing."""

    async def body(service):
        struck = []

        def fault(request, index):
            if not struck and index == at:
                struck.append(index)
                return "die"
            return None

        for backend in service.backends:
            backend.server.fault, backend.server.gap_s = fault, 0.0
        asked = ask()
        pieces = await collect(service, asked)
        assert struck
        assert "".join(piece.text for piece in pieces) == "".join(service.backends[0].server.words({**asked.body, "max_tokens": 24}))
        assert pieces[-1].output_tokens == 24 and [p.finish_reason for p in pieces if p.finish_reason] == ["length"]

    with_backends(2, body)


def test_another_text_is_never_glued_on():
    async def run():
        backend = WithServer(0, 1.0)
        await backend.start()
        try:
            asked = ask()
            whole = await alone(backend, asked)
            text = "".join(piece.text for piece in whole[:4])
            with pytest.raises(BackendFault, match="another text"):
                await alone(backend, asked, Begun((), SentText(text[:-2] + "??"), 4))
        finally:
            await backend.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ("503", BackendFault), ("503+1", BackendBusy), ("429", BackendBusy), ("500", BackendFault), ("422", BadCall),
        *((f"503+{after}", BackendBusy) for after in ("inf", "nan", "-1", "1e999", "Wed, 21 Oct 2015 07:28:00 GMT")),
    ],
)  # fmt: skip
def test_what_an_answer_means(answer, error):
    async def run():
        backend = WithServer(0, 1.0)
        await backend.start()
        try:
            backend.server.fault = lambda request, index: answer if index == -1 else None
            with pytest.raises(error) as raised:
                await alone(backend, ask())
            if error is BackendBusy:
                assert 0.0 <= raised.value.retry_after_s <= 1.0
        finally:
            await backend.close()

    asyncio.run(run())


def raw(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n" % (status, len(body)) + body


@asynccontextmanager
async def answering(answer: bytes):
    """A backend whose server says `answer` to a POST, whatever it is asked."""

    async def serve(reader, writer):
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(re.search(rb"content-length: (\d+)", head)[1]) if b"content-length" in head else 0
                await reader.readexactly(length)
                writer.write(answer if head.startswith(b"POST") else raw(404 if b"/metrics" in head else 200, b"{}"))
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    backend = OpenAiHttpBackend("raw", 0, f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", "m")
    await backend.start()
    try:
        yield backend
    finally:
        await backend.close()
        listening.close()


DEEP = b"[" * 2000


@pytest.mark.fault("K24")
@pytest.mark.parametrize(
    "body", [DEEP, b'{"error":' * 220, b"\xff\xfe", b"", b"null", b'{"error": [1]}', b'{"error": {"message": {"a": 1}}}']
)
def test_a_refusal_in_any_words_is_the_callers(body):
    """400 is the caller's, whatever stands in it: not a fault of the group."""

    async def run():
        async with answering(raw(400, body)) as backend:
            with pytest.raises(BadCall):
                await alone(backend, ask())

    asyncio.run(run())


@pytest.mark.parametrize(
    "event",
    [
        b'{"usage": {"completion_tokens": -5, "prompt_tokens": 1}}', b'{"usage": {"completion_tokens": 10000000000000000000000000}}',
        b'{"error": ' + DEEP, b'{"metrics": ' + DEEP, b'{"choices": [{"text": "\xff"}]}', b'{"choices": 3}', b"[]", b"",
    ],
)  # fmt: skip
def test_an_event_that_is_none_is_a_fault(event):
    """Counts below 0 or beyond 64 bits among them: counters would go down, and what is sent on could not be written."""

    async def run():
        stream = b'data: {"choices": [{"text": "a", "finish_reason": "stop"}]}\n\ndata: ' + event + b"\n\ndata: [DONE]\n\n"
        async with answering(raw(200, stream)) as backend:
            with pytest.raises(BackendFault):
                await alone(backend, ask())

    asyncio.run(run())


def said(*texts: str, last: str = "stop") -> list[bytes]:
    """Events with these texts, the last with a finish reason."""
    choices = [{"index": 0, "text": text, "finish_reason": None} for text in texts]
    choices[-1]["finish_reason"] = last
    return [b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n" for choice in choices]


DONE = b"data: [DONE]\n\n"
WHOLE = b"".join(said("a ", "b ", "c"))
IN_LINES = b"".join(
    b"data: " + json.dumps(json.loads(event[6:]), indent=1).replace("\n", "\ndata: ").encode() + b"\n\n" for event in said("a ", "b ", "c")
)


@pytest.mark.parametrize(
    "stream",
    [
        WHOLE + DONE, (WHOLE + DONE).replace(b"\n", b"\r\n"), b"\xef\xbb\xbf" + WHOLE + DONE, IN_LINES + DONE, WHOLE,
        WHOLE + b"data: [DONE]",
        WHOLE.replace(b"data: ", b": ping\n\nevent: message\nid: 1\ndata:") + DONE, WHOLE.replace(b"null", b'""') + DONE,
        WHOLE.replace(b"data: ", b'data: {"choices": [{"index": 1, "text": "z", "finish_reason": "length"}]}\n\ndata: ', 1) + DONE,
        b'data: {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 3}}\n\n' + WHOLE + DONE,
    ],
)  # fmt: skip
def test_a_stream_in_any_of_the_allowed_shapes_is_read(stream):
    """Line ends, a byte order mark, comments, an event on several lines, no end marker, a choice that nobody asked for: the same answer."""

    async def run():
        async with answering(raw(200, stream)) as backend:
            pieces = await alone(backend, ask())
        assert "".join(piece.text for piece in pieces) == "a b c"
        assert [piece.finish_reason for piece in pieces if piece.finish_reason] == ["stop"]
        assert pieces[-1].output_tokens == 3

    asyncio.run(run())


@pytest.mark.parametrize("at", range(1, 40, 3))
def test_an_event_may_be_cut_anywhere(at):
    reader = EventReader()
    parts = [IN_LINES[i : i + at] for i in range(0, len(IN_LINES), at)]
    assert [event.choices[0].text for part in parts for _, event in reader.take(part)] == ["a ", "b ", "c"]


def test_an_event_of_many_lines_takes_time_in_proportion():
    """A hundred thousand lines of one event, which could still become whole with each: looked at again with every line they would hold
    up the loop for minutes."""
    reader = EventReader()
    began_s = time.process_time()
    assert not list(reader.take(b'data: {"a": [1,\n' + b"data: 1,\n" * 100_000))
    with pytest.raises(BadEvent):
        list(reader.take(b"\n"))
    assert time.process_time() - began_s < 5.0


def test_a_server_that_never_stops_is_stopped():
    """It was asked for so many tokens; an answer that is not streamed is kept whole until its end."""

    async def run():
        stream = said("word " * 2000)[0].replace(b'"stop"', b"null") * 40
        async with answering(raw(200, stream + DONE)) as backend:
            with pytest.raises(BackendFault, match="more text than"):
                await alone(backend, ask(max_tokens=20))

    asyncio.run(run())


@pytest.mark.parametrize("status", [401, 403, 404, 405])
def test_what_the_operator_must_mend_is_not_the_callers(status):
    """The model's name there, the path, the key are the configuration's: the caller is served elsewhere."""

    async def run():
        async with answering(raw(status, b'{"error": {"message": "no such model"}}')) as backend:
            with pytest.raises(BackendFault, match=f"HTTP {status}"):
                await alone(backend, ask())

    asyncio.run(run())


def test_a_probe_answered_with_nonsense_says_no():
    async def run():
        for body in (DEEP, b"[]", b"1", b'{"choices": []}', b"\xff"):
            async with answering(raw(200, body)) as backend:
                assert await backend.probe() is False

    asyncio.run(run())


def test_a_wave_of_503_is_over_when_it_is_over():
    """All groups answer 503 with Retry-After for a while, then are well: the first good answer comes within 2 s (routers elsewhere: 57)."""

    async def body(service):
        for backend in service.backends:
            backend.server.fault = lambda request, index: "503+1" if index == -1 else None
        await asyncio.gather(*(collect(service, ask()) for _ in range(60)), return_exceptions=True)
        for backend in service.backends:
            backend.server.fault = lambda request, index: None
        began_s = time.monotonic()
        while True:
            try:
                await collect(service, ask())
                break
            except Refusal as refusal:
                assert refusal.status in (429, 503) and refusal.retry_after_s > 0
                await asyncio.sleep(0.05)
        assert time.monotonic() - began_s < 2.0 * SLOWER
        assert {breaker.state for breaker in service.panel.breakers} == {State.CLOSED}

    with_backends(3, body, replace(PATIENT, hold_max_s=1.0))


def test_a_server_that_goes_away_and_comes_back():
    async def body(service):
        gone = service.backends[0]
        await gone.server.stop()
        for pieces in await asyncio.gather(*(collect(service, ask()) for _ in range(20))):
            assert pieces[-1].output_tokens == 24
        await gone.server.start()
        end_s = time.monotonic() + GUARD_S
        before = len(gone.server.requests)
        while len(gone.server.requests) == before:
            assert time.monotonic() < end_s
            await asyncio.gather(*(collect(service, ask(max_tokens=2)) for _ in range(4)))
            await asyncio.sleep(0.1)

    with_backends(2, body)


def test_one_ten_times_slower_gets_few_without_any_metrics():
    """One of four is ten times slower, at least (on full cores the others are slow too), and no page tells load: it gets at most 6 % of 400
    requests of 16 callers."""

    async def body(service):
        for backend in service.backends:
            backend.server.has_metrics = False
            backend.server.gap_s = 0.01
        service.backends[2].server.gap_s = 0.3
        left = [400]

        async def caller():
            while left[0] > 0:
                left[0] -= 1
                await collect(service, ask(max_tokens=10))

        await asyncio.gather(*(caller() for _ in range(16)))
        shares = [len(backend.server.requests) / 400 for backend in service.backends]
        assert shares[2] <= 0.06, shares

    with_backends(4, body)


def test_the_request_is_passed_on_under_the_remote_name():
    async def run():
        backend = WithServer(0, 1.0)
        await backend.start()
        try:
            await alone(backend, ask(max_tokens=3))
            body, headers = backend.server.requests[0], backend.server.headers[0]
            assert body["model"] == "m" and body["stream"] is True and body["max_tokens"] == 3
            assert headers["Authorization"] == "Bearer key"
        finally:
            await backend.close()

    asyncio.run(run())


def test_metric_names_old_and_new():
    vllm = (
        'vllm:num_requests_running{model_name="a",engine="0"} 3\nvllm:num_requests_running{engine="1"} 2\nvllm:num_requests_waiting 4.0\n'
    )
    assert load_of(vllm + "vllm:gpu_cache_usage_perc 0.25") == load_of(vllm + 'vllm:kv_cache_usage_perc{engine="0"} 0.25')
    found = load_of(vllm + "vllm:kv_cache_usage_perc 0.25")
    assert (found.running, found.waiting, found.kv_used_fraction) == (5, 4, 0.25)
    sglang = load_of("sglang:num_running_reqs 7\nsglang:num_queue_reqs 1\nsglang:token_usage 0.5\n")
    assert (sglang.running, sglang.waiting, sglang.kv_used_fraction) == (7, 1, 0.5)
    assert load_of(vllm.replace(" 3", " 3 1764480000000")).running == 5  # with a time stamp
    for nonsense in ("inf", "-inf", "-7", "1e300", "NaN", "x", ""):
        assert load_of(f'vllm:num_requests_running{{engine="1"}} {nonsense}\n{vllm}vllm:kv_cache_usage_perc {nonsense}\n').running == 5
    assert load_of(f"{vllm}vllm:kv_cache_usage_perc 3.5\n").kv_used_fraction == 1.0
    assert load_of("# nothing\nprocess_cpu_seconds_total 4\nvllm:num_requests_running NaN\n") is None


def test_a_large_metrics_page_takes_no_time():
    """Lines and lines of other metrics and lines without end; it is read in the event loop."""
    page = "a 1\n" * (3 << 18) + "vllm:num_requests_running{" + "{" * (1 << 20) + "\nvllm:num_requests_running 2\n"
    began_s = time.process_time()
    assert load_of(page).running == 2
    assert time.process_time() - began_s < 0.25
