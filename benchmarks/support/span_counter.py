"""An OpenTelemetry collector that counts the spans it gets and forgets them."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse


class SpanCounter(trace_service_pb2_grpc.TraceServiceServicer):
    """Counts what it is sent by OTLP over gRPC."""

    endpoint = ""
    spans = 0

    def Export(self, request: Any, context: Any) -> ExportTraceServiceResponse:  # noqa: N802
        del context
        scopes = (scope for resource in request.resource_spans for scope in resource.scope_spans)
        self.spans += sum(len(scope.spans) for scope in scopes)
        return ExportTraceServiceResponse()


@contextmanager
def span_counter() -> Iterator[SpanCounter]:
    """Listen on a free port, in a thread of this process."""
    counter = SpanCounter()
    server = grpc.server(ThreadPoolExecutor(1))
    add = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
    add(counter, server)  # type: ignore[no-untyped-call]
    counter.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield counter
    finally:
        server.stop(None).wait()
