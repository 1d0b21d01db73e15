"""What a client asks for, and the errors that it is answered with."""

from dataclasses import dataclass, replace

import msgspec
from msgspec import Raw

__all__ = [
    "ALWAYS_STREAM",
    "CHAT",
    "COMPLETIONS",
    "FORWARDED",
    "LONGEST_MODEL",
    "MESSAGES",
    "MOST_TOKENS",
    "NOT_SERVED",
    "UNREADABLE",
    "ClientRequest",
    "RequestRefusedError",
    "error_body",
]

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
class ClientRequest:
    """A client's request, and what of it the proxy has to know.

    Attributes:
        path: of the endpoint.
        body: its fields as they were sent.
        size: of the body, bytes.
        request_id: that the client gave it in the body.
        model: that it is for, such as a LoRA adapter; empty if no instance can be chosen by it.
        prompt_ids: how many token ids the prompt has; None if it is not a list of token ids.
        stream: the client reads tokens as they come.
        stream_interval: tokens between two chunks of its stream.
        include_usage: the stream ends with a chunk of token counts.
        keeps_token_ids: the client wants to see token ids.
        max_tokens: most tokens it may generate, at least 1 and at most `MOST_TOKENS`; None: as
            many as the model's context holds.
        min_tokens: fewest tokens, likewise bounded.
        fewest_tokens: likewise, where nothing but ``max_tokens`` can end it.
        stop: strings that end it.
        include_stop: whether such a string is shown.
        skip_special_tokens: whether special tokens are left out of the text.
        spaces_between_special_tokens: as in vLLM.
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
    prompt_ids: int | None = None
    stream_interval: int = 1
    model: str = ""
    include_usage: bool = False
    keeps_token_ids: bool = False
    min_tokens: int = 0
    fewest_tokens: int = 0
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
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
