"""The page about Kubernetes: its values and commands are ones that Helm accepts."""

import re
import shlex
from collections.abc import Iterator
from typing import Any

import helm_python
import pytest
import yaml
from rendered_chart import CHART, Rendered, render

ROOT = CHART.parents[1]
PAGE = (ROOT / "docs" / "kubernetes.md").read_text()
HELM = re.findall(r"^helm .*$", PAGE, re.MULTILINE)


def my_values() -> dict[str, Any]:
    (block,) = re.findall(r"`my-values.yaml`:\n.*?```yaml\n(.*?)```", PAGE, re.DOTALL)
    values: dict[str, Any] = yaml.safe_load(block)
    return values


def helm(command: str) -> Rendered:
    """Render what a `helm template` or `helm install` of the page would."""
    _, verb, name, chart, *options = shlex.split(command)
    assert verb in ("template", "install")
    assert ROOT / chart == CHART
    values: dict[str, Any] = {}
    namespace = "default"
    for option, value in zip(options[::2], options[1::2], strict=True):
        if option == "--values":
            assert value == "my-values.yaml"
            values |= my_values()
        elif option == "--set":
            values |= helm_python.parse_set_string(value)
        else:
            assert option == "--namespace"
            namespace = value
    return render(values, name, namespace)


@pytest.mark.parametrize("command", HELM)
def test_the_page_s_commands_install_a_deployment(command: str) -> None:
    assert helm(command).deployment.model == "Qwen/Qwen3-14B"


def test_what_the_page_then_uses_is_there() -> None:
    release = helm(HELM[0])
    assert "port-forward service/headway 8000:80" in PAGE
    (port,) = release.of_kind("Service")["headway"]["spec"]["ports"]
    assert port["port"] == 80
    (rule,) = release.of_kind("NetworkPolicy")["headway-proxy"]["spec"]["ingress"]
    assert {"podSelector": {"matchLabels": {"headway-client": "true"}}} in rule["from"]
    deployments = re.findall(r" deploy(?:ment)?/(?!kubernetes-)([\w-]+)", PAGE)
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
