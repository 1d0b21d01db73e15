"""Host names in a deployment: what engines bind, and what everyone else connects to."""

import json
import socket
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec.structs import replace

from predictor.live.zmq_sockets import create_keys
from rescheduler.commands.command_line import main
from rescheduler.engines.deployment import Deployment, DeploymentError, Instance
from rescheduler.engines.engine_command import engine_command
from rescheduler.engines.launch_engines import launched, with_bound_addresses
from rescheduler.telemetry.subscriber import TelemetrySubscriber
from rescheduler.transfer.control_client import ControlClient
from rescheduler.transfer.control_messages import Released
from rescheduler.transfer.control_server import ControlServer

ADDRESSES = {
    "prefill-0.engines": ["10.0.0.7"],
    "decode-0.engines": ["127.0.1.1", "10.0.0.8"],
    "debian": ["127.0.1.1"],
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
    """A resolver that knows `ADDRESSES`."""

    def resolve(host: str, *_: Any) -> list[Any]:
        if host not in ADDRESSES:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (a, 0)) for a in ADDRESSES[host]]

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
@pytest.mark.usefixtures("names")
def test_addresses_stay_as_they_are(host: str) -> None:
    given = deployment(instance("decode-0", host))
    assert with_bound_addresses(given, given.instances) == given


@pytest.mark.usefixtures("names")
def test_what_has_no_host_stays_as_it_is() -> None:
    local = replace(instance("decode-0", "10.0.0.1"), control="ipc:///run/a", telemetry=None)
    assert with_bound_addresses(deployment(local), [local]).instances == [local]


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
