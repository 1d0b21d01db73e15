"""Clients of one proxy, some of which want everything: what the others get."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from chosen_ports import free_port
from coordinated_cluster import coordinated_cluster, link_of
from live_requests import live_request
from scripted_cluster import PROMPT, Cluster, cluster, until
from tokenizers import Tokenizer

from rescheduler.engines.deployment import BackgroundOptions
from rescheduler.placement.live_forecasts import LiveForecasts

BODY = {"model": "m", "prompt": PROMPT, "max_tokens": 5}
LONG = {**BODY, "max_tokens": 200}


@asynccontextmanager
async def client(it: Cluster, address: str) -> AsyncIterator[aiohttp.ClientSession]:
    """A session that connects from an address of the loopback."""
    connector = aiohttp.TCPConnector(limit=0, local_addr=(address, 0))
    async with aiohttp.ClientSession(it.url, connector=connector) as session:
        yield session


async def status(session: aiohttp.ClientSession, body: dict[str, Any], **headers: str) -> int:
    async with session.post("/v1/completions", json=body, headers=headers) as response:
        await response.read()
        return response.status


async def one_at_a_time(it: Cluster) -> None:
    """Have the engines run one request each."""
    for engine in it.decodes:
        engine.says = {"max_num_seqs": 1}
    await until(lambda: all(one.slots == 1 for one in it.proxy.cluster.decodes))


def waiting(it: Cluster) -> int:
    dispatcher = it.proxy.cluster.dispatcher
    return len(dispatcher.waiting) + dispatcher.waiting_for_prefill


@pytest.fixture
async def flooded(tokenizer: Tokenizer) -> AsyncIterator[Cluster]:
    """A proxy whose pool of eight one client fills, behind an engine that runs one request."""
    options: dict[str, Any] = {"pool": 8, "order": {"name": "fcfs", "fairness": 1.0}}
    async with cluster(tokenizer, decodes=1, **options) as it, client(it, "127.0.0.2") as flood:
        await one_at_a_time(it)
        asking = []
        for n in range(9):
            asking.append(asyncio.create_task(status(flood, LONG)))
            await until(lambda n=n: waiting(it) + len(it.requests()) >= n)
        await until(lambda: waiting(it) == 8)
        yield it
        await asyncio.gather(*asking)


class TestAFlood:
    async def test_keeps_nobody_else_out_of_the_pool(self, flooded: Cluster) -> None:
        async with client(flooded, "127.0.0.2") as flood, client(flooded, "127.0.0.3") as other:
            assert await status(flood, LONG) == 429
            assert await status(other, BODY) == 200

    async def test_is_served_in_turn_with_others_and_not_before_them(
        self, flooded: Cluster
    ) -> None:
        async with client(flooded, "127.0.0.3") as other:
            assert await status(other, BODY) == 200
        assert waiting(flooded) >= 5, "the flood has had one place or two meanwhile"

    async def test_of_background_keeps_nobody_out_either(self, tokenizer: Tokenizer) -> None:
        options: dict[str, Any] = {"background": BackgroundOptions(pool=4)}
        async with cluster(tokenizer, decodes=1, **options) as it, client(it, "127.0.0.2") as flood:
            await one_at_a_time(it)
            flex = {**LONG, "service_tier": "flex"}
            asking = [asyncio.create_task(status(flood, LONG))]
            await until(lambda: len(it.requests()) == 1)
            asking += [asyncio.create_task(status(flood, flex)) for _ in range(4)]
            dispatcher = it.proxy.cluster.dispatcher
            await until(lambda: dispatcher.waiting_in_background == 4)
            async with client(it, "127.0.0.3") as other:
                assert await status(flood, flex) == 429
                asking.append(asyncio.create_task(status(other, {**flex, "max_tokens": 5})))
                await until(lambda: dispatcher.waiting_in_background == 5)
                assert await asyncio.gather(*asking) == [200] * 6


async def test_with_one_client_nothing_changes(tokenizer: Tokenizer) -> None:
    options: dict[str, Any] = {"pool": 3, "order": {"name": "fcfs", "fairness": 1.0}}
    async with cluster(tokenizer, decodes=1, **options) as it, client(it, "127.0.0.2") as only:
        await one_at_a_time(it)
        asking = [asyncio.create_task(status(only, LONG))]
        await until(lambda: len(it.requests()) == 1)
        asking += [asyncio.create_task(status(only, BODY)) for _ in range(3)]
        await until(lambda: waiting(it) == 3)
        assert await status(only, BODY) == 429, "the pool is full, and nobody else waits"
        assert await asyncio.gather(*asking) == [200] * 4


async def test_a_key_that_an_engine_has_accepted_is_one_client_from_wherever_it_comes(
    tokenizer: Tokenizer,
) -> None:
    async with cluster(tokenizer, decodes=1) as it:
        for engine in it.engines.values():
            engine.key = "right"
        accounts = it.proxy.cluster.accounts
        async with client(it, "127.0.0.2") as one, client(it, "127.0.0.3") as two:
            assert await status(one, BODY, Authorization="Bearer wrong") == 401
            assert await status(one, BODY, Authorization="Bearer right") == 200
            assert await status(two, BODY, Authorization="Bearer right") == 200
            right = {"Authorization": "Bearer right"}
            assert accounts.of("127.0.0.2", right) is accounts.of("127.0.0.3", right)
            wrong = {"Authorization": "Bearer wrong"}
            assert accounts.of("127.0.0.2", wrong).name == "127.0.0.2", "nobody has accepted it"
            assert accounts.of("127.0.0.2", right).served > 0
            assert all(one.unfinished == 0 for one in accounts._accounts.values())


async def test_a_coordinator_shares_out_places_between_the_clients_of_all_proxies(
    tokenizer: Tokenizer,
) -> None:
    options: dict[str, Any] = {"order": {"name": "fcfs", "fairness": 1.0}, "decodes": 1}
    async with coordinated_cluster(tokenizer, free_port(), **options) as it:
        one, two = it.proxies
        it.engines["decode-0"].says = {"max_num_seqs": 1}
        await until(lambda: it.coordinator.cluster.decodes[0].slots == 1)
        dispatcher = it.coordinator.cluster.dispatcher
        async with client(one, "127.0.0.2") as flood, client(two, "127.0.0.3") as other:
            asking = [asyncio.create_task(status(flood, LONG)) for _ in range(8)]
            await until(lambda: len(dispatcher.waiting) + dispatcher.waiting_for_prefill == 7)
            assert await status(other, BODY) == 200
            assert len(dispatcher.waiting) + dispatcher.waiting_for_prefill >= 4
            assert await asyncio.gather(*asking) == [200] * 8
        accounts = it.coordinator.cluster.accounts
        await until(lambda: not any(one.unfinished for one in accounts._accounts.values()))
        assert accounts.named("127.0.0.2").served > accounts.named("127.0.0.3").served > 0


async def test_a_flood_at_one_proxy_keeps_nobody_out_at_another(tokenizer: Tokenizer) -> None:
    options: dict[str, Any] = {"pool": 4, "decodes": 1, "silent_seconds": 30.0}
    async with coordinated_cluster(tokenizer, free_port(), **options) as it:
        one, two = it.proxies
        it.engines["decode-0"].says = {"max_num_seqs": 1}
        await until(lambda: it.coordinator.cluster.decodes[0].slots == 1)
        dispatcher, link = it.coordinator.cluster.dispatcher, link_of(one)
        async with client(one, "127.0.0.2") as flood, client(two, "127.0.0.3") as other:
            with it.unhurried():
                asking = []
                for n in range(5):
                    asking.append(asyncio.create_task(status(flood, LONG)))
                    await until(lambda n=n: link.view.waiting == n)
                assert len(dispatcher.waiting) + dispatcher.waiting_for_prefill == 4
                tickets = link._tickets
                assert await status(flood, BODY) == 429
                assert link._tickets == tickets, "the coordinator is not asked"
            assert await status(other, BODY) == 200
            assert await asyncio.gather(*asking) == [200] * 5


@pytest.mark.parametrize(
    ("asked", "fewest"),
    [
        ({"min_tokens": 1200, "max_tokens": 2000}, 1200),
        ({"ignore_eos": True, "max_tokens": 900}, 900),
        ({"ignore_eos": True, "max_tokens": 900, "stop": "a", "min_tokens": 5}, 5),
        ({"max_tokens": 900}, 0),
    ],
)
def test_what_a_request_must_generate_is_known_to_its_forecast(
    asked: dict[str, Any], fewest: int, tokenizer: Tokenizer
) -> None:
    forecasts = LiveForecasts(None)
    request = live_request("r", tokenizer, **asked)
    plain = live_request("p", tokenizer, max_tokens=2000)
    survival = forecasts.forecast([request, plain])
    if fewest:
        assert survival.at([fewest - 1])[0, 0] == 1.0
        assert survival.mean()[0] > fewest - 1e-6
    assert survival.mean()[1] == forecasts.forecast([plain]).mean()[0], "others are as they were"
    request._generated = fewest // 2
    assert forecasts.forecast([request]).at([max(0, fewest // 2 - 1)])[0, 0] == 1.0
    if fewest == request.max_tokens:
        return
    request._generated = fewest + 1
    plain._generated = fewest + 1
    ahead = forecasts.forecast([request, plain]).at([50])
    assert ahead[0, 0] == pytest.approx(ahead[1, 0], abs=0.2), "then it may end"


async def test_a_key_that_no_engine_looks_at_makes_nobody_another_client(
    tokenizer: Tokenizer,
) -> None:
    async with cluster(tokenizer, decodes=1) as it, client(it, "127.0.0.2") as one:
        made_up = {"Authorization": "Bearer made-up"}
        for path, counts in (("/tokenize", False), ("/v1/embeddings", True)):
            async with one.post(path, json={"model": "m", "prompt": "a"}, headers=made_up) as got:
                assert got.status == 200, await got.text()
            assert it.proxy.cluster.accounts.keys.knows(made_up) is counts


async def test_requests_that_came_while_there_was_room_wait_only_as_far_as_there_is(
    tokenizer: Tokenizer,
) -> None:
    """Their bodies end when the pool is full: they are looked at again then."""
    async with cluster(tokenizer, decodes=1, pool=4) as it:
        await one_at_a_time(it)
        it.decodes[0].token_seconds = 0.01
        async with client(it, "127.0.0.2") as flood:
            go = asyncio.Event()

            async def late() -> AsyncIterator[bytes]:
                yield b'{"model": "m", "prompt": "a", "max_tokens": 20'
                await go.wait()
                yield b"}"

            async def ask() -> int:
                headers = {"Content-Type": "application/json"}
                async with flood.post("/v1/completions", data=late(), headers=headers) as response:
                    await response.read()
                    return response.status

            asking = [asyncio.create_task(ask()) for _ in range(20)]
            await asyncio.sleep(0.3)  # all headers have come
            go.set()
            statuses = await asyncio.gather(*asking)
    assert statuses.count(200) <= 12 and statuses.count(429) >= 8
