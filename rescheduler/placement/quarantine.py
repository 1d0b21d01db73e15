"""Requests under which an engine was lost: each is tried once more, apart from the others."""

import asyncio
from collections.abc import Callable, Sequence

from rescheduler.openai.openai_request import RequestRefusedError
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.live_request import LiveRequest

__all__ = ["MOST_BREAKS", "MOST_LOST", "TRUSTED_TOKENS", "Quarantine"]

MOST_LOST = 2
"""Engines that may be lost while they had just begun with a request."""
TRUSTED_TOKENS = 32
"""On one engine, after which a request is not what its engine ends by."""
MOST_BREAKS = 3
"""Streams of a request that may break later than that, before each further one counts as well."""
_POLL_SECONDS = 0.02


class Quarantine:
    """Has each instance serve one suspect at a time.

    All that an engine had just begun with when it was lost are suspects, and one of them may be the
    cause. If several went to the same engine again and it was lost, too, all of them would be
    refused. A suspect is trusted once an engine has generated `TRUSTED_TOKENS` of it.

    Args:
        usable: returns the decode instances in service.
    """

    def __init__(self, usable: Callable[[], Sequence[InstanceState]]) -> None:
        self._usable = usable
        self._suspects: dict[InstanceState, LiveRequest] = {}

    async def enter(self, request: LiveRequest, seconds: float) -> None:
        """Wait for an instance without a suspect; the request avoids all others then.

        Raises:
            RequestRefusedError: 503, there was none within so many seconds.
        """
        self.leave(request)
        try:
            async with asyncio.timeout(seconds):
                while (instance := self._free(request)) is None:
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError as error:
            message = f"no decode instance had room within {seconds:g} s"
            raise RequestRefusedError(503, message, retry_after=5) from error
        self._suspects[instance] = request
        request.avoid = frozenset(self._usable()) - {instance}

    def leave(self, request: LiveRequest) -> None:
        """Note that a request has ended, or left its instance."""
        for instance, suspect in list(self._suspects.items()):
            if suspect is request:
                del self._suspects[instance]

    def _free(self, request: LiveRequest) -> InstanceState | None:
        """Return an instance for a suspect: another than the one that was lost, if there is any."""
        for instance, suspect in list(self._suspects.items()):
            trusted = suspect.generated_here > TRUSTED_TOKENS and suspect.instance is instance
            if trusted or suspect.ended or not instance.available:
                del self._suspects[instance]
        usable = self._usable()
        others = [instance for instance in usable if instance not in request.avoid] or usable
        free = [instance for instance in others if instance not in self._suspects]
        return min(free, key=lambda one: one.name, default=None)
