"""A deployment that the tests of a session share: one prefill and two decode engines."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import aiohttp
import pytest
from moving import Engine, Run, idle_state
from msgspec.structs import replace
from running_deployment import ENGINE, PATIENT, RunningDeployment

from rescheduler.engines.launch_engines import launched
from rescheduler.engines.launch_local import local_deployment, write_deployment
from rescheduler.transfer.control_client import ControlClient


@pytest.fixture(scope="session")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDeployment]:
    """One prefill and two decode engines with a small KV cache, and no proxy."""
    folder = tmp_path_factory.mktemp("deployment")
    described = local_deployment("smollm2", ENGINE)
    described = replace(described, proxy=replace(PATIENT, port=described.proxy.port))
    config_path = folder / "deployment.yaml"
    write_deployment(described, config_path)
    with launched(described, folder / "logs") as running:
        yield RunningDeployment(config_path, described, running)


@pytest.fixture(scope="session")
def on_engines(deployment: RunningDeployment) -> Run:
    """Run a coroutine on the decode engines, and see that they hold nothing afterwards."""
    instances = [one for one in deployment.deployment.instances if one.role == "decode"]

    async def run(work: Callable[[list[Engine]], Awaitable[Any]]) -> Any:
        # Kept connections are closed by the server now and then, just as they are used again.
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(connector=connector) as session:
            engines = [Engine(one.url, ControlClient(one.control), session) for one in instances]
            try:
                result = await work(engines)
                for engine in engines:
                    state = await idle_state(engine)
                    assert state.free_blocks == state.num_blocks
                    assert (state.running, state.waiting, state.frozen) == (0, 0, [])
                return result
            finally:
                for engine in engines:
                    engine.control.close()

    return lambda work: asyncio.run(run(work))
