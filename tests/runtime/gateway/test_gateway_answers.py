"""Answers over real HTTP in the shapes of the OpenAI API: one JSON object, or a stream of chunks."""

from __future__ import annotations

import json
import time
import tracemalloc

import httpx
import pytest
from scripted_dispatcher import FOREIGN, OWN, SMALL, Service, says

from runtime.calls import Call, Piece, Refusal

CHAT = {"model": OWN, "messages": [{"role": "user", "content": "Hi"}]}
TEXT = {"model": OWN, "prompt": "abc"}


def events(response: httpx.Response) -> list[dict]:
    """The stream's events; the last one must be the end marker."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    assert all(block.startswith("data: ") for block in blocks[:-1])
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


def text_of(chunks: list[dict], place: int = 0) -> str:
    chosen = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == place]
    return "".join(choice["delta"].get("content", "") if "delta" in choice else choice["text"] for choice in chosen)


def test_chat_answer(client, service):
    """Whole text, one finish reason, usage of prompt (u + Hi = 3 tokens of the codec) and answer."""
    before_s = int(time.time())
    answer = client.post("/v1/chat/completions", json=CHAT).json()
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert before_s <= answer["created"] <= time.time()
    assert answer["model"] == OWN
    assert answer["choices"] == [
        {"index": 0, "message": {"role": "assistant", "content": "Hello world", "refusal": None}, "logprobs": None, "finish_reason": "stop"}
    ]
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    [call] = service.dispatcher.calls
    assert call.prompt_ids == tuple(map(ord, "uHi"))
    assert (call.kind, call.max_tokens, call.sampling.temperature, call.sampling.seed) == ("chat", 509, 1.0, None)
    assert call.deadline_s == pytest.approx(time.monotonic() + 600.0, abs=20.0)


def test_completion_answer(client, service):
    answer = client.post("/v1/completions", json=TEXT | {"max_tokens": 2}).json()
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [{"index": 0, "text": "Hello ", "logprobs": None, "finish_reason": "length"}]
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    client.post("/v1/completions", json=TEXT)
    assert [call.max_tokens for call in service.dispatcher.calls] == [2, 16]


def test_chat_stream(client):
    chunks = events(client.post("/v1/chat/completions", json=CHAT | {"stream": True}))
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert text_of(chunks) == "Hello world"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 4 + ["stop"]
    assert chunks[-1]["choices"][0]["delta"] == {}
    assert all("usage" not in chunk for chunk in chunks)


def test_usage_of_a_stream_comes_last_and_only_once(client):
    """With include_usage: one more chunk without choices; all others say null."""
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
        chunks = events(client.post(path, json=body | {"stream": True, "stream_options": {"include_usage": True}}))
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}


def test_running_usage(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(client.post("/v1/completions", json=TEXT | {"stream": True, "stream_options": options}))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 3, 3]


def test_completion_stream_with_echo(client):
    chunks = events(client.post("/v1/completions", json=TEXT | {"stream": True, "echo": True}))
    assert text_of(chunks) == "abcHello world"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert client.post("/v1/completions", json=TEXT | {"echo": True, "prompt": [97, 98]}).json()["choices"][0]["text"] == "abHello world"


def test_n_answers_of_several_prompts(client, service):
    """Choices are numbered prompt by prompt; a prompt counts once in usage; each answer has a seed of its own."""
    body = TEXT | {"prompt": ["ab", "cde"], "n": 2, "seed": 5, "echo": True}
    answer = client.post("/v1/completions", json=body).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in answer["choices"]] == ["abHello world"] * 2 + ["cdeHello world"] * 2
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 12, "total_tokens": 17}
    assert sorted((call.prompt_ids, call.sampling.seed) for call in service.dispatcher.calls) == [
        ((97, 98), 5), ((97, 98), 6), ((99, 100, 101), 5), ((99, 100, 101), 6),
    ]  # fmt: skip
    assert len({call.call_id for call in service.dispatcher.calls}) == 4


def test_n_answers_in_a_stream(client):
    chunks = events(client.post("/v1/chat/completions", json=CHAT | {"stream": True, "n": 3}))
    for place in range(3):
        assert text_of(chunks, place) == "Hello world"
        own = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == place]
        assert own[0]["delta"]["role"] == "assistant"
        assert [choice["finish_reason"] for choice in own].count("stop") == 1


def test_logprobs_of_chat(client):
    answer = client.post("/v1/chat/completions", json=CHAT | {"logprobs": True, "top_logprobs": 2}).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["H", " ", "w"]
    assert content[0] == {
        "token": "H",
        "logprob": -0.5,
        "bytes": [72],
        "top_logprobs": [{"token": "a", "logprob": -0.5, "bytes": [97]}, {"token": "b", "logprob": -1.5, "bytes": [98]}],
    }
    chunks = events(client.post("/v1/chat/completions", json=CHAT | {"logprobs": True, "stream": True}))
    streamed = [entry for chunk in chunks for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert [(entry["token"], entry["top_logprobs"]) for entry in streamed] == [("H", []), (" ", []), ("w", [])]


def test_logprobs_of_completions(client):
    """text_offset counts characters; in a stream it goes on from chunk to chunk."""
    answer = client.post("/v1/completions", json=TEXT | {"logprobs": 1}).json()
    said = answer["choices"][0]["logprobs"]
    assert said["tokens"] == ["H", " ", "w"]
    assert said["token_logprobs"] == [-0.5, -0.5, -0.5]
    assert said["top_logprobs"][0] == {"a": -0.5, "H": -0.5}
    assert said["text_offset"] == [0, 1, 2]
    chunks = events(client.post("/v1/completions", json=TEXT | {"logprobs": 1, "stream": True}))
    assert [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks[:-1]] == [[0], [1], [2]]


def test_a_logprob_that_json_cannot_say(client, service):
    from runtime.torch_tp.requests import TokenLogprobs

    async def impossible(call: Call):
        yield Piece(0, 97, "a", TokenLogprobs(float("-inf"), ((98, float("nan")),)), "stop", 1, 1)

    service.dispatcher.script = impossible
    answer = client.post("/v1/chat/completions", json=CHAT | {"logprobs": True, "top_logprobs": 1}).json()
    [entry] = answer["choices"][0]["logprobs"]["content"]
    assert entry["logprob"] == -9999.0
    assert entry["top_logprobs"][0]["logprob"] == -9999.0


def test_settings_reach_the_call(client, service):
    body = CHAT | {
        "temperature": 0, "top_p": 0.5, "top_k": -1, "min_p": 0.1, "presence_penalty": 1, "frequency_penalty": -1,
        "repetition_penalty": 1.2, "seed": -3, "stop": ["x", "yz"], "stop_token_ids": [7], "max_completion_tokens": 9,
        "max_tokens": 3, "min_tokens": 2,
        "ignore_eos": True, "user": "u1", "session_id": "s1", "priority": -4, "service_class": "Code", "logit_bias": {}, "tools": [],
        "response_format": {"type": "text"}, "metadata": {"a": "b"},
    }  # fmt: skip
    assert client.post("/v1/chat/completions", json=body).status_code == 200
    [call] = service.dispatcher.calls
    sampling = call.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.0, 0.5, 0, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1.0, -1.0, 1.2)
    assert sampling.seed == 2**63 - 3
    assert (call.stop_strings, call.stop_ids, call.max_tokens, call.min_tokens, call.ignore_eos) == (("x", "yz"), (7,), 9, 2, True)
    assert (call.user, call.session, call.priority, call.class_index) == ("u1", "s1", -4, 1)
    assert "metadata" in call.body
    assert not {"n", "stream", "priority", "session_id"} & set(call.body)


def test_headers_reach_the_call(client, service):
    headers = {"x-service-class": "batch", "x-priority": "7", "x-session-id": "s2", "x-user-id": "u2", "x-request-timeout-s": "2.5"}
    assert client.post("/v1/chat/completions", json=CHAT, headers=headers).status_code == 200
    assert client.post("/v1/chat/completions", json=CHAT | {"service_tier": "flex"}).status_code == 200
    assert client.post("/v1/chat/completions", json=CHAT | {"service_tier": "priority"}).status_code == 200
    timed, flex, urgent = service.dispatcher.calls
    assert (timed.class_index, timed.priority, timed.session, timed.user) == (2, 7, "s2", "u2")
    assert timed.deadline_s < time.monotonic() + 2.5
    assert (flex.class_index, flex.priority) == (2, 0)
    assert (urgent.class_index, urgent.priority) == (0, 2)


def test_request_ids(client, service):
    """The caller's id comes back, also with errors; without one, or with one that cannot be a header, one is made."""
    response = client.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "trace-7"})
    assert response.headers["x-request-id"] == "trace-7"
    assert service.dispatcher.calls[0].call_id.startswith("trace-7-")
    assert client.post("/v1/chat/completions", json={}, headers={"x-request-id": "trace-8"}).headers["x-request-id"] == "trace-8"
    made = client.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "x" * 500}).headers["x-request-id"]
    assert made
    assert made != "x" * 500
    assert client.post("/v1/chat/completions", json=CHAT).headers["x-request-id"] != made
    for path in ("/v1/models", "/v1/models/none", "/ready", "/nowhere"):
        assert client.get(path, headers={"x-request-id": "trace-9"}).headers["x-request-id"] == "trace-9"
        assert len(client.get(path).headers["x-request-id"]) > 8


