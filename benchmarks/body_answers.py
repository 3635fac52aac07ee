"""How generated bodies are answered: asked within the process or over a connection, and what of an answer is not as it should be."""

from __future__ import annotations

import asyncio
import gc
import http.client
import json
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp

from benchmarks.body_shapes import Asked
from runtime.calls import Call, Piece
from runtime.gateway.interface import GroupStatus, ServedModel

PATIENCE_S = 30.0
JSON = {"content-type": "application/json"}


@dataclass(frozen=True, slots=True)
class Told:
    """An answer. took_s: less what its process waited for a core."""

    status: int
    content_type: str
    data: bytes
    took_s: float


def fault_of(told: Told) -> str | None:
    """Why this is no answer of the API's; None for one that is, refusals of what the caller must change among them."""
    if told.status >= 500:
        return f"server error {told.status}"
    try:
        if told.status != 200:
            keys = set(json.loads(told.data)["error"])
            return None if keys == {"message", "type", "param", "code"} else f"error with {sorted(keys)}"
        if not told.content_type.startswith("text/event-stream"):
            return None if all(choice["finish_reason"] for choice in json.loads(told.data)["choices"]) else "no finish reason"
        *blocks, last, empty = told.data.decode().split("\n\n")
        if (last, empty) != ("data: [DONE]", ""):
            return "a stream without its end"
        return "server error in a stream" if any("error" in json.loads(block.removeprefix("data: ")) for block in blocks) else None
    except (ValueError, KeyError, TypeError) as error:
        return f"not in the API's shape ({type(error).__name__}: {error})"


class Patience:
    """Measures how long a thing took, without the time for which this thread was ready and another process had the core."""

    def __init__(self) -> None:
        self._file = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)

    def close(self) -> None:
        os.close(self._file)

    def _waited_s(self) -> float:
        return int(os.pread(self._file, 64, 0).split()[1]) / 1e9

    @contextmanager
    def watched(self) -> Iterator[list[float]]:
        """One number, there when the block is over."""
        took: list[float] = []
        gc.disable()  # hypothesis keeps many objects: a sweep of them is not the gateway's
        waited_s, began_s = self._waited_s(), time.monotonic()
        try:
            yield took
        finally:
            took.append(time.monotonic() - began_s - (self._waited_s() - waited_s))
            gc.enable()


class Echo:
    """Implements `Dispatcher`: a fleet that answers every call at once with a few tokens, so that what is asked is the gateway alone."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self.inside = 0

    async def run(self, call: Call) -> AsyncIterator[Piece]:
        self.inside += 1
        try:
            count = max(1, min(call.max_tokens, 3))
            for place in range(count):
                yield Piece(place, 97 + place, "abc"[place])
            yield Piece(count, None, "", None, "length", call.prompt_tokens, count)
        finally:
            self.inside -= 1

    def models(self) -> dict[str, ServedModel]:
        return {self._model.model_id: self._model}

    async def is_ready(self) -> bool:
        return True

    def status(self) -> tuple[GroupStatus, ...]:
        return (GroupStatus("echo", self._model.model_id, True),)


class InProcess:
    """Asks an application without a socket, in a loop of its own."""

    def __init__(self, app: ASGIApp) -> None:
        self._app, self._loop, self._patience = app, asyncio.new_event_loop(), Patience()
        self._life = app.router.lifespan_context(app)  # type: ignore[attr-defined]
        self._loop.run_until_complete(self._life.__aenter__())

    def close(self) -> None:
        self._loop.run_until_complete(self._life.__aexit__(None, None, None))
        self._loop.close()
        self._patience.close()

    def ask(self, asked: Asked) -> Told:
        """Raises: TimeoutError."""
        path, data = asked
        sent: list[Any] = []
        with self._patience.watched() as took:
            self._loop.run_until_complete(self._served(path, data, sent))
        headers = dict(sent[0]["headers"])
        return Told(
            sent[0]["status"], headers[b"content-type"].decode(), b"".join(message.get("body", b"") for message in sent[1:]), took[0]
        )

    async def _served(self, path: str, data: bytes, sent: list[Any]) -> None:
        is_read, never = False, asyncio.Event()

        async def receive() -> dict[str, Any]:
            nonlocal is_read
            if is_read:
                await never.wait()
            is_read = True
            return {"type": "http.request", "body": data, "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(data))]
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http", "path": path,
            "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": headers, "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 1),
        }  # fmt: skip
        async with asyncio.timeout(PATIENCE_S):
            await self._app(scope, receive, send)


class OverHttp:
    """Asks a service over one connection."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        self._patience = Patience()

    def close(self) -> None:
        self._connection.close()
        self._patience.close()

    def ask(self, asked: Asked) -> Told:
        """Raises: OSError, http.client.HTTPException."""
        path, data = asked
        with self._patience.watched() as took:
            self._connection.request("POST", path, data, JSON)
            response = self._connection.getresponse()
            answer = response.read()
        return Told(response.status, response.headers["content-type"], answer, took[0])
