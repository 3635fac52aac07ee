"""From a request's notes to OpenTelemetry spans: one over all attempts, a child for each. Imported only where tracing is on."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode, TraceFlags, set_span_in_context
from opentelemetry.util.types import AttributeValue

from envs.domain.requests import LATENCY_PARTS, SERVICE_CLASSES
from runtime.request_notes import AttemptNotes, RequestNotes
from runtime.tracing import names as N

Attributes = dict[str, AttributeValue]
SAMPLED = TraceFlags(TraceFlags.SAMPLED)


class _GivenIds(IdGenerator):
    """Ids were drawn when the request came, since other servers were told them."""

    trace_id = span_id = 0

    def generate_trace_id(self) -> int:
        return self.trace_id

    def generate_span_id(self) -> int:
        return self.span_id


class _Kept(SpanProcessor):
    """Ended spans, until they are sent together."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)


class SpanSender:
    """Belongs to one thread, but for `close`."""

    def __init__(self, url: str, timeout_s: float, version: str) -> None:
        # it would log each batch that a dead collector does not take
        logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter").setLevel(logging.CRITICAL)
        self._exporter = OTLPSpanExporter(endpoint=url, timeout=timeout_s)
        self._ids, self._kept = _GivenIds(), _Kept()
        provider = TracerProvider(
            sampler=ALWAYS_ON,
            resource=Resource.create({"service.name": N.PROVIDER, "service.version": version}),
            id_generator=self._ids,
            shutdown_on_exit=False,
        )
        provider.add_span_processor(self._kept)
        self._tracer = provider.get_tracer("ballast", version)
        self._epoch_ns = time.time_ns() - time.monotonic_ns()

    def send(self, batch: Sequence[RequestNotes]) -> bool:
        """Whether the collector took them; waits for it up to the timeout."""
        for notes in batch:
            self._request(notes)
            time.sleep(0)  # the event loop may want the interpreter
        spans, self._kept.spans = self._kept.spans, []
        return self._exporter.export(spans) is SpanExportResult.SUCCESS

    def close(self) -> None:
        """Ends also an export that is waiting to try again."""
        self._exporter.shutdown()

    # --------------------------------------------------------------------------------------------------------------------------

    def _ns(self, at_s: float) -> int:
        """Unix time of a monotonic one."""
        return self._epoch_ns + int(at_s * 1e9)

    def _start(self, name: str, kind: SpanKind, trace_id: int, span_id: int, parent_id: int, start_s: float, about: Attributes) -> Span:
        self._ids.trace_id, self._ids.span_id = trace_id, span_id
        context = None
        if parent_id:
            context = set_span_in_context(NonRecordingSpan(SpanContext(trace_id, parent_id, is_remote=True, trace_flags=SAMPLED)))
        span = self._tracer.start_span(name, context, kind, about, start_time=self._ns(start_s))
        assert isinstance(span, Span)
        return span

    def _event(self, span: Span, name: str, at_s: float, about: Attributes | None = None) -> None:
        if math.isfinite(at_s):
            span.add_event(name, about, self._ns(at_s))

    def _request(self, notes: RequestNotes) -> None:
        trace = notes.trace
        assert trace is not None
        operation = N.OPERATIONS[notes.kind]
        name = f"{operation} {notes.model}" if notes.model else operation
        span = self._start(name, SpanKind.SERVER, trace.trace_id, trace.span_id, trace.parent_id, notes.arrival_s, _of_request(notes))
        self._event(span, N.EVENT_ARRIVAL, notes.arrival_s)
        self._event(span, N.EVENT_PROMPT, notes.prompt_made_s)
        for choice, call in enumerate(notes.calls):
            for number, attempt in enumerate(call.attempts, start=1):
                said: Attributes = {N.CHOICE: choice, N.ATTEMPT: number, **_of_decision(attempt)}
                self._event(span, N.EVENT_QUEUE, attempt.asked_s, {N.CHOICE: choice, N.SECONDS: attempt.placed_s - attempt.asked_s})
                self._event(span, N.EVENT_ROUTE, attempt.placed_s, said)
                self._attempt(trace.trace_id, trace.span_id, said, attempt, notes.ended_s)
        self._event(span, N.EVENT_RETURN, notes.ended_s)
        if notes.error:
            span.set_attribute(N.ERROR_TYPE, notes.error)
            if notes.status >= 500 or notes.status == 200:  # a caller's mistake is none of the server's
                span.set_status(Status(StatusCode.ERROR, notes.error))
        span.end(self._ns(notes.ended_s))

    def _attempt(self, trace_id: int, parent_id: int, said: Attributes, attempt: AttemptNotes, latest_s: float) -> None:
        ended_s = attempt.ended_s if math.isfinite(attempt.ended_s) else latest_s
        about = {**said, N.OUTCOME: attempt.outcome or "abandoned", N.OUTPUT_TOKENS: attempt.tokens}
        name = f"{N.ATTEMPT_SPAN} {attempt.group}"
        span = self._start(name, SpanKind.CLIENT, trace_id, attempt.span_id, parent_id, attempt.placed_s, about)
        times = attempt.times
        self._event(span, N.EVENT_QUEUE, attempt.placed_s, {N.SECONDS: times.queue_s} if times is not None else None)
        if times is not None:
            self._event(span, N.EVENT_PREFILL, attempt.placed_s + times.queue_s, {N.SECONDS: times.prefill_s})
        self._event(span, N.EVENT_DECODE, attempt.first_s, {N.SECONDS: times.decode_s} if times is not None else None)
        if times is not None and times.parts:
            parts = dict(zip(LATENCY_PARTS, times.parts, strict=True))
            self._event(span, N.EVENT_COMMUNICATION, ended_s, {N.SECONDS: parts["communication_s"]})
            span.set_attributes({N.PART + part.removesuffix("_s"): seconds for part, seconds in parts.items()})
        if times is not None and times.hit_tokens is not None:
            span.set_attribute(N.CACHED_TOKENS, times.hit_tokens)
        if attempt.outcome == "fault":
            span.set_attributes({N.ERROR_TYPE: "backend_fault", N.REASON: attempt.reason[:256]})
            span.set_status(Status(StatusCode.ERROR, attempt.reason[:256]))
        self._event(span, N.EVENT_RETURN, attempt.last_s)
        span.end(self._ns(max(ended_s, attempt.placed_s)))