@pytest.mark.parametrize("model", [OWN, FOREIGN])
def test_a_long_field_is_not_built(client, service, model):
    """2 MiB of brackets in a field without effect: as lists they would take 50 MiB and hold the loop for a fifth of a second."""
    body = b'{"model":"%s","messages":[{"role":"user","content":"Hi"}],"metadata":[%s[]]}' % (model.encode(), b"[]," * 700_000)
    tracemalloc.start()
    try:
        assert client.post("/v1/chat/completions", content=body).status_code == 200
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 8 * len(body)  # the client's and the server's own copies of it
    [call] = service.dispatcher.calls
    kept = json.loads(bytes(call.body["metadata"]))
    assert len(kept) == 700_001


def test_text_parts_and_roles(client, service):
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "refusal": None, "annotations": [], "tool_calls": None},
    ]
    assert client.post("/v1/chat/completions", json=CHAT | {"messages": messages}).status_code == 200
    assert service.dispatcher.calls[0].prompt_ids == tuple(map(ord, "sBe brief.ua\nba"))


def test_a_foreign_model_gets_the_body_as_it_came(client, service):
    """Fields that are unknown here are its server's to judge; n and stream are the gateway's."""
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}, {"type": "text", "text": "12345678"}]}]
    body = {"model": FOREIGN, "messages": messages, "tools": [{"type": "function"}], "n": 2, "whatever": 1, "temperature": 0.2}
    assert client.post("/v1/chat/completions", json=body).status_code == 200
    call = service.dispatcher.calls[0]
    assert call.body == {"model": FOREIGN, "messages": messages, "tools": [{"type": "function"}], "whatever": 1, "temperature": 0.2}
    assert call.prompt_ids == ()
    assert call.prompt_tokens == 8 // 4 + 1
    client.post("/v1/completions", json={"model": FOREIGN, "prompt": ["one", "two"]})
    assert [call.body["prompt"] for call in service.dispatcher.calls[2:]] == ["one", "two"]


