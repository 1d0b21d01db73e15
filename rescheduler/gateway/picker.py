"""The picker: everything that picks endpoints for a deployment, put together."""

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any

import grpc

from rescheduler.engines.deployment import Deployment, DeploymentError
from rescheduler.gateway.exchange import Exchange
from rescheduler.gateway.messages import Event, ProtocolError, read_event
from rescheduler.gateway.running_requests import Endpoints, RunningRequests, Suspects
from rescheduler.openai.body_memory import BodyMemory
from rescheduler.placement.dispatcher import Dispatcher
from rescheduler.placement.guarded_policy import PrefillBudgets, deployed_policy
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.live_forecasts import LiveForecasts
from rescheduler.placement.live_request import LiveRequest
from rescheduler.placement.placeable import Placements
from rescheduler.proxy.prober import Prober
from rescheduler.proxy.upstream import Upstream, engine_key
from rescheduler.telemetry.subscriber import TelemetrySubscriber
from rescheduler.telemetry.telemetry_view import TelemetryView
from rescheduler.transfer.control_client import ControlClient

__all__ = ["Picker"]

logger = logging.getLogger("headway.serve")


class Picker:
    """Picks the engine of each request; make it, `start` it and `close` it in one event loop.

    Args:
        deployment: which engines, and how requests are placed.

    Attributes:
        instances: the engines, by name.
        placements: which requests are on which engine.
        dispatcher: chooses engines.
        largest_body_mb: largest body of a request, in MiB.

    Raises:
        DeploymentError: the deployment needs more than placing, or its policy cannot be served.
    """

    def __init__(self, deployment: Deployment) -> None:
        _refuse_what_is_not_placing(deployment)
        policy = deployed_policy(deployment)
        options, keys = deployment.proxy, deployment.keys_folder
        self.largest_body_mb = options.largest_body_mb
        self._stack = AsyncExitStack()
        self._tasks: set[asyncio.Task[None]] = set()
        self.instances: dict[str, InstanceState] = {}
        self.placements: Placements[LiveRequest] = Placements()
        for instance in deployment.instances:
            control = ControlClient(instance.control, keys) if instance.control else None
            if control is not None:
                self._stack.callback(control.close)
            self.instances[instance.name] = InstanceState(instance, options, control)
        states = list(self.instances.values())
        self._endpoints, self._options = Endpoints(states), options
        self.bodies = BodyMemory(options.largest_body_mb, options.bodies_mb, share=1.0)
        published = {i.telemetry: i.name for i in deployment.instances if i.telemetry is not None}
        forecasts, budgets = None, None
        if published:
            telemetry = TelemetrySubscriber(published, keys=keys, view=TelemetryView(history=False))
            self._stack.callback(telemetry.close)
            forecasts = LiveForecasts(telemetry)
            if policy.needs_budget:
                budgets = PrefillBudgets(telemetry)
        upstream = Upstream(options, engine_key(options))
        self._stack.push_async_callback(upstream.close)
        clock = asyncio.get_running_loop().time
        self.dispatcher: Dispatcher[LiveRequest] = Dispatcher(
            self.placements, [], states, policy, forecasts, budgets, options, clock
        )
        self._prober = Prober(upstream, self.dispatcher.wake, options, deployment.served_name)
        suspects = Suspects(upstream, self._prober, deployment.served_name, self._background)
        self._running = RunningRequests(
            self.placements, self.dispatcher, forecasts, self._endpoints, suspects
        )

    @property
    def ready(self) -> bool:
        """Whether new requests can be placed."""
        return bool(self.dispatcher.usable)

    async def start(self) -> None:
        """Ask every engine how it is, and go on asking."""
        await asyncio.to_thread(self.dispatcher.compile)
        await asyncio.gather(*map(self._prober.probe, self.instances.values()))
        for instance in self.instances.values():
            self._background(self._prober.run(instance))

    async def close(self) -> None:
        """End what runs in the background, and close every connection."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._stack.aclose()

    async def process(self, context: "grpc.aio.ServicerContext[bytes, bytes]") -> None:
        """Answer the gateway about one HTTP request, until either of them ends it."""

        async def read() -> Event | None:
            raw: object = await context.read()
            return read_event(raw) if isinstance(raw, bytes) else None

        exchange = Exchange(
            read,
            context.write,
            self._running,
            self._endpoints,
            self.bodies,
            self._options.body_seconds,
        )
        try:
            await exchange.run()
        except ProtocolError as error:
            logger.warning("from %s: %s", context.peer(), error)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("in the background: %r", task.exception(), exc_info=task.exception())


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
