"""A dispatcher whose pieces a test scripts, a codec that needs no model, and the real HTTP server over both, in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette

from runtime.calls import Call, Piece
from runtime.gateway.app import make_app
from runtime.gateway.interface import GroupStatus, ServedModel
from runtime.gateway.server import listen, make_server
from runtime.gateway.settings import GatewaySettings
from runtime.gateway.smaller_model import SmallerModelSettings
from runtime.torch_tp.chat_template import ChatTemplateError
from runtime.torch_tp.requests import TokenLogprobs
from tests.conftest import GUARD_S

CONTEXT = 512
OWN, FOREIGN, SMALL = "own/model", "foreign/model", "small"

Script = Callable[[Call], AsyncIterator[Piece]]


class WordCodec:
    """Every character is a token whose id is its code point modulo 1000; a conversation is its contents, each with its role."""

    vocabulary = 1000
    token_chars_max = 1

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(sign) % 1000 for sign in text]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, ids))

    def token_bytes(self, token_id: int) -> bytes:
        return chr(token_id).encode()

    def chat_text(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any) -> str:
        if any(message["role"] not in ("system", "user", "assistant", "tool") for message in messages):
            raise ChatTemplateError("the chat template refused the messages: a role it does not know")
        return "".join(f"{message['role'][0]}{message['content']}" for message in messages)


async def says(call: Call, words: Sequence[str] = ("Hello", " ", "world"), delay_s: float = 0.0) -> AsyncIterator[Piece]:
    """The words, one a token, up to the call's limit, then the end."""
    count = min(len(words), call.max_tokens)
    for place in range(count):
        if delay_s:
            await asyncio.sleep(delay_s)
        logprobs = None
        if call.logprobs is not None:
            logprobs = TokenLogprobs(-0.5, tuple((97 + other, -0.5 - other) for other in range(call.logprobs)))
        yield Piece(place, ord(words[place][0]), words[place], logprobs)
    reason = "stop" if count == len(words) else "length"
    yield Piece(count, None, "", None, reason, call.prompt_tokens, count)


@dataclass
class ScriptedDispatcher:
    """Remembers the calls; `script` makes their pieces. open_calls, ended_calls: what is being worked on, and what has ended any way."""

    script: Script = says
    is_ready_answer: bool | float = True
    calls: list[Call] = field(default_factory=list)
    open_calls: int = 0
    cancelled: list[float] = field(default_factory=list)
    groups: tuple[GroupStatus, ...] = (GroupStatus("a", OWN, True, kv_used_fraction=0.25), GroupStatus("b", OWN, False, "dead", "killed"))

    async def run(self, call: Call) -> AsyncIterator[Piece]:
        self.calls.append(call)
        self.open_calls += 1
        pieces = self.script(call)
        try:
            async for piece in pieces:
                yield piece
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.append(time.monotonic())
            raise
        finally:
            self.open_calls -= 1

    def models(self) -> Mapping[str, ServedModel]:
        return MODELS

    async def is_ready(self) -> bool:
        if not isinstance(self.is_ready_answer, bool):
            await asyncio.sleep(self.is_ready_answer)
        return bool(self.is_ready_answer)

    def status(self) -> Sequence[GroupStatus]:
        return self.groups


MODELS = {
    OWN: ServedModel(OWN, CONTEXT, "words"),
    FOREIGN: ServedModel(FOREIGN, None, None),
    SMALL: ServedModel(SMALL, 16, "words"),
}


@dataclass
class Service:
    """A gateway that serves. Its loop runs in another thread: a test reads the dispatcher's plain values only."""

    dispatcher: ScriptedDispatcher
    app: Starlette
    url: str
    port: int

    @property
    def metrics(self) -> Any:
        return self.app.state.metrics


@contextlib.contextmanager
def serving(
    dispatcher: ScriptedDispatcher, settings: GatewaySettings | None = None, smaller_model: SmallerModelSettings | None = None
) -> Iterator[Service]:
    app = make_app(dispatcher, settings, load_text=lambda path: WordCodec(), smaller_model=smaller_model)
    socket = listen("127.0.0.1", 0)
    port = socket.getsockname()[1]
    server = make_server(app, port=port, drain_s=2)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]}, daemon=True)
    thread.start()
    deadline_s = time.monotonic() + GUARD_S
    while not server.started and thread.is_alive() and time.monotonic() < deadline_s:
        time.sleep(0.005)
    assert server.started, "the gateway did not start"
    try:
        yield Service(dispatcher, app, f"http://127.0.0.1:{port}", port)
    finally:
        server.should_exit = True
        thread.join(GUARD_S)
        assert not thread.is_alive()


def wait_until(holds: Callable[[], bool], within_s: float = GUARD_S) -> float:
    """Seconds until it held. Fails when it does not within the time."""
    began_s = time.monotonic()
    while not holds():
        assert time.monotonic() - began_s < within_s, "it did not come true in time"
        time.sleep(0.002)
    return time.monotonic() - began_s
