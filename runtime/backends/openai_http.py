"""A group behind any OpenAI-compatible server (vLLM, SGLang, …): streams from it, reads its load where it tells one.

What such a server sends is its own text; token ids are not known here. A stream that was lost goes on elsewhere by asking again from the
start and leaving out what the caller has, where the same call gives the same text (greedy or seeded, one choice, no grammar); text that
does not agree ends the attempt, never the agreement.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

import aiohttp
import msgspec

from envs.domain.commands import CommandKind
from envs.domain.plans import SplitPlan
from runtime.backends.interface import NOTHING, BackendBusy, BackendError, BackendFault, BadCall, Begun, GroupReport, MoveRefused, SplitDone
from runtime.backends.load_metrics import load_of
from runtime.calls import Call, Piece
from runtime.request_notes import AnswerTimes

logger = logging.getLogger(__name__)

CONNECT_S = 5.0
METRICS_S = 1.0
METRICS_DEADLINE_S = 2.0
PROBE_DEADLINE_S = 3.0
EVENT_BYTES_MAX = 1 << 20
PAGE_BYTES_MAX = 4 << 20
RETRY_AFTER_DEFAULT_S = 1.0
OF_THE_GATEWAY = ("model", "stream", "stream_options", "n", "best_of", "prompt", "messages", "max_tokens", "max_completion_tokens", "user")
GRAMMARS = ("response_format", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "tools", "functions")
_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


class OpenAiHttpBackend:
    """Implements `Backend`. Its connections are its own: a stuck server takes nobody else's (K23)."""

    is_emulation = False
    keeps_prefixes = False  # its tokens are not known here
    can: frozenset[CommandKind] = frozenset()
    carries_kv = False

    def __init__(self, name: str, group_index: int, url: str, model: str, api_key: str = "") -> None:
        """url: without /v1. model: its name there."""
        self.name, self.group_index = name, group_index
        self._url, self._model = url.rstrip("/").removesuffix("/v1"), model
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None
        self._poller: asyncio.Task[None] | None = None
        self._report: GroupReport | None = None
        self._refused_running = 0
        self._is_open = False
        self._answers: set[aiohttp.ClientResponse] = set()

    async def start(self) -> None:
        """Raises: BackendFault where nobody listens there."""
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30.0)  # aiohttp sets TCP_NODELAY itself
            timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_S)
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=self._headers)
        try:
            async with asyncio.timeout(CONNECT_S), self._session.get(f"{self._url}/v1/models") as answer:
                await answer.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
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
        for answer in self._answers:  # aiohttp closes the connection and leaves who reads from it waiting
            answer.content.set_exception(BackendFault(f"{self.name}: closed"))
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    @property
    def is_alive(self) -> bool:
        """Connections refused twice running mean that nobody is there; `start` asks again."""
        return self._is_open and self._refused_running < 2

    def report(self) -> GroupReport | None:
        return self._report

    async def probe(self) -> bool:
        """One token by a real request: a health page proves nothing (K22)."""
        if self._session is None:
            return False
        body = {"model": self._model, "prompt": "1", "max_tokens": 1, "temperature": 0}
        try:
            async with asyncio.timeout(PROBE_DEADLINE_S), self._session.post(f"{self._url}/v1/completions", json=body) as answer:
                return answer.status == 200 and bool((await answer.json())["choices"])
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, KeyError, TypeError):
            return False

    async def set_split(self, plan: SplitPlan) -> SplitDone:
        raise MoveRefused(f"{self.name}: how a foreign server splits its model is its own business")

    def continues(self, call: Call, begun: Begun) -> bool:
        is_fixed = call.sampling.is_greedy or call.sampling.seed is not None
        return is_fixed and call.logprobs is None and not any(call.body.get(name) for name in GRAMMARS)

    async def submit(self, call: Call, begun: Begun = NOTHING) -> AsyncIterator[Piece]:
        if self._session is None:
            raise BackendFault(f"{self.name}: closed")
        if call.logprobs is not None:
            raise BadCall("logprobs are not passed on from foreign servers", reason="unsupported")
        path = "chat/completions" if call.kind == "chat" else "completions"
        try:
            async with self._session.post(
                f"{self._url}/v1/{path}", data=_encode(self._body(call)), headers=self._request_headers(call)
            ) as answer:
                self._refused_running = 0
                if answer.status != 200:
                    raise await self._refusal(answer)
                self._answers.add(answer)
                skip = _Skip(begun)
                try:
                    async for piece in self._pieces(answer, call):
                        rest = skip.rest_of(piece, self.name)
                        if rest is not None:
                            yield rest
                            if rest.finish_reason is not None:
                                return
                finally:
                    self._answers.discard(answer)
        except aiohttp.ClientConnectorError as error:
            self._refused_running += 1
            raise BackendFault(f"{self.name}: connection refused") from error
        except (aiohttp.ClientError, OSError) as error:
            raise BackendFault(f"{self.name}: connection lost ({type(error).__name__})") from error

    def _request_headers(self, call: Call) -> dict[str, str]:
        headers = {"content-type": "application/json", "x-request-id": call.call_id, "accept": "text/event-stream"}
        if (context := call.notes.traceparent()) is not None:
            headers["traceparent"] = context
        return headers

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

    async def _refusal(self, answer: aiohttp.ClientResponse) -> BackendError:
        """What an answer other than 200 means, and for whom."""
        text = (await answer.content.read(2048)).decode("utf-8", "replace")
        after = answer.headers.get("retry-after")
        message = f"{self.name}: HTTP {answer.status}: {_message_of(text)}"
        if answer.status == 429 or (answer.status == 503 and after is not None):
            try:
                return BackendBusy(message, max(0.0, float(after)) if after is not None else RETRY_AFTER_DEFAULT_S)
            except ValueError:
                return BackendBusy(message, RETRY_AFTER_DEFAULT_S)
        if 400 <= answer.status < 500 and answer.status not in (401, 403, 408):  # a wrong key is the operator's mistake, not the caller's
            return BadCall(_message_of(text), status=answer.status)
        return BackendFault(message)

    async def _pieces(self, answer: aiohttp.ClientResponse, call: Call) -> AsyncIterator[Piece]:
        """Pieces of an event stream, one per event; where nobody watches it come in, one per arrival. The last one waits for the usage that
        follows it. Raises: BackendFault for a broken stream."""
        is_watched = bool(call.body.get("stream"))
        index, usage, times, buffer = 0, {}, None, bytearray()
        last: Piece | None = None
        async for chunk in answer.content.iter_any():
            buffer += chunk
            cut = buffer.rfind(b"\n") + 1
            if not cut:
                if len(buffer) > EVENT_BYTES_MAX:
                    raise BackendFault(f"{self.name}: an event of over {EVENT_BYTES_MAX} bytes")
                continue
            lines = bytes(buffer[:cut])
            del buffer[:cut]
            together: list[str] = []
            for line in lines.split(b"\n"):
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    yield replace(self._ended(last, "".join(together), index, usage, call), times=times)
                    return
                event = self._event(data)
                usage = event.get("usage") or usage
                if "metrics" in event:
                    times = times_of_metrics(event["metrics"])
                for choice in event.get("choices") or ():
                    text, reason = _text_of(choice), choice.get("finish_reason")
                    if reason is not None:
                        last = Piece(index, None, text, None, str(reason))
                    elif text and is_watched:
                        yield Piece(index, None, text)
                        index += 1
                    elif text:
                        together.append(text)
            if together and last is None:
                yield Piece(index, None, "".join(together))
                index += 1
            elif together:
                assert last is not None
                last = Piece(index, None, "".join(together) + last.text, None, last.finish_reason)
        raise BackendFault(f"{self.name}: the stream was cut after {index} pieces")

    def _ended(self, last: Piece | None, before: str, index: int, usage: Mapping[str, Any], call: Call) -> Piece:
        """The last piece, `before` the text that came in with it."""
        if last is None:
            raise BackendFault(f"{self.name}: the stream ended without a finish reason")
        text = before + last.text
        prompt_tokens, tokens = usage.get("prompt_tokens", call.prompt_tokens), usage.get("completion_tokens", index + bool(text))
        return Piece(index, None, text, None, last.finish_reason, int(prompt_tokens), int(tokens))

    def _event(self, data: bytes) -> dict[str, Any]:
        try:
            event = _decode(data)
        except msgspec.DecodeError as error:
            raise BackendFault(f"{self.name}: an event is not JSON") from error
        if not isinstance(event, dict):
            raise BackendFault(f"{self.name}: an event is no object")
        if "error" in event:
            raise BackendFault(f"{self.name}: error event: {str(event['error'])[:200]}")
        return event

    async def _poll_for_ever(self) -> None:
        """Read /metrics where there is such a page. Each poll has a deadline; none waits for another."""
        while True:
            await asyncio.sleep(METRICS_S)
            assert self._session is not None
            try:
                async with asyncio.timeout(METRICS_DEADLINE_S), self._session.get(f"{self._url}/metrics") as answer:
                    load = load_of(await _page(answer)) if answer.status == 200 else None
            except (aiohttp.ClientError, OSError, TimeoutError):
                continue  # what we have in flight ourselves stands in for it
            if load is not None:
                self._report = GroupReport(time.monotonic(), load.running, load.waiting, kv_used_fraction=load.kv_used_fraction)


