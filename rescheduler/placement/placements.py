"""Which request is on which instance."""

from collections.abc import Collection, Hashable
from typing import Generic, TypeVar

from rescheduler.placement.instance_state import InstanceState

__all__ = ["Placements"]

R = TypeVar("R", bound=Hashable)


class Placements(Generic[R]):
    """The requests on each instance; a request is on one instance at most.

    Requests keep this up to date themselves, with each change of their state.
    """

    def __init__(self) -> None:
        self._on: dict[InstanceState, dict[R, None]] = {}
        self._at: dict[R, InstanceState] = {}

    def on(self, instance: InstanceState) -> Collection[R]:
        """Return the requests on an instance, in the order in which they came."""
        return self._on.get(instance, {}).keys()

    def put(self, request: R, instance: InstanceState | None) -> None:
        """Note where a request is now; None: on no instance."""
        before = self._at.get(request)
        if before is instance:
            return
        if before is not None:
            del self._on[before][request], self._at[request]
        if instance is not None:
            self._at[request] = instance
            self._on.setdefault(instance, {})[request] = None
