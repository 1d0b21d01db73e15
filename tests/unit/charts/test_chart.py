"""The Helm chart: its objects fit together, and what is in them is what Headway reads."""

import asyncio
import json
import socket
import sys
from typing import Any

import kubernetes_validate
import msgspec
import pytest
from rendered_chart import REQUIRED, VALUES, Object, Rendered, matches, render, rendered
from scripted_cluster import Cluster

from rescheduler.engines.deployment import EngineOptions
from rescheduler.engines.emulated_deployment import in_real_time
from rescheduler.engines.engine_command import engine_command
from rescheduler.engines.launch_engines import with_bound_addresses
from rescheduler.engines.launch_process import GRACE_SECONDS
from rescheduler.engines.proxy_options import ProxyOptions


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
    pods = [
        f"{release.workloads[role]['metadata']['name']}-{i}"
        for role in ("prefill", "decode")
        if role in release.workloads
        for i in range(release.workloads[role]["spec"]["replicas"])
    ]
    assert [instance.name for instance in release.deployment.instances] == pods
    release.check_engines_are_called_like_their_pods()
    for instance in release.deployment.instances:
        service = release.workloads[instance.role]["spec"]["serviceName"]
        headless = release.of_kind("Service")[service]["spec"]
        assert (headless["clusterIP"], headless["publishNotReadyAddresses"]) == ("None", True)
        container = release.container(instance.role)
        assert container["command"] == ["headway", "launch"]
        assert option(container, "--only") == "$(POD_NAME)"
        name = {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
        assert name in container["env"], "before what refers to it"
        ports = {"http": instance.port}
        for kind in ("control", "telemetry"):
            endpoint = getattr(instance, kind)
            if endpoint is not None:
                host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
                assert host == instance.host
                ports[kind] = int(port)
        assert container_ports(container) == ports


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
    for number, which in enumerate(["defaults", "keys without forecasts", "everything"]):
        for instance in rendered(which).deployment.instances:
            assert (instance.control is not None) == (number >= 1)
            assert (instance.telemetry is not None) == (number >= 2)


def test_options_reach_the_deployment_file() -> None:
    deployment = rendered("everything").deployment
    assert (deployment.model, deployment.served_name) == ("me/mine", "mine")
    assert deployment.routing == {"name": "headroom"}, "and nothing of the default"
    assert deployment.migration == VALUES["everything"]["migration"]
    assert deployment.engine == msgspec.convert(VALUES["everything"]["engine"], EngineOptions)
    assert deployment.proxy == ProxyOptions(host="::", shutdown_seconds=60.5, pool=64)
    defaults = rendered("defaults").deployment
    assert (defaults.migration, defaults.served_name) == (None, "me/mine")


def test_an_engine_has_its_gpus_and_uses_them_and_other_resources_can_be_taken_away() -> None:
    release = rendered("everything")
    for role, gpus in [("prefill", 1), ("decode", 2)]:
        limits = release.container(role)["resources"]["limits"]
        assert limits == {"memory": "32Gi", "nvidia.com/gpu": gpus}
    (prefill, *_), (decode, *_) = release.deployment.prefill, release.deployment.decode
    assert prefill.arguments == []
    command = engine_command(release.deployment, decode, "me/mine", None)
    assert command.arguments[-4:] == ["--tensor-parallel-size", "2", "--swap-space", "0"]
    assert "CUDA_VISIBLE_DEVICES" not in command.environment, "the pod sees its own only"
    slices = rendered("defaults", engines={"gpuResource": "nvidia.com/mig-3g.40gb"})
    assert slices.container("decode")["resources"]["limits"]["nvidia.com/mig-3g.40gb"] == 1
    assert "nvidia.com/gpu" not in json.dumps(slices.objects)
    assert "nvidia.com" not in json.dumps(rendered("cpu").objects)
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
    for component in release.workloads:
        sides = ("engine", "watcher")
        own, other = sides if component in ("prefill", "decode") else sides[::-1]
        secret = release.volumes(component)["keys"]["secret"]
        assert secret["secretName"] == "headway-keys"
        assert {item["path"] for item in secret["items"]} == {f"{own}.key_secret", f"{other}.key"}
        mounts = {m["name"]: m["mountPath"] for m in release.container(component)["volumeMounts"]}
        assert mounts["keys"] == release.deployment.keys


def test_engines_and_proxy_know_the_api_key() -> None:
    release = rendered("everything")
    for component in release.workloads:
        variables = release.variables(component)
        reference = variables["VLLM_API_KEY"]["valueFrom"]["secretKeyRef"]
        assert reference == {"name": "headway-api-key", "key": "api-key"}
        assert variables["HF_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "hub", "key": "hf"}
    assert "secretKeyRef" not in json.dumps(rendered("defaults").objects)


def test_probes_ask_what_is_there(release: Rendered) -> None:
    for component in release.workloads:
        container = release.container(component)
        ready = "/health" if component in ("prefill", "decode") else "/ready"
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            asked = container[kind]["httpGet"]
            assert asked["port"] in container_ports(container)
            assert asked["path"] == (ready if kind == "readinessProbe" else "/health")


@pytest.mark.parametrize("seconds", [1800, 45, 11])
def test_an_engine_may_load_as_long_as_it_is_given(seconds: int) -> None:
    container = rendered("defaults", engines={"startupSeconds": seconds}).container("decode")
    probe = container["startupProbe"]
    assert seconds <= probe["failureThreshold"] * probe["periodSeconds"] < seconds + 10


def test_the_proxy_is_reached_and_has_time_to_end_its_streams(release: Rendered) -> None:
    proxy, options = release.workloads["proxy"], release.deployment.proxy
    assert proxy["spec"]["replicas"] == (3 if release.deployment.coordinator else 1)
    assert options.host == "::", "pods may have addresses of IPv6 alone"
    assert container_ports(release.container("proxy")) == {"http": options.port}
    service = release.of_kind("Service")["headway"]["spec"]
    assert release.selected({"matchLabels": service["selector"]}) == {"proxy"}
    assert [port["targetPort"] for port in service["ports"]] == ["http"]
    sleep, seconds = release.container("proxy")["lifecycle"]["preStop"]["exec"]["command"]
    assert sleep == "sleep"
    grace = release.pod("proxy")["spec"]["terminationGracePeriodSeconds"]
    assert grace >= int(seconds) + options.shutdown_seconds + 10


@pytest.mark.parametrize(
    ("engine", "seconds"),
    [
        ({}, 600),
        ({"drain_seconds": 90.5}, 90.5),
        ({"drain_seconds": 0}, 0),
        ({"emulate": {"profile": "h100-llama-8b", "dilation": 3}}, 1800),
        ({"drain_seconds": 20, "emulate": {"profile": "h100-llama-8b", "dilation": 2.5}}, 50),
    ],
    ids=str,
)
def test_an_engine_s_pod_lasts_until_it_is_drained(engine: dict[str, Any], seconds: float) -> None:
    release = rendered("replicas", engine=engine, keys={"existingSecret": "headway-keys"})
    assert in_real_time(release.deployment).engine.drain_seconds == seconds
    pod = release.pod("decode")["spec"]
    assert pod["terminationGracePeriodSeconds"] >= seconds + GRACE_SECONDS + 10
    assert "lifecycle" not in release.container("decode"), "SIGTERM itself drains it"
    logs = option(release.container("decode"), "--logs")
    mounts = release.container("decode")["volumeMounts"]
    (mounted,) = [mount for mount in mounts if mount["mountPath"] == logs]
    assert not mounted.get("readOnly"), "there it says that it drains"


def test_several_proxies_find_their_coordinator() -> None:
    single = rendered("everything")
    assert "coordinator" not in single.workloads
    assert single.deployment.coordinator is None
    release = rendered("proxies")
    options = release.deployment.coordinator
    assert (options.host, options.silent_seconds, options.lost_seconds) == ("::", 3, 10)
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


HTTP = [{"protocol": "TCP", "port": "http"}]


def test_engines_are_reached_by_this_release_only() -> None:
    for which in ("defaults", "everything", "proxies"):
        release = rendered(which)
        engines = release.of_kind("NetworkPolicy")["headway-engines"]["spec"]
        assert release.selected(engines["podSelector"]) == {"prefill", "decode"}
        proxy, peers, *monitoring = engines["ingress"]
        assert release.reaching(proxy) == {"proxy", "coordinator"} & set(release.workloads)
        assert release.reaching(peers) == {"prefill", "decode"}
        used = set(container_ports(release.container("decode")))
        assert {port["port"] for port in proxy["ports"]} == used
        assert "ports" not in peers, "NIXL takes free ones"
        monitored = [HTTP] if which == "everything" else []
        assert [rule["ports"] for rule in monitoring] == monitored
        other = render(REQUIRED, name="other")
        assert other.selected(engines["podSelector"]) == other.reaching(proxy) == set()


def test_the_proxy_is_reached_by_chosen_clients_only() -> None:
    def policy(clients: list[Object] | None = None) -> Object:
        values = {} if clients is None else {"networkPolicy": {"clients": clients}}
        release = rendered("defaults", **values)
        spec: Object = release.of_kind("NetworkPolicy")["headway-proxy"]["spec"]
        assert release.selected(spec["podSelector"]) == {"proxy"}
        assert spec["policyTypes"] == ["Ingress"]
        return spec

    chosen = {"podSelector": {"matchLabels": {"headway-client": "true"}}}
    assert policy()["ingress"] == [{"from": [chosen], "ports": HTTP}]
    gateway = {"namespaceSelector": {"matchLabels": {"name": "gateway"}}}
    assert policy([gateway])["ingress"] == [{"from": [gateway], "ports": HTTP}]
    assert policy([]).get("ingress", []) == []
    assert rendered("open").of_kind("NetworkPolicy") == {}


def test_the_coordinator_is_reached_by_its_proxies_and_they_by_their_clients() -> None:
    release = rendered("proxies")
    policies = release.of_kind("NetworkPolicy")
    coordinator = policies["headway-coordinator"]["spec"]
    assert release.selected(coordinator["podSelector"]) == {"coordinator"}
    proxies, clients = coordinator["ingress"]
    assert release.reaching(proxies) == {"proxy"}
    assert proxies["ports"] == [{"protocol": "TCP", "port": "coordination"}]
    assert policies["headway-proxy"]["spec"]["ingress"] == [clients]
    nobody = rendered("proxies", networkPolicy={"clients": []}).of_kind("NetworkPolicy")
    assert nobody["headway-proxy"]["spec"].get("ingress", []) == []
    assert nobody["headway-coordinator"]["spec"]["ingress"] == [proxies]


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
            mounted = {mount["name"] for mount in container["volumeMounts"]}
            assert mounted <= set(release.volumes(component))


def test_what_is_written_has_a_place() -> None:
    """The root file system is read-only."""
    release = rendered("everything")
    for component in release.workloads:
        container, variables = release.container(component), release.variables(component)
        mounts = {m["mountPath"] for m in container["volumeMounts"] if not m.get("readOnly")}
        assert {variables["HOME"]["value"], "/models", "/tmp"} <= mounts
        assert variables["HF_HOME"]["value"].startswith("/models/")
        models = release.volumes(component)["models"]
        assert models["persistentVolumeClaim"] == {"claimName": "models"}
    decode = release.container("decode")
    mounts = {mount["mountPath"] for mount in decode["volumeMounts"]}
    assert {option(decode, "--logs"), "/dev/shm"} <= mounts


@pytest.mark.parametrize(
    ("values", "restarted"),
    [
        ({"proxy": {"replicas": 2}}, ["proxy"]),
        ({"decode": {"replicas": 5}, "prefill": {"replicas": 2}}, ["proxy"]),
        ({"routing": {"name": "max_capacity"}, "migration": {"name": "star"}}, ["proxy"]),
        ({"engine": {"max_model_len": 4096}}, ["decode", "prefill", "proxy"]),
        ({"decode": {"arguments": ["--swap-space", "0"]}}, ["decode", "proxy"]),
    ],
    ids=str,
)
def test_more_engines_do_not_restart_those_that_run(
    values: dict[str, Any], restarted: list[str]
) -> None:
    """A proxy reads the deployment file when it starts, an engine gets its options."""
    before, after = (rendered("keys without forecasts", **v) for v in ({}, values))
    changed = {one for one in before.workloads if after.pod(one) != before.pod(one)}
    assert sorted(changed) == restarted


def test_engines_restart_when_they_are_to_send_traces_elsewhere_and_only_then() -> None:
    def checksum(**traces: Any) -> Any:
        values = {"proxy": {"options": {"traces": traces}}} if traces else {}
        return render(REQUIRED | values).pod("decode")["metadata"]["annotations"]["checksum/engine"]

    here = checksum(endpoint="http://here:4317")
    assert here not in (checksum(), checksum(endpoint="http://there:4317"))
    assert here == checksum(endpoint="http://here:4317", sample=1)


def test_a_pod_of_the_release_tests_its_proxy(release: Rendered) -> None:
    (pod,) = release.of_kind("Pod").values()
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    (container,), proxy = pod["spec"]["containers"], release.container("proxy")
    (port,) = release.of_kind("Service")["headway"]["spec"]["ports"]
    url = f"http://headway.prod.svc.cluster.local:{port['port']}"
    assert container["args"][1:] == [url, release.deployment.served_name]
    for part in ("image", "imagePullPolicy", "securityContext"):
        assert container[part] == proxy[part]
    assert all(variable in proxy["env"] for variable in container.get("env", []))
    assert ("env" in container) == ("VLLM_API_KEY" in release.variables("proxy"))
    policy = release.of_kind("NetworkPolicy").get("headway-test")
    assert (policy is None) == (not release.of_kind("NetworkPolicy"))
    if policy is not None:
        assert release.selected(policy["spec"]["podSelector"]) == {"proxy"}
        ((peer,),) = [rule["from"] for rule in policy["spec"]["ingress"]]
        assert matches(peer["podSelector"], pod["metadata"]["labels"])


async def test_what_that_pod_runs_asks_for_one_completion(it: Cluster) -> None:
    (pod,) = rendered("defaults").of_kind("Pod").values()
    program = pod["spec"]["containers"][0]["args"][0]

    async def told(model: str) -> str:
        command, pipe = (sys.executable, "-c", program, it.url, model), asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
        return b"".join(await process.communicate()).decode()

    assert (await told("m")).startswith(f"{it.url} serves m: '")
    assert len(it.asked) == 1
    assert await told("other") == f"{it.url}/v1/models: ['m'], without other\n"


def container_ports(container: Object) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container["ports"]}


def option(container: Object, name: str) -> str:
    arguments: list[str] = container["args"]
    return arguments[arguments.index(name) + 1]
