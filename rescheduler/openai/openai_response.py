"""A whole answer, collected from the chunks of a stream."""

from itertools import accumulate
from typing import Annotated, Any

import msgspec

from data_collection.capture.requests import WHOLE_ANSWER
from rescheduler.openai.openai_request import (
    MOST_ANSWERS,
    MOST_TOKENS,
    ClientRequest,
    RequestRefusedError,
)

# What a stream leaves out and a whole answer of vLLM's has, null where nobody asked for it.
_OF_ANSWER = dict.fromkeys(
    (
        "service_tier",
        "system_fingerprint",
        "usage",
        "kv_transfer_params",
        "ec_transfer_params",
        "metrics",
    )
)
_OF_CHAT = dict.fromkeys(("prompt_logprobs", "prompt_token_ids", "prompt_text"))
_OF_MESSAGE = dict.fromkeys(("refusal", "annotations", "audio", "function_call"))
_OF_COMPLETION = dict.fromkeys(("prompt_logprobs", "prompt_token_ids"))
_OF_USAGE = dict.fromkeys(("prompt_tokens_details", "completion_tokens_details"))


class ResponseCollector:
    """Adds up the chunks of one request, for a client that does not stream."""

    def __init__(self, request: ClientRequest) -> None:
        self._request = request
        self._head: dict[str, Any] = {}
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._role = "assistant"
        self._logprobs: dict[str, list[Any]] | None = None
        self._token_ids: list[int] = []
        self._prompt_token_ids: list[int] | None = None
        self._end: dict[str, Any] = {"finish_reason": None, "stop_reason": None}
        self._parsed: dict[str, Any] | None = None
        self._tail: dict[str, Any] = {**_OF_ANSWER, **(_OF_CHAT if request.chat else {})}

    def add(self, data: bytes) -> None:
        """Take a chunk as the client would see it."""
        chunk: dict[str, Any] = msgspec.json.decode(data)
        if WHOLE_ANSWER in chunk:
            self._parsed = chunk[WHOLE_ANSWER]
            return
        if not self._head:
            self._head = {key: chunk.get(key) for key in ("id", "created", "model")}
        for key in ("system_fingerprint", "usage", "metrics", "prompt_text"):
            if chunk.get(key) is not None:
                self._tail[key] = chunk[key]
        self._prompt_token_ids = chunk.get("prompt_token_ids") or self._prompt_token_ids
        for choice in chunk.get("choices", ()):
            self._add_choice(choice)

    def response(self) -> bytes:
        """Return the whole answer.

        Where it has tools, the engine has said at the end what it makes of all of it.

        Raises:
            RequestRefusedError: 502, the engine has not.
        """
        chat = self._request.chat
        text = "".join(self._text)
        choice: dict[str, Any] = {"index": 0}
        if self._request.tools:
            if self._parsed is None:
                raise RequestRefusedError(502, "the engine has not parsed its answer")
            choice = self._parsed["choice"]
            self._end = {name: choice[name] for name in self._end}
        elif chat:
            reasoning = "".join(self._reasoning) or None
            content = None if reasoning and not text else text  # cut while it thought
            said = {"role": self._role, "content": content, "reasoning": reasoning}
            choice["message"] = {**said, **_OF_MESSAGE}
        else:
            choice |= {"text": text, **_OF_COMPLETION}
        choice["logprobs"] = self._whole_logprobs()
        choice.update(self._end)
        keeps = self._request.keeps_token_ids
        choice["token_ids"] = self._token_ids if keeps else None
        choice["routed_experts"] = None
        tail = dict(self._tail)
        if tail["usage"] is not None:
            tail["usage"] = {**_OF_USAGE, **tail["usage"]}
            if self._parsed is not None:
                details = self._parsed["usage"]["completion_tokens_details"]
                tail["usage"]["completion_tokens_details"] = details
        if keeps:
            (tail if chat else choice)["prompt_token_ids"] = self._prompt_token_ids
        kind = "chat.completion" if chat else "text_completion"
        return msgspec.json.encode({**self._head, "object": kind, "choices": [choice], **tail})

    def _add_choice(self, choice: dict[str, Any]) -> None:
        delta = choice.get("delta")
        if delta is None:
            self._text.append(choice.get("text") or "")
        else:
            self._role = delta.get("role") or self._role
            self._text.append(delta.get("content") or "")
            self._reasoning.append(delta.get("reasoning") or "")
        self._token_ids += choice.get("token_ids") or []
        self._prompt_token_ids = choice.get("prompt_token_ids") or self._prompt_token_ids
        if choice.get("finish_reason") is not None:
            self._end = {key: choice.get(key) for key in self._end}
        for name, entries in (choice.get("logprobs") or {}).items():
            if self._logprobs is None:
                self._logprobs = {}
            if isinstance(entries, list):
                self._logprobs.setdefault(name, []).extend(entries)

    def _whole_logprobs(self) -> dict[str, list[Any]] | None:
        logprobs = self._logprobs
        if logprobs is not None and "text_offset" in logprobs:
            lengths = map(len, logprobs.get("tokens", ()))
            logprobs["text_offset"] = list(accumulate(lengths, initial=0))[:-1]
        return logprobs


_MOST = MOST_TOKENS * MOST_ANSWERS
_Tokens = Annotated[int, msgspec.Meta(ge=0, le=_MOST)]


class _Usage(msgspec.Struct):
    prompt_tokens: _Tokens | None = None
    completion_tokens: _Tokens | None = None
    input_tokens: _Tokens | None = None
    output_tokens: _Tokens | None = None
    cache_read_input_tokens: _Tokens | None = None
    cache_creation_input_tokens: _Tokens | None = None


class _Counted(msgspec.Struct):
    usage: _Usage | None = None


_counted = msgspec.json.Decoder(_Counted)


def read_usage(*documents: bytes | bytearray | str) -> tuple[int, int] | None:
    """Return the prompt and output tokens that an answer of any endpoint says; None: it does not.

    They are of all its prompts and answers together. Of several documents, the later ones hold.
    """
    prompt, output = None, 0
    for document in documents:
        try:
            usage = _counted.decode(document).usage or _Usage()
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
        read = usage.input_tokens if usage.prompt_tokens is None else usage.prompt_tokens
        if read is not None:
            cached = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
            prompt = min(read + cached, _MOST)
        read = usage.output_tokens if usage.completion_tokens is None else usage.completion_tokens
        output = output if read is None else read
    return None if prompt is None else (prompt, output)
