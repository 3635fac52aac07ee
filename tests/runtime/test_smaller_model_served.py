"""Two whole services, the second with the smaller model: what the first one's full groups would refuse is answered by the second, in one
trace, and records tell it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from runtime.records.decision_records import DecisionFile
from tests.conftest import GUARD_S
from tests.runtime.live_service import Live, live
from tests.runtime.tracing.collector import Collector, attributes, collecting

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "ignore_eos": True}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("records")


@pytest.fixture(scope="module")
def front(collector: Collector, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Its groups, all busy, take nothing for some seconds at a time; calls are held for a moment."""
    tracing = {"endpoint": collector.url}
    with live(tmp_path_factory.mktemp("small"), tracing=tracing, model={"name": "small"}) as behind:
        smaller = {"url": f"{behind.url}/v1", "model": "small", "classes": ["batch"]}
        more = {"dispatch": {"hold_max_s": 0.05}, "records": {"dir": str(folder)}, "smaller_model": smaller, "tracing": tracing}
        with live(tmp_path_factory.mktemp("front"), **more) as service:
            yield service


def make_busy(service: Live) -> None:
    service.do(lambda: [breaker.record_backpressure(60.0) for breaker in service.service.dispatcher.panel.breakers])


def wait_for(holds: Callable[[], Any], within_s: float = GUARD_S) -> Any:
    end_s = time.monotonic() + within_s
    while not (found := holds()):
        assert time.monotonic() < end_s, "it did not come true in time"
        time.sleep(0.05)
    return found


def records(folder: Path) -> list[dict[str, Any]]:
    lines = [line for path in folder.glob("requests-*.jsonl") for line in path.read_text().split("\n")[:-1]]  # the last: half written
    return [row for line in lines if "arrival_s" in (row := json.loads(line))]


@pytest.mark.parametrize("is_stream", [True, False])
def test_the_second_service_answers_in_the_same_trace_and_the_record_says_so(front, collector, folder, is_stream):
    collector.spans.clear()
    make_busy(front)
    request_id = f"degraded-{is_stream}"
    body = CHAT | {"service_class": "batch", "stream": is_stream, **({"stream_options": {"include_usage": True}} if is_stream else {})}
    answer = httpx.post(f"{front.url}/v1/chat/completions", json=body, headers={"x-request-id": request_id}, timeout=60.0)
    assert answer.status_code == 200 and answer.headers["x-ballast-degraded"] == "model=small"
    assert answer.headers["x-request-id"] == request_id
    if is_stream:
        *events, last = answer.text.removesuffix("\n\n").split("\n\n")
        assert last == "data: [DONE]"
        said = json.loads(events[-1].removeprefix("data: "))
    else:
        said = answer.json()
    assert said["model"] == "small" and said["usage"]["completion_tokens"] == 5
    wait_for(lambda: len(collector.named("chat")) == 2 and collector.named("attempt smaller_model"))
    (outer,), (inner,) = collector.named("chat m"), collector.named("chat small")
    (attempt,) = collector.named("attempt smaller_model")
    assert attempt.parent_span_id == outer.span_id and inner.parent_span_id == attempt.span_id
    assert attributes(outer)["gen_ai.response.model"] == "small" and attributes(outer)["ballast.degraded"] == "model=small"
    assert attributes(outer)["gen_ai.usage.output_tokens"] == 5 and attributes(attempt)["ballast.outcome"] == "ok"
    (row,) = wait_for(lambda: [row for row in records(folder) if row["extra"]["request"].startswith(request_id)])
    extra = row["extra"]
    assert (extra["end"], extra["degraded"], extra["group"], extra["cause"]) == ("queue_full", "model=small", "smaller_model", "queue_full")


def test_a_critical_class_is_refused_and_its_record_is_as_ever(front, folder):
    make_busy(front)
    answer = httpx.post(f"{front.url}/v1/chat/completions", json=CHAT, headers={"x-request-id": "critical"}, timeout=60.0)
    assert answer.status_code == 429 and "retry-after" in answer.headers
    (row,) = wait_for(lambda: [row for row in records(folder) if row["extra"]["request"].startswith("critical")])
    assert row["extra"]["end"] == "queue_full" and not {"degraded", "group"} & row["extra"].keys()


def test_decisions_tell_who_had_somewhere_to_go(front, folder):
    make_busy(front)
    for service_class in ("batch", "code"):
        httpx.post(f"{front.url}/v1/chat/completions", json=CHAT | {"service_class": service_class}, timeout=60.0)
    (path,) = wait_for(lambda: list(folder.glob("decisions-*.jsonl")))

    def refused() -> dict[str, set[bool]]:
        found: dict[str, set[bool]] = {}
        for record in DecisionFile(path):
            if record.command == "refuse":
                found.setdefault(record.service_class, set()).add(record.has_smaller)
        return found if {"batch", "code"} <= found.keys() else {}

    found = wait_for(refused)
    assert found["batch"] == {True} and found["code"] == {False}


def test_the_state_shows_it(front):
    said = httpx.get(f"{front.url}/admin/state", timeout=60.0).json()["smaller_model"]
    assert (said["model"], said["in_flight"], said["breaker"]["state"]) == ("small", 0, "closed") and said["counts"]["cut"] == 0
