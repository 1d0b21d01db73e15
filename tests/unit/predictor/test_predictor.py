"""The predictor, its training and its checkpoint, on a small dataset of the real writer."""

import json
import shutil
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from recorded_dataset import D, K, change_shard, new_session, record
from training_runs import QUIET

from data_collection.dataset.dataset_schema import DatasetError, read_sessions, requests_files
from predictor import (
    CheckpointError,
    ModelMismatchError,
    RemainingLengthMLP,
    RequestRows,
    SurvivalMLP,
    load_predictor,
)
from predictor.evaluation.result import LABELS, OWN_NAME
from predictor.evaluation.survival_metrics import LEVELS, WITHIN
from predictor.models.hidden_state_mlp import INPUTS, HiddenStateMLP
from predictor.training.row_table import load_rows
from predictor.training.rows_data_module import RowsDataModule, request_rows
from predictor.training.train_command import train
from rescheduler.commands.command_line import main

SHIPPED = Path(__file__).parents[3] / "checkpoints"
SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"


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
    arguments = ["fit", "--model", "RemainingLengthTraining", "--model.widths", "[32, 16]"]
    arguments += ["--data.dataset", str(dataset), "--out", str(out), "--trainer.max_epochs", "4"]
    train([*arguments, *QUIET, *options])


def small(predictor: type[HiddenStateMLP], **options: Any) -> HiddenStateMLP:
    """Return an untrained predictor of vectors of 8 values."""
    shared = {"model": "acme/small-model", "model_revision": "abc123", "hidden_size": D, "k": K}
    return predictor(**shared, **options).eval()


def load_regressor(folder: Path) -> RemainingLengthMLP:
    predictor = load_predictor(str(folder))
    assert isinstance(predictor, RemainingLengthMLP)
    return predictor


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
    assert (config["kind"], config["inputs"]) == ("regression", [])
    assert set(config["provenance"]["rows"]) == {"train", "validation", "test"}
    cut = int(load_rows(dataset).censored.sum())
    assert config["provenance"]["rows of cut requests"] == f"{cut} (leave_out)"
    assert config["trained_generated_tokens"][0] == 0
    card = (checkpoint / "README.md").read_text()
    assert session.model in card and f"{D}→32→16→1" in card and "val_mae" in card
    assert (checkpoint / "model.safetensors").is_file()
    assert list((checkpoint / "logs").rglob("metrics.csv"))
    assert list((checkpoint / "logs").rglob("events.out.tfevents*"))


def test_a_checkpoint_predicts_the_same_after_a_round_trip(
    dataset: Path, checkpoint: Path, tmp_path: Path
) -> None:
    predictor = load_regressor(checkpoint)
    vectors = load_rows(dataset).vectors()
    predicted = predictor.predict(vectors)
    assert predicted.shape == (len(vectors),)
    assert (predicted >= 0).all()
    predictor.save_pretrained(tmp_path / "copy")
    again = load_regressor(tmp_path / "copy")
    np.testing.assert_array_equal(again.predict(vectors), predicted)
    assert again.config() == predictor.config()


def test_training_is_deterministic_given_the_seed(
    dataset: Path, checkpoint: Path, tmp_path: Path
) -> None:
    fit(dataset, tmp_path / "again")
    vectors = load_rows(dataset).vectors()
    first, second = (
        load_regressor(folder).predict(vectors) for folder in (checkpoint, tmp_path / "again")
    )
    np.testing.assert_array_equal(first, second)


def test_the_regressors_forecast_is_its_prediction_under_max_tokens(
    dataset: Path, checkpoint: Path
) -> None:
    predictor, table = load_regressor(checkpoint), load_rows(dataset)
    predicted = predictor.predict(table.vectors())
    forecast = predictor.forecast(request_rows(table))
    expected = np.maximum(np.minimum(predicted, table.tokens_left()), 1)
    np.testing.assert_array_equal(forecast.median(), expected)
    np.testing.assert_array_equal(forecast.uncapped().median(), np.maximum(predicted, 1))


@pytest.mark.parametrize(
    "predictor",
    [small(RemainingLengthMLP), small(SurvivalMLP, edges=[0, 5, 20], inputs=["tokens_left"])],
    ids=lambda predictor: predictor.kind,
)
def test_a_predictor_built_by_hand_can_be_saved(predictor: HiddenStateMLP, tmp_path: Path) -> None:
    predictor.save_pretrained(tmp_path)
    again = load_predictor(str(tmp_path))
    rows = RequestRows(torch.ones(2, D), torch.full((2, 3), 40.0))
    assert type(again) is type(predictor)
    h = [0, 3, 5, 19, 20]
    np.testing.assert_array_equal(again.forecast(rows).at(h), predictor.forecast(rows).at(h))
    assert predictor.serving_model in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize(
    "inputs", [(), ("prompt_tokens",), ("tokens_left", "generated_tokens"), INPUTS[3:]]
)
def test_the_numbers_that_were_asked_for_are_read_and_no_others(
    inputs: tuple[str, ...],
) -> None:
    predictor = small(SurvivalMLP, edges=[0, 5, 20], inputs=inputs, widths=[64])
    before = torch.tensor([[20.0, 11, 90, 0.7, 0.1, 2]])
    for column, name in enumerate(INPUTS):
        after = before.clone()
        after[0, column] += 400
        curves = [
            predictor.forecast(RequestRows(torch.ones(1, D), numbers)).uncapped().at(5.0)
            for numbers in (before, after)
        ]
        assert (curves[0] != curves[1]) == (name in inputs)


