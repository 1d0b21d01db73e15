"""The values of the Helm chart: which are refused, their names, and the page about them."""

import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml
from rendered_chart import CHART, REQUIRED, VALUES, Rendered, matches, render, rendered

from deploy.json_text import json_text
from deploy.values_schema import SCHEMA, with_options
from rescheduler.engines.emulated_deployment import emulated_engine


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "model: a Hugging Face id"),
        ({"model": "m"}, "image.repository: there is no published image"),
        ({"decode": {"replicas": 0}}, "at '/decode/replicas': minimum: got 0, want 1"),
        ({"modle": "m"}, "additional properties 'modle' not allowed"),
        ({"engine": {"max_len": 1}}, "at '/engine': additional properties 'max_len' not allowed"),
        ({"proxy": {"options": {"port": 80}}}, "additional properties 'port' not allowed"),
        ({"routing": None}, "missing property 'routing'"),
        ({"routing": {"reserve": 0.1}}, "at '/routing': missing property 'name'"),
        ({"migration": {"prediction": False}}, "at '/migration': missing property 'name'"),
        ({"keys": {"existingSecret": "My keys"}}, "at '/keys/existingSecret': 'My keys' does not"),
        ({"networkPolicy": {"clients": {}}}, "at '/networkPolicy/clients': got object, want array"),
        ({"prefill": {"resources": {"limits": {"memory": "much"}}}}, "at '/prefill/resources"),
        ({"nameOverride": "My app"}, "at '/nameOverride': 'My app' does not match pattern"),
        ({"nameOverride": "x" * 64}, "at '/nameOverride': maxLength: got 64, want 63"),
        ({"engines": {"extraEnv": [{"name": "A", "value": 1}]}}, "/0/value': got number, want st"),
        ({"proxy": {"extraEnv": [{"name": "A", "valeu": ""}]}}, "additional properties 'valeu'"),
        ({**REQUIRED, "migration": {"name": "star"}}, "migration: .* keys.existingSecret"),
        ({**REQUIRED, "proxy": {"replicas": 2}}, "proxy.replicas: .* keys.existingSecret"),
        ({"coordinator": {"options": {"port": 80}}}, "additional properties 'port' not allowed"),
        (REQUIRED | {"engine": {"batching": {"admission": True}}}, "set prefill.replicas to 0"),
        (REQUIRED | {"engine": {"emulate": {"barrier": True}}}, "emulate.barrier: of engines on o"),
    ],
    ids=json.dumps,
)
def test_wrong_values_are_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(helm_python.HelmError, match=said):
        render(values)


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\x85", "\x7f", "\ufffe"])
@pytest.mark.parametrize(
    "values",
    [
        {"model": "a{}b: c"},
        {"servedModelName": "a{}b"},
        {"decode": {"arguments": ["a{}"]}},
        {"engine": {"environment": {"A": "{}"}}},
        {"promptCheckpoint": "{}"},
        {"routing": {"name": "{}"}},
        {"proxy": {"options": {"allowed_origins": ["{}"]}}},
    ],
    ids=str,
)
def test_what_ends_a_line_of_yaml_is_refused(values: dict[str, Any], character: str) -> None:
    """It made other keys of the deployment file out of the rest of the value, or none."""
    given = json.loads(json.dumps(values).replace("{}", json.dumps(character)[1:-1]))
    with pytest.raises(helm_python.HelmError, match="a control character or a line separator"):
        render(REQUIRED | given)


@pytest.mark.parametrize("model", ["a\\u2028b", "modèle/模型-😀", "a b: c # d", "a\nb", "\\"])
def test_other_names_of_models_are_read_as_they_are(model: str) -> None:
    assert render(REQUIRED | {"model": model}).deployment.model == model


def test_the_chart_s_own_variables_cannot_be_set_twice() -> None:
    for component, part in [("decode", "engines"), ("proxy", "proxy"), ("coordinator",) * 2]:
        which = "proxies" if component == "coordinator" else "everything"
        release, extra = rendered(which), VALUES[which][part]["extraEnv"]
        own = [v for v in release.container(component)["env"] if v not in extra]
        assert {"HOME", "HF_HOME"} <= {variable["name"] for variable in own}
        for variable in own:
            again = {part: {"extraEnv": [{"name": variable["name"], "value": "x"}]}}
            with pytest.raises(helm_python.HelmError, match=f"at '/{part}/extraEnv/0/name'"):
                render(REQUIRED | again)


