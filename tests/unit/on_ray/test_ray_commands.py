"""Mistakes with `headway launch --on ray` and its companions, each in one line."""

import sys
from pathlib import Path

import pytest
import yaml
from forked_vllm import free_port

from rescheduler.commands.command_line import main

ROOT = Path(__file__).parents[3]
VERBS = [["launch", "--on", "ray"], ["status"], ["restart"], ["stop"]]


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "deployment.yaml"
    ray = {"instances": [{"role": "decode"}], "address": f"127.0.0.2:{free_port()}"}
    path.write_text(yaml.safe_dump({"model": "smollm2", "ray": ray}))
    return str(path)


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb[0])
def test_without_ray_it_is_said_how_to_get_it(
    verb: list[str],
    config: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main([*verb, "--config", config]) == 1
    assert "pip install 'headway[ray]'" in capsys.readouterr().err


@pytest.mark.filterwarnings(r"ignore:::ray(\..*)?$")
@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb[0])
def test_without_a_cluster_it_is_said_how_to_start_one(
    verb: list[str], config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*verb, "--config", config]) == 1
    error = capsys.readouterr().err
    assert "no Ray cluster at '127.0.0.2:" in error and "ray start --head" in error


@pytest.mark.parametrize("verb", [["serve"], ["coordinator"], ["drain", "decode-0"]], ids=repr)
def test_what_ray_starts_is_not_started_by_hand(
    verb: list[str], config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*verb, "--config", config]) == 1
    assert "`headway launch --on ray` starts its engines" in capsys.readouterr().err


def test_counts_need_ray_and_addresses_need_none(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", "--config", config]) == 1
    assert "use --on ray" in capsys.readouterr().err
    local = str(ROOT / "configs/serve/local-pd.yaml")
    for verb in VERBS:
        assert main([*verb, "--config", local]) == 1
        assert "section" in capsys.readouterr().err
    assert main(["launch", "--on", "ray", "--serve", "--config", config]) == 1
    assert "--serve, --only and --at-once are not for --on ray" in capsys.readouterr().err
