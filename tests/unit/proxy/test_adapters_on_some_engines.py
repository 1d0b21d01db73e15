"""A LoRA adapter that is loaded into some of the engines: its requests go there, and stay there."""

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web
from coordinated_cluster import Make
from scripted_cluster import PROMPT, Cluster, cluster, until
from scripted_engine import ScriptedEngine
from tokenizers import Tokenizer

BODY = {"prompt": PROMPT, "max_tokens": 5}


def asked_for(it: Cluster, name: str, model: str) -> int:
    return sum(body["model"] == model for body in it.engines[name].bodies)


async def known(it: Cluster, name: str, model: str) -> None:
    """The proxy has heard that an engine has a model."""
    state = it.proxy.cluster.instances[name]
    await until(lambda: state.models is not None and model in state.models)


async def test_requests_go_to_the_engines_that_list_their_model(tokenizer: Tokenizer) -> None:
    async with cluster(tokenizer, decodes=3) as it:
        it.engines["decode-1"].models.append("adapter")
        await known(it, "decode-1", "adapter")
        asked: list[dict[str, Any]] = [{}, {"n": 2, "stream": False}, {"tools": [{}]}]
        for body in [*asked, *asked]:
            status, answer, _ = await it.post({**BODY, "model": "adapter", **body})
            assert status == 200, answer
        await asyncio.gather(*(it.answered(5, model="adapter") for _ in range(6)))
        await asyncio.gather(*(it.answered(5) for _ in range(6)))
        assert asked_for(it, "decode-1", "adapter") == 12
        for name in ("prefill-0", "decode-0", "decode-2"):
            assert asked_for(it, name, "adapter") == 0, name
        it.engines["prefill-0"].models.append("adapter")
        await known(it, "prefill-0", "adapter")
        await it.answered(5, model="adapter")
        assert asked_for(it, "prefill-0", "adapter") == 1


async def test_an_adapter_that_is_loaded_later_is_noticed(tokenizer: Tokenizer) -> None:
    async with cluster(tokenizer) as it:
        for engine in it.engines.values():
            engine.models.append("adapter")
            await known(it, engine.name, "adapter")
        await asyncio.gather(*(it.answered(5, model="adapter") for _ in range(6)))
        assert asked_for(it, "decode-0", "adapter") == asked_for(it, "decode-1", "adapter") == 3


async def test_all_models_are_listed(tokenizer: Tokenizer) -> None:
    async with cluster(tokenizer) as it:
        before = json.loads(await it.text("/v1/models"))
        assert [model["id"] for model in before["data"]] == ["m"]
        it.engines["decode-0"].models.append("a")
        it.engines["decode-1"].models += ["b", "a"]
        await known(it, "decode-0", "a")
        await known(it, "decode-1", "b")
        listed = json.loads(await it.text("/v1/models"))
        assert listed["object"] == "list"
        assert [model["id"] for model in listed["data"]] == ["m", "a", "b"]


async def test_what_one_engine_has_unloaded_another_one_answers(tokenizer: Tokenizer) -> None:
    async with cluster(tokenizer, probe_seconds=3600.0) as it:
        for engine in it.engines.values():
            engine.models.append("adapter")
        for state in it.proxy.cluster.all:
            await it.proxy.cluster.prober.probe(state)
        it.engines["decode-1"].models.remove("adapter")
        it.engines["prefill-0"].models.remove("adapter")
        await asyncio.gather(*(it.answered(5, model="adapter") for _ in range(8)))
        for _ in range(4):
            status, _, _ = await it.post({**BODY, "model": "adapter", "n": 2})
            assert status == 200
        assert 0 < asked_for(it, "decode-1", "adapter") < 5
        assert it.proxy.cluster.instances["decode-1"].breaker.closed


async def test_a_model_that_nobody_has_is_refused_as_by_an_engine(tokenizer: Tokenizer) -> None:
    async with cluster(tokenizer, decodes=3) as it:
        for more in ({}, {"n": 2}, {"stream": True}):
            for model in ("nobody's", "x" * 10_000, "a\nb"):
                status, answer, _ = await it.post({**BODY, "model": model, **more})
                assert status == 404
                assert answer["error"]["message"].startswith("no model")
        assert sum(len(engine.bodies) for engine in it.decodes) == 9, "one engine is asked"


async def test_requests_move_only_where_their_adapter_is(tokenizer: Tokenizer) -> None:
    async with cluster(tokenizer, prefix_caching=False) as it:
        it.engines["decode-1"].models.append("adapter")
        await known(it, "decode-1", "adapter")
        for engine in it.decodes:
            engine.token_seconds = 0.01
        stream = asyncio.create_task(it.answered(100, model="adapter"))
        await until(lambda: any(request.can_move for request in it.requests()))
        assert await it.move() == "unlike"
        await it.admin("POST", "drain/decode-1")
        await until(lambda: it.live().generated_tokens > 60)
        assert len(it.engines["decode-1"].running) == 1, "nobody else has it"
        await it.answered(5, model="adapter")  # better there than nowhere
        await stream
        assert not it.engines["decode-0"].bodies


async def test_a_request_waits_for_an_adapter_that_is_out_of_service(tokenizer: Tokenizer) -> None:
    async with cluster(tokenizer) as it:
        engine = it.engines["decode-1"]
        engine.models.append("adapter")
        await known(it, "decode-1", "adapter")
        await engine.stop_http()
        state = it.proxy.cluster.instances["decode-1"]
        await until(lambda: not state.breaker.closed)
        waiting = asyncio.create_task(it.answered(5, model="adapter"))
        await asyncio.gather(*(it.answered(5) for _ in range(3)))
        assert not waiting.done()
        await engine.start_http()
        await waiting
        assert asked_for(it, "decode-0", "adapter") == 0


async def test_a_coordinator_places_by_model_too(coordinated: Make) -> None:
    async with coordinated() as it:
        it.engines["decode-1"].models.append("adapter")
        states = [one.proxy.cluster.instances["decode-1"] for one in it.proxies]
        states.append(it.coordinator.cluster.instances["decode-1"])
        await until(lambda: all("adapter" in (state.models or ()) for state in states))
        tasks = [one.answered(5, model="adapter") for one in it.proxies for _ in range(4)]
        await asyncio.gather(*tasks)
        assert asked_for(it.proxies[0], "decode-1", "adapter") == 8
        assert asked_for(it.proxies[0], "decode-0", "adapter") == 0


@pytest.mark.parametrize(
    "listed",
    [
        b"no JSON",
        b"[]",
        b'{"data": []}',
        b'{"data": [{"id": 5}]}',
        b'{"data": [' + b'{"id": "a"},' * 400_000 + b'{"id": "b"}]}',
        b"[" * 100_000,
        b"\xff",
    ],
    ids=lambda listed: repr(listed[:20]),
)
async def test_a_list_that_is_none_keeps_no_request_from_an_engine(
    tokenizer: Tokenizer, listed: bytes
) -> None:
    class Odd(ScriptedEngine):
        async def _models(self, http: web.Request) -> web.Response:
            return web.Response(body=listed, content_type="application/json")

    async with cluster(tokenizer, decodes=1, kind=Odd) as it:
        await it.answered(5)
        async with it.session.get(it.url + "/v1/models") as response:
            assert await response.read() == listed
        for state in it.proxy.cluster.all:
            assert state.models is None and state.breaker.closed
