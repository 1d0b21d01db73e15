"""The names that the Helm chart gives, whatever the release and the values are called."""

import re
from collections.abc import Iterator
from typing import Any

import kubernetes_validate
import pytest
from rendered_chart import REQUIRED, VALUES, Rendered, render

DNS_1035_LABEL = "[a-z]([-a-z0-9]*[a-z0-9])?"
NOT_STRINGS = ["123", "true", "on", "null", "0x10", "1.5", "1e3"]
"""What YAML reads as something else unless it is quoted."""


@pytest.mark.parametrize(
    ("name", "override"),
    [
        *((name, "") for name in [*NOT_STRINGS, "llm.v2", "a." * 26 + "a", "y" + "-" * 51 + "y"]),
        *(("llm", override) for override in ["123", "true", "1.5", "my.app", "x" * 63]),
        ("123", "123"),
        ("true", "true"),
        ("1" * 53, "x" * 63),
    ],
)
def test_any_release_has_names_that_kubernetes_takes(name: str, override: str) -> None:
    release = render({**REQUIRED, "nameOverride": override}, name=name)
    for manifest in release.objects:
        kubernetes_validate.validate(manifest, "1.29", strict=True)
        assert re.fullmatch(DNS_1035_LABEL, manifest["metadata"]["name"])
        assert len(manifest["metadata"]["name"]) <= 63
    for labels in all_labels(release.objects):
        assert all(isinstance(value, str) for value in labels.values())
        assert labels.get("app.kubernetes.io/instance", name) == name
        assert labels.get("app.kubernetes.io/name", override or "headway") == (
            override or "headway"
        )
    assert_engines_are_called_like_their_pods(release)


def test_a_name_changes_no_more_than_it_has_to() -> None:
    assert "llm-headway" in render(REQUIRED, name="llm").of_kind("ConfigMap")
    assert "llm-v2-headway" in render(REQUIRED, name="llm.v2").of_kind("ConfigMap")
    assert "h-1e3-headway" in render(REQUIRED, name="1e3").of_kind("ConfigMap")


@pytest.mark.parametrize("name", NOT_STRINGS)
def test_names_of_other_objects_are_strings(name: str) -> None:
    values = REQUIRED | VALUES["everything"]
    for secret in ("apiKey", "huggingFaceToken"):
        values[secret] = {"existingSecret": name, "key": name}
    values["keys"] = {"existingSecret": name}
    values["modelCache"] = {"existingClaim": name}
    values["engines"] = {"runtimeClassName": name, "priorityClassName": name}
    values["proxy"] = {"priorityClassName": name}
    values["serviceAccountName"] = name
    release = render(values)
    for manifest in release.objects:
        kubernetes_validate.validate(manifest, "1.29", strict=True)
    for component in release.workloads:
        pod = release.pod(component)["spec"]
        assert pod["serviceAccountName"] == pod["priorityClassName"] == name
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert volumes["keys"]["secret"]["secretName"] == name
        assert volumes["models"]["persistentVolumeClaim"]["claimName"] == name
        variables = {v["name"]: v for v in release.container(component)["env"]}
        for variable in ("VLLM_API_KEY", "HF_TOKEN"):
            reference = variables[variable]["valueFrom"]["secretKeyRef"]
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


def assert_engines_are_called_like_their_pods(release: Rendered) -> None:
    """A proxy finds an engine by the name of its pod and of its Service."""
    for instance in release.deployment.instances:
        workload = release.workloads[instance.role]
        assert instance.name == f"{workload['metadata']['name']}-{instance.name[-1]}"
        service = workload["spec"]["serviceName"]
        assert instance.host == f"{instance.name}.{service}.prod.svc.cluster.local"
        selector = release.of_kind("Service")[service]["spec"]["selector"]
        assert release.selected({"matchLabels": selector}) == {instance.role}
    for component in release.workloads:
        volumes = {v["name"]: v for v in release.pod(component)["spec"]["volumes"]}
        assert volumes["deployment"]["configMap"]["name"] in release.of_kind("ConfigMap")


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
