"""Places for a proxy's requests: from the coordinator, or without it by least KV load."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

from rescheduler.coordination.link import CoordinatorSilentError, Link
from rescheduler.engines.deployment import ProxyOptions
from rescheduler.openai.openai_request import RequestRefusedError
from rescheduler.placement.dispatcher import Dispatcher
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.live_request import LiveRequest

__all__ = ["CoordinatedPlacer"]

_SLACK_SECONDS = 5.0


class CoordinatedPlacer:
    """Asks the coordinator for places while it answers, and finds them itself while it does not.

    Args:
        link: to the coordinator.
        fallback: places by least KV load.
        options: bounds and deadlines.
        clock: seconds.
        published: called when this proxy has placed a request by itself: its peers should know.
    """

    def __init__(
        self,
        link: Link,
        fallback: Dispatcher[LiveRequest],
        options: ProxyOptions,
        clock: Callable[[], float],
        published: Callable[[], None],
    ) -> None:
        self._link, self._fallback, self._options = link, fallback, options
        self._clock, self._published = clock, published

    @property
    def usable(self) -> Collection[InstanceState]:
        """Decode instances that new requests may go to."""
        return self._fallback.usable

    @property
    def waiting(self) -> Collection[LiveRequest]:
        """Requests that wait for a decode instance."""
        return [*self._link.asked, *self._fallback.waiting]

    @property
    def waiting_for_prefill(self) -> int:
        """Requests that wait for a prefill instance."""
        return self._link.asked_for_prefill + self._fallback.waiting_for_prefill

    @property
    def step_seconds(self) -> float:
        """Mean time between two tokens of a request, pauses left out."""
        return self._fallback.step_seconds

    def admit(self) -> None:
        """Refuse a new request when there is no room for it, here or in the whole cluster.

        Raises:
            RequestRefusedError: 503 if no decode instance is in service, 429 if too many wait, or
                this proxy has as many requests as the coordinator hears of.
        """
        self._fallback.admit()
        if self._link.full:
            raise RequestRefusedError(
                429, "this proxy has too many requests; try another one", retry_after=1
            )
        view = self._link.view if self._link.alive else None
        if view is None or view.waiting < self._options.pool:
            return
        # However many wait, the coordinator lets each proxy have its share of them.
        share = max(1, self._options.pool // max(1, len(view.proxies)))
        if len(self._link.asked) + self._link.asked_for_prefill >= share:
            raise RequestRefusedError(
                429, f"{view.waiting} requests wait already; try again later", retry_after=1
            )

    async def take_prefill(self, request: LiveRequest) -> InstanceState | None:
        """Wait for a place on a prefill instance; None if none is in service.

        Raises:
            RequestRefusedError: 503, no place in time.
        """
        async with _in_time(self._options.pool_seconds, "prefill"):
            while True:
                if self._link.alive:
                    with suppress(CoordinatorSilentError):
                        return await self._link.ask(request, for_prefill=True)
                elif await self._by_itself(self._fallback.take_prefill(request)):
                    return request.instance

    async def place(self, request: LiveRequest) -> InstanceState:
        """Wait for a place on a decode instance; the request is counted there then.

        Raises:
            RequestRefusedError: 503, none in time.
        """
        request.wait(self._clock())
        async with _in_time(self._options.pool_seconds, "decode"):
            while request.instance is None:
                if self._link.alive:
                    with suppress(CoordinatorSilentError):
                        await self._link.ask(request, for_prefill=False)
                else:
                    await self._by_itself(self._fallback.place(request))
        return request.instance

    def wake(self) -> None:
        """Decide soon, where it is not the coordinator that does."""
        self._fallback.wake()

    def step_took(self, seconds: float) -> None:
        """Note the time between two tokens of a request."""
        self._fallback.step_took(seconds)
        self._link.step_seconds = self._fallback.step_seconds

    def has_another(self, request: LiveRequest) -> bool:
        """Return whether an instance is in service that has not failed or turned away a request."""
        return self._fallback.has_another(request)

    def compile(self) -> None:
        """Decide once on a made-up cluster, so that no request waits for a compiler."""
        self._fallback.compile()

    async def _by_itself(self, place: Coroutine[Any, Any, InstanceState | None]) -> bool:
        """Wait for a place that this proxy finds itself, or until the coordinator is back.

        Returns:
            Whether the place, or that there is none, was found.
        """
        self._link.give_up()  # so that `back` is not from before it fell silent
        finding = asyncio.create_task(place)
        back = asyncio.create_task(self._link.back.wait())
        try:
            await asyncio.wait({finding, back}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            back.cancel()
            finding.cancel()
            await asyncio.wait({finding})
        if finding.cancelled():
            return False
        finding.result()
        self._published()
        return True


@asynccontextmanager
async def _in_time(seconds: float, what: str) -> AsyncIterator[None]:
    """End a wait that the coordinator, which would end it earlier, has not ended."""
    try:
        async with asyncio.timeout(seconds + _SLACK_SECONDS):
            yield
    except TimeoutError as error:
        message = f"no {what} instance had room in time"
        raise RequestRefusedError(503, message, retry_after=5) from error
