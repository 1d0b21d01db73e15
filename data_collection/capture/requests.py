"""Requests as capture knows them: their names, how they end, and the replays of transcripts."""

import re
from typing import Any, NamedTuple

import msgspec

MIGRATION_PARAMS = "headway"
"""Entry of a request's ``kv_transfer_params`` by which a proxy knows it on every engine."""
LEASE_SECONDS = "headway_lease_seconds"
"""Entry of those of a prefill's answer: for how long its blocks are kept."""
WHOLE_ANSWER = "headway_answer"
"""Key of the event that ends a stream with what vLLM would have answered without one."""

_RANDOM_SUFFIX = re.compile(r"-[0-9a-f]{8}$")
_CHILD_PREFIX = re.compile(r"^(\d+)_")
_COMPLETION = re.compile(r"^(cmpl-.*)-(\d+)$")


class RequestName(NamedTuple):
    """What a client calls a request, and which of its answers this one is."""

    external_id: str
    prompt_index: int
    sample_index: int


def parse_request_id(internal_id: str) -> RequestName:
    """Recover the client's id from the id inside vLLM's engine.

    vLLM appends eight hexadecimal digits to every id, and prefixes the children of a
    request with n > 1 by their number: ``1_chatcmpl-77-0a1b2c3d`` is the second sample of
    ``chatcmpl-77``. The completions endpoint also numbers the prompts of one call:
    ``cmpl-77-4-0a1b2c3d`` answers the fifth prompt of ``cmpl-77``.

    Raises:
        ValueError: the id is empty.
    """
    if not internal_id:
        raise ValueError("a request id inside the engine cannot be empty")
    child = _CHILD_PREFIX.match(internal_id)
    name = internal_id[child.end() :] if child else internal_id
    name = _RANDOM_SUFFIX.sub("", name)
    sample_index = int(child.group(1)) if child else 0
    if completion := _COMPLETION.match(name):
        return RequestName(completion.group(1), int(completion.group(2)), sample_index)
    return RequestName(name, 0, sample_index)


class FinishedRequest(msgspec.Struct, frozen=True):
    """How a request ended, as the engine's scheduler knows it.

    Attributes:
        request_id: id inside the engine.
        finish_reason: ``stop``, ``length``, ``abort``, ``error`` or ``repetition``, or ``moved`` if
            another engine continues it.
        total_tokens: tokens generated, the end-of-sequence token included.
        max_tokens: the cap the request asked for.
        prompt_token_ids: the prompt, or None when it came as embeddings.
        extra_args: what the client attached to its sampling parameters.
        temperature: None when unknown, as ``top_p``.
        adapter: name of the LoRA adapter that answered; "" for the base model.
    """

    request_id: str
    finish_reason: str
    prompt_tokens: int
    total_tokens: int
    max_tokens: int
    prompt_token_ids: list[int] | None
    output_token_ids: list[int]
    extra_args: dict[str, Any]
    temperature: float | None = None
    top_p: float | None = None
    adapter: str = ""


_REPLAY = "headway_replay"
_WHOLE = ("stop", "length")


class Replay(msgspec.Struct, frozen=True):
    """What the engine cannot know of a request whose prompt holds the answer, too.

    The engine is given the prompt's p tokens and all but the last of the answer's T, as a prompt
    of p + T - 1 tokens. The state of its token p + n, counted from 1, is that of the live
    request at n generated tokens: it has seen the same tokens. The last token's state is never
    computed in the live run, either.

    Attributes:
        prompt_tokens: p.
        last_token: the answer's last token.
    """

    prompt_tokens: int
    last_token: int
    max_tokens: int
    finish_reason: str
    temperature: float | None = None
    top_p: float | None = None

    def extra_args(self) -> dict[str, Any]:
        """Return what to attach to the request's sampling parameters."""
        return {_REPLAY: msgspec.to_builtins(self)}


def replay_of(extra_args: dict[str, Any] | None) -> Replay | None:
    """Return the replay that a request is, or None for one that generates.

    Raises:
        ValueError: the entry is malformed.
    """
    entry = (extra_args or {}).get(_REPLAY)
    return None if entry is None else msgspec.convert(entry, Replay)


def as_recorded(finished: FinishedRequest) -> FinishedRequest | None:
    """Return the request that a replay is of, or None where the replay was cut short."""
    replay = replay_of(finished.extra_args)
    if replay is None:
        return finished
    if finished.finish_reason not in _WHOLE or finished.prompt_token_ids is None:
        return None
    p = replay.prompt_tokens
    answer = [*finished.prompt_token_ids[p:], replay.last_token]
    return msgspec.structs.replace(
        finished,
        finish_reason=replay.finish_reason,
        prompt_tokens=p,
        total_tokens=len(answer),
        max_tokens=replay.max_tokens,
        prompt_token_ids=finished.prompt_token_ids[:p],
        output_token_ids=answer,
        temperature=replay.temperature,
        top_p=replay.top_p,
    )
