"""Generated request bodies over real HTTP: whatever comes in, no server error, no hang, and every answer in the API's shape.

`python -m benchmarks.bodies` tries 200,000.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from scripted_dispatcher import FOREIGN, OWN, SMALL, ScriptedDispatcher, Service, serving, wait_until

from benchmarks.bodies import HANG_S, Found, bars, gateway, kinds_for, run, service
from benchmarks.body_answers import OverHttp, Told, fault_of
from benchmarks.body_shapes import PATHS, Asked, BodyShapes

SEARCH = settings(max_examples=800, deadline=None, suppress_health_check=list(HealthCheck))
SHAPES = BodyShapes((OWN, FOREIGN, SMALL))


@pytest.fixture(scope="module")
def asker() -> Iterator[OverHttp]:
    with serving(ScriptedDispatcher()) as service:
        asker = OverHttp(service.port)
        yield asker
        asker.close()
        wait_until(lambda: service.metrics.in_flight == 0 and service.dispatcher.open_calls == 0)
        assert service.metrics.refusals["internal_error"] == 0
        assert still_serves(service)


def still_serves(service: Service) -> bool:
    """It still serves."""
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=60)
    connection.request("POST", PATHS[1], json.dumps({"model": OWN, "prompt": "a"}))
    return connection.getresponse().status == 200


def is_well_answered(asker: OverHttp, asked: Asked) -> bool:
    """Raises: AssertionError unless the answer is one of the API's, in less than a second, once in three times on a busy machine."""
    for _ in range(3):
        told = asker.ask(asked)
        assert fault_of(told) is None, told
        if told.took_s < HANG_S:
            return True
    raise AssertionError(f"it takes {told.took_s:.2f} s each time")


@SEARCH
@given(asked=SHAPES.right())
def test_bodies_that_are_right(asker, asked):
    assert is_well_answered(asker, asked)


@SEARCH
@given(asked=SHAPES.likely)
def test_bodies_that_are_nearly_right(asker, asked):
    assert is_well_answered(asker, asked)


@SEARCH
@given(asked=SHAPES.any_json())
def test_any_json_at_all(asker, asked):
    assert is_well_answered(asker, asked)


@SEARCH
@given(asked=SHAPES.damaged())
def test_bodies_with_bytes_changed(asker, asked):
    assert is_well_answered(asker, asked)


ANSWER = b'{"choices":[{"finish_reason":"stop"}]}'
REFUSAL = b'{"error":{"message":"m","type":"t","param":null,"code":null}}'


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (Told(200, "application/json", ANSWER, 0.0), None),
        (Told(400, "application/json", REFUSAL, 0.0), None),
        (Told(429, "application/json", REFUSAL, 0.0), None),
        (Told(503, "application/json", REFUSAL, 0.0), "server error 503"),
        (Told(400, "application/json", b'{"detail":"no"}', 0.0), "KeyError"),
        (Told(400, "text/plain", b"no", 0.0), "JSONDecodeError"),
        (Told(200, "application/json", ANSWER.replace(b'"stop"', b"null"), 0.0), "no finish reason"),
        (Told(200, "text/event-stream", b'data: {"choices":[]}\n\ndata: [DONE]\n\n', 0.0), None),
        (Told(200, "text/event-stream", b'data: {"choices":[]}\n\n', 0.0), "without its end"),
        (Told(200, "text/event-stream", b'data: {"error":{}}\n\ndata: [DONE]\n\n', 0.0), "server error in a stream"),
    ],
)
def test_what_is_counted_as_a_fault(told, said):
    found = Found()
    found.take("here", "right", ("/v1/completions", b"{}"), told)
    assert (said is None) == (not found.faults)
    assert said is None or said in found.faults[0]
    assert found.server_errors == (said is not None and "server error" in said)


def test_the_benchmark_within_the_process_and_with_real_ranks(dreams, tmp_path, kernels):
    """A few bodies of each kind: all answered as they should be, right ones with 200; a hang and a lost connection count."""
    found, kinds = Found(), BodyShapes(["drilled"]).all()
    with service(tmp_path, dreams) as running:
        http = OverHttp(int(running.url.rpartition(":")[2]))
        run("served", http.ask, {"right": kinds["right"]}, 40, 3, found)
        http.close()
    with gateway(tmp_path / "model") as asking:
        run("in process", asking.ask, kinds_for("drilled"), 120, 1, found)
    assert found.bodies == 160 and found.faults == []
    assert found.statuses["served", "right", 200] >= 30 and found.statuses["in process", "right", 200] >= 90
    assert all(bar.ok for bar in bars(found, 160))
    found.take("here", "right", ("/", b""), Told(200, "application/json", ANSWER, 1.5))
    found.lost("here", "right", ("/", b""), TimeoutError())
    assert found.hangs == 2 and len(found.faults) == 2 and not all(bar.ok for bar in bars(found, 162))
