"""A proxy, in the test's own event loop, before scripted engines."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from scripted_engine import ScriptedEngine, reference
from tokenizers import Tokenizer

from rescheduler.demo.load import metric_in
from rescheduler.engines.deployment import CoordinatorOptions, Deployment
from rescheduler.engines.proxy_options import ProxyOptions
from rescheduler.placement.live_request import LiveRequest
from rescheduler.proxy.proxy import Proxy
from rescheduler.serving.serve import Listeners

PROMPT = "Tell me of a river"

OPTIONS = ProxyOptions(
    port=0,
    admin_port=0,
    pool=64,
    pool_seconds=60.0,
    prefill_seconds=60.0,
    first_token_seconds=60.0,
    token_seconds=60.0,
    freeze_seconds=60.0,
    control_seconds=60.0,
    moved_token_seconds=60.0,
    backoff_seconds=0.01,
    breaker_seconds=0.2,
    probe_seconds=0.1,
    shutdown_seconds=1.0,
)


At = Callable[[int], Awaitable[None]]
"""Called with how many tokens have come."""


@dataclass
class Cluster:
    """A proxy and its engines, in one event loop."""

    engines: dict[str, ScriptedEngine]
    proxy: Proxy
    listeners: Listeners
    session: aiohttp.ClientSession
    tokenizer: Tokenizer

    @property
    def url(self) -> str:
        return self.listeners.url

    @property
    def decodes(self) -> list[ScriptedEngine]:
        return [engine for engine in self.engines.values() if engine.role == "decode"]

    @property
    def in_service(self) -> bool:
        """Whether the proxy uses every engine."""
        return all(instance.breaker.closed for instance in self.proxy.cluster.all)

    @property
    def waiting(self) -> int:
        """How many requests wait, for a prefill or for a place to decode."""
        dispatcher = self.proxy.cluster.dispatcher
        return len(dispatcher.waiting) + dispatcher.waiting_for_prefill

    @property
    def asked(self) -> list[dict[str, Any]]:
        """Bodies of all requests that came to the decode engines."""
        return [body for engine in self.decodes for body in engine.bodies]

    def set_decodes(self, **values: Any) -> None:
        """Set attributes of every decode engine."""
        for engine in self.decodes:
            vars(engine).update(values)

    def set_engines(self, **values: Any) -> None:
        """Set attributes of every engine."""
        for engine in self.engines.values():
            vars(engine).update(values)

    async def resized(self, slots: int) -> None:
        """Have every decode engine say how many requests it runs, and wait until that is known."""
        self.set_decodes(says={"max_num_seqs": slots})
        await until(lambda: all(one.slots == slots for one in self.proxy.cluster.decodes))

    def source_and_target(self) -> tuple[ScriptedEngine, ScriptedEngine]:
        """Return the decode engine that runs the only request, and another one."""
        source = next(engine for engine in self.decodes if engine.running)
        return source, next(engine for engine in self.decodes if engine is not source)

    def expected(self, tokens: int, prompt: str = PROMPT) -> list[int]:
        return reference(self.tokenizer.encode(prompt).ids, tokens)

    async def post(self, body: dict[str, Any], path: str = "/v1/completions") -> Any:
        async with self.session.post(self.url + path, json=body) as response:
            return response.status, await response.json(), response.headers

    async def read(
        self, body: dict[str, Any], path: str = "/v1/completions", **headers: str
    ) -> tuple[int, bytes]:
        """Return the status of an answer, and all of its bytes."""
        async with self.session.post(self.url + path, json=body, headers=headers) as response:
            return response.status, await response.read()

    async def stream(
        self, body: dict[str, Any], at: At | None = None, path: str = "/v1/completions"
    ) -> list[dict[str, Any]]:
        """Chunks of a stream; ``at`` is called with how many tokens have come."""
        chunks: list[dict[str, Any]] = []
        tokens, done = 0, False
        asked = {"model": "m", "stream": True, "return_token_ids": True, **body}
        async with self.session.post(self.url + path, json=asked) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.startswith(b"data: [DONE]"):
                    done = True
                elif line.startswith(b"data: "):
                    chunk = json.loads(line[6:])
                    chunks.append(chunk)
                    tokens += len(tokens_of([chunk]))
                    if at is not None and "error" not in chunk and tokens_of([chunk]):
                        await at(tokens)
        assert done
        return chunks

    async def answered(
        self, tokens: int, at: At | None = None, **asked: Any
    ) -> list[dict[str, Any]]:
        """Chunks of a completion of so many tokens, each of which is as it must be."""
        body = {"prompt": PROMPT, "max_tokens": tokens, **asked}
        chunks = await self.stream(body, at)
        assert tokens_of(chunks) == self.expected(tokens, body["prompt"])
        return chunks

    def live(self) -> LiveRequest:
        """The only request."""
        (request,) = self.requests()
        return request

    def requests(self) -> list[LiveRequest]:
        """All that are on an instance."""
        return [
            request
            for instance in self.proxy.cluster.all
            for request in self.proxy.cluster.placements.on(instance)
        ]

    async def move(self) -> str:
        """Move the only request to another decode instance."""
        request = self.live()
        target = next(
            instance
            for instance in self.proxy.cluster.all
            if instance.instance.role == "decode" and instance is not request.instance
        )
        return (await self.proxy.migrator.move(request, target, "test")).outcome

    async def moved(
        self,
        tokens: int,
        before: Callable[[ScriptedEngine, ScriptedEngine], object] = lambda source, target: None,
        at: int = 10,
        **asked: Any,
    ) -> tuple[list[dict[str, Any]], str]:
        """Chunks of `answered`, whose request begins to move at a token, and how the move ended.

        ``before`` is called first, with the engine that runs it and the one that it moves to.
        """
        moves: list[asyncio.Task[str]] = []

        async def move(came: int) -> None:
            if came == at:
                before(*self.source_and_target())
                moves.append(asyncio.create_task(self.move()))

        chunks = await self.answered(tokens, move, **asked)
        return chunks, await moves[0]

    async def answered_despite(
        self, tokens: int, fault: Callable[[ScriptedEngine], Awaitable[None]]
    ) -> tuple[list[dict[str, Any]], ScriptedEngine]:
        """Chunks of `answered`, whose engine has a fault at its tenth token; and that engine."""
        faulty: list[ScriptedEngine] = []
        until_then = 12  # else it may have ended before its client has read ten
        self.set_decodes(stalls_at=until_then)

        async def at(came: int) -> None:
            if came == 10 and not faulty:
                faulty.append(self.source_and_target()[0])
                await fault(faulty[0])
                for engine in self.decodes:
                    if engine.stalls_at == until_then:
                        engine.stalls_at = 0

        return await self.answered(tokens, at), faulty[0]

    async def connect(self, **options: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the clients' port, as bytes go."""
        host, port = self.url.removeprefix("http://").split(":")
        return await asyncio.open_connection(host, int(port), **options)

    async def text(self, path: str) -> str:
        """What a GET answers; of metrics, as they are now and not a second ago."""
        async with self.session.get(self.url + path) as response:
            text = await response.text()
        return self.proxy.metrics.text().decode() if path == "/metrics" else text

    async def metric(self, name: str, **labels: str) -> float:
        """A metric of the proxy, summed over the labels that are not given."""
        return metric_in(await self.text("/metrics"), name, **labels)

    async def admin(self, method: str, path: str) -> Any:
        """What the operator's listener answers."""
        headers = {"Authorization": f"Bearer {self.listeners.admin.token}"}
        url = f"{self.listeners.admin.url}/admin/{path}"
        async with self.session.request(method, url, headers=headers) as response:
            return response.status, await response.json()

    async def idle(self) -> None:
        """Nothing is left anywhere, neither with the proxy nor with an engine."""
        async with asyncio.timeout(60):
            while (
                self.requests()
                or any(engine.running or engine.kept for engine in self.engines.values())
                or self.proxy.running
                or self.waiting
            ):
                await asyncio.sleep(0.01)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what a test needs, however busy the machine is."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


