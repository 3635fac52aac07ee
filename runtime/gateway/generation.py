"""POST /v1/chat/completions and /v1/completions: from a request's bytes to its answer's, and an end to the work when its caller is gone.

These endpoints speak ASGI themselves: what a framework's request and streaming response add costs more than all that is done here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from runtime.calls import PRESSURE, Piece, Refusal
from runtime.gateway.answers import STREAM_HEADERS, Answer, Choice, deadline_passed, error_events
from runtime.gateway.api_keys import ApiKeys
from runtime.gateway.call_making import Asked, CallMaker, Received, RequestIds
from runtime.gateway.departure import Watch
from runtime.gateway.errors import JSON_TYPE, ApiError, Headers, from_refusal, internal_error
from runtime.gateway.forwarding import Forwarding, SmallerModelDesk
from runtime.gateway.interface import Dispatcher
from runtime.gateway.merging import close, merged
from runtime.gateway.metrics import Metrics
from runtime.gateway.request_headers import RequestHeaders
from runtime.gateway.settings import GatewaySettings
from runtime.request_notes import RequestNotes
from runtime.tracing.tracer import Tracer

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

LAST_WORDS_S = 5.0
"""How long a caller that does not read may hold up the event that says its deadline passed."""
RECENT_MAX = 64


class Gone(Exception):
    """The caller left; nobody is there to be told anything."""


class Generation:
    """What both endpoints share: who may come in, how many at once, and what is told them."""

    def __init__(
        self, dispatcher: Dispatcher, settings: GatewaySettings, keys: ApiKeys, maker: CallMaker, ids: RequestIds, metrics: Metrics,
        tracer: Tracer | None = None,
    ) -> None:  # fmt: skip
        self.dispatcher, self.settings, self.keys, self.maker, self.ids, self.metrics = dispatcher, settings, keys, maker, ids, metrics
        self.tracer, self.smaller = tracer, SmallerModelDesk()
        self.recent: deque[RequestNotes] = deque(maxlen=RECENT_MAX)  # the last to end
        self.is_draining = False

    def ended(self, notes: RequestNotes) -> None:
        """A request came to its end, whatever it was."""
        notes.ended_s = time.monotonic()
        self.recent.append(notes)
        self.metrics.take_notes(notes)
        for call in notes.calls:
            if call.when_over is not None:
                call.when_over()
        if self.tracer is not None:
            self.tracer.ended(notes)

    def apply(self, settings: GatewaySettings) -> None:
        """Live by other limits and keys from now on; requests inside are not asked again."""
        self.settings, self.keys = settings, ApiKeys(settings.api_keys)
        self.maker.settings = settings

    def admit(self, headers: RequestHeaders) -> None:
        """Raises: ApiError for a stranger, a body that says it is too large, or when no more are taken in."""
        self.keys.check(headers.authorization)
        length = headers.content_length
        if length is not None and length > self.settings.body_bytes_max:
            raise self.too_large()
        if self.is_draining:
            raise shutting_down()
        if self.metrics.in_flight > self.settings.requests_max:
            raise ApiError(429, f"{self.settings.requests_max} requests are being served already.", code="queue_full", reason="queue_full")

    def too_large(self) -> ApiError:
        # the rest of the body is not read: the connection ends with the answer
        return ApiError(
            413, f"The body of a request may have {self.settings.body_bytes_max} bytes.", code="request_too_large", reason="too_large",
            headers=[(b"connection", b"close")],
        )  # fmt: skip


def shutting_down() -> ApiError:
    return ApiError(503, "The service is shutting down.", code="draining", reason="draining")


class GenerationEndpoint:
    """One of the two, as an ASGI application."""

    def __init__(self, kind: str, shared: Generation) -> None:
        self._kind, self._shared = kind, shared
        self._make = shared.maker.chat if kind == "chat" else shared.maker.completion

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        metrics = self._shared.metrics
        metrics.in_flight += 1
        exchange = Exchange(self._kind, self._shared, scope, receive, send)
        try:
            await exchange.run(self._make)
        finally:
            metrics.in_flight -= 1
            metrics.body_bytes_in_flight -= exchange.body_bytes
            self._shared.ended(exchange.notes)


class Exchange:
    """One request and its answer."""

    def __init__(self, kind: str, shared: Generation, scope: Scope, receive: Receive, send: Send) -> None:
        self._kind, self._shared, self._scope, self._receive, self._send = kind, shared, scope, receive, send
        self._headers = RequestHeaders.of(scope["headers"])
        self._own_id = shared.ids.next()
        self._id_header = (b"x-request-id", (self._headers.request_id or self._own_id).encode())
        self._arrival_s = time.monotonic()
        self._has_text = False
        self._has_started = False
        self._pending = b""
        self._answer: Answer | None = None
        self.body_bytes = 0
        self.notes = RequestNotes(self._headers.request_id or self._own_id, kind, self._arrival_s)
        if shared.tracer is not None:
            self.notes.trace = shared.tracer.begin(self._headers.values.get(b"traceparent"))

    async def run(self, make: Callable[[Received], Awaitable[Asked]]) -> None:
        """To the end, whatever it is; raises only what cancels the server's own tasks."""
        watch: Watch | None = None
        error: ApiError | None = None
        try:
            self._shared.admit(self._headers)
            data = await self._read_body()
            watch = Watch(self._scope, self._receive)
            asked = await make(Received(data, self._headers, self._own_id, self._arrival_s))
            spare = data if self._may_be_smaller(asked) else None
            del data  # it is not kept while the answer is made, but for the smaller model
            self._note_asked(asked, spare is not None)
            self._shared.metrics.prompt_making.add(self.notes.prompt_made_s - self._arrival_s)
            watch.set_deadline(asked.calls[0].deadline_s - time.monotonic() + self._shared.settings.deadline_grace_s)
            await self._serve_or_forward(asked, watch, spare)
        except Gone:
            self._count_departure()
        except asyncio.CancelledError:
            if watch is not None and (watch.has_left or watch.is_late):
                watch.take_back()
                if watch.has_left:
                    self._count_departure()
                else:
                    error = deadline_passed()
            elif self._shared.is_draining and (task := asyncio.current_task()) is not None:
                task.uncancel()  # the server's patience is at its end: its callers are told so
                error = shutting_down()
            else:
                raise
        except ApiError as told:
            error = told
        except Refusal as refusal:
            error = from_refusal(refusal)
        except Exception:
            logger.exception("request failed request_id=%s", self._own_id)
            error = internal_error()
        finally:
            if watch is not None:
                watch.stop()
        if error is not None:
            # a caller that reads nothing must not hold this up for ever
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORDS_S):
                    await self._tell(error)

    def _may_be_smaller(self, asked: Asked) -> bool:
        """Raises: ApiError 400 for a header that says neither."""
        model = self._shared.smaller.model
        return model is not None and self._headers.allows_smaller_model and model.serves(asked.calls[0].class_index)

    def _note_asked(self, asked: Asked, has_smaller: bool) -> None:
        notes, first = self.notes, asked.calls[0]
        notes.prompt_made_s, notes.is_stream = time.monotonic(), asked.is_stream
        notes.model, notes.class_index = asked.model, first.class_index
        notes.calls = [call.notes for call in asked.calls]
        notes.prompt_tokens = sum(prompt.tokens for prompt in asked.prompts)
        for call in notes.calls:
            call.trace, call.has_smaller = notes.trace, has_smaller

    async def _read_body(self) -> bytes:
        """Raises: ApiError 413 for too many bytes, 429 when all together are too many, 408 when they do not come."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise Gone
        data: bytes = message.get("body", b"")
        self._reserve(len(data))
        if not message.get("more_body"):
            return data
        parts = [data]
        try:
            async with asyncio.timeout(self._shared.settings.body_wait_s):
                while message.get("more_body"):
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise Gone
                    parts.append(message.get("body", b""))
                    self._reserve(len(parts[-1]))
        except TimeoutError:
            raise ApiError(
                408, f"The body did not come within {self._shared.settings.body_wait_s:g} s.", code="body_timeout", reason="too_slow",
                headers=[(b"connection", b"close")],
            ) from None  # fmt: skip
        return b"".join(parts)

    def _reserve(self, more_bytes: int) -> None:
        metrics, settings = self._shared.metrics, self._shared.settings
        self.body_bytes += more_bytes
        metrics.body_bytes_in_flight += more_bytes
        if self.body_bytes > settings.body_bytes_max:
            raise self._shared.too_large()
        if metrics.body_bytes_in_flight > settings.body_bytes_in_flight_max:
            raise ApiError(
                429, "The bodies of all requests together are too large just now.", code="queue_full", reason="queue_full",
                headers=[(b"connection", b"close")],
            )  # fmt: skip

    async def _serve_or_forward(self, asked: Asked, watch: Watch, spare: bytes | None) -> None:
        """spare: the body, where a refusal under pressure need not be the end."""
        try:
            await self._serve(asked, watch)
        except Refusal as refusal:
            smaller = self._shared.smaller
            if spare is None or smaller.model is None or refusal.reason not in PRESSURE or self._has_started:
                raise
            forwarding = Forwarding(smaller, self._shared.metrics, self.notes, self._start_forwarded, self._send)
            if not await forwarding.run(asked, spare, refusal.reason, watch.stop):
                raise

    async def _start_forwarded(self, headers: Headers) -> None:
        self._answer = None  # it is another model's, which has counts of its own
        await self._start(200, headers)

    async def _serve(self, asked: Asked, watch: Watch) -> None:
        answer = self._answer = Answer(asked)
        self._gaps = self._shared.metrics.of_model(asked.model).gap[asked.calls[0].class_index]
        if len(asked.calls) == 1:  # nearly all requests
            pieces = self._shared.dispatcher.run(asked.calls[0])
            try:
                async for piece in pieces:
                    await self._show(answer, 0, piece)
            finally:
                await close(pieces)
        else:
            of_all = merged(asked.calls, self._shared.dispatcher.run)
            try:
                async for place, piece in of_all:
                    await self._show(answer, place, piece)
            finally:
                await of_all.aclose()
        self._check_whole(answer)
        last = self._pending + answer.last_events() if asked.is_stream else answer.json()
        watch.stop()
        self._count_answer(answer)
        if not asked.is_stream:
            await self._start(200, [JSON_TYPE, (b"content-length", b"%d" % len(last)), *self._degraded])
        await self._send({"type": "http.response.body", "body": last})

    async def _show(self, answer: Answer, place: int, piece: Piece) -> None:
        """Take a piece in, and send what it adds to a stream. The status waits for the first piece, since until then a refusal is an answer
        of its own. The last piece goes out together with what ends the stream."""
        choice = answer.choices[place]
        if choice.finish_reason is not None:  # a backend's afterthought is not shown
            return
        is_stream = answer.asked.is_stream
        self._take(answer, choice, piece, is_kept=not is_stream)
        if not is_stream:
            return
        self._pending += answer.events(place, piece)
        if not self._has_started:
            await self._start(200, [*STREAM_HEADERS, *self._degraded])
        if self._pending and (piece.finish_reason is None or any(choice.finish_reason is None for choice in answer.choices)):
            data, self._pending = self._pending, b""
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    @property
    def _degraded(self) -> Headers:
        told = self.notes.degraded
        return [(b"x-ballast-degraded", told.encode())] if told else []

    def _take(self, answer: Answer, choice: Choice, piece: Piece, is_kept: bool) -> None:
        choice.take(piece, is_kept)
        if piece.token is None and not piece.text:
            return
        now_s = time.monotonic()
        if choice.last_token_s is not None:
            self._gaps.add(now_s - choice.last_token_s, piece.tokens)
        choice.last_token_s = now_s
        if not self._has_text and (piece.text or piece.logprobs is not None):
            self._has_text = True
            self.notes.first_text_s = now_s
            asked = answer.asked
            self._shared.metrics.of_model(asked.model).ttft[asked.calls[0].class_index].add(now_s - self._arrival_s)

    def _check_whole(self, answer: Answer) -> None:
        """Raises: ApiError when an answer just stopped: never passed off as whole."""
        if any(choice.finish_reason is None for choice in answer.choices):
            raise ApiError(502, "The answer ended without its last token.", code="answer_ended_early", reason="answer_ended_early")

    async def _start(self, status: int, headers: Any) -> None:
        self._has_started = True
        self.notes.status = status
        self._shared.metrics.count_request(self._kind, status)
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, self._id_header]})

    async def _tell(self, error: ApiError) -> None:
        metrics = self._shared.metrics
        metrics.count_refusal(error.reason)
        self.notes.error = error.reason
        self._count_end("error")
        if self._has_started:
            metrics.broken_streams += 1
            await self._send({"type": "http.response.body", "body": error_events(error)})
            return
        body = error.json()
        headers = [*error.headers(self._shared.settings.retry_after_s), (b"content-length", b"%d" % len(body))]
        await self._start(error.status, headers)
        await self._send({"type": "http.response.body", "body": body})

    def _count_departure(self) -> None:
        self._shared.metrics.departures += 1
        self.notes.error = "departed"
        self._count_end("abort")

    def _count_end(self, how: str) -> None:
        """An answer that was begun and is not whole."""
        if self._answer is not None:
            counts = self._shared.metrics.of_model(self._answer.asked.model)
            counts.finished[how] += 1
            self.notes.output_tokens = sum(choice.tokens_made for choice in self._answer.choices)
            counts.output_tokens += self.notes.output_tokens

    def _count_answer(self, answer: Answer) -> None:
        usage, notes = answer.usage(), self.notes
        notes.prompt_tokens, notes.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        notes.finish_reasons = tuple(choice.finish_reason or "" for choice in answer.choices)
        self._shared.metrics.of_model(answer.asked.model).answered(
            answer.asked.calls[0].class_index, notes.prompt_tokens, notes.output_tokens, notes.finish_reasons,
            time.monotonic() - self._arrival_s,
        )  # fmt: skip
        self._answer = None  # counted