def test_the_schema_knows_headway_s_options() -> None:
    committed = SCHEMA.read_text()
    described = json_text(with_options(json.loads(committed)))
    assert committed == described, "run python -m deploy.values_schema"


def test_the_chart_is_one_that_helm_finds_nothing_wrong_with() -> None:
    report = helm_python.lint(str(CHART), REQUIRED, strict=True)
    assert report["errors"] == []
    assert [message for message in report["messages"] if message["severity"] > 1] == []


def test_the_chart_installs_this_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert chart["appVersion"] == project["version"]
    assert render(REQUIRED).container("proxy")["image"].endswith(f":{project['version']}")


def test_the_notes_say_what_is_missing() -> None:
    defaults, all_set = rendered("defaults").notes, rendered("everything").notes
    assert "http://headway.prod.svc.cluster.local/v1" in defaults
    assert "helm test headway -n prod" in defaults
    assert "port-forward deployment/headway-proxy 8001" in defaults
    assert "port-forward statefulset/headway-coordinator 8001" in rendered("proxies").notes
    for missing in ("keys.existingSecret", "apiKey.existingSecret"):
        assert missing in defaults
        assert missing not in all_set


DNS_1035_LABEL = "[a-z]([-a-z0-9]*[a-z0-9])?"
NOT_STRINGS = ["123", "true", "on", "null", "0x10", "1.5", "1e3"]
"""What YAML reads as something else unless it is quoted."""


@pytest.mark.parametrize(
    ("name", "override"),
    [
        *((name, "") for name in [*NOT_STRINGS, "headway", "llm.v2"]),
        *((name, "") for name in ["x" * 53, "a." * 26 + "a", "y" + "-" * 51 + "y"]),
        *(("llm", override) for override in ["123", "true", "1.5", "my.app", "x" * 63]),
        ("123", "123"),
        ("true", "true"),
        ("1" * 53, "x" * 63),
    ],
)
def test_any_release_has_names_that_kubernetes_takes(name: str, override: str) -> None:
    values = {"nameOverride": override, "decode": {"replicas": 101}}
    release = render(REQUIRED | values, name=name)
    for manifest in release.objects:
        kubernetes_validate.validate(manifest, "1.29", strict=True)
        assert re.fullmatch(DNS_1035_LABEL, manifest["metadata"]["name"])
        assert len(manifest["metadata"]["name"]) <= 63
    for labels in all_labels(release.objects):
        assert all(isinstance(value, str) for value in labels.values())
        assert labels.get("app.kubernetes.io/instance", name) == name
        called = override or "headway"
        assert labels.get("app.kubernetes.io/name", called) == called
    release.check_engines_are_called_like_their_pods()
    for instance in release.deployment.instances:
        assert all(len(label) <= 63 for label in instance.host.split("."))
    for workload in release.of_kind("StatefulSet"):
        assert len(workload) <= 52, "the controller adds a hash to make a label"


def test_a_name_changes_no_more_than_it_has_to() -> None:
    for name, made in {"llm": "llm", "llm.v2": "llm-v2", "1e3": "h-1e3"}.items():
        assert f"{made}-headway" in render(REQUIRED, name=name).of_kind("ConfigMap")


