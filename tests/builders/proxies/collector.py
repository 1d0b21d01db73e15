"""An OpenTelemetry collector that keeps the spans it is sent, by OTLP over gRPC or HTTP."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue


@dataclass(frozen=True)
class Collected:
    """A span as it came."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    kind: int
    began: int
    ended: int
    attributes: dict[str, Any]
    events: list[str]
    failed: bool


@dataclass
class Collector:
    """What a collector has got."""

    endpoint: str = ""  # for ``proxy.traces``
    spans: list[Collected] = field(default_factory=list)  # in the order in which they came
    _came: threading.Condition = field(default_factory=threading.Condition)

    def take(self, request: ExportTraceServiceRequest) -> None:
        spans = [
            _collected(str(_value(attribute.value)), span)
            for resource in request.resource_spans
            for attribute in resource.resource.attributes
            if attribute.key == "service.name"
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        with self._came:
            self.spans += spans
            self._came.notify_all()

    def until(self, holds: Callable[[Sequence[Collected]], bool], what: str) -> None:
        """Wait until enough has come."""
        with self._came:
            if not self._came.wait_for(lambda: holds(self.spans), timeout=120):
                came = [(one.name, one.service, one.attributes) for one in self.spans]
                raise AssertionError(f"not within 120 s: {what}; {came}")

    def named(self, name: str, service: str = "headway") -> list[Collected]:
        """Those of a name, in order of time."""
        found = [one for one in self.spans if (one.name, one.service) == (name, service)]
        return sorted(found, key=lambda span: span.began)

    def one(self, name: str) -> Collected:
        """The only one of a name."""
        (span,) = self.named(name)
        return span

    @property
    def names(self) -> Counter[str]:
        """How many there are of each name."""
        return Counter(span.name for span in self.spans)


@contextmanager
def http_collector() -> Iterator[Collector]:
    """Listen for OTLP over HTTP."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.take(ExportTraceServiceRequest.FromString(body))
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:
            del format, args

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    serving = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    serving.start()
    collector.endpoint = f"http://127.0.0.1:{server.server_address[1]}/v1/traces"
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        serving.join()


@contextmanager
def grpc_collector() -> Iterator[Collector]:
    """Listen for OTLP over gRPC."""
    collector = Collector()

    class Service(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> ExportTraceServiceResponse:  # noqa: N802
            del context
            collector.take(request)
            return ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Service(), server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait()


def _collected(service: str, span: Any) -> Collected:
    return Collected(
        service,
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.kind,
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        {attribute.key: _value(attribute.value) for attribute in span.attributes},
        [event.name for event in span.events],
        span.status.code == span.status.STATUS_CODE_ERROR,
    )


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind) if kind else None
