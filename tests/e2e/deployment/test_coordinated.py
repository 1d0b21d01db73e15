"""Two proxies and their coordinator before real engines, and what clients see of their deaths."""

import asyncio
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from chosen_ports import free_port
from moving import STORY
from proxying import Client, Served, served, text_of
from running_deployment import RunningDeployment

from rescheduler.demo.load import metric_in
from rescheduler.engines.deployment import CoordinatorOptions

pytestmark = pytest.mark.timeout(1200)

LONG = {"prompt": STORY, "max_tokens": 400, "temperature": 0, "ignore_eos": True}
SHORT = {**LONG, "max_tokens": 8}


@contextmanager
def coordinating(config: Path) -> Iterator["subprocess.Popen[str]"]:
    """Run `headway coordinator`, until it is killed or this is left."""
    command = [sys.executable, "-m", "rescheduler", "coordinator", "--config", str(config)]
    with (config.parent / "coordinator.log").open("a") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("coordinating on ")
        yield process
    finally:
        process.kill()
        process.communicate()


def measured(url: str, name: str) -> float:
    """A metric of the coordinator; -1 while it does not decide."""
    try:
        urllib.request.urlopen(url + "/ready").close()
        with urllib.request.urlopen(url + "/metrics") as response:
            return metric_in(response.read().decode(), name)
    except OSError:
        return -1


async def until_known(url: str, proxies: int) -> None:
    """Wait until the coordinator knows what so many proxies run, and decides."""
    async with asyncio.timeout(300):
        while await asyncio.to_thread(measured, url, "headway_coordinator_num_proxies") != proxies:
            await asyncio.sleep(0.05)


async def drain_busy(client: Client) -> None:
    """Have what runs on one decode instance move to the other, whichever proxy has it."""
    listed = await client.instances()
    busy = [one.name for one in client.deployment.decode if listed[one.name]["requests"]]
    for name in busy[:1]:
        await client.admin("drain", name)
        await client.until_empty(name)
        await client.admin("undrain", name)


@pytest.mark.slow
def test_streams_outlive_the_coordinator_and_another_proxy(
    deployment: RunningDeployment, tmp_path: Path
) -> None:
    options = CoordinatorOptions(endpoint=f"tcp://127.0.0.1:{free_port()}", port=free_port())
    url = f"http://127.0.0.1:{options.port}"

    async def work(client: Client, first: Served, second: Served, stack: ExitStack) -> None:
        expected = text_of(await client.stream(LONG, url=client.direct))
        short = text_of(await client.stream(SHORT, url=client.direct))
        other = second.deployment.proxy_url
        coordinator = stack.enter_context(coordinating(first.config))
        await until_known(url, 2)

        for _ in range(10):  # a fast engine may be done before it is drained
            three = [client.stream(LONG, url=where) for where in (None, None, other)]
            streams = [asyncio.create_task(stream) for stream in three]
            while not any(stream.done() for stream in streams):
                await drain_busy(client)
            for stream in streams:
                assert text_of(await stream) == expected
            if measured(url, "headway_coordinator_migrations_total") > 0:
                break
        else:
            raise AssertionError("no request was ever moved")

        async def kill(chunks: int, process: "subprocess.Popen[Any]") -> None:
            if chunks == 10:
                process.kill()

        lost = client.stream(LONG, url=other, at=lambda n: kill(n, second.process))
        with pytest.raises(aiohttp.ClientError):
            await lost
        chunks = await client.stream(LONG, at=lambda n: kill(n, coordinator))
        assert text_of(chunks) == expected
        assert text_of(await client.stream(SHORT)) == short, "placed without a coordinator"
        stack.enter_context(coordinating(first.config))
        await until_known(url, 1)
        assert text_of(await client.stream(SHORT)) == short

    with ExitStack() as stack:
        proxies = []
        for name in ("first", "second"):
            folder = tmp_path / name
            folder.mkdir()
            made: Any = served(deployment, folder, coordinator=options, port=free_port())
            proxies.append(stack.enter_context(made))
        first, second = proxies
        first.run(lambda client: work(client, first, second, stack))
