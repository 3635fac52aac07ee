"""What would be refused under pressure is answered by the smaller model of another server, which says so; whatever is wrong with that
server, the caller gets the refusal that there would have been without it, or an error event, and never a silent cut."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from scripted_dispatcher import FOREIGN, OWN, ScriptedDispatcher, Service, says, serving, wait_until
from test_gateway_departures import ask

from envs.decision.circuit_breaker import CircuitBreaker, State
from runtime.calls import Call, Piece, Refusal
from runtime.gateway.forwarding import SmallerModelDesk
from runtime.gateway.smaller_model import OUTCOMES, SmallerModel, SmallerModelSettings
from tests.conftest import GUARD_S
from tests.runtime.backends.scripted_server import ScriptedServer

NAME = "small/model"
CHAT = {"model": OWN, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6}
COMPLETION = {"model": OWN, "prompt": "Hi", "max_tokens": 6}
KINDS = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION}
SHORT_S = 0.2
"""For limits that a hanging server is to run into. Where an answer is to come the limits are a minute's: machines may be slow."""


def refuses(reason: str, after_s: float | None = 7.0):
    async def script(call: Call) -> AsyncIterator[Piece]:
        raise Refusal(reason, f"refused: {reason}", retry_after_s=after_s)
        yield

    return script


@contextlib.contextmanager
def running(server: ScriptedServer) -> Iterator[ScriptedServer]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(server.start(), loop).result(GUARD_S)
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(GUARD_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(GUARD_S)
        loop.close()


@pytest.fixture(scope="module")
def small_server() -> Iterator[ScriptedServer]:
    with running(ScriptedServer()) as server:
        yield server


@pytest.fixture(scope="module")
def settings(small_server) -> SmallerModelSettings:
    return SmallerModelSettings(small_server.url, NAME, api_key="small-key", max_in_flight=2, first_byte_s=60.0, gap_s=60.0)


@pytest.fixture(scope="module")
def pair(settings) -> Iterator[tuple[Service, Service]]:
    """(with a smaller model, without)."""
    with serving(ScriptedDispatcher(), smaller_model=settings) as with_one, serving(ScriptedDispatcher()) as without:
        yield with_one, without


@pytest.fixture
def service(pair, settings, small_server) -> Iterator[Service]:
    """Under pressure, its smaller model as new; every test leaves both servers idle."""
    with_one, without = pair
    desk = desk_of(with_one)
    desk.model.settings, desk.model.breaker = settings, CircuitBreaker(now_s=time.monotonic)
    desk.counts.update(dict.fromkeys(OUTCOMES, 0))
    with_one.dispatcher.script = without.dispatcher.script = refuses("overloaded")
    with_one.dispatcher.calls.clear()
    small_server.fault, small_server.told_model, small_server.gap_s = (lambda body, index: None), None, 0.001
    small_server.requests.clear()
    small_server.headers.clear()
    yield with_one
    metrics = with_one.metrics
    wait_until(lambda: desk.model.in_flight == metrics.in_flight == metrics.body_bytes_in_flight == small_server.in_flight == 0)


def desk_of(service: Service) -> SmallerModelDesk:
    return service.app.state.generation.smaller


def counts(service: Service) -> dict[str, int]:
    return {name: count for name, count in desk_of(service).counts.items() if count}


def post(service: Service, body: dict[str, Any], path: str = "/v1/chat/completions", **headers: str) -> httpx.Response:
    return httpx.post(service.url + path, json=body, headers=headers, timeout=60.0, trust_env=False)


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    """Of a stream, whose end marker must be there, once and last."""
    parts = answer.text.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""] and answer.text.count("[DONE]") == 1, answer.text
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


def told(answer: httpx.Response) -> tuple[int, bytes, list[tuple[str, str]]]:
    """All that a caller gets, but for the date and the id."""
    return answer.status_code, answer.content, sorted(pair for pair in answer.headers.items() if pair[0] not in ("date", "x-request-id"))


def check_refused_as_without(pair: tuple[Service, Service], body: dict[str, Any], path: str = "/v1/chat/completions") -> None:
    with_one, without = pair
    expected = told(post(without, body, path))
    assert expected[0] in (429, 503) and ("retry-after", "7") in expected[2]
    assert told(post(with_one, body, path)) == expected


