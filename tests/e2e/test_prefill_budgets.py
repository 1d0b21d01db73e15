"""Two engines that prefill and decode, behind a router that goes by their prefill budgets."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from batching_profile import profile_of
from msgspec.structs import replace
from proxying import Client, Served, served
from running_deployment import ENGINE, patient, running

from rescheduler.demo.load import metric_in
from rescheduler.engines.launch_local import local_deployment
from rescheduler.step_time.profile import BatchTime

pytestmark = pytest.mark.slow

TIMES = BatchTime(constant=0.03, per_new=0.001, per_context=1e-6)
LONG = list(range(1000, 1400))  # 0.4 s, says the profile
HURRIED = {"ttft_s": 0.05, "tpot_s": 0.2}


@pytest.fixture(scope="module")
def replicas(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The engines, and a proxy before them."""
    folder = tmp_path_factory.mktemp("replicas")
    profile = profile_of(smollm2, folder / "profile.yaml", TIMES)
    batching = {"profile": str(profile), "admission": True, "recalibrate": False}
    engine = replace(ENGINE, batching=batching)
    described = local_deployment("smollm2", engine, prefill=0, routing={"name": "pab"})
    with running(patient(described), folder) as deployment, served(deployment, folder) as proxy:
        yield proxy


@pytest.fixture
async def client(replicas: Served) -> AsyncIterator[Client]:
    async with replicas.client() as asking:
        yield asking


async def answer(client: Client, **body: Any) -> tuple[int, Any, Any]:
    return await client.post({"max_tokens": 12, "temperature": 0, "ignore_eos": True, **body})


async def finished(client: Client, at_least: float = 0) -> dict[str, float]:
    """Return how many requests each engine has finished, once they are so many in all."""
    deadline = time.monotonic() + 300
    while True:
        counts = {}
        for one in client.deployment.decode:
            async with client.session.get(one.url + "/metrics") as response:
                counts[one.name] = metric_in(await response.text(), "vllm:request_success_total")
        if sum(counts.values()) >= at_least:
            return counts
        assert time.monotonic() < deadline, f"never {at_least:g} in all: {counts}"
        await asyncio.sleep(0.1)


async def test_prompts_that_come_at_once_are_shared_out(client: Client) -> None:
    """A published budget is not spent twice: the router counts what it has sent."""
    start = sum((await finished(client)).values())
    for one in client.deployment.decode:  # it publishes a budget from then on
        await client.post({"prompt": "One", "max_tokens": 1}, url=one.url)
    before = await finished(client, start + 2)
    # Neither engine has the prompt in its prefix cache: each budget stays spent for a while.
    answers = await asyncio.gather(*(answer(client, prompt=LONG) for _ in range(4)))
    assert [status for status, _, _ in answers] == [200] * 4
    after = await finished(client, start + 6)
    assert [after[name] - before[name] for name in before] == [2, 2]
    (_, alone, _) = await client.post(
        {"prompt": LONG, "max_tokens": 12, "temperature": 0, "ignore_eos": True},
        url=client.direct,
    )
    text = alone["choices"][0]["text"]
    assert [one["choices"][0]["text"] for _, one, _ in answers] == [text] * 4


async def test_what_no_engine_can_give_in_time_is_turned_away_and_harms_nobody(
    client: Client,
) -> None:
    async def at(count: int) -> None:
        if count == 3:
            started.release()

    before = await client.metric("headway_proxy_turned_away_requests_total")
    started = asyncio.Semaphore(0)
    body = {"prompt": "Once upon a time", "max_tokens": 900, "ignore_eos": True}
    engines = client.deployment.decode
    streams = [asyncio.create_task(client.stream(body, at=at, url=one.url)) for one in engines]
    for _ in engines:
        await started.acquire()
    status, answered, headers = await answer(client, prompt=LONG, vllm_xargs=HURRIED)
    assert not any(stream.done() for stream in streams), "both engines have to be busy"
    assert status == 429, answered
    assert answered["error"]["type"] == "RateLimitError"
    assert int(headers["Retry-After"]) >= 1
    assert await client.metric("headway_proxy_turned_away_requests_total") == before + 2
    assert all(one["state"] == "closed" for one in (await client.instances()).values())
    for chunks in await asyncio.gather(*streams):
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    # An engine with nothing else to do serves it as well as it can.
    assert (await answer(client, prompt=LONG, vllm_xargs=HURRIED))[0] == 200
