"""A group behind any OpenAI-compatible server (vLLM, SGLang, …): streams from it, reads its load where it tells one.

What such a server sends is its own text; token ids are not known here. A stream that was lost goes on elsewhere by asking again from the
start and leaving out what the caller has, where the same call gives the same text (greedy or seeded, one choice, no grammar); text that
does not agree ends the attempt, never the agreement.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

from envs.domain.commands import CommandKind
from envs.domain.plans import SplitPlan, TpGroup
from runtime.backends.event_stream import (
    OF_THE_OPERATOR,
    TOKEN_CHARS_MAX,
    BadEvent,
    EventReader,
    Usage,
    decode_json,
    message_of,
    seconds_of,
)
from runtime.backends.http_client import HttpClient, HttpConnection, HttpLost, HttpRefused
from runtime.backends.interface import (
    NOTHING,
    Backend,
    BackendBusy,
    BackendError,
    BackendFault,
    BadCall,
    Begun,
    GroupReport,
    KvPart,
    MoveRefused,
    SplitDone,
)
from runtime.backends.load_metrics import load_of
from runtime.backends.sent_text import SentText
from runtime.calls import Call, Piece
from runtime.request_notes import AnswerTimes

logger = logging.getLogger(__name__)

CONNECT_S = 5.0
METRICS_S = 1.0
METRICS_DEADLINE_S = 2.0
PROBE_DEADLINE_S = 3.0
PAGE_BYTES_MAX = 4 << 20
JSON_HEADER = "content-type: application/json\r\n"
FIRST = (0, None)
OF_THE_GATEWAY = ("model", "stream", "stream_options", "n", "best_of", "prompt", "messages", "max_tokens", "max_completion_tokens", "user")
GRAMMARS = ("response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "tools", "functions")


_encode = msgspec.json.Encoder().encode


class OpenAiHttpBackend:
    """Implements `Backend`. Its connections are its own: a stuck server takes nobody else's (K23)."""

    is_emulation = False
    keeps_prefixes = False  # its tokens are not known here
    can: frozenset[CommandKind] = frozenset()
    kv_home = None

    def __init__(self, name: str, group_index: int, url: str, model: str, api_key: str = "") -> None:
        """url: without /v1. model: its name there."""
        self.name, self.group_index = name, group_index
        self._url, self._model = url.rstrip("/").removesuffix("/v1"), model
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._client: HttpClient | None = None
        self._poller: asyncio.Task[None] | None = None
        self._report: GroupReport | None = None
        self._refused_running = 0
        self._is_open = False

    async def start(self) -> None:
        """Raises: BackendFault where nobody listens there."""
        if self._client is None:
            self._client = HttpClient(self._url, self._headers, CONNECT_S)
        try:
            async with asyncio.timeout(CONNECT_S):
                await self._read(self._client, "GET", "/v1/models")
        except (OSError, TimeoutError) as error:
            raise BackendFault(f"{self.name}: {self._url} does not answer ({type(error).__name__})") from error
        self._is_open, self._refused_running = True, 0
        if self._poller is None:
            self._poller = asyncio.create_task(self._poll_for_ever(), name=f"metrics-{self.name}")

    async def close(self) -> None:
        self._is_open = False
        poller, self._poller = self._poller, None
        if poller is not None:
            poller.cancel()
            await asyncio.gather(poller, return_exceptions=True)
        client, self._client = self._client, None
        if client is not None:
            client.close()

    @property
    def is_alive(self) -> bool:
        """Connections refused twice running mean that nobody is there; `start` asks again."""
        return self._is_open and self._refused_running < 2

    def report(self) -> GroupReport | None:
        return self._report

    async def probe(self) -> bool:
        """One token by a real request: a health page proves nothing (K22)."""
        if self._client is None:
            return False
        body = _encode({"model": self._model, "prompt": "1", "max_tokens": 1, "temperature": 0})
        try:
            async with asyncio.timeout(PROBE_DEADLINE_S):
                status, data = await self._read(self._client, "POST", "/v1/completions", body)
            return status == 200 and bool(decode_json(data)["choices"])
        except (OSError, TimeoutError, ValueError, KeyError, TypeError, RecursionError):
            return False

    async def set_split(self, plan: SplitPlan) -> SplitDone:
        raise MoveRefused(f"{self.name}: how a foreign server splits its model is its own business")

    def why_not_join(self, donor: Backend) -> str:
        return f"{self.name}: a foreign server's ranks are its own business"

    def join(self, donor: Backend, merged: TpGroup) -> Callable[[], None]:
        raise MoveRefused(self.why_not_join(donor))

    async def give_kv(self, call_id: str, after: int) -> KvPart:
        raise MoveRefused(f"{self.name}: a foreign server keeps its KV to itself")

    async def take_kv(self, part: KvPart) -> None:
        raise MoveRefused(f"{self.name}: a foreign server takes no KV")

    async def _read(self, client: HttpClient, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """A whole answer: status and body. Raises: HttpLost."""
        answer = await client.send(method, path, JSON_HEADER if body else "", body)
        try:
            return answer.status, await answer.read(PAGE_BYTES_MAX)
        finally:
            answer.release()

    def continues(self, call: Call, begun: Begun) -> bool:
        is_fixed = call.sampling.is_greedy or call.sampling.seed is not None
        return is_fixed and call.logprobs is None and not any(call.body.get(name) for name in GRAMMARS)

    async def submit(self, call: Call, begun: Begun = NOTHING) -> AsyncIterator[Piece]:
        client = self._client
        if client is None:
            raise BackendFault(f"{self.name}: closed")
        if call.logprobs is not None:
            raise BadCall("logprobs are not passed on from foreign servers", reason="unsupported")
        path = "/v1/chat/completions" if call.kind == "chat" else "/v1/completions"
        headers = f"{JSON_HEADER}accept: text/event-stream\r\nx-request-id: {call.call_id}\r\n"
        if (context := call.notes.traceparent()) is not None:
            headers += f"traceparent: {context}\r\n"
        try:
            answer = await client.send("POST", path, headers, _encode(self._body(call)))
            try:
                self._refused_running = 0
                if answer.status != 200:
                    raise await self._refusal(answer)
                skip = _Skip(begun)
                async for piece in self._pieces(answer, call, is_joined=not begun.pieces):
                    rest = skip.rest_of(piece, self.name)
                    yield rest
                    if rest.finish_reason is not None:
                        return
            finally:
                answer.release()
        except HttpRefused as error:
            self._refused_running += 1
            raise BackendFault(f"{self.name}: connection refused") from error
        except (HttpLost, BadEvent) as error:
            raise BackendFault(f"{self.name}: {error}") from error

    def _body(self, call: Call) -> dict[str, Any]:
        """The caller's own fields, and ours for what the gateway decided. Always a stream: a client that leaves ends it at once."""
        body: dict[str, Any] = {name: value for name, value in call.body.items() if name not in OF_THE_GATEWAY and value is not None}
        body |= {"model": self._model, "stream": True, "stream_options": {"include_usage": True}, "max_tokens": call.max_tokens}
        if call.kind == "chat":
            body["messages"] = call.body.get("messages") or []
        else:
            prompt = call.body.get("prompt")
            body["prompt"] = list(call.prompt_ids) if call.prompt_ids else prompt
        return body

    async def _refusal(self, answer: HttpConnection) -> BackendError:
        """What an answer other than 200 means, and for whom."""
        text = (await answer.read(2048)).decode("utf-8", "replace")
        after = answer.headers.get("retry-after")
        message = f"{self.name}: HTTP {answer.status}: {message_of(text)}"
        if answer.status == 429 or (answer.status == 503 and after is not None):
            return BackendBusy(message, seconds_of(after))
        if 400 <= answer.status < 500 and answer.status not in OF_THE_OPERATOR:
            return BadCall(message_of(text), status=answer.status)
        return BackendFault(message)

    async def _pieces(self, answer: HttpConnection, call: Call, is_joined: bool) -> AsyncIterator[Piece]:
        """Pieces of an event stream; events that arrive together are one piece where `is_joined`. The last one waits for the usage that
        follows it. Raises: BackendFault for a broken stream."""
        reader, index, chars_left = EventReader(), 0, call.max_tokens * TOKEN_CHARS_MAX
        usage: Usage | None = None
        times: AnswerTimes | None = None
        last: str | None = None  # the finish reason
        texts: list[str] = []
        while chunk := await answer.read_some():
            for found in reader.take(chunk):
                if found is None:
                    yield self._ended(last, texts, index, usage, call, times)
                    return
                _, event = found
                usage = event.usage or usage
                if event.metrics is not None:
                    times = times_of_metrics(event.metrics)
                for choice in event.choices or ():
                    if choice.index not in FIRST:
                        continue  # nobody asked for a second one
                    text = choice.said()
                    if text:
                        texts.append(text)
                        chars_left -= len(text)
                    if choice.finish_reason:
                        last = str(choice.finish_reason)
                if texts and last is None and not is_joined:
                    yield _joined(index, texts)
                    index, texts = index + len(texts), []
            if chars_left < 0:
                raise BackendFault(f"{self.name}: more text than max_tokens={call.max_tokens} can be")
            if texts and last is None:
                yield _joined(index, texts)
                index, texts = index + len(texts), []
        reader.end()
        if last is None:
            raise BackendFault(f"{self.name}: the stream was cut after {index} pieces")
        yield self._ended(last, texts, index, usage, call, times)  # some servers end without a word

    def _ended(self, reason: str | None, texts: list[str], index: int, usage: Usage | None, call: Call, times: AnswerTimes | None) -> Piece:
        """The last piece, with `texts` that came in with it."""
        if reason is None:
            raise BackendFault(f"{self.name}: the stream ended without a finish reason")
        prompt_tokens, tokens = (None, None) if usage is None else (usage.prompt_tokens, usage.completion_tokens)
        return Piece(
            index, None, "".join(texts), None, reason, call.prompt_tokens if prompt_tokens is None else prompt_tokens,
            index + len(texts) if tokens is None else tokens, tuple(texts) if len(texts) > 1 else (), times,
        )  # fmt: skip

    async def _poll_for_ever(self) -> None:
        """Read /metrics where there is such a page. Each poll has a deadline; none waits for another."""
        while True:
            await asyncio.sleep(METRICS_S)
            assert self._client is not None
            try:
                async with asyncio.timeout(METRICS_DEADLINE_S):
                    status, page = await self._read(self._client, "GET", "/metrics")
            except (OSError, TimeoutError):
                continue  # what we have in flight ourselves stands in for it
            load = load_of(page.decode("utf-8", "replace")) if status == 200 else None
            if load is not None:
                self._report = GroupReport(time.monotonic(), load.running, load.waiting, kv_used_fraction=load.kv_used_fraction)


class _Skip:
    """Leaves out what the caller has already, as long as it agrees."""

    def __init__(self, begun: Begun) -> None:
        self._sent, self._shift = begun.sent, begun.pieces
        self._told = SentText()  # again, of what was sent
        self._skipped = 0

    def rest_of(self, piece: Piece, name: str) -> Piece:
        """What of `piece` is new; an empty piece, a sign of life, for nothing. Raises: BackendFault where the text is another one."""
        text = piece.text
        left = self._sent.chars - self._told.chars
        if not (left or self._shift):
            return piece
        if left:
            self._told.add(text[:left])
            text = text[left:]
            if not self._told.is_beginning_of(self._sent):
                raise BackendFault(f"{name}: goes on with another text than was begun")
            self._skipped += 1
            if piece.finish_reason is not None and self._told.chars < self._sent.chars:
                raise BackendFault(f"{name}: ends before what was begun")
            if not text and piece.finish_reason is None:
                return Piece(self._shift, None, "")
        index = self._shift + piece.index - self._skipped + (1 if text and text != piece.text else 0)
        return Piece(index, None, text, None, piece.finish_reason, piece.prompt_tokens, piece.output_tokens, times=piece.times)


def _joined(index: int, texts: list[str]) -> Piece:
    return Piece(index, None, texts[0]) if len(texts) == 1 else Piece(index, None, "".join(texts), parts=tuple(texts))


def times_of_metrics(metrics: Any) -> AnswerTimes | None:
    """vLLM's `metrics` of an answer, where it tells them: queue, then to the first token, then to the last; None without them."""
    names = ("queue_time_ms", "time_to_first_token_ms", "generation_time_ms")
    found = [metrics.get(name) for name in names] if isinstance(metrics, dict) else []
    if not found or not all(isinstance(ms, int | float) and 0.0 <= ms < 1e9 for ms in found):
        return None
    return AnswerTimes(*(ms / 1e3 for ms in found))
