"""The picker: everything that picks endpoints for a deployment, put together."""

import logging

import grpc

from rescheduler.engines.deployment import Deployment, DeploymentError
from rescheduler.gateway.exchange import Exchange
from rescheduler.gateway.messages import Event, ProtocolError, read_event
from rescheduler.gateway.running_requests import RunningRequests
from rescheduler.placement.cluster import Cluster
from rescheduler.placement.live_request import LiveRequest

__all__ = ["Picker"]

logger = logging.getLogger("headway.serve")


class Picker:
    """Picks the engine of each request; make it, `start` it and `close` it in one event loop.

    Args:
        deployment: which engines, and how requests are placed.

    Attributes:
        cluster: the engines, and which requests are on which.
        largest_body_mb: largest body of a request, in MiB.
        bodies: the memory of all bodies that are being read.

    Raises:
        DeploymentError: the deployment needs more than placing, or its policy cannot be served.
    """

    def __init__(self, deployment: Deployment) -> None:
        _refuse_what_is_not_placing(deployment)
        self.largest_body_mb = deployment.proxy.largest_body_mb
        self.cluster = Cluster[LiveRequest](deployment)
        self._running = RunningRequests(self.cluster)
        self.bodies = self._running.bodies

    @property
    def ready(self) -> bool:
        """Whether new requests can be placed."""
        return bool(self.cluster.dispatcher.usable)

    async def start(self) -> None:
        """Ask every engine how it is, and go on asking."""
        await self.cluster.start()

    async def close(self) -> None:
        """End what runs in the background, and close every connection."""
        await self.cluster.close()

    async def process(self, context: "grpc.aio.ServicerContext[bytes, bytes]") -> None:
        """Answer the gateway about one HTTP request, until either of them ends it."""

        async def read() -> Event | None:
            raw: object = await context.read()
            return read_event(raw) if isinstance(raw, bytes) else None

        exchange = Exchange(read, context.write, self._running)
        try:
            await exchange.run()
        except ProtocolError as error:
            logger.warning("from %s: %s", context.peer(), error)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))


def _refuse_what_is_not_placing(deployment: Deployment) -> None:
    if deployment.prefill:
        raise DeploymentError(
            f"instances: {deployment.prefill[0].name} is a prefill instance: the picker places a "
            "request on one engine, which computes all of it; `headway serve` splits prefill from "
            "decode"
        )
    if deployment.migration is not None:
        raise DeploymentError(
            "migration: the picker places requests and does not move them; leave this section "
            "out, or use `headway serve`"
        )
    if deployment.coordinator is not None:
        raise DeploymentError(
            "coordinator: the picker decides by itself, and would place beside it; leave this "
            "section out, or use `headway serve`"
        )
