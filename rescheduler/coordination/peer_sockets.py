"""Hearing what each of the other proxies has."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import zmq
import zmq.asyncio

from predictor.live.zmq_sockets import apply_curve
from rescheduler.coordination.limits import LARGEST_MESSAGE
from rescheduler.coordination.messages import CoordinationError, Load, decode_load
from rescheduler.coordination.refused_messages import RefusedMessages

__all__ = ["PeerSockets"]

logger = logging.getLogger("headway.serve")

_UNREAD = 4


class PeerSockets:
    """A socket for each of the other proxies.

    What comes through it is that proxy's: on a socket for all of them, one could speak as another.

    Args:
        context: of the sockets.
        keys: folder made by ``headway keys``, needed off the loopback.
        ipv6: whether to connect to IPv6 addresses, too.
        heard: called with a proxy's number and what it has now.
        refused: counts what is refused, from the sender ``proxy``.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        keys: Path | None,
        ipv6: bool,
        heard: Callable[[int, Load], None],
        refused: RefusedMessages,
    ) -> None:
        self._context, self._keys, self._ipv6 = context, keys, ipv6
        self._heard, self._refused = heard, refused
        self._numbers: dict[str, int] = {}
        self._hearing: dict[str, tuple[zmq.asyncio.Socket, asyncio.Task[None]]] = {}

    def connect(self, numbers: Mapping[str, int], tasks: asyncio.TaskGroup) -> None:
        """Hear the proxies that there are, and no others.

        Args:
            numbers: of the proxies, by their endpoints.
            tasks: which hear them.
        """
        self._numbers = dict(numbers)
        for endpoint in self._hearing.keys() - numbers.keys():
            socket, task = self._hearing.pop(endpoint)
            task.cancel()
            socket.close(linger=0)
        for endpoint in numbers.keys() - self._hearing.keys():
            socket = self._context.socket(zmq.SUB)
            try:
                self._open(socket, endpoint)
            except zmq.ZMQError as error:
                socket.close(linger=0)
                if self._refused.count("coordinator", "endpoint"):
                    logger.warning("another proxy: %s: %s", endpoint, error)
            else:
                task = tasks.create_task(self._hear(endpoint, socket))
                self._hearing[endpoint] = socket, task

    def close(self) -> None:
        """Close the sockets."""
        for socket, task in self._hearing.values():
            task.cancel()
            socket.close(linger=0)
        self._hearing.clear()

    def _open(self, socket: zmq.asyncio.Socket, endpoint: str) -> None:
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, LARGEST_MESSAGE)
        socket.setsockopt(zmq.RCVHWM, _UNREAD)
        socket.setsockopt(zmq.IPV6, int(self._ipv6))
        if self._keys is not None:
            apply_curve(socket, self._keys, "watcher", serves=False, peer="watcher")
        socket.connect(endpoint)

    async def _hear(self, endpoint: str, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames = await socket.recv_multipart()
            try:
                load = decode_load(frames)
            except CoordinationError as error:
                if self._refused.count("proxy", error.reason):
                    logger.warning("another proxy (%s): %s", endpoint, error)
                continue
            number = self._numbers.get(endpoint)
            if number is not None:
                self._heard(number, load)
