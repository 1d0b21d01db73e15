"""What each engine is asked in a client's name."""

import re
from typing import Any

from msgspec.json import encode

from data_collection.capture.requests import MIGRATION_PARAMS
from rescheduler.openai.openai_request import ClientRequest
from rescheduler.transfer.migration_params import signed

__all__ = ["EngineBodies", "given_name"]


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
        self, request: ClientRequest, id: str, hop: int, params: dict[str, Any] | None
    ) -> bytes:
        """Return what a decode instance is asked for a request that has no token yet.

        Without the ``kv_transfer_params`` of a prefill's answer it prefills the request itself.
        """
        body: dict[str, Any] = dict(request.body)
        if request.movable:
            _stream_tokens(request, body)
        if not request.direct:
            whole = {"answer": {"whole": True}} if _is_parsed_whole(request) else {}
            body["kv_transfer_params"] = self._transfer(params or {}, id=id, hop=hop, **whole)
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
        so_far = {} if answer is None else {"answer": answer}
        transfer = self._transfer(params or {}, id=id, hop=hop, generated=generated, **so_far)
        if request.chat:
            transfer["prompt_token_ids"] = prompt_token_ids + output_token_ids
        else:
            body["prompt"] = prompt_token_ids + output_token_ids
        if request.max_tokens is not None:
            body.pop("max_tokens", None)
            body["max_completion_tokens" if request.chat else "max_tokens"] = (
                request.max_tokens - generated
            )
        if request.min_tokens:
            body["min_tokens"] = max(0, request.min_tokens - generated)
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


def _is_parsed_whole(request: ClientRequest) -> bool:
    """Whether an engine streams tokens to the proxy, and parses all of them at the end."""
    return request.tools and request.movable and not request.stream


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