class _Skip:
    """Leaves out what the caller has already, as long as it agrees."""

    def __init__(self, begun: Begun) -> None:
        self._left, self._shift = begun.text, begun.pieces
        self._skipped = 0

    def rest_of(self, piece: Piece, name: str) -> Piece | None:
        """What of `piece` is new; None for nothing. Raises: BackendFault where the text is another one."""
        text = piece.text
        if self._left:
            common = min(len(self._left), len(text))
            if self._left[:common] != text[:common]:
                raise BackendFault(f"{name}: goes on with another text than was begun")
            self._left, text = self._left[common:], text[common:]
            self._skipped += 1
            if piece.finish_reason is not None and self._left:
                raise BackendFault(f"{name}: ends before what was begun")
            if not text and piece.finish_reason is None:
                return None
        index = self._shift + piece.index - self._skipped + (1 if text and text != piece.text else 0)
        return Piece(index, None, text, None, piece.finish_reason, piece.prompt_tokens, piece.output_tokens, piece.times)


def _text_of(choice: Mapping[str, Any]) -> str:
    delta = choice.get("delta")
    found = (delta.get("content") if isinstance(delta, dict) else None) or choice.get("text") or ""
    return found if isinstance(found, str) else ""


async def _page(answer: aiohttp.ClientResponse) -> str:
    """All of a page, up to PAGE_BYTES_MAX: one read gives no more than what is here already."""
    page = bytearray()
    async for part in answer.content.iter_any():
        page += part
        if len(page) > PAGE_BYTES_MAX:
            break
    return page[:PAGE_BYTES_MAX].decode("utf-8", "replace")


def times_of_metrics(metrics: Any) -> AnswerTimes | None:
    """vLLM's `metrics` of an answer, where it tells them: queue, then to the first token, then to the last; None without them."""
    names = ("queue_time_ms", "time_to_first_token_ms", "generation_time_ms")
    found = [metrics.get(name) for name in names] if isinstance(metrics, dict) else []
    if not found or not all(isinstance(ms, int | float) and 0.0 <= ms < 1e9 for ms in found):
        return None
    return AnswerTimes(*(ms / 1e3 for ms in found))


def _message_of(text: str) -> str:
    """The message of an error body, whatever its shape."""
    try:
        body = _decode(text.encode())
    except msgspec.DecodeError:
        return " ".join(text.split())[:300]
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)[:300]
