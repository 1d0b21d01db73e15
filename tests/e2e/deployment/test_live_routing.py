"""Policies that let requests wait, before real engines: nobody waits forever, answers stay."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from proxying import Client, served, text_of
from router_tasks import checkpoint, random_layers
from running_deployment import RunningDeployment

pytestmark = pytest.mark.timeout(600)

DECODES = ("decode-0", "decode-1")


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A router for two instances that has learned nothing."""
    folder = tmp_path_factory.mktemp("router")
    checkpoint(random_layers(2)).save(folder)
    return folder


async def answers_of(
    client: Client, body: dict[str, Any], n: int
) -> tuple[list[str], Counter[str]]:
    """Ask n times at once: what each answered, and the most that each engine had at a time."""
    most: Counter[str] = Counter()
    asked = [asyncio.create_task(client.post(body)) for _ in range(n)]
    while not all(task.done() for task in asked):
        for one in (await client.instances()).values():
            most[one["name"]] = max(most[one["name"]], one["requests"])
        await asyncio.sleep(0.02)
    answers = [task.result() for task in asked]
    assert [status for status, _, _ in answers] == [200] * n
    return [one["choices"][0]["text"] for _, one, _ in answers], most


@pytest.mark.slow
async def test_a_learned_router_routes_real_requests(
    deployment: RunningDeployment, router: Path, tmp_path: Path
) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 32, "temperature": 0, "ignore_eos": True}
    with served(deployment, tmp_path, routing={"name": "rl", "checkpoint": str(router)}) as proxy:
        async with proxy.client() as client:
            _, alone, _ = await client.post(body, url=client.direct)
            text = alone["choices"][0]["text"]
            assert (await answers_of(client, body, 12))[0] == [text] * 12
            long = {**body, "max_tokens": 280}
            whole = text_of(await client.stream(long, url=client.direct))
            streams = [asyncio.create_task(client.stream(long)) for _ in range(4)]
            await client.admin("drain", "decode-0")
            # How many of them move, and how many end first, depends on how fast the machine is.
            await client.until_empty("decode-0")
            answers, most = await answers_of(client, body, 4)
            assert answers == [text] * 4
            assert most["decode-0"] == 0
            assert [text_of(await stream) for stream in streams] == [whole] * 4
            await client.admin("undrain", "decode-0")


@pytest.mark.slow
async def test_a_reserve_lets_requests_wait_for_memory(
    deployment: RunningDeployment, tmp_path: Path
) -> None:
    body = {"prompt": list(range(1000, 1700)), "max_tokens": 40, "temperature": 0}
    body["ignore_eos"] = True
    routing = {"name": "max_capacity", "reserve": 0.6}
    with served(deployment, tmp_path, routing=routing) as proxy:
        async with proxy.client() as client:
            _, alone, _ = await client.post(body, url=client.direct)
            answers, most = await answers_of(client, body, 5)
            assert answers == [alone["choices"][0]["text"]] * 5
            # A second prompt would leave less than 0.6 of an engine's 3,072 tokens free.
            assert [most[name] for name in DECODES] == [1, 1]


async def test_headroom_lets_requests_wait_for_what_running_ones_will_need(
    deployment: RunningDeployment, tmp_path: Path
) -> None:
    body = {"prompt": list(range(1000, 2000)), "max_tokens": 60, "temperature": 0}
    body["ignore_eos"] = True
    with served(deployment, tmp_path, routing={"name": "headroom"}) as proxy:
        async with proxy.client() as client:
            _, alone, _ = await client.post(body, url=client.direct)
            answers, most = await answers_of(client, body, 6)
            assert answers == [alone["choices"][0]["text"]] * 6
            # Three prompts fit into an engine's 3,072 tokens; with their answers they would not.
            assert max(most[name] for name in DECODES) == 2
