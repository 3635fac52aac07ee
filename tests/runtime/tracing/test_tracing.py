"""Traces of real requests, as an OTLP collector gets them; and that a collector in trouble is nobody else's."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import pytest

from runtime.backends.interface import BackendFault
from runtime.request_notes import RequestNotes
from runtime.service_config import load_service
from runtime.tracing import names as N
from runtime.tracing.tracer import QUEUE_MAX, Tracer, TracingSettings, context_of
from tests.conftest import GUARD_S, PROJECT
from tests.runtime.live_service import Live, live
from tests.runtime.tracing.collector import Collector, attributes, collecting, events

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="module")
def traced(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live(tmp_path_factory.mktemp("traced"), tracing={"endpoint": collector.url}) as service:
        yield service


@pytest.fixture(autouse=True)
def forget(collector: Collector) -> None:
    collector.spans.clear()


def wait_for(collector: Collector, beginning: str, count: int = 1) -> list:
    end_s = time.monotonic() + GUARD_S
    while len(collector.named(beginning)) < count:
        assert time.monotonic() < end_s, [span.name for span in collector.spans]
        time.sleep(0.02)
    return collector.named(beginning)


def test_one_span_over_all_attempts_and_a_child_for_each(traced, collector):
    """In the caller's trace, with the times and counts that the answer itself shows; the first attempt fails, the second serves."""
    backends = traced.service.dispatcher.backends
    broken: list[str] = []

    def break_next() -> None:
        for backend in backends:
            whole = backend.submit

            async def once(call, begun=None, backend=backend, whole=whole):
                if not broken:
                    broken.append(backend.name)
                    raise BackendFault(f"{backend.name}: struck")
                async for piece in whole(call):
                    yield piece

            backend.submit = once

    traced.do(break_next)
    began_ns = time.time_ns()
    try:
        answer = httpx.post(
            f"{traced.url}/v1/chat/completions", json=CHAT | {"service_class": "code"},
            headers={"traceparent": PARENT, "x-request-id": "mine"}, timeout=60.0,
        )  # fmt: skip
    finally:
        traced.do(lambda: [backend.__dict__.pop("submit") for backend in backends])
    ended_ns = time.time_ns()
    assert answer.status_code == 200
    usage = answer.json()["usage"]
    (span,) = wait_for(collector, "chat m")
    first, second = sorted(wait_for(collector, "attempt", 2), key=lambda span: span.start_time_unix_nano)
    assert span.trace_id.hex() == PARENT[3:35] and span.parent_span_id.hex() == PARENT[36:52]
    assert first.trace_id == second.trace_id == span.trace_id
    assert first.parent_span_id == second.parent_span_id == span.span_id
    assert len({span.span_id, first.span_id, second.span_id}) == 3
    about = attributes(span)
    assert about[N.OPERATION_NAME] == "chat" and about[N.REQUEST_MODEL] == "m" and about[N.PROVIDER_NAME] == "ballast"
    assert about[N.REQUEST_ID] == "mine" and about[N.SERVICE_CLASS] == "code" and about[N.HTTP_STATUS] == 200
    assert about[N.INPUT_TOKENS] == usage["prompt_tokens"] and about[N.OUTPUT_TOKENS] == usage["completion_tokens"]
    assert about[N.RESPONSE_FINISH_REASONS] == [answer.json()["choices"][0]["finish_reason"]]
    assert began_ns - 50e6 < span.start_time_unix_nano <= first.start_time_unix_nano <= first.end_time_unix_nano
    assert first.end_time_unix_nano <= second.start_time_unix_nano < second.end_time_unix_nano <= span.end_time_unix_nano < ended_ns + 50e6
    assert attributes(first)[N.OUTCOME] == "fault" and attributes(first)[N.GROUP] == broken[0]
    assert attributes(second)[N.OUTCOME] == "ok" and attributes(second)[N.GROUP] != broken[0]
    assert first.status.code == 2 and "struck" in attributes(first)[N.REASON]
    assert {N.EVENT_ARRIVAL, N.EVENT_PROMPT, N.EVENT_QUEUE, N.EVENT_ROUTE, N.EVENT_RETURN} <= set(events(span))
    assert attributes(events(span)[N.EVENT_ROUTE])[N.DECIDED_BY] == "heuristic"
    order = [N.EVENT_QUEUE, N.EVENT_PREFILL, N.EVENT_DECODE, N.EVENT_COMMUNICATION, N.EVENT_RETURN]
    assert set(order) == set(events(second))
    stamps = [events(second)[name].time_unix_nano for name in (N.EVENT_QUEUE, N.EVENT_PREFILL, N.EVENT_DECODE)]
    assert stamps == sorted(stamps)
    parts_s = sum(value for name, value in attributes(second).items() if name.startswith(N.PART))
    spans_s = sum(attributes(events(second)[name])[N.SECONDS] for name in (N.EVENT_QUEUE, N.EVENT_PREFILL, N.EVENT_DECODE))
    assert parts_s == pytest.approx(spans_s, rel=1e-6)  # every part from stamps of its own: they add up to the whole
    assert 0.0 < parts_s < (second.end_time_unix_nano - second.start_time_unix_nano) / 1e9 + 0.05
    assert collector.resources[-1]["service.name"] == "ballast" and collector.paths[-1] == "/v1/traces"


