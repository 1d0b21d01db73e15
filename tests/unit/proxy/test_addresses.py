"""Host names and IPv6 in a deployment: what engines bind, and what everyone else connects to."""

import asyncio
import json
import socket
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml
from chosen_ports import free_port
from coordinated_cluster import Coordinated
from msgspec.structs import replace
from running_command import answer, next_line, running
from scripted_cluster import Cluster, until

from predictor.live.engine_forecasts import TelemetryConfig
from predictor.live.telemetry_publisher import TelemetryPublisher
from predictor.live.zmq_sockets import create_keys, is_loopback, needs_ipv6
from rescheduler.commands.command_line import main
from rescheduler.engines.deployment import Deployment, DeploymentError, Instance
from rescheduler.engines.engine_command import engine_command
from rescheduler.engines.launch_engines import launched, with_bound_addresses
from rescheduler.telemetry.subscriber import TelemetrySubscriber
from rescheduler.transfer.control_client import ControlClient
from rescheduler.transfer.control_messages import Command, GetState, Released, Reply
from rescheduler.transfer.control_server import ControlServer

NAMES = {
    "prefill-0.engines": ["10.0.0.7"],
    "decode-0.engines": ["127.0.1.1", "10.0.0.8"],
    "debian": ["127.0.1.1"],
    "both": ["10.0.0.7", "fd00::7"],
    "six": ["fd00::8"],
    "localhost": ["::1"],
}


def instance(name: str, host: str, role: Any = "decode") -> Instance:
    return Instance(
        name,
        role,
        f"http://{host}:8100",
        control=f"tcp://{host}:8101",
        telemetry=f"tcp://{host}:8102",
    )


PREFILL = instance("prefill-0", "prefill-0.engines", "prefill")
DECODE = instance("decode-0", "decode-0.engines")
ELSEWHERE = instance("decode-1", "decode-1.engines.invalid")


