"""Mistakes with `headway ray` and its members, each in one line."""

import sys
from pathlib import Path

import pytest
import yaml
from forked_vllm import free_port

from rescheduler.commands.command_line import main

VERBS = ["launch", "status", "restart", "stop"]


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "deployment.yaml"
    ray = {"instances": [{"role": "decode"}], "address": f"127.0.0.2:{free_port()}"}
    path.write_text(yaml.safe_dump({"model": "smollm2", "ray": ray}))
    return str(path)


@pytest.mark.parametrize("verb", VERBS)
def test_without_ray_it_is_said_how_to_get_it(
    verb: str,
    config: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["ray", verb, "--config", config]) == 1
    assert "pip install 'headway[ray]'" in capsys.readouterr().err


@pytest.mark.filterwarnings(r"ignore:::ray(\..*)?$")
@pytest.mark.parametrize("verb", VERBS)
def test_without_a_cluster_it_is_said_how_to_start_one(
    verb: str, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ray", verb, "--config", config]) == 1
    error = capsys.readouterr().err
    assert "no Ray cluster at '127.0.0.2:" in error and "ray start --head" in error


@pytest.mark.parametrize(
    "verb", [["launch"], ["serve"], ["coordinator"], ["drain", "decode-0"]], ids=repr
)
def test_what_ray_starts_is_not_started_by_hand(
    verb: list[str], config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*verb, "--config", config]) == 1
    assert "`headway ray launch` starts its engines" in capsys.readouterr().err


@pytest.mark.parametrize("verb", VERBS)
def test_a_deployment_with_addresses_is_not_for_ray(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ray", verb, "--config", "local-pd"]) == 1
    assert "section" in capsys.readouterr().err
