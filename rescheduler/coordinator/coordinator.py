"""The coordinator: everything that places and moves the requests of many proxies, put together."""

import asyncio
import logging
import uuid
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from rescheduler.coordination.coordinated_planning import instances_digest
from rescheduler.coordination.refused_messages import RefusedMessages
from rescheduler.coordinator.coordinator_metrics import CoordinatorMetrics
from rescheduler.coordinator.fair_pool import FairPool
from rescheduler.coordinator.mirror import Mirror
from rescheduler.coordinator.session import Session, Shared
from rescheduler.coordinator.sessions import Reception, Sessions
from rescheduler.engines.deployment import Deployment, DeploymentError
from rescheduler.engines.launch_engines import bound_address
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.live_forecasts import LiveForecasts
from rescheduler.placement.placeable import MoveOutcome, Placements
from rescheduler.proxy.migrator import EndedMove, MoveHistory
from rescheduler.proxy.planner_loop import Planning
from rescheduler.proxy.prober import Prober
from rescheduler.proxy.upstream import Upstream, engine_key
from rescheduler.telemetry.subscriber import TelemetrySubscriber
from rescheduler.transfer.control_client import ControlClient

__all__ = ["Coordinator", "Orders"]


logger = logging.getLogger("headway.serve")

_OUTCOMES = frozenset(
    {"moved", "rolled_back", "not_copied", "not_frozen", "ended", "no_room", "no_answer", "gone"}
    | {"refused"}
)


class Orders:
    """Has proxies move requests.

    Args:
        sessions: of the proxies, by name.
        metrics: counts the orders.

    Attributes:
        history: of the latest moves.
    """

    def __init__(self, sessions: Mapping[str, Session], metrics: CoordinatorMetrics) -> None:
        self._sessions, self._metrics = sessions, metrics
        self.history = MoveHistory()

    async def move(self, request: Mirror, target: InstanceState, why: str) -> MoveOutcome:
        """Order a request to move; return how that ended, as soon as it is known."""
        source, session = request.instance, self._sessions.get(request.session)
        if source is None or session is None or not request.can_move:
            return MoveOutcome("gone")
        ended = await session.move(request, target, why)
        if ended.outcome not in _OUTCOMES:  # a metric must not get labels without end
            ended = MoveOutcome("other", ended.pause)
        self._metrics.moves.labels(source.name, target.name, ended.outcome).inc()
        if ended.pause is not None:
            self.history.landed(request.id, ended.pause)
        tokens = request.generated_tokens
        self.history.ended(
            request.id, request.name, source.name, target.name, tokens, why, ended.outcome
        )
        logger.info(
            "request %s, %d tokens: %s to %s: %s (%s)",
            request.id,
            request.context_tokens,
            source.name,
            target.name,
            ended.outcome,
            why,
        )
        return ended


