"""A part of a request's time, as the code that spends it knows it."""

from collections.abc import Sequence
from types import TracebackType
from typing import Self

import msgspec
from msgspec import Raw

from rescheduler.openai.openai_request import CHAT, COMPLETIONS, ClientRequest

__all__ = ["NO_SPAN", "Attribute", "Span", "Tracer", "asked_attributes", "end_request"]


Attribute = str | bool | int | float | Sequence[str] | Sequence[int] | Sequence[float] | None
"""What is said about a span; None says nothing."""


class Span:
    """A span that nobody records; `rescheduler.tracing.recorded_span` has those that are.

    It ends with its ``with`` block, and has failed if an exception leaves that.
    """

    __slots__ = ()

    recorded: bool = False
    """Whether what it is told is kept: if not, do not compute anything for it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end(error)

    def span(self, name: str, **attributes: Attribute) -> "Span":
        """Begin a span within this one."""
        del name, attributes
        return self

    def call(self, name: str, **attributes: Attribute) -> "Span":
        """Begin the span of a request to an engine, whose own spans come under it."""
        del name, attributes
        return self

    def over(self, name: str, began: int, ended: int, **attributes: Attribute) -> None:
        """Note a span within this one that is over: from when to when, ns since 1970."""

    def set(self, **attributes: Attribute) -> None:
        """Set attributes."""

    def event(self, name: str) -> None:
        """Note that something happens now."""

    def fail(self, kind: str) -> None:
        """Note that it has failed, and how: in a word, since others may read it."""

    def end(self, error: BaseException | None = None) -> None:
        """End it now; what an error says is not kept, since it may quote a prompt."""

    def headers(self, headers: dict[str, str]) -> dict[str, str]:
        """Return the headers of a request that is sent within it."""
        return headers


NO_SPAN = Span()
"""In place of every span of a request that is not traced."""


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


_OPERATIONS = {
    CHAT: "chat",
    COMPLETIONS: "text_completion",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/embeddings": "embeddings",
    "/v2/embed": "embeddings",
}
_NO_FAILURE = ("ok", "refused")
"""Outcomes that are no error of the service: what is refused is the client's mistake."""
_LONGEST_MODEL = 256
"""Bytes of a model's name: it is the client's, and may be as long as a body."""


def asked_attributes(client: ClientRequest, name: str) -> dict[str, Attribute]:
    """Return what is known of a request when it arrives; nothing of what it says.

    Args:
        client: what is asked for.
        name: of the request.
    """
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


def end_request(span: Span, outcome: str, input_tokens: int, output_tokens: int) -> None:
    """End the span of a request.

    Args:
        span: of the request.
        outcome: as ``headway_proxy_requests_total`` counts it.
        input_tokens: of its prompt.
        output_tokens: that it has generated; 0 if there are none, or nobody counted.
    """
    span.set(outcome=outcome)
    if output_tokens:
        span.set(
            **{
                "gen_ai.usage.input_tokens": input_tokens,
                "gen_ai.usage.output_tokens": output_tokens,
            }
        )
    if outcome not in _NO_FAILURE:
        span.fail(outcome)
    span.end()


def _model(asked: Raw | None) -> str | None:
    """Return the model that a request names, if that can be one."""
    if asked is None or len(memoryview(asked)) > _LONGEST_MODEL:
        return None
    try:
        return msgspec.json.decode(asked, type=str)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
