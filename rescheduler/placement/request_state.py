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
]

Params = dict[str, Any]
"""``kv_transfer_params``: where an engine finds a request's KV cache."""


class IllegalTransitionError(RuntimeError):
    """Raised when a request cannot go from its state to the requested one."""


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """A migration from one decode instance to another.

    Attributes:
        hop: placement that it leaves.
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
    """KV blocks that an instance keeps of a request, which was placed there, perhaps in vain."""

    instance: InstanceState
    hop: int


@dataclass(frozen=True, slots=True)
class Prefill:
    """A prefill that is done: its blocks, and how a decode instance pulls them."""

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
    """Being prefilled on a prefill instance, after ``hop`` other attempts."""

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
    """Frozen by the source, which reports all tokens so far; its stream still brings the last.

    With ``params`` the target pulls the KV cache.
    """

    move: Move
    output_token_ids: tuple[int, ...]
    params: Params


@dataclass(frozen=True, slots=True)
class Landing:
    """At the target of its move, without a token from there.

    Attributes:
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
