"""Engines that differ: in what they can read of each other, in their adapters, in their parsers."""

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web
from coordinated_cluster import Coordinated
from scripted_cluster import PROMPT, Cluster, cluster, text_of, until
from scripted_engine import ScriptedEngine
from tokenizers import Tokenizer

from rescheduler.cluster.cluster_view import ClusterView
from rescheduler.migration import Plan
from rescheduler.migration.star import Star
from rescheduler.openai.openai_request import CHAT

UNLIKE = [
    {"version": "0.31.0"},
    {"model": "/another/path"},
    {"dtype": "bfloat16"},
    {"kv_dtype": "fp8"},
    {"kv_groups": False},
    {"block_size": 64},
]


async def seen(it: Cluster, engine: ScriptedEngine) -> None:
    """Wait until the proxy knows what an engine says of itself."""
    instance = it.proxy.cluster.instances[engine.name]
    await until(
        lambda: (
            instance.engine is not None
            and all(getattr(instance.engine, name) == said for name, said in engine.says.items())
        )
    )


@pytest.mark.parametrize("says", [*UNLIKE, {"tensor_parallel": 2}])
async def test_no_request_moves_to_an_unlike_engine(it: Cluster, says: dict[str, Any]) -> None:
    def become_unlike(source: ScriptedEngine, target: ScriptedEngine) -> None:
        target.says = says  # as after a restart: the proxy hears of it as it moves a request

    _, outcome = await it.moved(80, become_unlike)
    assert outcome == "unlike"
    assert not any(engine.copied for engine in it.decodes)
    assert sum(engine.pulled for engine in it.decodes) == 1  # of the prefill


