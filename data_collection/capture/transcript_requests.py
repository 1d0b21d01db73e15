"""Requests that replay a transcript: an answer that is known, computed as a prefill."""

from typing import Any

import msgspec

from data_collection.capture.captured_rows import FinishedRequest

__all__ = ["Replay", "as_recorded", "replay_of"]

_KEY = "headway_replay"
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
        max_tokens: the cap that the request asked for.
        finish_reason: how it ended.
        temperature: with which it was sampled; None when unknown.
        top_p: nucleus of the sampling; None when unknown.
    """

    prompt_tokens: int
    last_token: int
    max_tokens: int
    finish_reason: str
    temperature: float | None = None
    top_p: float | None = None

    def extra_args(self) -> dict[str, Any]:
        """Return what to attach to the request's sampling parameters."""
        return {_KEY: msgspec.to_builtins(self)}


def replay_of(extra_args: dict[str, Any] | None) -> Replay | None:
    """Return the replay that a request is, or None for one that generates.

    Raises:
        ValueError: the entry is malformed.
    """
    entry = (extra_args or {}).get(_KEY)
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
    return FinishedRequest(
        request_id=finished.request_id,
        finish_reason=replay.finish_reason,
        prompt_tokens=p,
        total_tokens=len(answer),
        max_tokens=replay.max_tokens,
        prompt_token_ids=finished.prompt_token_ids[:p],
        output_token_ids=answer,
        extra_args=finished.extra_args,
        temperature=replay.temperature,
        top_p=replay.top_p,
    )
