"""An engine's machine that disappears without a word, and one that has nothing to say."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing
from typing import Any

import pytest
import zmq

from predictor.live import zmq_sockets
from rescheduler.telemetry.subscriber import TelemetrySubscriber
from rescheduler.transfer.control_client import ControlClient


class Network:
    """Carries connections to a server, and can lose the first one without closing it."""

    def __init__(self, server: int) -> None:
        self.lost = False
        self.connections = 0
        self.from_clients = Counter[int]()
        self.changed = asyncio.Condition()
        self._server = server

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = self.connections
        self.connections += 1
        async with AsyncExitStack() as open_ends:
            there, back = await asyncio.open_connection("127.0.0.1", self._server)
            for end in (writer, back):
                open_ends.callback(end.close)
            async with asyncio.TaskGroup() as ways:
                ways.create_task(self._carry(reader, back, number, counted=True))
                ways.create_task(self._carry(there, writer, number, counted=False))

    @property
    def most_from_clients(self) -> int:
        """How often something came from a client, on the connection where it came most often."""
        return max(self.from_clients.values(), default=0)

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(120), self.changed:
            await self.changed.wait_for(holds)

    async def _carry(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, number: int, counted: bool
    ) -> None:
        while data := await source.read(1 << 16):
            if not (self.lost and number == 0):
                sink.write(data)
            self.from_clients[number] += counted
            async with self.changed:
                self.changed.notify_all()
        sink.close()


@asynccontextmanager
async def network(kind: int) -> AsyncIterator[tuple[Network, str]]:
    """A network before a socket of this kind, and the endpoint to connect to."""
    with zmq.Context() as context, context.socket(kind) as engine:
        carrier = Network(engine.bind_to_random_port("tcp://127.0.0.1"))
        listening = await asyncio.start_server(carrier.connect, "127.0.0.1", 0)
        try:
            yield carrier, f"tcp://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        finally:
            listening.close()
            engine.close(linger=0)


pytestmark = pytest.mark.slow

PINGED = 6
"""More than a handshake has: without pings, nothing follows it."""
CLIENTS: list[Any] = [(ControlClient, zmq.ROUTER), (TelemetrySubscriber, zmq.PUB)]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_sockets, "_SILENT_SECONDS", 1.0)


@pytest.mark.parametrize(("client", "server"), CLIENTS)
async def test_a_machine_that_is_gone_is_connected_to_again(
    client: Callable[[str], Any], server: int
) -> None:
    async with network(server) as (carrier, endpoint):
        with closing(client(endpoint)):
            await carrier.until(lambda: carrier.most_from_clients > PINGED)
            carrier.lost = True
            await carrier.until(lambda: carrier.connections > 1)


@pytest.mark.parametrize(("client", "server"), CLIENTS)
async def test_an_engine_with_nothing_to_say_stays_connected(
    client: Callable[[str], Any], server: int
) -> None:
    async with network(server) as (carrier, endpoint):
        with closing(client(endpoint)):
            # One may be given up where this process itself stood still; another one stays.
            await carrier.until(lambda: carrier.most_from_clients > PINGED + 2)
