"""What Helm makes of the chart, and what its objects mean to each other."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import helm_python
import yaml

from rescheduler.engines.deployment import Deployment

CHART = Path(__file__).parents[3] / "charts" / "headway"
REQUIRED: dict[str, Any] = {"image": {"repository": "registry.example/headway"}, "model": "me/mine"}
Object = dict[str, Any]

VALUES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "everything": {
        "imagePullSecrets": [{"name": "registry"}],
        "servedModelName": "mine",
        "keys": {"existingSecret": "headway-keys"},
        "apiKey": {"existingSecret": "headway-api-key"},
        "huggingFaceToken": {"existingSecret": "hub", "key": "hf"},
        "routing": {"name": "headroom"},
        "migration": {"name": "survival", "bandwidth": 3.1e9, "kv_bytes_per_token": 1_638_400},
        "engine": {
            "max_model_len": 1_048_576,
            "checkpoint": "/models/survival",
            "arguments": ["--gpu-memory-utilization", "0.9"],
            "environment": {"UCX_TLS": "all"},
        },
        "modelCache": {"existingClaim": "models"},
        "engines": {
            "extraEnv": [{"name": "NCCL_DEBUG", "value": "INFO"}],
            "podAnnotations": {"a": "b"},
            "runtimeClassName": "nvidia",
            "priorityClassName": "high",
            "updateStrategy": "OnDelete",
        },
        "prefill": {
            "replicas": 2,
            "nodeSelector": {"gpu": "h100"},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        },
        "decode": {
            "replicas": 3,
            "gpus": 2,
            "arguments": ["--swap-space", "0"],
            "affinity": {"nodeAffinity": {}},
            "podDisruptionBudget": {"maxUnavailable": "34%"},
        },
        "proxy": {
            "options": {"shutdown_seconds": 60.5, "pool": 64},
            "service": {"type": "LoadBalancer", "annotations": {"internal": "true"}},
            "extraEnv": [{"name": "A", "value": "b"}],
            "podAnnotations": {"c": "d"},
        },
        "networkPolicy": {"engineMonitoring": [{"namespaceSelector": {}}]},
        "serviceAccountName": "headway",
    },
    "replicas": {"prefill": {"replicas": 0}, "decode": {"replicas": 2}},
    "emulated": yaml.safe_load((CHART / "values-emulated.yaml").read_text()),
    "cpu": {"prefill": {"gpus": 0}, "decode": {"gpus": 0}, "engine": {"dtype": "float32"}},
    "proxies": {
        "keys": {"existingSecret": "headway-keys"},
        "migration": {"name": "star", "prediction": False},
        "proxy": {"replicas": 3},
        "coordinator": {
            "options": {"silent_seconds": 3},
            "extraEnv": [{"name": "A", "value": "b"}],
            "podAnnotations": {"e": "f"},
            "nodeSelector": {"pool": "system"},
        },
    },
    "keys without forecasts": {"keys": {"existingSecret": "headway-keys"}},
    "open": {
        "networkPolicy": {"enabled": False},
        **{part: {"podDisruptionBudget": {"enabled": False}} for part in ("decode", "proxy")},
        "podSecurityContext": {"runAsUser": None, "runAsGroup": None, "fsGroup": None},
    },
}
"""Sets of values, less `REQUIRED`."""


@dataclass(frozen=True)
class Rendered:
    """A rendered release."""

    objects: list[Object]  # its manifests
    notes: str  # what an installation prints

    def of_kind(self, kind: str) -> dict[str, Object]:
        """Return the objects of a kind by their names."""
        return {o["metadata"]["name"]: o for o in self.objects if o["kind"] == kind}

    @cached_property
    def workloads(self) -> dict[str, Object]:
        """The engines' and the coordinator's StatefulSets, and the proxies' Deployment."""
        found = {**self.of_kind("StatefulSet"), **self.of_kind("Deployment")}
        return {o["metadata"]["labels"]["app.kubernetes.io/component"]: o for o in found.values()}

    @cached_property
    def deployment(self) -> Deployment:
        """The deployment file in the ConfigMap, as Headway reads it."""
        (config,) = self.of_kind("ConfigMap").values()
        return Deployment.from_values(yaml.safe_load(config["data"]["deployment.yaml"]))

    def pod(self, component: str) -> Object:
        """Return the pod template of a component."""
        template: Object = self.workloads[component]["spec"]["template"]
        return template

    def container(self, component: str) -> Object:
        """Return the one container of a component's pods."""
        (container,) = self.pod(component)["spec"]["containers"]
        return container

    def volumes(self, component: str) -> dict[str, Object]:
        """Return the volumes of a component's pods by their names."""
        return {volume["name"]: volume for volume in self.pod(component)["spec"]["volumes"]}

    def variables(self, component: str) -> dict[str, Object]:
        """Return the environment of a component's container by the variables' names."""
        return {variable["name"]: variable for variable in self.container(component)["env"]}

    def reaching(self, rule: Object) -> set[str]:
        """Return the components that a rule of a NetworkPolicy lets in, which lets in no others."""
        assert all(list(peer) == ["podSelector"] for peer in rule["from"])
        return set().union(*(self.selected(peer["podSelector"]) for peer in rule["from"]))

    def check_engines_are_called_like_their_pods(self) -> None:
        """A proxy finds an engine by the name of its pod and of its Service."""
        for instance in self.deployment.instances:
            workload = self.workloads[instance.role]
            name, _, number = instance.name.rpartition("-")
            assert (name, number.isdigit()) == (workload["metadata"]["name"], True)
            service = workload["spec"]["serviceName"]
            assert instance.host == f"{instance.name}.{service}.prod.svc.cluster.local"
            selector = self.of_kind("Service")[service]["spec"]["selector"]
            assert self.selected({"matchLabels": selector}) == {instance.role}
        for component in self.workloads:
            config = self.volumes(component)["deployment"]["configMap"]
            assert config["name"] in self.of_kind("ConfigMap")

    def selected(self, selector: Object) -> set[str]:
        """Return the components whose pods a label selector selects."""
        return {
            component
            for component in self.workloads
            if matches(selector, self.pod(component)["metadata"]["labels"])
        }


def render(
    values: dict[str, Any] | None = None, name: str = "headway", namespace: str = "prod"
) -> Rendered:
    """Return what `helm install NAME charts/headway` would create.

    Raises:
        HelmError: as `helm` refuses the values.
    """
    with helm_python.Chart.load(CHART) as chart:
        chart.validate_schema(values or {})
        files = chart.render(values or {}, name=name, namespace=namespace)
    notes = next(text for file, text in files.items() if file.endswith("NOTES.txt"))
    manifests = [text for file, text in files.items() if file.endswith(".yaml")]
    objects = [o for text in manifests for o in yaml.safe_load_all(text) if o is not None]
    return Rendered(objects, notes)


def rendered(which: str, **values: Any) -> Rendered:
    """Return the release for a set of `VALUES`, with others in their place."""
    return render(REQUIRED | VALUES[which] | values)


def matches(selector: Object, labels: dict[str, str]) -> bool:
    """Return whether a label selector selects what has these labels."""
    expressions = selector.get("matchExpressions", [])
    assert all(expression["operator"] == "In" for expression in expressions)
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(expression["key"]) in expression["values"] for expression in expressions
    )
