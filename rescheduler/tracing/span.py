"""A request's trace: a part of its time is a span, as the code that spends it knows it."""

import asyncio
import os
import random
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import msgspec
from msgspec import Raw
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanContext, SpanKind, StatusCode, format_span_id, format_trace_id
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from rescheduler.engines.deployment import DeploymentError
from rescheduler.engines.proxy_options import TraceOptions
from rescheduler.openai.openai_request import CHAT, COMPLETIONS, ClientRequest

if TYPE_CHECKING:  # the SDK is an extra
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter


Attribute = AttributeValue | None
"""What is said about a span; None says nothing."""

_PROPAGATOR = TraceContextTextMapPropagator()
_FLUSH_SECONDS = 2.0


class Span:
    """A span that knows its tracer; if it is not ``recorded``, compute nothing for it."""

    __slots__ = ("_span", "_tracer", "recorded")

    def __init__(self, span: trace.Span, tracer: trace.Tracer) -> None:
        self._span, self._tracer = span, tracer
        self.recorded = span.is_recording()

    def span(
        self, name: str, kind: SpanKind = SpanKind.INTERNAL, **attributes: Attribute
    ) -> AbstractContextManager["Span"]:
        """Begin a span within this one, that ends with its ``with`` block.

        It has failed if an exception leaves that; what the exception says is not kept, since it
        may quote a prompt.
        """
        return self._span_within(name, kind, attributes) if self.recorded else nullcontext(self)

    def call(self, name: str, **attributes: Attribute) -> AbstractContextManager["Span"]:
        """Begin the span of a request to an engine, whose own spans come under it."""
        return self.span(name, SpanKind.CLIENT, **attributes)

    def over(self, name: str, began: int, ended: int, **attributes: Attribute) -> None:
        """Note a span within this one that is over: from when to when, ns since 1970."""
        if not self.recorded:
            return
        named = _named(attributes)
        self._tracer.start_span(name, self._context(), attributes=named, start_time=began).end(
            ended
        )

    def set(self, **attributes: Attribute) -> None:
        """Say more about it."""
        self._span.set_attributes(_named(attributes))

    def event(self, name: str) -> None:
        """Note that something happens now."""
        self._span.add_event(name)

    def fail(self, kind: str) -> None:
        """Note that it has failed, and how: in a word, since others may read it."""
        self._span.set_attribute("error.type", kind)
        self._span.set_status(StatusCode.ERROR, kind)

    def end(self) -> None:
        """End it now."""
        self._span.end()

    def headers(self, headers: dict[str, str]) -> dict[str, str]:
        """Return the headers of a request that is sent within it."""
        if not self.recorded:
            return headers
        return {**headers, "traceparent": _traceparent(self._span.get_span_context())}

    @contextmanager
    def _span_within(
        self, name: str, kind: SpanKind, attributes: Mapping[str, Attribute]
    ) -> Iterator["Span"]:
        span = self._tracer.start_span(name, self._context(), kind, _named(attributes))
        within = Span(span, self._tracer)
        try:
            yield within
        except BaseException as error:
            within.fail(type(error).__name__)
            raise
        finally:
            within.end()

    def _context(self) -> Context:
        return trace.set_span_in_context(self._span)


NO_SPAN = Span(trace.INVALID_SPAN, trace.NoOpTracer())
"""In place of every span of a request that is not traced."""


