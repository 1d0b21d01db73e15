"""The coordinator's conversations with all proxies, without the socket."""

import logging
from collections.abc import Iterator

from rescheduler.coordination.messages import Notice, Report, View
from rescheduler.coordinator.session import Session, Shared

__all__ = ["Sessions"]

logger = logging.getLogger("headway.serve")


class Sessions:
    """Begins a conversation with every proxy that reports, and ends it when the proxy is gone.

    Args:
        deployment: digest of the instances, which proxies must list alike.
        lost_seconds: after which a proxy from which nothing comes is taken to be gone.

    Attributes:
        by_name: of the proxies' processes.
    """

    def __init__(self, deployment: str, lost_seconds: float) -> None:
        self.by_name: dict[str, Session] = {}
        self._begun = 0
        self._first: float | None = None
        self._deployment, self._lost_seconds = deployment, lost_seconds
        self._refused: dict[str, None] = {}

    def receive(self, report: Report, shared: Shared) -> Notice | None:
        """Take over what a proxy says; return a refusal, if it cannot be worked with.

        Args:
            report: of the proxy.
            shared: what all sessions have in common.
        """
        name = report.session
        if report.deployment != self._deployment:
            if name not in self._refused:
                logger.error("proxy %s: refused: it lists other instances", name)
                self._refused[name] = None
            why = "its deployment file lists other instances than the coordinator's"
            return Notice(shared.incarnation, report.number, refused=why)
        session = self.by_name.get(name)
        if session is None:
            # A proxy that was only silent for long must not take its numbers for earlier ones.
            self._begun += 1
            incarnation = f"{shared.incarnation}/{self._begun}"
            session = self.by_name[name] = Session(name, incarnation, shared)
            logger.info("proxy %s: connected", name)
            self._take_draining(report, shared)
        try:
            session.receive(report)
        except Exception:  # no report may end the coordinator
            logger.exception("proxy %s: invalid report; its requests are asked for again", name)
            session.close()
        return None

    def notices(self, beat: bool, shared: Shared) -> Iterator[tuple[str, Notice]]:
        """Yield what there is to say, and to whom.

        Args:
            beat: whether it is time for a view of the cluster, and to forget who is gone.
            shared: what all sessions have in common.
        """
        view = None
        if beat:
            self._forget_lost(shared)
            shared.dispatcher.step_seconds = self._step_seconds(shared)
            if shared.settled.is_set():
                view = self._view(shared)
        for name, session in list(self.by_name.items()):
            notice = session.notice(view)
            if notice is not None:
                yield name, notice

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
            if g < len(shared.instances) and not shared.instances[g].draining:
                logger.info("%s: still draining", shared.instances[g].name)
                shared.instances[g].draining = True

    def _forget_lost(self, shared: Shared) -> None:
        now = shared.clock()
        for name, session in list(self.by_name.items()):
            if now - session.heard_at > self._lost_seconds:
                logger.warning("proxy %s: gone, with %d requests", name, len(session.mirrors))
                del self.by_name[name]
                session.close()

    def _step_seconds(self, shared: Shared) -> float:
        """Return the mean time between two tokens, of all requests that generate any."""
        known = [one for one in self.by_name.values() if one.step_seconds > 0 and one.mirrors]
        weight = sum(len(one.mirrors) for one in known)
        if not weight:
            return shared.dispatcher.step_seconds
        return sum(one.step_seconds * len(one.mirrors) for one in known) / weight

    def _view(self, shared: Shared) -> View:
        dispatcher = shared.dispatcher
        return View(
            draining=[instance.draining for instance in shared.instances],
            waiting=len(dispatcher.waiting) + dispatcher.waiting_for_prefill,
            proxies=[session.load() for session in self.by_name.values()],
        )