def _of_request(notes: RequestNotes) -> Attributes:
    about: Attributes = {
        N.OPERATION_NAME: N.OPERATIONS[notes.kind],
        N.PROVIDER_NAME: N.PROVIDER,
        N.REQUEST_ID: notes.request_id,
        N.REQUEST_STREAM: notes.is_stream,
        N.HTTP_STATUS: notes.status,
        N.INPUT_TOKENS: notes.prompt_tokens,
        N.OUTPUT_TOKENS: notes.output_tokens,
    }
    if notes.model:
        about |= {N.REQUEST_MODEL: notes.model, N.RESPONSE_MODEL: notes.answered_by or notes.model, N.REQUEST_CHOICES: len(notes.calls)}
        about[N.SERVICE_CLASS] = SERVICE_CLASSES[notes.class_index].name
    if notes.degraded:
        about[N.DEGRADED] = notes.degraded
    if notes.finish_reasons:
        about[N.RESPONSE_FINISH_REASONS] = notes.finish_reasons
    if math.isfinite(notes.first_text_s):
        about[N.RESPONSE_FIRST_CHUNK_S] = notes.first_text_s - notes.arrival_s
    return about


def _of_decision(attempt: AttemptNotes) -> Attributes:
    about: Attributes = {N.GROUP: attempt.group, N.DECIDED_BY: attempt.source, N.DECISION_CAUSE: attempt.cause}
    if attempt.expected_s is not None:
        about |= {N.EXPECTED_TTFT_S: float(attempt.expected_s[0]), N.EXPECTED_TPOT_S: float(attempt.expected_s[1])}
    return about
