"""What a client asks for."""

from dataclasses import dataclass
from typing import Any

import msgspec

__all__ = [
    "CHAT",
    "COMPLETIONS",
    "ClientRequest",
    "RequestRefusedError",
    "error_body",
    "read_request",
]

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"

_DEFAULT_MAX_TOKENS = 16  # of /v1/completions


class RequestRefusedError(Exception):
    """Raised when the proxy answers a request with an error.

    Args:
        status: of the HTTP answer.
        message: what was wrong and what to do.
        param: name of the field, if it is one.
        retry_after: seconds until it is worth another try, for 429 and 503.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = error_body(status, message, param)
        self.retry_after = retry_after


_KINDS = {
    400: "BadRequestError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    413: "RequestTooLargeError",
    429: "RateLimitError",
    503: "ServiceUnavailableError",
}


def error_body(status: int, message: str, param: str | None = None) -> bytes:
    """Return an error in OpenAI's shape."""
    kind = _KINDS.get(status, "InternalServerError")
    return msgspec.json.encode(
        {"error": {"message": message, "type": kind, "param": param, "code": status}}
    )


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class _Read(msgspec.Struct):
    """The fields that the proxy itself reads; all others are the engine's."""

    stream: bool | None = False
    stream_options: _StreamOptions | None = None
    n: int | None = 1
    best_of: int | None = 1
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = 0
    stop: str | list[str] | None = None
    include_stop_str_in_output: bool | None = False
    skip_special_tokens: bool | None = True
    spaces_between_special_tokens: bool | None = True
    return_token_ids: bool | None = False
    logprobs: bool | int | None = None
    echo: bool | None = False
    use_beam_search: bool | None = False
    prompt_logprobs: int | None = None
    prompt_embeds: Any = None
    suffix: str | None = None
    tools: list[Any] | None = None
    include_reasoning: bool | None = True
    thinking_token_budget: Any = None
    watermarking: bool | None = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    vllm_xargs: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """A client's request, and what of it the proxy has to know.

    Attributes:
        path: of the endpoint.
        body: as it was sent, decoded.
        stream: the client reads tokens as they come.
        include_usage: the stream ends with a chunk of token counts.
        keeps_token_ids: the client wants to see token ids.
        max_tokens: most tokens it may generate; None: as many as the model's context holds.
        min_tokens: fewest tokens.
        stop: strings that end it.
        include_stop: whether such a string is shown.
        skip_special_tokens: whether special tokens are left out of the text.
        spaces_between_special_tokens: as in vLLM.
        direct: why it is sent to a decode instance alone, that prefills it too; empty: it
            is not. Such a request is handed through as it is and never moves.
        pinned: why it never moves once it decodes; empty: it may.
    """

    path: str
    body: dict[str, Any]
    stream: bool
    include_usage: bool
    keeps_token_ids: bool
    max_tokens: int | None
    min_tokens: int
    stop: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    direct: str
    pinned: str

    @property
    def chat(self) -> bool:
        """Whether it is a chat."""
        return self.path == CHAT

    @property
    def movable(self) -> bool:
        """Whether the proxy can move it, and resume it when its engine dies."""
        return not self.direct and not self.pinned


def read_request(path: str, raw: bytes) -> ClientRequest:
    """Read a request body.

    Raises:
        RequestRefusedError: no JSON object, a field of another type, or one that only the
            proxy may set.
    """
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestRefusedError(400, f"the body is not valid JSON: {error}") from error
    try:
        read = msgspec.convert(body, _Read)
    except msgspec.ValidationError as error:
        message, _, at = str(error).partition(" - at `$.")
        raise RequestRefusedError(400, message, at.rstrip("`") or None) from error
    for field in ("kv_transfer_params", "ec_transfer_params"):
        if getattr(read, field) is not None or field in (read.vllm_xargs or {}):
            raise RequestRefusedError(400, f"`{field}` is set by the proxy; leave it out", field)
    chat = path == CHAT
    direct, pinned = _direct(read, body, chat), _pinned(read, body, chat)
    maximum = read.max_tokens
    if chat and read.max_completion_tokens is not None:
        maximum = read.max_completion_tokens
    elif not chat and maximum is None:
        maximum = _DEFAULT_MAX_TOKENS
    options = read.stream_options
    return ClientRequest(
        path=path,
        body=body,
        stream=bool(read.stream),
        include_usage=not read.stream or bool(options and options.include_usage),
        keeps_token_ids=bool(read.return_token_ids),
        max_tokens=maximum,
        min_tokens=read.min_tokens or 0,
        stop=tuple(filter(None, [read.stop] if isinstance(read.stop, str) else read.stop or ())),
        include_stop=bool(read.include_stop_str_in_output),
        skip_special_tokens=read.skip_special_tokens is not False,
        spaces_between_special_tokens=read.spaces_between_special_tokens is not False,
        direct=direct,
        pinned=pinned,
    )


def _direct(read: _Read, body: dict[str, Any], chat: bool) -> str:
    """Return what a request has that needs one engine for prefill and decoding, or ""."""
    reasons = {
        "n": (read.n or 1) != 1,
        "best_of": (read.best_of or 1) != 1,
        "echo": read.echo,
        "use_beam_search": read.use_beam_search,
        "prompt_logprobs": read.prompt_logprobs is not None,
        "prompt_embeds": read.prompt_embeds is not None,
        "suffix": read.suffix,
        "prompt": not chat and _several_prompts(body.get("prompt")),
    }
    return next((field for field, given in reasons.items() if given), "")


def _pinned(read: _Read, body: dict[str, Any], chat: bool) -> str:
    """Return what a request has whose state would be lost by a move, or ""."""
    reasons = {
        "tools": read.tools,
        "include_reasoning": read.include_reasoning is False,
        "thinking_token_budget": read.thinking_token_budget is not None,
        "watermarking": read.watermarking,
        "messages": chat and _has_media(body.get("messages")),
    }
    return next((field for field, given in reasons.items() if given), "")


def _several_prompts(prompt: Any) -> bool:
    return isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)


def _has_media(messages: Any) -> bool:
    if not isinstance(messages, list):
        return False
    contents = (message.get("content") for message in messages if isinstance(message, dict))
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return any(isinstance(part, dict) and part.get("type", "text") != "text" for part in parts)