class RequestTracer:
    """Traces a share of the requests, and never waits for a collector."""

    def __init__(
        self, options: TraceOptions, provider: "TracerProvider", exporter: "SpanExporter"
    ) -> None:
        self._options = options
        self._provider = provider
        self._exporter = exporter
        self._tracer = provider.get_tracer("headway.proxy")

    def begin(
        self, client: ClientRequest, name: str, headers: dict[str, str]
    ) -> tuple[Span, dict[str, str]]:
        """Return the span of a request that has just arrived, and the headers that engines get.

        Engines learn of every request whether it is traced: else they would decide themselves.
        """
        context = _PROPAGATOR.extract({"traceparent": headers.get("traceparent", "")})
        parent = trace.get_current_span(context).get_span_context()
        if not parent.is_valid:
            headers = {k: v for k, v in headers.items() if k != "tracestate"}
        if not self._samples(parent):
            ids = self._provider.id_generator
            trace_id = parent.trace_id or ids.generate_trace_id()
            span_id = parent.span_id or ids.generate_span_id()
            unsampled = SpanContext(trace_id, span_id, is_remote=False)
            return NO_SPAN, {**headers, "traceparent": _traceparent(unsampled)}
        attributes = _named(_asked(client, name))
        begun = self._tracer.start_span("request", context, SpanKind.SERVER, attributes)
        span = Span(begun, self._tracer)
        return span, span.headers(headers)

    async def close(self) -> None:
        """Send what has not been sent yet, within two seconds; what is left then is lost."""
        sending = threading.Thread(target=self._provider.shutdown, daemon=True)
        sending.start()
        await asyncio.to_thread(sending.join, _FLUSH_SECONDS)
        if sending.is_alive():
            self._exporter.shutdown()

    def _samples(self, parent: SpanContext) -> bool:
        """Decide by chance, and not by the trace's id, which a client may choose."""
        if parent.is_valid and self._options.trust_clients:
            return parent.trace_flags.sampled
        return random.random() < self._options.sample


def create_tracer(options: TraceOptions | None) -> RequestTracer | None:
    """Create the tracer of a deployment; without options the SDK is not even imported.

    Raises:
        DeploymentError: the SDK is not installed, or finds fault with its own variables.
    """
    if options is None or os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    try:
        from rescheduler.tracing.exporter import ReportedExporter, otlp_provider
    except ModuleNotFoundError as error:
        raise DeploymentError(
            f"proxy.traces: {error.name} is missing: pip install -e '.[traces]'"
        ) from error
    try:
        exporter = ReportedExporter(options)
        return RequestTracer(options, otlp_provider(exporter), exporter)
    except Exception as error:  # its variables are read in many places
        raise DeploymentError(f"proxy.traces: {error}; see the OTEL_ variables") from error


_NO_FAILURE = ("ok", "refused")
"""Outcomes that do not count as errors of the service: a refusal is the client's mistake."""


def end_request(span: Span, outcome: str, input_tokens: int, output_tokens: int) -> None:
    """End the span of a request, by its outcome as ``headway_proxy_requests_total`` counts it.

    Tokens are left out where there are none, or nobody counted.
    """
    counts = {"input_tokens": input_tokens, "output_tokens": output_tokens}
    usage = {f"gen_ai.usage.{k}": v for k, v in counts.items()} if output_tokens else {}
    span.set(outcome=outcome, **usage)
    if outcome not in _NO_FAILURE:
        span.fail(outcome)
    span.end()


_OPERATIONS = {
    CHAT: "chat",
    COMPLETIONS: "text_completion",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/embeddings": "embeddings",
    "/v2/embed": "embeddings",
}
_LONGEST_MODEL = 256
"""Bytes of a model's name: it is the client's, and may be as long as a body."""


def _asked(client: ClientRequest, name: str) -> dict[str, Attribute]:
    """Return what is known of a request when it arrives; nothing of what it says."""
    return {
        "gen_ai.operation.name": _OPERATIONS.get(client.path),
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": _model(client.body.get("model")),
        "gen_ai.request.max_tokens": client.max_tokens,
        "gen_ai.request.stream": client.stream,
        "http.request.method": "POST",
        "url.path": client.path,
        "request_id": name,
    }


def _model(asked: Raw | None) -> str | None:
    if asked is None or len(memoryview(asked)) > _LONGEST_MODEL:
        return None
    try:
        return msgspec.json.decode(asked, type=str)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _named(attributes: Mapping[str, Attribute]) -> dict[str, AttributeValue]:
    """Return attributes as a trace names them: those of OpenTelemetry's conventions have a dot."""
    return {
        key if "." in key else f"headway.{key}": value
        for key, value in attributes.items()
        if value is not None
    }


def _traceparent(context: SpanContext) -> str:
    """Return the header, with no flag but whether it is sampled: some read none of the newer."""
    sampled = int(context.trace_flags.sampled)
    return f"00-{format_trace_id(context.trace_id)}-{format_span_id(context.span_id)}-{sampled:02x}"
