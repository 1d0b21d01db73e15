"""The requests that gateways have been told where to send, until their answers end."""

import asyncio
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from rescheduler.gateway.endpoints import Endpoints, nowhere_to_go
from rescheduler.gateway.engine_answer import EngineAnswer
from rescheduler.gateway.suspects import Suspects
from rescheduler.openai.openai_request import ClientRequest
from rescheduler.placement.dispatcher import Dispatcher
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.live_forecasts import LiveForecasts
from rescheduler.placement.live_request import LiveRequest
from rescheduler.placement.placements import Placements

__all__ = ["RunningRequests"]


class RunningRequests:
    """Places requests, and knows of each where it is and how many tokens it has.

    Args:
        placements: which requests are on which instance.
        dispatcher: chooses instances.
        forecasts: of remaining lengths; None if no engine publishes them.
        endpoints: of the engines.
        suspects: checks engines whose answers are errors, or are cut.
    """

    def __init__(
        self,
        placements: Placements[LiveRequest],
        dispatcher: Dispatcher[LiveRequest],
        forecasts: LiveForecasts | None,
        endpoints: Endpoints,
        suspects: Suspects,
    ) -> None:
        self._placements, self._dispatcher = placements, dispatcher
        self._forecasts, self._endpoints, self._suspects = forecasts, endpoints, suspects

    def admit(self) -> None:
        """Refuse a new request when there is no room for it.

        Raises:
            RequestRefusedError: 503 if no engine is in service, 429 if too many requests wait.
        """
        self._dispatcher.admit()

    @contextmanager
    def begun(self, client: ClientRequest, name: str | None) -> Iterator[LiveRequest]:
        """Count a request that has just arrived, until it ends in whatever way.

        Its body is not kept.

        Args:
            client: what is asked for.
            name: that the client gave it.
        """
        id = uuid.uuid4().hex
        now = asyncio.get_running_loop().time()
        client = replace(client, body={}, direct=client.direct or "gateway")
        request = LiveRequest.new(id, name or id, client, {}, now, None, self._placements)
        if self._forecasts is not None:
            self._forecasts.began(request)
        try:
            yield request
        finally:
            self.end(request, None)

    async def place(self, request: LiveRequest, subset: frozenset[str] | None) -> InstanceState:
        """Wait until the policy gives a request an engine; it is counted there then.

        Args:
            request: that has arrived.
            subset: endpoints that it may go to; None: all.

        Raises:
            RequestRefusedError: 503, none in time, or none of those is in service.
        """
        request.avoid = self._endpoints.outside(subset)
        if not self._dispatcher.has_another(request):
            raise nowhere_to_go()
        instance = await self._dispatcher.place(request)
        if instance in request.avoid:  # meanwhile the others have left service
            raise nowhere_to_go()
        return instance

    def any_instance(self, subset: frozenset[str] | None) -> InstanceState:
        """Return an engine in service for what is no work: the one with the fewest requests.

        Args:
            subset: endpoints that it may go to; None: all.

        Raises:
            RequestRefusedError: 503, none is in service.
        """
        outside = self._endpoints.outside(subset)
        usable = [one for one in self._dispatcher.usable if one not in outside]
        if not usable:
            raise nowhere_to_go()
        return min(usable, key=lambda instance: len(self._placements.on(instance)))

    def answered(self, request: LiveRequest, answer: EngineAnswer) -> None:
        """Note an engine's answer to a request, of which the headers have come."""
        assert request.instance is not None
        if answer.failed:
            self.failed(request.instance)
        elif answer.ok:
            request.accepted()

    def failed(self, instance: InstanceState) -> None:
        """Note that an engine, or the gateway in its place, answered with a server's error."""
        self._suspects.erred(instance)

    def generated(self, request: LiveRequest, total: int) -> None:
        """Note how many tokens a request has by now, unless more were known already."""
        instance, tokens = request.instance, total - request.generated_tokens
        if tokens <= 0 or instance is None:
            return
        arrival = request.untracked_tokens(tokens, asyncio.get_running_loop().time())
        if arrival.first:
            instance.breaker.succeeded()
        if arrival.waited is not None:
            self._dispatcher.step_took(arrival.waited / tokens)

    def end(self, request: LiveRequest, answer: EngineAnswer | None) -> None:
        """Forget a request; one that has ended already has no further end.

        Args:
            request: that ends.
            answer: the whole answer; None: there was none, or it was cut.
        """
        if request.ended:
            return
        if request.instance is not None and answer is None:
            self._suspects.cut(request.instance)
        request.finish()
        if self._forecasts is not None:
            by_itself = answer is not None and answer.ok and request.generated_tokens > 0
            self._forecasts.ended(request, by_itself)
        self._dispatcher.wake()
