"""A coordinator and its proxies, in the test's own event loop, before scripted engines."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from scripted_cluster import Cluster, names, scripted, until
from scripted_engine import ScriptedEngine
from tokenizers import Tokenizer

from predictor.live.zmq_sockets import tcp_endpoint
from rescheduler.coordinator.coordinator import Coordinator
from rescheduler.engines.deployment import CoordinatorOptions, Deployment
from rescheduler.page.live_snapshots import LiveSnapshots
from rescheduler.page.snapshot import SnapshotFeed
from rescheduler.proxy.proxy import Proxy
from rescheduler.serving.admin_app import AdminListener
from rescheduler.serving.serve import Listeners


@dataclass
class Coordinated:
    """Proxies, each as a cluster of its own with the same engines, and who decides for them."""

    deployment: Deployment
    tokenizer: Tokenizer
    engines: dict[str, ScriptedEngine]
    session: aiohttp.ClientSession
    coordinator: Coordinator
    admin: AdminListener[Any]
    proxies: list[Cluster] = field(default_factory=list)

    async def start_proxy(self) -> Cluster:
        """Start another proxy; it is returned once the coordinator decides for it."""
        proxy = Proxy(self.deployment, self.tokenizer)
        await proxy.start()
        listeners = Listeners(proxy)
        await listeners.start()
        started = Cluster(self.engines, proxy, listeners, self.session, self.tokenizer)
        self.proxies.append(started)
        return started

    async def coordinated(self) -> None:
        """Wait until the coordinator decides for every proxy, and knows all of their requests."""
        await until(lambda: all(link_of(one).alive for one in self.proxies))

    async def stop_coordinator(self) -> None:
        """As when its machine is lost: it says nothing any more."""
        await self.admin.close()
        await self.coordinator.close()
        await until(lambda: not any(link_of(one).alive for one in self.proxies))

    async def start_coordinator(self) -> None:
        """Start a new one at the same address, which knows nothing."""
        self.coordinator, self.admin = await _coordinator(self.deployment)

    @contextmanager
    def unhurried(self) -> Iterator[None]:
        """Have engines take a minute and more for a long answer, until this is left."""
        for engine in self.engines.values():
            engine.token_seconds = 0.2
        try:
            yield
        finally:
            for engine in self.engines.values():
                engine.token_seconds = 0.0005

    def load(self, name: str) -> int:
        """How many requests the coordinator knows on an instance."""
        return len(self.coordinator.cluster.placements.on(self.coordinator.cluster.instances[name]))

    async def ask(self, method: str, path: str) -> Any:
        """What the coordinator's operator listener answers."""
        headers = {"Authorization": f"Bearer {self.admin.token}"}
        url = f"{self.admin.url}/admin/{path}"
        async with self.session.request(method, url, headers=headers) as response:
            return response.status, await response.json()


def link_of(cluster: Cluster) -> Any:
    """The proxy's link to the coordinator."""
    return cluster.proxy.cluster.link  # type: ignore[attr-defined]


async def _coordinator(deployment: Deployment) -> tuple[Coordinator, AdminListener[Any]]:
    coordinator = Coordinator(deployment)
    await coordinator.start()
    feed = SnapshotFeed(LiveSnapshots(coordinator.cluster, 0.05))
    admin: AdminListener[Any] = AdminListener(coordinator.drainer, 0, feed=feed)
    await admin.start()
    return coordinator, admin


@asynccontextmanager
async def coordinated_cluster(
    tokenizer: Tokenizer,
    port: int,
    proxies: int = 2,
    decodes: int = 2,
    lost_seconds: float = 3.0,
    silent_seconds: float = 1.5,
    **options: Any,
) -> AsyncIterator[Coordinated]:
    """Run proxies and a coordinator on a port before engines; options are of `scripted`."""
    endpoint = tcp_endpoint(options.get("host", "127.0.0.1"), port)
    coordinated = CoordinatorOptions(
        endpoint=endpoint,
        settle_seconds=0.5,
        lost_seconds=lost_seconds,
        silent_seconds=silent_seconds,
    )
    engines, deployment = await scripted(
        tokenizer, names(decodes), coordinator=coordinated, **options
    )
    coordinator, admin = await _coordinator(deployment)
    async with aiohttp.ClientSession() as session:
        made = Coordinated(deployment, tokenizer, engines, session, coordinator, admin)
        try:
            for _ in range(proxies):
                await made.start_proxy()
            await made.coordinated()
            yield made
            for one in made.proxies:
                await one.idle()
        finally:
            for one in made.proxies:
                await one.listeners.close()
                await one.proxy.close()
            await made.admin.close()
            await made.coordinator.close()
            for engine in engines.values():
                await engine.stop()
