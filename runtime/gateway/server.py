"""The gateway's HTTP server: uvicorn on uvloop and httptools, with the limits that uvicorn leaves open.

A head that grows for ever, or never ends, is stopped here, before it costs memory; what is no HTTP is answered in the API's shape. A caller
that is refused while it still sends gets to read the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import resource
import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from runtime.gateway.departure import DEPARTURE, Departure
from runtime.gateway.errors import ApiError

HEAD_BYTES_MAX = 64 * 1024
HEAD_WAIT_S = 30.0
KEEP_ALIVE_S = 75.0
LINGER_S = 5.0
"""How long what a refused caller still sends is read and thrown away: a connection that is closed with unread bytes is reset, and a reset
takes the answer with it, so that the caller sees a broken connection in place of the refusal."""
BACKLOG = 2048
DESCRIPTORS_WANTED = 65_536
"""Each stream has a socket, and so has its backend's side; the usual soft limit is 1,024."""
UPGRADE_HEADER = re.compile(rb"(?<=\r\n)upgrade(?=[ \t]*:)", re.IGNORECASE)
IGNORED_HEADER = b"x-grade"


class GatheredWrites:
    """One answer's transport: what is written within one turn of the event loop leaves in one segment and one system call. The head and the
    first of the body do so at once: that is what a caller waits for."""

    __slots__ = ("_end", "_is_at_head", "_loop", "_parts", "_transport")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, end: Callable[[], None]) -> None:
        """end: closes the connection, once all is written."""
        self._transport, self._loop, self._end = transport, loop, end
        self._parts: list[bytes] = []
        self._is_at_head = True

    def write(self, data: bytes) -> None:
        self._parts.append(data)
        if len(self._parts) == 1:
            self._loop.call_soon(self.flush)
        elif self._is_at_head:
            self.flush()

    def flush(self) -> None:
        parts = self._parts
        if parts:
            self._parts, self._is_at_head = [], False
            if self._transport.is_closing():  # the caller left since; uvloop's raises
                return
            self._transport.write(parts[0] if len(parts) == 1 else b"".join(parts))

    def close(self) -> None:
        self.flush()
        self._end()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class BoundedHttp(HttpToolsProtocol):
    """uvicorn's protocol with a limit on the size of a request's head and on the time that it may take, and an end that can be heard."""

    _head_bytes = 0
    _is_in_head = False
    _head_timer: asyncio.TimerHandle | None = None
    _linger_timer: asyncio.TimerHandle | None = None
    _writes: GatheredWrites | None = None
    _departure: Departure | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        connection = transport.get_extra_info("socket")
        if connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
            with contextlib.suppress(OSError):  # gone already
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        if self._linger_timer is not None:
            self._linger_timer.cancel()
            self._unset_keepalive_if_required()
        super().connection_lost(exc)
        departure, self._departure = self._departure, None
        if departure is not None:
            departure.happen()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head, self._head_bytes = True, 0

    def on_headers_complete(self) -> None:
        self._end_head()
        if sum(name == b"host" for name, _ in self.headers) > 1:
            raise ValueError("several hosts")  # whoever stands before us may have judged another one
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        if self._linger_timer is not None:
            return
        if self.cycle is None or not self.cycle.more_body:
            data = _without_upgrade(data)
        if self._is_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES_MAX:
                self._refuse(ApiError(431, f"The head of a request may have {HEAD_BYTES_MAX} bytes.", code="headers_too_large"))
                return
        super().data_received(data)
        if self._is_in_head:  # nearly all heads are whole at once, and cost no timer
            self._await_head()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._writes = GatheredWrites(cycle.transport, self.loop, self._end)
        cycle.transport = self._writes  # type: ignore[assignment]
        self._departure = cycle.scope[DEPARTURE] = Departure()  # type: ignore[literal-required]
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        self._departure = None
        if self._writes is not None:
            self._writes.flush()
            self._writes = None
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, msg))

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_WAIT_S, self._head_late)

    def _end_head(self) -> None:
        self._is_in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_late(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self._refuse(ApiError(408, f"The head of the request did not come within {HEAD_WAIT_S:g} s.", code="head_timeout"))

    def _refuse(self, error: ApiError) -> None:
        """An answer in place of the application's, and an end to the connection."""
        self._end_head()
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            if cycle.response_started or not cycle.more_body or self.pipeline:
                self.transport.close()  # in the midst of another answer nothing else can be said
                return
            cycle.disconnected = True  # its body is broken: this is its answer
            cycle.message_event.set()
        body = error.json()
        lines = [STATUS_LINE[error.status]]
        for name, value in (*error.headers(1.0), (b"content-length", b"%d" % len(body)), (b"connection", b"close")):
            lines.append(name + b": " + value + b"\r\n")
        self.transport.write(b"".join((*lines, b"\r\n", body)))
        self._linger()

    def _end(self) -> None:
        """After the last answer of the connection."""
        if self.cycle.more_body and not self.pipeline:
            self._linger()
        else:
            self.transport.close()

    def _linger(self) -> None:
        """Say that nothing else comes, and throw away what the caller still sends, until it hangs up or LINGER_S."""
        if self._linger_timer is None and not self.transport.is_closing():
            self._linger_timer = self.loop.call_later(LINGER_S, self.transport.close)
            self.transport.write_eof()
            self.flow.resume_reading()


def _without_upgrade(data: bytes) -> bytes:
    """A request's head without its wish for another protocol, which a server may overlook (RFC 9110, 7.8). The parser would take what
    follows for that protocol, and the body would be lost: some clients (Java's) ask for HTTP/2 with every request."""
    end = data.find(b"\r\n\r\n")
    wish = UPGRADE_HEADER.search(data, 0, len(data) if end < 0 else end + 2)
    return data if wish is None else data[: wish.start()] + IGNORED_HEADER + data[wish.end() :]


def make_server(app: ASGIApp, host: str = "127.0.0.1", port: int = 0, *, drain_s: int = 30, **options: Any) -> uvicorn.Server:
    """A server that is not started: `await server.serve(sockets=[listen(host, port)])`. Loopback alone unless told otherwise (K19).

    drain_s: what streams get to end after SIGTERM. options: further ones of uvicorn.Config. Raises this process's limit of open files.
    """
    allow_descriptors(DESCRIPTORS_WANTED)
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        loop="uvloop",
        http=BoundedHttp,
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=int(KEEP_ALIVE_S),
        timeout_graceful_shutdown=drain_s,
        backlog=BACKLOG,
        **options,
    )
    return uvicorn.Server(config)


def allow_descriptors(wanted: int) -> int:
    """Raise the soft limit of open files as far as the hard one lets it; returns what is in force."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft == resource.RLIM_INFINITY or soft >= limit:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit


def listen(host: str, port: int) -> socket.socket:
    """A bound socket, so that its owner knows the port before anything is served (K19). Raises: OSError when it is taken."""
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=BACKLOG, reuse_port=False)
