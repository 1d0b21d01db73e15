"""Proxies as the coordinator knows them: their requests and sockets are real, their engines not."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rescheduler.coordination.coordinated_cluster import CoordinatedCluster
from rescheduler.engines.deployment import Deployment
from rescheduler.openai.openai_request import COMPLETIONS, ClientRequest
from rescheduler.openai.request_reader import read_request
from rescheduler.placement.live_request import LiveRequest

_TOKENS_PER_SECOND = 30.0
_TICK_SECONDS = 0.2
_CATCH_UP_SECONDS = 0.02
_WAIT_SECONDS = 120.0
_CLIENT = read_request(COMPLETIONS, b'{"prompt": "a", "stream": true}')


def lengths(rng: np.random.Generator) -> tuple[int, int]:
    """Return the tokens of a prompt and of its answer, lognormal."""
    prompt, output = rng.lognormal(np.log(400.0), 1.0), rng.lognormal(np.log(250.0), 0.6)
    return max(1, round(prompt)), max(1, round(output))


class DrivenProxy:
    def __init__(self, deployment: Deployment) -> None:
        self.cluster = CoordinatedCluster(deployment)
        self.cluster.compile()
        self.cluster.speak()
        self._running: dict[LiveRequest, tuple[float, int]] = {}
        self._numbers = 0

    @property
    def decided_for(self) -> bool:
        return self.cluster.link.alive

    @property
    def running(self) -> int:
        return len(self._running)

    async def place(self, prompt_tokens: int, output_tokens: int) -> LiveRequest:
        loop = asyncio.get_running_loop()
        self._numbers += 1
        name = f"{self.cluster.link.session}-{self._numbers}"
        client = _client(prompt_tokens, output_tokens)
        request = LiveRequest(name, name, client, {}, loop.time(), None, self.cluster.placements)
        await self.cluster.dispatcher.place(request)
        request.accepted()
        self._running[request] = (loop.time(), output_tokens)
        return request

    def end(self, request: LiveRequest) -> None:
        del self._running[request]
        request.finish()
        self.cluster.ended(request, by_itself=True)
        self.cluster.dispatcher.wake()

    def generate(self, now: float) -> None:
        for request, (since, output_tokens) in list(self._running.items()):
            due = min(output_tokens, int((now - since) * _TOKENS_PER_SECOND))
            if due > request.generated_tokens:
                request.untracked_tokens(due - request.generated_tokens, now)
            if due >= output_tokens:
                self.end(request)

    def loads(self) -> list[int]:
        on = self.cluster.placements.on
        return [sum(one.context_tokens for one in on(each)) for each in self.cluster.all]


@dataclass
class DrivenProxies:
    """Proxies to which requests come, and how long each request waited for its place.

    At each tick, the maximum over the mean of the instances' true KV load, less 1, and by how much
    it came late: when all proxies had to wait for a core.
    """

    proxies: Sequence[DrivenProxy]
    rng: np.random.Generator
    place_seconds: list[float] = field(default_factory=list)
    imbalance: list[float] = field(default_factory=list)
    late_seconds: list[float] = field(default_factory=list)

    @property
    def running(self) -> int:
        return sum(proxy.running for proxy in self.proxies)

    def forget_measured(self) -> None:
        self.place_seconds.clear()
        self.imbalance.clear()
        self.late_seconds.clear()

    async def left_alone(self) -> None:
        await _until(
            lambda: not any(one.decided_for for one in self.proxies), "the coordinator is silent"
        )

    async def arrive(self, per_second: float, seconds: float) -> None:
        """Have requests arrive as a Poisson process, each at a proxy of its own choice.

        While this process waits for a core, no time passes for its clients either: else they would
        come all at once.
        """
        loop = asyncio.get_running_loop()
        due = loop.time()
        end = due + seconds
        async with asyncio.TaskGroup() as placing:
            while loop.time() < end:
                due = max(due, loop.time() - _CATCH_UP_SECONDS)
                due += self.rng.exponential(1.0 / per_second)
                if due > loop.time():
                    await asyncio.sleep(due - loop.time())
                proxy = self.proxies[int(self.rng.integers(len(self.proxies)))]
                placing.create_task(self._place(proxy, *lengths(self.rng)))

    async def crowd(self, at_once: int, more: Callable[[], bool], ends: bool) -> int:
        """Place requests while there are more, each of which ends at once or never; count them."""
        placed = 0

        async def client(proxy: DrivenProxy) -> None:
            nonlocal placed
            while more():
                prompt, output = lengths(self.rng)
                request = await self._place(proxy, prompt, output if ends else 1 << 40)
                if ends:
                    proxy.end(request)
                placed += 1

        async with asyncio.TaskGroup() as placing:
            for i in range(at_once):
                placing.create_task(client(self.proxies[i % len(self.proxies)]))
        return placed

    async def tick(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _TICK_SECONDS
            await asyncio.sleep(_TICK_SECONDS)
            self.late_seconds.append(loop.time() - due)
            for proxy in self.proxies:
                proxy.generate(loop.time())
            load = np.sum([proxy.loads() for proxy in self.proxies], axis=0)
            if load.any():
                self.imbalance.append(float(load.max() / load.mean()) - 1.0)

    async def _place(self, proxy: DrivenProxy, prompt: int, output: int) -> LiveRequest:
        began = time.monotonic()
        request = await proxy.place(prompt, output)
        self.place_seconds.append(time.monotonic() - began)
        return request


@asynccontextmanager
async def driven_proxies(deployment: Deployment, n: int, seed: int) -> AsyncIterator[DrivenProxies]:
    async with asyncio.TaskGroup() as tasks:
        background: list[asyncio.Task[None]] = []

        def start(work: Coroutine[Any, Any, None]) -> None:
            background.append(tasks.create_task(work))

        proxies = [DrivenProxy(deployment) for _ in range(n)]
        driven = DrivenProxies(proxies, np.random.default_rng(seed))
        try:
            await _until(lambda: all(one.decided_for for one in proxies), "the coordinator decides")
            start(driven.tick())
            yield driven
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            for proxy in proxies:
                await proxy.cluster.close()


async def _until(holds: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + _WAIT_SECONDS
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {_WAIT_SECONDS:g} s")
        await asyncio.sleep(0.05)


def _client(prompt_tokens: int, max_tokens: int) -> ClientRequest:
    return replace(_CLIENT, prompt_ids=prompt_tokens, max_tokens=max_tokens)
