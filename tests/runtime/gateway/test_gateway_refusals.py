"""What is turned away at the gateway, and how: keys, limits, malformed requests, unknown paths. Every answer is an error object."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from scripted_dispatcher import FOREIGN, OWN, ScriptedDispatcher, Service, serving, wait_until

from runtime.calls import Call, Piece
from runtime.gateway import server
from runtime.gateway.api_keys import ApiKeys
from runtime.gateway.errors import ApiError
from runtime.gateway.settings import GatewaySettings

CHAT = {"model": OWN, "messages": [{"role": "user", "content": "Hi"}]}
TEXT = {"model": OWN, "prompt": "abc"}
JSON = {"content-type": "application/json"}


def error_of(response: httpx.Response, status: int = 400) -> dict:
    """The error object, which must have exactly the API's four fields."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return body["error"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2**70}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_completion_tokens": 1.5}, "max_completion_tokens"),
        ({"seed": 2**64}, "seed"),
        ({"n": 33}, "n"),
        ({"n": 0}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 9}, "stop"),
        ({"stop": "x" * 129}, "stop"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop_token_ids": [1000]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"min_tokens": 17, "max_tokens": 16}, "min_tokens"),
        ({"user": "u" * 257}, "user"),
        ({"session_id": "u" * 257}, "session_id"),
        ({"priority": 101}, "priority"),
        ({"service_class": "gold"}, "service_class"),
        ({"service_tier": "gold"}, "service_tier"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usages": True}}, "stream_options.include_usages"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": {"a": 1}}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x"}] * 2049}, "messages"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logit_bias": {"1": 2}}, "logit_bias"),
        ({"chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a b": "x"}}, "chat_template_kwargs"),
        ({"temprature": 1}, "temprature"),
        ({"model": ""}, "model"),
        ({"model": 3}, "model"),
        ({"model": None}, "model"),
    ],
)
def test_a_bad_field_of_chat_is_named(client, service, change, param):
    error = error_of(client.post("/v1/chat/completions", json=CHAT | change))
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert service.dispatcher.calls == []


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [1, [2]]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [1000]}, "prompt"),
        ({"prompt": [2**80]}, "prompt"),
        ({"prompt": [None]}, "prompt[0]"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["a"] * 33}, "prompt"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 1, "echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"messages": []}, "messages"),
    ],
)
def test_a_bad_field_of_completions_is_named(client, service, change, param):
    assert error_of(client.post("/v1/completions", json=TEXT | change))["param"] == param
    assert service.dispatcher.calls == []


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url", "refusal"])
def test_a_part_that_is_no_text_is_not_supported(client, kind):
    """Not called unknown: the API knows it, and clients tell the two apart by the code."""
    part = {"type": kind, kind: {"url": "data:image/png;base64,AAAA"}}
    body = {"model": OWN, "messages": [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, part]}]}
    error = error_of(client.post("/v1/chat/completions", json=body))
    assert (error["code"], error["param"]) == ("unsupported", "messages[0].content[1].type") and kind in error["message"]


def test_missing_fields_are_named(client):
    assert error_of(client.post("/v1/completions", json={"model": OWN}))["param"] == "prompt"
    assert error_of(client.post("/v1/chat/completions", json={"model": OWN}))["param"] == "messages"
    assert "temperature" in error_of(client.post("/v1/chat/completions", json=CHAT | {"temprature": 1}))["message"]


