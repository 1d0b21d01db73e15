"""What happens to engines and to the proxy: killed, stopped, filled up, drained, restarted."""

import asyncio
import json
import random
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import aiohttp
import zmq

from benchmarks.chaos.ledger import Ledger
from predictor.live.zmq_sockets import Side, apply_curve
from rescheduler.engines.deployment import Deployment, Instance
from rescheduler.engines.launch_engines import Launched
from rescheduler.engines.launch_process import ServerProcess

_PAUSE_SECONDS = (5.0, 20.0)
_STOPPED_SECONDS = (5.0, 40.0)
_GARBAGE_SECONDS = 4.0
_DRAIN_SECONDS = (3.0, 6.0)
_LONG_PROMPT = "and then " * 180  # about 360 tokens


@dataclass
class Harm:
    """Does to a deployment what may happen to one, never to all decode instances at a time."""

    engines: Launched
    proxy: ServerProcess
    deployment: Deployment
    ledger: Ledger
    random: random.Random
    session: aiohttp.ClientSession
    token: str

    @property
    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"}

    async def run(self, kinds: tuple[str, ...], until: asyncio.Event) -> None:
        """Do one thing after the other until an event is set; then all is in service again.

        In the given order at first, then at random, each once before any is done again.
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
                waiting = self.random.sample(kinds, len(kinds))
            await self.all_in_service()
            await actions[waiting.pop()]()
            with suppress(TimeoutError):
                await asyncio.wait_for(until.wait(), self.random.uniform(*_PAUSE_SECONDS))
        await self.all_in_service()

    async def drain_in_turns(self) -> None:
        """Drain one decode instance after the other, as an update of all engines would, forever."""
        while True:
            for instance in self.deployment.decode:
                if await self._is_up(instance) != {True}:
                    await asyncio.sleep(1)
                    continue
                try:
                    await self._admin("drain", instance)
                    await asyncio.sleep(self.random.uniform(*_DRAIN_SECONDS))
                finally:
                    await asyncio.shield(self._admin("undrain", instance))

    async def all_in_service(self) -> None:
        while await self._is_up() != {True}:
            await asyncio.sleep(0.5)

    async def _is_up(self, instance: Instance | None = None) -> set[bool]:
        """Return whether the proxy uses an instance, or all: one value for each answer."""
        with suppress(aiohttp.ClientError, OSError, TimeoutError):
            url = f"{self.deployment.admin_url}/admin/instances"
            async with self.session.get(url, headers=self._headers) as response:
                listed = (await response.json())["instances"]
            return {
                one["state"] == "closed"
                for one in listed
                if instance is None or one["name"] == instance.name
            }
        return {False}

    async def _admin(self, verb: str, instance: Instance) -> None:
        with suppress(aiohttp.ClientError, OSError, TimeoutError):  # the proxy restarts
            url = f"{self.deployment.admin_url}/admin/{verb}/{instance.name}"
            async with self.session.post(url, headers=self._headers):
                pass

    def _chosen(self, role: str) -> Instance:
        return self.random.choice([one for one in self.deployment.instances if one.role == role])

    async def _kill(self, role: str) -> None:
        """Kill an engine, have somebody else answer in its place for a while, start it again."""
        if not any(one.role == role for one in self.deployment.instances):
            return
        instance = self._chosen(role)
        self.ledger.counts["kills"] += 1
        with self.ledger.outage("engine"):
            await asyncio.to_thread(self.engines.kill, instance.name)
            await asyncio.to_thread(self._impersonate, instance)
            await asyncio.to_thread(self.engines.restart, instance.name)
            await self.all_in_service()

    async def _stop(self) -> None:
        """Suspend a decode instance: its connections stay, and nothing comes."""
        instance = self._chosen("decode")
        self.ledger.counts["stops"] += 1
        with self.ledger.outage("engine"):
            self.engines.signal(instance.name, signal.SIGSTOP)
            try:
                await asyncio.sleep(self.random.uniform(*_STOPPED_SECONDS))
            finally:
                self.engines.signal(instance.name, signal.SIGCONT)

    async def _fill(self) -> None:
        """Fill a decode instance's KV cache past the proxy."""
        instance = self._chosen("decode")
        self.ledger.counts["fills"] += 1

        async def long(number: int) -> None:
            body = {
                "model": self.deployment.served_name,
                "prompt": f"{number} {_LONG_PROMPT}",
                "max_tokens": 60,
            }
            with suppress(aiohttp.ClientError, OSError):
                url = f"{instance.url}/v1/completions"
                async with self.session.post(url, json=body) as response:
                    await response.read()

        await asyncio.gather(*map(long, range(5)))

    async def _garbage(self) -> None:
        """Send an engine commands that are none; with keys, as one who has the proxy's."""
        instance = self._chosen("decode")
        self.ledger.counts["garbage"] += 1
        await asyncio.to_thread(self._send_garbage, instance)

    async def _restart_proxy(self) -> None:
        self.ledger.counts["proxy_restarts"] += 1
        with self.ledger.outage("proxy"):
            self.proxy.signal(signal.SIGTERM)
            await asyncio.to_thread(self.proxy.end_by, float("inf"))
            await asyncio.to_thread(self.proxy.start)
            while not await asyncio.to_thread(self.proxy.is_healthy):
                await asyncio.sleep(0.1)
            await self.all_in_service()

    def _impersonate(self, instance: Instance) -> None:
        """Publish nonsense, and answer commands with it, where a killed engine did."""
        self.ledger.counts["garbage"] += 1
        end = time.monotonic() + _GARBAGE_SECONDS
        with (
            self._socket(zmq.PUB, "engine", instance.telemetry, binds=True) as publisher,
            self._socket(zmq.ROUTER, "engine", instance.control, binds=True) as router,
        ):
            while time.monotonic() < end:
                time.sleep(0.02)
                if publisher is not None:
                    publisher.send_multipart(self._nonsense(b"headway/1"))
                if router is not None and router.poll(0):
                    peer = router.recv_multipart()[0]
                    router.send_multipart([peer, *self._nonsense(b"headway-control/5")])

    def _send_garbage(self, instance: Instance) -> None:
        with self._socket(zmq.DEALER, "watcher", instance.control, binds=False) as dealer:
            for _ in range(200):
                if dealer is not None and dealer.poll(10, zmq.POLLOUT):
                    dealer.send_multipart(self._nonsense(b"headway-control/5"))

    def _nonsense(self, topic: bytes) -> list[bytes]:
        r = self.random
        return r.choice(
            (
                [r.randbytes(r.randrange(1, 64)) for _ in range(r.randrange(1, 4))],
                [topic, r.randbytes(r.randrange(2_000))],
                [topic, b"\x82\xa4type\xa6freeze\xa6number\xcf" + r.randbytes(8)],
                [topic, json.dumps({"number": 1}).encode(), b""],
            )
        )

    @contextmanager
    def _socket(
        self, kind: int, side: Side, endpoint: str | None, binds: bool
    ) -> Iterator["zmq.Socket[bytes] | None"]:
        """Open a socket in a context of its own, with keys where there are some."""
        if endpoint is None:
            yield None
            return
        keys = self.deployment.keys_folder
        with zmq.Context() as context, context.socket(kind) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            handler = None if keys is None else apply_curve(socket, keys, side, binds)
            try:
                (socket.bind if binds else socket.connect)(endpoint)
                yield socket
            finally:
                socket.close()
                if handler is not None:
                    handler.stop()