@pytest.mark.parametrize("name", NOT_STRINGS)
def test_names_of_other_objects_are_strings(name: str) -> None:
    secret = {"existingSecret": name, "key": name}
    values = {"apiKey": secret, "huggingFaceToken": secret, "keys": {"existingSecret": name}}
    values |= {"modelCache": {"existingClaim": name}, "proxy": {"priorityClassName": name}}
    values["engines"] = {"runtimeClassName": name, "priorityClassName": name}
    release = rendered("everything", serviceAccountName=name, **values)
    for manifest in release.objects:
        kubernetes_validate.validate(manifest, "1.29", strict=True)
    for component in release.workloads:
        pod = release.pod(component)["spec"]
        assert pod["serviceAccountName"] == pod["priorityClassName"] == name
        volumes = release.volumes(component)
        assert volumes["keys"]["secret"]["secretName"] == name
        assert volumes["models"]["persistentVolumeClaim"]["claimName"] == name
        for variable in ("VLLM_API_KEY", "HF_TOKEN"):
            reference = release.variables(component)[variable]["valueFrom"]["secretKeyRef"]
            assert reference == {"name": name, "key": name}
    assert release.pod("decode")["spec"]["runtimeClassName"] == name


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        ({"repository": "r", "tag": "7"}, "r:7"),
        ({"repository": "12", "tag": "30"}, "12:30"),
        ({"repository": "r@sha256:abc"}, "r@sha256:abc"),
        ({"repository": "host:5000/r@sha256:abc", "tag": "7"}, "host:5000/r@sha256:abc"),
        ({"repository": "r", "tag": "7@sha256:abc"}, "r:7@sha256:abc"),
    ],
)
def test_an_image_has_a_tag_unless_it_has_a_digest(image: dict[str, Any], expected: str) -> None:
    release = render({**REQUIRED, "image": image})
    for component in release.workloads:
        pod = release.pod(component)["spec"]
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            assert container["image"] == expected


