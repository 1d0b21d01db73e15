"""A real proxy before the session's engines, and clients that read its streams."""

import asyncio
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec
from running_deployment import RunningDeployment

from rescheduler.demo.load import metric_in
from rescheduler.engines.deployment import CoordinatorOptions, Deployment
from rescheduler.engines.launch_local import write_deployment
from rescheduler.openai.openai_stream import read_events
from rescheduler.serving.admin_client import admin_token
from rescheduler.serving.connection import METRICS_SECONDS
from rescheduler.transfer.control_client import ControlClient

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

_PATIENCE = 300.0
"""Seconds for whatever happens by itself, on a busy machine too."""

T = TypeVar("T")
At = Callable[[int], Awaitable[None]]


@contextmanager
def served(
    deployment: RunningDeployment,
    folder: Path,
    migration: Any = None,
    routing: dict[str, Any] | None = None,
    coordinator: CoordinatorOptions | None = None,
    **options: Any,
) -> Iterator["Served"]:
    """Run `headway serve` on the engines, with some options of its own."""
    described = msgspec.structs.replace(
        deployment.deployment,
        migration=migration,
        routing=routing or deployment.deployment.routing,
        coordinator=coordinator,
        proxy=msgspec.structs.replace(deployment.deployment.proxy, **options),
    )
    config, log = folder / "served.yaml", folder / "serve.log"
    write_deployment(described, config)
    command = [sys.executable, "-m", "rescheduler", "serve", "--config", str(config)]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        while True:
            assert process.poll() is None, log.read_text()
            try:
                with urllib.request.urlopen(described.proxy_url + "/ready"):
                    break
            except OSError:
                time.sleep(0.1)
        yield Served(described, config, process, log)
    finally:
        process.terminate()
        status = process.wait()
        assert status == 0 or -status == signal.SIGKILL, log.read_text()


@dataclass
class Served:
    """A proxy that runs."""

    deployment: Deployment
    config: Path
    process: "subprocess.Popen[bytes]"  # of `headway serve`
    log: Path  # what it printed

    def moves(self, request_id: str) -> int:
        """Return how often a request has moved, by what the proxy logged."""
        id = request_id.partition("-")[2] or request_id
        return len(re.findall(rf"request {id}, .* to .*: moved ", self.log.read_text()))

    @asynccontextmanager
    async def client(self) -> AsyncIterator["Client"]:
        """A client, after which no engine holds anything."""
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(connector=connector) as session:
            client = Client(session, self.deployment)
            yield client
            await client.idle()

    def run(self, work: Callable[["Client"], Awaitable[Any]]) -> Any:
        """Run a coroutine of a client's."""

        async def run() -> Any:
            async with self.client() as client:
                return await work(client)

        return asyncio.run(run())


