"""The coordinator: everything that places and moves the requests of many proxies, put together."""

import asyncio
import gc
import logging
import uuid
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path

from aiohttp import web
from prometheus_client.core import GaugeMetricFamily, Metric

from rescheduler.commands.event_loop import end_when_asked, log_serving, run_server
from rescheduler.coordination.coordinated_cluster import instances_digest
from rescheduler.coordination.messages import RefusedMessages
from rescheduler.coordinator.session import Mirror, Session, Shared
from rescheduler.coordinator.sessions import Reception, Sessions
from rescheduler.engines.deployment import Deployment, DeploymentError
from rescheduler.engines.emulated_deployment import in_real_time
from rescheduler.engines.launch_engines import bound_address
from rescheduler.page.live_snapshots import LiveSnapshots
from rescheduler.page.snapshot import SnapshotFeed, recording, refuse_log
from rescheduler.placement.cluster import Cluster, ClusterMetrics
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.placeable import MoveOutcome
from rescheduler.placement.planner import Drainer, PlannerLoop
from rescheduler.serving.admin_app import AdminListener
from rescheduler.serving.connection import (
    cannot_listen,
    listening_at,
    monitoring_routes,
    operators_server,
)

logger = logging.getLogger("headway.serve")

_OUTCOMES = frozenset(
    {"moved", "rolled_back", "not_copied", "not_frozen", "ended", "no_room", "unlike", "no_answer"}
    | {"gone", "refused"}
)


class CoordinatorMetrics(ClusterMetrics[Mirror]):
    """Those of its cluster, and of the proxies.

    Attributes:
        moves: orders to move a request.
    """

    def __init__(
        self, cluster: Cluster[Mirror], sessions: Mapping[str, Session], refused: RefusedMessages
    ) -> None:
        self._sessions = sessions
        tasks = "asyncio tasks: one for each request that waits, none that stays when they go"
        super().__init__(cluster, "headway_coordinator", tasks, [refused])
        self.moves = self._counter(
            "headway_coordinator_migrations",
            "orders to move a request, by how they ended",
            ["source", "target", "outcome"],
        )

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges as they are now."""
        yield from super().collect()
        connected = sum(session.known for session in self._sessions.values())
        yield GaugeMetricFamily(
            "headway_coordinator_num_proxies", "proxies that are connected", value=connected
        )


class Coordinator:
    """Decides for all proxies; make it, `start` it and `close` it in one event loop.

    Attributes:
        cluster: the instances, and what proxies report of their requests.
        sessions: with the proxies, by name.

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
        self.options = options
        self.cluster = cluster = Cluster[Mirror](deployment)
        refused = RefusedMessages("headway_coordinator_refused_messages", "proxy")
        wake = asyncio.Event()
        self._shared = Shared(
            incarnation=uuid.uuid4().hex,
            cluster=cluster,
            pool=deployment.proxy.pool,
            names={},
            clock=asyncio.get_running_loop().time,
            wake=wake.set,
            settled=asyncio.Event(),
        )
        digest = instances_digest(deployment)
        sessions = Sessions(self._shared, digest, options.lost_seconds, refused)
        self.sessions = sessions.by_name
        endpoint = bound_address(options.endpoint, "coordinator.endpoint")
        self._reception = Reception(endpoint, deployment.keys_folder, sessions, refused, wake)
        self.metrics = CoordinatorMetrics(cluster, self.sessions, refused)
        self.drainer = Drainer(cluster, self._move)

    @property
    def endpoint(self) -> str:
        """Where proxies connect."""
        return self._reception.endpoint

    @property
    def ready(self) -> bool:
        """Whether requests are placed."""
        return self._shared.settled.is_set()

    async def start(self) -> None:
        """Ask every instance how it is, hear the proxies, and begin to plan and drain."""
        cluster = self.cluster
        await cluster.start()
        if self.metrics.scores is not None:
            cluster.forever(self.metrics.scores.run())
        cluster.forever(self.drainer.run())
        if cluster.planner is not None:
            planned = self.metrics.planning.observe
            cluster.forever(PlannerLoop(cluster, self._move, planned).run())
        cluster.forever(self._reception.run())
        cluster.forever(self._settle())

    async def settled(self) -> None:
        """Wait until proxies have had the time to report what runs: requests are placed then."""
        await self._shared.settled.wait()

    async def close(self) -> None:
        """End what runs in the background, and close every connection."""
        await self.cluster.close()
        self._reception.close()

    async def _settle(self) -> None:
        """Place nothing before the proxies have reported what runs: it would count for nothing."""
        await asyncio.sleep(self.options.settle_seconds)
        self._shared.settled.set()

    async def _move(self, request: Mirror, target: InstanceState, why: str) -> MoveOutcome:
        """Have its proxy move a request; return how that ended, as soon as it is known."""
        source, session = request.instance, self.sessions.get(request.session)
        if source is None or session is None or not request.can_move:
            return MoveOutcome("gone")
        ended = await session.move(request, target, why)
        if ended.outcome not in _OUTCOMES:  # a metric must not get labels without end
            ended = MoveOutcome("other", ended.pause)
        way = source.name, target.name, ended.outcome
        self.metrics.moves.labels(*way).inc()
        self.cluster.moves.ended(request, source, target, why, ended)
        said = "request %s, %d tokens: %s to %s: %s (%s)"
        logger.info(said, request.id, request.context_tokens, *way, why)
        return ended


