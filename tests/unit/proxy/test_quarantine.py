"""Only requests that kill are refused: whoever shared an engine with one of them is served."""

import asyncio
from typing import Any

from scripted_cluster import PROMPT, Cluster, cluster, until
from tokenizers import Tokenizer


async def asked(it: Cluster, **body: Any) -> tuple[int, bytes]:
    """Return the status of a completion of 40 tokens, and all of its bytes."""
    body = {"model": "m", "prompt": PROMPT, "stream": True, "max_tokens": 40, **body}
    async with it.session.post(it.url + "/v1/completions", json=body) as response:
        return response.status, await response.read()


async def served_beside_a_killer(it: Cluster, others: int, **body: Any) -> None:
    """Refuse a request that kills, and serve all others that come with it."""
    for engine in it.decodes:
        engine.kills = "KILLS"
        engine.kills_at = 2
        engine.token_seconds = 0.01
    killer = asked(it, prompt=f"{PROMPT} KILLS", **body)
    innocent = [asked(it, prompt=f"{PROMPT} {i}", **body) for i in range(others)]
    refused, *answers = await asyncio.gather(killer, *innocent)
    assert b'"code":422' in refused[1]
    for status, answer in answers:
        assert status == 200 and b'"error"' not in answer


async def test_an_adapter_on_a_single_engine_is_tried_apart_there(tokenizer: Tokenizer) -> None:
    async with cluster(tokenizer, decodes=3, control_seconds=1.0) as it:
        having = [it.engines["decode-1"], it.engines["prefill-0"]]
        for engine in having:
            engine.models = ["m", "lora"]
        instances = it.proxy.cluster.instances
        await until(
            lambda: all(
                one.models is not None and one.serves("lora") is (it.engines[name] in having)
                for name, one in instances.items()
            )
        )
        await served_beside_a_killer(it, 1, model="lora")


async def test_requests_are_tried_apart_on_an_engine_that_drains(tokenizer: Tokenizer) -> None:
    """It takes them while no other one is in service."""
    async with cluster(tokenizer, decodes=2, control_seconds=1.0, breaker_seconds=2.0) as it:
        it.proxy.cluster.instances["decode-0"].drained = True
        await served_beside_a_killer(it, 8)


async def test_suspects_are_not_refused_for_being_many(tokenizer: Tokenizer) -> None:
    """Each has its turn, however long that takes."""
    async with cluster(tokenizer, decodes=2, control_seconds=1.0, pool_seconds=1.5) as it:
        for engine in it.decodes:
            engine.token_seconds = 0.01
        lost = it.engines["decode-1"]
        asking = [asyncio.create_task(asked(it, prompt=f"{PROMPT} {i}")) for i in range(24)]
        await until(lambda: len(lost.running) >= 8)
        await lost.stop()
        for status, answer in await asyncio.gather(*asking):
            assert status == 200 and b'"error"' not in answer
        await lost.start()


async def test_a_suspect_that_is_turned_away_is_tried_elsewhere(tokenizer: Tokenizer) -> None:
    async with cluster(tokenizer, decodes=3, control_seconds=1.0) as it:
        for engine in it.decodes:
            engine.kills, engine.token_seconds = "KILLS", 0.01
        it.engines["decode-1"].kills = it.engines["decode-2"].kills = ""
        it.engines["decode-1"].fails = 429
        for name in ("decode-1", "decode-2"):
            it.proxy.cluster.instances[name].drained = True
        asking = asyncio.create_task(asked(it, prompt=f"{PROMPT} KILLS"))
        await until(lambda: len(it.engines["decode-0"].bodies) > 0)
        for name in ("decode-1", "decode-2"):
            it.proxy.cluster.instances[name].drained = False
        assert (await asking)[0] == 200


async def test_a_request_that_hangs_engines_is_refused_after_two(tokenizer: Tokenizer) -> None:
    async with cluster(tokenizer, decodes=4, control_seconds=1.0, token_seconds=0.5) as it:
        hung: list[str] = []

        async def hang() -> None:
            while True:
                for engine in it.decodes:
                    contexts = [running.context for running in engine.running.values()]
                    if any("KILLS" in tokenizer.decode(context) for context in contexts):
                        engine.hangs = True
                        hung.append(engine.name)
                await asyncio.sleep(0.001)

        hanging = asyncio.create_task(hang())
        status, answer = await asked(it, prompt=f"{PROMPT} KILLS")
        hanging.cancel()
        for engine in it.decodes:
            engine.hangs = False
        assert status in (200, 422) and b'"code":422' in answer
        assert len(set(hung)) == 2


async def test_an_engine_that_is_stopped_behind_its_http_server_fails(tokenizer: Tokenizer) -> None:
    seconds = {"control_seconds": 0.3, "silent_seconds": 1.0, "token_seconds": 0.5}
    async with cluster(tokenizer, decodes=2, **seconds) as it:
        stopped, instance = it.decodes[0], it.proxy.cluster.instances["decode-0"]
        await until(lambda: instance.evidence.steps >= 0)
        stopped.deaf = True
        await until(lambda: not instance.breaker.closed)
        assert "only its HTTP server answers" in instance.evidence.why
        stopped.deaf = False
        await until(lambda: instance.breaker.closed)