def test_an_unknown_model_is_404_whatever_else_is_wrong(client):
    for body in (CHAT | {"model": "gpt-9"}, CHAT | {"model": "gpt-9", "unknown": 1}):
        error = error_of(client.post("/v1/chat/completions", json=body), 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert "`gpt-9`" in error["message"]
    assert error_of(client.get("/v1/models/gpt-9"), 404)["code"] == "model_not_found"


def test_what_a_foreign_model_cannot_be_given(client):
    chat = CHAT | {"model": FOREIGN}
    assert error_of(client.post("/v1/chat/completions", json=chat | {"logprobs": True}))["code"] == "unsupported"
    assert error_of(client.post("/v1/completions", json={"model": FOREIGN, "prompt": [1, 2], "echo": True}))["code"] == "unsupported"
    assert error_of(client.post("/v1/chat/completions", json=chat | {"n": "two"}))["param"] == "n"


@pytest.mark.parametrize(
    "headers",
    [
        {"x-priority": "high"},
        {"x-priority": "1000"},
        {"x-priority": "9" * 5000},
        {"x-service-class": "gold"},
        {"x-session-id": "s" * 300},
        {"x-request-timeout-s": "nan"},
        {"x-request-timeout-s": "-1"},
        {"x-request-timeout-s": "inf"},
    ],
)
def test_a_bad_header_is_refused(client, headers):
    error_of(client.post("/v1/chat/completions", json=CHAT, headers=headers))


NASTY = [
    b"",
    b"null",
    b"[]",
    b"3",
    b'"text"',
    b"{",
    b"{}x",
    b"\xff\xfe",
    b"\xef\xbb\xbf{}",
    b"\x00",
    b'{"model": "own/model", "prompt": NaN}',
    b'{"model": "own/model", "prompt": "a", "temperature": NaN}',
    b'{"model": "own/model", "prompt": "a", "temperature": Infinity}',
    b'{"model": "own/model", "prompt": "a", "temperature": 1e999}',
    b'{"model": "own/model", "prompt": "a", "seed": ' + b"9" * 10_000 + b"}",
    b'{"model": "own/model", "prompt": "\\ud800"}',
    b'{"model": "own/model", "prompt": "\\udc00\\ud800"}',
    b'{"model": "own/model", "prompt": "\xff"}',
    b'{"model": "own/model", "prompt": "\xed\xa0\x80"}',
    b'{"\\ud800": 1}',
    b'{"model": "\\ud800", "prompt": "a"}',
    b"[" * 1_000_000,
    b'{"a":' * 500_000,
    b'{"model": "own/model", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"model": "own/model", "prompt": "a", "metadata": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"model": "own/model", "prompt": "a", "logit_bias": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"model": "own/model", "prompt": "a", "messages": ' + b'{"x":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
    b'{"model": "foreign/model", "prompt": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"model": "foreign/model", "prompt": "a", "x": "\\ud800"}',
    b'{"model": "own/model", "prompt": "a", "' + b"` - at `$" * 200_000 + b'": 1}',
    b'{"model": "' + b"m" * 1_000_000 + b'", "prompt": "a"}',
    b'{"model": "own/model", "prompt": [' + b"0," * 1_000_000 + b"0]}",
    b'{"model": "own/model", "prompt": [' + b'"a",' * 500_000 + b'"a"]}',
    b'{"model": "own/model", "prompt": "a", "stop": [' + b'"a",' * 500_000 + b'"a"]}',
    b"{" + b",".join(b'"k%d": 1' % place for place in range(100_000)) + b"}",
]


@pytest.mark.parametrize("place", range(len(NASTY)))
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_nasty_bodies_are_refused_at_once(client, path, place):
    """400 or 404 with an error object, for less than 5 s of the process's time (a busy machine may stop us); never a 5xx."""
    began_s = time.process_time()
    response = client.post(path, content=NASTY[place], headers=JSON)
    assert time.process_time() - began_s < 5.0
    error_of(response, 404 if response.status_code == 404 else 400)
    assert len(response.content) < 2000


def test_unknown_paths_and_methods(client):
    assert error_of(client.get("/v2/nothing"), 404)["code"] == "unknown_url"
    assert error_of(client.get("/v1/chat/completions/"), 404)["code"] == "unknown_url"
    response = client.get("/v1/completions")
    assert error_of(response, 405)["code"] == "method_not_supported"
    assert response.headers["allow"] == "POST"
    error_of(client.put("/v1/models"), 405)
    error_of(client.get("/v1/models/" + "x" * 5000), 404)


# --- keys ------------------------------------------------------------------------------------------------------------------------


def test_keys_open_the_service():
    with serving(ScriptedDispatcher(), GatewaySettings(api_keys=("right-key", "other"), metrics_needs_key=True)) as service:
        for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
            assert error_of(httpx.post(service.url + path, json=body, timeout=60.0), 401)["code"] == "missing_api_key"
            for key in ("wrong", "right-ke", "right-key2", "right-key,other"):
                response = httpx.post(service.url + path, json=body, headers={"authorization": f"Bearer {key}"}, timeout=60.0)
                assert error_of(response, 401)["code"] in ("invalid_api_key", "missing_api_key")
                assert response.headers["www-authenticate"] == "Bearer"
            for key in ("Bearer right-key", "bearer other"):
                assert httpx.post(service.url + path, json=body, headers={"authorization": key}, timeout=60.0).status_code == 200
        assert httpx.get(service.url + "/v1/models", timeout=60.0).status_code == 401
        assert httpx.get(service.url + "/metrics", timeout=60.0).status_code == 401
        for path in ("/livez", "/ready", "/health", "/version"):
            assert httpx.get(service.url + path, timeout=60.0).status_code == 200


def test_a_key_is_checked_before_the_body_is_read():
    with serving(ScriptedDispatcher(), GatewaySettings(api_keys=("k",))) as service, talk(service) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n")
        assert b" 401 " in connection.recv(65536)


def test_every_key_is_compared_each_time(monkeypatch):
    """The time taken must not tell which key was right, nor how much of it."""
    compared = []
    import hmac

    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((len(a), len(b))) or a == b)
    keys = ApiKeys(("first", "a second one", "x"))
    keys.check(b"Bearer first")
    with pytest.raises(ApiError):
        keys.check(b"Bearer nothing of the kind")
    assert compared == [(32, 32)] * 6