def deployment(*instances: Instance) -> Deployment:
    return Deployment(model="m", keys="keys", instances=[*instances])


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resolver that knows `NAMES`."""

    def resolve(host: str, port: Any, family: int = 0, *_: Any, **__: Any) -> list[Any]:
        kinds = {a: socket.AF_INET6 if ":" in a else socket.AF_INET for a in NAMES.get(host, ())}
        found = [(kind, 1, 6, "", (a, 0)) for a, kind in kinds.items() if family in (0, kind)]
        if not found:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return found

    monkeypatch.setattr(socket, "getaddrinfo", resolve)


@pytest.mark.usefixtures("names")
def test_everything_that_an_engine_binds_is_an_address() -> None:
    here = with_bound_addresses(deployment(PREFILL, DECODE, ELSEWHERE), [DECODE])
    command = engine_command(here, here.instances[1], "m", None)
    arguments = command.arguments
    assert arguments[arguments.index("--host") + 1] == "10.0.0.8", "no other machine's loopback"
    assert arguments[arguments.index("--port") + 1] == "8100"
    transfer = json.loads(arguments[arguments.index("--kv-transfer-config") + 1])
    assert transfer["kv_connector_extra_config"]["headway"]["control"] == "tcp://10.0.0.8:8101"
    assert here.instances[1].telemetry == "tcp://10.0.0.8:8102"
    assert command.environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "10.0.0.8"
    assert command.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5601", "still the second one"


@pytest.mark.usefixtures("names")
def test_only_the_instances_that_start_here_are_looked_up() -> None:
    here = with_bound_addresses(deployment(PREFILL, DECODE, ELSEWHERE), [PREFILL])
    assert here.instances == [instance("prefill-0", "10.0.0.7", "prefill"), DECODE, ELSEWHERE]


@pytest.mark.parametrize("host", ["127.0.0.1", "10.9.8.7", "[::1]", "[fe80::1]"])
@pytest.mark.parametrize("changes", [{}, {"control": "ipc:///run/a", "telemetry": None}])
@pytest.mark.usefixtures("names")
def test_addresses_and_what_has_no_host_stay_as_they_are(
    host: str, changes: dict[str, Any]
) -> None:
    given = deployment(replace(instance("decode-0", host), **changes))
    assert with_bound_addresses(given, given.instances) == given


def test_localhost_is_this_machine() -> None:
    given = deployment(instance("decode-0", "localhost"))
    bound = with_bound_addresses(given, given.instances).instances
    assert bound == [instance("decode-0", "127.0.0.1")]


@pytest.mark.parametrize("host", ["nowhere.invalid", "a..b", "x" * 70])
def test_a_name_without_an_address_is_refused_by_its_field(host: str) -> None:
    wrong = replace(instance("decode-0", "127.0.0.1"), control=f"tcp://{host}:8101")
    with pytest.raises(DeploymentError, match=r"instances\[1\].control: .*--only NAME") as raised:
        with_bound_addresses(deployment(ELSEWHERE, wrong), [wrong])
    assert host in str(raised.value)


@pytest.mark.usefixtures("names")
def test_a_name_that_other_machines_cannot_reach_is_refused() -> None:
    wrong = instance("decode-0", "debian")
    with pytest.raises(DeploymentError, match=r"instances\[0\].url: debian is 127.0.1.1.*/etc/hos"):
        with_bound_addresses(deployment(wrong), [wrong])


def test_nothing_is_started_or_written_for_a_name_that_leads_nowhere(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    with (
        pytest.raises(DeploymentError, match=r"decode-1\.engines\.invalid"),
        launched(deployment(PREFILL, ELSEWHERE), logs, only=["decode-1"]),
    ):
        pass
    assert not logs.exists()


def test_the_printed_command_is_the_one_that_would_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "deployment.yaml"
    rows = [
        {"name": "decode-0", "role": "decode", "url": "http://localhost:8100"},
        {"name": "decode-1", "role": "decode", "url": "http://elsewhere.invalid:8100"},
    ]
    file.write_text(yaml.safe_dump({"model": "me/mine", "instances": rows}))
    print_command = ["launch", "--config", str(file), "--print"]
    assert main([*print_command, "--only", "decode-0"]) == 0
    shown = capsys.readouterr().out
    assert "--host 127.0.0.1" in shown
    assert "VLLM_NIXL_SIDE_CHANNEL_HOST=127.0.0.1" in shown
    assert main(print_command) != 0
    assert "instances[1].url: elsewhere.invalid" in capsys.readouterr().err


@pytest.mark.parametrize(
    "host", ["decode-0", "decode-0.engines.default.svc", "127.0.0.1.example.org", "localhost.lan"]
)
def test_a_name_leaves_the_machine_and_requires_keys(host: str) -> None:
    values = {"name": "d", "role": "decode", "url": "http://127.0.0.1:1"}
    with pytest.raises(DeploymentError, match=r"instances\[0\].control: .*headway keys"):
        Deployment.from_values(
            {"model": "m", "instances": [values | {"control": f"tcp://{host}:2"}]}
        )


async def test_the_proxy_connects_by_name_also_to_what_has_no_address_yet(tmp_path: Path) -> None:
    """Pods get their addresses after the proxy has started."""
    create_keys(tmp_path / "keys")
    keys = str(tmp_path / "keys")
    TelemetrySubscriber(["tcp://nowhere.invalid:8102", "tcp://localhost:1"], keys=keys).close()
    ControlClient("tcp://nowhere.invalid:8101", keys).close()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    given = deployment(
        replace(instance("decode-0", "localhost"), control=f"tcp://localhost:{port}")
    )
    endpoint = with_bound_addresses(given, given.instances).instances[0].control
    assert endpoint is not None
    server = ControlServer(
        endpoint, keys, lambda command: Released(number=command.number, done=False)
    )
    with closing(server), closing(ControlClient(f"tcp://localhost:{port}", keys)) as client:
        assert await client.release("gone", 0, 30) is False


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


on_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no ::1")


@on_ipv6
@pytest.mark.cluster(prefix_caching=False, host="::1")
async def test_requests_are_served_and_moved(it: Cluster) -> None:
    assert it.url.startswith("http://[::1]:")
    it.set_decodes(token_seconds=0.02)
    asked = asyncio.create_task(it.answered(60))
    await until(lambda: any(engine.running for engine in it.decodes))
    source, target = it.source_and_target()
    assert it.proxy.drainer is not None
    it.proxy.drainer.drain(it.proxy.cluster.instances[source.name])
    await asked
    assert target.pulled, "its KV cache has moved"


@on_ipv6
@pytest.mark.cluster(host="::1")
async def test_proxies_are_coordinated(many: Coordinated) -> None:
    assert many.coordinator.endpoint.startswith("tcp://[::1]:")
    await asyncio.gather(*(one.answered(5) for one in many.proxies))
    await many.stop_coordinator()
    await asyncio.gather(*(one.answered(5) for one in many.proxies))
    await many.start_coordinator()
    await many.coordinated()


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
    with closing(server), closing(client):
        assert await client.release("a" * 8, 0, 30.0)


@on_ipv6
async def test_telemetry_is_heard(headway_command: list[str]) -> None:
    config = TelemetryConfig(bind="tcp://[::1]:*", instance="decode-0", snapshot_seconds=0.05)
    sender = TelemetryPublisher(config, 0, "model", "checkpoint", 20, [0, 1], {})
    with closing(sender) as publisher:
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
    given = deployment(instance("decode-0", "[::1]"))
    command = engine_command(given, given.instances[0], "m", "python")
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


@pytest.mark.usefixtures("names")
@pytest.mark.parametrize(
    ("name", "bound", "by_ipv6"),
    [("both", "10.0.0.7", False), ("six", "[fd00::8]", True), ("localhost", "[::1]", True)],
)
def test_what_is_bound_under_a_name_is_what_others_connect_to(
    name: str, bound: str, by_ipv6: bool
) -> None:
    given = deployment(instance("decode-0", name))
    (here,) = with_bound_addresses(given, given.instances).instances
    assert here == instance("decode-0", bound)
    assert here.host == bound.strip("[]")
    assert needs_ipv6(f"tcp://{name}:8101") == by_ipv6


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:1", "ipc:///run/a", "inproc://a"])
def test_other_endpoints_are_not_of_ipv6(endpoint: str) -> None:
    assert not needs_ipv6(endpoint)
