"""The coordinator's socket: what proxies say comes in here, and what it says goes out."""

import asyncio
import errno
import logging
import math
from contextlib import suppress
from pathlib import Path

import zmq
import zmq.asyncio

from predictor.live.zmq_sockets import apply_curve, refuse_open_endpoint
from rescheduler.coordination.limits import LARGEST_MESSAGE, MOST_UNREAD
from rescheduler.coordination.link_socket import BEAT_SECONDS
from rescheduler.coordination.messages import CoordinationError, Notice, decode_report, encode
from rescheduler.coordination.refused_messages import RefusedMessages
from rescheduler.coordinator.session import Shared
from rescheduler.coordinator.sessions import Sessions

__all__ = ["Reception"]

logger = logging.getLogger("headway.serve")

_HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS = 2_000, 4_000


class Reception:
    """Hears the proxies, and sends what there is to say to them.

    Args:
        endpoint: that it binds; port 0 takes a free one.
        keys: folder made by ``headway keys``, needed off the loopback.
        sessions: with the proxies.
        refused: counts what is refused, from the sender ``proxy``.

    Attributes:
        endpoint: that it has bound.

    Raises:
        TelemetryError: an open endpoint without keys, or keys that cannot be used.
        CoordinationError: the endpoint cannot be bound.
    """

    def __init__(
        self, endpoint: str, keys: Path | None, sessions: Sessions, refused: RefusedMessages
    ) -> None:
        refuse_open_endpoint(endpoint, keys)
        self._sessions, self._refused = sessions, refused
        self._due = asyncio.Event()
        self._authenticator = None
        self._context = zmq.asyncio.Context()
        self._router = self._context.socket(zmq.ROUTER)
        try:
            self._router.setsockopt(zmq.LINGER, 0)
            self._router.setsockopt(zmq.MAXMSGSIZE, LARGEST_MESSAGE)
            self._router.setsockopt(zmq.SNDHWM, MOST_UNREAD)
            self._router.setsockopt(zmq.RCVHWM, MOST_UNREAD)
            # Sessions belong to connections: no peer may take one over by its routing id, and
            # one that is gone has to be noticed.
            self._router.setsockopt(zmq.ROUTER_HANDOVER, 0)
            self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._router.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
            self._router.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
            self._router.setsockopt(zmq.IPV6, int("[" in endpoint))
            if keys is not None:
                self._authenticator = apply_curve(
                    self._router, keys, "watcher", serves=True, peer="watcher"
                )
            try:
                self._router.bind(endpoint)
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

    def wake(self) -> None:
        """Send soon what there is to say."""
        self._due.set()

    async def run(self, shared: Shared) -> None:
        """Serve the proxies forever.

        Args:
            shared: what their sessions have in common.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._receive(shared))
            tasks.create_task(self._send(shared))

    def close(self) -> None:
        """Close the socket."""
        self._router.close(linger=0)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()

    async def _receive(self, shared: Shared) -> None:
        while True:
            first, *rest = await self._router.recv_multipart(copy=False)
            peer, address = first.bytes, _address(first)
            try:
                report = decode_report([frame.bytes for frame in rest])
                refusal = await self._sessions.receive(report, peer, address, shared)
            except CoordinationError as error:
                if self._refused.count("proxy", error.reason):
                    logger.warning("a proxy (%s): %s", address, error)
                continue
            if refusal is not None:
                await self._told(peer, refusal)

    async def _send(self, shared: Shared) -> None:
        loop, beat = asyncio.get_running_loop(), -math.inf
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(max(beat, loop.time())):
                    await self._due.wait()
            self._due.clear()
            beats = loop.time() >= beat
            if beats:
                beat = loop.time() + BEAT_SECONDS
            try:
                async for session, notice in self._sessions.notices(beats, shared):
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
