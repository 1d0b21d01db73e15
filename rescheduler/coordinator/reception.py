"""The coordinator's socket: what proxies say comes in here, and what it says goes out."""

import asyncio
import logging
import math
from contextlib import suppress
from pathlib import Path

import zmq
import zmq.asyncio

from predictor.live.curve_keys import apply_curve, refuse_open_endpoint
from rescheduler.coordination.link_socket import BEAT_SECONDS
from rescheduler.coordination.messages import CoordinationError, decode_report, encode
from rescheduler.coordinator.session import Shared
from rescheduler.coordinator.sessions import Sessions

__all__ = ["Reception"]

logger = logging.getLogger("headway.serve")

_LARGEST_MESSAGE = 64 << 20


class Reception:
    """Hears the proxies, and sends what there is to say to them.

    Args:
        endpoint: that it binds; port 0 takes a free one.
        keys: folder made by ``headway keys``, needed off the loopback.
        sessions: with the proxies.

    Attributes:
        endpoint: that it has bound.

    Raises:
        TelemetryError: an open endpoint without keys, or keys that cannot be used.
        CoordinationError: the endpoint cannot be bound.
    """

    def __init__(self, endpoint: str, keys: Path | None, sessions: Sessions) -> None:
        refuse_open_endpoint(endpoint, keys)
        self._sessions = sessions
        self._due = asyncio.Event()
        self._peers: dict[str, bytes] = {}
        self._authenticator = None
        self._context = zmq.asyncio.Context()
        self._router = self._context.socket(zmq.ROUTER)
        try:
            self._router.setsockopt(zmq.LINGER, 0)
            self._router.setsockopt(zmq.MAXMSGSIZE, _LARGEST_MESSAGE)
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
            peer, *frames = await self._router.recv_multipart()
            try:
                report = decode_report(frames)
            except CoordinationError as error:
                logger.warning("a proxy: %s", error)
                continue
            refusal = self._sessions.receive(report, shared)
            if refusal is not None:
                await self._router.send_multipart([peer, *encode(refusal)])
            else:
                self._peers[report.session] = peer

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
                for name, notice in self._sessions.notices(beats, shared):
                    await self._router.send_multipart([self._peers[name], *encode(notice)])
            except Exception:  # nothing that one proxy says may end the conversation with all
                logger.exception("not all proxies were told what there is to say")
            if beats:
                there = self._sessions.by_name
                self._peers = {name: peer for name, peer in self._peers.items() if name in there}
