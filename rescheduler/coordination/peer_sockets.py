"""Hearing what each of the other proxies has."""

import asyncio
import ipaddress
import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import zmq
import zmq.asyncio

from predictor.live.zmq_sockets import apply_curve, connect_socket
from rescheduler.coordination.messages import (
    LARGEST_MESSAGE,
    MOST_UNREAD,
    CoordinationError,
    Load,
    RefusedMessages,
    decode,
)

__all__ = ["PeerEndpointError", "PeerSockets", "checked_endpoint", "message_socket"]


logger = logging.getLogger("headway.serve")

_UNREAD = 4


def message_socket(
    context: zmq.asyncio.Context, kind: int, unread: int = MOST_UNREAD
) -> zmq.asyncio.Socket:
    """Return a socket that keeps so many messages, and none when it is closed."""
    made = context.socket(kind)
    made.setsockopt(zmq.LINGER, 0)
    made.setsockopt(zmq.MAXMSGSIZE, LARGEST_MESSAGE)
    made.setsockopt(zmq.SNDHWM, unread)
    made.setsockopt(zmq.RCVHWM, unread)
    return made


class PeerSockets:
    """A socket for each of the other proxies.

    What comes through it is that proxy's: on a socket for all of them, one could speak as another.

    Args:
        heard: called with a proxy's number and what it has now.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        keys: Path | None,
        heard: Callable[[int, Load], None],
        refused: RefusedMessages,
    ) -> None:
        self._context, self._keys = context, keys
        self._heard, self._refused = heard, refused
        self._numbers: dict[str, int] = {}
        self._hearing: dict[str, tuple[zmq.asyncio.Socket, asyncio.Task[None]]] = {}

    def connect(self, numbers: Mapping[str, int], tasks: asyncio.TaskGroup) -> None:
        """Hear the proxies that there are, and no others."""
        self._numbers = dict(numbers)
        for endpoint in self._hearing.keys() - numbers.keys():
            socket, task = self._hearing.pop(endpoint)
            task.cancel()
            socket.close(linger=0)
        for endpoint in numbers.keys() - self._hearing.keys():
            socket = message_socket(self._context, zmq.SUB, _UNREAD)
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
        if self._keys is not None:
            apply_curve(socket, self._keys, "watcher", serves=False, peer="watcher")
        connect_socket(socket, endpoint)

    async def _hear(self, endpoint: str, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames = await socket.recv_multipart()
            try:
                load = decode(frames, Load)
            except CoordinationError as error:
                if self._refused.count("proxy", error.reason):
                    logger.warning("another proxy (%s): %s", endpoint, error)
                continue
            number = self._numbers.get(endpoint)
            if number is not None:
                self._heard(number, load)


_ENDPOINT = re.compile(
    r"tcp://(?:(?P<v4>[0-9.]{7,15})|\[(?P<v6>[0-9a-fA-F:.]{2,45})\]):(?P<port>[0-9]{1,5})"
)
_FIRST_PORT, _LAST_PORT = 1024, 65_535

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class PeerEndpointError(ValueError):
    """An endpoint that no proxy listens on."""


def checked_endpoint(endpoint: str, address: str | None, loopback: bool | None = None) -> str:
    """Return an endpoint as every proxy writes it, if a proxy may listen there.

    Only TCP, on an address in numbers, and no port below 1024, where other services listen: a
    proxy must not be made to connect to whatever a peer names.

    Args:
        endpoint: that a proxy names as its own.
        address: that it connects from; None if that is not known.
        loopback: whether it must be, or must not be, of this machine; None if that is not known.

    Raises:
        PeerEndpointError: no proxy may listen there.
    """
    parts = _ENDPOINT.fullmatch(endpoint)
    if parts is None:
        raise PeerEndpointError("not like tcp://ADDRESS:PORT, with an address in numbers")
    try:
        host = _plain(parts["v4"] or parts["v6"])
    except ValueError as error:
        raise PeerEndpointError("no address of a machine") from error
    port = int(parts["port"])
    if not _FIRST_PORT <= port <= _LAST_PORT:
        raise PeerEndpointError(f"not a port from {_FIRST_PORT} to {_LAST_PORT}")
    if host.is_unspecified or host.is_multicast:
        raise PeerEndpointError("no address of a machine")
    if address is not None and host != _plain(address):
        raise PeerEndpointError(f"not on {address}, which the proxy connects from")
    if loopback is not None and host.is_loopback is not loopback:
        raise PeerEndpointError("on another machine" if loopback else "on the loopback")
    return f"tcp://[{host}]:{port}" if host.version == 6 else f"tcp://{host}:{port}"


def _plain(text: str) -> Address:
    """Return an address, an IPv4 one also where IPv6 writes it."""
    address = ipaddress.ip_address(text.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
