"""How well, and how fast, requests of many proxies are placed, and what a proxy's streams cost.

    python -m benchmarks.many_proxies [--quick] --json OUT

Placement: a `headway coordinator` for 16 decode instances that answer health probes and nothing
else; 1, 4 and 16 proxies of one process, whose links, requests and sockets are those of
`headway serve` and whose requests get 30 tokens a second each. 200 requests arrive a second, as a
Poisson process with seed 0; prompts and answers are lognormal, with medians of 400 and 250 tokens
and sigma 1.0 and 0.6, so that about 2,000 run. Reported are the times to a place and the
imbalance: the maximum over the mean of the instances' true KV loads, less 1, averaged over time,
in percent. With 16 proxies the coordinator is then killed, so that each places by its own requests
(``alone``). All proxies share one process: while that waits for a core (``late_ms``), no requests
arrive.

Most places: 4 proxies with 256 requests that ask for a place, end at once and ask again, while 0,
4,096 and 16,384 requests run. A core to itself gives a coordinator the inverse of its CPU time a
place.

Streams: a `headway serve` with a coordinator relays 64 streams that come as fast as they can, on
uvloop and on asyncio's own loop; another relays 1,000 that get a token a second, each in a packet
of its own: memory and descriptors are those of its process once each has its first token, less
those before.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web

from benchmarks.support.report import arguments, report
from benchmarks.support.server_process import ServerProcess, headway, stream_players
from benchmarks.support.stream_client import flood, held, session
from rescheduler.commands.event_loop import run_server
from rescheduler.coordination.coordinated_cluster import CoordinatedCluster
from rescheduler.engines.deployment import Deployment
from rescheduler.engines.launch_local import free_ports
from rescheduler.openai.openai_request import COMPLETIONS
from rescheduler.openai.request_reader import read_request
from rescheduler.placement.live_request import LiveRequest

_INSTANCES = 16
_PER_SECOND = 200.0
_SEED = 0
_SLOW_TOKEN_SECONDS = 1.0


@dataclass(frozen=True)
class _Size:
    """How much is measured."""

    settle: float
    measure: float
    running: tuple[int, ...]
    most: float
    flood_tokens: int
    streams: int
    paced: float


_FULL = _Size(12.0, 24.0, (0, 4096, 16_384), 6.0, 3000, 1000, 15.0)
_QUICK = _Size(3.0, 4.0, (0, 1024), 2.0, 300, 100, 3.0)


def main() -> None:
    options = arguments("what many proxies need").parse_args()
    size = _QUICK if options.quick else _FULL
    figures: dict[str, float] = {}
    run_server(_measure_places(size, figures))
    asyncio.run(_measure_streams(size, figures))
    report("many_proxies", figures, options.json)


async def _measure_places(size: _Size, figures: dict[str, float]) -> None:
    async with _instances() as urls:
        for proxies in (1, 4, 16):
            with ExitStack() as stack:
                deployment, coordinator = _coordinator(stack, urls)
                async with driven_proxies(deployment, proxies, _SEED) as driven:
                    await _open_loop(driven, size, figures, str(proxies), coordinator)
                    if proxies == 16:
                        figures["place_ms_p50"] = figures["place_ms_p50_16"]
                        stack.close()  # ends the coordinator
                        await driven.left_alone()
                        await _open_loop(driven, size, figures, "16_alone")
        for running in size.running:
            with ExitStack() as stack:
                deployment, coordinator = _coordinator(stack, urls)
                async with driven_proxies(deployment, 4, _SEED) as driven:
                    await _most(driven, running, size, figures, coordinator)


@asynccontextmanager
async def _instances() -> AsyncIterator[list[str]]:
    async def health(http: web.Request) -> web.Response:
        del http
        return web.Response()

    app = web.Application()
    app.add_routes([web.get("/health", health)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        for _ in range(_INSTANCES):
            await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield [f"http://127.0.0.1:{port}" for _, port in runner.addresses]
    finally:
        await runner.cleanup()


def _coordinator(stack: ExitStack, urls: list[str]) -> tuple[Deployment, ServerProcess]:
    instances = [{"name": f"decode-{i}", "role": "decode", "url": u} for i, u in enumerate(urls)]
    values = _coordinated(instances)
    coordinator = stack.enter_context(headway("coordinator", values))
    return Deployment.from_values(values), coordinator


def _coordinated(instances: list[dict[str, str]]) -> dict[str, Any]:
    (port,) = free_ports(1)
    return {
        "model": "smollm2",
        "instances": instances,
        "coordinator": {"endpoint": f"tcp://127.0.0.1:{port}", "port": 0},
        "proxy": {"port": 0, "admin_port": 0, "pool": 1 << 20},  # nobody is refused
    }


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
        client = replace(_CLIENT, prompt_ids=prompt_tokens, max_tokens=output_tokens)
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
        proxies = [DrivenProxy(deployment) for _ in range(n)]
        driven = DrivenProxies(proxies, np.random.default_rng(seed))
        ticking = tasks.create_task(driven.tick())
        try:
            await _until(lambda: all(one.decided_for for one in proxies), "the coordinator decides")
            yield driven
        finally:
            ticking.cancel()
            await asyncio.gather(ticking, return_exceptions=True)
            for proxy in proxies:
                await proxy.cluster.close()


async def _until(holds: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + _WAIT_SECONDS
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {_WAIT_SECONDS:g} s")
        await asyncio.sleep(0.05)


async def _open_loop(
    driven: DrivenProxies,
    size: _Size,
    figures: dict[str, float],
    which: str,
    coordinator: ServerProcess | None = None,
) -> None:
    await driven.arrive(_PER_SECOND, size.settle)
    driven.forget_measured()
    busy = coordinator.cpu_seconds() if coordinator else 0.0
    own, began = time.process_time(), time.monotonic()
    await driven.arrive(_PER_SECOND, size.measure)
    took = time.monotonic() - began
    figures[f"placed_per_s_{which}"] = len(driven.place_seconds) / took
    for share in (50, 99):
        milliseconds = 1e3 * float(np.percentile(driven.place_seconds, share))
        figures[f"place_ms_p{share}_{which}"] = milliseconds
    figures[f"imbalance_{which}"] = 100 * float(np.mean(driven.imbalance))
    figures[f"late_ms_p99_{which}"] = 1e3 * float(np.percentile(driven.late_seconds, 99))
    figures[f"running_{which}"] = driven.running
    figures[f"driver_busy_{which}"] = (time.process_time() - own) / took
    if coordinator:
        figures[f"coordinator_busy_{which}"] = (coordinator.cpu_seconds() - busy) / took


async def _most(
    driven: DrivenProxies,
    running: int,
    size: _Size,
    figures: dict[str, float],
    coordinator: ServerProcess,
) -> None:
    left = iter(range(running))
    await driven.crowd(256, lambda: next(left, None) is not None, ends=False)
    warm = time.monotonic() + 1.0
    await driven.crowd(256, lambda: time.monotonic() < warm, ends=True)
    driven.forget_measured()
    busy, began = coordinator.cpu_seconds(), time.monotonic()
    placed = await driven.crowd(256, lambda: time.monotonic() - began < size.most, ends=True)
    took, busy = time.monotonic() - began, coordinator.cpu_seconds() - busy
    while_running = f"_{running}" if running else ""
    figures[f"placements_per_s{while_running}"] = placed / took
    figures[f"most_place_ms_p50{while_running}"] = 1e3 * float(np.median(driven.place_seconds))
    figures[f"coordinator_cpu_ms_per_place{while_running}"] = 1e3 * busy / placed
    figures[f"coordinator_busy_most{while_running}"] = busy / took


async def _measure_streams(size: _Size, figures: dict[str, float]) -> None:
    for loop, uvloop in (("", True), ("_asyncio", False)):
        async with _serving(uvloop) as (proxy, client):
            busy = proxy.cpu_seconds()
            await flood(client, "", 64, size.flood_tokens)
            busy = proxy.cpu_seconds() - busy
            figures[f"tokens_per_cpu_s{loop}"] = 64 * size.flood_tokens / busy
        async with _serving(uvloop) as (proxy, client):
            memory, descriptors = proxy.resident_kib(), proxy.descriptors()
            async with held(client, "", size.streams, 600) as tokens:
                figures[f"kib_per_stream{loop}"] = (proxy.resident_kib() - memory) / size.streams
                opened = proxy.descriptors() - descriptors
                figures[f"descriptors_per_stream{loop}"] = opened / size.streams
                busy, before = proxy.cpu_seconds(), tokens()
                await asyncio.sleep(size.paced)
                busy = proxy.cpu_seconds() - busy
                figures[f"paced_tokens_per_cpu_s{loop}"] = (tokens() - before) / busy
    figures["streams"] = size.streams


@asynccontextmanager
async def _serving(uvloop: bool) -> AsyncIterator[tuple[ServerProcess, aiohttp.ClientSession]]:
    """Run a proxy with a coordinator and engines that play streams."""
    names = "prefill-0", "decode-0", "decode-1"
    with ExitStack() as stack:
        instances = stack.enter_context(stream_players(_SLOW_TOKEN_SECONDS, *names))
        values = _coordinated(instances)
        stack.enter_context(headway("coordinator", values))
        proxy = stack.enter_context(headway("serve", values, uvloop=uvloop))
        async with session(proxy.url) as http:
            await flood(http, "", 4, 5)  # compiled policies
            yield proxy, http


if __name__ == "__main__":
    main()
