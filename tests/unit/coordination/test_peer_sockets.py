"""Which proxies are heard, while proxies place by themselves, and what they are heard to have."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import zmq
import zmq.asyncio

from rescheduler.coordination.messages import Load, RefusedMessages, encode
from rescheduler.coordination.peer_sockets import (
    PeerEndpointError,
    PeerSockets,
    checked_endpoint,
)


class Publishers:
    """Proxies that publish what they have, and what is heard of it."""

    def __init__(self, context: zmq.asyncio.Context) -> None:
        self.sockets = [context.socket(zmq.PUB) for _ in range(2)]
        self.endpoints = []
        for one in self.sockets:
            one.linger = 0
            one.bind("tcp://127.0.0.1:*")
            self.endpoints.append(one.getsockopt_string(zmq.LAST_ENDPOINT))
        self.heard: dict[int, Load] = {}
        self.refused = RefusedMessages("refused", "proxy", "coordinator")
        self.hearing = PeerSockets(context, None, self._hear, self.refused)

    def _hear(self, proxy: int, load: Load) -> None:
        self.heard[proxy] = load

    async def heard_of(self, proxy: int, load: Load, publisher: int) -> None:
        async with asyncio.timeout(60):
            while self.heard.get(proxy) != load:
                await self.sockets[publisher].send_multipart(encode(load))
                await asyncio.sleep(0.01)

    def counted(self, reason: str) -> float:
        (metric,) = self.refused.collect()
        wanted = {"sender": "proxy", "reason": reason}
        return sum(one.value for one in metric.samples if one.labels == wanted)


@asynccontextmanager
async def publishers() -> AsyncIterator[tuple[Publishers, asyncio.TaskGroup]]:
    with zmq.asyncio.Context() as context:
        made = Publishers(context)
        try:
            async with asyncio.TaskGroup() as tasks:
                yield made, tasks
                made.hearing.close()
        finally:
            made.hearing.close()
            for one in made.sockets:
                one.close()


async def test_what_comes_from_a_proxy_is_that_proxys() -> None:
    async with publishers() as (made, tasks):
        first, second = made.endpoints
        made.hearing.connect({first: 1, second: 2}, tasks)
        await made.heard_of(1, Load([1], [10]), publisher=0)
        await made.heard_of(2, Load([2], [20]), publisher=1)
        assert made.heard == {1: Load([1], [10]), 2: Load([2], [20])}
        made.hearing.connect({second: 7}, tasks)  # with a new coordinator, which counts anew
        await made.heard_of(7, Load([3], [30]), publisher=1)
        assert made.heard[1] == Load([1], [10])


async def test_what_is_no_load_is_counted_and_the_next_one_heard() -> None:
    async with publishers() as (made, tasks):
        made.hearing.connect({made.endpoints[0]: 1}, tasks)
        await made.heard_of(1, Load([1], [10]), publisher=0)
        for load in (Load([2**40], [0]), Load([-1], [0])):
            await made.sockets[0].send_multipart(encode(load))
        await made.sockets[0].send_multipart([b"headway-coordination/1", b"\x92\x90\x90"])
        await made.heard_of(1, Load([2], [20]), publisher=0)
        assert made.counted("invalid") == 2
        assert made.counted("version") == 1


@pytest.mark.parametrize(
    ("named", "address", "endpoint"),
    [
        ("tcp://127.0.0.1:50123", "127.0.0.1", "tcp://127.0.0.1:50123"),
        ("tcp://10.0.0.5:1024", "::ffff:10.0.0.5", "tcp://10.0.0.5:1024"),
        ("tcp://[::ffff:10.0.0.5]:65535", "10.0.0.5", "tcp://10.0.0.5:65535"),
        ("tcp://[2001:DB8:0::1]:5000", "2001:db8::1", "tcp://[2001:db8::1]:5000"),
        ("tcp://[::1]:5000", None, "tcp://[::1]:5000"),
    ],
)
def test_one_on_the_proxy_itself(named: str, address: str | None, endpoint: str) -> None:
    assert checked_endpoint(named, address) == endpoint


@pytest.mark.parametrize(
    "named",
    [
        "ipc://socket",
        "inproc://peers",
        "udp://10.0.0.5:5000",
        "tcp://10.0.0.5:22",
        "tcp://10.0.0.5:0",
        "tcp://10.0.0.5:65536",
        "tcp://10.0.0.5:*",
        "tcp://*:5000",
        "tcp://eth0:5000",
        "tcp://localhost:5000",
        "tcp://0.0.0.0:5000",
        "tcp://[::]:5000",
        "tcp://224.0.0.1:5000",
        "tcp://10.0.0.6:5000",
        "tcp://127.0.0.1:5000",
        "tcp://10.0.0.5:5000;10.0.0.6:5000",
        "tcp://10.0.0.5:5000/",
        "tcp://10.0.0.5:5000\n",
        "tcp://10.0.0.555:5000",
        "tcp://10.0.0.5:٥٠٠٠",
        "",
    ],
)
def test_one_that_others_must_not_connect_to(named: str) -> None:
    with pytest.raises(PeerEndpointError):
        checked_endpoint(named, "10.0.0.5")


def test_the_loopback_is_only_for_proxies_that_are_there() -> None:
    with pytest.raises(PeerEndpointError, match="on the loopback"):
        checked_endpoint("tcp://127.0.0.1:5000", None, loopback=False)
    with pytest.raises(PeerEndpointError, match="on another machine"):
        checked_endpoint("tcp://10.0.0.5:5000", None, loopback=True)
