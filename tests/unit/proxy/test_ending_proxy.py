"""A proxy that ends: what runs goes on there, and nobody who is connected is refused."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from chosen_ports import free_port
from scripted_cluster import PROMPT, cluster
from scripted_engine import ScriptedEngine
from tokenizers import Tokenizer

from rescheduler.engines.deployment import Deployment, ProxyOptions
from rescheduler.engines.launch_local import write_deployment

BODY = {"model": "m", "prompt": PROMPT, "max_tokens": 5}


async def test_a_request_on_an_open_connection_is_served_while_the_proxy_ends(
    tokenizer: Tokenizer,
) -> None:
    async with cluster(tokenizer) as it, aiohttp.ClientSession() as kept:
        async with kept.get(it.url + "/health") as response:
            assert "Connection" not in response.headers
        await it.listeners.stop()
        async with kept.post(it.url + "/v1/completions", json=BODY) as response:
            assert response.status == 200, await response.text()
            assert response.headers["Connection"] == "close"
        with pytest.raises(aiohttp.ClientConnectorError):
            await kept.get(it.url + "/health")


@asynccontextmanager
async def served(
    command: list[str], folder: Path, tokenizer: Tokenizer
) -> AsyncIterator[tuple[ScriptedEngine, str, asyncio.subprocess.Process]]:
    """`headway serve` in front of an engine that stops at its fifth token."""
    engine = ScriptedEngine("decode-0", "decode", tokenizer, {}, stalls_at=5)
    proxy = ProxyOptions(port=free_port(), admin_port=free_port(), token_seconds=600.0)
    instances = [await engine.start()]
    deployment = Deployment(
        model="smollm2", served_model_name="m", instances=instances, proxy=proxy
    )
    write_deployment(deployment, folder / "deployment.yaml")
    process = await asyncio.create_subprocess_exec(
        *(*command, "serve", "--config", str(folder / "deployment.yaml")),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert (await process.stdout.readline()).startswith(b"serving on ")
        yield engine, deployment.proxy_url, process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
        await engine.stop()


async def test_a_second_signal_ends_what_runs_at_once(
    headway_command: list[str], smollm2: Path, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    del smollm2  # is prepared
    body = {**BODY, "max_tokens": 9, "stream": True}
    async with (
        served(headway_command, tmp_path, tokenizer) as (engine, url, process),
        aiohttp.ClientSession() as session,
        session.post(url + "/v1/completions", json=body) as it,
    ):
        assert (await it.content.readline()).startswith(b"data: ")
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        while b"a second signal ends them at once" not in await process.stderr.readline():
            pass
        await asyncio.sleep(0.5)
        assert process.returncode is None and engine.running, "ten minutes by default"
        process.send_signal(signal.SIGTERM)
        rest = await it.content.read()
        assert b"shutting down" in rest
        assert await process.wait() == 0


async def test_a_request_that_follows_the_last_one_on_its_connection_is_served(
    headway_command: list[str], smollm2: Path, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    del smollm2  # is prepared
    async with (
        served(headway_command, tmp_path, tokenizer) as (engine, url, process),
        aiohttp.ClientSession() as session,
    ):
        stream = {**BODY, "max_tokens": 9, "stream": True}
        async with session.post(url + "/v1/completions", json=stream) as it:
            assert (await it.content.readline()).startswith(b"data: ")
            process.send_signal(signal.SIGTERM)
            assert process.stderr is not None
            while b"a second signal ends them at once" not in await process.stderr.readline():
                pass
            engine.stalls_at = 0
            assert (await it.read()).endswith(b"data: [DONE]\n\n")
        await asyncio.sleep(0.2)  # by now nothing runs any more
        async with session.post(url + "/v1/completions", json=BODY) as again:
            assert again.status == 200 and again.headers["Connection"] == "close"
        assert await process.wait() == 0
