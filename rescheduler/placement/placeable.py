"""What placing and moving need to know of a request, whichever process carries its stream."""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

from rescheduler.cluster.cluster_view import UNLIMITED, ClusterView
from rescheduler.placement.instance_state import InstanceState
from rescheduler.tracing.span import Attribute

__all__ = [
    "Counted",
    "Decision",
    "MoveOutcome",
    "Mover",
    "Placeable",
    "PlacedRequests",
    "Placements",
    "R",
]


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision about requests that waited.

    Attributes:
        policy: name of the routing policy that decided.
        instances: that it chose from.
        view: that it decided on.
        began: nanoseconds since 1970.
        ended: nanoseconds since 1970.
    """

    policy: str
    instances: Sequence[InstanceState]
    view: ClusterView
    began: int
    ended: int

    def attributes(self) -> dict[str, Attribute]:
        """Return what a trace says of it; lists are by instance."""
        capacity = self.view.kv_capacity
        known = bool((capacity < UNLIMITED).all())
        budget = self.view.prefill_budget
        return {
            "policy": self.policy,
            "waiting": self.view.n_waiting,
            "instances": [instance.name for instance in self.instances],
            "requests": self.view.running.tolist(),
            "kv_tokens": self.view.kv_load.tolist(),
            "kv_capacity_tokens": capacity.tolist() if known else None,
            "prefill_budget_tokens": budget.tolist() if budget is not None else None,
        }


class MoveOutcome(NamedTuple):
    """How a move ended, well or not.

    Attributes:
        outcome: ``moved``, or why the request stays; `docs/serve.md` lists them.
        pause: seconds from the last token at the source to the first at the target; None if it
            did not move.
    """

    outcome: str
    pause: float | None = None


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


Held = TypeVar("Held", bound=Hashable)


class Placements(Generic[Held]):
    """The requests on each instance; a request is on one instance at most.

    Requests keep this up to date themselves, with each change of their state.
    """

    def __init__(self) -> None:
        self._on: dict[InstanceState, dict[Held, None]] = {}
        self._at: dict[Held, InstanceState] = {}

    def on(self, instance: InstanceState) -> Collection[Held]:
        """Return the requests on an instance, in the order in which they came."""
        return self._on.get(instance, {}).keys()

    def put(self, request: Held, instance: InstanceState | None) -> None:
        """Note where a request is now; None: on no instance."""
        before = self._at.get(request)
        if before is instance:
            return
        if before is not None:
            del self._on[before][request], self._at[request]
        if instance is not None:
            self._at[request] = instance
            self._on.setdefault(instance, {})[request] = None