# --- answered there -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", KINDS)
@pytest.mark.parametrize("reason", ["overloaded", "queue_full", "class_shed"])
def test_a_call_refused_under_pressure_is_answered_and_marked(service, small_server, path, reason):
    service.dispatcher.script = refuses(reason)
    answer = post(service, KINDS[path], path)
    said = answer.json()
    (choice,) = said["choices"]
    text = choice["message"]["content"] if path.endswith("chat/completions") else choice["text"]
    assert answer.status_code == 200 and answer.headers["x-ballast-degraded"] == f"model={NAME}"
    assert said["model"] == NAME and text == "".join(small_server.words(KINDS[path]))
    assert said["usage"] == {"prompt_tokens": 5, "completion_tokens": 6}, "as that server tells it"
    assert counts(service) == {"answered": 1}


@pytest.mark.parametrize("path", KINDS)
def test_a_stream_is_relayed_event_by_event(service, small_server, path):
    answer = post(service, KINDS[path] | {"stream": True, "stream_options": {"include_usage": True}}, path)
    assert answer.status_code == 200 and answer.headers["x-ballast-degraded"] == f"model={NAME}"
    assert answer.headers["content-type"].startswith("text/event-stream")
    *chunks, last = events(answer)
    shown = [chunk["choices"][0] for chunk in chunks]
    texts = [choice["delta"]["content"] if path.endswith("chat/completions") else choice["text"] for choice in shown]
    assert texts == small_server.words(KINDS[path]) and {chunk["model"] for chunk in chunks} == {NAME}
    assert [choice["finish_reason"] for choice in shown] == [None] * 5 + ["length"]
    assert last["usage"] == {"prompt_tokens": 5, "completion_tokens": 6}


def test_the_body_goes_as_it_came_but_for_the_model_and_our_own_fields(service, small_server):
    passed = {
        "n": 2, "stop": ["never"], "logprobs": 3, "temperature": 0.25, "top_k": 7, "seed": 11, "user": "somebody", "min_tokens": 1,
        "prompt": ["one", "two"], "max_tokens": 3,
    }  # fmt: skip
    ours = {"service_class": "batch", "priority": 3, "session_id": "s", "service_tier": "flex", "request_id": "r"}
    answer = post(
        service, {"model": OWN} | passed | ours, "/v1/completions", authorization="Bearer callers-own", **{"x-request-id": "told-by-caller"}
    )
    # the scripted server makes n answers whatever the prompts are: two of four, which is no whole answer
    assert answer.status_code == 429
    (sent,), (headers,) = small_server.requests, small_server.headers
    assert sent == passed | {"model": NAME}
    given = {name.lower(): value for name, value in headers.items()}
    assert given["authorization"] == "Bearer small-key" and given["x-request-id"] == "told-by-caller" and given["x-smaller-model"] == "no"


@pytest.mark.parametrize("body", [{}, {"echo": True}])
def test_no_field_is_added_but_the_usual_limit_where_there_is_none(service, small_server, body):
    asked = {"model": OWN, "prompt": "Hi"} | body
    assert post(service, asked, "/v1/completions").status_code == 200
    (sent,) = small_server.requests
    assert sent == asked | {"model": NAME, "max_tokens": 16}, "the API's own default of completions"


@pytest.mark.parametrize("named", [{}, {"max_tokens": None}, {"max_completion_tokens": 5}])
def test_a_chat_without_a_limit_of_its_own_has_the_gateways(service, small_server, named):
    """As here: 1,024 tokens, or what the model asked for has room for, 512 less the prompt's 3."""
    body = {"model": OWN, "messages": CHAT["messages"]} | named
    usual = {"max_tokens": 509} if "max_completion_tokens" not in named else {"max_tokens": 16}  # the scripted server's own
    assert post(service, body).status_code == 200
    (sent,) = small_server.requests
    assert sent == body | {"model": NAME} | usual


@pytest.mark.parametrize("is_stream", [False, True])
def test_the_name_is_the_configured_one_whatever_the_server_calls_it(service, small_server, is_stream):
    small_server.told_model = "small-2026-11-30"
    answer = post(service, CHAT | {"stream": is_stream})
    said = events(answer)[:-1] if is_stream else [answer.json()]
    assert {one["model"] for one in said} == {NAME} and said[0]["choices"]


