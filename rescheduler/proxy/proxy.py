"""The proxy: everything that serves a deployment, put together."""

import asyncio
import logging
import uuid
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import Any

from tokenizers import Tokenizer

from predictor.live.curve_keys import shared_secret
from rescheduler.coordination.coordinated_planning import CoordinatedPlanning
from rescheduler.engines.deployment import Deployment
from rescheduler.openai.engine_body import EngineBodies
from rescheduler.openai.openai_request import ClientRequest
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.live_forecasts import LiveForecasts
from rescheduler.placement.live_request import LiveRequest
from rescheduler.placement.placeable import Placements
from rescheduler.placement.placer import Placer
from rescheduler.proxy.migrator import EndedMove, Migrator
from rescheduler.proxy.pass_through import PassThrough
from rescheduler.proxy.planner_loop import Planning
from rescheduler.proxy.prober import OutlierDetection, Prober
from rescheduler.proxy.proxy_metrics import ProxyMetrics, watch_loop
from rescheduler.proxy.request_flow import RequestFlow
from rescheduler.proxy.upstream import Upstream, engine_key
from rescheduler.telemetry.subscriber import TelemetrySubscriber
from rescheduler.tracing.span import NO_SPAN, create_tracer, end_request
from rescheduler.transfer.control_client import ControlClient

__all__ = ["Proxy"]

logger = logging.getLogger("headway.serve")

_FREEING_SECONDS = 1.0


class Proxy:
    """Serves one deployment; make it, `start` it and `close` it in one event loop.

    Args:
        deployment: which instances, and how.
        tokenizer: of the served model.

    Attributes:
        deployment: as given.
        instances: all, by name.
        placements: which requests are on which instance.
        dispatcher: chooses instances.
        metrics: counts and times.
        upstream: connections to the engines.
        flow: of requests that may move.
        pass_through: of those that stay.
        drainer: empties instances; None where the coordinator does.
        migrator: moves requests.
        running: requests that have arrived and not ended.
        ending: no new ones are taken.
        cutting: those that run are being ended.

    Raises:
        DeploymentError: unknown policy, or one whose forecasts no instance publishes.
    """

    def __init__(self, deployment: Deployment, tokenizer: Tokenizer) -> None:
        options, coordinator = deployment.proxy, deployment.coordinator
        self.deployment, self._tokenizer = deployment, tokenizer
        self.running = 0
        self.ending = self.cutting = False
        self._handlers: set[asyncio.Task[Any]] = set()
        self._stack = AsyncExitStack()
        self._loops: list[asyncio.Task[None]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        keys = deployment.keys_folder
        self.instances: dict[str, InstanceState] = {}
        for instance in deployment.instances:
            control = ControlClient(instance.control, keys) if instance.control else None
            if control is not None:
                self._stack.callback(control.close)
            self.instances[instance.name] = InstanceState(instance, options, control)
        states = list(self.instances.values())
        planning = (
            Planning[LiveRequest](deployment, states, self.background)
            if coordinator is None
            else CoordinatedPlanning(deployment, coordinator, states, self.background)
        )
        self._planning = planning
        self._stack.callback(planning.close)
        self.placements: Placements[LiveRequest] = planning.placements
        self.dispatcher: Placer = planning.placer
        self.upstream = Upstream(options, engine_key(options))
        self._tracer = create_tracer(options.traces)
        if self._tracer is not None:
            self._stack.push_async_callback(self._tracer.close)
        bodies = EngineBodies(shared_secret(keys, "watcher") if keys is not None else None)
        self._stack.push_async_callback(self.upstream.close)
        others = [planning.refused] if isinstance(planning, CoordinatedPlanning) else []
        self.metrics = ProxyMetrics(self.placements, states, self.dispatcher, options.pool, others)
        self.migrator = Migrator(self.upstream, bodies, options, self.metrics, self.background)
        outliers = OutlierDetection(planning.failed, self.metrics)
        self.flow = RequestFlow(
            self.upstream,
            bodies,
            self.dispatcher,
            outliers,
            self.migrator,
            self.metrics,
            options,
        )
        self.pass_through = PassThrough(
            self.flow, self.upstream, bodies, self.dispatcher, outliers, options
        )
        self.drainer = planning.drainer(self.migrator)
        self._prober = Prober(self.upstream, self.dispatcher.wake, options, deployment.served_name)

    @property
    def ready(self) -> bool:
        """Whether new requests are served."""
        return not self.ending and bool(self.dispatcher.usable)

    @property
    def forecasts(self) -> LiveForecasts | None:
        """Of remaining lengths; None if no engine publishes them."""
        return self._planning.forecasts

    @property
    def telemetry(self) -> TelemetrySubscriber | None:
        """What the engines publish; None if none does, or the coordinator hears it."""
        return self._planning.telemetry

    @property
    def latest_moves(self) -> Sequence[EndedMove]:
        """The latest moves that have ended, oldest first."""
        return self.migrator.history.latest

    async def start(self) -> None:
        """Ask every instance how it is, and begin to watch, plan and drain."""
        await asyncio.to_thread(self._planning.compile)
        await asyncio.gather(*map(self._prober.probe, self.instances.values()))
        for instance in self.instances.values():
            self._forever(self._prober.run(instance))
        if self.drainer is not None:
            self._forever(self.drainer.run())
        self._forever(watch_loop(self.metrics))
        for loop in self._planning.loops(self.migrator, self.metrics.planning.observe):
            self._forever(loop)

    async def close(self) -> None:
        """End what runs in the background, and close every connection."""
        for task in self._loops:
            task.cancel()
        if self._tasks:  # what is being freed on the engines
            await asyncio.wait(self._tasks, timeout=_FREEING_SECONDS)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._loops, *self._tasks, return_exceptions=True)
        await self._stack.aclose()

    def background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something in the background; an error in it is logged."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _forever(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(self._ended)
        self._loops.append(task)

    def new_request(
        self, client: ClientRequest, name: str | None, headers: dict[str, str]
    ) -> LiveRequest:
        """Return a request that has just arrived.

        Args:
            client: what is asked for.
            name: that the client gave it.
            headers: that engines get.
        """
        id = uuid.uuid4().hex
        name = name or id
        headers, trace = {**headers, "X-Request-Id": name}, NO_SPAN
        if self._tracer is not None:
            trace, headers = self._tracer.begin(client, name, headers)
        now = asyncio.get_running_loop().time()
        self.running += 1
        task = asyncio.current_task()
        assert task is not None
        self._handlers.add(task)
        task.add_done_callback(self._handlers.discard)
        tokenizer, placements = self._tokenizer, self.placements
        request = LiveRequest.new(id, name, client, headers, now, tokenizer, placements)
        request.trace = trace
        self._planning.began(request)
        return request

    def request_ended(self, request: LiveRequest, outcome: str) -> None:
        """Count a request's end, and learn from its length."""
        self.running -= 1
        self.metrics.requests.labels(request.client.path, outcome).inc()
        self._planning.ended(request, outcome == "ok")
        if request.trace.recorded:
            splicer = request.splicer
            given = len(splicer.output_token_ids)
            end_request(request.trace, outcome, len(splicer.prompt_token_ids), given)

    async def cut(self) -> None:
        """End all requests that still run, each with an error that its client sees."""
        self.cutting = True
        handlers = list(self._handlers)
        for task in handlers:
            task.cancel()
        if handlers:
            await asyncio.wait(handlers, timeout=_FREEING_SECONDS)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("in the background: %r", task.exception(), exc_info=task.exception())