@pytest.mark.parametrize("says", UNLIKE)
@pytest.mark.cluster(decodes=1)
async def test_a_prompt_prefilled_by_an_unlike_engine_is_computed_again(
    it: Cluster, says: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = it.engines["prefill-0"], it.engines["decode-0"]
    prefill.says = says
    await seen(it, prefill)
    for _ in range(2):
        await it.answered(20)
    _, answer, _ = await it.post({"model": "m", "prompt": PROMPT, "max_tokens": 20, "n": 1})
    assert answer["usage"]["completion_tokens"] == 20
    assert decode.pulled == 0
    assert len(prefill.bodies) == 3
    await until(lambda: not prefill.kept)
    counted = {"prefill": "prefill-0", "decode": "decode-0"}
    assert await it.metric("headway_proxy_unlike_prefills_total", **counted) == 3
    (logged,) = [r.message for r in caplog.records if "cannot read" in r.message]
    (said,) = says.values()
    assert "prefill-0: " in logged and "decode-0: " in logged
    assert repr(said) in logged
    prefill.says = {}
    instance = it.proxy.cluster.instances
    await until(lambda: not instance["prefill-0"].is_unlike(instance["decode-0"]))
    await it.stream({"prompt": PROMPT, "max_tokens": 20})
    assert decode.pulled == 1


@pytest.mark.cluster(decodes=1)
async def test_a_prefill_of_fewer_ranks_is_read(it: Cluster) -> None:
    """NIXL reads from prefill instances with another tensor-parallel size."""
    it.engines["prefill-0"].says = {"tensor_parallel": 4}
    await seen(it, it.engines["prefill-0"])
    await it.stream({"prompt": PROMPT, "max_tokens": 20})
    assert it.engines["decode-0"].pulled == 1


@pytest.mark.cluster(decodes=4, prefix_caching=False)
async def test_a_drained_engine_s_requests_go_to_those_that_are_like_it(it: Cluster) -> None:
    """As in an upgrade: half of the engines have the new version."""
    for engine in it.decodes[2:]:
        engine.says = {"version": "next"}
        await seen(it, engine)
    hops: list[tuple[str, str]] = []

    async def at(tokens: int) -> None:
        if tokens == 5:
            request = it.live()
            source = request.instance
            assert source is not None
            it.proxy.drainer.drain(source)
            await until(lambda: request.instance is not source)
            hops.append((source.name, request.instance.name))
            it.proxy.drainer.undrain(source)

    for _ in range(4):
        await it.answered(300, at)
    for source, target in hops:
        assert source != target
        assert ("2" in source or "3" in source) == ("2" in target or "3" in target)
    assert len(hops) == 4


@pytest.mark.cluster(
    decodes=3, migration={"name": "star", "prediction": False, "interval_seconds": 0.02}
)
async def test_the_planner_looks_at_like_engines_only(
    it: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[int] = []
    plan = Star.plan

    def noted(policy: Star, view: ClusterView) -> Plan:
        planned.append(len(view.kv_capacity))
        return plan(policy, view)

    monkeypatch.setattr(Star, "plan", noted)
    it.decodes[2].says = {"block_size": 64}
    await seen(it, it.decodes[2])
    planned.clear()
    await it.answered(300)
    assert set(planned) == {2}


BODY = {"prompt": PROMPT, "max_tokens": 5}


def asked_for(it: Cluster, name: str) -> int:
    """How often an engine was asked for the adapter."""
    return sum(body["model"] == "adapter" for body in it.engines[name].bodies)


async def load(it: Cluster, *names: str, adapter: str = "adapter") -> None:
    """Load an adapter into engines, and wait until the proxy has heard of it."""
    for name in names:
        it.engines[name].models.append(adapter)
        state = it.proxy.cluster.instances[name]
        await until(lambda state=state: adapter in (state.models or ()))


@pytest.mark.cluster(decodes=3)
async def test_requests_go_to_the_engines_that_list_their_model(it: Cluster) -> None:
    await load(it, "decode-1")
    asked: list[dict[str, Any]] = [{}, {"n": 2, "stream": False}, {"tools": [{}]}]
    for body in [*asked, *asked]:
        status, answer, _ = await it.post({**BODY, "model": "adapter", **body})
        assert status == 200, answer
    await asyncio.gather(*(it.answered(5, model="adapter") for _ in range(6)))
    await asyncio.gather(*(it.answered(5) for _ in range(6)))
    assert asked_for(it, "decode-1") == 12
    for name in ("prefill-0", "decode-0", "decode-2"):
        assert asked_for(it, name) == 0, name
    await load(it, "prefill-0")
    await it.answered(5, model="adapter")
    assert asked_for(it, "prefill-0") == 1


async def test_an_adapter_that_is_loaded_later_is_noticed(it: Cluster) -> None:
    await load(it, *it.engines)
    await asyncio.gather(*(it.answered(5, model="adapter") for _ in range(6)))
    assert asked_for(it, "decode-0") == asked_for(it, "decode-1") == 3


async def test_all_models_are_listed(it: Cluster) -> None:
    before = json.loads(await it.text("/v1/models"))
    assert [model["id"] for model in before["data"]] == ["m"]
    await load(it, "decode-0", adapter="a")
    await load(it, "decode-1", adapter="b")
    await load(it, "decode-1", adapter="a")
    listed = json.loads(await it.text("/v1/models"))
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["m", "a", "b"]


@pytest.mark.cluster(probe_seconds=3600.0)
async def test_what_one_engine_has_unloaded_another_one_answers(it: Cluster) -> None:
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
    assert 0 < asked_for(it, "decode-1") < 5
    assert it.proxy.cluster.instances["decode-1"].breaker.closed


@pytest.mark.cluster(decodes=3)
async def test_a_model_that_nobody_has_is_refused_as_by_an_engine(it: Cluster) -> None:
    for more in ({}, {"n": 2}, {"stream": True}):
        for model in ("nobody's", "x" * 10_000, "a\nb"):
            status, answer, _ = await it.post({**BODY, "model": model, **more})
            assert status == 404
            assert answer["error"]["message"].startswith("no model")
    assert len(it.asked) == 9, "one engine is asked"


@pytest.mark.cluster(prefix_caching=False)
async def test_requests_move_only_where_their_adapter_is(it: Cluster) -> None:
    await load(it, "decode-1")
    it.set_decodes(token_seconds=0.01)
    stream = asyncio.create_task(it.answered(100, model="adapter"))
    await until(lambda: any(request.can_move for request in it.requests()))
    assert await it.move() == "unlike"
    await it.admin("POST", "drain/decode-1")
    await until(lambda: it.live().generated_tokens > 60)
    assert len(it.engines["decode-1"].running) == 1, "nobody else has it"
    await it.answered(5, model="adapter")  # better there than nowhere
    await stream
    assert not it.engines["decode-0"].bodies


async def test_a_request_waits_for_an_adapter_that_is_out_of_service(it: Cluster) -> None:
    engine = it.engines["decode-1"]
    await load(it, "decode-1")
    await engine.stop_http()
    state = it.proxy.cluster.instances["decode-1"]
    await until(lambda: not state.breaker.closed)
    waiting = asyncio.create_task(it.answered(5, model="adapter"))
    await asyncio.gather(*(it.answered(5) for _ in range(3)))
    assert not waiting.done()
    await engine.start_http()
    await waiting
    assert asked_for(it, "decode-0") == 0


async def test_a_coordinator_places_by_model_too(many: Coordinated) -> None:
    many.engines["decode-1"].models.append("adapter")
    states = [one.proxy.cluster.instances["decode-1"] for one in many.proxies]
    states.append(many.coordinator.cluster.instances["decode-1"])
    await until(lambda: all("adapter" in (state.models or ()) for state in states))
    tasks = [one.answered(5, model="adapter") for one in many.proxies for _ in range(4)]
    await asyncio.gather(*tasks)
    assert asked_for(many.proxies[0], "decode-1") == 8
    assert asked_for(many.proxies[0], "decode-0") == 0


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


TOOLS: dict[str, Any] = {
    "messages": [{"role": "user", "content": "How is the weather?"}],
    "tools": [{"type": "function", "function": {"name": "weather"}}],
    "max_tokens": 300,
    "return_token_ids": False,
}


async def parsing(it: Cluster, *parses: bool) -> None:
    """Say which of the decode engines parse again, and wait until the proxy knows."""
    for engine, does in zip(it.decodes, parses, strict=True):
        engine.says = {"parses_again": does}
    decodes = it.proxy.cluster.decodes
    await until(lambda: [instance.parses_again for instance in decodes] == [*parses])


@pytest.mark.parametrize("parses", [(True, True), (True, False), (False, False)])
async def test_a_chat_with_tools_moves_only_where_every_engine_parses_again(
    it: Cluster, parses: tuple[bool, bool]
) -> None:
    await parsing(it, *parses)
    can_move = []

    async def at(tokens: int) -> None:
        if tokens == 5:
            can_move.append(it.live().can_move)

    asked = {**TOOLS, "return_token_ids": True} if all(parses) else TOOLS
    chunks = await it.stream(asked, at, CHAT)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    (body,) = it.asked
    assert body.get("return_token_ids", False) is all(parses)
    assert can_move == [all(parses)]


@pytest.mark.parametrize("claims", [True, False])
async def test_a_stream_goes_on_nowhere_where_it_is_not_parsed_again(
    it: Cluster, claims: bool
) -> None:
    """Neither on an engine that says so, nor on one that only claims to."""
    await parsing(it, True, True)

    async def at(tokens: int) -> None:
        if tokens == 5:
            source, target = it.source_and_target()
            target.says["parses_again"] = claims
            target_state = it.proxy.cluster.instances[target.name]
            await until(lambda: target_state.parses_again is claims)
            source.breaks_at = len(next(iter(source.running.values())).output) + 1

    chunks = await it.stream({**TOOLS, "return_token_ids": True}, at, CHAT)
    assert chunks[-1]["error"]["code"] == 502
    alone = await it.stream({**TOOLS, "tools": None}, path=CHAT)
    assert 0 < len(text_of(chunks)) < len(text_of(alone))
    assert text_of(alone).startswith(text_of(chunks))