def test_several_answers_of_which_one_is_refused_go_there_together(service, small_server):
    """n = 2: the first is being made when the second is refused; its work ends, and both come from the smaller model."""

    async def script(call: Call) -> AsyncIterator[Piece]:
        if call.call_id.endswith(".1"):
            raise Refusal("queue_full", "full", retry_after_s=7.0)
        async for piece in says(call, delay_s=60.0):
            yield piece

    service.dispatcher.script = script
    said = post(service, CHAT | {"n": 2}).json()
    assert [choice["index"] for choice in said["choices"]] == [0, 1] and said["model"] == NAME
    assert said["usage"]["completion_tokens"] == 12 and small_server.requests[0]["n"] == 2
    wait_until(lambda: service.dispatcher.open_calls == 0)


def test_a_body_for_a_foreign_model_keeps_what_only_that_server_knows(service, small_server):
    asked = CHAT | {"model": FOREIGN, "tools": [{"type": "function", "function": {"name": "f"}}], "unheard_of": 1}
    assert post(service, asked).status_code == 200
    assert small_server.requests == [asked | {"model": NAME}]


# --- not asked there ------------------------------------------------------------------------------------------------------------


def test_a_critical_class_is_never_forwarded(service, small_server, pair):
    check_refused_as_without(pair, CHAT | {"service_class": "code"})
    assert small_server.requests == [] and counts(service) == {}


def test_a_caller_may_say_no(service, small_server):
    answer = post(service, CHAT, **{"x-smaller-model": "no"})
    assert answer.status_code == 429 and small_server.requests == []
    answer = post(service, CHAT, **{"x-smaller-model": "off"})
    assert answer.status_code == 400 and "x-smaller-model" in answer.json()["error"]["param"]


@pytest.mark.parametrize("reason", ["no_capacity", "starting", "attempts_spent", "too_long", "deadline", "stream_lost", "unsupported"])
def test_other_refusals_stand(service, small_server, pair, reason):
    for one in pair:
        one.dispatcher.script = refuses(reason)
    assert told(post(service, CHAT)) == told(post(pair[1], CHAT))
    assert small_server.requests == [] and counts(service) == {}


@pytest.mark.parametrize(
    "more", [{"prompt": [72, 105]}, {"prompt": [[72], [105]]}, {"stop_token_ids": [5]}, {"prompt": [72], "model": FOREIGN}]
)
def test_token_ids_mean_something_else_to_another_tokenizer(service, small_server, pair, more):
    check_refused_as_without(pair, COMPLETION | more, "/v1/completions")
    assert small_server.requests == [] and counts(service) == {"unfit": 1}


def test_what_can_be_served_is_not_forwarded_and_bad_input_is_told(service, small_server):
    service.dispatcher.script = says
    answer = post(service, CHAT)
    assert answer.json()["model"] == OWN and "x-ballast-degraded" not in answer.headers
    assert post(service, CHAT | {"temperature": 9}).status_code == 400
    assert small_server.requests == []


def test_a_stream_that_began_here_is_not_taken_up_there(service, small_server):
    async def script(call: Call) -> AsyncIterator[Piece]:
        yield Piece(0, 97, "a")
        raise Refusal("queue_full", "full", retry_after_s=7.0)

    service.dispatcher.script = script
    *_, last = events(post(service, CHAT | {"stream": True}))
    assert last["error"]["code"] == "queue_full" and small_server.requests == []


# --- when that server is not well -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("fault", "outcome"),
    [("die", "failed"), ("500", "failed"), ("503", "failed"), ("503+3", "busy"), ("429", "busy"), ("400", "rejected"), ("401", "failed")],
)
def test_no_answer_there_is_the_refusal_here(service, small_server, pair, fault, outcome, is_stream):
    small_server.fault = lambda body, index: fault
    check_refused_as_without(pair, CHAT | {"stream": is_stream})
    assert counts(service) == {outcome: 1}
    # a connection that was kept for a second and is lost at once may have been closed before: it is replaced, once
    assert len(small_server.requests) == 1 or (fault == "die" and len(small_server.requests) == 2)


