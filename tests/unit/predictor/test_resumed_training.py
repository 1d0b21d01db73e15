"""Training that goes on from where it was, wherever its folders are now."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from memoryless_dataset import record_memoryless
from safetensors.torch import load_file
from training_runs import FEW_ROWS, SURVIVAL, fit

from rescheduler.commands.command_line import main

SMALL = (*SURVIVAL, *FEW_ROWS[:-1])
UNBEATABLE = -1.0
"""A likelihood that no epoch reaches."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a dataset, ``data``, and two epochs of training on it, ``run``."""
    folder = tmp_path_factory.mktemp("trained")
    record_memoryless(folder / "data", n_requests=100)
    fit("survival", folder / "data", folder / "run", *SMALL, "--trainer.max_epochs=2")
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    """A copy of it, elsewhere: nothing is where the checkpoints say."""
    shutil.copytree(trained, tmp_path / "moved")
    return tmp_path / "moved"


def go_on(folder: Path, out: Path, checkpoint: str = "run/training/last.ckpt") -> dict[str, Any]:
    """Train up to the fourth epoch and return the provenance of what was exported."""
    options = (*SMALL, "--trainer.max_epochs=4", "--ckpt-path", str(folder / checkpoint))
    fit("survival", folder / "data", out, *options)
    provenance: dict[str, Any] = json.loads((out / "config.json").read_text())["provenance"]
    return provenance


def best_is_unbeatable(last: Path) -> None:
    """Let the best epoch so far be better than all that follow."""
    checkpoint = torch.load(last, weights_only=False)
    (kept,) = (s for name, s in checkpoint["callbacks"].items() if name.startswith("Model"))
    kept["best_model_score"] = kept["kth_value"] = torch.tensor(UNBEATABLE)
    kept["best_k_models"] = dict.fromkeys(kept["best_k_models"], torch.tensor(UNBEATABLE))
    torch.save(checkpoint, last)


def epochs(out: Path) -> list[int]:
    (newest,) = sorted((out / "logs" / "csv").glob("version_*/metrics.csv"))[-1:]
    head, *lines = newest.read_text().splitlines()
    return sorted({int(line.split(",")[head.split(",").index("epoch")]) for line in lines})


@pytest.mark.parametrize("out", ["run", "other"])
def test_two_more_epochs_after_everything_was_moved(folder: Path, out: str) -> None:
    provenance = go_on(folder, folder / out)
    assert epochs(folder / out) == [2, 3]
    assert provenance["epochs"] == 4
    training = folder / out / "training"
    last = torch.load(training / "last.ckpt", weights_only=False)
    assert last["epoch"] == 3, "last.ckpt is the newest"
    assert len(list(training.glob("*.ckpt"))) == 2, "and beside it is the best"


@pytest.mark.parametrize("out", ["run", "other"])
def test_the_best_epoch_of_before_stays_the_best_until_it_is_beaten(folder: Path, out: str) -> None:
    best_is_unbeatable(folder / "run/training/last.ckpt")
    (first,) = (folder / "run/training").glob("epoch=*.ckpt")
    weights = torch.load(first, weights_only=False)["state_dict"]
    assert go_on(folder, folder / out)["val_nll"] == UNBEATABLE
    exported = load_file(folder / out / "model.safetensors")
    torch.testing.assert_close(exported["network.0.weight"], weights["predictor.network.0.weight"])
    last = torch.load(folder / out / "training/last.ckpt", weights_only=False)
    assert last["global_step"] == 2 * torch.load(first, weights_only=False)["global_step"]
    if out == "other":
        shutil.rmtree(folder / "run")
        assert go_on(folder, folder / out, "other/training/last.ckpt")["val_nll"] == UNBEATABLE


def test_where_only_last_is_left_the_best_from_there_on_is_taken(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    best_is_unbeatable(folder / "run/training/last.ckpt")
    (first,) = (folder / "run/training").glob("epoch=*.ckpt")
    first.unlink()
    assert go_on(folder, folder / "run")["val_nll"] > 0
    assert f"{first}: the best epoch until now is missing" in capsys.readouterr().err


def test_a_training_in_a_folder_that_has_one_leaves_the_newest_as_last(folder: Path) -> None:
    options = (*SMALL, "--trainer.max_epochs=1")
    fit("survival", folder / "data", folder / "run", *options)
    assert torch.load(folder / "run/training/last.ckpt", weights_only=False)["epoch"] == 0


@pytest.mark.parametrize("content", [None, b"", b"not a checkpoint", b"PK\x03\x04damaged"])
def test_a_checkpoint_that_cannot_be_read_is_named(
    folder: Path, content: bytes | None, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "damaged.ckpt"
    if content is not None:
        path.write_bytes(content)
    arguments = ["train", "fit", "--config", "survival", "--data.dataset", str(folder / "data")]
    arguments += ["--out", str(folder / "run"), "--ckpt-path", str(path), *SMALL]
    assert main(arguments) in (1, 2)
    weights = folder / "run" / "model.safetensors"
    said = capsys.readouterr().err
    assert main([*arguments, "--ckpt-path", str(weights)]) in (1, 2)
    assert f"{weights}: not a whole checkpoint" in capsys.readouterr().err
    assert "damaged.ckpt" in said.strip().splitlines()[-1] and "Traceback" not in said, said
