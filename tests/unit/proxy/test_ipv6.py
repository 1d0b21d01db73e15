"""A deployment that is reached by IPv6: it serves, moves and reports as one of IPv4 does."""

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from chosen_ports import free_port
from coordinated_cluster import Make
from running_command import answer, next_line, running
from scripted_cluster import cluster, until
from tokenizers import Tokenizer

from predictor.live.engine_forecasts import TelemetryConfig
from predictor.live.telemetry_publisher import TelemetryPublisher
from predictor.live.zmq_sockets import create_keys, is_loopback, needs_ipv6
from rescheduler.engines.deployment import Deployment, Instance
from rescheduler.engines.engine_command import engine_command
from rescheduler.engines.launch_engines import with_bound_addresses
from rescheduler.telemetry.subscriber import TelemetrySubscriber
from rescheduler.transfer.control_client import ControlClient
from rescheduler.transfer.control_messages import Command, GetState, Released, Reply
from rescheduler.transfer.control_server import ControlServer


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


on_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no ::1")


@on_ipv6
async def test_requests_are_served_and_moved(tokenizer: Tokenizer) -> None:
    async with cluster(tokenizer, prefix_caching=False, host="::1") as it:
        assert it.url.startswith("http://[::1]:")
        for engine in it.decodes:
            engine.token_seconds = 0.02
        asked = asyncio.create_task(it.answered(60))
        await until(lambda: any(engine.running for engine in it.decodes))
        source, target = it.source_and_target()
        assert it.proxy.drainer is not None
        it.proxy.drainer.drain(it.proxy.cluster.instances[source.name])
        await asked
        assert target.pulled, "its KV cache has moved"


@on_ipv6
async def test_proxies_are_coordinated(coordinated: Make) -> None:
    async with coordinated(host="::1") as it:
        assert it.coordinator.endpoint.startswith("tcp://[::1]:")
        await asyncio.gather(*(one.answered(5) for one in it.proxies))
        await it.stop_coordinator()
        await asyncio.gather(*(one.answered(5) for one in it.proxies))
        await it.start_coordinator()
        await it.coordinated()


@on_ipv6
@pytest.mark.parametrize("secured", [False, True])
async def test_the_control_socket_answers(tmp_path: Path, secured: bool) -> None:
    keys = tmp_path / "keys"
    create_keys(keys)

    def said(command: Command) -> Reply:
        return Released(number=command.number, done=not isinstance(command, GetState))

    given = str(keys) if secured else None
    endpoint = f"tcp://[::1]:{free_port()}"
    server, client = ControlServer(endpoint, given, said), ControlClient(endpoint, given)
    try:
        assert await client.release("a" * 8, 0, 30.0)
    finally:
        client.close()
        server.close()


@contextmanager
def publishing(endpoint: str) -> Iterator[TelemetryPublisher]:
    config = TelemetryConfig(bind=endpoint, instance="decode-0", snapshot_seconds=0.05)
    publisher = TelemetryPublisher(config, 0, "model", "checkpoint", 20, [0, 1], {})
    try:
        yield publisher
    finally:
        publisher.close()


@on_ipv6
async def test_telemetry_is_heard(headway_command: list[str]) -> None:
    with publishing("tcp://[::1]:*") as publisher:
        assert publisher.endpoint.startswith("tcp://[::1]:")
        with TelemetrySubscriber(publisher.endpoint) as subscriber:
            await until(lambda: bool(subscriber.view.instances))
        command = [*headway_command, "doctor", "--telemetry", publisher.endpoint]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        shown, _ = await process.communicate()
        assert b"no request runs" in shown


@on_ipv6
@pytest.mark.parametrize("host", ["::1", "::"])
def test_the_command_listens_there(
    headway_command: list[str], smollm2: Path, tmp_path: Path, host: str
) -> None:
    del smollm2  # is prepared
    dead, port = free_port(), free_port()
    instance = {"name": "decode-0", "role": "decode", "url": f"http://[::1]:{dead}"}
    values = {
        "model": "smollm2",
        "instances": [instance],
        "proxy": {"host": host, "port": port, "admin_port": free_port()},
    }
    config = tmp_path / "deployment.yaml"
    config.write_text(json.dumps(values))
    with running(headway_command, "serve", config) as process:
        assert next_line(process) == f"serving on http://[{host}]:{port}\n"
        assert answer(f"http://[::1]:{port}/health")[0] == 200
        assert answer(f"{Deployment.from_values(values).proxy_url}/health")[0] == 200
        assert answer(f"http://127.0.0.1:{port}/health")[0] == (200 if host == "::" else 0)


def test_an_engine_of_this_machine_is_started_as_one() -> None:
    values = {
        "model": "m",
        "instances": [
            {
                "name": "decode-0",
                "role": "decode",
                "url": "http://[::1]:8100",
                "control": "tcp://[::1]:8101",
            }
        ],
    }
    deployment = Deployment.from_values(values)
    command = engine_command(deployment, deployment.instances[0], "m", "python")
    assert command.environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "::1"
    assert command.environment["UCX_NET_DEVICES"] == "lo"
    assert command.arguments[command.arguments.index("--host") + 1] == "::1"


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("tcp://[::1]:5557", True),
        ("tcp://[0:0:0:0:0:0:0:1]:5557", True),
        ("tcp://[::2]:5557", False),
        ("tcp://[::]:5557", False),
        ("tcp://[no]:5557", False),
    ],
)
def test_only_the_loopback_stays_on_this_machine(endpoint: str, expected: bool) -> None:
    assert is_loopback(endpoint) == expected


NAMES = {
    "both": {socket.AF_INET: "10.0.0.7", socket.AF_INET6: "fd00::7"},
    "six": {socket.AF_INET6: "fd00::8"},
    "localhost": {socket.AF_INET6: "::1"},
}


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resolver that knows `NAMES`."""

    def resolve(host: str, port: Any, family: int = 0, *_: Any, **__: Any) -> list[Any]:
        known = NAMES.get(host, {})
        found = [(kind, 1, 6, "", (a, 0)) for kind, a in known.items() if family in (0, kind)]
        if not found:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return found

    monkeypatch.setattr(socket, "getaddrinfo", resolve)


@pytest.mark.usefixtures("names")
@pytest.mark.parametrize(
    ("name", "bound", "by_ipv6"),
    [("both", "10.0.0.7", False), ("six", "[fd00::8]", True), ("localhost", "[::1]", True)],
)
def test_what_is_bound_under_a_name_is_what_others_connect_to(
    name: str, bound: str, by_ipv6: bool
) -> None:
    url, control = f"http://{name}:8100", f"tcp://{name}:8101"
    instance = Instance("decode-0", "decode", url, control=control)
    deployment = Deployment(model="m", instances=[instance])
    (here,) = with_bound_addresses(deployment, deployment.instances).instances
    assert (here.url, here.control) == (f"http://{bound}:8100", f"tcp://{bound}:8101")
    assert here.host == bound.strip("[]")
    assert needs_ipv6(control) == by_ipv6


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:1", "ipc:///run/a", "inproc://a"])
def test_other_endpoints_are_not_of_ipv6(endpoint: str) -> None:
    assert not needs_ipv6(endpoint)
