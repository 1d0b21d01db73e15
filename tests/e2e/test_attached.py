"""`headway serve` before engines that somebody else has started, without Headway in them."""

import asyncio
import json
import re
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from msgspec.structs import replace
from proxying import CHAT, COMPLETIONS, chunks_of, text_of
from running_command import next_line, running
from running_deployment import ENGINE
from shown_commands import ROOT, read_page

from rescheduler.demo.load import metric_in
from rescheduler.engines.deployment import Deployment
from rescheduler.engines.engine_command import engine_command
from rescheduler.engines.launch_local import local_deployment
from rescheduler.engines.launch_process import ServerGroup, ServerProcess
from rescheduler.simulator.workloads.trace_files import TraceFile

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

PAGE = read_page(ROOT / "docs" / "attach.md")
MESSAGES = [{"role": "user", "content": "Tell me a story of a river."}]
COMPLETION = {"prompt": "Once upon a time there was a river", "max_tokens": 24}
CHATTED = {"messages": MESSAGES, "max_tokens": 24}
ASKED: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, COMPLETION),
    (COMPLETIONS, {**COMPLETION, "stream": True}),
    (CHAT, CHATTED),
    (CHAT, {**CHATTED, "stream": True}),
    (CHAT, {**CHATTED, "temperature": 1.0, "seed": 7, "stream": True}),
    (COMPLETIONS, {**COMPLETION, "n": 2, "temperature": 1.0, "seed": 3}),
]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Iterator[Deployment]:
    """A prefill and a decode engine with vLLM's own connector, scheduler and worker."""
    described = local_deployment("smollm2", replace(ENGINE, checkpoint=None), decode=1)
    bare = [replace(one, control=None, telemetry=None) for one in described.instances]
    described = replace(described, instances=bare)
    logs, servers = tmp_path_factory.mktemp("attached"), []
    for one in bare:
        command = engine_command(described, one, str(smollm2), sys.executable)
        words = command.arguments
        role = {"prefill": "kv_producer", "decode": "kv_consumer"}[one.role]
        stock = {"kv_connector": "NixlConnector", "kv_role": role}
        words[words.index("--kv-transfer-config") + 1] = json.dumps(stock)
        others = [word for word in words if word not in (sys.executable, str(smollm2))]
        assert not re.search(r"headway|rescheduler|predictor", " ".join(others).lower())
        servers.append(ServerProcess(one.name, command, one.url, logs / f"{one.name}.log", True))
    group = ServerGroup(servers, lambda name, stage: None)
    with closing(group):
        group.start([one.name for one in bare])
        yield described


@contextmanager
def attached(
    headway_command: list[str], engines: Deployment, folder: Path
) -> Iterator[tuple[str, Any]]:
    """Run a proxy by the file that the page shows; yield its address and its process."""
    shown = next(block.text for block in PAGE.blocks if block.language == "yaml")
    for one, port in zip(engines.instances, ("8100", "8200"), strict=True):
        shown = shown.replace(f"http://127.0.0.1:{port}", one.url)
    config = folder / "my-vllm.yaml"
    config.write_text(shown.replace("MODEL", "smollm2") + "proxy: {port: 0, admin_port: 0}\n")
    with running(
        headway_command, "serve", config, "--trace", str(folder / "traffic.csv")
    ) as process:
        yield next_line(process).partition("serving on ")[2].strip(), process


async def said(session: aiohttp.ClientSession, url: str, path: str, body: dict[str, Any]) -> Any:
    """The texts of an answer."""
    body = {"model": "smollm2", "temperature": 0, "ignore_eos": True, **body}
    if body.get("stream"):
        return text_of(await chunks_of(session, url + path, body))
    async with session.post(url + path, json=body) as response:
        answer = await response.json()
    assert response.status == 200, answer
    return [one.get("text") or one["message"]["content"] for one in answer["choices"]]


async def others(session: aiohttp.ClientSession, url: str) -> float:
    async with session.get(url + "/metrics") as response:
        text = await response.text()
    return metric_in(text, "headway_proxy_other_requests", instance_name="decode-0")


async def test_stock_engines_are_served_by_a_file_of_their_addresses(
    headway_command: list[str], engines: Deployment, tmp_path: Path
) -> None:
    prefill, decode = (one.url for one in engines.instances)
    async with aiohttp.ClientSession() as session:
        with attached(headway_command, engines, tmp_path) as (url, process):
            for path, body in ASKED:
                assert await said(session, url, path, body) == await said(
                    session, decode, path, body
                )
            async with session.get(prefill + "/metrics") as response:
                prefilled = metric_in(await response.text(), "vllm:request_success_total")
            assert prefilled == 5, "all but the one of several answers"
            stranger = asyncio.create_task(
                said(session, decode, COMPLETIONS, {**COMPLETION, "max_tokens": 900})
            )
            while await others(session, url) != 1:
                assert not stranger.done(), "a request of another client never counted"
                await asyncio.sleep(0.1)
            await stranger
            process.terminate()
            _, log = process.communicate()
    assert "decode-0: no `control`" in log
    blocks = TraceFile(tmp_path / "traffic.csv").blocks(np.random.default_rng(0))
    assert [block.output.tolist() for block in blocks] == [[24] * 5]
