"""What one client does, behind a real proxy and scripted engines, falls on that client alone."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from scripted_cluster import PROMPT, cluster, until
from scripted_engine import ScriptedEngine
from tokenizers import Tokenizer

from rescheduler.openai.openai_request import COMPLETIONS, MOST_ANSWERS
from rescheduler.openai.request_reader import read_request

BODY = {"model": "m", "prompt": PROMPT, "max_tokens": 5}


@asynccontextmanager
async def client(url: str, address: str) -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=0, local_addr=(address, 0))
    async with aiohttp.ClientSession(url, connector=connector) as session:
        yield session


async def ask(session: aiohttp.ClientSession, **fields: Any) -> int:
    async with session.post("/v1/completions", json={**BODY, **fields}) as response:
        await response.read()
        return response.status


class RefusesThoseWithoutKey(ScriptedEngine):
    async def _generate(self, http: web.Request) -> web.StreamResponse:
        if http.headers.get("Authorization") != "Bearer key":
            return web.json_response({"error": {"message": "Unauthorized"}}, status=401)
        return await super()._generate(http)


async def test_whoever_is_refused_does_not_get_each_next_place(tokenizer: Tokenizer) -> None:
    order = {"name": "fcfs", "fairness": 1.0}
    async with (
        cluster(tokenizer, 1, kind=RefusesThoseWithoutKey, order=order) as it,
        client(it.url, "127.0.0.2") as attacker,
        client(it.url, "127.0.0.3") as honest,
    ):
        it.decodes[0].token_seconds = 0.01
        honest.headers["Authorization"] = "Bearer key"
        refused: Counter[int] = Counter()

        async def attack() -> None:
            while True:
                refused[await ask(attacker)] += 1

        attacks = [asyncio.create_task(attack()) for _ in range(8)]
        await until(lambda: refused[401] > 20)
        before = refused[401]
        assert await asyncio.gather(*(ask(honest) for _ in range(20))) == [200] * 20
        assert refused[401] - before < 400, "they take turns"
        for task in attacks:
            task.cancel()
        assert set(refused) == {401}


@pytest.mark.parametrize("checkpoint", [None, "checkpoints/smollm2-135m-instruct-prompt"])
async def test_a_burst_does_not_pass_the_pool(tokenizer: Tokenizer, checkpoint: str | None) -> None:
    """Though all of it is admitted before any of it waits: prompts are forecast meanwhile."""
    async with (
        cluster(tokenizer, decodes=1, pool=8, prompt_checkpoint=checkpoint) as it,
        client(it.url, "127.0.0.2") as flood,
    ):
        for engine in it.engines.values():
            engine.says = {"max_num_seqs": 1}
        it.decodes[0].token_seconds = 0.05
        await until(lambda: it.proxy.cluster.decodes[0].slots == 1)
        statuses = await asyncio.gather(*(ask(flood, prompt="a river " * 99) for _ in range(100)))
        assert set(statuses) == {200, 429}
        assert statuses.count(429) >= 80


async def test_one_without_room_holds_back_no_other_client(tokenizer: Tokenizer) -> None:
    async with (
        cluster(tokenizer, 1) as it,
        client(it.url, "127.0.0.2") as large,
        client(it.url, "127.0.0.3") as batch,
        client(it.url, "127.0.0.4") as online,
    ):
        for engine in it.engines.values():
            engine.says = {"max_num_seqs": 16, "max_model_len": 15_000}
        await until(lambda: it.proxy.cluster.decodes[0].slots == 16)
        it.decodes[0].token_seconds = 0.02
        running = asyncio.create_task(ask(online, max_tokens=900))
        waits = asyncio.create_task(ask(large, prompt="x" * 300_000, service_tier="flex"))
        background = it.proxy.cluster.dispatcher
        await until(lambda: background.waiting_in_background == 1)
        answers = [ask(batch, service_tier="flex") for _ in range(3)]
        assert await asyncio.gather(*answers) == [200] * 3
        assert not running.done() and not waits.done()
        running.cancel()
        waits.cancel()


class BreaksConnections(ScriptedEngine):
    asked = 0

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        if "POISON" in (await http.json())["prompt"]:
            BreaksConnections.asked += 1
            assert http.transport is not None
            http.transport.abort()
        return await super()._generate(http)


async def test_a_request_that_breaks_its_connection_breaks_few_of_others(
    tokenizer: Tokenizer,
) -> None:
    BreaksConnections.asked = 0
    async with (
        cluster(tokenizer, 2, kind=BreaksConnections, pool=512, ahead=500) as it,
        client(it.url, "127.0.0.2") as poison,
        client(it.url, "127.0.0.3") as others,
    ):
        await asyncio.gather(*(ask(others, n=2) for _ in range(60)))
        assert await ask(poison, prompt="POISON", n=2) >= 500
        assert BreaksConnections.asked <= 2 * it.proxy.deployment.proxy.attempts + 2


@pytest.mark.parametrize(
    ("fields", "answers"),
    [
        ({"n": 3}, 3),
        ({"n": "064"}, MOST_ANSWERS),
        ({"n": "6_4"}, MOST_ANSWERS),
        ({"prompt": ["a", "b"], "n": 2}, 4),
        ({"prompt": [1, 2, 3]}, 1),
        ({"prompt": [[1, 2], [3]]}, 2),
        ({"n": 10**9}, MOST_ANSWERS),
    ],
)
def test_each_answer_is_counted(fields: dict[str, Any], answers: int) -> None:
    """Where an engine may read a number that the proxy does not, as many as there may be."""
    assert read_request(COMPLETIONS, json.dumps({**BODY, **fields}).encode()).answers == answers