def all_labels(value: Any) -> Iterator[dict[str, Any]]:
    """Yield whatever is a set of labels, or selects by one."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key in {"labels", "matchLabels"} or (
                key == "selector" and "matchLabels" not in inner
            ):
                yield inner
            yield from all_labels(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from all_labels(inner)


ROOT = CHART.parents[1]
PAGE = (ROOT / "docs" / "kubernetes.md").read_text()
HELM = re.findall(r"^helm (?:template|install) .*$", PAGE, re.MULTILINE)
EMULATED = "charts/headway/values-emulated.yaml"


def my_values() -> dict[str, Any]:
    (block,) = re.findall(r"`my-values.yaml`:\n.*?```yaml\n(.*?)```", PAGE, re.DOTALL)
    values: dict[str, Any] = yaml.safe_load(block)
    return values


def helm(command: str) -> Rendered:
    """Render what a `helm template` or `helm install` of the page would."""
    _, _, name, chart, *options = shlex.split(command)
    assert ROOT / chart == CHART
    given = dict(zip(options[::2], options[1::2], strict=True))
    files = {"": {}, "my-values.yaml": my_values(), EMULATED: VALUES["emulated"]}
    values = dict(files[given.pop("--values", "")])
    values |= helm_python.parse_set_string(given.pop("--set", ""))
    namespace = given.pop("--namespace", "default")
    assert not given
    return render(values, name, namespace)


@pytest.mark.parametrize("command", HELM)
def test_the_page_s_commands_install_a_deployment(command: str) -> None:
    model = "/opt/smollm2" if EMULATED in command else "Qwen/Qwen3-14B"
    assert helm(command).deployment.model == model


def test_a_laptop_s_cluster_runs_emulated_engines() -> None:
    deployment = helm(HELM[0]).deployment
    roles = [instance.role for instance in deployment.instances]
    assert roles == ["prefill", "decode", "decode"]
    assert emulated_engine(deployment.engine).kv_blocks, "its machine is known"


def test_what_the_page_then_uses_is_there() -> None:
    release = helm(next(one for one in HELM if "my-values.yaml" in one))
    assert "port-forward service/headway 8000:80" in PAGE
    (port,) = release.of_kind("Service")["headway"]["spec"]["ports"]
    assert port["port"] == 80
    (rule,) = release.of_kind("NetworkPolicy")["headway-proxy"]["spec"]["ingress"]
    assert {"podSelector": {"matchLabels": {"headway-client": "true"}}} in rule["from"]
    deployments = re.findall(r" deploy(?:ment)?/(?!kubernetes-|docker/)([\w-]+)", PAGE)
    assert set(deployments) == set(release.of_kind("Deployment"))
    engines = {instance.name for instance in release.deployment.instances}
    assert set(re.findall(r"headway-\w+-\d+", PAGE)) <= engines
    mine = my_values()
    named = {mine["keys"]["existingSecret"], mine["apiKey"]["existingSecret"]}
    assert set(re.findall(r"create secret generic ([\w-]+)", PAGE)) == named


def test_every_value_that_the_page_names_exists() -> None:
    with helm_python.Chart.load(CHART) as chart:
        known = set(paths(chart.values))
    top = "|".join(sorted({path.split(".")[0] for path in known}))
    free = r"(?:engine|routing|migration|proxy\.options)\."  # Headway's own
    named = set(re.findall(rf"`((?:{top})(?:\.\w+)+)", PAGE))
    assert len(named) > 10
    assert {name for name in named if not re.match(free, name)} <= known


def paths(values: dict[str, Any], above: str = "") -> Iterator[str]:
    for key, value in values.items():
        yield above + key
        if isinstance(value, dict):
            yield from paths(value, f"{above}{key}.")


CONFIG = ROOT / "deploy" / "prometheus" / "kubernetes.yml"
JOBS = {job["job_name"]: job for job in yaml.safe_load(CONFIG.read_text())["scrape_configs"]}


def discovered(release: Rendered) -> Iterator[dict[str, str]]:
    """What Prometheus knows of each port of each pod, by its own names."""
    for component, workload in release.workloads.items():
        pod = release.pod(component)
        labels = {
            f"__meta_kubernetes_pod_label_{re.sub(r'[^a-zA-Z0-9_]', '_', name)}": value
            for name, value in pod["metadata"]["labels"].items()
        }
        for i in range(workload["spec"]["replicas"]):
            for port in release.container(component)["ports"]:
                yield labels | {
                    "__meta_kubernetes_pod_name": f"{workload['metadata']['name']}-{i}",
                    "__meta_kubernetes_pod_container_port_name": port["name"],
                }


def relabelled(job: dict[str, Any], target: dict[str, str]) -> dict[str, str] | None:
    """The labels of a target that a job scrapes; None if it does not."""
    found = {}
    for rule in job["relabel_configs"]:
        value = ";".join(target[label] for label in rule["source_labels"])
        if rule.get("action") == "keep":
            if not re.fullmatch(rule["regex"], value):
                return None
        else:
            found[rule["target_label"]] = value
    return found


@pytest.mark.parametrize("which", VALUES)
def test_prometheus_finds_the_proxies_the_coordinator_and_every_engine(which: str) -> None:
    release = rendered(which)
    scraped = {
        name: [labels for target in discovered(release) if (labels := relabelled(job, target))]
        for name, job in JOBS.items()
    }
    proxies = release.workloads["proxy"]["spec"]["replicas"]
    coordinators = 0 if release.deployment.coordinator is None else 1
    assert scraped["headway"] == [{"deployment": "headway"}] * (proxies + coordinators)
    assert scraped["vllm"] == [
        {"deployment": "headway", "role": one.role, "instance_name": one.name}
        for one in release.deployment.instances
    ]


def test_service_monitors_find_what_that_configuration_does() -> None:
    assert rendered("proxies").of_kind("ServiceMonitor") == {}
    mine = {"serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}}}
    release, found = rendered("proxies", metrics=mine), {}
    for monitor in release.of_kind("ServiceMonitor").values():
        assert monitor["metadata"]["labels"]["release"] == "prometheus"
        (endpoint,) = monitor["spec"]["endpoints"]
        job, *rules = endpoint["relabelings"]
        assert [
            {"source_labels": r["sourceLabels"], "target_label": r["targetLabel"]} for r in rules
        ] == JOBS[job["replacement"]]["relabel_configs"][1:]
        found[job["replacement"]] = {
            service["metadata"]["labels"]["app.kubernetes.io/component"]
            for service in release.of_kind("Service").values()
            if matches(monitor["spec"]["selector"], service["metadata"]["labels"])
            and endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]
        }
    assert found == {"headway": {"proxy", "coordinator"}, "vllm": {"prefill", "decode"}}
