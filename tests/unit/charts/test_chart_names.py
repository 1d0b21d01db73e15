"""The names that the Helm chart gives, whatever the release and the values are called."""

import re
from collections.abc import Iterator
from typing import Any

import kubernetes_validate
import pytest
from rendered_chart import REQUIRED, VALUES, render

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