def coordinator(config: Deployment, record: Path | None = None, verbose: bool = False) -> None:
    """Place and move the requests of many proxies, as one proxy does its own.

    Every proxy is a `headway serve` with the same deployment file, on any machine. The coordinator
    carries no tokens: while it is away, the proxies place requests themselves, by least KV load,
    and move none. When it is back it learns from them what runs. `headway drain` reaches it on
    `proxy.admin_port` of its machine, where it also serves a page that shows requests, forecasts
    and moves of all proxies live: it prints the address. Ctrl-C or SIGTERM stops it.

    Args:
        config: the deployment, with a section `coordinator`.
        record: log twice a second what the page shows to this file, for `headway replay`; it must
            not exist.
        verbose: also log where requests go, why none is moved, and the messages of libraries.

    Raises:
        DeploymentError: the deployment has no coordinator, or it cannot serve it.
        OSError: the file to record to exists, or cannot be written.
    """
    log_serving(verbose)
    if record is not None:
        refuse_log(record)
    run_server(_coordinate(in_real_time(config), record))


async def _coordinate(deployment: Deployment, record: Path | None) -> None:
    ended = asyncio.Event()
    end_when_asked(ended)
    coordinator = Coordinator(deployment)
    feed = SnapshotFeed(LiveSnapshots(coordinator.cluster, scores=coordinator.metrics.scores))
    admin = AdminListener(coordinator.drainer, deployment.proxy.admin_port, feed=feed)
    options, stack = coordinator.options, AsyncExitStack()
    try:
        await coordinator.start()
        app = web.Application()
        app.add_routes(monitoring_routes(lambda: coordinator.ready, coordinator.metrics.text))
        try:
            where = listening_at(options.host, options.port)
            await stack.enter_async_context(operators_server(app, **where))
        except OSError as error:
            raise cannot_listen("coordinator.port", options.host, options.port, error) from error
        settled = asyncio.create_task(coordinator.settled())
        ending = asyncio.create_task(ended.wait())
        await asyncio.wait({settled, ending}, return_when=asyncio.FIRST_COMPLETED)
        if ended.is_set():
            return
        await admin.start()  # before, an instance would seem empty that is not
        gc.collect()
        gc.freeze()  # else whatever has been imported is looked through now and then: 0.1 s
        print(f"coordinating on {coordinator.endpoint}", flush=True)
        print(admin.where_to_see, flush=True)
        async with recording(feed, record):
            await ending
    finally:
        await admin.close()
        await stack.aclose()
        await coordinator.close()
