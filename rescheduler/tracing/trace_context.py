"""The W3C trace context: which trace a request belongs to, and whether that is recorded."""

import random
import re
from dataclasses import dataclass

__all__ = ["TraceContext", "new_context", "read_traceparent"]

_TRACEPARENT = re.compile(r"(?!ff)([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_SAMPLED = 1


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span, as others refer to it.

    Attributes:
        trace: id of the trace.
        span: id of the span, which becomes the parent of those that its holder begins.
        sampled: whether the trace is recorded.
    """

    trace: int
    span: int
    sampled: bool

    def header(self) -> str:
        """Return it as ``traceparent``."""
        return f"00-{self.trace:032x}-{self.span:016x}-{int(self.sampled):02x}"


def new_context(sampled: bool) -> TraceContext:
    """Return the context of a trace that nobody else knows."""
    return TraceContext(random.randrange(1, 1 << 128), random.randrange(1, 1 << 64), sampled)


def read_traceparent(header: str | None) -> TraceContext | None:
    """Return what a client's ``traceparent`` says; None if it is missing or malformed.

    Later versions of the format may append fields, as the specification has it.
    """
    found = _TRACEPARENT.match(header) if header is not None else None
    if header is None or found is None:
        return None
    version, trace, span, flags = found.groups()
    rest = header[found.end() :]
    if rest and (version == "00" or not rest.startswith("-")):
        return None
    context = TraceContext(int(trace, 16), int(span, 16), bool(int(flags, 16) & _SAMPLED))
    return context if context.trace and context.span else None