def test_a_regressor_that_reads_token_counts_does_not_predict_without_them() -> None:
    regressor = small(RemainingLengthMLP, inputs=["prompt_tokens"])
    assert isinstance(regressor, RemainingLengthMLP)
    with pytest.raises(ValueError, match="also reads prompt_tokens: use forecast"):
        regressor.predict(np.zeros((1, D), dtype=np.float32))


def test_an_unknown_input_is_refused_with_those_there_are() -> None:
    with pytest.raises(CheckpointError, match="unknown input 'age'; known: generated_tokens, "):
        small(SurvivalMLP, edges=[0, 5], inputs=["age"])


def test_the_split_leaves_out_and_counts_censored_rows(dataset: Path) -> None:
    data = RowsDataModule(dataset)
    data.setup("fit")
    table = load_rows(dataset)
    assert data.censored_rows == table.censored.sum() > 0
    requests = [set(part.request.tolist()) for part in data.parts.values()]
    assert not (requests[0] & requests[1] or requests[0] & requests[2] or requests[1] & requests[2])
    assert sum(len(part) for part in data.parts.values()) == (~table.censored).sum()


@pytest.mark.parametrize("cut_requests", ["leave_out", "as_ended", "censor"])
def test_rows_of_cut_requests_count_as_asked(
    memoryless: Path, cut_requests: Literal["leave_out", "as_ended", "censor"]
) -> None:
    data = RowsDataModule(memoryless, cut_requests=cut_requests)
    data.setup("fit")
    table = load_rows(memoryless)
    reasons = np.array(table.requests.finish_reason)[table.request]
    kept = {"leave_out": ["stop"], "as_ended": ["stop", "length"]}.get(
        cut_requests, ["stop", "length", "abort"]
    )
    assert sum(len(part) for part in data.parts.values()) == np.isin(reasons, kept).sum()


def test_tokens_left_end_at_max_tokens_or_the_longest_answer(
    dataset: Path,
) -> None:
    table = load_rows(dataset).select(np.arange(3))
    table.generated_tokens[:] = (0, 40, 300)
    table.max_tokens[:] = (100, 0, 200)
    assert table.tokens_left().tolist() == [100, 160, 1]
    assert table.numbers()[:, :3].tolist() == [[0, 11, 100], [40, 11, 160], [300, 11, 1]]


