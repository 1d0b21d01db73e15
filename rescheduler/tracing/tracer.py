"""Traces of requests: nobody's, where a deployment asks for none."""

from rescheduler.openai.openai_request import ClientRequest
from rescheduler.tracing.span import NO_SPAN, Span

__all__ = ["Tracer"]


class Tracer:
    """Traces nothing; `rescheduler.tracing.otlp_tracer` has the one that does."""

    def begin(
        self, client: ClientRequest, name: str, headers: dict[str, str]
    ) -> tuple[Span, dict[str, str]]:
        """Return the span of a request that has just arrived, and the headers that engines get.

        Args:
            client: what is asked for.
            name: of the request.
            headers: of the client, as far as engines get them.
        """
        del client, name
        return NO_SPAN, headers

    async def close(self) -> None:
        """Send what has not been sent yet, within a bound."""