@pytest.mark.parametrize("fault", ["garble", "error_event"])
def test_a_stream_that_begins_with_nonsense_is_the_refusal(service, small_server, pair, fault):
    small_server.fault = lambda body, index: fault if index == 0 else None
    check_refused_as_without(pair, CHAT | {"stream": True})
    assert counts(service) == {"failed": 1}


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_silent_server_is_left_after_its_time(service, small_server, pair, is_stream):
    small_server.fault = lambda body, index: "hang"
    desk_of(service).model.settings = replace(desk_of(service).model.settings, first_byte_s=SHORT_S, answer_s=SHORT_S)
    check_refused_as_without(pair, CHAT | {"stream": is_stream})
    assert counts(service) == {"failed": 1}
    wait_until(lambda: small_server.in_flight == 0)


def test_the_callers_own_deadline_stands_above_the_servers(service, small_server):
    """Half a second is asked for: the refusal comes then, and is nobody's fault."""
    small_server.fault = lambda body, index: "hang"
    answer = post(service, CHAT, **{"x-request-timeout-s": "0.5"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "overloaded")
    assert counts(service) == {"abandoned": 1} and desk_of(service).model.breaker.state is State.CLOSED


@pytest.mark.parametrize("fault", ["die", "hang", "garble", "error_event", "no_finish", "another", "endless", "endless_empty"])
def test_a_stream_lost_there_ends_in_an_error_event(service, small_server, fault):
    small_server.fault = lambda body, index: fault if index == (5 if fault == "no_finish" else 3) else None
    if fault == "hang":
        desk_of(service).model.settings = replace(desk_of(service).model.settings, gap_s=5 * SHORT_S)
        small_server.gap_s = 0.0
    began_s = time.monotonic()
    answer = post(service, CHAT | {"stream": True})
    assert time.monotonic() - began_s < 30.0, "it is the gap's limit that counts, not a minute"
    *chunks, last = events(answer)
    assert answer.status_code == 200 and chunks and last["error"]["code"] == "stream_lost"
    shown = [chunk["choices"][0]["delta"]["content"] for chunk in chunks if chunk["choices"]]
    shown = shown[:4] if fault == "endless" else shown
    assert shown == small_server.words(CHAT)[: len(shown)]
    assert counts(service) == {"cut": 1} and len(chunks) < 100
    wait_until(lambda: small_server.in_flight == 0)


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_answer_that_nobody_asked_for_is_the_refusal(service, small_server, pair, is_stream):
    small_server.fault = lambda body, index: "another" if index <= 0 else None
    check_refused_as_without(pair, CHAT | {"stream": is_stream})
    assert counts(service) == {"failed": 1}


def test_some_servers_end_without_the_marker(service, small_server):
    small_server.fault = lambda body, index: "no_marker"
    *chunks, usage = events(post(service, CHAT | {"stream": True}))
    assert [chunk["choices"][0]["delta"]["content"] for chunk in chunks] == small_server.words(CHAT) and usage["usage"]
    assert counts(service) == {"answered": 1}


def test_so_many_are_there_at_once_and_no_more(service, small_server, pair):
    small_server.fault = lambda body, index: "hang" if body["messages"][0]["content"] == "wait" else None
    waiting = CHAT | {"messages": [{"role": "user", "content": "wait"}], "stream": True}
    connections = [ask(service, waiting) for _ in range(2)]
    wait_until(lambda: small_server.in_flight == 2)
    check_refused_as_without(pair, CHAT)
    assert counts(service) == {"full": 1} and len(small_server.requests) == 2
    for connection in connections:
        connection.close()
    wait_until(lambda: desk_of(service).model.in_flight == 0)
    assert post(service, CHAT).status_code == 200


@pytest.mark.parametrize("at", [-1, 3])
@pytest.mark.parametrize("is_stream", [False, True])
def test_who_leaves_ends_the_work_there(service, small_server, is_stream, at):
    small_server.fault = lambda body, index: "hang" if index == (at if is_stream else -1) else None
    departures = service.metrics.departures
    connection = ask(service, CHAT | {"stream": is_stream})
    wait_until(lambda: small_server.in_flight == 1)
    if is_stream and at >= 0:
        assert connection.recv(4096)
    connection.close()
    wait_until(lambda: small_server.in_flight == 0 and service.metrics.in_flight == 0)
    assert service.metrics.departures == departures + 1 and counts(service) == {"abandoned": 1}
    assert desk_of(service).model.breaker.state is State.CLOSED, "nobody's fault"


def test_a_dead_server_costs_nothing_and_comes_back_through_a_probe(service, small_server, pair):
    clock = [0.0]
    breaker = desk_of(service).model.breaker = CircuitBreaker(now_s=lambda: clock[0], failures_to_open=3, open_for_s=5.0)
    small_server.fault = lambda body, index: "500"
    for _ in range(8):
        check_refused_as_without(pair, CHAT)
    assert len(small_server.requests) == 3 and counts(service) == {"failed": 3, "breaker_open": 5}
    small_server.fault, clock[0] = (lambda body, index: None), 5.0
    assert [post(service, CHAT).status_code for _ in range(3)] == [200] * 3
    assert breaker.state is State.CLOSED


def test_a_busy_server_is_left_alone_as_long_as_it_asks(service, small_server, pair):
    clock = [0.0]
    desk_of(service).model.breaker = CircuitBreaker(now_s=lambda: clock[0])
    small_server.fault = lambda body, index: "429+3"
    for _ in range(4):
        check_refused_as_without(pair, CHAT)
    assert counts(service) == {"busy": 1, "paused": 3}
    small_server.fault, clock[0] = (lambda body, index: None), 3.1
    assert post(service, CHAT).status_code == 200


def test_nobody_listens_there(pair):
    """As told without one, at once: the connection is refused."""
    nowhere = SmallerModelSettings("http://127.0.0.1:9", NAME)
    with serving(ScriptedDispatcher(refuses("overloaded")), smaller_model=nowhere) as service:
        pair[1].dispatcher.script = refuses("overloaded")
        check_refused_as_without((service, pair[1]), CHAT)
        assert counts(service) == {"failed": 1}


# --- what is seen of it ---------------------------------------------------------------------------------------------------------


def test_counts_have_few_labels_and_none_without_a_smaller_model(service, pair):
    post(service, CHAT)
    post(service, CHAT | {"stream": True})
    wait_until(lambda: service.metrics.in_flight == 0)  # the answer is here a moment before its request is counted out
    page = httpx.get(service.url + "/metrics", timeout=60.0).text
    assert 'ballast_smaller_model_requests_total{outcome="answered"} 2.0' in page
    assert page.count("ballast_smaller_model_requests_total{") == len(OUTCOMES)
    assert "ballast_smaller_model_in_flight 0.0" in page and "ballast_smaller_model_breaker_state 0.0" in page
    assert f'ballast_ttft_seconds_count{{model_name="{NAME}",service_class="chat"}}' in page
    assert "smaller_model" not in httpx.get(pair[1].url + "/metrics", timeout=60.0).text


def test_the_last_requests_tell_what_was_tried(service):
    recent = service.app.state.generation.recent
    last = recent[-1] if recent else None
    post(service, CHAT)
    wait_until(lambda: recent and recent[-1] is not last)
    notes = recent[-1]
    (attempt,) = notes.calls[0].attempts
    assert (attempt.group, attempt.source, attempt.cause, attempt.outcome) == ("smaller_model", "smaller_model", "overloaded", "ok")
    assert (notes.answered_by, notes.degraded, notes.status, notes.error) == (NAME, f"model={NAME}", 200, "")
    assert (notes.prompt_tokens, notes.output_tokens, notes.finish_reasons) == (5, 6, ("length",))


def test_another_server_takes_over_and_streams_come_to_their_end(settings):
    """Limits change in place; another address is another server, and the old one's connections end with its last answer."""

    async def body() -> None:
        desk = SmallerModelDesk()
        desk.use(settings)
        first = desk.model
        desk.use(replace(settings, max_in_flight=5))
        assert desk.model is first and first.settings.max_in_flight == 5
        first.enter()
        closed: list[bool] = []
        first.client.close = lambda: closed.append(True)  # type: ignore[method-assign]
        desk.use(replace(settings, model="another"))
        assert isinstance(desk.model, SmallerModel) and desk.model is not first and not closed
        first.leave()
        assert closed == [True]
        desk.counts["answered"] += 1
        desk.use(None)
        assert desk.model is None and desk.counts["answered"] == 1, "a counter never goes back"

    asyncio.run(body())


@pytest.mark.parametrize(
    ("more", "said"),
    [({"model": "a\nb"}, "model"), ({"classes": ()}, "classes"), ({"classes": ("chatt",)}, "chat"), ({"api_key": "ä"}, "api_key")],
)
def test_settings_are_checked(more, said):
    with pytest.raises(ValueError, match=said):
        SmallerModelSettings(**({"url": "http://127.0.0.1:9", "model": NAME} | more))
