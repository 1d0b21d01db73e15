"""What a client asks for, and the errors that it is answered with."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite, nan
from typing import Any

import msgspec
from msgspec import Raw
from msgspec.json import encode

from data_collection.capture.requests import MIGRATION_PARAMS
from rescheduler.transfer.migration_params import Suspended, signed

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"

FORWARDED = (
    "/v1/chat/completions/batch",
    "/v1/responses",
    MESSAGES,
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
ALWAYS_STREAM = (COMPLETIONS, CHAT, "/v1/responses", MESSAGES)
"""Endpoints that answer with a stream whenever they are asked for one."""
NOT_SERVED = {
    "/v1/responses/{id}": "a response is not kept: no instance knows those of the others",
    "/v1/responses/{id}/cancel": "close the connection to cancel a response",
    "/v1/audio/transcriptions": "forms are not routed; ask an engine directly",
    "/v1/audio/translations": "forms are not routed; ask an engine directly",
}
"""Endpoints of vLLM that the proxy does not have, and why."""


LONGEST_MODEL = 160
"""Characters of a model's name by which requests are placed."""


class RequestRefusedError(Exception):
    """Raised when the proxy answers a request with an error.

    Args:
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
    422: "UnprocessableEntityError",
    429: "RateLimitError",
    503: "ServiceUnavailableError",
}


MOST_TOKENS = 1 << 24
MOST_ANSWERS = 1 << 14
"""Of a prompt, or of an answer: no model's context holds as many."""

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


@dataclass(frozen=True, slots=True)
class TextRules:
    """How tokens become text, and which text ends a request.

    Attributes:
        stop: strings that end it.
        include_stop: whether such a string is shown.
        min_tokens: tokens before which none is looked for.
        skip_special_tokens: whether special tokens are left out.
        spaces_between_special_tokens: whether the tokenizer may put spaces between them.
    """

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """A client's request, and what of it the proxy has to know.

    Attributes:
        path: of the endpoint.
        body: its fields as they were sent.
        size: of the body, bytes.
        media: bytes of it that are pictures and the like, which say nothing of its tokens.
        request_id: that the client gave it in the body.
        model: that it is for, such as a LoRA adapter; empty if no instance can be chosen by it.
        prompt_ids: how many token ids the prompt has; None if it is not a list of token ids.
        stream: the client reads tokens as they come.
        stream_interval: tokens between two chunks of its stream.
        include_usage: the stream ends with a chunk of token counts.
        keeps_token_ids: the client wants to see token ids.
        max_tokens: most tokens it may generate, at least 1 and at most `MOST_TOKENS`; None: as
            many as the model's context holds.
        fewest_tokens: that it will generate: all of them where only ``max_tokens`` can end it.
        answers: that it asks for, at most `MOST_ANSWERS`.
        text: how its tokens become text, and which text ends it.
        tier: its ``service_tier``: the class whose level of promises it takes.
        finish_in: seconds from its arrival within which it must finish, or be refused.
        finish_by: seconds since 1970, likewise.
        finish_level: probability with which; None: that of its class.
        progress: its stream tells in comments when it is expected to finish.
        direct: why it is sent to a decode instance alone, that prefills it too; empty: it
            is not. Such a request is handed through as it is and never moves.
        pinned: why it never moves once it decodes; empty: it may.
        tools: it has tools, so that its answer is parsed for calls of them.
    """

    path: str
    body: dict[str, Raw]
    size: int
    request_id: str | None
    stream: bool
    max_tokens: int | None
    media: int = 0
    prompt_ids: int | None = None
    stream_interval: int = 1
    model: str = ""
    include_usage: bool = False
    keeps_token_ids: bool = False
    fewest_tokens: int = 0
    answers: int = 1
    text: TextRules = TextRules()
    tier: str = "default"
    finish_in: float | None = None
    finish_by: float | None = None
    finish_level: float | None = None
    progress: bool = False
    direct: str = ""
    pinned: str = ""
    tools: bool = False

    def pinned_by(self, why: str) -> "ClientRequest":
        """Return it as a request that never moves; its engine sends the chunks it asks for."""
        body = self.body
        if self.stream_interval > 1:
            body = {**body, "stream_interval": Raw(b"%d" % self.stream_interval)}
        return replace(self, body=body, pinned=self.pinned or why)

    @property
    def chat(self) -> bool:
        """Whether it is a chat."""
        return self.path == CHAT

    @property
    def background(self) -> bool:
        """Whether it is to be served after all others."""
        return self.tier == "flex"

    @property
    def movable(self) -> bool:
        """Whether the proxy can move it, and resume it when its engine dies."""
        return not self.direct and not self.pinned


