"""The states of a request in the proxy, and which of them follow which."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rescheduler.placement.instance_state import InstanceState

__all__ = [
    "TRANSITIONS",
    "Copying",
    "Decoding",
    "Finished",
    "Freezing",
    "Frozen",
    "IllegalTransitionError",
    "Kept",
    "Landing",
    "Move",
    "Placed",
    "Prefill",
    "Prefilling",
    "RequestState",
    "Returned",
    "Unanswered",
    "Waiting",
    "check_transition",
]

Params = dict[str, Any]
"""``kv_transfer_params``: where an engine finds a request's KV cache."""


class IllegalTransitionError(RuntimeError):
    """Raised when a request cannot go from its state to the requested one."""


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """A migration from one decode instance to another.

    Attributes:
        source: instance that the request leaves.
        hop: placement that it leaves.
        target: instance that it goes to.
        answered: done once it is known whether the source has frozen the request, or that the
            source does not answer.
        landed: seconds from the last token at the source to the first at the target; None if it
            has not moved.
    """

    source: InstanceState
    hop: int
    target: InstanceState
    answered: asyncio.Future[None]
    landed: asyncio.Future[float | None]


@dataclass(frozen=True, slots=True)
class Kept:
    """What an instance keeps of a request, perhaps in vain.

    Attributes:
        instance: that keeps its KV blocks.
        hop: placement of the request there.
    """

    instance: InstanceState
    hop: int


@dataclass(frozen=True, slots=True)
class Prefill:
    """A prefill that is done.

    Attributes:
        kept: its blocks.
        params: for a decode instance to pull them with.
    """

    kept: Kept
    params: Params


@dataclass(frozen=True, slots=True)
class Waiting:
    """On no instance: new, waiting for an instance, or backing off after a failure.

    Attributes:
        prefill: done on a prefill instance; None before, or if the decode instance computes it.
    """

    prefill: Prefill | None = None


@dataclass(frozen=True, slots=True)
class Prefilling:
    """Being prefilled on a prefill instance.

    Attributes:
        hop: attempts before.
    """

    instance: InstanceState
    hop: int


@dataclass(frozen=True, slots=True)
class Placed:
    """On the decode instance that the routing policy chose, without a token from there.

    Attributes:
        prefill: done on a prefill instance; None if the decode instance computes it.
        accepted: whether the decode instance has accepted the request, and so frees the prefill.
    """

    instance: InstanceState
    prefill: Prefill | None
    accepted: bool = False


@dataclass(frozen=True, slots=True)
class Returned:
    """Back at the source of a move that did not succeed, without a token from there since."""

    instance: InstanceState


@dataclass(frozen=True, slots=True)
class Decoding:
    """Generating tokens on an instance."""

    instance: InstanceState


@dataclass(frozen=True, slots=True)
class Copying:
    """Generating tokens at the source, while the target copies the KV cache there is so far."""

    move: Move


@dataclass(frozen=True, slots=True)
class Freezing:
    """Generating tokens at the source, which has been asked to freeze it."""

    move: Move


@dataclass(frozen=True, slots=True)
class Unanswered:
    """As `Freezing`, but the source has not answered: the end of its stream shows what it did."""

    move: Move


@dataclass(frozen=True, slots=True)
class Frozen:
    """Frozen by the source, whose stream still brings the last tokens.

    Attributes:
        output_token_ids: all tokens generated so far, as the source reports them.
        params: for the target to pull the KV cache with.
    """

    move: Move
    output_token_ids: tuple[int, ...]
    params: Params


@dataclass(frozen=True, slots=True)
class Landing:
    """At the target of its move, without a token from there.

    Attributes:
        params: for the target to pull the KV cache with.
        accepted: whether the target has accepted the request, which then frees the source.
    """

    move: Move
    params: Params
    accepted: bool = False


@dataclass(frozen=True, slots=True)
class Finished:
    """Ended, failed, or left by its client: on no instance, for good."""


RequestState = (
    Waiting
    | Prefilling
    | Placed
    | Returned
    | Decoding
    | Copying
    | Freezing
    | Unanswered
    | Frozen
    | Landing
    | Finished
)

TRANSITIONS: Mapping[type[RequestState], tuple[type[RequestState], ...]] = {
    Waiting: (Prefilling, Placed, Finished),
    Prefilling: (Waiting, Finished),
    Placed: (Placed, Decoding, Waiting, Finished),
    Returned: (Decoding, Waiting, Finished),
    Decoding: (Copying, Waiting, Finished),
    Copying: (Freezing, Decoding, Waiting, Finished),
    Freezing: (Frozen, Decoding, Unanswered, Waiting, Finished),
    Unanswered: (Decoding, Returned, Waiting, Finished),
    Frozen: (Landing, Returned, Waiting, Finished),
    Landing: (Landing, Decoding, Returned, Waiting, Finished),
    Finished: (),
}
"""The states that may follow each state; `docs/migrate.md` draws them."""


def check_transition(old: RequestState, new: RequestState) -> None:
    """Raise `IllegalTransitionError` unless one state may follow another."""
    if type(new) not in TRANSITIONS[type(old)]:
        raise IllegalTransitionError(
            f"a request cannot go from {type(old).__name__} to {type(new).__name__}"
        )
