"""A coordinator and its proxies, in the test's own event loop, before scripted engines."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from scripted_cluster import OPTIONS, Cluster, until
from scripted_engine import ScriptedEngine
from tokenizers import Tokenizer

from rescheduler.coordinator.coordinator import Coordinator
from rescheduler.engines.deployment import CoordinatorOptions, Deployment
from rescheduler.page.live_snapshots import LiveSnapshots
from rescheduler.page.snapshot_feed import SnapshotFeed
from rescheduler.proxy.proxy import Proxy
from rescheduler.serving.admin_app import AdminListener, Operated
from rescheduler.serving.listeners import Listeners

__all__ = ["Coordinated", "coordinated_cluster"]


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
        return len(self.coordinator.placements.on(self.coordinator.instances[name]))

    async def ask(self, method: str, path: str) -> Any:
        """What the coordinator's operator listener answers."""
        headers = {"Authorization": f"Bearer {self.admin.token}"}
        url = f"{self.admin.url}/admin/{path}"
        async with self.session.request(method, url, headers=headers) as response:
            return response.status, await response.json()


def link_of(cluster: Cluster) -> Any:
    """The proxy's link to the coordinator."""
    return cluster.proxy._planning.link  # type: ignore[union-attr]


async def _coordinator(deployment: Deployment) -> tuple[Coordinator, AdminListener[Any]]:
    coordinator = Coordinator(deployment)
    await coordinator.start()
    operated = Operated(coordinator.instances, coordinator.placements, coordinator.drainer)
    feed = SnapshotFeed(LiveSnapshots(coordinator, 0.05))
    admin: AdminListener[Any] = AdminListener(operated, 0, feed=feed)
    await admin.start()
    return coordinator, admin


@asynccontextmanager
async def coordinated_cluster(
    tokenizer: Tokenizer,
    port: int,
    proxies: int = 2,
    decodes: int = 2,
    migration: Any = None,
    routing: dict[str, Any] | None = None,
    keys: Path | None = None,
    prefix_caching: bool = True,
    lost_seconds: float = 3.0,
    **options: Any,
) -> AsyncIterator[Coordinated]:
    """Run proxies and a coordinator on a port before scripted engines."""
    engines: dict[str, ScriptedEngine] = {}
    instances = []
    for name in ["prefill-0", *(f"decode-{i}" for i in range(decodes))]:
        engine = ScriptedEngine(name, name.partition("-")[0], tokenizer, engines)
        engine.prefix_caching = prefix_caching
        instance = await engine.start()  # its control socket has no keys
        instances.append(msgspec.structs.replace(instance, control=None) if keys else instance)
    deployment = Deployment(
        model="m",
        instances=instances,
        migration=migration,
        routing=routing or {"name": "jsq_load"},
        coordinator=CoordinatorOptions(
            endpoint=f"tcp://127.0.0.1:{port}", settle_seconds=0.5, lost_seconds=lost_seconds
        ),
        proxy=msgspec.structs.replace(OPTIONS, **options),
        keys=str(keys) if keys else None,
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
