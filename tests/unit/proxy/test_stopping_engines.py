"""Engines that say that they are being stopped: nothing new goes there, and what runs moves."""

import asyncio
from pathlib import Path

from chosen_ports import free_port
from coordinated_cluster import Make
from draining_server import busy, draining_server
from scripted_cluster import PROMPT, Cluster, cluster, until
from tokenizers import Tokenizer

from rescheduler.placement.instance_state import InstanceState


def drains(it: Cluster, name: str) -> bool:
    return it.proxy.cluster.instances[name].draining


async def test_streams_leave_an_engine_that_is_being_stopped(tokenizer: Tokenizer) -> None:
    async with cluster(tokenizer) as it:
        for engine in it.decodes:
            engine.token_seconds = 0.1  # no stream ends before it has moved
        streams = [asyncio.create_task(it.answered(200, prompt=f"{PROMPT} {i}")) for i in range(6)]
        stopping = it.engines["decode-0"]
        await until(lambda: len(stopping.running) > 0)
        stopping.says = {"draining": True}
        await until(lambda: not stopping.running)
        assert not any(stream.done() for stream in streams)
        for engine in it.decodes:
            engine.token_seconds = 0.002
        await asyncio.gather(*streams)
        before = len(stopping.bodies)
        await it.answered(3)
        assert len(stopping.bodies) == before


async def test_an_operator_and_an_engine_each_say_for_themselves_that_it_drains(
    tokenizer: Tokenizer,
) -> None:
    async with cluster(tokenizer) as it:
        engine = it.engines["decode-0"]
        engine.says = {"draining": True}
        await until(lambda: drains(it, "decode-0"))
        status, listed = await it.admin("POST", "undrain/decode-0")
        assert (status, listed["draining"]) == (200, True), "it is being stopped all the same"
        await it.admin("POST", "drain/decode-0")
        engine.says = {}
        probed = it.proxy.cluster.instances["decode-0"]
        await until(lambda: probed.engine is not None and not probed.engine.draining)
        assert drains(it, "decode-0"), "the operator still wants it empty"
        assert not (await it.admin("POST", "undrain/decode-0"))[1]["draining"]


async def test_an_engine_that_was_stopped_and_started_again_serves(tokenizer: Tokenizer) -> None:
    async with cluster(tokenizer, control_seconds=0.5) as it:
        engine = it.engines["decode-0"]
        engine.says = {"draining": True}
        await until(lambda: drains(it, "decode-0"))
        await engine.stop()
        engine.says = {}
        await until(lambda: not it.proxy.cluster.instances["decode-0"].breaker.closed)
        await engine.start()
        await until(lambda: it.proxy.cluster.instances["decode-0"].available)


async def test_a_prefill_engine_that_is_being_stopped_gets_no_prompts(tokenizer: Tokenizer) -> None:
    async with cluster(tokenizer) as it:
        engine = it.engines["prefill-0"]
        await it.answered(3)
        assert len(engine.bodies) == 1
        engine.says = {"draining": True}
        await until(lambda: drains(it, "prefill-0"))
        await it.answered(3)
        assert len(engine.bodies) == 1, "a decode engine computes the prompt"


async def test_a_proxy_is_told_of_an_engine_that_cannot_say_it(
    tokenizer: Tokenizer, headway_command: list[str], tmp_path: Path
) -> None:
    async with cluster(tokenizer) as it:
        assert it.listeners.admin is not None
        tell = [*headway_command, "drain", "decode-0", "--url", it.listeners.admin.url]
        busy(tmp_path / "decode-0.left", 2)
        server = draining_server(tmp_path, free_port(), tell=tell)
        server.start()
        try:
            await until(server.is_healthy)
            server.begin_to_end()
            await until(lambda: drains(it, "decode-0"))
            assert server.is_running
            busy(tmp_path / "decode-0.left", 0)
            await until(lambda: not server.is_running)
            assert not drains(it, "decode-0"), "it would drain for ever, once it is back"
        finally:
            await asyncio.to_thread(server.kill)


async def test_a_new_coordinator_leaves_an_engine_s_own_draining_to_the_engine(
    coordinated: Make,
) -> None:
    async with coordinated() as it:
        engine = it.engines["decode-1"]
        engine.says = {"draining": True}

        def instances() -> list[InstanceState]:
            clusters = [it.coordinator.cluster, *(one.proxy.cluster for one in it.proxies)]
            return [cluster.instances["decode-1"] for cluster in clusters]

        await until(lambda: all(one.draining for one in instances()))
        await it.stop_coordinator()
        await it.start_coordinator()
        await it.coordinated()
        await until(lambda: len(it.coordinator.sessions) == 2)
        engine.says = {}
        await until(lambda: not any(one.draining for one in instances()))
