"""What the trace of a request says of it, in the words of OpenTelemetry's GenAI conventions."""

import msgspec
from msgspec import Raw

from rescheduler.openai.openai_request import CHAT, COMPLETIONS, ClientRequest
from rescheduler.tracing.span import Attribute, Span

__all__ = ["asked_attributes", "end_request"]

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
