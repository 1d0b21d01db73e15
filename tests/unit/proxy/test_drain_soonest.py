"""`headway drain --soonest` and `--list`: which instance empties first, and what is refused."""

import asyncio
from typing import Any

import pytest
from chosen_ports import free_port
from coordinated_cluster import coordinated_cluster
from scripted_cluster import PROMPT, Cluster, cluster, until
from tokenizers import Tokenizer

from rescheduler.commands.command_line import main
from rescheduler.serving.admin_client import Listed, by_drain_seconds

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
    for engine in it.decodes:
        engine.stalls_at = 12
    tasks = []
    for n in range(1, 4):
        tasks.append(asyncio.create_task(it.stream(BODY)))
        await until(lambda n=n: sum(r.generated_tokens == 12 for r in it.requests()) == n)
    few, many = sorted(it.decodes, key=lambda engine: len(engine.running))
    assert (len(few.running), len(many.running)) == (1, 2)
    return tasks, few.name, many.name


async def test_the_one_that_is_expected_to_be_empty_first_is_drained(
    tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    async with cluster(tokenizer, prefix_caching=False) as it:
        await it.stream(BODY)  # from which lengths and the pace are known
        tasks, few, many = await stalled(it)
        status, instances = await it.admin("GET", "instances")
        assert status == 200
        seconds = {one["name"]: one["drain_seconds"] for one in instances["instances"]}
        assert seconds.pop("prefill-0") is None
        assert all(value > 0 for value in seconds.values())
        assert await headway_drain(it, "--list") == 0
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        order = [name for name, _ in lines]
        assert sorted(order) == sorted([few, many])
        assert [int(value) >= seconds[name] for name, value in lines] == [True, True]
        draining = asyncio.create_task(headway_drain(it, "--soonest"))
        instance = it.proxy.cluster.instances[order[0]]
        await until(lambda: instance.draining)
        for engine in it.decodes:
            engine.stalls_at = 0
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
    tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    async with cluster(tokenizer) as it:
        assert await headway_drain(it, "--soonest") == 0
        first, second = capsys.readouterr().out.splitlines()
        assert first == "decode-0 has no requests"
        assert second.startswith("decode-0 is empty: stop it")


async def test_at_a_coordinator_the_one_with_the_fewest_requests_is_drained(
    tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    long = {**BODY, "max_tokens": 400}
    async with coordinated_cluster(tokenizer, free_port(), prefix_caching=False) as it:
        with it.unhurried():
            tasks = [asyncio.create_task(it.proxies[0].stream(long)) for _ in range(3)]
            counts: dict[str, int] = {}
            async with asyncio.timeout(60):
                while sum(counts.values()) < 3:
                    _, answer = await it.ask("GET", "instances")
                    listed = [one for one in answer["instances"] if one["role"] == "decode"]
                    counts = {one["name"]: one["requests"] for one in listed}
            assert all(one["drain_seconds"] is None for one in listed)
            fewest = min(counts, key=lambda name: counts[name])
            url = ["--url", it.admin.url]
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
