"""A client that leaves ends its work at once, streaming or not, whatever it waited for; nothing is left counted."""

from __future__ import annotations

import asyncio
import json
import socket
import time

import pytest
import uvloop
from scripted_dispatcher import OWN, Service, says, wait_until

from runtime.calls import Call, Piece
from runtime.gateway.server import GatheredWrites

CHAT = {"model": OWN, "messages": [{"role": "user", "content": "Hi"}]}


def ask(service: Service, body: dict, path: str = "/v1/chat/completions") -> socket.socket:
    data = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", service.port), timeout=60.0)
    connection.sendall(b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (path.encode(), len(data), data))
    return connection


async def never(call: Call):
    await asyncio.sleep(3600.0)
    yield Piece(0, 97, "a")


async def one_then_never(call: Call):
    yield Piece(0, 97, "a")
    await asyncio.sleep(3600.0)


async def for_ever(call: Call):
    for place in range(10**9):
        await asyncio.sleep(0.001)
        yield Piece(place, 97, "a")


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("script", [never, one_then_never, for_ever])
@pytest.mark.parametrize("how", ["close", "reset"])
def test_the_work_ends_when_the_client_is_gone(service, script, is_stream, n, how):
    service.dispatcher.script = script
    departures = service.metrics.departures
    connection = ask(service, CHAT | {"stream": is_stream, "n": n})
    wait_until(lambda: service.dispatcher.open_calls == n)
    if is_stream and script is not never:
        connection.recv(4096)
    if how == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    connection.close()
    wait_until(lambda: service.dispatcher.open_calls == 0)
    wait_until(lambda: service.metrics.in_flight == 0)
    assert len(service.dispatcher.cancelled) == n
    assert service.metrics.departures == departures + 1


def test_leaving_while_the_body_is_sent(service):
    departures = service.metrics.departures
    connection = socket.create_connection(("127.0.0.1", service.port), timeout=60.0)
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")
    wait_until(lambda: service.metrics.in_flight == 1)
    connection.close()
    wait_until(lambda: service.metrics.in_flight == 0)
    assert service.metrics.departures == departures + 1
    assert service.dispatcher.calls == []


def test_a_client_that_stops_reading_holds_no_memory_and_its_leaving_is_seen(service):
    """The stream waits for its reader (the pieces are not made ahead); closing the socket ends it."""

    made = []

    async def large(call: Call):
        for place in range(10**9):
            made.append(place)
            yield Piece(place, 97, "x" * 65536)
            await asyncio.sleep(0)

    service.dispatcher.script = large
    connection = ask(service, CHAT | {"stream": True})
    wait_until(lambda: len(made) > 2)

    def is_still() -> bool:
        before = len(made)
        time.sleep(0.2)
        return len(made) == before

    wait_until(is_still)
    connection.close()
    wait_until(lambda: service.dispatcher.open_calls == 0)


def test_a_client_that_stays_is_not_cancelled(service, client):
    """Keep-alive: the end of one answer is not taken for the client's leaving, and the next request finds nothing cancelled."""
    for number in range(200):
        response = client.post("/v1/chat/completions", json=CHAT | {"stream": number % 2 == 0})
        assert response.status_code == 200
    assert service.dispatcher.cancelled == []


def test_pipelined_requests_are_answered_in_turn(service):
    """Two requests in one go: the second's bytes are not taken for the first client's leaving."""

    async def slow(call: Call):
        async for piece in says(call, ("a", "b"), 0.05):
            yield piece

    service.dispatcher.script = slow
    data = json.dumps({"model": OWN, "prompt": "x"}).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(data), data)
    last = request.replace(b"host: x", b"host: x\r\nconnection: close")
    with socket.create_connection(("127.0.0.1", service.port), timeout=60.0) as connection:
        connection.sendall(request + last)
        answers = b""
        while part := connection.recv(65536):
            answers += part
    assert answers.count(b"HTTP/1.1 200 OK") == 2
    assert answers.count(b'"text":"ab"') == 2
    assert service.dispatcher.cancelled == []


def test_a_dispatcher_that_clings_to_its_work_is_told_once(service):
    """One that swallows its cancellation and goes on is closed all the same; the request still ends."""

    told = []

    async def stubborn(call: Call):
        try:
            await asyncio.sleep(3600.0)
        except asyncio.CancelledError:
            told.append(call.call_id)
            yield Piece(0, 97, "a")
            yield Piece(1, None, "", None, "stop", 3, 1)

    service.dispatcher.script = stubborn
    connection = ask(service, CHAT)
    wait_until(lambda: service.dispatcher.open_calls == 1)
    connection.close()
    wait_until(lambda: service.metrics.in_flight == 0)
    assert len(told) == 1


def test_a_client_that_never_reads_is_let_go_after_its_deadline(service, monkeypatch):
    """Its work ends with the deadline (0.2 s and 1 s of grace); the connection after a few seconds more."""
    from runtime.gateway import generation

    monkeypatch.setattr(generation, "LAST_WORDS_S", 0.2)

    async def large(call: Call):
        for place in range(10**9):
            yield Piece(place, 97, "x" * 65536)
            await asyncio.sleep(0)

    service.dispatcher.script = large
    data = json.dumps(CHAT | {"stream": True}).encode()
    with socket.create_connection(("127.0.0.1", service.port), timeout=60.0) as connection:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-request-timeout-s: 0.2\r\ncontent-length: %d\r\n\r\n" % len(data)
        connection.sendall(head + data)
        wait_until(lambda: service.dispatcher.calls)
        wait_until(lambda: service.dispatcher.open_calls == 0)
        wait_until(lambda: service.metrics.in_flight == 0)


def test_what_is_gathered_for_a_caller_that_left_is_let_go():
    """It left within the turn of the event loop in which the answer was written: nothing is said in the log, as of any other departure."""

    async def body() -> list[dict]:
        said: list[dict] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: said.append(context))
        listening = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        transport, _ = await loop.create_connection(asyncio.Protocol, *listening.sockets[0].getsockname())
        transport.abort()
        await asyncio.sleep(0.05)  # closed for good
        GatheredWrites(transport, loop, transport.close).write(b"too late")
        await asyncio.sleep(0.05)
        listening.close()
        return said

    assert uvloop.run(body()) == []
