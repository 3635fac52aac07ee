"""The lean client: connections are kept and replaced, bodies come whole whatever their framing, what is no HTTP ends the attempt."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import asynccontextmanager

import pytest

from runtime.backends.http_client import BUFFER_BYTES_MAX, HEAD_BYTES_MAX, HttpClient, HttpLost, HttpRefused

CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
SIZED = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nabcde"


class Server:
    """Answers every request with the next of `answers` (the last one again and again) and closes where one is None or `closes`."""

    def __init__(self, *answers: bytes | None, closes: bool = False) -> None:
        self.answers, self.closes, self.connections, self.requests = list(answers), closes, 0, []

    async def __call__(self, reader, writer) -> None:
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                self.requests.append(head)
                answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
                if answer is None:
                    break
                writer.write(answer)
                await writer.drain()
                if self.closes:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def served(server: Server):
    listening = await asyncio.start_server(server, "127.0.0.1", 0)
    client = HttpClient(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/base", {"x-kept": "1"}, 60.0)
    try:
        yield client
    finally:
        client.close()
        listening.close()
        await listening.wait_closed()


async def ask(client: HttpClient) -> tuple[int, bytes]:
    answer = await client.send("GET", "/x")
    try:
        return answer.status, await answer.read(1 << 20)
    finally:
        answer.release()


@pytest.mark.parametrize("answer", [CHUNKED, SIZED])
def test_one_connection_serves_one_request_after_another(answer):
    async def body():
        server = Server(answer)
        async with served(server) as client:
            for _ in range(5):
                assert await ask(client) == (200, b"abcde")
            assert server.connections == 1
            assert server.requests[0].startswith(b"GET /base/x HTTP/1.1\r\n") and b"x-kept: 1\r\n" in server.requests[0]
            await asyncio.gather(*(ask(client) for _ in range(3)))
            assert server.connections == 3

    asyncio.run(body())


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nabcde", SIZED.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")]
)
def test_an_answer_that_ends_its_connection(answer):
    async def body():
        server = Server(answer, closes=True)
        async with served(server) as client:
            assert await ask(client) == (200, b"abcde")
            assert await ask(client) == (200, b"abcde")
            assert server.connections == 2

    asyncio.run(body())


def test_a_kept_connection_that_was_closed_meanwhile_is_replaced(monkeypatch):
    """One that was idle for a while; a loss right after another request is told, since that one may have been at fault."""
    monkeypatch.setattr("runtime.backends.http_client.STALE_S", 0.0)

    async def body():
        server = Server(SIZED, None, SIZED)
        async with served(server) as client:
            assert await ask(client) == (200, b"abcde")
            assert await ask(client) == (200, b"abcde")  # the second request met a closing server, and went again
            assert server.connections == 2 and len(server.requests) == 3

    asyncio.run(body())
    monkeypatch.setattr("runtime.backends.http_client.STALE_S", 60.0)
    with pytest.raises(HttpLost):
        asyncio.run(body())


@pytest.mark.parametrize("answer", [None, b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc", b"nonsense\r\n\r\n", CHUNKED[:-5]])
def test_a_broken_answer_is_lost(answer):
    async def body():
        async with served(Server(answer, closes=True)) as client:
            with pytest.raises(HttpLost):
                await ask(client)

    asyncio.run(body())


def test_nobody_listens():
    async def body():
        client = HttpClient("http://127.0.0.1:9", {}, 2.0)
        with pytest.raises(HttpRefused):
            await client.send("GET", "/")

    asyncio.run(body())


def test_a_body_that_nobody_reads_makes_the_server_wait():
    """64 MiB: what is here is the buffer and what the sockets hold, and all of it comes once it is read."""

    async def body():
        size = 64 << 20
        async with served(Server(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size + bytes(size))) as client:
            answer = await client.send("GET", "/x")
            await asyncio.sleep(0.2)
            assert answer._chunk_bytes < 4 * BUFFER_BYTES_MAX
            assert len(await answer.read(size + 1)) == size
            answer.release()

    asyncio.run(body())


def test_closing_ends_who_waits():
    async def body():
        async with served(Server(CHUNKED[:-15])) as client:
            answer = await client.send("GET", "/x")
            await answer.read_some()
            waiting = asyncio.create_task(answer.read_some())
            await asyncio.sleep(0.01)
            client.close()
            with pytest.raises(HttpLost):
                await waiting

    asyncio.run(body())


@pytest.mark.parametrize(
    "more", [b"HTTP/1.1 500 No\r\ncontent-length: 4\r\n\r\nEVIL", b"HTTP/1.1 500 No\r\nx: y\r\n", b"HTTP/1.1 50", b"junk"]
)
def test_an_answer_that_nobody_asked_for_is_not_mixed_into_the_one_before_it(more):
    """It came in one segment with it: status, headers and body are those of the first, and its connection is not used again."""

    async def body():
        server = Server(SIZED + more)
        async with served(server) as client:
            for connections in (1, 2):
                answer = await client.send("GET", "/x")
                assert (answer.status, await answer.read(100)) == (200, b"abcde") and answer.headers == {"content-length": "5"}
                answer.release()
                assert server.connections == connections

    asyncio.run(body())


@pytest.mark.parametrize(
    ("begin", "again"),
    [
        (b"HTTP/1.1 200 OK\r\nx: ", b"a" * 4096),
        (b"HTTP/1.1 200 OK\r\n", b"x: y\r\n" * 512),
        (b"HTTP/1.1 200 ", b"a" * 4096),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 64),
        (CHUNKED[:-2], b"x: y\r\n" * 512),
        (CHUNKED[:-5] + b"2;", b"a" * 4096),
    ],
)
def test_a_head_without_end_is_lost_before_it_costs_memory(begin, again):
    """Status line, header, headers, 1xx, trailers, a chunk's extension: not for so long as the server likes."""

    async def endless(reader, writer) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(begin)
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(again)
                await writer.drain()

    async def body():
        async with served(endless) as client, asyncio.timeout(60.0):
            with pytest.raises(HttpLost, match="no body"):
                await ask(client)

    asyncio.run(body())


