"""What placing and moving need to know of a request, whichever process carries its stream."""

from collections.abc import Collection
from typing import Protocol, TypeVar

from rescheduler.placement.decision import Decision
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.move_outcome import MoveOutcome

__all__ = ["Counted", "Mover", "Placeable", "PlacedRequests", "R"]


class Counted(Protocol):
    """A request that counts on the instance that it is on; equal to itself only."""

    def __hash__(self) -> int: ...

    @property
    def external_id(self) -> str:
        """What engines call it, without what they append."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of its prompt; an estimate until an engine reports the exact number."""

    @property
    def generated_tokens(self) -> int:
        """Tokens generated so far, on all instances."""

    @property
    def context_tokens(self) -> int:
        """Tokens of its prompt and generated so far."""

    @property
    def max_tokens(self) -> int | None:
        """Most tokens that it may generate, as far as its client said."""

    @property
    def can_move(self) -> bool:
        """Whether it can be moved right now."""

    @property
    def destination(self) -> InstanceState | None:
        """Instance that it is on, or on its way to."""

    @property
    def generating(self) -> bool:
        """Whether its present instance has generated a token."""

    @property
    def generated_at_move(self) -> int | None:
        """Tokens when it last moved; None if it has not."""


class Placeable(Counted, Protocol):
    """A request that can be placed on an instance and moved to another one."""

    @property
    def id(self) -> str:
        """The migration id."""

    @property
    def name(self) -> str:
        """What its client calls it."""

    @property
    def instance(self) -> InstanceState | None:
        """Instance that it is on; None while it waits for one."""

    @property
    def movable(self) -> bool:
        """Whether it can ever move."""

    @property
    def on_its_way(self) -> bool:
        """Whether its decode instance has not accepted it yet."""

    @property
    def avoid(self) -> frozenset[InstanceState]:
        """Instances that have just failed it, or turned it away."""

    @property
    def waiting_since(self) -> float:
        """When it began to wait for a decode instance, in seconds."""

    def rests(self, now: float) -> bool:
        """Return whether it is not to be moved yet, since its last move did not succeed."""

    def wait(self, now: float) -> None:
        """Begin to wait for a decode instance."""

    def begin_prefill(self, instance: InstanceState) -> None:
        """Occupy a place on a prefill instance."""

    def prefill_failed(self) -> object:
        """Leave a prefill instance."""

    def place(self, instance: InstanceState, decision: Decision | None = None) -> None:
        """Occupy a place on a decode instance.

        Args:
            instance: that was chosen.
            decision: that chose it; None if another process did.
        """

    def reported(self, prompt_tokens: int, generated_tokens: int) -> None:
        """Note what its engine says of a stream that is passed through as it is."""


R = TypeVar("R", bound=Placeable)
_On = TypeVar("_On", bound=Counted, covariant=True)
_Moved = TypeVar("_Moved", bound=Placeable, contravariant=True)


class PlacedRequests(Protocol[_On]):
    """Which request is on which instance."""

    def on(self, instance: InstanceState) -> Collection[_On]:
        """Return the requests on an instance, in the order in which they came."""


class Mover(Protocol[_Moved]):
    """Carries moves out."""

    async def move(self, request: _Moved, target: InstanceState, why: str) -> MoveOutcome:
        """Move a request; return how that ended once it runs at its target, or stays."""