_NOT_FOR_PREFILL = (
    "stream_options",
    "stream_interval",
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "stop",  # ends the request as an abort, which keeps no blocks
    "logprobs",
    "top_logprobs",
    "logprob_token_ids",
    "return_token_ids",
    "return_prompt_text",
)
_FOR_COPIES = ("model", "cache_salt", "priority")
"""With which tokens, and how urgently: what makes their blocks the same as the request's."""
_NOT_FOR_RESUMED = (
    "stop",  # the proxy looks for it, since the engine does not know the text before
    "truncate_prompt_tokens",
    "truncation_side",
    "return_prompt_text",
)


class EngineBodies:
    """Writes the bodies of requests to engines.

    In the name of a client's request, by its migration id and the number of its placements before:
    on prefill instances for `prefill`, else on decode instances.

    Args:
        secret: shared with the engines, which then ignore ``kv_transfer_params`` that it has not
            signed; None: they take any.
    """

    def __init__(self, secret: bytes | None = None) -> None:
        self._secret = secret

    def prefill(self, request: ClientRequest, id: str, hop: int) -> bytes:
        """Return what a prefill instance is asked: the prompt's KV cache, and no text."""
        body: dict[str, Any] = {
            key: value for key, value in request.body.items() if key not in _NOT_FOR_PREFILL
        }
        body["max_completion_tokens" if request.chat else "max_tokens"] = 1
        body["stream"] = False
        prefill = {"do_remote_decode": True, "do_remote_prefill": False}
        body["kv_transfer_params"] = self._transfer(
            prefill, id=id, hop=hop, max_tokens=request.max_tokens
        )
        return encode(body)

    def decode(
        self,
        request: ClientRequest,
        id: str,
        hop: int,
        params: dict[str, Any] | None,
        suspended: Suspended = None,
    ) -> bytes:
        """Return what a decode instance is asked for a request that has no token yet.

        Without the ``kv_transfer_params`` of a prefill's answer it prefills the request itself.
        """
        body: dict[str, Any] = dict(request.body)
        if request.movable:
            _stream_tokens(request, body)
        if not request.direct:
            # The engine streams tokens to the proxy, and parses all of them at the end.
            parsed_whole = request.tools and request.movable and not request.stream
            more = _some(answer={"whole": True} if parsed_whole else None, suspended=suspended)
            body["kv_transfer_params"] = self._transfer(params or {}, id=id, hop=hop, **more)
        return encode(body)

    def resumed(
        self,
        request: ClientRequest,
        id: str,
        hop: int,
        prompt_token_ids: list[int],
        output_token_ids: list[int],
        params: dict[str, Any] | None,
        answer: dict[str, Any] | None = None,
        suspended: Suspended = None,
    ) -> bytes:
        """Return what a decode instance is asked for a request that has tokens already.

        Without the ``kv_transfer_params`` of the frozen request it computes everything again. An
        ``answer`` so far is one that it has to parse again.
        """
        generated = len(output_token_ids)
        body: dict[str, Any] = {
            key: value for key, value in request.body.items() if key not in _NOT_FOR_RESUMED
        }
        _stream_tokens(request, body)
        more = _some(answer=answer, suspended=suspended)
        transfer = self._transfer(params or {}, id=id, hop=hop, generated=generated, **more)
        if request.chat:
            transfer["prompt_token_ids"] = prompt_token_ids + output_token_ids
        else:
            body["prompt"] = prompt_token_ids + output_token_ids
        if request.max_tokens is not None:
            body.pop("max_tokens", None)
            body["max_completion_tokens" if request.chat else "max_tokens"] = (
                request.max_tokens - generated
            )
        if request.text.min_tokens:
            body["min_tokens"] = max(0, request.text.min_tokens - generated)
        body["kv_transfer_params"] = transfer
        return encode(body)

    def copy(
        self,
        request: ClientRequest,
        id: str,
        hop: int,
        token_ids: list[int],
        params: dict[str, Any],
    ) -> bytes:
        """Return what a decode instance is asked to copy a running request's KV cache into its own.

        ``token_ids`` and ``params`` are those of the source's snapshot.
        """
        body: dict[str, Any] = {
            key: value for key, value in request.body.items() if key in _FOR_COPIES
        }
        body |= {"prompt": token_ids, "max_tokens": 1, "temperature": 0}
        body["kv_transfer_params"] = self._transfer(params, id=id, hop=hop, copies=True)
        return encode(body)

    def _transfer(self, params: dict[str, Any], **headway: Any) -> dict[str, Any]:
        params = {**params, MIGRATION_PARAMS: headway}
        return params if self._secret is None else signed(params, self._secret)


