"""What one client does falls on that client alone, and what the others get meanwhile."""

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from clients import BODY, ask, client
from coordinated_cluster import Coordinated, link_of
from hypothesis import given
from hypothesis import strategies as st
from live_requests import live_request
from scripted_cluster import PROMPT, Cluster, cluster, until
from scripted_engine import ScriptedEngine
from tokenizers import Tokenizer

from rescheduler.engines.proxy_options import BackgroundOptions
from rescheduler.openai.body_memory import BodyMemory, FairShares, client_of
from rescheduler.openai.openai_request import RequestRefusedError
from rescheduler.placement.live_forecasts import LiveForecasts
from rescheduler.serving import http_app

LONG = {"max_tokens": 200}
FAIR = {"name": "fcfs", "fairness": 1.0}


@pytest.fixture
async def flooded(tokenizer: Tokenizer) -> AsyncIterator[Cluster]:
    """A proxy whose pool of eight one client fills, behind an engine that runs one request."""
    async with (
        cluster(tokenizer, decodes=1, pool=8, order=FAIR) as it,
        client(it, "127.0.0.2") as flood,
    ):
        await it.resized(1)
        asking = []
        for n in range(9):
            asking.append(asyncio.create_task(ask(flood, **LONG)))
            await until(lambda n=n: it.waiting + len(it.requests()) >= n)
        await until(lambda: it.waiting == 8)
        yield it
        await asyncio.gather(*asking)


class TestAFlood:
    async def test_keeps_nobody_else_out_of_the_pool(self, flooded: Cluster) -> None:
        async with client(flooded, "127.0.0.2") as flood, client(flooded, "127.0.0.3") as other:
            assert await ask(flood, **LONG) == 429
            assert await ask(other) == 200

    async def test_is_served_in_turn_with_others_and_not_before_them(
        self, flooded: Cluster
    ) -> None:
        async with client(flooded, "127.0.0.3") as other:
            assert await ask(other) == 200
        assert flooded.waiting >= 5, "the flood has had one place or two meanwhile"

    @pytest.mark.cluster(decodes=1, background=BackgroundOptions(pool=4))
    async def test_of_background_keeps_nobody_out_either(self, it: Cluster) -> None:
        async with client(it, "127.0.0.2") as flood:
            await it.resized(1)
            flex = {**LONG, "service_tier": "flex"}
            asking = [asyncio.create_task(ask(flood, **LONG))]
            await until(lambda: len(it.requests()) == 1)
            asking += [asyncio.create_task(ask(flood, **flex)) for _ in range(4)]
            dispatcher = it.proxy.cluster.dispatcher
            await until(lambda: dispatcher.waiting_in_background == 4)
            async with client(it, "127.0.0.3") as other:
                assert await ask(flood, **flex) == 429
                asking.append(asyncio.create_task(ask(other, service_tier="flex")))
                await until(lambda: dispatcher.waiting_in_background == 5)
                assert await asyncio.gather(*asking) == [200] * 6


@pytest.mark.cluster(decodes=1, pool=3, order=FAIR)
async def test_with_one_client_nothing_changes(it: Cluster) -> None:
    async with client(it, "127.0.0.2") as only:
        await it.resized(1)
        asking = [asyncio.create_task(ask(only, **LONG))]
        await until(lambda: len(it.requests()) == 1)
        asking += [asyncio.create_task(ask(only)) for _ in range(3)]
        await until(lambda: it.waiting == 3)
        assert await ask(only) == 429, "the pool is full, and nobody else waits"
        assert await asyncio.gather(*asking) == [200] * 4


@pytest.mark.cluster(decodes=1)
async def test_a_key_that_an_engine_has_accepted_is_one_client_from_wherever_it_comes(
    it: Cluster,
) -> None:
    it.set_engines(key="right")
    accounts = it.proxy.cluster.accounts
    async with client(it, "127.0.0.2") as one, client(it, "127.0.0.3") as two:
        right, wrong = ({"Authorization": f"Bearer {key}"} for key in ("right", "wrong"))
        assert await ask(one, wrong) == 401
        assert await ask(one, right) == 200
        assert await ask(two, right) == 200
        assert accounts.of("127.0.0.2", right) is accounts.of("127.0.0.3", right)
        assert accounts.of("127.0.0.2", wrong).name == "127.0.0.2", "nobody has accepted it"
        assert accounts.of("127.0.0.2", right).served(frozenset()) > 0
        assert all(one.unfinished == 0 for one in accounts._accounts.values())


