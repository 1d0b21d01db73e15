"""Engines that are drained, by an operator or by themselves: all that runs there moves."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from chosen_ports import free_port
from coordinated_cluster import Coordinated
from draining_server import busy, draining_server
from scripted_cluster import PROMPT, Cluster, until

from rescheduler.commands.command_line import main
from rescheduler.placement.instance_state import InstanceState
from rescheduler.serving.admin_client import Listed, by_drain_seconds


def drains(it: Cluster, name: str) -> bool:
    return it.proxy.cluster.instances[name].draining


async def test_streams_leave_an_engine_that_is_being_stopped(it: Cluster) -> None:
    it.set_decodes(token_seconds=0.1)  # no stream ends before it has moved
    streams = [asyncio.create_task(it.answered(200, prompt=f"{PROMPT} {i}")) for i in range(6)]
    stopping = it.engines["decode-0"]
    await until(lambda: len(stopping.running) > 0)
    stopping.says = {"draining": True}
    await until(lambda: not stopping.running)
    assert not any(stream.done() for stream in streams)
    it.set_decodes(token_seconds=0.002)
    await asyncio.gather(*streams)
    before = len(stopping.bodies)
    await it.answered(3)
    assert len(stopping.bodies) == before


async def test_an_operator_and_an_engine_each_say_for_themselves_that_it_drains(
    it: Cluster,
) -> None:
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


@pytest.mark.cluster(control_seconds=0.5)
async def test_an_engine_that_was_stopped_and_started_again_serves(it: Cluster) -> None:
    engine = it.engines["decode-0"]
    engine.says = {"draining": True}
    await until(lambda: drains(it, "decode-0"))
    await engine.stop()
    engine.says = {}
    await until(lambda: not it.proxy.cluster.instances["decode-0"].breaker.closed)
    await engine.start()
    await until(lambda: it.proxy.cluster.instances["decode-0"].available)


async def test_a_prefill_engine_that_is_being_stopped_gets_no_prompts(it: Cluster) -> None:
    engine = it.engines["prefill-0"]
    await it.answered(3)
    assert len(engine.bodies) == 1
    engine.says = {"draining": True}
    await until(lambda: drains(it, "prefill-0"))
    await it.answered(3)
    assert len(engine.bodies) == 1, "a decode engine computes the prompt"


async def test_a_proxy_is_told_of_an_engine_that_cannot_say_it(
    it: Cluster, headway_command: list[str], tmp_path: Path
) -> None:
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
    many: Coordinated,
) -> None:
    engine = many.engines["decode-1"]
    engine.says = {"draining": True}

    def instances() -> list[InstanceState]:
        clusters = [many.coordinator.cluster, *(one.proxy.cluster for one in many.proxies)]
        return [cluster.instances["decode-1"] for cluster in clusters]

    await until(lambda: all(one.draining for one in instances()))
    await many.stop_coordinator()
    await many.start_coordinator()
    await many.coordinated()
    await until(lambda: len(many.coordinator.sessions) == 2)
    engine.says = {}
    await until(lambda: not any(one.draining for one in instances()))


BODY = {"prompt": PROMPT, "max_tokens": 40}


def listed(name: str, requests: int = 3, seconds: float | None = None, **changes: Any) -> Listed:
    values = {"role": "decode", "state": "closed", "draining": False, "movable": requests}
    return Listed(name=name, requests=requests, drain_seconds=seconds, **(values | changes))


async def headway_drain(it: Cluster, *arguments: str) -> int:
    return await asyncio.to_thread(main, ["drain", *arguments, "--url", it.listeners.admin.url])


def names(*instances: Listed) -> list[str]:
    return [one.name for one in by_drain_seconds(instances)]


def test_the_soonest_is_first_and_of_equal_ones_that_with_the_fewest_requests() -> None:
    assert names(listed("a", 3, 9.0), listed("b", 5, 2.0), listed("c", 1, 2.0)) == ["c", "b", "a"]
    assert names(listed("a", 3), listed("b", 2), listed("c", 9, 70.0)) == ["c", "b", "a"]
    assert names(listed("a", 2, 0.1), listed("b", 0)) == ["b", "a"], "it is empty already"


def test_only_decode_instances_in_service_are_drained_that_way() -> None:
    prefill, gone = listed("p", 0, role="prefill"), listed("g", 0, state="open")
    assert names(prefill, listed("a", 3, 9.0), gone) == ["a"]


async def stalled(it: Cluster) -> tuple[list[asyncio.Task[Any]], str, str]:
    """Run a request on one instance and two on the other; return their tasks and the names."""
    it.set_decodes(stalls_at=12)
    tasks = []
    for n in range(1, 4):
        tasks.append(asyncio.create_task(it.stream(BODY)))
        await until(lambda n=n: sum(r.generated_tokens == 12 for r in it.requests()) == n)
    few, many = sorted(it.decodes, key=lambda engine: len(engine.running))
    assert (len(few.running), len(many.running)) == (1, 2)
    return tasks, few.name, many.name


@pytest.mark.cluster(prefix_caching=False)
async def test_the_one_that_is_expected_to_be_empty_first_is_drained(
    it: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    await it.stream(BODY)  # from which lengths and the pace are known
    tasks, few, many = await stalled(it)
    seconds = dict.fromkeys([few, many], 0.0)
    async with asyncio.timeout(60):
        while not all(seconds.values()):  # the load ahead may be that of some seconds ago
            status, instances = await it.admin("GET", "instances")
            assert status == 200
            seconds = {one["name"]: one["drain_seconds"] for one in instances["instances"]}
            assert seconds.pop("prefill-0") is None
    assert await headway_drain(it, "--list") == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    order = [name for name, _ in lines]
    assert sorted(order) == sorted([few, many])
    assert [int(value) >= seconds[name] for name, value in lines] == [True, True]
    draining = asyncio.create_task(headway_drain(it, "--soonest"))
    instance = it.proxy.cluster.instances[order[0]]
    await until(lambda: instance.draining)
    it.set_decodes(stalls_at=0)
    assert await draining == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(f"{order[0]} is expected to be empty first: within ")
    assert said[-1].startswith(f"{order[0]} is empty")
    assert await headway_drain(it, "--soonest") == 1
    assert f"{order[1]} is not drained: it is the last" in capsys.readouterr().err
    assert not it.proxy.cluster.instances[order[1]].draining
    assert await headway_drain(it, order[1]) == 0, "by its name it is, whatever comes"
    assert await headway_drain(it, "--soonest") == 1
    assert "no decode instance is in service that is not" in capsys.readouterr().err
    await asyncio.gather(*tasks)


async def test_before_anything_is_known_an_empty_one_is_drained(
    it: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await headway_drain(it, "--soonest") == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == "decode-0 has no requests"
    assert second.startswith("decode-0 is empty: stop it")


@pytest.mark.cluster(prefix_caching=False)
async def test_at_a_coordinator_the_one_with_the_fewest_requests_is_drained(
    many: Coordinated, capsys: pytest.CaptureFixture[str]
) -> None:
    long = {**BODY, "max_tokens": 400}
    with many.unhurried():
        tasks = [asyncio.create_task(many.proxies[0].stream(long)) for _ in range(3)]
        counts: dict[str, int] = {}
        async with asyncio.timeout(60):
            while sum(counts.values()) < 3:
                _, answer = await many.ask("GET", "instances")
                listed = [one for one in answer["instances"] if one["role"] == "decode"]
                counts = {one["name"]: one["requests"] for one in listed}
        assert all(one["drain_seconds"] is None for one in listed)
        fewest = min(counts, key=lambda name: counts[name])
        url = ["--url", many.admin.url]
        assert await asyncio.to_thread(main, ["drain", "--list", *url]) == 0
        assert capsys.readouterr().out == "", "nothing is known of them"
        assert await asyncio.to_thread(main, ["drain", "--soonest", *url]) == 0
        said = capsys.readouterr().out
        assert f"{fewest} has the fewest requests; when they end is not known" in said
    await asyncio.gather(*tasks)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "give the name of an instance, --soonest or --list"),
        (["decode-0", "--soonest"], "one of them only"),
        (["--list", "--soonest"], "one of them only"),
        (["--soonest", "--undo"], "--undo takes the name of an instance"),
    ],
)
def test_what_does_not_go_together_is_said_in_a_line(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["drain", *arguments]) == 1
    errors = capsys.readouterr().err
    assert says in errors
    assert errors.count("\n") == 1
