"""The states of a request while the proxy holds it, and which may follow which."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rescheduler.placement.instance_state import InstanceState

Params = dict[str, Any]
"""``kv_transfer_params``: where an engine finds a request's KV cache."""


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


def kept_of(state: RequestState) -> Kept | None:
    """Return what an instance keeps of a request that ends, or fails, in this state.

    An engine that has accepted a request sees to the blocks that it pulls. One that has not may
    still pull them for a request that no client reads and that leaves nothing in its prefix cache.
    """
    if isinstance(state, Prefilling):
        return Kept(state.instance, state.hop)
    if isinstance(state, Waiting) or (isinstance(state, Placed) and not state.accepted):
        return state.prefill.kept if state.prefill is not None else None
    if isinstance(state, (Frozen, Unanswered)) or (
        isinstance(state, Landing) and not state.accepted
    ):
        return Kept(state.move.source, state.move.hop)
    return None


def instance_of(state: RequestState) -> InstanceState | None:
    """Return the instance on which a request in this state is; None if it is on none."""
    if isinstance(state, (Copying, Freezing, Unanswered, Frozen)):
        return state.move.source
    if isinstance(state, Landing):
        return state.move.target
    if isinstance(state, (Prefilling, Placed, Returned, Decoding)):
        return state.instance
    return None
