"""Sending spans to a collector, which may not be there."""

import logging
from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from rescheduler.engines.deployment import TraceOptions

__all__ = ["ReportedExporter", "otlp_exporter"]

logger = logging.getLogger("headway.serve")


def otlp_exporter(options: TraceOptions) -> SpanExporter:
    """Return what sends spans to a collector, by OTLP over gRPC or HTTP."""
    if options.protocol == "grpc":
        return GrpcExporter(endpoint=options.endpoint)
    return HttpExporter(endpoint=options.endpoint)


class ReportedExporter(SpanExporter):
    """Logs one line when a collector stops to take spans, and one when it takes them again.

    OpenTelemetry itself would log each attempt.

    Args:
        exporter: sends the spans.
        endpoint: of the collector.
    """

    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        self._exporter, self._endpoint = exporter, endpoint
        self._taken = True
        library = logging.getLogger("opentelemetry")
        library.addHandler(_SAID)
        library.propagate = False
        # It warns of every span for which its queue has no room: that would cost most of all.
        logging.getLogger("opentelemetry.sdk").setLevel(logging.CRITICAL)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send spans; those that the collector does not take are lost."""
        _SAID.first = ""
        result = self._exporter.export(spans)
        taken = result is SpanExportResult.SUCCESS
        if self._taken and not taken:
            logger.warning(
                "traces: %s takes none, so they are lost: %s",
                self._endpoint,
                _SAID.first or "no reason given",
            )
        elif taken and not self._taken:
            logger.info("traces: %s takes them again", self._endpoint)
        self._taken = taken
        return result

    def shutdown(self) -> None:
        """Send no more, and give up what is being sent."""
        self._exporter.shutdown()


class _Said(logging.Handler):
    """Keeps the first thing that an exporter says of a failure, in place of a log."""

    first = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a message."""
        if record.name.startswith("opentelemetry.exporter"):
            self.first = self.first or record.getMessage()


_SAID = _Said()
