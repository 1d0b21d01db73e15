"""The coordinator: everything that places and moves the requests of many proxies, put together."""

import asyncio
import errno
import gc
import logging
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path

import zmq
import zmq.asyncio
from aiohttp import web
from prometheus_client.core import GaugeMetricFamily, Metric

from predictor.live.zmq_sockets import apply_curve, bind_socket, refuse_open_endpoint
from rescheduler.commands.event_loop import end_when_asked, log_serving, run_server
from rescheduler.coordination.coordinated_cluster import instances_digest
from rescheduler.coordination.link_socket import beats, message_socket
from rescheduler.coordination.messages import (
    MOST_SESSIONS,
    CoordinationError,
    Notice,
    Reason,
    RefusedMessages,
    Report,
    View,
    decode,
    encode,
)
from rescheduler.coordinator.session import Mirror, Session, Shared
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

_LEAST_STEP_SECONDS = 1e-3


class Sessions:
    """Begins a conversation with every proxy that reports, and ends it when the proxy is gone.

    A session belongs to the connection that it began on. Another connection takes it over only
    once the first is gone, and only in the session's name, which nobody else is told.

    Args:
        deployment: digest of the instances, which proxies must list alike.
        lost_seconds: after which a proxy from which nothing comes is taken to be gone.
    """

    def __init__(
        self, shared: Shared, deployment: str, lost_seconds: float, refused: RefusedMessages
    ) -> None:
        self._shared, self._cluster = shared, shared.cluster
        self.by_name: dict[str, Session] = {}
        self._by_peer: dict[bytes, Session] = {}
        self._gone: dict[str, dict[int, Mirror]] = {}  # requests of proxies that may come back
        self._begun = 0
        self._first: float | None = None
        self._deployment, self._lost_seconds = deployment, lost_seconds
        self._refused = refused

    async def receive(self, report: Report, peer: bytes, address: str | None) -> Notice | None:
        """Take over what a proxy says by a connection; return a refusal of it, if there is one."""
        if report.deployment != self._deployment:
            why = "its deployment file lists other instances than the coordinator's"
            return self._refusal(report, address, "deployment", "it lists other instances", why)
        session, spoken_for = self.by_name.get(report.session), self._by_peer.get(peer)
        if session is None and spoken_for is None and len(self.by_name) >= MOST_SESSIONS:
            why = f"there are as many proxies as there may be, {MOST_SESSIONS}"
            return self._refusal(report, address, "full", f"there are {MOST_SESSIONS}", why)
        taken = session is not None and session.peer is not None
        if spoken_for is not session and (spoken_for is not None or taken):
            if self._refused.count("proxy", "session"):
                logger.warning("a proxy (%s): speaks for another one; ignored", address)
            return None
        if session is None:
            session = self._begin(report, peer, address)
        elif session.peer is None:
            session.peer, session.address = peer, address
            self._by_peer[peer] = session
            logger.info("%s: connected again", session)
        try:
            await session.receive(report)
        except CoordinationError as error:
            if self._refused.count("proxy", error.reason):
                logger.warning("%s: %s; its requests are asked for again", session, error)
            if error.reason == "content":
                await session.forget_all()
        except Exception:  # no report may end the coordinator
            logger.exception("%s: invalid report; its requests are asked for again", session)
            await session.forget_all()
        return None

    async def notices(self, beat: bool) -> AsyncIterator[tuple[Session, Notice]]:
        """Yield what there is to say; at a beat also a view, and who is lost is forgotten."""
        view = None
        if beat:
            await self._forget_lost()
            self._cluster.step.seconds = self._step_seconds()
            if self._shared.settled.is_set():
                view = self._view()
        for session in list(self.by_name.values()):
            try:
                notice = session.notice(view) if session.peer is not None else None
            except Exception:
                logger.exception("%s: what there is to say cannot be said", session)
                continue
            if notice is not None:
                yield session, notice

    def disconnected(self, session: Session) -> None:
        """Note that a session's connection is gone: its proxy may come back on another one."""
        if session.peer is not None:
            del self._by_peer[session.peer]
            session.peer = None

    def _refusal(
        self, report: Report, address: str | None, reason: Reason, logged: str, why: str
    ) -> Notice:
        if self._refused.count("proxy", reason):
            logger.error("a proxy (%s): refused: %s", address, logged)
        return Notice(self._shared.incarnation, report.number, refused=why)

    def _begin(self, report: Report, peer: bytes, address: str | None) -> Session:
        self._begun += 1
        session = Session(report.session, self._begun, peer, address, self._shared)
        session.forgotten = self._gone.pop(report.session, {})
        self.by_name[report.session] = self._by_peer[peer] = session
        logger.info("%s: connected", session)
        self._take_draining(report)
        return session

    def _take_draining(self, report: Report) -> None:
        """Go on draining what a coordinator before this one was told to drain.

        Only while proxies come over from that one: what others remember is long out of date.
        """
        now = self._shared.clock()
        self._first = now if self._first is None else self._first
        ours = report.incarnation.startswith(self._shared.incarnation)
        if ours or not report.incarnation or now - self._first > self._lost_seconds:
            return
        for g in report.draining:
            if 0 <= g < len(self._cluster.all) and not self._cluster.all[g].drained:
                logger.info("%s: still draining", self._cluster.all[g].name)
                self._cluster.all[g].drained = True

    async def _forget_lost(self) -> None:
        now = self._shared.clock()
        for name, session in list(self.by_name.items()):
            if now - session.heard_at > self._lost_seconds:
                logger.warning("%s: gone, with %d requests", session, len(session.mirrors))
                self.disconnected(session)
                del self.by_name[name]
                self._gone[name] = session.forgotten
                if len(self._gone) > MOST_SESSIONS:
                    del self._gone[next(iter(self._gone))]
                await session.close()

    def _step_seconds(self) -> float:
        """Return the mean time between two tokens, of all requests that generate any."""
        known = [one for one in self.by_name.values() if one.step_seconds > 0 and one.mirrors]
        weight = sum(len(one.mirrors) for one in known)
        if not weight:
            return self._cluster.step.seconds
        mean = sum(one.step_seconds * len(one.mirrors) for one in known) / weight
        return max(_LEAST_STEP_SECONDS, mean)

    def _view(self) -> View:
        dispatcher = self._cluster.dispatcher
        return View(
            draining=[instance.drained for instance in self._cluster.all],
            waiting=len(dispatcher.waiting) + dispatcher.waiting_for_prefill,
        )


