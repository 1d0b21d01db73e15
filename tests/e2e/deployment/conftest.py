"""A deployment that the tests of this folder share: one prefill and two decode engines.

It ends with the last of them: the engines of other tests need its memory.
"""

from collections.abc import AsyncIterator, Iterator

import pytest
from collector import Collector, http_collector
from moving import Engine, engines_of
from msgspec.structs import replace
from running_deployment import ENGINE, RunningDeployment, patient

from rescheduler.engines.launch_engines import launched
from rescheduler.engines.launch_local import local_deployment, write_deployment
from rescheduler.engines.proxy_options import TraceOptions


@pytest.fixture(scope="package")
def collector() -> Iterator[Collector]:
    """What the engines send their spans to, and a proxy if a test has it do so."""
    with http_collector() as listening:
        yield listening


@pytest.fixture(scope="package")
def deployment(
    tmp_path_factory: pytest.TempPathFactory, collector: Collector
) -> Iterator[RunningDeployment]:
    """One prefill and two decode engines with a small KV cache, and no proxy.

    They record a request if its proxy does.
    """
    folder = tmp_path_factory.mktemp("deployment")
    described = patient(local_deployment("smollm2", ENGINE))
    config_path = folder / "deployment.yaml"
    write_deployment(described, config_path)
    traces = TraceOptions(endpoint=collector.endpoint)
    engine = replace(ENGINE, environment={"OTEL_BSP_SCHEDULE_DELAY": "200"})  # ms to a batch
    engine = replace(engine, side_channel_port=described.engine.side_channel_port)
    traced = replace(described, proxy=replace(described.proxy, traces=traces), engine=engine)
    with launched(traced, folder / "logs") as running:
        yield RunningDeployment(config_path, described, running)


@pytest.fixture
async def engines(deployment: RunningDeployment) -> AsyncIterator[list[Engine]]:
    """The decode engines, which hold nothing after the test."""
    async with engines_of(deployment.deployment.decode) as connected:
        yield connected