def test_hidden_states_of_another_model_are_refused_with_both_names(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    record(other, new_session(model="Qwen/Qwen3-0.6B"))
    predictor = load_regressor(checkpoint)
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
    assert f"| {LABELS[OWN_NAME]} |" in printed and "Kaplan–Meier" in printed
    metrics = json.loads((out / "metrics.json").read_text())
    assert {"mae", "median_ae", "p90_ae", "n_requests", "n_rows"} <= set(metrics)
    assert metrics["mae_median"] == metrics["mae"]
    assert metrics["coverage"] is None, "a point forecast has no interval"
    assert set(metrics["comparators"]) == {"constant_median", "kaplan_meier"}
    for result in metrics["comparators"].values():
        assert {"mae", "parameters", "latency_ms_batch1", "latency_ms_batch10"} <= set(result)
    assert not (out / "calibration.png").exists()
    for figure in ("mae.png", "by_age.png", "predicted_against_true.png"):
        assert (out / figure).read_bytes().startswith(b"\x89PNG")


def test_a_dataset_collected_later_is_measured_in_place_of_the_test_part(
    dataset: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    later, out = tmp_path / "later", tmp_path / "evaluation"
    record(later, prefix="b")
    arguments = ["evaluate", str(dataset), str(checkpoint), "--out", str(out), "--on", str(later)]
    assert main([*arguments, "--part", "validation"]) == 1
    assert "--on measures a whole dataset" in capsys.readouterr().err
    assert main(arguments) == 1
    assert "no request with a prompt of its own" in capsys.readouterr().err

    def new_prompts(requests: pa.Table) -> pa.Table:
        column = requests.schema.get_field_index("prompt_token_ids")
        field = requests.schema.field(column)
        prompts = pa.array([[i, 1, 2] for i in range(len(requests))], field.type)
        return requests.set_column(column, field, prompts)

    known, *others = requests_files(later)
    for file in others:
        change_shard(file, new_prompts)
    assert main(arguments) == 0
    metrics = json.loads((out / "metrics.json").read_text())
    left_out = pq.read_metadata(known).num_rows
    assert metrics["n_requests"] == 20 - left_out
    assert metrics["notes"][0].startswith(f"{left_out} requests of later are left out")
    assert metrics["provenance"]["part"] == "later"
    assert {"constant_median", "kaplan_meier"} == set(metrics["comparators"])


def without_prompts(requests: pa.Table) -> pa.Table:
    column = requests.schema.get_field_index("prompt_token_ids")
    field = requests.schema.field(column)
    return requests.set_column(column, field, pa.nulls(len(requests), field.type))


@pytest.mark.parametrize("which", ["dataset", "later"])
def test_prompts_that_were_not_recorded_are_not_taken_for_new_ones(
    dataset: Path, checkpoint: Path, tmp_path: Path, which: str
) -> None:
    later, out = tmp_path / "later", tmp_path / "evaluation"
    record(later, prefix="b")
    copied = tmp_path / "dataset"
    shutil.copytree(dataset, copied)
    for file in requests_files({"dataset": copied, "later": later}[which]):
        change_shard(file, without_prompts)
    arguments = ["evaluate", str(copied), str(checkpoint), "--out", str(out), "--on", str(later)]
    assert main(arguments) == 0
    said, *_ = json.loads((out / "metrics.json").read_text())["notes"]
    assert said == (
        f"The prompts of 20 requests of {which} were not recorded, so that requests of later "
        "may be among those that the predictor learned from."
    )


def test_a_dataset_is_not_measured_in_place_of_its_own_test_part(
    dataset: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    same = str(dataset / ".." / dataset.name)
    assert main(["evaluate", str(dataset), str(checkpoint), "--on", same]) == 1
    assert "--on must be another dataset" in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_folder_without_a_checkpoints_files_is_refused(
    checkpoint: Path, tmp_path: Path, missing: str
) -> None:
    for name in {"config.json", "model.safetensors"} - {missing}:
        (tmp_path / name).write_bytes((checkpoint / name).read_bytes())
    with pytest.raises(CheckpointError, match=f"no {missing}"):
        load_predictor(str(tmp_path))


def test_a_damaged_checkpoint_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"half a file")
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load_predictor(str(tmp_path))
    (tmp_path / "config.json").write_text('{"kind": "regr')
    with pytest.raises(CheckpointError, match=r"config\.json: not JSON"):
        load_predictor(str(tmp_path))


@pytest.mark.parametrize("kind", [None, "quantile"])
def test_a_checkpoint_of_no_known_kind_is_refused(
    checkpoint: Path, tmp_path: Path, kind: str | None
) -> None:
    config = json.loads((checkpoint / "config.json").read_text()) | {"kind": kind}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((checkpoint / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=f"kind {kind!r}; known: regression, survival"):
        load_predictor(str(tmp_path))


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
    options = ["train", "tune", str(dataset), "--predictor", "star", "--out", str(tmp_path)]
    options += ["--max_epochs", "1"]
    assert main([*options, "--trials", "1"]) == 0
    assert main([*options, "--trials", "2"]) == 0
    table = (tmp_path / "trials.csv").read_text().splitlines()
    assert len(table) == 3, "a header and two trials, the first kept from the first run"
    assert "--config configs/predictor/star.yaml" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "kind"),
    [("smollm2-135m-instruct", "survival"), ("smollm2-135m-instruct-star", "regression")],
)
def test_the_shipped_checkpoints_load(name: str, kind: str) -> None:
    predictor = load_predictor(str(SHIPPED / name))
    assert (predictor.kind, predictor.serving_model) == (kind, SMOLLM2)
    rows = RequestRows(
        torch.zeros(2, 576), torch.tensor([[0.0, 30, 500, 1, 0, 0], [400, 30, 100, 1, 0, 0]])
    )
    survival = predictor.forecast(rows).at([0, 50, 100])
    assert survival.shape == (2, 3)
    assert (survival[:, 0] == 1).all() and survival[1, 2] == 0


def test_the_shipped_survival_models_metrics_are_beside_it() -> None:
    metrics = json.loads((SHIPPED / "smollm2-135m-instruct" / "metrics.json").read_text())
    assert metrics["n_rows"] > 0
    for name in ("mae_median", "mae_regressor", "ibs", "ibs_kaplan_meier"):
        assert metrics[name] > 0
    assert set(metrics["coverage"]) == {str(level) for level in LEVELS} == {"50", "80", "90"}
    assert set(metrics["auc_within"]) == {str(h) for h in WITHIN} == {"20", "80", "320"}
    assert {"regressor", "kaplan_meier"} <= set(metrics["comparators"])
