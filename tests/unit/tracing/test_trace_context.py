"""The header ``traceparent``, read as OpenTelemetry's own propagator reads it."""

from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.trace import get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from rescheduler.tracing.trace_context import TraceContext, new_context, read_traceparent

_DIGITS = "0123456789abcdef"
ALMOST = st.builds(
    "{}-{}-{}-{}{}".format,
    st.text("0123f", min_size=2, max_size=2),
    st.text(_DIGITS, min_size=31, max_size=33) | st.just("0" * 32),
    st.text(_DIGITS, min_size=16, max_size=16) | st.just("0" * 16),
    st.text(_DIGITS, min_size=1, max_size=2),
    st.sampled_from(["", "-", "-more", "more", "0"]),
)


@given(ALMOST | st.text(max_size=60))
def test_a_header_is_read_as_opentelemetry_reads_it(header: str) -> None:
    header = "".join(header.split())
    context = TraceContextTextMapPropagator().extract({"traceparent": header})
    expected = get_current_span(context).get_span_context()
    read = read_traceparent(header)
    assert (read is not None) == expected.is_valid
    if read is not None:
        assert (read.trace, read.span) == (expected.trace_id, expected.span_id)
        assert read.sampled == expected.trace_flags.sampled


@given(st.integers(1, (1 << 128) - 1), st.integers(1, (1 << 64) - 1), st.booleans())
def test_a_header_says_what_its_context_is(trace: int, span: int, sampled: bool) -> None:
    context = TraceContext(trace, span, sampled)
    assert read_traceparent(context.header()) == context


def test_contexts_differ() -> None:
    assert new_context(sampled=False) != new_context(sampled=False)
