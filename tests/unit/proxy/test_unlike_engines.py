"""Engines that cannot read each other's KV cache: no move, no hand-over, and no changed token."""

from typing import Any

import pytest
from scripted_cluster import PROMPT, Cluster, cluster, until
from scripted_engine import ScriptedEngine
from tokenizers import Tokenizer

from rescheduler.cluster.cluster_view import ClusterView
from rescheduler.demo.demo_load import metric_in
from rescheduler.migration import Plan
from rescheduler.migration.star import Star

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
async def test_no_request_moves_to_an_unlike_engine(
    tokenizer: Tokenizer, says: dict[str, Any]
) -> None:
    async with cluster(tokenizer) as it:

        def become_unlike(source: ScriptedEngine, target: ScriptedEngine) -> None:
            target.says = says  # as after a restart: the proxy hears of it as it moves a request

        _, outcome = await it.moved(80, become_unlike)
        assert outcome == "unlike"
        assert not any(engine.copied for engine in it.decodes)
        assert sum(engine.pulled for engine in it.decodes) == 1  # of the prefill


@pytest.mark.parametrize("says", UNLIKE)
async def test_a_prompt_prefilled_by_an_unlike_engine_is_computed_again(
    tokenizer: Tokenizer, says: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster(tokenizer, decodes=1) as it:
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
        exported = await it.text("/metrics")
        counted = {"prefill": "prefill-0", "decode": "decode-0"}
        assert metric_in(exported, "headway_proxy_unlike_prefills_total", **counted) == 3
        (logged,) = [r.message for r in caplog.records if "cannot read" in r.message]
        (said,) = says.values()
        assert "prefill-0: " in logged and "decode-0: " in logged
        assert repr(said) in logged
        prefill.says = {}
        instance = it.proxy.cluster.instances
        await until(lambda: not instance["prefill-0"].is_unlike(instance["decode-0"]))
        await it.stream({"prompt": PROMPT, "max_tokens": 20})
        assert decode.pulled == 1


async def test_a_prefill_of_fewer_ranks_is_read(tokenizer: Tokenizer) -> None:
    """NIXL reads from prefill instances with another tensor-parallel size."""
    async with cluster(tokenizer, decodes=1) as it:
        it.engines["prefill-0"].says = {"tensor_parallel": 4}
        await seen(it, it.engines["prefill-0"])
        await it.stream({"prompt": PROMPT, "max_tokens": 20})
        assert it.engines["decode-0"].pulled == 1


async def test_a_drained_engine_s_requests_go_to_those_that_are_like_it(
    tokenizer: Tokenizer,
) -> None:
    """As in an upgrade: half of the engines have the new version."""
    async with cluster(tokenizer, decodes=4, prefix_caching=False) as it:
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


async def test_the_planner_looks_at_like_engines_only(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[int] = []
    plan = Star.plan

    def noted(policy: Star, view: ClusterView) -> Plan:
        planned.append(len(view.kv_capacity))
        return plan(policy, view)

    monkeypatch.setattr(Star, "plan", noted)
    migration = {"name": "star", "prediction": False, "interval_seconds": 0.02}
    async with cluster(tokenizer, decodes=3, migration=migration) as it:
        it.decodes[2].says = {"block_size": 64}
        await seen(it, it.decodes[2])
        planned.clear()
        await it.answered(300)
        assert set(planned) == {2}