def test_prompt_and_answer_must_fit_together(client, service):
    """K10: at the door, naming the limit, within 100 ms of work; without a limit of its own an answer gets what room there is."""
    took_s = []
    for _ in range(5):
        began_s = time.process_time()
        response = client.post("/v1/completions", json={"model": SMALL, "prompt": "x" * 10, "max_tokens": 7})
        took_s.append(time.process_time() - began_s)
    assert min(took_s) < 0.1
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "16 tokens" in error["message"]
    assert "17 tokens" in error["message"]
    assert service.dispatcher.calls == []
    assert client.post("/v1/completions", json={"model": SMALL, "prompt": "x" * 10, "max_tokens": 6}).status_code == 200
    assert client.post("/v1/completions", json={"model": SMALL, "prompt": "x" * 10}).status_code == 200
    assert [call.max_tokens for call in service.dispatcher.calls] == [6, 6]
    for prompt in ("x" * 16, "x" * 100_000, [7] * 100_000):
        assert client.post("/v1/completions", json={"model": SMALL, "prompt": prompt}).json()["error"]["code"] == "context_length_exceeded"


# --- what goes wrong -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("refusal", "status", "kind", "code"),
    [
        (Refusal("queue_full", "full", retry_after_s=2.2), 429, "rate_limit_error", "queue_full"),
        (Refusal("no_capacity", "nobody", retry_after_s=None), 503, "server_error", "no_capacity"),
        (Refusal("attempts_spent", "spent"), 503, "server_error", "attempts_spent"),
        (Refusal("deadline", "late"), 504, "server_error", "deadline"),
        (Refusal("too_long", "long"), 400, "invalid_request_error", "context_length_exceeded"),
        (Refusal("invalid", "bad"), 400, "invalid_request_error", None),
        (Refusal("new_reason", "?", status=200), 500, "server_error", "new_reason"),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_refusal_before_the_first_piece(client, service, refusal, status, kind, code, is_stream):
    """A stream that has not begun is answered like any other request: status, error object, Retry-After, no retries by the SDK."""

    async def refused(call: Call):
        raise refusal
        yield

    service.dispatcher.script = refused
    response = client.post("/v1/chat/completions", json=CHAT | {"stream": is_stream})
    assert response.status_code == status
    assert response.json() == {"error": {"message": refusal.message, "type": kind, "param": None, "code": code}}
    assert ("retry-after" in response.headers) == (status in (429, 503))
    assert response.headers.get("x-should-retry") == ("false" if status == 429 or status >= 500 else None)
    if refusal.reason == "queue_full":
        assert (response.headers["retry-after"], response.headers["retry-after-ms"]) == ("3", "2200")


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_degraded_answer_says_so(client, service, is_stream):
    async def shortened(call: Call):
        call.notes.degraded = "max_tokens=1"
        yield Piece(0, 97, "a", None, "length", 3, 1)

    service.dispatcher.script = shortened
    response = client.post("/v1/chat/completions", json=CHAT | {"stream": is_stream})
    assert response.headers["x-ballast-degraded"] == "max_tokens=1"
    assert '"finish_reason":"length"' in response.text


async def breaks(call: Call):
    yield Piece(0, 97, "a")
    raise RuntimeError("the engine's secret")


async def refuses_late(call: Call):
    yield Piece(0, 97, "a")
    raise Refusal("attempts_spent", "no group is left", retry_after_s=1.0)


async def just_stops(call: Call):
    yield Piece(0, 97, "a")


async def ends_badly(call: Call):
    yield Piece(0, 97, "a")
    yield Piece(1, None, "", None, "error", 3, 1)


async def ends_late(call: Call):
    yield Piece(0, 97, "a")
    yield Piece(1, None, "", None, "deadline", 3, 1)


FAILURES = [
    (breaks, 500, "internal_error"),
    (refuses_late, 503, "attempts_spent"),
    (just_stops, 502, "answer_ended_early"),
    (ends_badly, 500, "answer_cut"),
    (ends_late, 504, "deadline"),
]


@pytest.mark.parametrize(("script", "status", "code"), FAILURES)
@pytest.mark.parametrize("n", [1, 3])
def test_an_error_in_a_started_stream_is_an_event(client, service, script, status, code, n):
    """Never a silent cut: what came, the error, the end marker."""
    service.dispatcher.script = script
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
        *chunks, last = events(client.post(path, json=body | {"stream": True, "n": n}))
        assert text_of(chunks) == "a"
        assert last["error"]["code"] == code
        assert "secret" not in last["error"]["message"]
        assert all(choice["finish_reason"] is None for chunk in chunks for choice in chunk["choices"])


@pytest.mark.parametrize(("script", "status", "code"), FAILURES)
def test_an_error_in_an_answer_that_is_not_streamed(client, service, script, status, code):
    """Half an answer is never passed off as whole."""
    service.dispatcher.script = script
    response = client.post("/v1/chat/completions", json=CHAT)
    assert response.status_code == status
    assert response.json()["error"]["code"] == code


def test_nothing_follows_an_end(client, service):
    async def chatters_on(call: Call):
        yield Piece(0, 97, "a", None, "stop", 3, 1)
        yield Piece(1, 98, "b")
        yield Piece(2, None, "", None, "stop", 3, 2)

    service.dispatcher.script = chatters_on
    assert client.post("/v1/completions", json=TEXT).json()["choices"][0]["text"] == "a"
    chunks = events(client.post("/v1/chat/completions", json=CHAT | {"stream": True}))
    assert text_of(chunks) == "a"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks].count("stop") == 1


