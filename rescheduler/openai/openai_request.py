"""What a client asks for.

A body is read no further than the proxy has to: what is only handed on to an engine stays as the
bytes that came, so that no body keeps the event loop busy for long.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from msgspec import Raw

__all__ = [
    "CHAT",
    "COMPLETIONS",
    "FORWARDED",
    "NOT_SERVED",
    "UNREADABLE",
    "ClientRequest",
    "RequestRefusedError",
    "error_body",
    "read_forwarded",
    "read_request",
]

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"

FORWARDED = (
    "/v1/chat/completions/batch",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
    "/v1/embeddings",
    "/v2/embed",
    "/pooling",
    "/classify",
    "/score",
    "/v1/score",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
    "/generative_scoring",
    "/v1/systemone",
    "/invocations",
)
"""Further endpoints of vLLM: one decode instance answers, chosen by the routing policy."""
NOT_SERVED = {
    "/v1/responses/{id}": "a response is not kept: no instance knows those of the others",
    "/v1/responses/{id}/cancel": "close the connection to cancel a response",
    "/v1/audio/transcriptions": "forms are not routed; ask an engine directly",
    "/v1/audio/translations": "forms are not routed; ask an engine directly",
}
"""Endpoints of vLLM that the proxy does not have, and why."""
_DEFAULT_MAX_TOKENS = 16  # of /v1/completions
_MOST_OTHER_BYTES = 256 << 10
_MOST_MESSAGES_BYTES = 1 << 20
_PLACEHOLDER = 4  # bytes of null
_MOST_STOPS = 64
_MOST_STOP_CHARACTERS = 16 << 10


class RequestRefusedError(Exception):
    """Raised when the proxy answers a request with an error.

    Args:
        status: of the HTTP answer.
        message: what was wrong and what to do.
        param: name of the field, if it is one.
        retry_after: seconds until it is worth another try, for 429 and 503.
        kind: the error's type; None: that of the status.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        retry_after: int | None = None,
        kind: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = error_body(status, message, param, kind)
        self.retry_after = retry_after


_KINDS = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    501: "NotImplementedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    429: "RateLimitError",
    503: "ServiceUnavailableError",
}


UNREADABLE = "Bad Request"
"""The type that vLLM gives the error of a body that is no JSON object."""


def error_body(
    status: int, message: str, param: str | None = None, kind: str | None = None
) -> bytes:
    """Return an error in OpenAI's shape."""
    kind = kind or _KINDS.get(status, "InternalServerError")
    return msgspec.json.encode(
        {"error": {"message": message, "type": kind, "param": param, "code": status}}
    )


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = False


_LARGE = (
    "prompt",
    "messages",
    "input",
    "instructions",
    "system",
    "tokens",
    "text_1",
    "text_2",
    "query",
    "tools",
    "documents",
    "chat_template",
    "prompt_embeds",
    "suffix",
    "response_format",
    "structured_outputs",
    "logit_bias",
)
"""Fields of any size; all others together must be small."""


Integer = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class _Reserved(msgspec.Struct):
    """Where a client could say what only the proxy may."""

    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    vllm_xargs: Any = None


class _Read(msgspec.Struct):
    """The small fields that the proxy itself reads; all others are the engine's."""

    request_id: str | None = None
    stream: bool | None = False
    stream_options: _StreamOptions | None = None
    n: Integer | None = 1
    best_of: Integer | None = 1
    max_tokens: Integer | None = None
    max_completion_tokens: Integer | None = None
    min_tokens: Integer | None = 0
    stop: str | list[str] | None = None
    include_stop_str_in_output: bool | None = False
    skip_special_tokens: bool | None = True
    spaces_between_special_tokens: bool | None = True
    return_token_ids: bool | None = False
    echo: bool | None = False
    use_beam_search: bool | None = False
    prompt_logprobs: Integer | None = None
    include_reasoning: bool | None = True
    thinking_token_budget: Integer | None = None
    watermarking: bool | None = None


class _ReadForwarded(msgspec.Struct):
    """The fields that the proxy reads of the other endpoints."""

    request_id: str | None = None
    stream: bool | None = False
    max_tokens: Integer | None = None
    max_output_tokens: Integer | None = None
    background: bool | None = False
    previous_response_id: str | None = None


Fields = TypeVar("Fields", _Read, _ReadForwarded)


class _Part(msgspec.Struct):
    type: str = "text"


class _Message(msgspec.Struct):
    content: str | list[_Part] | None = None


