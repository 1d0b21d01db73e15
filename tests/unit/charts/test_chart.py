"""The Helm chart: its objects fit together, and what is in them is what Headway reads."""

import json
import socket
from typing import Any

import kubernetes_validate
import msgspec
import pytest
from rendered_chart import REQUIRED, VALUES, Rendered, render, rendered

from rescheduler.engines.deployment import EngineOptions, ProxyOptions
from rescheduler.engines.engine_command import engine_command
from rescheduler.engines.launch_engines import with_bound_addresses


@pytest.fixture(params=VALUES)
def release(request: pytest.FixtureRequest) -> Rendered:
    return rendered(request.param)


@pytest.mark.parametrize("version", ["1.29", "1.37"])
def test_kubernetes_knows_every_field(release: Rendered, version: str) -> None:
    for manifest in release.objects:
        kubernetes_validate.validate(manifest, version, strict=True)
    names = [(manifest["kind"], manifest["metadata"]["name"]) for manifest in release.objects]
    assert len(set(names)) == len(names)


def test_every_pod_starts_the_instance_of_its_name(release: Rendered) -> None:
    pods = {}
    for role in ("prefill", "decode"):
        if role in release.workloads:
            workload = release.workloads[role]
            for i in range(workload["spec"]["replicas"]):
                pods[f"{workload['metadata']['name']}-{i}"] = (
                    role,
                    workload["spec"]["serviceName"],
                )
    assert [instance.name for instance in release.deployment.instances] == list(pods)
    for instance in release.deployment.instances:
        role, service = pods[instance.name]
        assert instance.role == role
        assert instance.host == f"{instance.name}.{service}.prod.svc.cluster.local"
        headless = release.of_kind("Service")[service]["spec"]
        assert headless["clusterIP"] == "None"
        assert headless["publishNotReadyAddresses"] is True
        assert release.selected({"matchLabels": headless["selector"]}) == {role}
        container = release.container(role)
        assert container["command"] == ["headway", "launch"]
        arguments = container["args"]
        assert arguments[arguments.index("--only") + 1] == "$(POD_NAME)"
        name = {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
        assert name in container["env"], "before what refers to it"


def test_engines_listen_where_the_pods_say(release: Rendered) -> None:
    for instance in release.deployment.instances:
        ports = {"http": instance.port}
        for kind in ("control", "telemetry"):
            endpoint = getattr(instance, kind)
            if endpoint is not None:
                host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
                assert host == instance.host
                ports[kind] = int(port)
        assert container_ports(release.container(instance.role)) == ports


def test_an_engine_binds_its_pod_s_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes writes a pod's own name, and no other one, to its /etc/hosts."""
    deployment = rendered("everything").deployment
    own = deployment.decode[1]

    def resolve(host: str, *_: Any) -> list[Any]:
        assert host == own.host
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.1.2.3", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    bound = with_bound_addresses(deployment, [own]).decode[1]
    assert (bound.url, bound.control) == ("http://10.1.2.3:8100", "tcp://10.1.2.3:8101")
    assert bound.telemetry == "tcp://10.1.2.3:8102"


def test_engines_can_be_commanded_with_keys_only() -> None:
    for instance in rendered("defaults").deployment.instances:
        assert instance.control is None
        assert instance.telemetry is None
    for instance in rendered("keys without forecasts").deployment.instances:
        assert instance.control is not None
        assert instance.telemetry is None
    for instance in rendered("everything").deployment.instances:
        assert instance.control is not None
        assert instance.telemetry is not None


def test_options_reach_the_deployment_file() -> None:
    deployment = rendered("everything").deployment
    assert (deployment.model, deployment.served_name) == ("me/mine", "mine")
    assert deployment.routing == {"name": "headroom"}, "and nothing of the default"
    assert deployment.migration == VALUES["everything"]["migration"]
    assert deployment.engine == msgspec.convert(VALUES["everything"]["engine"], EngineOptions)
    assert deployment.proxy == ProxyOptions(host="0.0.0.0", shutdown_seconds=60.5, pool=64)
    defaults = rendered("defaults").deployment
    assert (defaults.migration, defaults.served_name) == (None, "me/mine")


def test_an_engine_has_its_gpus_and_uses_them() -> None:
    release = rendered("everything")
    for role, gpus in [("prefill", 1), ("decode", 2)]:
        limits = release.container(role)["resources"]["limits"]
        assert limits == {"memory": "32Gi", "nvidia.com/gpu": gpus}
    (prefill, *_), (decode, *_) = release.deployment.prefill, release.deployment.decode
    assert prefill.arguments == []
    command = engine_command(release.deployment, decode, "me/mine", None).arguments
    assert command[-4:] == ["--tensor-parallel-size", "2", "--swap-space", "0"]
    assert (
        "CUDA_VISIBLE_DEVICES"
        not in engine_command(release.deployment, decode, "me/mine", None).environment
    ), "the pod sees its own only"
    slices = rendered("defaults", engines={"gpuResource": "nvidia.com/mig-3g.40gb"})
    assert slices.container("decode")["resources"]["limits"]["nvidia.com/mig-3g.40gb"] == 1
    assert "nvidia.com/gpu" not in json.dumps(slices.objects)
    assert "nvidia.com" not in json.dumps(rendered("cpu").objects)


def test_resources_can_be_taken_away() -> None:
    parts = ("prefill", "decode", "proxy")
    bare = render(REQUIRED | {part: {"resources": None} for part in parts})
    for role in ("prefill", "decode"):
        assert bare.container(role)["resources"] == {"limits": {"nvidia.com/gpu": 1}}
    assert not bare.container("proxy")["resources"]


def test_without_prefill_engines_nothing_is_left_of_them() -> None:
    release = rendered("replicas")
    assert set(release.workloads) == {"decode", "proxy"}
    assert release.deployment.prefill == []
    for kind in ("Service", "StatefulSet", "PodDisruptionBudget"):
        assert not [name for name in release.of_kind(kind) if "prefill" in name]


def test_each_side_has_its_own_secret_key_only() -> None:
    release = rendered("proxies")
    for component, own, other in [
        ("prefill", "engine", "watcher"),
        ("decode", "engine", "watcher"),
        ("proxy", "watcher", "engine"),
        ("coordinator", "watcher", "engine"),
    ]:
        (secret,) = [
            v["secret"] for v in release.pod(component)["spec"]["volumes"] if "secret" in v
        ]
        assert secret["secretName"] == "headway-keys"
        assert {item["path"] for item in secret["items"]} == {f"{own}.key_secret", f"{other}.key"}
        mounts = {m["name"]: m["mountPath"] for m in release.container(component)["volumeMounts"]}
        assert mounts["keys"] == release.deployment.keys


def test_engines_and_proxy_know_the_api_key() -> None:
    release = rendered("everything")
    for component in ("prefill", "decode", "proxy"):
        variables = {v["name"]: v for v in release.container(component)["env"]}
        reference = variables["VLLM_API_KEY"]["valueFrom"]["secretKeyRef"]
        assert reference == {"name": "headway-api-key", "key": "api-key"}
        assert variables["HF_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "hub", "key": "hf"}
    assert "VLLM_API_KEY" not in json.dumps(rendered("defaults").objects)


def test_probes_ask_what_is_there(release: Rendered) -> None:
    for component in release.workloads:
        container = release.container(component)
        ready = "/health" if component in ("prefill", "decode") else "/ready"
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            asked = container[kind]["httpGet"]
            assert asked["port"] in container_ports(container)
            expected = ready if kind == "readinessProbe" else "/health"
            assert asked["path"] == expected


def test_an_engine_may_load_as_long_as_it_is_given() -> None:
    for seconds in (1800, 45, 11):
        probe = rendered("defaults", engines={"startupSeconds": seconds}).container("decode")[
            "startupProbe"
        ]
        assert seconds <= probe["failureThreshold"] * probe["periodSeconds"] < seconds + 10


def test_the_proxy_is_reached_and_has_time_to_end_its_streams(release: Rendered) -> None:
    proxy, options = release.workloads["proxy"], release.deployment.proxy
    assert proxy["spec"]["replicas"] == (3 if release.deployment.coordinator else 1)
    assert options.host == "0.0.0.0"
    assert container_ports(release.container("proxy")) == {"http": options.port}
    service = release.of_kind("Service")["headway"]["spec"]
    assert release.selected({"matchLabels": service["selector"]}) == {"proxy"}
    assert [port["targetPort"] for port in service["ports"]] == ["http"]
    sleep, seconds = release.container("proxy")["lifecycle"]["preStop"]["exec"]["command"]
    assert sleep == "sleep"
    grace = release.pod("proxy")["spec"]["terminationGracePeriodSeconds"]
    assert grace >= int(seconds) + options.shutdown_seconds + 10


def test_several_proxies_find_their_coordinator() -> None:
    single = rendered("everything")
    assert "coordinator" not in single.workloads
    assert single.deployment.coordinator is None
    release = rendered("proxies")
    options = release.deployment.coordinator
    assert options is not None
    assert (options.host, options.silent_seconds, options.lost_seconds) == ("0.0.0.0", 3, 10)
    workload = release.workloads["coordinator"]
    assert (workload["kind"], workload["spec"]["replicas"]) == ("StatefulSet", 1)
    service = workload["spec"]["serviceName"]
    host, _, port = options.endpoint.removeprefix("tcp://").rpartition(":")
    assert host == f"{workload['metadata']['name']}-0.{service}.prod.svc.cluster.local"
    container = release.container("coordinator")
    assert container_ports(container) == {"http": options.port, "coordination": int(port)}
    assert container["command"] == ["headway", "coordinator"]
    headless = release.of_kind("Service")[service]["spec"]
    assert (headless["clusterIP"], headless["publishNotReadyAddresses"]) == ("None", True)
    assert release.selected({"matchLabels": headless["selector"]}) == {"coordinator"}


def test_the_coordinator_is_reached_by_its_proxies_and_they_by_each_other() -> None:
    release = rendered("proxies")
    policies = release.of_kind("NetworkPolicy")
    coordinator = policies["headway-coordinator"]["spec"]
    assert release.selected(coordinator["podSelector"]) == {"coordinator"}
    proxies, clients = coordinator["ingress"]
    assert [release.selected(peer["podSelector"]) for peer in proxies["from"]] == [{"proxy"}]
    assert proxies["ports"] == [{"protocol": "TCP", "port": "coordination"}]
    chosen, each_other = policies["headway-proxy"]["spec"]["ingress"]
    assert clients == chosen
    assert [release.selected(peer["podSelector"]) for peer in each_other["from"]] == [{"proxy"}]
    assert "ports" not in each_other
    engines = policies["headway-engines"]["spec"]["ingress"][0]
    (peer,) = engines["from"]
    assert release.selected(peer["podSelector"]) == {"proxy", "coordinator"}
    nobody = rendered("proxies", networkPolicy={"clients": []}).of_kind("NetworkPolicy")
    assert nobody["headway-proxy"]["spec"]["ingress"] == [each_other]
    assert nobody["headway-coordinator"]["spec"]["ingress"] == [proxies]


def test_engines_are_reached_by_this_release_only() -> None:
    for which in ("defaults", "everything"):
        release = rendered(which)
        policies = release.of_kind("NetworkPolicy")
        engines = policies["headway-engines"]["spec"]
        assert release.selected(engines["podSelector"]) == {"prefill", "decode"}
        proxy, peers, *monitoring = engines["ingress"]
        assert [release.selected(peer["podSelector"]) for peer in proxy["from"]] == [{"proxy"}]
        assert [release.selected(peer["podSelector"]) for peer in peers["from"]] == [
            {"prefill", "decode"}
        ]
        assert all(list(peer) == ["podSelector"] for peer in (*proxy["from"], *peers["from"]))
        used = set(container_ports(release.container("decode")))
        assert {port["port"] for port in proxy["ports"]} == used
        assert "ports" not in peers, "NIXL takes free ones"
        if which == "defaults":
            assert monitoring == []
        else:
            assert [rule["ports"] for rule in monitoring] == [[{"protocol": "TCP", "port": "http"}]]
        other = render(REQUIRED, name="other")
        assert other.selected(engines["podSelector"]) == set()
        assert all(other.selected(peer["podSelector"]) == set() for peer in proxy["from"])


def test_the_proxy_is_reached_by_chosen_clients_only() -> None:
    policy = rendered("defaults").of_kind("NetworkPolicy")["headway-proxy"]["spec"]
    release = rendered("defaults")
    assert release.selected(policy["podSelector"]) == {"proxy"}
    (rule,) = policy["ingress"]
    assert rule["from"] == [{"podSelector": {"matchLabels": {"headway-client": "true"}}}]
    assert rule["ports"] == [{"protocol": "TCP", "port": "http"}]
    gateway = {"namespaceSelector": {"matchLabels": {"name": "gateway"}}}
    mine = rendered("defaults", networkPolicy={"clients": [gateway]})
    (rule,) = mine.of_kind("NetworkPolicy")["headway-proxy"]["spec"]["ingress"]
    assert rule["from"] == [gateway]
    nobody = rendered("defaults", networkPolicy={"clients": []})
    closed = nobody.of_kind("NetworkPolicy")["headway-proxy"]["spec"]
    assert (closed["policyTypes"], closed.get("ingress", [])) == (["Ingress"], [])
    assert rendered("open").of_kind("NetworkPolicy") == {}


def test_budgets_hold_for_the_pods_of_their_component() -> None:
    for which, most in [("defaults", 1), ("everything", "34%")]:
        release = rendered(which)
        budgets = release.of_kind("PodDisruptionBudget")
        assert {name: release.selected(b["spec"]["selector"]) for name, b in budgets.items()} == {
            f"headway-{component}": {component} for component in ("prefill", "decode", "proxy")
        }
        assert budgets["headway-decode"]["spec"]["maxUnavailable"] == most
    assert set(rendered("open").of_kind("PodDisruptionBudget")) == {"headway-prefill"}


def test_pods_have_no_more_rights_than_they_need(release: Rendered) -> None:
    for component in release.workloads:
        spec = release.pod(component)["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            volumes = {volume["name"] for volume in spec["volumes"]}
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes


def test_what_is_written_has_a_place() -> None:
    """The root file system is read-only."""
    release = rendered("everything")
    for component in release.workloads:
        container = release.container(component)
        mounts = {m["mountPath"]: m for m in container["volumeMounts"] if not m.get("readOnly")}
        variables = {v["name"]: v.get("value") for v in container["env"]}
        assert variables["HOME"] in mounts
        assert variables["HF_HOME"].startswith("/models/")
        assert {"/models", "/tmp"} <= set(mounts)
    arguments = release.container("decode")["args"]
    mounts = {m["mountPath"] for m in release.container("decode")["volumeMounts"]}
    assert {arguments[arguments.index("--logs") + 1], "/dev/shm"} <= mounts
    for component in release.workloads:
        volumes = {v["name"]: v for v in release.pod(component)["spec"]["volumes"]}
        assert volumes["models"]["persistentVolumeClaim"] == {"claimName": "models"}


def test_more_engines_do_not_restart_those_that_run() -> None:
    def templates(**values: Any) -> dict[str, Any]:
        release = rendered("keys without forecasts", **values)
        return {component: release.pod(component) for component in release.workloads}

    one = templates()
    several = templates(proxy={"replicas": 2})
    assert several["decode"] == one["decode"]
    more = templates(decode={"replicas": 5}, prefill={"replicas": 2})
    assert more["decode"] == one["decode"]
    assert more["prefill"] == one["prefill"]
    assert more["proxy"] != one["proxy"], "it reads the file when it starts"
    routed = templates(routing={"name": "max_capacity"}, migration={"name": "star"})
    assert routed["decode"] == one["decode"]
    assert routed["proxy"] != one["proxy"]
    longer = templates(engine={"max_model_len": 4096})
    assert all(longer[component] != one[component] for component in one)
    flagged = templates(decode={"arguments": ["--swap-space", "0"]})
    assert flagged["decode"] != one["decode"]
    assert flagged["prefill"] == one["prefill"]


@pytest.mark.parametrize("name", ["a", "headway", "x" * 53])
def test_long_names_of_releases_still_fit(name: str) -> None:
    release = render({**REQUIRED, "decode": {"replicas": 101}}, name=name)
    for instance in release.deployment.instances:
        assert all(len(label) <= 63 for label in instance.host.split("."))
    for workload in release.of_kind("StatefulSet"):
        assert len(workload) <= 52, "the controller adds a hash to make a label"


def container_ports(container: dict[str, Any]) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container["ports"]}
