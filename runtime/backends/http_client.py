"""A lean HTTP/1.1 client of one server: connections kept for the next request, an answer's bytes as they arrive.

A general client's own work per request (its cookies, redirects, decompression, request and answer objects) was a sixth of what the gateway
did for a call. Redirects are not followed; answers are asked for uncompressed.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import Mapping
from typing import cast
from urllib.parse import urlsplit

import httptools

IDLE_S = 30.0
"""A connection unused for so long is not used again."""
IDLE_MAX = 256
STALE_S = 1.0
"""A connection unused for so long may be one that its server is just closing; one used later than that was lost with the request."""
BUFFER_BYTES_MAX = 1 << 18
"""Of an answer's body that nobody has read: then the server has to wait."""
HEAD_BYTES_MAX = 1 << 16
"""Of an answer running that are no body: its head, what comes before that (1xx), the lines after the last chunk. The parser keeps a line
until its end and knows no limit of its own."""


class HttpLost(ConnectionError):
    """The connection went, or what came on it was no HTTP."""


class HttpRefused(HttpLost):
    """Nobody listens there, or not within the time for connecting."""


class HttpClient:
    """Requests to one server. url: without a path's last slash. headers: sent with every request."""

    def __init__(self, url: str, headers: Mapping[str, str], connect_s: float) -> None:
        parts = urlsplit(url)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host, self._port = parts.hostname or "", parts.port or (443 if self._tls else 80)
        self._path, self._connect_s = parts.path.rstrip("/"), connect_s
        known = {"host": parts.netloc.rpartition("@")[2], **headers}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in known.items())
        self._idle: list[HttpConnection] = []
        self._busy: set[HttpConnection] = set()
        self._is_closed = False

    async def send(self, method: str, path: str, headers: str = "", body: bytes = b"") -> HttpConnection:
        """The connection once an answer's head is there: read the body from it, and `release` it.

        headers: lines, each with its end. A kept connection that its server closed just then is replaced once. Raises: HttpLost.
        """
        length = f"content-length: {len(body)}\r\n" if body else ""
        data = f"{method} {self._path}{path} HTTP/1.1\r\n{self._head}{headers}{length}\r\n".encode("latin-1") + body
        connection = self._kept()
        if connection is not None:
            try:
                return await self._exchange(connection, data)
            except HttpLost:
                if connection.has_answered or connection.was_idle_s < STALE_S:
                    raise
        return await self._exchange(await self._connect(), data)

    def close(self) -> None:
        """Open answers end with HttpLost."""
        self._is_closed = True
        for connection in [*self._idle, *self._busy]:
            connection.lose("closed")
        self._idle.clear()
        self._busy.clear()

    def take_back(self, connection: HttpConnection) -> None:
        """An exchange is over: its connection is kept where it can serve again."""
        self._busy.discard(connection)
        if connection.is_reusable and not self._is_closed and len(self._idle) < IDLE_MAX:
            connection.idle_since_s = time.monotonic()
            self._idle.append(connection)
        else:
            connection.lose("given up")

    async def _exchange(self, connection: HttpConnection, data: bytes) -> HttpConnection:
        self._busy.add(connection)
        connection.begin(data)
        try:
            await connection.head_received()
        except BaseException:
            self._busy.discard(connection)
            connection.lose("given up")
            raise
        return connection

    def _kept(self) -> HttpConnection | None:
        """The connection used last, while it lives: the others grow old and are closed."""
        oldest_s = time.monotonic() - IDLE_S
        if self._idle and self._idle[0].idle_since_s < oldest_s:
            self._idle.pop(0).lose("idle")
        while self._idle:
            connection = self._idle.pop()
            connection.was_idle_s = time.monotonic() - connection.idle_since_s
            if connection.is_reusable and connection.idle_since_s >= oldest_s:
                return connection
            connection.lose("idle")
        return None

    async def _connect(self) -> HttpConnection:
        """Raises: HttpRefused."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_s):
                _, connection = await loop.create_connection(lambda: HttpConnection(self), self._host, self._port, ssl=self._tls)
        except (OSError, TimeoutError) as error:
            raise HttpRefused(f"no connection ({type(error).__name__})") from error
        return connection


class HttpConnection(asyncio.Protocol):
    """One connection, and the answer that comes on it. `status` and `headers` (lower case) are there once `send` returned."""

    def __init__(self, client: HttpClient) -> None:
        self._client = client
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._chunks: list[bytes] = []
        self._chunk_bytes = self._head_bytes = 0
        self._is_complete = True
        self._is_paused = False
        self._is_kept_open = False
        self._has_body = False  # what came last had some of it
        self._lost: str | None = None
        self.headers: dict[str, str] = {}
        self.status = 0
        self.idle_since_s = self.was_idle_s = 0.0
        self.has_answered = False

    @property
    def is_reusable(self) -> bool:
        """One that is not read from would not tell of its next answer, nor of its end."""
        return self._is_complete and self._is_kept_open and self._lost is None and not self._is_paused

    def begin(self, data: bytes) -> None:
        """Send a request; what comes from now on is its answer."""
        self._parser = httptools.HttpResponseParser(self)
        self._chunks, self._chunk_bytes, self._head_bytes, self.headers = [], 0, 0, {}
        self.status, self.has_answered, self._is_complete = 0, False, False
        if self._transport is not None:
            self._transport.write(data)

    async def head_received(self) -> None:
        """Raises: HttpLost."""
        while not self.status:
            await self._something()

    async def read_some(self) -> bytes:
        """What has come of the body, as soon as anything has; nothing at its end. Raises: HttpLost."""
        while not self._chunks:
            if self._is_complete:
                return b""
            await self._something()
        chunks, self._chunks, self._chunk_bytes = self._chunks, [], 0
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    async def read(self, bytes_max: int) -> bytes:
        """The body up to `bytes_max`. Raises: HttpLost."""
        parts, size = [], 0
        while size < bytes_max and (part := await self.read_some()):
            parts.append(part)
            size += len(part)
        return b"".join(parts)[:bytes_max]

    def release(self) -> None:
        """Done with the answer; where it is not whole, the connection ends and so does the server's work on it."""
        self._client.take_back(self)

    def lose(self, reason: str) -> None:
        """End it now, and whoever waits for something from it."""
        if self._transport is not None:
            self._transport.abort()
        self._end(reason)

    # --- asyncio.Protocol -------------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        connection = transport.get_extra_info("socket")
        if connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
            with contextlib.suppress(OSError):  # gone already
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        if self._is_complete:
            self.lose("it speaks unasked")
            return
        self.has_answered, self._has_body = True, False
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade, HttpLost) as error:
            self.lose(f"no HTTP: {error}")
            return
        self._head_bytes = 0 if self._has_body else self._head_bytes + len(data)
        if self._head_bytes > HEAD_BYTES_MAX:
            self.lose(f"over {HEAD_BYTES_MAX} bytes that are no body")
            return
        if self._chunk_bytes > BUFFER_BYTES_MAX and not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        if self.status and not self._is_complete and not {"content-length", "transfer-encoding"} & self.headers.keys():
            self._is_complete = True  # such an answer ends with its connection
        self._transport = None
        self._end("the connection was lost" if error is None else f"the connection was lost: {type(error).__name__}")

    # --- httptools --------------------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._is_complete:
            raise HttpLost("more than one answer")  # the parser would mix it into the one that is there

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 100:
            raise HttpLost(f"status {status}")
        if status >= 200:
            self.status, self._is_kept_open = status, self._parser.should_keep_alive()  # after the body it no longer knows
        else:
            self.headers = {}  # "100 Continue" and the like come before the answer

    def on_body(self, data: bytes) -> None:
        self._has_body = True
        self._chunks.append(data)
        self._chunk_bytes += len(data)

    def on_message_complete(self) -> None:
        self._is_complete = self.status != 0

    # ----------------------------------------------------------------------------------------------------------------------------

    async def _something(self) -> None:
        """Until something came. Raises: HttpLost."""
        if self._lost is not None:
            raise HttpLost(self._lost)
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _end(self, reason: str) -> None:
        if self._lost is None:
            self._lost = reason
        self._wake()