def test_a_held_back_token_sends_nothing(client, service):
    """Half a character, or what may become a stop string, has no text yet: no empty chunk tells of it."""

    async def holds_back(call: Call):
        yield Piece(0, 97, "")
        yield Piece(1, 98, "")
        yield Piece(2, 99, "abc")
        yield Piece(3, None, "", None, "stop", 3, 3)

    service.dispatcher.script = holds_back
    chunks = events(client.post("/v1/completions", json=TEXT | {"stream": True, "stream_options": {"include_usage": True}}))
    assert [choice["text"] for chunk in chunks for choice in chunk["choices"]] == ["abc", ""]
    assert chunks[-1]["usage"]["completion_tokens"] == 3


def test_text_that_is_no_unicode_is_sent_as_something(client, service):
    async def surrogate(call: Call):
        yield Piece(0, 97, "a\ud800b", None, "stop", 3, 1)

    service.dispatcher.script = surrogate
    assert client.post("/v1/completions", json=TEXT).json()["choices"][0]["text"] == "a?b"
    assert text_of(events(client.post("/v1/completions", json=TEXT | {"stream": True}))) == "a?b"


def test_the_deadline_ends_what_a_dispatcher_forgets(client, service):
    """1 s of grace after the caller's own limit, then the work is cancelled: 504, or an event in a started stream."""

    async def sleeps(call: Call):
        if call.kind == "completion":
            yield Piece(0, 97, "a")
        import asyncio

        await asyncio.sleep(60)
        yield Piece(1, 98, "b")

    service.dispatcher.script = sleeps
    limit = {"x-request-timeout-s": "1"}
    response = client.post("/v1/chat/completions", json=CHAT, headers=limit)
    assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline")
    *_, last = events(client.post("/v1/completions", json=TEXT | {"stream": True}, headers=limit))
    assert last["error"]["code"] == "deadline"
    assert len(service.dispatcher.cancelled) == 2


