"""What a deployment with counts becomes on the nodes of a cluster."""

from typing import Any

import pytest

from rescheduler.engines.deployment import Deployment, DeploymentError
from rescheduler.on_ray.composition import compose, places, ports_needed
from rescheduler.on_ray.node_survey import Survey, questions, survey, versions_differ
from rescheduler.on_ray.ray_deployment import RayDeployment

TWO = [{"role": "prefill"}, {"role": "decode", "replicas": 2, "num_gpus": 2}]


def described(instances: Any = TWO, proxies: int = 2, **keys: Any) -> RayDeployment:
    ray = {"instances": instances, "proxies": proxies}
    return RayDeployment.from_values({"model": "smollm2", "ray": ray, **keys})


def composed(deployment: RayDeployment, *addresses: str) -> Any:
    assert deployment.ray is not None
    where = places(deployment.ray)
    free = range(20_000, 20_000 + ports_needed(where))
    return compose(deployment, where, addresses, addresses[0], free)


def ports_of(deployment: Deployment) -> list[str]:
    endpoints = [getattr(i, f) for i in deployment.instances for f in ("url", "control")]
    endpoints += [i.telemetry for i in deployment.instances if i.telemetry]
    assert deployment.coordinator is not None
    return [one.rpartition(":")[2] for one in [*endpoints, deployment.coordinator.endpoint]]


def test_replicas_are_named_by_their_role_and_listen_on_their_nodes() -> None:
    more = [*TWO, {"role": "decode", "num_gpus": 4, "arguments": ["--tensor-parallel-size", "4"]}]
    nodes = ["127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.2", "127.0.0.2"]
    made = composed(described(more, engine={"checkpoint": "there"}), *nodes)
    deployment = made.deployment
    assert [i.name for i in deployment.instances] == [
        "prefill-0",
        "decode-0",
        "decode-1",
        "decode-2",
    ]
    assert [i.host for i in deployment.instances] == nodes[:4]
    assert deployment.instances[3].arguments == ["--tensor-parallel-size", "4"]
    assert deployment.coordinator.endpoint.startswith("tcp://127.0.0.1:")
    assert [s.url for s in made.servers[4:]] == ["http://127.0.0.2:8000", "http://127.0.0.2:8010"]
    assert made.coordinator.url == f"http://127.0.0.1:{deployment.coordinator.port}"


def test_no_two_servers_share_a_port_wherever_they_are() -> None:
    deployment = described(proxy={"port": 0, "admin_port": 0}, engine={"checkpoint": "there"})
    made = composed(deployment, *["127.0.0.1"] * 5)
    ports = ports_of(made.deployment) + [s.url.rpartition(":")[2] for s in made.servers[3:]]
    side_channel = made.deployment.engine.side_channel_port
    ports += [str(side_channel + n) for n in range(3)]
    ports += [str(made.deployment.proxy.admin_port), str(made.deployment.coordinator.port)]
    assert len(set(ports)) == len(ports) == ports_needed(places(deployment.ray))  # type: ignore[arg-type]


def test_the_rest_of_the_file_stays_as_it_is() -> None:
    coordinator = {"endpoint": "tcp://127.0.0.1:1", "silent_seconds": 7.0}
    deployment = described(
        coordinator=coordinator, routing={"name": "headroom"}, engine={"kv_blocks": 9}
    )
    made = composed(deployment, *["127.0.0.1"] * 5).deployment
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


def test_a_node_says_all_that_it_lacks_and_which_ports_are_free(tmp_path: Any) -> None:
    deployment = described(keys=str(tmp_path / "keys"), engine={"checkpoint": str(tmp_path / "c")})
    assert deployment.ray is not None
    where = places(deployment.ray)
    asked = questions(deployment, where, ["127.0.0.1"] * 3 + ["127.0.0.2"] * 2, "127.0.0.3")
    assert set(asked) == {"127.0.0.1", "127.0.0.2", "127.0.0.3"}
    assert [port for _, _, port in asked["127.0.0.2"].ports] == [8000, 8010]
    assert asked["127.0.0.3"].ports == [("proxy.admin_port", "127.0.0.1", 8001)]
    assert not asked["127.0.0.2"].engines and asked["127.0.0.3"].model is None
    found = survey(asked["127.0.0.1"])
    assert found.problems == [
        f"keys: {tmp_path}/keys does not exist",
        f"engine.checkpoint: {tmp_path}/c does not exist",
    ]
    assert found.free


def test_proxies_that_leave_the_range_of_ports_are_named() -> None:
    deployment = described([{"role": "decode"}], proxy={"port": 65_530, "admin_port": 0})
    assert deployment.ray is not None
    where = places(deployment.ray)
    found = survey(questions(deployment, where, ["127.0.0.1"] * 3, "127.0.0.1")["127.0.0.1"])
    (said,) = found.problems
    assert said == "proxy-1 (proxy.port): 127.0.0.1:65540 is no address: ports end at 65535"


def test_nodes_that_differ_are_named_with_their_versions() -> None:
    nodes = {
        "10.0.0.1": Survey({"Headway": "1"}, set(), []),
        "10.0.0.2": Survey({"Headway": "1", "vLLM": "0.32.0"}, set(), []),
        "10.0.0.3": Survey({"Headway": "1", "vLLM": "0.32.1"}, set(), []),
    }
    (said,) = versions_differ(nodes)
    assert said == "vLLM must be the same on all nodes: 0.32.0 on 10.0.0.2, 0.32.1 on 10.0.0.3"