def _some(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _stream_tokens(request: ClientRequest, body: dict[str, Any]) -> None:
    """Have the engine stream, with token ids: that is how the proxy knows where it stands."""
    body["return_token_ids"] = True
    if not request.stream:
        body["stream"] = True
        body["stream_options"] = {"include_usage": True}


_NAME = re.compile(r"[\w.:-]{1,128}")


def given_name(header: str | None, client: ClientRequest) -> str | None:
    """Return the ``X-Request-Id`` of a request, else its ``request_id``; None if it can be none."""
    name = header or client.request_id
    return name if name is not None and _NAME.fullmatch(name) else None


_MOST_BYTES, _MOST_ITEMS, _MOST_ID = 1 << 20, 4096, 1 << 31


class _Part(msgspec.Struct):
    text: str | None = None


class _Message(msgspec.Struct):
    content: str | list[_Part] | None = None


_messages = msgspec.json.Decoder(list[_Message])
_prompt = msgspec.json.Decoder(str | list[str | int])
_number = msgspec.json.Decoder(float | None)


def prompt_text(body: Mapping[str, Raw]) -> str | list[int] | None:
    """Return the text of a prompt or of its messages, or token ids.

    None if there is none that is read here: more than 1 MiB, 4,096 messages or token ids, several
    prompts, or no text. A longer list would hold up every stream.
    """
    given = body.get("messages", body.get("prompt"))
    if given is None or len(given) > _MOST_BYTES or _items(given) > _MOST_ITEMS:
        return None
    try:
        if "messages" in body:
            return "\n".join(filter(None, map(_text, _messages.decode(given)))) or None
        prompt = _prompt.decode(given)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if isinstance(prompt, str):
        return prompt or None
    if len(prompt) == 1 and isinstance(prompt[0], str):
        return prompt[0] or None
    ids = [token for token in prompt if isinstance(token, int) and 0 <= token < _MOST_ID]
    return ids if ids and len(ids) == len(prompt) else None


def _items(given: Raw) -> int:
    """Return how many messages or token ids a list has at most; 0 if it is none."""
    whole = bytes(given)
    if whole[:1] != b"[":
        return 0
    return whole.count(b"{") or whole.count(b",")


def _text(message: _Message) -> str:
    if isinstance(message.content, list):
        return "\n".join(filter(None, (part.text for part in message.content)))
    return message.content or ""


def temperature(body: Mapping[str, Raw]) -> float:
    """Return the temperature that a client asks for; nan: what the model's authors chose."""
    given = body.get("temperature")
    if given is None:
        return nan
    try:
        value = _number.decode(given)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return nan
    return value if value is not None and isfinite(value) else nan
