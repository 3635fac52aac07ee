"""Takes finished requests' notes to an OpenTelemetry collector, in a thread of its own: bounded, dropping and counting what is too much.

A collector that is slow, dead or talks nonsense holds up nobody: the event loop puts notes into a queue and never waits for room.
"""

from __future__ import annotations

import logging
import math
import queue
import random
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from envs.scenario.scenario_error import shown
from runtime.request_notes import RequestNotes, TraceIds

if TYPE_CHECKING:
    from runtime.tracing.spans import SpanSender

logger = logging.getLogger(__name__)

DEFAULT_ENDPOINT = "http://127.0.0.1:4318"
QUEUE_MAX = 2048
BATCH_MAX = 16  # requests: small batches, since encoding one holds the interpreter
LINGER_S = 0.5
CLOSE_S = 2.0
CONTEXT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class TracingSettings:
    """endpoint: of an OTLP/HTTP collector; without a path, /v1/traces is meant. share: of requests without a caller's trace that are
    traced, 0 to 1. timeout_s: what the collector gets for a batch."""

    endpoint: str = DEFAULT_ENDPOINT
    share: float = 1.0
    timeout_s: float = 5.0

    def __post_init__(self) -> None:
        if not self.endpoint.startswith(("http://", "https://")):
            raise ValueError(f"TracingSettings: endpoint={shown(self.endpoint)} must begin with http:// or https://")
        if not 0.0 <= self.share <= 1.0:
            raise ValueError(f"TracingSettings: share={self.share} must be within 0 to 1")
        if not (math.isfinite(self.timeout_s) and self.timeout_s > 0.0):
            raise ValueError(f"TracingSettings: timeout_s={self.timeout_s} must be a positive number of seconds")

    @property
    def url(self) -> str:
        scheme, _, rest = self.endpoint.partition("://")
        host, _, path = rest.partition("/")
        return f"{scheme}://{host}/{path or 'v1/traces'}"


def context_of(traceparent: bytes | None) -> tuple[int, int, bool] | None:
    """(trace id, span id, sampled) of a W3C traceparent header; None for none, or for one that is not valid."""
    match = CONTEXT.fullmatch(traceparent.strip()) if traceparent is not None and len(traceparent) <= 256 else None
    if match is None:
        return None
    version, trace_id, span_id = match[1], int(match[2], 16), int(match[3], 16)
    if version == b"ff" or not trace_id or not span_id or (version == b"00" and match[5]):
        return None
    return trace_id, span_id, bool(int(match[4], 16) & 1)


class Tracer(Collector):
    """`begin` and `ended` belong to the event loop; what they do takes microseconds, whatever the collector does."""

    def __init__(self, settings: TracingSettings, version: str, seed: int | None = None) -> None:
        # imported here: without tracing the gateway neither loads nor pays for OpenTelemetry
        from runtime.tracing.spans import SpanSender

        self._settings = settings
        self._random = random.Random(seed)
        self._waiting: queue.Queue[RequestNotes] = queue.Queue(QUEUE_MAX)
        self._is_closing = threading.Event()
        self.exported = self.failed = self.dropped = 0
        self._was_sent = True
        self._sender: SpanSender = SpanSender(settings.url, settings.timeout_s, version)
        self._thread = threading.Thread(target=self._work, name="tracing", daemon=True)
        self._thread.start()

    def begin(self, traceparent: bytes | None) -> TraceIds | None:
        """A request's place in its caller's trace, or in a new one; None where it is not to be traced (a caller's choice is followed)."""
        caller = context_of(traceparent)
        if caller is not None:
            return TraceIds(caller[0], caller[1], self._random.getrandbits) if caller[2] else None
        if self._random.random() >= self._settings.share:
            return None
        return TraceIds(self._random.getrandbits(128) or 1, 0, self._random.getrandbits)

    def ended(self, notes: RequestNotes) -> None:
        """Hand over a request that has ended; never waits."""
        if notes.trace is None:
            return
        try:
            self._waiting.put_nowait(notes)
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Send what is left, for CLOSE_S at most."""
        self._is_closing.set()
        self._thread.join(CLOSE_S)
        self._sender.close()
        self._thread.join(CLOSE_S)

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily("ballast_traces", "Traced requests by what became of their spans.", labels=("outcome",))
        for outcome in ("exported", "failed", "dropped"):
            family.add_metric((outcome,), float(getattr(self, outcome)))
        yield family
        yield GaugeMetricFamily("ballast_traces_waiting", "Traced requests not yet sent.", value=float(self._waiting.qsize()))

    # --- the thread -----------------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while not self._is_closing.is_set() or not self._waiting.empty():
            batch = self._next_batch()
            if not batch:
                continue
            try:
                is_sent = self._sender.send(batch)
            except Exception as error:  # a fault of tracing must end neither the thread nor anything else
                logger.warning("traces not sent requests=%d reason=%s: %s", len(batch), type(error).__name__, error)
                is_sent = False
            if is_sent:
                self.exported += len(batch)
            else:
                self.failed += len(batch)
            self._note(is_sent)

    def _note(self, is_sent: bool) -> None:
        """One line when the collector goes, one when it comes back; between them the counters tell."""
        if is_sent is not self._was_sent:
            self._was_sent = is_sent
            if is_sent:
                logger.info("traces are taken url=%s", self._settings.url)
            else:
                logger.warning("traces are not taken url=%s; see ballast_traces_total", self._settings.url)

    def _next_batch(self) -> list[RequestNotes]:
        """Up to BATCH_MAX requests, as soon as there are so many or the first has waited LINGER_S."""
        try:
            batch = [self._waiting.get(timeout=LINGER_S)]
        except queue.Empty:
            return []
        end_s = time.monotonic() + LINGER_S
        while len(batch) < BATCH_MAX and (left_s := end_s - time.monotonic()) > 0.0:
            try:
                batch.append(self._waiting.get(timeout=0.0 if self._is_closing.is_set() else left_s))
            except queue.Empty:
                break
        return batch