@pytest.mark.cluster(decodes=1, order=FAIR)
async def test_a_coordinator_shares_out_places_between_the_clients_of_all_proxies(
    many: Coordinated,
) -> None:
    one, two = many.proxies
    many.engines["decode-0"].says = {"max_num_seqs": 1}
    await until(lambda: many.coordinator.cluster.decodes[0].slots == 1)
    dispatcher = many.coordinator.cluster.dispatcher
    async with client(one, "127.0.0.2") as flood, client(two, "127.0.0.3") as other:
        asking = [asyncio.create_task(ask(flood, **LONG)) for _ in range(8)]
        await until(lambda: len(dispatcher.waiting) + dispatcher.waiting_for_prefill == 7)
        assert await ask(other) == 200
        assert len(dispatcher.waiting) + dispatcher.waiting_for_prefill >= 4
        assert await asyncio.gather(*asking) == [200] * 8
    accounts = many.coordinator.cluster.accounts
    await until(lambda: not any(one.unfinished for one in accounts._accounts.values()))
    assert (
        accounts.named("127.0.0.2").served(frozenset())
        > accounts.named("127.0.0.3").served(frozenset())
        > 0
    )


@pytest.mark.cluster(pool=4, decodes=1, silent_seconds=30.0)
async def test_a_flood_at_one_proxy_keeps_nobody_out_at_another(many: Coordinated) -> None:
    one, two = many.proxies
    many.engines["decode-0"].says = {"max_num_seqs": 1}
    await until(lambda: many.coordinator.cluster.decodes[0].slots == 1)
    dispatcher, link = many.coordinator.cluster.dispatcher, link_of(one)
    async with client(one, "127.0.0.2") as flood, client(two, "127.0.0.3") as other:
        with many.unhurried():
            asking = []
            for n in range(5):
                asking.append(asyncio.create_task(ask(flood, **LONG)))
                await until(lambda n=n: link.view.waiting == n)
            assert len(dispatcher.waiting) + dispatcher.waiting_for_prefill == 4
            tickets = link._tickets
            assert await ask(flood) == 429
            assert link._tickets == tickets, "the coordinator is not asked"
        assert await ask(other) == 200
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
    asked: dict[str, Any], fewest: int
) -> None:
    forecasts = LiveForecasts(None)
    request = live_request("r", **asked)
    plain = live_request("p", max_tokens=2000)
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


@pytest.mark.cluster(decodes=1)
async def test_a_key_that_no_engine_looks_at_makes_nobody_another_client(it: Cluster) -> None:
    async with client(it, "127.0.0.2") as one:
        made_up = {"Authorization": "Bearer made-up"}
        for path, counts in (("/tokenize", False), ("/v1/embeddings", True)):
            async with one.post(path, json={"model": "m", "prompt": "a"}, headers=made_up) as got:
                assert got.status == 200, await got.text()
            assert it.proxy.cluster.accounts.keys.knows(made_up) is counts


@pytest.mark.cluster(decodes=1, pool=4)
async def test_requests_that_came_while_there_was_room_wait_only_as_far_as_there_is(
    it: Cluster,
) -> None:
    """Their bodies end when the pool is full: they are looked at again then."""
    await it.resized(1)
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


@pytest.mark.cluster(decodes=1, order=FAIR)
async def test_whoever_is_refused_does_not_get_each_next_place(it: Cluster) -> None:
    it.set_engines(key="key", token_seconds=0.01)
    async with client(it, "127.0.0.2") as attacker, client(it, "127.0.0.3") as honest:
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
        client(it, "127.0.0.2") as flood,
    ):
        it.set_engines(says={"max_num_seqs": 1}, token_seconds=0.05)
        await until(lambda: it.proxy.cluster.decodes[0].slots == 1)
        statuses = await asyncio.gather(*(ask(flood, prompt="a river " * 99) for _ in range(100)))
        assert set(statuses) == {200, 429}
        assert statuses.count(429) >= 80


