"""What each engine is asked in a client's name."""

from typing import Any

from msgspec.json import encode

from rescheduler.openai.openai_request import ClientRequest

__all__ = ["decode_body", "prefill_body", "resumed_body"]

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
_NOT_FOR_RESUMED = (
    "stop",  # the proxy looks for it, since the engine does not know the text before
    "truncate_prompt_tokens",
    "truncation_side",
    "return_prompt_text",
)


def prefill_body(request: ClientRequest, id: str, hop: int) -> bytes:
    """Return what a prefill instance is asked: the prompt's KV cache, and no text.

    Args:
        request: the client's.
        id: the migration id.
        hop: attempts before.
    """
    body: dict[str, Any] = {
        key: value for key, value in request.body.items() if key not in _NOT_FOR_PREFILL
    }
    body["max_completion_tokens" if request.chat else "max_tokens"] = 1
    body["stream"] = False
    headway = {"id": id, "hop": hop, "max_tokens": request.max_tokens}
    body["kv_transfer_params"] = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "headway": headway,
    }
    return encode(body)


def decode_body(request: ClientRequest, id: str, hop: int, params: dict[str, Any] | None) -> bytes:
    """Return what a decode instance is asked for a request that has no token yet.

    Args:
        request: the client's.
        id: the migration id.
        hop: placements on decode instances before.
        params: ``kv_transfer_params`` of the prefill's answer; None: prefill here.
    """
    body: dict[str, Any] = dict(request.body)
    if request.movable:
        _stream_tokens(request, body)
    if not request.direct:
        body["kv_transfer_params"] = {**(params or {}), "headway": {"id": id, "hop": hop}}
    return encode(body)


def resumed_body(
    request: ClientRequest,
    id: str,
    hop: int,
    prompt_token_ids: list[int],
    output_token_ids: list[int],
    params: dict[str, Any] | None,
) -> bytes:
    """Return what a decode instance is asked for a request that has tokens already.

    Args:
        request: the client's.
        id: the migration id.
        hop: placements on decode instances before.
        prompt_token_ids: of the original prompt.
        output_token_ids: generated elsewhere so far.
        params: ``kv_transfer_params`` of the frozen request; None: compute everything again.
    """
    generated = len(output_token_ids)
    body: dict[str, Any] = {
        key: value for key, value in request.body.items() if key not in _NOT_FOR_RESUMED
    }
    _stream_tokens(request, body)
    transfer = {
        **(params or {}),
        "headway": {"id": id, "hop": hop, "generated": generated},
    }
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


def _stream_tokens(request: ClientRequest, body: dict[str, Any]) -> None:
    """Have the engine stream, with token ids: that is how the proxy knows where it stands."""
    body["return_token_ids"] = True
    if not request.stream:
        body["stream"] = True
        body["stream_options"] = {"include_usage": True}
