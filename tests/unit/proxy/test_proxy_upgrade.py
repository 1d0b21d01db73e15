"""`headway serve` is started anew by its launcher while clients stream, connect and stay."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import aiohttp
from chosen_ports import free_port
from scripted_cluster import PROMPT, tokens_of
from scripted_engine import ScriptedEngine, reference
from tokenizers import Tokenizer

from rescheduler.engines.deployment import Deployment, ProxyOptions
from rescheduler.engines.engine_command import EngineCommand
from rescheduler.engines.launch_engines import PROXY, Launched
from rescheduler.engines.launch_local import write_deployment
from rescheduler.engines.launch_process import ServerProcess
from rescheduler.engines.launch_upgrade import Plan, PlannedServer, Requests, ask_to_upgrade
from rescheduler.serving.admin_client import listed_instances


async def stream(session: aiohttp.ClientSession, tokens: int) -> list[int]:
    """The tokens of a stream that ends as it must."""
    body = {"model": "m", "prompt": PROMPT, "max_tokens": tokens, "stream": True}
    chunks: list[dict[str, Any]] = []
    async with session.post("/v1/completions", json={**body, "return_token_ids": True}) as response:
        assert response.status == 200, await response.text()
        lines = [line async for line in response.content if line.startswith(b"data: ")]
    assert lines.pop() == b"data: [DONE]\n"
    chunks = [json.loads(line[6:]) for line in lines]
    return tokens_of(chunks)


async def test_a_proxy_starts_anew_and_no_client_is_refused_or_cut(
    smollm2: Path, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    del smollm2  # is prepared
    engine = ScriptedEngine("decode-0", "decode", tokenizer, {}, token_seconds=0.05)
    options = ProxyOptions(port=free_port(), admin_port=free_port())
    instances = [await engine.start()]
    deployment = Deployment(
        model="smollm2", served_model_name="m", instances=instances, proxy=options
    )
    write_deployment(deployment, tmp_path / "deployment.yaml")
    command = [sys.executable, "-m", "rescheduler", "serve", "--config"]
    command.append(str(tmp_path / "deployment.yaml"))
    url = deployment.proxy_url
    proxy = ServerProcess(PROXY, EngineCommand(command, {}), url, tmp_path / "proxy.log")
    launched = Launched(deployment, tmp_path, [proxy], lambda name, stage: None)
    plan = Plan([PlannedServer(PROXY, command, {}, url, sys.executable)])
    said: list[str] = []
    ended = asyncio.Event()
    expected = reference(tokenizer.encode(PROMPT).ids, 600)

    def watch(requests: Requests) -> None:
        request = None
        while request is None:
            request = requests.wait(0.1)
        launched.upgrade(request)

    async def ask(**how: Any) -> int:
        """Ask one thing after another, on connections of its own or on one that stays open."""
        count = 0
        async with aiohttp.ClientSession(url, **how) as session:
            while not ended.is_set():
                assert await stream(session, 2) == expected[:2]
                count += 1
        return count

    try:
        await asyncio.to_thread(launched.start_all, None)
        with Requests.heard(tmp_path) as requests:
            async with aiohttp.ClientSession(url) as session:
                long = asyncio.create_task(stream(session, 600))
                fresh = asyncio.create_task(ask(connector=aiohttp.TCPConnector(force_close=True)))
                kept = asyncio.create_task(ask())
                watching = asyncio.create_task(asyncio.to_thread(watch, requests))
                asked = asyncio.to_thread(ask_to_upgrade, tmp_path, plan, said.append)
                upgrade = asyncio.create_task(asked)
                while not any("the new proxy serves" in line for line in said):
                    assert not upgrade.done(), upgrade.result()
                    await asyncio.sleep(0.05)
                assert not long.done(), "the old one has something to end"
                (listed,) = await asyncio.to_thread(listed_instances, deployment.admin_url)
                assert listed.name == "decode-0", "an operator reaches the new one"
                engine.token_seconds = 0.002
                assert await long == expected
                assert await upgrade == {PROXY}
                await watching
                ended.set()
                assert await fresh > 10 and await kept > 10
        assert proxy.exit_status == 0 and launched.servers[PROXY] is not proxy
    finally:
        await asyncio.to_thread(launched.close)
        await engine.stop()
