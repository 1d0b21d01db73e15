"""Proxies for which a coordinator decides, and what clients see when either is lost."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from coordinated_cluster import Coordinated, Make, link_of
from scripted_cluster import PROMPT, Cluster, until
from tokenizers import Tokenizer

from predictor.live.zmq_sockets import create_keys
from rescheduler.engines.deployment import DeploymentError
from rescheduler.proxy.proxy import Proxy

SHORT = {"model": "m", "prompt": PROMPT, "max_tokens": 5}


def streams(cluster: Cluster, n: int, tokens: int = 400) -> list[asyncio.Task[Any]]:
    return [asyncio.create_task(cluster.answered(tokens)) for _ in range(n)]


def generating(it: Coordinated) -> int:
    """How many requests the coordinator knows to generate tokens."""
    return sum(
        mirror.generating
        for instance in it.coordinator.cluster.all
        for mirror in it.coordinator.cluster.placements.on(instance)
    )


async def test_the_coordinator_places_what_all_proxies_ask_for(coordinated: Make) -> None:
    async with coordinated() as it:
        first, second = it.proxies
        with it.unhurried():
            tasks = [*streams(first, 3), *streams(second, 3)]
            await until(lambda: generating(it) == 6)
            assert len(it.coordinator.sessions) == 2
            assert {it.load("decode-0"), it.load("decode-1")} in ({3}, {2, 4})
        await asyncio.gather(*tasks)
        await until(lambda: it.load("decode-0") + it.load("decode-1") == 0)


async def test_draining_moves_the_requests_of_every_proxy(coordinated: Make) -> None:
    async with coordinated(prefix_caching=False) as it:
        first, second = it.proxies
        with it.unhurried():
            tasks = [*streams(first, 2), *streams(second, 2)]
            await until(lambda: generating(it) == 4)
            status, _ = await it.ask("POST", "drain/decode-0")
            assert status == 200
            await until(lambda: it.load("decode-0") == 0)
            assert it.load("decode-1") == 4, "none has ended meanwhile"
            assert all(one.proxy.cluster.instances["decode-0"].draining for one in it.proxies)
            await until(lambda: b'outcome="moved"' in it.coordinator.metrics.text())
        await asyncio.gather(*tasks)
        status, listed = await it.ask("POST", "undrain/decode-0")
        assert (status, listed["draining"]) == (200, False)
        await until(lambda: not second.proxy.cluster.instances["decode-0"].draining)


async def test_the_planner_moves_requests_of_different_proxies(coordinated: Make) -> None:
    migration = {"name": "star", "prediction": False, "interval_seconds": 0.1}
    async with coordinated(prefix_caching=False, migration=migration) as it:
        with it.unhurried():
            await it.ask("POST", "drain/decode-1")
            await until(lambda: it.proxies[0].proxy.cluster.instances["decode-1"].draining)
            tasks = [*streams(it.proxies[0], 2), *streams(it.proxies[1], 2)]
            await until(lambda: it.load("decode-0") == 4 and generating(it) == 4)
            await it.ask("POST", "undrain/decode-1")
            await until(lambda: it.load("decode-1") > 0)
        await asyncio.gather(*tasks)


async def test_without_the_coordinator_a_proxy_places_by_its_own_requests(
    coordinated: Make,
) -> None:
    async with coordinated() as it:
        first, _ = it.proxies
        with it.unhurried():
            await it.stop_coordinator()
            tasks = streams(first, 2)
            decodes = [it.engines["decode-0"], it.engines["decode-1"]]
            await until(lambda: all(len(engine.running) == 1 for engine in decodes))
        await asyncio.gather(*tasks)
        status, answer, _ = await first.post(SHORT)
        assert status == 200, answer
        await it.start_coordinator()


async def test_a_new_coordinator_learns_what_runs(coordinated: Make) -> None:
    async with coordinated(prefix_caching=False) as it:
        first, second = it.proxies
        decodes = [it.engines["decode-0"], it.engines["decode-1"]]
        with it.unhurried():
            tasks = [*streams(first, 2), *streams(second, 2)]
            await until(lambda: generating(it) == 4)
            await it.stop_coordinator()
            tasks += streams(first, 1)
            await until(lambda: sum(len(engine.running) for engine in decodes) == 5)
            await it.start_coordinator()
            await it.coordinated()
            await until(lambda: generating(it) == 5)
            await it.ask("POST", "drain/decode-1")
            await until(lambda: it.load("decode-1") == 0)
            assert it.load("decode-0") == 5
        await asyncio.gather(*tasks)


@pytest.mark.slow
async def test_an_instance_drains_on_with_a_new_coordinator(coordinated: Make) -> None:
    async with coordinated() as it:
        await it.ask("POST", "drain/decode-1")
        await until(
            lambda: all(one.proxy.cluster.instances["decode-1"].draining for one in it.proxies)
        )
        await it.stop_coordinator()
        await it.start_coordinator()
        await it.coordinated()
        await until(lambda: len(it.coordinator.sessions) == 2)
        assert it.coordinator.cluster.instances["decode-1"].draining
        assert not it.coordinator.cluster.instances["decode-0"].draining
        status, listed = await it.ask("POST", "undrain/decode-1")
        assert (status, listed["draining"]) == (200, False)
        await until(
            lambda: not any(one.proxy.cluster.instances["decode-1"].draining for one in it.proxies)
        )


async def test_what_a_lost_proxy_had_is_forgotten(coordinated: Make) -> None:
    async with coordinated() as it:
        first, second = it.proxies
        with it.unhurried():
            tasks = streams(second, 2)
            await until(lambda: generating(it) == 2)
            it.proxies.remove(second)
            await second.proxy.close()  # it says nothing more, as if its machine were lost
            await until(lambda: len(it.coordinator.sessions) == 1)
            assert it.load("decode-0") + it.load("decode-1") == 0
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await second.listeners.close()
        await first.answered(5)
        third = await it.start_proxy()
        await it.coordinated()
        await third.answered(5)


async def test_a_proxy_with_other_instances_is_refused_and_serves_by_itself(
    coordinated: Make,
) -> None:
    async with coordinated(proxies=1) as it:
        fewer = [one for one in it.deployment.instances if one.name != "decode-1"]
        other = msgspec.structs.replace(it.deployment, instances=fewer)
        whole, it.deployment = it.deployment, other
        stranger = await it.start_proxy()
        await until(lambda: link_of(stranger).refused is not None)
        assert "lists other instances" in link_of(stranger).refused
        assert len(it.coordinator.sessions) == 1
        await stranger.answered(5)
        it.deployment = whole


async def test_the_conversation_is_encrypted_with_keys(coordinated: Make, tmp_path: Path) -> None:
    create_keys(tmp_path / "keys")
    async with coordinated(keys=tmp_path / "keys") as it:
        await asyncio.gather(*(one.answered(5) for one in it.proxies))
        (tmp_path / "others").mkdir()
        create_keys(tmp_path / "others" / "keys")
        whole = it.deployment
        it.deployment = msgspec.structs.replace(whole, keys=str(tmp_path / "others" / "keys"))
        stranger = await it.start_proxy()
        await stranger.answered(5)
        assert not link_of(stranger).alive
        assert len(it.coordinator.sessions) == 2
        it.deployment = whole


async def test_a_client_that_leaves_while_it_waits_leaves_nothing(coordinated: Make) -> None:
    async with coordinated(prefill_concurrency=1) as it:
        it.engines["prefill-0"].answers_late = True
        tasks = [*streams(it.proxies[0], 2, 5), *streams(it.proxies[1], 2, 5)]
        await until(lambda: it.coordinator.cluster.dispatcher.waiting_for_prefill == 3)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: not it.coordinator.cluster.dispatcher.waiting_for_prefill)
        await until(lambda: it.load("prefill-0") == 0)
        it.engines["prefill-0"].answers_late = False
        await it.proxies[0].answered(5)


async def test_a_pool_that_is_full_refuses_whatever_proxy_is_asked(coordinated: Make) -> None:
    # A busy machine may not have proxies decide alone: each has a pool of its own then.
    patient = {"lost_seconds": 60.0, "silent_seconds": 60.0}
    async with coordinated(prefill_concurrency=1, pool=2, **patient) as it:
        it.engines["prefill-0"].answers_late = True
        tasks = streams(it.proxies[0], 1, 5)
        await until(lambda: len(it.engines["prefill-0"].bodies) == 1)
        # All are one account, of one address: another one would be let in.
        tasks += [*streams(it.proxies[0], 1, 5), *streams(it.proxies[1], 1, 5)]
        await until(lambda: it.coordinator.cluster.dispatcher.waiting_for_prefill == 2)
        status, answer, headers = await it.proxies[1].post(SHORT)
        assert status == 429, answer
        assert int(headers["Retry-After"]) > 0
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        it.engines["prefill-0"].answers_late = False


@pytest.mark.parametrize("most", [10**30, -(10**30)])
async def test_a_number_that_fits_no_message_leaves_the_coordinator_in_charge(
    coordinated: Make, most: int
) -> None:
    async with coordinated() as it:
        first, second = it.proxies
        with it.unhurried():
            odd = asyncio.create_task(first.stream({"prompt": PROMPT, "max_tokens": most}))
            tasks = [*streams(first, 2), *streams(second, 2)]
            await until(lambda: generating(it) >= 4)
            odd.cancel()
            await asyncio.gather(odd, return_exceptions=True)
        await asyncio.gather(*tasks)
        await it.coordinated()
        assert len(it.coordinator.sessions) == 2


async def test_a_deployment_without_a_coordinator_has_none(
    tokenizer: Tokenizer, coordinated: Make
) -> None:
    from rescheduler.coordinator.coordinator import Coordinator

    async with coordinated(proxies=1) as it:
        alone = msgspec.structs.replace(it.deployment, coordinator=None)
        with pytest.raises(DeploymentError, match="the deployment has none"):
            Coordinator(alone)
        proxy = Proxy(alone, tokenizer)
        assert proxy.drainer is not None
        await proxy.close()


async def test_a_prompt_of_another_proxy_may_take_its_time(coordinated: Make) -> None:
    """A proxy that does not know of it does not take the engine for one that hangs."""
    async with coordinated(decodes=1, token_seconds=0.5, silent_seconds=10.0) as it:
        engine, (first, second) = it.engines["decode-0"], it.proxies
        engine.queue_seconds, engine.says = 3.0, {"steps": 7, "waiting": 1, "running": 0}
        asked = {"prompt": list(range(1000, 2000)), "max_tokens": 5, "n": 2}
        asking = asyncio.create_task(second.stream(asked))
        await until(lambda: bool(engine.running))
        while not asking.done():
            assert first.proxy.cluster.instances["decode-0"].breaker.closed
            await asyncio.sleep(0.01)
        engine.says = {}
        await asking
