"""Predictors on the Hub: pushed with a full card, pulled, and refused."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from checked_commands import exit_status
from hub_stand_in import StandIn, hub_stand_in, use_hub
from huggingface_hub import ModelCard

from data_collection.files import find_shipped
from predictor import load_predictor
from predictor.models.checkpoint_card import checkpoint_card
from predictor.prompts.prompt_predictor import PromptPredictor

NAME, KEY = "me/predictor", ("model", "me/predictor")
SURVIVAL = "checkpoints/smollm2-135m-instruct"
STAR = "checkpoints/smollm2-135m-instruct-star"
PROMPT = "checkpoints/smollm2-135m-instruct-prompt"
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    with hub_stand_in() as stand_in:
        use_hub(stand_in.url, monkeypatch)
        yield stand_in


def refusal(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    """Return the one line that a command is refused with."""
    capsys.readouterr()
    assert exit_status("train", *words) == 1
    line, *more = capsys.readouterr().err.splitlines()
    assert not more
    return line


@pytest.mark.parametrize("checkpoint", [SURVIVAL, STAR, PROMPT])
def test_what_was_pushed_is_pulled_and_loads(
    hub: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str], checkpoint: str
) -> None:
    source, out = find_shipped(checkpoint), tmp_path / "out"
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    (copy / "training").mkdir()
    (copy / "training" / "last.ckpt").write_bytes(b"an epoch")
    (copy / "study.db").write_bytes(b"mine")
    assert exit_status("train", "push", copy, NAME) == 0
    printed = capsys.readouterr().out
    assert f"the private repository {NAME} (model). Read by you" in printed
    assert ("a shared system prompt" in printed) == (checkpoint == PROMPT)
    assert hub.repositories[KEY].private
    assert exit_status("train", "pull", NAME, out) == 0
    assert f"predictor that reads {'prompts' if checkpoint == PROMPT else 'hidden states'}" in (
        capsys.readouterr().out
    )
    assert {path.name for path in out.iterdir()} == {path.name for path in source.iterdir()}
    for path in source.iterdir():
        if path.name != "README.md":
            assert (out / path.name).read_bytes() == path.read_bytes()
    if checkpoint == PROMPT:
        assert PromptPredictor.load(str(out)).expected_tokens("Hello!") > 0
    else:
        assert load_predictor(str(out)).serving_model == MODEL
    card = (out / "README.md").read_text()
    assert f"headway train pull {NAME} runs/predictor" in card and "this folder" not in card


def test_the_card_says_what_the_hub_shows(hub: StandIn) -> None:
    words = ("--license", "mit", "--dataset", "me/lengths")
    assert exit_status("train", "push", find_shipped(SURVIVAL), NAME, *words) == 0
    data = ModelCard(hub.repositories[KEY].files["README.md"].decode()).data
    assert (data.license, data.library_name, data.base_model) == ("mit", "headway", MODEL)
    assert data.datasets == ["me/lengths"]
    assert data.tags == ["length-prediction", "llm-serving"]
    assert data.metrics == ["mae", "mae_ended", "ibs", "concordance", "pinball", "nll"]
    metrics = json.loads((find_shipped(SURVIVAL) / "metrics.json").read_text())
    results = {(one.dataset_split, one.metric_type): one.metric_value for one in data.eval_results}
    assert results["test", "ibs"] == pytest.approx(metrics["ibs"], abs=1e-6)
    assert results["test", "mae"] == pytest.approx(metrics["mae"], abs=1e-6)
    assert ("validation", "nll") in results
    assert {one.dataset_type for one in data.eval_results} == {"me/lengths"}


def test_a_card_invents_no_results_and_no_base_model() -> None:
    config = load_predictor(SURVIVAL).config() | {"model": "my-folder", "provenance": None}
    data = ModelCard(checkpoint_card(config, {"mae": "many", "ibs": float("nan")})).data
    assert data.eval_results is None and data.base_model is None and data.datasets is None


def test_a_folder_without_a_whole_checkpoint_is_not_pushed(
    hub: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "absent: no such folder" in refusal(capsys, "push", tmp_path / "absent", NAME)
    (tmp_path / "empty").mkdir()
    assert "no config.json" in refusal(capsys, "push", tmp_path / "empty", NAME)
    copy = tmp_path / "copy"
    shutil.copytree(find_shipped(PROMPT), copy)
    (copy / "embedding.safetensors").write_bytes(b"damaged")
    assert "a damaged prompt embedding" in refusal(capsys, "push", copy, NAME)
    (copy / "model.safetensors").write_bytes(b"damaged")
    assert "cannot be loaded" in refusal(capsys, "push", copy, NAME)
    for words in ((NAME, "--dataset", "lengths"), ("predictor",)):
        assert "write OWNER/NAME" in refusal(capsys, "push", find_shipped(SURVIVAL), *words)
    assert not hub.requests


def test_damaged_metrics_are_named(
    hub: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(find_shipped(SURVIVAL), tmp_path / "copy")
    for text in ("{", "[]"):
        (tmp_path / "copy" / "metrics.json").write_text(text)
        assert "metrics.json: not" in refusal(capsys, "push", tmp_path / "copy", NAME)
    assert not hub.requests


def test_a_model_of_another_kind_is_refused(
    hub: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = {"config.json": b'{"kind": "llama"}', "modeling.py": b"raise SystemExit"}
    hub.add("model", NAME, theirs, private=True)
    for words in (("push", find_shipped(SURVIVAL), NAME), ("pull", NAME, tmp_path / "out")):
        assert "not a predictor of Headway: no model.safetensors" in refusal(capsys, *words)
    hub.repositories[KEY].files["model.safetensors"] = b"weights"
    message = refusal(capsys, "pull", NAME, tmp_path / "out")
    assert "damaged, nothing was kept" in message and "config.json says kind 'llama'" in message
    assert not list(tmp_path.glob("*out*"))


def test_a_dataset_is_not_pulled_as_a_predictor(
    hub: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add("dataset", NAME, {"data/rows-0.parquet": b""})
    assert "no such model" in refusal(capsys, "pull", NAME, tmp_path / "out")