class Reception:
    """Hears the proxies, and sends what there is to say to them.

    Attributes:
        endpoint: that it has bound.

    Raises:
        TelemetryError: an open endpoint without keys, or keys that cannot be used.
        CoordinationError: the endpoint cannot be bound.
    """

    def __init__(
        self,
        endpoint: str,
        keys: Path | None,
        sessions: Sessions,
        refused: RefusedMessages,
        due: asyncio.Event,
    ) -> None:
        refuse_open_endpoint(endpoint, keys)
        self._sessions = sessions
        self._refused = refused
        self._due = due
        self._authenticator = None
        self._context = zmq.asyncio.Context()
        self._router = message_socket(self._context, zmq.ROUTER)
        try:
            # Sessions belong to connections: no peer may take one over by its routing id, and
            # one that is gone has to be noticed.
            self._router.setsockopt(zmq.ROUTER_HANDOVER, 0)
            self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._router.setsockopt(zmq.HEARTBEAT_IVL, 2000)
            self._router.setsockopt(zmq.HEARTBEAT_TIMEOUT, 4000)
            if keys is not None:
                self._authenticator = apply_curve(
                    self._router, keys, "watcher", serves=True, peer="watcher"
                )
            try:
                bind_socket(self._router, endpoint)
            except zmq.ZMQError as error:
                reason = zmq.strerror(error.errno or 0)
                raise CoordinationError(
                    f"coordinator.endpoint: cannot listen on {endpoint}: {reason}; is the address "
                    "this machine's, and the port free?"
                ) from error
            bound = self._router.getsockopt(zmq.LAST_ENDPOINT)
            assert isinstance(bound, bytes)
            self.endpoint = bound.rstrip(b"\0").decode()
        except BaseException:
            self.close()
            raise

    async def run(self) -> None:
        """Serve the proxies forever."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._receive())
            tasks.create_task(self._send())

    def close(self) -> None:
        """Close the socket."""
        self._router.close(linger=0)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()

    async def _receive(self) -> None:
        while True:
            first, *rest = await self._router.recv_multipart(copy=False)
            peer, address = first.bytes, _address(first)
            try:
                report = decode([frame.bytes for frame in rest], Report)
                refusal = await self._sessions.receive(report, peer, address)
            except CoordinationError as error:
                if self._refused.count("proxy", error.reason):
                    logger.warning("a proxy (%s): %s", address, error)
                continue
            if refusal is not None:
                await self._told(peer, refusal)

    async def _send(self) -> None:
        async for is_beat in beats(self._due):
            try:
                async for session, notice in self._sessions.notices(is_beat):
                    peer = session.peer
                    if peer is not None and not await self._told(peer, notice):
                        self._sessions.disconnected(session)
            except Exception:  # nothing that one proxy says may end the conversation with all
                logger.exception("not all proxies were told what there is to say")

    async def _told(self, peer: bytes, notice: Notice) -> bool:
        """Send a notice, which is lost if nobody reads it; return whether the peer is there."""
        try:
            await self._router.send_multipart([peer, *encode(notice)], flags=zmq.DONTWAIT)
        except zmq.Again:
            pass
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            return False
        return True


def _address(frame: zmq.Frame) -> str | None:
    """Return the address that a message comes from, if ZMQ knows it."""
    try:
        return str(frame.get("Peer-Address"))
    except zmq.ZMQError:
        return None


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
        record: Log to this new file what the page shows, twice a second, for `headway demo
            --replay`.
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