# --- limits ----------------------------------------------------------------------------------------------------------------------


def talk(service: Service) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", service.port), timeout=60.0)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def read_all(connection: socket.socket) -> bytes:
    data = b""
    while part := connection.recv(65536):
        data += part
    return data


def test_a_body_that_says_it_is_too_large_is_not_read(service):
    """413 comes before a byte of the body is sent, and the connection ends."""
    with talk(service) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n")
        head, _, body = read_all(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in head
    assert json.loads(body)["error"]["code"] == "request_too_large"


def test_a_body_that_only_turns_out_too_large():
    """In chunks, without a length: stopped at the limit."""
    with serving(ScriptedDispatcher(), GatewaySettings(body_bytes_max=10_000)) as service:
        with talk(service) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
            connection.sendall(b"2000\r\n" + b"x" * 0x2000 + b"\r\n")
            connection.sendall(b"2000\r\n" + b"x" * 0x2000 + b"\r\n")
            assert read_all(connection).startswith(b"HTTP/1.1 413 ")
        wait_until(lambda: service.metrics.body_bytes_in_flight == 0)


@pytest.mark.parametrize("framing", ["content-length: 16777216", "transfer-encoding: chunked"])
def test_a_caller_that_sends_all_before_it_reads_gets_its_refusal(service, framing):
    """Most clients do: were the connection closed under them, they would see a reset, and an SDK would try again."""
    is_chunked = framing.endswith("chunked")
    part = (b"10000\r\n" if is_chunked else b"") + b"x" * 0x10000 + (b"\r\n" if is_chunked else b"")
    with talk(service) as connection:
        connection.sendall(f"POST /v1/completions HTTP/1.1\r\nhost: x\r\n{framing}\r\n\r\n".encode())
        for _ in range(256):
            connection.sendall(part)
        head, _, body = read_all(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 413 ")
    assert json.loads(body)["error"]["code"] == "request_too_large"


def test_a_refused_caller_that_goes_on_sending_is_let_go(monkeypatch):
    monkeypatch.setattr(server, "LINGER_S", 0.2)
    with serving(ScriptedDispatcher()) as service, talk(service) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n")
        with pytest.raises(OSError):
            for _ in range(6000):
                connection.sendall(b"x" * 1000)
                time.sleep(0.01)


@pytest.mark.parametrize(
    "framed",
    [
        b"transfer-encoding: xchunked\r\n\r\n5\r\nabcde\r\n0\r\n\r\n",
        b"transfer-encoding: chunked\r\n\r\n-5\r\nabcde\r\n0\r\n\r\n",
        b"transfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\nabcde\r\n0\r\n\r\n",
        b"transfer-encoding: chunked\r\n\r\n5\r\nabcdeXX0\r\n\r\n",
        b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\nabcde",
        b"host: y\r\ncontent-length: 2\r\n\r\n{}",
    ],
)
def test_a_request_that_is_framed_wrongly_is_answered(service, framed):
    with talk(service) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + framed)
        head, _, body = read_all(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["message"]
    assert not service.dispatcher.calls


def test_a_wish_for_another_protocol_costs_nobody_the_body(service):
    """Java's client asks for HTTP/2 with every request, and sends its body after that in HTTP/1.1."""
    body = json.dumps(TEXT).encode()
    wish = b"connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA\r\n"
    with talk(service) as connection:
        for _ in range(2):
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + wish + b"content-length: %d\r\n\r\n" % len(body) + body)
            assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_bodies_together_are_bounded():
    """A second body that would pass the sum of all is put off with 429; afterwards there is room again."""
    with serving(ScriptedDispatcher(), GatewaySettings(body_bytes_max=3000, body_bytes_in_flight_max=4000)) as service:
        with talk(service) as first:
            first.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 3000\r\n\r\n" + b"x" * 2900)
            wait_until(lambda: service.metrics.body_bytes_in_flight == 2900)
            response = httpx.post(service.url + "/v1/completions", content=b"y" * 2000, timeout=60.0)
            assert error_of(response, 429)["code"] == "queue_full"
            assert response.headers["x-should-retry"] == "false"
        wait_until(lambda: service.metrics.body_bytes_in_flight == 0)
        assert httpx.post(service.url + "/v1/completions", json=TEXT, timeout=60.0).status_code == 200


def test_a_body_that_does_not_come():
    with serving(ScriptedDispatcher(), GatewaySettings(body_wait_s=0.1)) as service, talk(service) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        assert read_all(connection).startswith(b"HTTP/1.1 408 ")


def test_no_more_requests_than_allowed():
    """429 with Retry-After while full; K13: said within 50 ms of work, since nothing is looked at."""

    async def waits(call: Call):
        while not released:
            await asyncio.sleep(0.01)
        yield Piece(0, 97, "a", None, "stop", 3, 1)

    released: list[bool] = []

    with serving(ScriptedDispatcher(script=waits), GatewaySettings(requests_max=2)) as service, ThreadPoolExecutor(2) as pool:
        served = [pool.submit(httpx.post, service.url + "/v1/completions", json=TEXT, timeout=60.0) for _ in range(2)]
        wait_until(lambda: service.dispatcher.open_calls == 2)
        response = httpx.post(service.url + "/v1/completions", json=TEXT, timeout=60.0)
        assert error_of(response, 429)["code"] == "queue_full"
        assert int(response.headers["retry-after"]) >= 1
        released.append(True)
        assert [response.result().status_code for response in served] == [200, 200]


def test_heads_are_bounded(service):
    """A header without end is stopped before it fills memory; so is a path."""
    for head in (b"GET /livez HTTP/1.1\r\nx: ", b"GET /"):
        with talk(service) as connection:
            connection.sendall(head)
            for _ in range(64):
                connection.sendall(b"y" * 16384)
            assert read_all(connection).startswith(b"HTTP/1.1 431 ")


def test_heads_that_never_end(monkeypatch):
    monkeypatch.setattr(server, "HEAD_WAIT_S", 0.2)
    with serving(ScriptedDispatcher()) as service:
        with talk(service) as connection:
            connection.sendall(b"GET /livez HTTP/1.1\r\n")
            assert read_all(connection).startswith(b"HTTP/1.1 408 ")
        with talk(service) as connection:  # one after a whole request, on the same connection
            connection.sendall(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
            assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
            time.sleep(0.4)  # idle between two requests is no head
            connection.sendall(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\nGET /li")
            assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
            assert b"HTTP/1.1 408 " in read_all(connection)


@pytest.mark.parametrize(
    "data",
    [
        b"NONSENSE\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /%ff%00 HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
    ],
)
def test_what_is_no_http_is_answered_in_the_apis_shape(service, data):
    with talk(service) as connection:
        connection.sendall(data)
        head, _, body = read_all(connection).partition(b"\r\n\r\n")
    assert head.split()[1] in (b"400", b"404")
    assert json.loads(body)["error"]["message"]


def test_nagle_is_off(monkeypatch):
    """Small events leave at once: the accepted socket has TCP_NODELAY."""
    seen = []
    made = server.BoundedHttp.connection_made

    def connection_made(self, transport):
        made(self, transport)
        seen.append(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    monkeypatch.setattr(server.BoundedHttp, "connection_made", connection_made)
    with serving(ScriptedDispatcher()) as service:
        httpx.get(service.url + "/livez", timeout=60.0)
    assert seen
    assert all(seen)
