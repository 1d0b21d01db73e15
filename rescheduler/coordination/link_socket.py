"""A proxy's sockets: one to the coordinator, and those by which proxies hear each other."""

import asyncio
import logging
import math
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import zmq
import zmq.asyncio

from predictor.live.zmq_sockets import (
    apply_curve,
    bind_socket,
    connect_socket,
    is_loopback,
    needs_ipv6,
    refuse_open_endpoint,
)
from rescheduler.coordination.cluster_loads import ClusterLoads
from rescheduler.coordination.link import Link
from rescheduler.coordination.messages import (
    CoordinationError,
    Load,
    Notice,
    ProxyLoad,
    RefusedMessages,
    decode,
    encode,
)
from rescheduler.coordination.peer_sockets import (
    PeerEndpointError,
    PeerSockets,
    checked_endpoint,
    message_socket,
)

__all__ = ["LinkSockets", "beats"]

logger = logging.getLogger("headway.serve")

BEAT_SECONDS = 0.25
"""Between two reports or views when nothing happens."""

_LARGEST_SUBSCRIPTION = 1024
_SEND_SECONDS = 1.0


async def beats(due: asyncio.Event) -> AsyncIterator[bool]:
    """Yield when something is due, and every `BEAT_SECONDS` in any case: whether it is a beat."""
    loop, beat = asyncio.get_running_loop(), -math.inf
    while True:
        with suppress(TimeoutError):
            async with asyncio.timeout_at(max(beat, loop.time())):
                await due.wait()
        due.clear()
        is_beat = loop.time() >= beat
        if is_beat:
            beat = loop.time() + BEAT_SECONDS
        yield is_beat


