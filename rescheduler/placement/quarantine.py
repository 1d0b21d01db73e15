"""Requests under which an engine was lost: each is tried once more, apart from the others."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from rescheduler.openai.openai_request import RequestRefusedError
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.live_request import LiveRequest

logger = logging.getLogger("headway.serve")

MOST_LOST = 2
"""Engines that may be lost while they had just begun with it."""
TRUSTED_TOKENS = 32
"""On one engine, after which a request is not what its engine ends by."""
MOST_BREAKS = 1
"""Streams of a request that may break later than that, before each further one counts as well."""
_LOOK_SECONDS = 0.02


class _Place:
    """What a suspect waits for.

    Attributes:
        instance: that it gets.
        since: when an instance was last in service that may have it, on the loop's clock.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float | None) -> None:
        self.instance: asyncio.Future[InstanceState] = loop.create_future()
        self.since, self.seconds = loop.time(), seconds


class Quarantine:
    """Has each instance serve one suspect at a time.

    All that an engine had just begun with when it was lost are suspects, and one of them may be the
    cause. If several went to the same engine again and it was lost, too, all of them would be
    refused. A suspect is trusted once an engine has generated `TRUSTED_TOKENS` of it. The others
    wait in line meanwhile, as long as it takes: they are not refused for being many.

    Args:
        usable: returns the decode instances in service that may have a request.
        decodes: all decode instances.
    """

    def __init__(
        self,
        usable: Callable[[LiveRequest], Sequence[InstanceState]],
        decodes: Sequence[InstanceState],
    ) -> None:
        self._usable, self._decodes = usable, frozenset(decodes)
        self._suspects: dict[InstanceState, LiveRequest] = {}
        self._mixed: set[LiveRequest] = set()  # suspects beside others
        self._line: dict[LiveRequest, _Place] = {}
        self._looking: asyncio.Task[None] | None = None

    async def enter(self, request: LiveRequest, seconds: float | None) -> None:
        """Wait for an instance without a suspect; the request avoids all others then.

        Args:
            request: the suspect.
            seconds: for which no instance may be in service that may have it; None: any time.

        Raises:
            RequestRefusedError: 503, none was for so long.
        """
        self.leave(request)
        place = self._line[request] = _Place(asyncio.get_running_loop(), seconds)
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        try:
            instance = await place.instance
        finally:
            del self._line[request]
        request.avoid = self._decodes - {instance}

    def placed(self, request: LiveRequest, instance: InstanceState) -> None:
        """Note where a suspect is: elsewhere, if its instance has left service meanwhile."""
        if self._suspects.get(instance) is not request:
            self.leave(request)
            if self._suspects.setdefault(instance, request) is not request:
                self._mixed |= {request, self._suspects[instance]}

    def leave(self, request: LiveRequest) -> InstanceState | None:
        """Note that a request has ended, or left its instance; return where it was kept apart."""
        mixed = request in self._mixed
        self._mixed.discard(request)
        for instance, suspect in self._suspects.items():
            if suspect is request:
                del self._suspects[instance]
                return None if mixed else instance
        return None

    async def _look(self) -> None:
        """Give places as long as any suspect waits."""
        while self._line:
            try:
                self._give(asyncio.get_running_loop().time())
            except Exception:
                logger.exception("looking for places for suspects failed")
            await asyncio.sleep(_LOOK_SECONDS)

    def _give(self, now: float) -> None:
        """Give suspects places, in the order in which they came."""
        for instance, suspect in list(self._suspects.items()):
            trusted = suspect.generated_here > TRUSTED_TOKENS and suspect.instance is instance
            if trusted or suspect.ended or suspect.instance not in (None, instance):
                del self._suspects[instance]
        usable: dict[str, Sequence[InstanceState]] = {}
        for request, place in self._line.items():
            if place.instance.done():
                continue
            try:
                if request.model not in usable:
                    usable[request.model] = self._usable(request)
                self._give_place(request, place, usable[request.model], now)
            except Exception:
                logger.exception("request %s gets no place apart; refused", request.id)
                failed = RequestRefusedError(500, "the proxy failed; see its log")
                place.instance.set_exception(failed)

    def _give_place(
        self, request: LiveRequest, place: _Place, usable: Sequence[InstanceState], now: float
    ) -> None:
        free = self._free(request, usable)
        if free is not None:
            self._suspects[free] = request
            place.instance.set_result(free)
        elif usable:
            place.since = now
        elif place.seconds is not None and now - place.since > place.seconds:
            message = f"no decode instance was in service for {place.seconds:g} s"
            place.instance.set_exception(RequestRefusedError(503, message, retry_after=5))

    def _free(self, request: LiveRequest, usable: Sequence[InstanceState]) -> InstanceState | None:
        """Return an instance for a suspect: another than the one that was lost, if there is any."""
        others = [instance for instance in usable if instance not in request.avoid] or usable
        free = [instance for instance in others if instance not in self._suspects]
        return min(free, key=lambda one: one.name, default=None)
