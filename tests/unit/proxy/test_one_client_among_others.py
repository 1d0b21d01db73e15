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
from rescheduler.openai.request_reader import read_forwarded, read_request
from rescheduler.placement.placeable import Placeable

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
        ({"prompt": ["x" * 300_000, "y" * 300_000]}, 2),
        ({"prompt": [[1] * 100_000, [2] * 100_000, [3]]}, 3),
        ({"n": 10**9}, MOST_ANSWERS),
    ],
)
def test_each_answer_is_counted(fields: dict[str, Any], answers: int) -> None:
    """Where an engine may read a number that the proxy does not, as many as there may be."""
    assert read_request(COMPLETIONS, json.dumps({**BODY, **fields}).encode()).answers == answers


@pytest.mark.parametrize(
    ("path", "fields", "answers"),
    [
        ("/v1/chat/completions/batch", {"messages": [[{"content": "a"}]] * 5, "n": 2}, 10),
        ("/v1/chat/completions/batch", {"messages": [[]], "n": "6_4"}, MOST_ANSWERS),
        ("/v1/embeddings", {"input": ["a", "b", "c"]}, 3),
        ("/v1/embeddings", {"input": "a, b"}, 1),
        ("/v1/embeddings", {"input": [1, 2, 3]}, 1),
        ("/v1/responses", {"input": [{"role": "user", "content": "a"}] * 4}, 1),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}] * 4}, 1),
        ("/rerank", {"query": "a", "documents": [{"text": "b"}] * 7}, 7),
        ("/score", {"text_1": [], "text_2": ["a", "b"]}, 2),
        ("/generative_scoring", {"query": "a", "items": [[1], [2]]}, 2),
    ],
)
def test_each_item_of_a_forwarded_request_is_counted(
    path: str, fields: dict[str, Any], answers: int
) -> None:
    body = json.dumps({"model": "m", **fields}).encode()
    assert read_forwarded(path, body).answers == answers


class Counts(ScriptedEngine):
    """Answers as a whole, and says what it took."""

    usage: dict[str, Any] | None = None

    async def _respond(self, http: web.Request) -> web.StreamResponse:
        return web.json_response({"choices": [], "usage": self.usage})

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        return await self._respond(http)


@pytest.mark.parametrize(
    ("path", "usage", "service"),
    [
        ("/v1/completions", {"prompt_tokens": 9, "completion_tokens": 4000}, 8009),
        ("/v1/chat/completions/batch", {"prompt_tokens": 90, "completion_tokens": 50_000}, 100_090),
        ("/v1/messages", {"input_tokens": 9, "output_tokens": 700}, 1409),
        ("/v1/embeddings", {"prompt_tokens": 9000, "completion_tokens": None}, 9000),
    ],
)
async def test_an_answer_that_comes_whole_costs_what_its_engine_counted(
    tokenizer: Tokenizer, path: str, usage: dict[str, Any], service: float
) -> None:
    async with cluster(tokenizer, 1, kind=Counts) as it:
        it.decodes[0].usage = usage  # type: ignore[attr-defined]
        body = {**BODY, "n": 2, "messages": [], "input": "a"}
        status, _, _ = await it.post(body, path)
        assert status == 200
        assert it.proxy.cluster.accounts.named("127.0.0.1").served == service


@pytest.mark.parametrize(("interval", "most"), [(100, 900), (10**12, 900), (100, None)])
async def test_chunks_of_several_tokens_cost_what_they_may_hold(
    tokenizer: Tokenizer, interval: int, most: int | None
) -> None:
    """Else an answer of thousands of tokens would cost as many as it has chunks."""
    async with cluster(tokenizer, 1) as it:
        it.decodes[0].token_seconds = 0.001
        body = {**BODY, "n": 2, "stream": True, "stream_interval": interval, "max_tokens": most}
        async with it.session.post(it.url + "/v1/completions", json=body) as response:
            for _ in range(20):
                await response.content.readline()
        await until(lambda: not it.proxy.cluster.accounts.named("127.0.0.1").charges)
        served = it.proxy.cluster.accounts.named("127.0.0.1").served
        assert 2 * 100 < served <= 2 * 2 * (most or 4_096) + 100


class NeverEnds(ScriptedEngine):
    async def _generate(self, http: web.Request) -> web.StreamResponse:
        await asyncio.sleep(60)
        raise AssertionError


async def test_who_leaves_before_the_end_pays_for_what_was_computed(tokenizer: Tokenizer) -> None:
    """Sixty-four answers to a prompt that looks like a short one, and none of them read."""
    async with cluster(tokenizer, 1, kind=NeverEnds) as it:
        cluster_of = it.proxy.cluster
        cluster_of.step.seconds = 0.001
        account = cluster_of.accounts.named("127.0.0.1")
        asking = asyncio.create_task(it.post({**BODY, "n": 64, "max_tokens": 2000}))
        await until(lambda: bool(account.charges))
        await asyncio.sleep(0.3)
        asking.cancel()
        await until(lambda: not account.charges)
        assert account.served > 2 * 64 * 200


@pytest.mark.parametrize(
    "usage", [None, {}, {"prompt_tokens": -1}, {"prompt_tokens": 2**60}, {"prompt_tokens": "9"}, []]
)
async def test_counts_that_cannot_be_are_not_believed(tokenizer: Tokenizer, usage: Any) -> None:
    async with cluster(tokenizer, 1, kind=Counts) as it:
        it.decodes[0].usage = usage  # type: ignore[attr-defined]
        status, answer, _ = await it.post({**BODY, "n": 2})
        assert (status, answer["usage"]) == (200, usage)
        assert 0 < it.proxy.cluster.accounts.named("127.0.0.1").served < 10_000


async def test_a_prompt_of_token_ids_costs_its_length_from_the_start(tokenizer: Tokenizer) -> None:
    async with cluster(tokenizer, 1) as it:
        placed: list[Placeable] = []
        accounts = it.proxy.cluster.accounts
        asking = asyncio.create_task(it.post({**BODY, "prompt": [1] * 14_000, "n": 2}))
        await until(lambda: bool(placed.extend(accounts.named("127.0.0.1").charges) or placed))
        assert accounts.named("127.0.0.1").served >= 14_000
        asking.cancel()


async def test_one_that_never_fits_gives_nobody_a_claim(tokenizer: Tokenizer) -> None:
    """Neither its own account nor one that is new to the tier."""
    order = {"name": "fcfs", "fairness": 1.0}
    async with (
        cluster(tokenizer, 1, order=order) as it,
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
        dispatcher = it.proxy.cluster.dispatcher
        await until(lambda: dispatcher.waiting_in_background == 1)
        for _ in range(6):
            assert await ask(batch, service_tier="flex") == 200
        tier = dispatcher.background_accounts
        had = tier.named("127.0.0.3").served
        assert tier.virtual_time > had / 2
        assert tier.named("127.0.0.2").served > had / 2
        assert not running.done() and not waits.done()
        running.cancel()
        waits.cancel()
