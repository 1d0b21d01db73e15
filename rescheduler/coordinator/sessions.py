"""The coordinator's conversations with all proxies, without the socket."""

import asyncio
import logging
from collections.abc import AsyncIterator

from rescheduler.coordination.limits import MOST_SESSIONS
from rescheduler.coordination.messages import (
    CoordinationError,
    Notice,
    ProxyLoad,
    Report,
    View,
)
from rescheduler.coordination.peer_endpoints import PeerEndpointError, checked_endpoint
from rescheduler.coordination.refused_messages import RefusedMessages
from rescheduler.coordinator.session import Session, Shared

__all__ = ["Sessions"]

logger = logging.getLogger("headway.serve")

_LEAST_STEP_SECONDS = 1e-3
_SLICE = 4_096  # requests that are counted in one turn of the event loop


class Sessions:
    """Begins a conversation with every proxy that reports, and ends it when the proxy is gone.

    A session belongs to the connection that it began on. Another connection takes it over only
    once the first is gone, and only in the session's name, which nobody else is told.

    Args:
        deployment: digest of the instances, which proxies must list alike.
        lost_seconds: after which a proxy from which nothing comes is taken to be gone.
        refused: counts what is refused, from the sender ``proxy``.

    Attributes:
        by_name: of the proxies' processes.
    """

    def __init__(self, deployment: str, lost_seconds: float, refused: RefusedMessages) -> None:
        self.by_name: dict[str, Session] = {}
        self._by_peer: dict[bytes, Session] = {}
        self._begun = 0
        self._first: float | None = None
        self._deployment, self._lost_seconds = deployment, lost_seconds
        self._refused = refused

    async def receive(
        self, report: Report, peer: bytes, address: str | None, shared: Shared
    ) -> Notice | None:
        """Take over what a proxy says; return a refusal, if it cannot be worked with.

        Args:
            report: of the proxy.
            peer: connection that it comes through.
            address: that the proxy connects from; None if that is not known.
            shared: what all sessions have in common.
        """
        if report.deployment != self._deployment:
            if self._refused.count("proxy", "deployment"):
                logger.error("a proxy (%s): refused: it lists other instances", address)
            why = "its deployment file lists other instances than the coordinator's"
            return Notice(shared.incarnation, report.number, refused=why)
        session, spoken_for = self.by_name.get(report.session), self._by_peer.get(peer)
        if session is None and spoken_for is None and len(self.by_name) >= MOST_SESSIONS:
            if self._refused.count("proxy", "full"):
                logger.error("a proxy (%s): refused: there are %d", address, MOST_SESSIONS)
            why = f"there are as many proxies as there may be, {MOST_SESSIONS}"
            return Notice(shared.incarnation, report.number, refused=why)
        taken = session is not None and session.peer is not None
        if spoken_for is not session and (spoken_for is not None or taken):
            if self._refused.count("proxy", "session"):
                logger.warning("a proxy (%s): speaks for another one; ignored", address)
            return None
        if session is None:
            session = self._begin(report, peer, address, shared)
        elif session.peer is None:
            session.peer, session.address = peer, address
            self._by_peer[peer] = session
            logger.info("%s: connected again", session)
        self._note_endpoint(session, report.listening)
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

    async def notices(self, beat: bool, shared: Shared) -> AsyncIterator[tuple[Session, Notice]]:
        """Yield what there is to say, and to whom.

        Args:
            beat: whether it is time for a view of the cluster, and to forget who is gone.
            shared: what all sessions have in common.
        """
        view = None
        if beat:
            await self._forget_lost(shared)
            shared.dispatcher.step_seconds = self._step_seconds(shared)
            if shared.settled.is_set():
                view = await self._view(shared)
        for session in list(self.by_name.values()):
            notice = session.notice(view) if session.peer is not None else None
            if notice is not None:
                yield session, notice

    def disconnected(self, session: Session) -> None:
        """Note that a session's connection is gone: its proxy may come back on another one."""
        if session.peer is not None:
            del self._by_peer[session.peer]
            session.peer = None

    def _begin(self, report: Report, peer: bytes, address: str | None, shared: Shared) -> Session:
        self._begun += 1
        session = Session(report.session, self._begun, peer, address, shared)
        self.by_name[report.session] = self._by_peer[peer] = session
        logger.info("%s: connected", session)
        self._take_draining(report, shared)
        return session

    def _note_endpoint(self, session: Session, named: str) -> None:
        """Tell the others where to hear a proxy, unless it names what is not its own."""
        if named == session.named:
            return
        session.named, session.listening = named, ""
        try:
            session.listening = checked_endpoint(named, session.address) if named else ""
        except PeerEndpointError as error:
            if self._refused.count("proxy", "endpoint"):
                logger.warning("%s: others do not hear it: %s: %s", session, named, error)

    def _take_draining(self, report: Report, shared: Shared) -> None:
        """Go on draining what a coordinator before this one was told to drain.

        Only while proxies come over from that one: what others remember is long out of date.
        """
        now = shared.clock()
        self._first = now if self._first is None else self._first
        ours = report.incarnation.startswith(shared.incarnation)
        if ours or not report.incarnation or now - self._first > self._lost_seconds:
            return
        for g in report.draining:
            if 0 <= g < len(shared.instances) and not shared.instances[g].draining:
                logger.info("%s: still draining", shared.instances[g].name)
                shared.instances[g].draining = True

    async def _forget_lost(self, shared: Shared) -> None:
        now = shared.clock()
        for name, session in list(self.by_name.items()):
            if now - session.heard_at > self._lost_seconds:
                logger.warning("%s: gone, with %d requests", session, len(session.mirrors))
                self.disconnected(session)
                del self.by_name[name]
                await session.close()

    def _step_seconds(self, shared: Shared) -> float:
        """Return the mean time between two tokens, of all requests that generate any."""
        known = [one for one in self.by_name.values() if one.step_seconds > 0 and one.mirrors]
        weight = sum(len(one.mirrors) for one in known)
        if not weight:
            return shared.dispatcher.step_seconds
        mean = sum(one.step_seconds * len(one.mirrors) for one in known) / weight
        return max(_LEAST_STEP_SECONDS, mean)

    async def _view(self, shared: Shared) -> View:
        dispatcher, proxies, counted = shared.dispatcher, [], 0
        for session in list(self.by_name.values()):
            proxies.append(ProxyLoad(session.number, session.listening, session.load()))
            counted += len(session.mirrors)
            if counted >= _SLICE:
                counted = 0
                await asyncio.sleep(0)
        return View(
            draining=[instance.draining for instance in shared.instances],
            waiting=len(dispatcher.waiting) + dispatcher.waiting_for_prefill,
            proxies=proxies,
        )