@pytest.mark.parametrize("order", [{"name": "fcfs"}, FAIR])
async def test_one_without_room_holds_back_no_other_client_and_gives_nobody_a_claim(
    tokenizer: Tokenizer, order: dict[str, Any]
) -> None:
    """Neither its own account nor one that is new to the tier."""
    async with (
        cluster(tokenizer, 1, order=order) as it,
        client(it, "127.0.0.2") as large,
        client(it, "127.0.0.3") as batch,
        client(it, "127.0.0.4") as online,
    ):
        it.set_engines(says={"max_num_seqs": 16, "max_model_len": 15_000}, token_seconds=0.02)
        await until(lambda: it.proxy.cluster.decodes[0].slots == 16)
        running = asyncio.create_task(ask(online, max_tokens=900))
        waits = asyncio.create_task(ask(large, prompt="x" * 300_000, service_tier="flex"))
        dispatcher = it.proxy.cluster.dispatcher
        await until(lambda: dispatcher.waiting_in_background == 1)
        answers = [ask(batch, service_tier="flex") for _ in range(3)]
        assert await asyncio.gather(*answers) == [200] * 3
        for _ in range(6):
            assert await ask(batch, service_tier="flex") == 200
        tier = dispatcher.background_accounts
        had = tier.named("127.0.0.3").served(frozenset())
        if order is FAIR:
            assert tier.virtual_times[frozenset()] > had / 2
            assert tier.named("127.0.0.2").served(frozenset()) > had / 2
        assert not running.done() and not waits.done()
        running.cancel()
        waits.cancel()


class BreaksConnections(ScriptedEngine):
    async def _generate(self, http: web.Request) -> web.StreamResponse:
        if "POISON" in (await http.json())["prompt"]:
            assert http.transport is not None
            http.transport.abort()
        return await super()._generate(http)


@pytest.mark.cluster(kind=BreaksConnections, pool=512, ahead=500)
async def test_a_request_that_breaks_its_connection_breaks_few_of_others(it: Cluster) -> None:
    async with client(it, "127.0.0.2") as poison, client(it, "127.0.0.3") as others:
        await asyncio.gather(*(ask(others, n=2) for _ in range(60)))
        assert await ask(poison, prompt="POISON", n=2) >= 500
    asked = [body for engine in it.engines.values() for body in engine.bodies]
    poisoned = sum("POISON" in body["prompt"] for body in asked)
    assert poisoned <= 2 * it.proxy.deployment.proxy.attempts + 2


async def test_metrics_say_how_much_one_account_has(flooded: Cluster) -> None:
    assert await flooded.metric("headway_proxy_accounts") == 1
    async with client(flooded, "127.0.0.3") as honest:
        asking = asyncio.create_task(ask(honest))
        await until(lambda: flooded.proxy.cluster.accounts.named("127.0.0.3").unfinished == 1)
        assert await flooded.metric("headway_proxy_accounts") == 2
        assert 0.8 < await flooded.metric("headway_proxy_largest_account_share") < 1
        asking.cancel()


@pytest.mark.cluster(decodes=3)
async def test_models_that_have_an_instance_in_common_are_one_line(it: Cluster) -> None:
    """Else who asks for an adapter waits for ever behind those who renew their model's clock."""
    group_of = it.proxy.cluster.accounts.group_of
    for each in it.proxy.cluster.all:
        each.models = frozenset({"base"})
    _, second, third = it.proxy.cluster.decodes
    second.models = frozenset({"base", "adapter"})
    assert group_of("base") == group_of("adapter") == group_of("") == group_of("unknown")
    third.models = frozenset({"other"})
    assert group_of("other") == {third}
    assert group_of("base") == group_of("adapter") == {*it.proxy.cluster.all} - {third}
    third.models = None
    assert group_of("other") == group_of("base")


