"""The coordinator's conversations with all proxies, without the socket."""

import asyncio
import errno
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import zmq
import zmq.asyncio

from predictor.live.zmq_sockets import apply_curve, bind_socket, refuse_open_endpoint
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
from rescheduler.coordinator.session import Session, Shared

logger = logging.getLogger("headway.serve")

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
