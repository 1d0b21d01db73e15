"""The predictor, its training and its checkpoint, on a small dataset of the real writer."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from recorded_dataset import D, new_session, record

from data_collection.dataset_schema import DatasetError, read_sessions
from predictor import CheckpointError, ModelMismatchError, RemainingLengthMLP
from predictor.row_table import load_rows
from predictor.rows_data_module import RowsDataModule
from predictor.train_command import train
from rescheduler.command_line import main


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("predictor") / "dataset"
    record(folder)
    return folder


@pytest.fixture(scope="module")
def checkpoint(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("checkpoint") / "star"
    fit(dataset, out)
    return out


def fit(dataset: Path, out: Path, *options: str) -> None:
    arguments = ["fit", "--data.dataset", str(dataset), "--out", str(out)]
    arguments += ["--model.widths", "[32, 16]", "--trainer.max_epochs", "4"]
    arguments += ["--trainer.enable_progress_bar", "false", "--trainer.accelerator", "cpu"]
    train([*arguments, *options])


def test_the_default_is_the_papers_mlp() -> None:
    predictor = RemainingLengthMLP(model="m", model_revision="r", hidden_size=3584, k=20)
    shapes = [tuple(p.shape) for name, p in predictor.named_parameters() if "weight" in name]
    assert shapes == [(2048, 3584), (512, 2048), (64, 512), (1, 64)]
    # Table 1 of STAR says 8.4 M parameters.
    assert sum(p.numel() for p in predictor.parameters()) == pytest.approx(8.4e6, rel=0.01)
    assert isinstance(predictor.network[1], torch.nn.ReLU)


def test_training_writes_a_checkpoint_with_its_card(dataset: Path, checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    session = read_sessions(dataset)[0]
    assert (config["model"], config["model_revision"]) == (session.model, session.revision)
    assert (config["hidden_size"], config["k"], config["widths"]) == (D, session.k, [32, 16])
    assert config["provenance"]["rows"]["censored, left out"] > 0
    assert config["trained_generated_tokens"][0] == 0
    card = (checkpoint / "README.md").read_text()
    assert session.model in card and f"{D}→32→16→1" in card and "validation_mae" in card
    assert (checkpoint / "model.safetensors").is_file()
    assert list((checkpoint / "logs").rglob("metrics.csv"))
    assert list((checkpoint / "logs").rglob("events.out.tfevents*"))


def test_a_checkpoint_predicts_the_same_after_a_round_trip(
    dataset: Path, checkpoint: Path, tmp_path: Path
) -> None:
    predictor = RemainingLengthMLP.load(str(checkpoint))
    vectors = load_rows(dataset).vectors()
    predicted = predictor.predict(vectors)
    assert predicted.shape == (len(vectors),)
    assert (predicted >= 0).all()
    predictor.save_pretrained(tmp_path / "copy")
    again = RemainingLengthMLP.load(str(tmp_path / "copy"))
    np.testing.assert_array_equal(again.predict(vectors), predicted)
    assert again.config() == predictor.config()


def test_training_is_deterministic_given_the_seed(
    dataset: Path, checkpoint: Path, tmp_path: Path
) -> None:
    fit(dataset, tmp_path / "again")
    vectors = load_rows(dataset).vectors()
    first, second = (
        RemainingLengthMLP.load(str(folder)).predict(vectors)
        for folder in (checkpoint, tmp_path / "again")
    )
    np.testing.assert_array_equal(first, second)


def test_the_split_leaves_out_and_counts_censored_rows(dataset: Path) -> None:
    data = RowsDataModule(dataset)
    data.setup("fit")
    table = load_rows(dataset)
    assert data.censored_rows == table.censored.sum() > 0
    requests = [set(part.request.tolist()) for part in data.parts.values()]
    assert not (requests[0] & requests[1] or requests[0] & requests[2] or requests[1] & requests[2])
    assert sum(len(part) for part in data.parts.values()) == (~table.censored).sum()


def test_hidden_states_of_another_model_are_refused_with_both_names(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    record(other, new_session(model="Qwen/Qwen3-0.6B"))
    predictor = RemainingLengthMLP.load(str(checkpoint))
    with pytest.raises(ModelMismatchError, match=r"trained on .*small-model.* these are of Qwen"):
        predictor.refuse_other_model(read_sessions(other)[0])
    with pytest.raises(ModelMismatchError, match="vectors have 8 values"):
        predictor.predict(np.zeros((1, 9), dtype=np.float32))
    assert main(["evaluate", str(other), str(checkpoint)]) == 1
    assert "Qwen/Qwen3-0.6B" in capsys.readouterr().err


def test_evaluate_prints_the_table_and_draws_the_figures(
    dataset: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "evaluation"
    assert main(["evaluate", str(dataset), str(checkpoint), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "| Headway (hidden state) |" in printed and "Kaplan–Meier" in printed
    metrics = json.loads((out / "metrics.json").read_text())
    assert {"mae", "median_ae", "p90_ae", "n_requests", "n_rows"} <= set(metrics)
    for result in metrics["comparators"].values():
        assert {"mae", "parameters", "latency_ms_batch1", "latency_ms_batch10"} <= set(result)
    for figure in ("mae.png", "predicted_against_true.png"):
        assert (out / figure).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_folder_without_a_checkpoints_files_is_refused(
    checkpoint: Path, tmp_path: Path, missing: str
) -> None:
    for name in {"config.json", "model.safetensors"} - {missing}:
        (tmp_path / name).write_bytes((checkpoint / name).read_bytes())
    with pytest.raises(CheckpointError, match=f"no {missing}"):
        RemainingLengthMLP.load(str(tmp_path))


def test_a_damaged_checkpoint_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"half a file")
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        RemainingLengthMLP.load(str(tmp_path))


def test_a_dataset_of_cut_requests_only_cannot_be_trained_on(tmp_path: Path) -> None:
    record(tmp_path / "cut", finish_reason="length")
    data = RowsDataModule(tmp_path / "cut")
    with pytest.raises(DatasetError, match="no row with a known remaining length"):
        data.setup("fit")


def test_bad_training_options_are_refused(dataset: Path) -> None:
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        RowsDataModule(dataset, batch_size=0)


def test_tune_writes_its_table_and_goes_on(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["tune", str(dataset), "--out", str(tmp_path), "--max_epochs", "1"]
    assert main([*options, "--trials", "1"]) == 0
    assert main([*options, "--trials", "2"]) == 0
    table = (tmp_path / "trials.csv").read_text().splitlines()
    assert len(table) == 3, "a header and two trials, the first kept from the first run"
    assert "headway train fit" in capsys.readouterr().out


def test_the_shipped_checkpoint_loads_with_its_metrics() -> None:
    folder = Path(__file__).parents[2] / "checkpoints" / "smollm2-135m-instruct-star"
    predictor = RemainingLengthMLP.load(str(folder))
    assert predictor.serving_model == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert predictor.predict(np.zeros((2, 576), dtype=np.float32)).shape == (2,)
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["n_rows"] > 0
    assert {"kaplan_meier", "auxiliary_encoder"} <= set(metrics["comparators"])