def test_ids_and_names_stay_whole_under_many_clients(client, service: Service):
    """64 streams at once, each with its own words: none gets another's."""
    from concurrent.futures import ThreadPoolExecutor

    async def own_words(call: Call):
        async for piece in says(call, [f"{call.user}.{place} " for place in range(5)], 0.001):
            yield piece

    service.dispatcher.script = own_words

    def ask(number: int) -> str:
        return text_of(events(client.post("/v1/chat/completions", json=CHAT | {"stream": True, "user": f"u{number}"})))

    with ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(ask, range(64)))
    assert answers == ["".join(f"u{number}.{place} " for place in range(5)) for number in range(64)]


def test_head_and_body_leave_together(service):
    """One segment for a whole answer, and for a stream's head with its first event."""
    import socket

    for body in (CHAT, CHAT | {"stream": True}):
        data = json.dumps(body).encode()
        with socket.create_connection(("127.0.0.1", service.port), timeout=60.0) as connection:
            connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(data), data))
            assert connection.recv(65536).split(b"\r\n\r\n", 1)[1]


def test_expect_100_continue(service):
    """A client that asks first is told to go on before it sends its body."""
    import socket

    data = json.dumps(CHAT).encode()
    with socket.create_connection(("127.0.0.1", service.port), timeout=60.0) as connection:
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(data)
        )
        assert connection.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(data)
        assert b"Hello world" in connection.recv(65536)
