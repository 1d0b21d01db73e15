"""What a deployment with counts becomes on the nodes of a cluster."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from forked_vllm import free_port

from rescheduler.commands.command_line import main
from rescheduler.engines.deployment import Deployment, DeploymentError
from rescheduler.on_ray.launch_on_ray import Survey, survey, versions_differ
from rescheduler.on_ray.ray_deployment import RayDeployment, compose, places, ports_needed
from rescheduler.on_ray.server_actor import _command

TWO = [{"role": "prefill"}, {"role": "decode", "replicas": 2, "num_gpus": 2}]


def described(instances: Any = TWO, proxies: int = 2, **keys: Any) -> RayDeployment:
    ray = {"instances": instances, "proxies": proxies}
    return RayDeployment.from_values({"model": "smollm2", "ray": ray, **keys})


def composed(deployment: RayDeployment, *addresses: str) -> Any:
    where = places(deployment.ray)
    free = range(20_000, 20_000 + ports_needed(where))
    return compose(deployment, where, addresses, addresses[0], free)


def ports_of(deployment: Deployment) -> list[str]:
    endpoints = [getattr(i, f) for i in deployment.instances for f in ("url", "control")]
    endpoints += [i.telemetry for i in deployment.instances if i.telemetry]
    return [one.rpartition(":")[2] for one in [*endpoints, deployment.coordinator.endpoint]]


def test_replicas_are_named_by_their_role_and_listen_on_their_nodes() -> None:
    more = [*TWO, {"role": "decode", "num_gpus": 4, "arguments": ["--tensor-parallel-size", "4"]}]
    nodes = ["127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.2", "127.0.0.2"]
    deployment, servers = composed(described(more, engine={"checkpoint": "there"}), *nodes)
    assert [i.name for i in deployment.instances] == [
        "prefill-0",
        "decode-0",
        "decode-1",
        "decode-2",
    ]
    assert [i.host for i in deployment.instances] == nodes[:4]
    assert deployment.instances[3].arguments == ["--tensor-parallel-size", "4"]
    assert deployment.coordinator.endpoint.startswith("tcp://127.0.0.1:")
    *proxies, coordinator = (server.url for server in servers[4:])
    assert proxies == ["http://127.0.0.2:8000", "http://127.0.0.2:8010"]
    assert coordinator == f"http://127.0.0.1:{deployment.coordinator.port}"


def test_nodes_of_ipv6_have_their_addresses_in_brackets() -> None:
    deployment, servers = composed(described(engine={"checkpoint": "there"}), *["::1"] * 5)
    endpoints = [e for i in deployment.instances for e in (i.url, i.control, i.telemetry)]
    endpoints += [deployment.coordinator.endpoint, *(server.url for server in servers)]
    assert all("://[::1]:" in endpoint for endpoint in endpoints)
    assert [server.address for server in servers] == ["::1"] * 6
    proxy = _command(servers[3], deployment, Path("deployment.yaml")).arguments
    assert proxy[proxy.index("--proxy.host") :] == ["--proxy.host", "::1", "--proxy.port", "8000"]


def test_no_two_servers_share_a_port_wherever_they_are() -> None:
    deployment = described(proxy={"port": 0, "admin_port": 0}, engine={"checkpoint": "there"})
    made, servers = composed(deployment, *["127.0.0.1"] * 5)
    ports = ports_of(made) + [server.url.rpartition(":")[2] for server in servers[3:]]
    ports += [str(made.engine.side_channel_port + n) for n in range(3)]
    ports += [str(made.proxy.admin_port)]
    assert len(set(ports)) == len(ports) == ports_needed(places(deployment.ray))  # type: ignore[arg-type]


def test_the_rest_of_the_file_stays_as_it_is() -> None:
    coordinator = {"endpoint": "tcp://127.0.0.1:1", "silent_seconds": 7.0}
    deployment = described(
        coordinator=coordinator, routing={"name": "headroom"}, engine={"kv_blocks": 9}
    )
    made, _ = composed(deployment, *["127.0.0.1"] * 5)
    assert made.routing == {"name": "headroom"}
    assert made.engine.kv_blocks == 9
    assert made.coordinator.silent_seconds == 7.0
    assert made.instances[0].telemetry is None, "without a checkpoint there are no forecasts"


def test_between_machines_keys_are_required() -> None:
    with pytest.raises(DeploymentError, match="leaves the machine: create keys"):
        composed(described(), *["10.0.0.1"] * 5)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"ray": {"instances": [{"role": "prefill"}]}}, "at least one must have the role decode"),
        ({"ray": {"instances": [{"role": "decode", "num_cpus": 0}]}}, "must reserve something"),
        ({"ray": {"instances": [{"role": "decode", "replicas": 0}]}}, "ray.instances[0].replicas"),
        (
            {"ray": {"instances": [{"role": "decode", "resources": {"": 1}}]}},
            "ray.instances[0].resources",
        ),
        ({"ray": {"instances": TWO}, "routing": {"nam": "jsq"}}, "routing.name"),
        (
            {"ray": {"instances": TWO}, "engine": {"emulate": {"barrier": True}}},
            "engine.emulate.barrier",
        ),
        (
            {
                "ray": {"instances": TWO},
                "instances": [{"name": "d", "role": "decode", "url": "http://127.0.0.1:1"}],
            },
            "not both",
        ),
        ({}, "instances: at least one must have the role decode"),
    ],
)
def test_what_cannot_be_meant_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(DeploymentError) as caught:
        RayDeployment.from_values({"model": "smollm2", **values})
    assert message in str(caught.value)


def test_a_node_says_all_that_it_lacks_and_which_ports_are_free(tmp_path: Path) -> None:
    ports = {"port": 65_530, "admin_port": 0}
    deployment = described(
        [{"role": "decode"}],
        keys=str(tmp_path / "keys"),
        engine={"checkpoint": str(tmp_path / "c")},
        proxy=ports,
    )
    asked = (deployment, places(deployment.ray), ["127.0.0.1"] * 3, "127.0.0.1")
    found = survey("127.0.0.1", *asked)
    assert found.problems == [
        "proxy-1 (proxy.port): 127.0.0.1:65540 is no address: ports end at 65535",
        f"keys: {tmp_path}/keys does not exist",
        f"engine.checkpoint: {tmp_path}/c does not exist",
    ]
    assert found.free and found.versions["vLLM"]
    elsewhere = survey("127.0.0.2", *asked)
    assert elsewhere.problems == [f"keys: {tmp_path}/keys does not exist"]
    assert set(elsewhere.versions) == {"Headway"}, "no engine runs there"


def test_nodes_that_differ_are_named_with_their_versions() -> None:
    nodes = {
        "10.0.0.1": Survey({"Headway": "1"}, set(), []),
        "10.0.0.2": Survey({"Headway": "1", "vLLM": "0.32.0"}, set(), []),
        "10.0.0.3": Survey({"Headway": "1", "vLLM": "0.32.1"}, set(), []),
    }
    (said,) = versions_differ(nodes)
    assert said == "vLLM must be the same on all nodes: 0.32.0 on 10.0.0.2, 0.32.1 on 10.0.0.3"


RAY = ("ray launch", "ray status", "ray restart", "ray stop")
MISTAKES = (
    (RAY, "mine", r"no Ray cluster at '127.0.0.2:.*ray start --head"),
    (RAY, "local-pd", "section"),
    (
        ("launch", "serve", "coordinator", "drain decode-0"),
        "mine",
        "`headway ray launch` starts its engines",
    ),
)


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "deployment.yaml"
    ray = {"instances": [{"role": "decode"}], "address": f"127.0.0.2:{free_port()}"}
    path.write_text(yaml.safe_dump({"model": "smollm2", "ray": ray}))
    return str(path)


@pytest.mark.parametrize("verb", RAY)
def test_without_ray_it_is_said_how_to_get_it(
    verb: str, config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main([*verb.split(), "--config", config]) == 1
    assert "pip install -e '.[ray]'" in capsys.readouterr().err


@pytest.mark.filterwarnings(r"ignore:::ray(\..*)?$")
@pytest.mark.parametrize(
    ("verb", "which", "said"),
    [(verb, which, said) for verbs, which, said in MISTAKES for verb in verbs],
)
def test_a_mistake_is_told(
    verb: str, which: str, said: str, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*verb.split(), "--config", config if which == "mine" else which]) == 1
    assert re.search(said, capsys.readouterr().err, re.DOTALL)
