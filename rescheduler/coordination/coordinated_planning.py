"""What a proxy has in place of planning of its own: a link to the coordinator, and a fallback."""

import asyncio
import hashlib
import uuid
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

from rescheduler.coordination.cluster_loads import ClusterLoads
from rescheduler.coordination.link import Link
from rescheduler.coordination.link_socket import LinkSockets
from rescheduler.coordination.placer import CoordinatedPlacer
from rescheduler.coordination.refused_messages import RefusedMessages
from rescheduler.engines.deployment import CoordinatorOptions, Deployment
from rescheduler.placement.dispatcher import Dispatcher
from rescheduler.placement.instance_state import Ejections, InstanceState
from rescheduler.placement.live_forecasts import LiveForecasts
from rescheduler.placement.live_request import LiveRequest
from rescheduler.placement.placeable import MoveOutcome, Mover, Placements
from rescheduler.routing.heuristics.join_shortest_queue import JSQLoad
from rescheduler.telemetry.subscriber import TelemetrySubscriber

__all__ = ["CoordinatedPlanning", "WatchedPlacements", "instances_digest"]


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


def instances_digest(deployment: Deployment) -> str:
    """Return a digest of the instances, which both ends of a link must list alike."""
    listed = "\n".join(f"{i.name} {i.role} {i.url}" for i in deployment.instances)
    return hashlib.blake2b(listed.encode(), digest_size=16).hexdigest()


class CoordinatedPlanning:
    """Has the coordinator place and move this proxy's requests.

    Args:
        deployment: of which this is one of the proxies.
        options: of its coordinator.
        instances: of the deployment, in its order.
        background: runs something.

    Attributes:
        placements: which of this proxy's requests are on which instance.
        placer: gives requests their places.
        link: to the coordinator.
        loads: of this proxy and its peers.
        refused: messages of the coordinator and the other proxies.
        telemetry: None: the coordinator hears it.
        forecasts: None: the coordinator has them.

    Raises:
        TelemetryError: an open endpoint without keys, or keys that cannot be used.
        CoordinationError: there is no way from this machine to the coordinator.
    """

    def __init__(
        self,
        deployment: Deployment,
        options: CoordinatorOptions,
        instances: Sequence[InstanceState],
        background: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        clock, session = asyncio.get_running_loop().time, uuid.uuid4().hex
        self._background, self._ejections = background, Ejections(instances)
        self._mover: Mover[LiveRequest] | None = None
        self.telemetry: TelemetrySubscriber | None = None
        self.forecasts: LiveForecasts | None = None
        self.link = Link(
            session,
            instances,
            instances_digest(deployment),
            options.silent_seconds,
            clock,
            self._carry_out,
            self._wake,
        )
        self.placements: Placements[LiveRequest] = WatchedPlacements(self.link.changed)
        self.loads = ClusterLoads(self.placements, instances, options.lost_seconds, clock)
        self.refused = RefusedMessages("headway_proxy_refused_messages", "coordinator", "proxy")
        self._sockets = LinkSockets(
            options.endpoint, deployment.keys_folder, self.link, self.loads, self.refused
        )
        fallback: Dispatcher[LiveRequest] = Dispatcher(
            self.loads,
            [one for one in instances if one.instance.role == "prefill"],
            [one for one in instances if one.instance.role == "decode"],
            JSQLoad(),
            None,
            None,
            deployment.proxy,
            clock,
        )
        self.placer = CoordinatedPlacer(
            self.link, fallback, deployment.proxy, clock, self._sockets.publish
        )

    def began(self, request: LiveRequest) -> None:
        """Note a request that has just arrived: the coordinator hears of it when it wants a place.

        Args:
            request: that has arrived.
        """

    def ended(self, request: LiveRequest, by_itself: bool) -> None:
        """Note a request's end; by itself: the coordinator may learn from its length."""
        self.link.ended(request, by_itself)

    def failed(self, instance: InstanceState, certain: bool) -> None:
        """Count a failure against an instance, here and at the coordinator."""
        self._ejections.count(instance, certain)
        self.link.failed(instance, certain)

    def compile(self) -> None:
        """Decide once, so that no request waits for a compiler."""
        self.placer.compile()

    def drainer(self, mover: Mover[LiveRequest]) -> None:
        """Return None: the coordinator empties instances."""
        self._mover = mover

    def loops(
        self, mover: Mover[LiveRequest], planned: Callable[[float], None]
    ) -> Iterator[Coroutine[Any, Any, None]]:
        """Yield what has to run for as long as requests do.

        Args:
            mover: carries moves out.
            planned: not called: the coordinator plans.
        """
        self._mover = mover
        yield self._sockets.run()

    def close(self) -> None:
        """Close the sockets."""
        self._sockets.close()

    def _wake(self) -> None:
        self._sockets.wake()

    def _carry_out(self, request: LiveRequest, target: InstanceState, why: str) -> None:
        self._background(self._move(request, target, why))

    async def _move(self, request: LiveRequest, target: InstanceState, why: str) -> None:
        ended = MoveOutcome("gone")
        try:
            assert self._mover is not None
            ended = await self._mover.move(request, target, why)
        finally:
            self.link.moved(request, ended)