@pytest.mark.parametrize("head", [b"HTTP/1.1 101 Go\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n", b"HTTP/1.1 000 Zero\r\n\r\n"])
def test_an_answer_that_is_none_is_lost_at_once(head):
    async def body():
        async with served(Server(head)) as client, asyncio.timeout(60.0):
            with pytest.raises(HttpLost, match="no HTTP"):
                await ask(client)

    asyncio.run(body())


def test_a_long_stream_whose_chunks_come_in_parts_is_no_head():
    """Each chunk's size and end in segments of their own: more than HEAD_BYTES_MAX of them in all."""
    count = HEAD_BYTES_MAX // 4

    async def parts(reader, writer) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(CHUNKED[: CHUNKED.index(b"3\r\n")])
        with contextlib.suppress(ConnectionError):
            await reader.read()

    async def body():
        async with served(parts) as client:
            answer = await client.send("GET", "/x")
            for _ in range(count):
                for part in (b"1\r\n", b"a", b"\r\n"):
                    answer.data_received(part)
            answer.data_received(b"0\r\n\r\n")
            assert len(await answer.read(1 << 20)) == count
            answer.lose("done")

    asyncio.run(body())


def test_a_connection_that_is_not_read_from_is_not_kept():
    """The answer is here in full, most of it unread, and reading was paused for that: the next answer would never be seen."""

    async def body():
        server = Server(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (BUFFER_BYTES_MAX + 1) + bytes(BUFFER_BYTES_MAX + 1), SIZED)
        async with served(server) as client, asyncio.timeout(60.0):
            answer = await client.send("GET", "/x")
            while not answer._is_complete:
                await asyncio.sleep(0.001)
            answer.release()
            assert await ask(client) == (200, b"abcde")

    asyncio.run(body())