def test_each_answer_of_a_request_has_its_attempt(traced, collector):
    answer = httpx.post(f"{traced.url}/v1/completions", json={"model": "m", "prompt": "hello", "max_tokens": 2, "n": 3}, timeout=60.0)
    assert answer.status_code == 200
    (span,) = wait_for(collector, "text_completion m")
    attempts = wait_for(collector, "attempt", 3)
    assert {attributes(attempt)[N.CHOICE] for attempt in attempts} == {0, 1, 2}
    assert not span.parent_span_id and attributes(span)[N.REQUEST_CHOICES] == 3


def test_refusals_are_traced_and_a_caller_that_is_not_sampled_is_not(traced, collector):
    httpx.post(f"{traced.url}/v1/chat/completions", json=CHAT, headers={"traceparent": PARENT[:-2] + "00"}, timeout=60.0)
    httpx.post(f"{traced.url}/v1/chat/completions", json=CHAT | {"model": "other"}, timeout=60.0)
    (span,) = wait_for(collector, "chat")
    assert attributes(span)[N.ERROR_TYPE] == "model_not_found" and attributes(span)[N.HTTP_STATUS] == 404
    assert span.status.code == 0  # a caller's mistake is not the server's error
    time.sleep(0.7)
    assert len(collector.spans) == 1


@pytest.mark.parametrize(
    ("header", "context"),
    [
        (PARENT, (0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331, True)),
        (PARENT[:-2] + "00", (0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331, False)),
        ("01" + PARENT[2:] + "-more", (0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331, True)),  # a later version may say more
        (PARENT + "-more", None),
        ("ff" + PARENT[2:], None),
        (PARENT.upper(), None),
        ("00-" + "0" * 32 + PARENT[35:], None),
        (PARENT[:36] + "0" * 16 + "-01", None),
        ("", None),
        ("x" * 10_000, None),
    ],
)
def test_trace_contexts(header, context):
    """Cases of the W3C recommendation, section 3.2."""
    assert context_of(header.encode()) == context
    assert context_of(None) is None


def ended(tracer: Tracer) -> RequestNotes:
    notes = RequestNotes("r", "chat", time.monotonic(), status=200, trace=tracer.begin(None))
    notes.ended_s = time.monotonic()
    return notes


def test_the_share_of_traced_requests():
    with collecting() as collector:
        tracer = Tracer(TracingSettings(collector.url, share=0.25), "test", seed=5)
        try:
            traced = sum(tracer.begin(None) is not None for _ in range(10_000))
            assert traced == pytest.approx(2500, abs=200)  # 4.6 standard deviations
            assert tracer.begin(PARENT.encode()) is not None
        finally:
            tracer.close()


def test_a_dead_collector_holds_up_nobody(caplog):
    """Nobody listens, then somebody hangs: handing over stays in microseconds, what is too much is dropped and counted."""
    with collecting() as collector:
        collector.delay_s = 30.0
        for url in ("http://127.0.0.1:9", collector.url):
            tracer = Tracer(TracingSettings(url, timeout_s=0.3), "test")
            try:
                began_s = time.monotonic()
                for _ in range(QUEUE_MAX):
                    tracer.ended(ended(tracer))
                while not tracer.dropped:  # the thread takes a few batches meanwhile
                    tracer.ended(ended(tracer))
                    assert time.monotonic() - began_s < 20.0
                end_s = time.monotonic() + GUARD_S
                while not tracer.failed and time.monotonic() < end_s:
                    time.sleep(0.02)
                assert tracer.failed > 0 and tracer.exported == 0
                told = [record.getMessage() for record in caplog.records]
                lines = [line for line in told if "traces are not taken" in line and url in line]
                assert len(lines) == 1 and not [record for record in caplog.records if record.name.startswith("opentelemetry")]
            finally:
                began_s = time.monotonic()
                tracer.close()
                assert time.monotonic() - began_s < 25.0  # not the 30 s for which the collector hangs


def test_requests_go_on_while_the_collector_is_dead(tmp_path):
    with live(tmp_path, tracing={"endpoint": "http://127.0.0.1:9", "timeout_s": 0.3}) as service:
        for _ in range(3):
            assert httpx.post(f"{service.url}/v1/chat/completions", json=CHAT, timeout=60.0).status_code == 200
        end_s = time.monotonic() + GUARD_S
        while 'ballast_traces_total{outcome="failed"} 3.0' not in httpx.get(f"{service.url}/metrics", timeout=60.0).text:
            assert time.monotonic() < end_s, httpx.get(f"{service.url}/metrics", timeout=60.0).text
            time.sleep(0.1)


def test_nothing_of_opentelemetry_is_loaded_without_tracing():
    code = "import json, sys, runtime.serve; print(json.dumps([name for name in sys.modules if name.startswith('opentelemetry')]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True, cwd=PROJECT)
    assert json.loads(done.stdout) == []


def test_configuration(tmp_path):
    file = tmp_path / "service.yaml"
    file.write_text("cluster: unlike-3\n")
    assert load_service(file).tracing is None
    file.write_text("cluster: unlike-3\ntracing: {}\n")
    assert load_service(file).tracing.url == "http://127.0.0.1:4318/v1/traces"
    file.write_text("cluster: unlike-3\ntracing: {endpoint: 'https://c.example/otel/v1/traces', share: 0.1}\n")
    assert load_service(file).tracing.url == "https://c.example/otel/v1/traces"
    for wrong, told in (("{endpoint: collector}", "must begin with http"), ("{share: 2}", "share"), ("{endpont: x}", "endpont")):
        file.write_text(f"cluster: unlike-3\ntracing: {wrong}\n")
        with pytest.raises(ValueError, match=told):
            load_service(file)
