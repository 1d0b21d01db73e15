"""Draining: moving all requests away from an instance."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Generic

from rescheduler.placement.dispatcher import Dispatcher
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.placeable import Mover, PlacedRequests, R

__all__ = ["Drainer"]

logger = logging.getLogger("headway.serve")

_SECONDS = 0.25


class Drainer(Generic[R]):
    """Drains instances: nothing new goes there, and what runs there moves away.

    Requests that cannot move, or for which there is no room elsewhere, end where they are.

    Args:
        placements: which requests are on which instance.
        decodes: the decode instances.
        dispatcher: chooses where requests go.
        mover: moves them.
        background: runs the moves.
    """

    def __init__(
        self,
        placements: PlacedRequests[R],
        decodes: Sequence[InstanceState],
        dispatcher: Dispatcher[R],
        mover: Mover[R],
        background: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._placements, self._decodes, self._dispatcher = placements, decodes, dispatcher
        self._mover, self._background = mover, background
        self._moving: set[str] = set()

    def drain(self, instance: InstanceState) -> None:
        """Begin to drain an instance."""
        if not instance.draining:
            requests = len(self._placements.on(instance))
            logger.info("%s: draining, %d requests", instance.name, requests)
        instance.draining = True

    def undrain(self, instance: InstanceState) -> None:
        """Let requests come to an instance again."""
        if instance.draining:
            logger.info("%s: takes requests again", instance.name)
        instance.draining = False
        self._dispatcher.wake()

    async def run(self) -> None:
        """Move requests away from draining instances, forever."""
        while True:
            await asyncio.sleep(_SECONDS)
            for instance in self._decodes:
                if instance.draining:
                    try:
                        self._move_away(instance)
                    except Exception:
                        logger.exception("%s: draining failed", instance.name)

    def _move_away(self, instance: InstanceState) -> None:
        now = asyncio.get_running_loop().time()
        requests = [
            request
            for request in self._placements.on(instance)
            if request.can_move and request.id not in self._moving and not request.rests(now)
        ]
        for request, target in zip(requests, self._dispatcher.choose(requests), strict=True):
            if target is not None:
                self._moving.add(request.id)
                self._background(self._move(request, target))

    async def _move(self, request: R, target: InstanceState) -> None:
        try:
            await self._mover.move(request, target, "drain")
        finally:
            self._moving.discard(request.id)