@pytest.mark.cluster(decodes=1)
async def test_bodies_that_end_at_once_are_read_in_many_turns(
    it: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One client's, whose last bytes come at the same moment."""
    raw = json.dumps(BODY).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    turn, read_in = 0, []
    unpacked = http_app.unpacked

    def counted(*arguments: Any) -> bytes:
        read_in.append(turn)
        return unpacked(*arguments)

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(http_app, "unpacked", counted)
    connections = [await it.connect() for _ in range(60)]
    for _, writer in connections:
        writer.write(head + b"Content-Length: %d\r\n\r\n" % len(raw) + raw[:-1])
    account = it.proxy.cluster.accounts.named("127.0.0.1")
    await asyncio.sleep(0.3)  # all of them but that byte have come
    assert not read_in and account.unfinished == 0
    counting = asyncio.create_task(count_turns())
    for _, writer in connections:
        writer.write(raw[-1:])
    await until(lambda: len(read_in) == 60)
    counting.cancel()
    assert max(Counter(read_in).values()) <= 16
    for _, writer in connections:
        writer.close()
    await until(lambda: account.unfinished == 0)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 40)), max_size=60),
    st.integers(1, 100),
    st.integers(1, 100),
)
def test_neither_all_nor_one_have_more_than_they_may(
    asked: list[tuple[str, int]], most: int, share: int
) -> None:
    shares, given_out = FairShares(most, share), []
    for name, count in asked:
        if shares.take(name, count):
            given_out.append((name, count))
        held = sum(count for _, count in given_out)
        assert shares.held == held <= most
        for one in "abc":
            assert sum(count for name, count in given_out if name == one) <= share
        if len(given_out) > 5:
            name, count = given_out.pop(0)
            shares.take(name, -count)
    for name, count in given_out:
        assert shares.take(name, -count)
    assert shares.held == 0 and not shares._of


def test_a_body_is_counted_as_it_grows_and_until_it_ends() -> None:
    memory = BodyMemory(largest_mb=1, most_mb=4, share=0.5)
    with memory.kept("a", None) as one, memory.kept("a", 1 << 20) as two:
        assert memory.held == 0
        one.grow(1 << 20)
        with pytest.raises(RequestRefusedError) as larger:
            one.grow(1)
        assert larger.value.status == 413
        two.grow(1 << 20)
        with memory.kept("a", None) as three, pytest.raises(RequestRefusedError) as full:
            three.grow(1)
        assert full.value.status == 503
        with memory.kept("b", None) as other:
            other.grow(1 << 20)
        two.be(10)  # smaller once it has been read
        assert memory.held == (1 << 20) + 10
    assert memory.held == 0
    with pytest.raises(RequestRefusedError), memory.kept("a", (1 << 20) + 1):
        pass


@pytest.mark.parametrize(
    ("address", "client"),
    [
        (("10.0.0.1", 5), "10.0.0.1"),
        (("::ffff:10.0.0.1", 5, 0, 0), "10.0.0.1"),
        (("2001:db8:1:2:3:4:5:6", 5, 0, 0), "2001:db8:1:2::/64"),
        (("2001:db8:1:2::9", 7, 0, 0), "2001:db8:1:2::/64"),
        (("fe80::1%eth0", 7, 0, 3), "fe80::/64"),
        ("", ""),
        (None, ""),
    ],
)
def test_a_network_of_many_addresses_is_one_client(address: object, client: str) -> None:
    assert client_of(address) == client


def label_values(text: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name, value in re.findall(r'(\w+)="([^"]*)"', text):
        found.setdefault(name, set()).add(value)
    return found


async def test_no_client_adds_a_series(it: Cluster) -> None:
    async def ask(number: int) -> None:
        body = {"model": f"m{number}", "prompt": PROMPT, "user": f"u{number}", "max_tokens": 2}
        headers = {"X-Request-Id": f"name-{number}", "Authorization": f"Bearer {number}"}
        paths = ("completions", "chat/completions", "embeddings", f"x{number}", "%63ompletions")
        for path in paths:
            url = f"{it.url}/v1/{path}?number={number}"
            async with it.session.post(url, json=body, headers=headers) as response:
                await response.read()

    await ask(0)
    before = label_values(await it.text("/metrics"))
    for number in range(1, 10):
        await ask(number)
    assert label_values(await it.text("/metrics")) == before
    assert before["instance_name"] == set(it.engines)
    paths = {"/v1/completions", "/v1/chat/completions", "/v1/embeddings"}
    assert before["path"] <= paths