class Client:
    """Asks the proxy, or an engine directly."""

    def __init__(self, session: aiohttp.ClientSession, deployment: Deployment) -> None:
        self.session, self.deployment = session, deployment
        self.proxy, self.direct = deployment.proxy_url, deployment.decode[0].url

    async def post(
        self, body: dict[str, Any], path: str = COMPLETIONS, url: str | None = None
    ) -> tuple[int, Any, Any]:
        asked = {"model": "smollm2", **body}
        async with self.session.post((url or self.proxy) + path, json=asked) as response:
            return response.status, await response.json(), response.headers

    async def stream(
        self,
        body: dict[str, Any],
        path: str = COMPLETIONS,
        at: At | None = None,
        url: str | None = None,
    ) -> list[dict[str, Any]]:
        """Chunks of a stream; ``at`` is called with how many have come."""
        return await chunks_of(self.session, (url or self.proxy) + path, body, at)

    async def instances(self) -> dict[str, dict[str, Any]]:
        async with self._admin("GET", "instances") as response:
            return {one["name"]: one for one in (await response.json())["instances"]}

    async def busy(self) -> str | None:
        """The decode instance that decodes, if one does."""
        listed = (await self.instances()).values()
        decodes = (one["name"] for one in listed if one["role"] == "decode" and one["requests"])
        return next(decodes, None)

    async def admin(self, what: str, instance: str) -> None:
        async with self._admin("POST", f"{what}/{instance}") as response:
            assert response.status == 200, await response.text()

    def _admin(self, method: str, path: str) -> Any:
        token = admin_token(self.deployment.proxy.admin_port)
        headers = {"Authorization": f"Bearer {token}"}
        url = f"{self.deployment.admin_url}/admin/{path}"
        return self.session.request(method, url, headers=headers)

    async def leave(self) -> None:
        """Have the only request move to another decode instance, and wait until it has."""
        instance = await self.busy()
        if instance is None:
            return
        await self.admin("drain", instance)
        await self.until_empty(instance)
        await self.admin("undrain", instance)

    async def until_empty(self, instance: str) -> None:
        """Wait until an instance has no request, as one that drains does sooner or later."""
        await self._until_listed(instance, "requests", 0)

    async def until_in_service(self, instance: str) -> None:
        """Wait until the proxy uses an instance again."""
        await self._until_listed(instance, "state", "closed")

    async def _until_listed(self, instance: str, field: str, value: Any) -> None:
        deadline = time.monotonic() + _PATIENCE
        while (listed := (await self.instances())[instance])[field] != value:
            assert time.monotonic() < deadline, f"{instance}: {field} never {value}: {listed}"
            await asyncio.sleep(0.05)

    async def drain_in_turn(self) -> None:
        """Move all requests from one decode instance to the other, back, and so on, unendingly."""
        while True:
            for instance in (one.name for one in self.deployment.decode):
                await self.admin("drain", instance)
                await self.until_empty(instance)
                await self.admin("undrain", instance)

    async def metric(self, name: str, **labels: str) -> float:
        """A metric of the proxy, summed over the labels that are not given.

        The proxy keeps its text for a second.
        """
        await asyncio.sleep(METRICS_SECONDS)
        async with self.session.get(self.proxy + "/metrics") as response:
            text = await response.text()
        return metric_in(text, name, **labels)

    async def idle(self) -> None:
        """Wait until no engine holds anything."""
        controls = [ControlClient(one.control) for one in self.deployment.instances if one.control]
        deadline = time.monotonic() + _PATIENCE
        try:
            while True:
                states = [await control.state(_PATIENCE) for control in controls]
                listed = (await self.instances()).values()
                if not any(one["requests"] for one in listed) and all(
                    state.free_blocks == state.num_blocks and not state.frozen for state in states
                ):
                    return
                assert time.monotonic() < deadline, f"never idle: {states}, {list(listed)}"
                await asyncio.sleep(0.1)
        finally:
            for control in controls:
                control.close()


async def chunks_of(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], at: At | None = None
) -> list[dict[str, Any]]:
    """Chunks of a stream; ``at`` is called with how many have come."""
    chunks: list[dict[str, Any]] = []
    async with session.post(url, json={"model": "smollm2", "stream": True, **body}) as response:
        assert response.status == 200, await response.text()
        async for chunk in read_events(response.content):
            assert "error" not in chunk, chunk
            chunks.append(chunk)
            if at is not None:
                await at(len(chunks))
    return chunks


def finished_tasks(
    proxy: Served,
    ask: Callable[[Client, str, dict[str, Any]], Coroutine[Any, Any, T]],
    asked: dict[str, tuple[str, dict[str, Any]]],
    beside: Callable[[Client], Coroutine[Any, Any, None]] | None = None,
) -> dict[str, "asyncio.Task[T]"]:
    """Ask for several paths and bodies, by name; each result or error is in its task.

    They are asked for at the same time, and ``beside`` runs until all have ended.
    """

    async def work(client: Client) -> dict[str, "asyncio.Task[T]"]:
        tasks = {name: asyncio.create_task(ask(client, *one)) for name, one in asked.items()}
        other = asyncio.create_task(beside(client)) if beside is not None else None
        await asyncio.wait(tasks.values())
        if other is not None:
            assert not other.done(), other.exception()
            other.cancel()
            for one in client.deployment.decode:
                await client.admin("undrain", one.name)
        return tasks

    tasks: dict[str, asyncio.Task[T]] = proxy.run(work)
    return tasks


def text_of(chunks: list[dict[str, Any]]) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(
        choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        for choice in choices
    )


def logprobs_of(choices: list[dict[str, Any]]) -> list[tuple[str, float]]:
    """Tokens and their logprobs, of either endpoint."""
    found = []
    for choice in choices:
        logprobs = choice.get("logprobs") or {}
        found += list(
            zip(logprobs.get("tokens", ()), logprobs.get("token_logprobs", ()), strict=True)
        )
        found += [(one["token"], one["logprob"]) for one in logprobs.get("content") or ()]
    return found
