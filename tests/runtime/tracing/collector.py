"""An OTLP/HTTP collector in this process: takes the protobuf that really comes and keeps its spans."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector:
    """delay_s, status: how it answers. spans: all that came; `resources`: what they say they are of."""

    def __init__(self) -> None:
        self.delay_s, self.status = 0.0, 200
        self.spans: list[Span] = []
        self.resources: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.url = ""

    def named(self, beginning: str) -> list[Span]:
        return [span for span in self.spans if span.name.startswith(beginning)]


def attributes(holder: Any) -> dict[str, Any]:
    """Of a span, an event or a resource."""
    return {item.key: _value(item.value) for item in holder.attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(item) for item in value.array_value.values] if kind == "array_value" else getattr(value, kind)


def events(span: Span) -> dict[str, Any]:
    return {event.name: event for event in span.events}


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["content-length"]))
            time.sleep(collector.delay_s)
            if collector.status == 200:
                assert self.headers["content-type"] == "application/x-protobuf"
                request = ExportTraceServiceRequest.FromString(data)
                for resource in request.resource_spans:
                    collector.resources.append(attributes(resource.resource))
                    for scope in resource.scope_spans:
                        collector.spans += scope.spans
            collector.paths.append(self.path)
            body = ExportTraceServiceResponse().SerializeToString()
            self.send_response(collector.status)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(body)))
            with contextlib.suppress(OSError):  # who asked may have given up
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    collector.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5.0)