def tokens_of(chunks: list[dict[str, Any]]) -> list[int]:
    choices = [choice for chunk in chunks for choice in chunk.get("choices", [])]
    return [token for choice in choices for token in choice.get("token_ids") or []]


def text_of(chunks: list[dict[str, Any]]) -> str:
    choices = [choice for chunk in chunks for choice in chunk.get("choices", [])]
    return "".join(
        choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        for choice in choices
    )


async def scripted(
    tokenizer: Tokenizer,
    names: Iterable[str],
    routing: dict[str, Any] | None = None,
    order: dict[str, Any] | None = None,
    prompt_checkpoint: str | None = None,
    kind: type[ScriptedEngine] = ScriptedEngine,
    prefix_caching: bool = True,
    telemetry: Mapping[str, str] | None = None,
    migration: Any = None,
    coordinator: CoordinatorOptions | None = None,
    keys: Path | None = None,
    **options: Any,
) -> tuple[dict[str, ScriptedEngine], Deployment]:
    """Start engines, by their names; return them, and a deployment of them.

    Without prefix caching a request moves at once, wherever it is; else it is copied first,
    as soon as it has filled a block. Telemetry has the endpoints of instances that publish it.
    """
    engines: dict[str, ScriptedEngine] = {}
    instances = []
    for name in names:
        engine = kind(name, name.partition("-")[0], tokenizer, engines)
        engine.prefix_caching = prefix_caching
        engine.host = options.get("host", engine.host)
        instance = await engine.start()
        changes: dict[str, Any] = {"telemetry": (telemetry or {}).get(name)}
        if keys:
            changes["control"] = None  # it has no keys
        instances.append(msgspec.structs.replace(instance, **changes))
    deployment = Deployment(
        model="m",
        instances=instances,
        migration=migration,
        routing=routing or {"name": "jsq_load"},
        order=order or {"name": "fcfs"},
        prompt_checkpoint=prompt_checkpoint,
        coordinator=coordinator,
        proxy=msgspec.structs.replace(OPTIONS, **options),
        keys=str(keys) if keys else None,
    )
    return engines, deployment


def names(decodes: int) -> list[str]:
    """Return those of a prefill engine and of some decode engines."""
    return ["prefill-0", *(f"decode-{i}" for i in range(decodes))]


@asynccontextmanager
async def served(
    deployment: Deployment, tokenizer: Tokenizer | None
) -> AsyncIterator[tuple[Proxy, Listeners]]:
    """Run a proxy before engines that run."""
    async with AsyncExitStack() as stack:
        proxy = Proxy(deployment, tokenizer)
        stack.push_async_callback(proxy.close)
        await proxy.start()
        listeners = Listeners(proxy)
        stack.push_async_callback(listeners.close)
        await listeners.start()
        yield proxy, listeners


@asynccontextmanager
async def cluster(tokenizer: Tokenizer, decodes: int = 2, **options: Any) -> AsyncIterator[Cluster]:
    """Run a proxy before scripted engines; the options are those of `scripted`."""
    engines, deployment = await scripted(tokenizer, names(decodes), **options)
    try:
        async with (
            served(deployment, tokenizer) as (proxy, listeners),
            aiohttp.ClientSession() as session,
        ):
            made = Cluster(engines, proxy, listeners, session, tokenizer)
            yield made
            await made.idle()
    finally:
        for engine in engines.values():
            await engine.stop()
