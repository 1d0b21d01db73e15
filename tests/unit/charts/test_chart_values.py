"""The values of the Helm chart: which are refused, and that they are those Headway reads."""

import json
import tomllib
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml
from rendered_chart import CHART, REQUIRED, VALUES, render, rendered

from deploy.json_text import json_text
from deploy.values_schema import SCHEMA, with_options


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
        (
            {"engines": {"extraEnv": [{"name": "A", "value": 1}]}},
            "at '/engines/extraEnv/0/value': got number, want string",
        ),
        ({"proxy": {"extraEnv": [{"name": "A", "valeu": ""}]}}, "additional properties 'valeu'"),
        ({**REQUIRED, "migration": {"name": "star"}}, "migration: .* keys.existingSecret"),
        ({**REQUIRED, "proxy": {"replicas": 2}}, "proxy.replicas: .* keys.existingSecret"),
        ({"coordinator": {"options": {"port": 80}}}, "additional properties 'port' not allowed"),
        (
            {**REQUIRED, "engine": {"batching": {"admission": True}}},
            "engine.batching: .*set prefill.replicas to 0",
        ),
        (
            {**REQUIRED, "engine": {"emulate": {"barrier": True}}},
            "engine.emulate.barrier: of engines on one machine",
        ),
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
    for missing in ("keys.existingSecret", "apiKey.existingSecret"):
        assert missing in defaults
        assert missing not in all_set