_large = msgspec.json.Decoder(
    msgspec.defstruct("_Large", [(name, Raw, Raw(b"null")) for name in _LARGE])
)
_fields = msgspec.json.Decoder(dict[str, Raw])
_messages = msgspec.json.Decoder(list[_Message])
_lone = msgspec.json.Decoder(tuple[Raw])
_NOTHING = (b"null", b"[]", b'""')
_TRUE = (b"1.0", b"on", b"t", b"y", b"yes")  # further words of pydantic's for it
_DIGITS = tuple(b"%d" % digit for digit in range(10))


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """A client's request, and what of it the proxy has to know.

    Attributes:
        path: of the endpoint.
        body: its fields as they were sent.
        size: of the body, bytes.
        request_id: that the client gave it in the body.
        prompt_ids: how many token ids the prompt has; None if it is not a list of token ids.
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
    body: dict[str, Raw]
    size: int
    request_id: str | None
    prompt_ids: int | None
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


def read_request(path: str, raw: bytes, priority: bool = False) -> ClientRequest:
    """Read a request body.

    Args:
        path: of the endpoint.
        raw: the body.
        priority: whether engines see the client's ``priority``.

    Raises:
        RequestRefusedError: no JSON object, or a field that only the proxy may set.
    """
    body = _fields_of(raw)
    if not priority:
        body.pop("priority", None)
    read, unread = _checked(body, _Read)
    chat = path == CHAT
    direct, pinned = _direct(read, unread, body, chat), _pinned(read, body, chat)
    maximum = read.max_tokens
    if chat and read.max_completion_tokens is not None:
        maximum = read.max_completion_tokens
    elif not chat and "max_tokens" not in body:  # null: as many as the context holds
        maximum = _DEFAULT_MAX_TOKENS
    options = read.stream_options
    return ClientRequest(
        path=path,
        body=body,
        size=len(raw),
        request_id=read.request_id,
        prompt_ids=_prompt_ids(body.get("prompt")),
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


def read_forwarded(path: str, raw: bytes, priority: bool = False) -> ClientRequest:
    """Read the body of a request that one decode instance answers as a whole.

    Args:
        path: one of `FORWARDED`.
        raw: the body.
        priority: whether engines see the client's ``priority``.

    Raises:
        RequestRefusedError: as for `read_request`, or it needs a response of another instance.
    """
    body = _fields_of(raw)
    if not priority:
        body.pop("priority", None)
    read, unread = _checked(body, _ReadForwarded)
    for field in ("background", "previous_response_id"):
        if field in unread or getattr(read, field):
            why = "responses are not kept where every instance can find them"
            raise RequestRefusedError(400, f"`{field}` is not supported: {why}", field)
    return ClientRequest(
        path=path,
        body=body,
        size=len(raw),
        request_id=read.request_id,
        prompt_ids=None,
        stream=bool(read.stream),
        include_usage=False,
        keeps_token_ids=False,
        max_tokens=read.max_output_tokens or read.max_tokens,
        min_tokens=0,
        stop=(),
        include_stop=False,
        skip_special_tokens=True,
        spaces_between_special_tokens=True,
        direct="path",
        pinned="",
    )


def _fields_of(raw: bytes) -> dict[str, Raw]:
    """Return the fields of a body, each as its bytes.

    Millions of small fields would take seconds to read: so what is not in fields that may be
    large is weighed first. The large ones, for which all streams wait, are read only once.
    """
    try:
        encoding = json.detect_encoding(raw)
        if encoding != "utf-8":
            raw = raw.decode(encoding).encode()
        if len(raw) <= _MOST_OTHER_BYTES:
            return _fields.decode(raw)
        large = _large.decode(raw)
        found: dict[str, Raw] = msgspec.structs.asdict(large)
        given = {name: value for name, value in found.items() if len(value) > _PLACEHOLDER}
        others = len(raw) - sum(map(len, given.values()))
        if others > _MOST_OTHER_BYTES:
            raise RequestRefusedError(
                400,
                f"fields other than {', '.join(_LARGE)} take {others} bytes together, more "
                f"than {_MOST_OTHER_BYTES}",
            )
        return {**_fields.decode(_without(raw, given.values())), **given}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _unreadable(error) from error


def _without(raw: bytes, values: Iterable[Raw]) -> bytes:
    """Return a document with null in place of values that are parts of it."""
    start = _address(raw)
    cuts = sorted((_address(value) - start, len(value)) for value in values)
    parts, at = [], 0
    for offset, size in cuts:
        parts.append(raw[at:offset])
        at = offset + size
    return b"null".join([*parts, raw[at:]])


def _address(data: bytes | Raw) -> int:
    """Return where data is in memory: a value points into the document that it was read from."""
    return int(np.frombuffer(data, dtype=np.uint8).__array_interface__["data"][0])


def _unreadable(error: Exception) -> RequestRefusedError:
    message = f"the body is not a valid JSON object: {error}"
    return RequestRefusedError(400, message, "body", kind=UNREADABLE)


def _checked(body: dict[str, Raw], kind: type[Fields]) -> tuple[Fields, list[str]]:
    """Return the fields that the proxy reads, and the names of those that only an engine can.

    Numbers may be strings, as in vLLM; whatever else an engine accepts or refuses, it judges.

    Raises:
        RequestRefusedError: no JSON, or a field that only the proxy may set.
    """
    try:
        _refuse_reserved(msgspec.json.decode(_some(body, _Reserved), type=_Reserved))
        try:
            return msgspec.json.decode(_some(body, kind), type=kind, strict=False), []
        except msgspec.ValidationError:
            return _read_apart(body, kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _unreadable(error) from error


def _some(body: dict[str, Raw], kind: type[msgspec.Struct]) -> bytes:
    """Return the fields of a body that a kind has."""
    return msgspec.json.encode(
        {name: body[name] for name in kind.__struct_fields__ if name in body}
    )


def _refuse_reserved(reserved: _Reserved) -> None:
    further = reserved.vllm_xargs if isinstance(reserved.vllm_xargs, dict) else {}
    for field in ("kv_transfer_params", "ec_transfer_params"):
        if getattr(reserved, field) is not None or field in further:
            raise RequestRefusedError(400, f"`{field}` is set by the proxy; leave it out", field)


def _read_apart(body: dict[str, Raw], kind: type[Fields]) -> tuple[Fields, list[str]]:
    """Read one field after the other, where one of them is of another type."""
    read, unread = {}, []
    for field in msgspec.structs.fields(kind):
        if field.name in body:
            try:
                read[field.name] = msgspec.json.decode(
                    body[field.name], type=field.type, strict=False
                )
            except msgspec.ValidationError:
                unread.append(field.name)
    if "stream" in unread:  # how the answer comes has to be known
        read["stream"] = bytes(body["stream"]).strip(b'"').lower() in _TRUE
    return kind(**read), unread


def _direct(read: _Read, unread: list[str], body: dict[str, Raw], chat: bool) -> str:
    """Return what a request has that needs one engine for prefill and decoding, or ""."""
    if unread:
        return unread[0]
    reasons = {
        "n": (read.n or 1) != 1,
        "best_of": (read.best_of or 1) != 1,
        "stream_options": not read.stream and _is_given(body.get("stream_options")),
        "echo": read.echo,
        "use_beam_search": read.use_beam_search,
        "prompt_logprobs": read.prompt_logprobs is not None,
        "prompt_embeds": _is_given(body.get("prompt_embeds")),
        "suffix": _is_given(body.get("suffix")),
        "prompt": not chat and _several_prompts(body.get("prompt")),
    }
    return next((field for field, given in reasons.items() if given), "")


def _pinned(read: _Read, body: dict[str, Raw], chat: bool) -> str:
    """Return what a request has whose state would be lost by a move, or ""."""
    reasons = {
        "tools": _is_given(body.get("tools")),
        "include_reasoning": read.include_reasoning is False,
        "thinking_token_budget": read.thinking_token_budget is not None,
        "watermarking": read.watermarking,
        "messages": chat and _has_media(body.get("messages")),
        "stop": _are_many(read.stop),  # after a move the proxy looks for each of them
    }
    return next((field for field, given in reasons.items() if given), "")


def _are_many(stops: str | list[str] | None) -> bool:
    """Return whether stop strings are too many, or too long, to look for after each token."""
    listed = [stops] if isinstance(stops, str) else stops or []
    return len(listed) > _MOST_STOPS or sum(map(len, listed)) > _MOST_STOP_CHARACTERS


def _is_given(value: Raw | None) -> bool:
    """Return whether a field says anything."""
    return value is not None and (len(value) > 4 or bytes(value) not in _NOTHING)


def _prompt_ids(prompt: Raw | None) -> int | None:
    """Return how many token ids a prompt has; None if it is not a list of token ids."""
    if prompt is None or _first_of_list(prompt) not in _DIGITS:
        return None
    return bytes(prompt).count(b",") + 1


def _several_prompts(prompt: Raw | None) -> bool:
    if prompt is None or _first_of_list(prompt) in (b"", b"]", *_DIGITS):
        return False
    try:
        _lone.decode(prompt)
    except msgspec.DecodeError:
        return True
    return False


def _first_of_list(value: Raw) -> bytes:
    """Return the first character inside a list; nothing if it is no list."""
    start = bytes(memoryview(value)[:64])
    return start[1:].lstrip()[:1] if start[:1] == b"[" else b""


def _has_media(messages: Raw | None) -> bool:
    """Return whether messages are more than text, or too many to look at."""
    if messages is None:
        return False
    if len(messages) > _MOST_MESSAGES_BYTES:
        return True
    try:
        read = _messages.decode(messages)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return True
    parts = (
        part for message in read if isinstance(message.content, list) for part in message.content
    )
    return any(part.type != "text" for part in parts)
