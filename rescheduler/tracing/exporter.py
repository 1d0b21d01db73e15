"""Sending spans to a collector, which may not be there."""

import logging
from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from rescheduler.engines.proxy_options import TraceOptions

logger = logging.getLogger("headway.serve")


def otlp_provider(exporter: SpanExporter) -> TracerProvider:
    """Return what records every span, and has a thread send those that have ended."""
    # What the environment says of this process counts more than its name here.
    resource = Resource.create({"service.name": "headway"})
    provider = TracerProvider(
        sampler=ALWAYS_ON,  # whether a request is traced has been decided then
        resource=resource.merge(OTELResourceDetector().detect()),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


class ReportedExporter(SpanExporter):
    """Sends spans by OTLP, over gRPC or HTTP.

    Logs one line when the collector stops to take them, and one when it takes them again.
    OpenTelemetry itself would log each attempt.
    """

    def __init__(self, options: TraceOptions) -> None:
        exporter = GrpcExporter if options.protocol == "grpc" else HttpExporter
        self._exporter: SpanExporter = exporter(endpoint=options.endpoint)
        self._endpoint, self._taken = options.endpoint, True
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
            said = _SAID.first or "no reason given"
            logger.warning("traces: %s takes none, so they are lost: %s", self._endpoint, said)
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
        if record.name.startswith("opentelemetry.exporter"):
            self.first = self.first or record.getMessage()


_SAID = _Said()