class LinkSockets:
    """Sends what the link has to say and hands it what the coordinator says, in one event loop.

    It also publishes to the other proxies what this one has on each instance, and hears what they
    have: any of them may be the only one for which the coordinator is silent.

    Raises:
        TelemetryError: an open endpoint without keys, or keys that cannot be used.
        CoordinationError: no socket can be bound for the peers.
    """

    def __init__(
        self,
        endpoint: str,
        keys: Path | None,
        link: Link,
        loads: ClusterLoads,
        refused: RefusedMessages,
    ) -> None:
        refuse_open_endpoint(endpoint, keys)
        self._link, self._loads, self._refused = link, loads, refused
        self._due, self._publish_due = asyncio.Event(), asyncio.Event()
        self._authenticator = None
        self._contexts = [zmq.asyncio.Context() for _ in range(2)]  # one serves with keys
        connecting, serving = self._contexts
        self._dealer = message_socket(connecting, zmq.DEALER)
        self._peers = PeerSockets(connecting, keys, self._heard, refused)
        self._publisher = message_socket(serving, zmq.PUB)
        try:
            # Nothing is kept for a coordinator that is away: reports say how things are.
            self._dealer.setsockopt(zmq.IMMEDIATE, 1)
            self._dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
            self._dealer.setsockopt(zmq.HEARTBEAT_IVL, 2000)
            self._dealer.setsockopt(zmq.HEARTBEAT_TIMEOUT, 4000)
            self._dealer.setsockopt(zmq.CONNECT_TIMEOUT, 5000)
            self._publisher.setsockopt(zmq.MAXMSGSIZE, _LARGEST_SUBSCRIPTION)
            if keys is not None:
                apply_curve(self._dealer, keys, "watcher", serves=False, peer="watcher")
                self._authenticator = apply_curve(
                    self._publisher, keys, "watcher", serves=True, peer="watcher"
                )
            connect_socket(self._dealer, endpoint)
            link.listening = self._bind(endpoint)
        except BaseException:
            self.close()
            raise

    def wake(self) -> None:
        """Send soon what there is to say."""
        self._due.set()

    def publish(self) -> None:
        """Publish soon what this proxy has on each instance."""
        self._publish_due.set()

    async def run(self) -> None:
        """Send, receive and publish forever."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._send())
            tasks.create_task(self._receive(tasks))
            tasks.create_task(self._publish())

    def close(self) -> None:
        """Close the sockets."""
        self._peers.close()
        self._dealer.close(linger=0)
        self._publisher.close(linger=0)
        if self._authenticator is not None:
            self._authenticator.stop()
        for context in self._contexts:
            context.term()

    async def _send(self) -> None:
        async for is_beat in beats(self._due):
            if is_beat:
                self._link.give_up()
            try:
                report = self._link.report(is_beat)
                frames = encode(report) if report is not None else None
            except Exception:  # no request may end the conversation about all others
                logger.exception("nothing was reported to the coordinator")
                continue
            if frames is not None:
                with suppress(TimeoutError):  # it is lost then, and its number will be missed
                    async with asyncio.timeout(_SEND_SECONDS):
                        await self._dealer.send_multipart(frames)

    async def _receive(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            frames = await self._dealer.recv_multipart()
            try:
                notice = decode(frames, Notice)
                self._link.receive(notice)
                if notice.view is not None and self._link.alive:
                    others = [p for p in notice.view.proxies if p.proxy != notice.proxy]
                    self._loads.peers({one.proxy: one.load for one in others})
                    self._peers.connect(self._endpoints(others), tasks)
            except CoordinationError as error:
                if self._refused.count("coordinator", error.reason):
                    logger.warning("the coordinator: %s", error)
            except Exception:  # no notice may end the conversation
                logger.exception("a notice of the coordinator cannot be followed")

    async def _publish(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(BEAT_SECONDS):
                    await self._publish_due.wait()
            self._publish_due.clear()
            await self._publisher.send_multipart(encode(self._loads.own()))

    def _heard(self, proxy: int, load: Load) -> None:
        """Take over what another proxy says that it has, while the coordinator does not say it."""
        if not self._loads.fits(load):
            self._refused.count("proxy", "content")
        elif not self._link.alive:
            self._loads.peer(proxy, load)

    def _endpoints(self, others: Sequence[ProxyLoad]) -> dict[str, int]:
        """Return the number of each of the other proxies, by where it is heard.

        Of several that name the same endpoint, the one that has been there for longest has it.
        """
        own, numbers = self._link.listening, dict[str, int]()
        for other in sorted(others, key=lambda one: one.proxy):
            try:
                if other.listening:
                    named = checked_endpoint(other.listening, None, is_loopback(own))
                    numbers.setdefault(named, other.proxy)
            except PeerEndpointError as error:
                if self._refused.count("coordinator", "endpoint"):
                    logger.warning("another proxy: %s: %s", other.listening, error)
        numbers.pop(own, None)
        return numbers

    def _bind(self, coordinator: str) -> str:
        """Bind the publisher to the address by which this machine reaches the coordinator."""
        try:
            address = _own_address(coordinator)
            bind_socket(self._publisher, f"tcp://{address}:*")
        except (OSError, zmq.ZMQError) as error:
            raise CoordinationError(
                f"coordinator.endpoint: {coordinator}: no way there from this machine ({error}): "
                "is the name or address right?"
            ) from error
        bound = self._publisher.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(bound, bytes)
        return bound.rstrip(b"\0").decode()


def _own_address(endpoint: str) -> str:
    """Return this machine's address on the way to an endpoint, as ZMQ writes it."""
    parts = urlsplit(endpoint)
    host, port = parts.hostname or "", parts.port or 0
    wanted = socket.AF_INET6 if needs_ipv6(endpoint) else socket.AF_INET  # as ZMQ does
    found = socket.getaddrinfo(host, port, wanted, socket.SOCK_DGRAM)
    family, kind, _, _, address = found[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing: it is a datagram socket
        own = str(probe.getsockname()[0])
    return f"[{own}]" if ":" in own else own