class Coordinator:
    """Decides for all proxies; make it, `start` it and `close` it in one event loop.

    Args:
        deployment: which instances, and how.

    Attributes:
        deployment: as given.
        options: of the deployment.
        instances: all, by name.
        placements: which requests are on which instance, as proxies report them.
        dispatcher: chooses instances.
        sessions: with the proxies, by name.
        drainer: empties instances.
        metrics: counts and times.

    Raises:
        DeploymentError: no coordinator in the deployment, or policies that cannot be served.
        CoordinationError: its endpoint cannot be bound.
    """

    def __init__(self, deployment: Deployment) -> None:
        options = deployment.coordinator
        if options is None:
            raise DeploymentError(
                "coordinator: the deployment has none: add coordinator.endpoint, such as "
                "tcp://127.0.0.1:5700, which its proxies connect to"
            )
        keys, proxy = deployment.keys_folder, deployment.proxy
        self.deployment, self.options = deployment, options
        self._stack = AsyncExitStack()
        self._tasks: set[asyncio.Task[None]] = set()
        self.instances: dict[str, InstanceState] = {}
        for instance in deployment.instances:
            control = ControlClient(instance.control, keys) if instance.control else None
            if control is not None:
                self._stack.callback(control.close)
            self.instances[instance.name] = InstanceState(instance, proxy, control)
        states = list(self.instances.values())
        self._planning = Planning[Mirror](deployment, states, self._background)
        self._stack.callback(self._planning.close)
        self.placements: Placements[Mirror] = self._planning.placements
        endpoint = bound_address(options.endpoint, "coordinator.endpoint")
        refused = RefusedMessages("headway_coordinator_refused_messages", "proxy")
        sessions = Sessions(instances_digest(deployment), options.lost_seconds, refused)
        self.sessions = sessions.by_name
        self._reception = Reception(endpoint, keys, sessions, refused)
        self._stack.callback(self._reception.close)
        self.dispatcher = self._planning.placer
        self.metrics = CoordinatorMetrics(
            self.placements, states, self.dispatcher, self.sessions, refused
        )
        self._orders = Orders(self.sessions, self.metrics)
        self.drainer = self._planning.drainer(self._orders)
        upstream = Upstream(proxy, engine_key(proxy))
        self._stack.push_async_callback(upstream.close)
        self._prober = Prober(upstream, self.dispatcher.wake, proxy, deployment.served_name)
        self._shared = Shared(
            incarnation=uuid.uuid4().hex,
            instances=states,
            placements=self.placements,
            dispatcher=self.dispatcher,
            prefill_pool=FairPool(proxy.pool),
            decode_pool=FairPool(proxy.pool),
            names=Counter(),
            forecasts=self._planning.forecasts,
            failed=self._failed,
            background=self._background,
            clock=asyncio.get_running_loop().time,
            wake=self._reception.wake,
            settled=asyncio.Event(),
        )

    @property
    def endpoint(self) -> str:
        """Where proxies connect."""
        return self._reception.endpoint

    @property
    def forecasts(self) -> LiveForecasts | None:
        """Of remaining lengths; None if no engine publishes them."""
        return self._planning.forecasts

    @property
    def telemetry(self) -> TelemetrySubscriber | None:
        """What the engines publish; None if none does."""
        return self._planning.telemetry

    @property
    def latest_moves(self) -> Sequence[EndedMove]:
        """The latest moves that have ended, oldest first."""
        return self._orders.history.latest

    @property
    def ready(self) -> bool:
        """Whether requests are placed."""
        return self._shared.settled.is_set()

    async def start(self) -> None:
        """Ask every instance how it is, hear the proxies, and begin to plan and drain."""
        await asyncio.to_thread(self._planning.compile)
        await asyncio.gather(*map(self._prober.probe, self.instances.values()))
        for instance in self.instances.values():
            self._background(self._prober.run(instance))
        self._background(self.drainer.run())
        for loop in self._planning.loops(self._orders, self.metrics.planning.observe):
            self._background(loop)
        self._background(self._reception.run(self._shared))
        self._background(self._settle())

    async def settled(self) -> None:
        """Wait until proxies have had the time to report what runs: requests are placed then."""
        await self._shared.settled.wait()

    async def close(self) -> None:
        """End what runs in the background, and close every connection."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._stack.aclose()

    async def _settle(self) -> None:
        """Place nothing before the proxies have reported what runs: it would count for nothing."""
        await asyncio.sleep(self.options.settle_seconds)
        self._shared.settled.set()

    def _failed(self, instance: InstanceState, certain: bool) -> None:
        """Count a failure that a proxy reports.

        On the word of proxies, at least half of a role's instances stay in service, however certain
        they are: more than that the coordinator takes out only by its own probes.
        """
        role = instance.instance.role
        peers = [one for one in self.instances.values() if one.instance.role == role]
        out = sum(not one.breaker.closed for one in peers if one is not instance)
        self._planning.failed(instance, certain and 2 * (out + 1) <= len(peers))

    def _background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("in the background: %r", task.exception(), exc_info=task.exception())
