"""Spans that OpenTelemetry records."""

from collections.abc import Mapping

from opentelemetry.trace import Span as OpenTelemetrySpan
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.util.types import AttributeValue

from rescheduler.tracing.span import Attribute, Span
from rescheduler.tracing.trace_context import TraceContext

__all__ = ["RecordedSpan", "named"]


class RecordedSpan(Span):
    """A span that is recorded, and is exported when it ends.

    Args:
        tracer: begins the spans within it.
        span: begun.
    """

    __slots__ = ("_span", "_tracer", "_within")

    recorded = True

    def __init__(self, tracer: Tracer, span: OpenTelemetrySpan) -> None:
        self._tracer, self._span = tracer, span
        self._within = set_span_in_context(span)

    def span(self, name: str, **attributes: Attribute) -> Span:
        """Begin a span within this one."""
        begun = self._tracer.start_span(name, self._within, attributes=named(attributes))
        return RecordedSpan(self._tracer, begun)

    def call(self, name: str, **attributes: Attribute) -> Span:
        """Begin the span of a request to an engine, whose own spans come under it."""
        begun = self._tracer.start_span(
            name, self._within, SpanKind.CLIENT, attributes=named(attributes)
        )
        return RecordedSpan(self._tracer, begun)

    def over(self, name: str, began: int, ended: int, **attributes: Attribute) -> None:
        """Note a span within this one that is over: from when to when, ns since 1970."""
        span = self._tracer.start_span(
            name, self._within, attributes=named(attributes), start_time=began
        )
        span.end(ended)

    def set(self, **attributes: Attribute) -> None:
        """Set attributes."""
        self._span.set_attributes(named(attributes))

    def event(self, name: str) -> None:
        """Note that something happens now."""
        self._span.add_event(name)

    def fail(self, kind: str) -> None:
        """Note that it has failed, and how: in a word, since others may read it."""
        self._span.set_attribute("error.type", kind)
        self._span.set_status(Status(StatusCode.ERROR, kind))

    def end(self, error: BaseException | None = None) -> None:
        """End it now; what an error says is not kept, since it may quote a prompt."""
        if error is not None:
            self.fail(type(error).__name__)
        self._span.end()

    def headers(self, headers: dict[str, str]) -> dict[str, str]:
        """Return the headers of a request that is sent within it."""
        context = self._span.get_span_context()
        parent = TraceContext(context.trace_id, context.span_id, True)
        return {**headers, "traceparent": parent.header()}


def named(attributes: Mapping[str, Attribute]) -> dict[str, AttributeValue]:
    """Return attributes under the names that they have in a trace.

    Those that OpenTelemetry's conventions name have a dot in theirs.
    """
    return {
        key if "." in key else f"headway.{key}": value
        for key, value in attributes.items()
        if value is not None
    }
