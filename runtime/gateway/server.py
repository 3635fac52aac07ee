"""The gateway's HTTP server: uvicorn on uvloop and httptools, with the limits that uvicorn leaves open.

A head that grows for ever, or never ends, is stopped here, before it costs memory; what is no HTTP is answered in the API's shape.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
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
BACKLOG = 2048
DESCRIPTORS_WANTED = 65_536
"""Each stream has a socket, and so has its backend's side; the usual soft limit is 1,024."""


class GatheredWrites:
    """One answer's transport: what is written within one turn of the event loop leaves in one segment and one system call. The head and the
    first of the body do so at once: that is what a caller waits for."""

    __slots__ = ("_is_at_head", "_loop", "_parts", "_transport")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
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
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class BoundedHttp(HttpToolsProtocol):
    """uvicorn's protocol with a limit on the size of a request's head and on the time that it may take."""

    _head_bytes = 0
    _is_in_head = False
    _head_timer: asyncio.TimerHandle | None = None
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
        super().connection_lost(exc)
        departure, self._departure = self._departure, None
        if departure is not None:
            departure.happen()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head, self._head_bytes = True, 0

    def on_headers_complete(self) -> None:
        self._end_head()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        if self._is_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES_MAX:
                self._refuse(ApiError(431, f"The head of a request may have {HEAD_BYTES_MAX} bytes.", code="headers_too_large"))
                return
        super().data_received(data)
        if self._is_in_head:  # nearly all heads are whole at once, and cost no timer
            self._await_head()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._writes = GatheredWrites(cycle.transport, self.loop)
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
        """An answer where there is no request to answer, and an end to the connection."""
        self._end_head()
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.close()  # in the midst of another answer nothing else can be said
            return
        body = error.json()
        lines = [STATUS_LINE[error.status]]
        for name, value in (*error.headers(1.0), (b"content-length", b"%d" % len(body)), (b"connection", b"close")):
            lines.append(name + b": " + value + b"\r\n")
        self.transport.write(b"".join((*lines, b"\r\n", body)))
        self.transport.close()


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
