"""What happens to engines and to the proxy: killed, stopped, filled up, drained, restarted."""

import asyncio
import json
import random
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import aiohttp
import zmq

from benchmarks.chaos.ledger import Ledger
from predictor.live.zmq_sockets import Side, apply_curve
from rescheduler.engines.deployment import Deployment, Instance
from rescheduler.engines.launch_engines import Launched
from rescheduler.engines.launch_process import ServerProcess

__all__ = ["Harm"]

_PAUSE_SECONDS = (5.0, 20.0)
_STOPPED_SECONDS = (5.0, 40.0)
_GARBAGE_SECONDS = 4.0
_DRAIN_SECONDS = (3.0, 6.0)
_LONG_PROMPT = "and then " * 180  # about 360 tokens


class Harm:
    """Does to a deployment what may happen to one, never to all decode instances at a time.

    Args:
        engines: that run.
        proxy: its process.
        deployment: what they are.
        ledger: counts what was done.
        generator: decides what, and when.
        session: for HTTP.
        token: of the proxy's admin listener.
    """

    def __init__(
        self,
        engines: Launched,
        proxy: ServerProcess,
        deployment: Deployment,
        ledger: Ledger,
        generator: random.Random,
        session: aiohttp.ClientSession,
        token: str,
    ) -> None:
        self._engines, self._proxy, self._deployment = engines, proxy, deployment
        self._ledger, self._random, self._session = ledger, generator, session
        self._headers = {"Authorization": f"Bearer {token}"}

    async def run(self, kinds: tuple[str, ...], until: asyncio.Event) -> None:
        """Do one thing after the other until an event is set; then all is in service again.

        Args:
            kinds: ``kill_decode``, ``kill_prefill``, ``stop``, ``fill``, ``garbage``, ``restart``;
                in this order at first, then at random, each once before any is done again.
            until: when to end.
        """
        actions: dict[str, Callable[[], Awaitable[None]]] = {
            "kill_decode": lambda: self._kill("decode"),
            "kill_prefill": lambda: self._kill("prefill"),
            "stop": self._stop,
            "fill": self._fill,
            "garbage": self._garbage,
            "restart": self._restart_proxy,
        }
        waiting = [*reversed(kinds)]
        while not until.is_set():
            if not waiting:
                waiting = self._random.sample(kinds, len(kinds))
            await self.all_in_service()
            await actions[waiting.pop()]()
            with suppress(TimeoutError):
                await asyncio.wait_for(until.wait(), self._random.uniform(*_PAUSE_SECONDS))
        await self.all_in_service()

    async def drain_in_turns(self) -> None:
        """Drain one decode instance after the other, as an update of all engines would, forever."""
        while True:
            for instance in self._deployment.decode:
                if await self._is_up(instance) != {True}:
                    await asyncio.sleep(1)
                    continue
                try:
                    await self._admin("drain", instance)
                    await asyncio.sleep(self._random.uniform(*_DRAIN_SECONDS))
                finally:
                    await asyncio.shield(self._admin("undrain", instance))

    async def all_in_service(self) -> None:
        """Wait until the proxy uses every instance."""
        while await self._is_up() != {True}:
            await asyncio.sleep(0.5)

    async def _is_up(self, instance: Instance | None = None) -> set[bool]:
        """Return whether the proxy uses an instance, or all: one value for each answer."""
        with suppress(aiohttp.ClientError, OSError, TimeoutError):
            url = f"{self._deployment.admin_url}/admin/instances"
            async with self._session.get(url, headers=self._headers) as response:
                listed = (await response.json())["instances"]
            return {
                one["state"] == "closed"
                for one in listed
                if instance is None or one["name"] == instance.name
            }
        return {False}

    async def _admin(self, verb: str, instance: Instance) -> None:
        with suppress(aiohttp.ClientError, OSError, TimeoutError):  # the proxy restarts
            url = f"{self._deployment.admin_url}/admin/{verb}/{instance.name}"
            async with self._session.post(url, headers=self._headers):
                pass

    def _chosen(self, role: str) -> Instance:
        return self._random.choice([one for one in self._deployment.instances if one.role == role])

    async def _kill(self, role: str) -> None:
        """Kill an engine, have somebody else answer in its place for a while, start it again."""
        if not any(one.role == role for one in self._deployment.instances):
            return
        instance = self._chosen(role)
        self._ledger.counts["kills"] += 1
        with self._ledger.outage("engine"):
            await asyncio.to_thread(self._engines.kill, instance.name)
            await asyncio.to_thread(self._impersonate, instance)
            await asyncio.to_thread(self._engines.restart, instance.name)
            await self.all_in_service()

    async def _stop(self) -> None:
        """Suspend a decode instance: its connections stay, and nothing comes."""
        instance = self._chosen("decode")
        self._ledger.counts["stops"] += 1
        with self._ledger.outage("engine"):
            self._engines.signal(instance.name, signal.SIGSTOP)
            try:
                await asyncio.sleep(self._random.uniform(*_STOPPED_SECONDS))
            finally:
                self._engines.signal(instance.name, signal.SIGCONT)

    async def _fill(self) -> None:
        """Fill a decode instance's KV cache past the proxy."""
        instance = self._chosen("decode")
        self._ledger.counts["fills"] += 1

        async def long(number: int) -> None:
            body = {
                "model": self._deployment.served_name,
                "prompt": f"{number} {_LONG_PROMPT}",
                "max_tokens": 60,
            }
            with suppress(aiohttp.ClientError, OSError):
                url = f"{instance.url}/v1/completions"
                async with self._session.post(url, json=body) as response:
                    await response.read()

        await asyncio.gather(*map(long, range(5)))

    async def _garbage(self) -> None:
        """Send an engine commands that are none; with keys, as one who has the proxy's."""
        instance = self._chosen("decode")
        self._ledger.counts["garbage"] += 1
        await asyncio.to_thread(self._send_garbage, instance)

    async def _restart_proxy(self) -> None:
        """End the proxy as a supervisor does, and start it again."""
        self._ledger.counts["proxy_restarts"] += 1
        with self._ledger.outage("proxy"):
            self._proxy.signal(signal.SIGTERM)
            await asyncio.to_thread(self._proxy.end_by, float("inf"))
            await asyncio.to_thread(self._proxy.start)
            while not await asyncio.to_thread(self._proxy.is_healthy):
                await asyncio.sleep(0.1)
            await self.all_in_service()

    def _impersonate(self, instance: Instance) -> None:
        """Publish nonsense, and answer commands with it, where a killed engine did."""
        self._ledger.counts["garbage"] += 1
        ending = threading.Event()
        timer = threading.Timer(_GARBAGE_SECONDS, ending.set)
        timer.start()
        with _sockets(self._deployment) as sockets:
            publisher = sockets(zmq.PUB, "engine", instance.telemetry, True)
            router = sockets(zmq.ROUTER, "engine", instance.control, True)
            while not ending.wait(0.02):
                if publisher is not None:
                    publisher.send_multipart(self._nonsense(b"headway/1"))
                if router is not None and router.poll(0):
                    peer = router.recv_multipart()[0]
                    router.send_multipart([peer, *self._nonsense(b"headway-control/3")])

    def _send_garbage(self, instance: Instance) -> None:
        with _sockets(self._deployment) as sockets:
            dealer = sockets(zmq.DEALER, "watcher", instance.control, False)
            for _ in range(200):
                if dealer is not None and dealer.poll(10, zmq.POLLOUT):
                    dealer.send_multipart(self._nonsense(b"headway-control/3"))

    def _nonsense(self, topic: bytes) -> list[bytes]:
        r = self._random
        kind = r.randrange(4)
        if kind == 0:
            return [r.randbytes(r.randrange(1, 64)) for _ in range(r.randrange(1, 4))]
        if kind == 1:
            return [topic, r.randbytes(r.randrange(2_000))]
        if kind == 2:
            return [topic, b"\x82\xa4type\xa6freeze\xa6number\xcf" + r.randbytes(8)]
        return [topic, json.dumps({"number": 1}).encode(), b""]


@contextmanager
def _sockets(deployment: Deployment) -> Iterator[Callable[..., Any]]:
    """Make sockets in the body that are closed after it, each in a context of its own."""
    made: list[tuple[zmq.Context[Any], zmq.Socket[Any], Any]] = []

    def socket(kind: int, side: Side, endpoint: str | None, binds: bool) -> Any:
        if endpoint is None:
            return None
        context = zmq.Context()
        one = context.socket(kind)
        one.setsockopt(zmq.LINGER, 0)
        keys = deployment.keys_folder
        handler = None if keys is None else apply_curve(one, keys, side, binds)
        made.append((context, one, handler))
        (one.bind if binds else one.connect)(endpoint)
        return one

    try:
        yield socket
    finally:
        for context, one, handler in made:
            one.close()
            if handler is not None:
                handler.stop()
            context.term()
