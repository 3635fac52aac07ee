"""A call that was refused under pressure, asked of the smaller model instead, and its answer on the way to the caller: what is sent as it
comes, what is noted and counted of it. Until the first of it is here nothing has been sent, and the refusal stands."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from runtime.breaker_told import breaker_told
from runtime.gateway.answers import STREAM_HEADERS
from runtime.gateway.call_making import Asked
from runtime.gateway.errors import JSON_TYPE, ApiError, Headers
from runtime.gateway.metrics import Metrics, ModelCounts
from runtime.gateway.smaller_answer import CutShort, SmallerAnswer
from runtime.gateway.smaller_model import OUTCOMES, SmallerModel, SmallerModelSettings, Unanswered, body_for
from runtime.request_notes import AttemptNotes, CallNotes, RequestNotes

logger = logging.getLogger(__name__)

NAME = "smaller_model"
"""In the place of a group's name, and of who decided, in notes of attempts."""
Start = Callable[[Headers], Awaitable[None]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class SmallerModelDesk(Collector):
    """The smaller model that is configured now, if any, and what became of the calls for it: counts outlive a change of the model."""

    def __init__(self) -> None:
        self.model: SmallerModel | None = None
        self.counts: dict[str, int] = {}

    def use(self, settings: SmallerModelSettings | None) -> None:
        """From now on; answers under way come to their end where they are."""
        old = self.model
        if old is not None and settings is not None and old.settings.server == settings.server:
            old.settings = settings
            return
        if old is not None:
            old.retire()
        self.model = SmallerModel(settings) if settings is not None else None
        if settings is not None and not self.counts:
            self.counts = dict.fromkeys(OUTCOMES, 0)

    def close(self) -> None:
        if self.model is not None:
            self.model.close()

    def told(self) -> dict[str, Any] | None:
        """For `/admin/state`; None where there is none."""
        if self.model is None:
            return None
        settings, breaker = self.model.settings, self.model.breaker
        return {
            "url": settings.url, "model": settings.model, "classes": list(settings.classes), "in_flight": self.model.in_flight,
            "max_in_flight": settings.max_in_flight, "breaker": breaker_told(breaker, self.model.now_s()), "counts": dict(self.counts),
        }  # fmt: skip

    def collect(self) -> Iterator[Metric]:
        if not self.counts:
            return
        calls = CounterMetricFamily(
            "ballast_smaller_model_requests", "Requests refused under pressure, by what became of them there.", labels=("outcome",)
        )
        for outcome, count in self.counts.items():
            calls.add_metric((outcome,), float(count))
        yield calls
        model = self.model
        yield GaugeMetricFamily("ballast_smaller_model_in_flight", "Requests there now.", value=float(model.in_flight if model else 0))
        if model is not None:
            yield GaugeMetricFamily(
                "ballast_smaller_model_breaker_state", "0 closed, 1 open, 2 half open.", value=float(model.breaker.state)
            )


class Forwarding:
    """One request at the smaller model."""

    def __init__(self, desk: SmallerModelDesk, metrics: Metrics, notes: RequestNotes, start: Start, send: Send) -> None:
        """start: sends the head of an answer with status 200. send: sends a part of its body."""
        assert desk.model is not None
        self._desk, self._smaller, self._metrics, self._notes = desk, desk.model, metrics, notes
        self._start, self._send = start, send
        self._name = desk.model.settings.model
        self._counts: ModelCounts | None = None
        self._seen = 0

    async def run(self, asked: Asked, data: bytes, why: str, ready: Callable[[], None]) -> bool:
        """Whether the caller has its answer from there; else nothing was sent. data: the request's body. why: reason of the refusal. ready:
        called when nothing is left but to send. Raises: ApiError where a stream broke off after its beginning."""
        outcome = "abandoned"  # whatever raises
        try:
            body = body_for(asked, data, self._name)
            if body is None:
                raise Unanswered("unfit", "token ids mean something else to another tokenizer")
            await self._ask(asked, body, why, ready)
            outcome = "answered"
        except Unanswered as told:
            outcome = told.outcome
            level = logging.INFO if outcome == "failed" else logging.DEBUG  # the breaker sees to it that there are few of those
            logger.log(level, "smaller model did not answer request_id=%s outcome=%s reason=%s", self._notes.request_id, outcome, told)
            return False
        except CutShort as cut:
            outcome = "cut"
            logger.info("smaller model's stream was lost request_id=%s reason=%s", self._notes.request_id, cut)
            raise ApiError(502, f"The smaller model's stream was lost: {cut}.", code="stream_lost", reason="stream_lost") from cut
        finally:
            self._desk.counts[outcome] += 1
            if self._counts is not None and outcome != "answered":
                self._counts.finished["error" if outcome == "cut" else "abort"] += 1
                self._counts.output_tokens += self._notes.output_tokens
        return True

    async def _ask(self, asked: Asked, body: bytes, why: str, ready: Callable[[], None]) -> None:
        """Raises: Unanswered, CutShort."""
        call = asked.calls[0]
        answer = SmallerAnswer(self._smaller, asked, call.deadline_s)
        now_s = time.monotonic()
        attempt = call.notes.begin(AttemptNotes(NAME, NAME, why, now_s, now_s))
        try:
            data = await answer.begin(body, _headers(self._notes, call.notes, asked.is_stream))
            self._begun(asked, answer.degraded_there)
            if asked.is_stream:
                await self._relay(asked, answer, attempt, data, ready)
            else:
                self._whole(asked, answer)
                ready()
                await self._start([JSON_TYPE, (b"content-length", b"%d" % len(data)), self._degraded])
                await self._send({"type": "http.response.body", "body": data})
        finally:
            answer.close()
            attempt.ended_s, attempt.tokens = time.monotonic(), answer.tokens
            attempt.outcome, attempt.reason = answer.outcome, answer.reason
            if not answer.is_whole:
                self._notes.output_tokens = answer.tokens

    async def _relay(self, asked: Asked, answer: SmallerAnswer, attempt: AttemptNotes, data: bytes, ready: Callable[[], None]) -> None:
        """A stream from its first events on. Raises: CutShort."""
        self._note_text(asked, answer, attempt)
        await self._start([*STREAM_HEADERS, self._degraded])
        while not answer.is_whole:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
            data = await answer.more()
            self._note_text(asked, answer, attempt)
        self._whole(asked, answer)
        ready()
        await self._send({"type": "http.response.body", "body": data})

    @property
    def _degraded(self) -> tuple[bytes, bytes]:
        return b"x-ballast-degraded", self._notes.degraded.encode()

    def _begun(self, asked: Asked, degraded_there: str) -> None:
        """From here on it is the smaller model's answer."""
        self._counts = self._metrics.of_model(self._name)
        self._notes.answered_by = self._name
        for call in asked.calls:
            call.notes.degraded = ", ".join(filter(None, (f"model={self._name}", degraded_there)))

    def _note_text(self, asked: Asked, answer: SmallerAnswer, attempt: AttemptNotes) -> None:
        """Times of a stream's text, as the caller gets it."""
        fresh, now_s = answer.tokens - self._seen, time.monotonic()
        if not fresh or self._counts is None:
            return
        class_index = asked.calls[0].class_index
        if not self._seen:
            attempt.first_s = self._notes.first_text_s = now_s
            self._counts.ttft[class_index].add(now_s - self._notes.arrival_s)
        elif len(asked.calls) == 1:  # those of several answers come between each other
            self._counts.gap[class_index].add(now_s - attempt.last_s, fresh)
        attempt.last_s, self._seen = now_s, answer.tokens

    def _whole(self, asked: Asked, answer: SmallerAnswer) -> None:
        """Notes and counts of an answer that is whole, by the server's own usage where it tells it."""
        notes, usage = self._notes, answer.usage
        if usage is not None and usage.prompt_tokens is not None:
            notes.prompt_tokens = usage.prompt_tokens
        told = usage.completion_tokens if usage is not None else None
        notes.output_tokens = answer.tokens if told is None else told
        notes.finish_reasons = tuple(reason for _, reason in sorted(answer.finish_reasons.items()))
        if self._counts is not None:
            took_s = time.monotonic() - notes.arrival_s
            self._counts.answered(asked.calls[0].class_index, notes.prompt_tokens, notes.output_tokens, notes.finish_reasons, took_s)
            self._counts = None  # counted


def _headers(notes: RequestNotes, call: CallNotes, is_stream: bool) -> dict[str, str]:
    headers = {"content-type": "application/json", "x-request-id": notes.request_id, "x-smaller-model": "no"}
    if is_stream:
        headers["accept"] = "text/event-stream"
    if (context := call.traceparent()) is not None:
        headers["traceparent"] = context
    return headers
