"""Traces that are sent to an OpenTelemetry collector."""

import asyncio
import random
import threading
from dataclasses import replace

from opentelemetry.context import Context
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    TraceFlags,
    set_span_in_context,
)

from rescheduler.engines.deployment import TraceOptions
from rescheduler.openai.openai_request import ClientRequest
from rescheduler.tracing.exporter import ReportedExporter
from rescheduler.tracing.recorded_span import RecordedSpan, named
from rescheduler.tracing.span import NO_SPAN, Span, Tracer, asked_attributes
from rescheduler.tracing.trace_context import TraceContext, new_context, read_traceparent

__all__ = ["OtlpTracer"]

_FLUSH_SECONDS = 2.0


class OtlpTracer(Tracer):
    """Traces a share of the requests.

    A thread of OpenTelemetry's sends the spans that have ended, from a queue in which only so
    many have room: nothing here waits for the collector.

    Args:
        options: how many requests are traced, and where their spans go.
        exporter: sends them there.
    """

    def __init__(self, options: TraceOptions, exporter: SpanExporter) -> None:
        self._options = options
        self._exporter = ReportedExporter(exporter, options.endpoint)
        # What the environment says of this process counts more than its name here.
        resource = Resource.create({"service.name": "headway"})
        self._provider = TracerProvider(
            sampler=ALWAYS_ON,  # whether a request is traced has been decided then
            resource=resource.merge(OTELResourceDetector().detect()),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("headway.proxy")

    def begin(
        self, client: ClientRequest, name: str, headers: dict[str, str]
    ) -> tuple[Span, dict[str, str]]:
        """Return the span of a request that has just arrived, and the headers that engines get.

        Engines learn of every request whether it is traced: else they would decide themselves.

        Args:
            client: what is asked for.
            name: of the request.
            headers: of the client, as far as engines get them.
        """
        parent = read_traceparent(headers.get("traceparent"))
        if parent is None:
            headers = {k: v for k, v in headers.items() if k != "tracestate"}
        if not self._samples(parent):
            context = replace(parent, sampled=False) if parent else new_context(sampled=False)
            return NO_SPAN, {**headers, "traceparent": context.header()}
        begun = self._tracer.start_span(
            "request",
            _within(parent),
            SpanKind.SERVER,
            named(asked_attributes(client, name)),
        )
        span = RecordedSpan(self._tracer, begun)
        return span, span.headers(headers)

    async def close(self) -> None:
        """Send what has not been sent yet, within two seconds; what is left then is lost."""
        sending = threading.Thread(target=self._provider.shutdown, daemon=True)
        sending.start()
        await asyncio.to_thread(sending.join, _FLUSH_SECONDS)
        if sending.is_alive():
            self._exporter.shutdown()

    def _samples(self, parent: TraceContext | None) -> bool:
        """Decide whether a request is traced.

        By chance and not by the trace's id, which a client may choose.
        """
        if parent is not None and self._options.trust_clients:
            return parent.sampled
        return random.random() < self._options.sample


def _within(parent: TraceContext | None) -> Context:
    """Return the context of a span that its client's is the parent of, or nobody's."""
    if parent is None:
        return Context()
    flags = TraceFlags(TraceFlags.SAMPLED if parent.sampled else TraceFlags.DEFAULT)
    remote = SpanContext(parent.trace, parent.span, is_remote=True, trace_flags=flags)
    return set_span_in_context(NonRecordingSpan(remote), Context())
