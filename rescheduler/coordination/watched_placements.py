"""Placements that report every request whose state changes."""

from collections.abc import Callable

from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.live_request import LiveRequest
from rescheduler.placement.placements import Placements

__all__ = ["WatchedPlacements"]


class WatchedPlacements(Placements[LiveRequest]):
    """Which request is on which instance; requests keep it up to date with each change.

    Args:
        changed: called with each request that has changed.
    """

    def __init__(self, changed: Callable[[LiveRequest], None]) -> None:
        super().__init__()
        self._changed = changed

    def put(self, request: LiveRequest, instance: InstanceState | None) -> None:
        """Note where a request is now; None: on no instance."""
        super().put(request, instance)
        self._changed(request)
