"""Training from the command line, for both predictors: what is learned, written and refused."""

import json
import shutil
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from memoryless_dataset import record_memoryless, true_median
from recorded_dataset import change_shard, new_session, record, with_column
from safetensors.torch import load_file
from training_runs import CONFIGS, FEW_ROWS, QUIET, SURVIVAL, fit

from data_collection.dataset.dataset_commands import merge
from data_collection.dataset.dataset_schema import DatasetError, requests_files
from data_collection.dataset.validate_dataset import validate
from predictor import RequestRows, SurvivalMLP, load_predictor
from predictor.evaluation.evaluate import evaluate
from predictor.forecasts.kaplan_meier import Recalibration, survival_edges
from predictor.models.hidden_state_mlp import INPUTS
from predictor.training.predictor_training import SurvivalTraining
from predictor.training.row_table import load_rows
from predictor.training.rows_data_module import RowsDataModule, request_rows
from rescheduler.commands.command_line import main

TRAINED = ("--trainer.max_epochs", "2")
"""Enough where only what is written, or refused, matters."""

IDENTITY = ((0.0, 1.0), (0.0, 1.0))
KINDS = {"survival": "censor", "star": "leave_out"}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def checkpoint(kind: str, survival_checkpoint: Path, regressor_checkpoint: Path) -> Path:
    return {"survival": survival_checkpoint, "star": regressor_checkpoint}[kind]


def load_survival(folder: Path) -> SurvivalMLP:
    predictor = load_predictor(str(folder))
    assert isinstance(predictor, SurvivalMLP)
    return predictor


def medians(folder: Path, dataset: Path) -> np.ndarray:
    return load_predictor(str(folder)).forecast(request_rows(load_rows(dataset))).median()


# What is written.


def test_fit_writes_a_checkpoint_with_its_card(
    kind: str, memoryless: Path, checkpoint: Path
) -> None:
    config, session = json.loads((checkpoint / "config.json").read_text()), new_session(k=5)
    for name in ("hidden_size", "k", "layer", "normalisation", "model"):
        assert config[name] == getattr(session, name)
    survival, bins = kind == "survival", len(survival_edges(512)) - 1
    assert config["model_revision"] == session.revision
    assert config["kind"] == ("survival" if survival else "regression")
    inputs = ["generated_tokens", "prompt_tokens", "temperature", "repetition", "repeated_suffix"]
    assert config["inputs"] == (inputs if survival else [])
    if survival:
        assert config["edges"] == survival_edges(512).tolist()
    provenance = config["provenance"]
    cut = int(load_rows(memoryless).censored.sum())
    assert provenance["rows of cut requests"] == f"{cut} ({KINDS[kind]})"
    assert set(provenance["rows"]) == {"train", "validation", "test"}
    figure = "val_nll" if survival else "val_mae"
    assert provenance[figure] > 0 and provenance["split_seed"] == 0
    assert config["trained_generated_tokens"][0] == 0
    card = (checkpoint / "README.md").read_text()
    shape = f"13→32→{bins}" if survival else "8→32→1"
    assert session.model in card and shape in card and figure in card
    assert not survival or "generated_tokens, prompt_tokens, temperature" in card
    assert (checkpoint / "dataset_card.md").read_text().startswith("---")
    assert list((checkpoint / "logs").rglob("metrics.csv"))
    assert list((checkpoint / "logs").rglob("events.out.tfevents*"))


def test_training_is_deterministic_given_the_seed(
    kind: str, memoryless: Path, checkpoint: Path, tmp_path: Path
) -> None:
    options = (*SURVIVAL, *FEW_ROWS) if kind == "survival" else FEW_ROWS
    fit(kind, memoryless, tmp_path / "again", *options)
    fit(kind, memoryless, tmp_path / "other", *options, *TRAINED, "--seed_everything=1")
    first = medians(checkpoint, memoryless)
    np.testing.assert_array_equal(medians(tmp_path / "again", memoryless), first)
    assert (medians(tmp_path / "other", memoryless) != first).any()


def test_the_forecast_ends_at_max_tokens_and_tells_long_from_short(
    memoryless: Path, checkpoint: Path
) -> None:
    table = load_rows(memoryless)
    forecast = load_predictor(str(checkpoint)).forecast(request_rows(table))
    assert len(forecast) == len(table)
    assert (forecast.at_each(table.tokens_left()) == 0).all()
    assert (forecast.median() <= table.tokens_left()).all()
    truth = true_median(table.vectors()[:, 0])
    assert np.corrcoef(forecast.uncapped().median(), truth)[0, 1] > 0.7


def test_the_recalibration_is_kept_in_the_checkpoint(
    memoryless: Path, survival_checkpoint: Path, tmp_path: Path
) -> None:
    config = json.loads((survival_checkpoint / "config.json").read_text())
    predictor = load_survival(survival_checkpoint)
    fitted = predictor.recalibration
    assert config["recalibration_nominal"] == list(fitted.nominal)
    assert config["recalibration_observed"] == list(fitted.observed)
    assert (fitted.nominal, fitted.observed) != IDENTITY, "fitted on the validation rows"
    rows = request_rows(load_rows(memoryless))
    learned = predictor.forecast_as_learned(rows).survival
    np.testing.assert_array_equal(predictor.forecast(rows).survival, fitted.apply(learned))

    predictor.recalibrate(Recalibration(*IDENTITY))
    predictor.save_pretrained(tmp_path)
    np.testing.assert_array_equal(load_survival(tmp_path).forecast(rows).survival, learned)


def test_without_recalibration_the_learned_curves_are_used(
    memoryless: Path, tmp_path: Path
) -> None:
    options = ("--model.init_args.recalibrate", "false", "--model.init_args.edges", "[0, 9, 90]")
    fit("survival", memoryless, tmp_path / "raw", *SURVIVAL, *FEW_ROWS, *TRAINED, *options)
    predictor = load_survival(tmp_path / "raw")
    assert (predictor.recalibration.nominal, predictor.recalibration.observed) == IDENTITY
    assert predictor.edges.tolist() == [0, 9, 90], "a grid of one's own"


def test_training_starts_from_the_hazards_of_all_rows(tmp_path: Path) -> None:
    record_memoryless(tmp_path / "dataset", n_requests=100)
    data = RowsDataModule(tmp_path / "dataset", cut_requests="censor")
    data.setup("fit")
    train = data.parts["train"]
    train.remaining_tokens[:] = 1
    train.censored[:] = False
    shared = {"model": "m", "model_revision": "r", "hidden_size": 8, "k": 5, "widths": [16]}
    predictor = SurvivalTraining().build(data, shared)
    assert all(torch.isfinite(weights).all() for weights in predictor.parameters())
    survival = predictor.forecast(RequestRows(torch.randn(3, 8), torch.full((3, 6), 9e3))).at(5.0)
    np.testing.assert_allclose(survival, 0, atol=0.05)


def test_the_grid_reaches_the_longest_answer(tmp_path: Path) -> None:
    """Nothing that a reasoning model writes is cut in silence."""
    record_memoryless(tmp_path / "dataset", n_requests=100)
    data = RowsDataModule(tmp_path / "dataset", cut_requests="censor")
    data.setup("fit")
    train = data.parts["train"]
    shared = {"model": "m", "model_revision": "r", "hidden_size": 8, "k": 5, "widths": [16]}
    assert SurvivalTraining().build(data, shared).edges[-1] == 8192
    train.remaining_tokens[0] = 20_000
    assert SurvivalTraining().build(data, shared).edges[-1] == 32_768
    with pytest.raises(ValueError, match="20,000 tokens, and the grid ends at 8,192: give a larg"):
        SurvivalTraining(limit=8192).build(data, shared)


def test_tune_writes_its_table_and_goes_on(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path / "dataset")
    options = ["train", "tune", str(tmp_path / "dataset"), "--predictor", kind, "--limit", "128"]
    options += ["--out", str(tmp_path / "tune"), "--max_epochs", "1"]
    assert main([*options, "--trials", "1"]) == 0
    assert main([*options, "--trials", "2"]) == 0
    head, *trials = (tmp_path / "tune" / "trials.csv").read_text().splitlines()
    noise = "noise," if kind == "survival" else ""
    assert head == f"trial,state,depth,width,batch_size,lr,{noise}epochs,validation_figure"
    assert len(trials) == 2, "the first is kept from the first run"
    assert float(trials[0].split(",")[-1]) > 0
    printed = capsys.readouterr().out
    assert (tmp_path / "tune" / "trials.md").read_text() in printed
    assert f"--config configs/predictor/{kind}.yaml" in printed
    assert ("--model.init_args.noise" in printed) == (kind == "survival")


# The rows.


@pytest.mark.parametrize(
    ("cut_requests", "kept"),
    [
        ("leave_out", ["stop"]),
        ("as_ended", ["stop", "length"]),
        ("censor", ["stop", "length", "abort"]),
    ],
)
def test_parts_share_no_request_and_cut_ones_count_as_asked(
    memoryless: Path, cut_requests: Literal["leave_out", "as_ended", "censor"], kept: list[str]
) -> None:
    data = RowsDataModule(memoryless, cut_requests=cut_requests)
    data.setup("fit")
    table = load_rows(memoryless)
    reasons = np.array(table.requests.finish_reason)[table.request]
    assert data.censored_rows == table.censored.sum() > 0
    assert sum(len(part) for part in data.parts.values()) == np.isin(reasons, kept).sum()
    requests = [set(part.request.tolist()) for part in data.parts.values()]
    assert len(set.union(*requests)) == sum(map(len, requests))


def test_tokens_left_end_at_max_tokens_or_the_longest_answer(memoryless: Path) -> None:
    table = load_rows(memoryless).select(np.arange(3))
    table.generated_tokens[:] = (0, 40, 300)
    table.max_tokens[:] = (100, 0, 200)
    assert table.tokens_left().tolist() == [100, 160, 1]
    assert table.numbers()[:, :3].tolist() == [[0, 11, 100], [40, 11, 160], [300, 11, 1]]


def test_repetition_is_unknown_where_tokens_were_not_recorded(memoryless: Path) -> None:
    table = load_rows(memoryless)
    tokens = table.requests.output_token_ids
    tokens[int(table.request[0])] = None
    tokens[:] = [[7] * len(one) if one is not None else None for one in tokens]
    column = table.numbers()[:, INPUTS.index("repetition")]
    of_unknown = table.request == table.request[0]
    assert of_unknown.any() and (np.isnan(column) == of_unknown).all()
    known = ~np.isnan(column)
    repeats = table.generated_tokens[known] - 1 > 4  # all but the newest token are read
    assert ((column[known] > 0) == repeats).all()


def test_an_unknown_number_counts_as_the_average(survival_checkpoint: Path) -> None:
    predictor = load_survival(survival_checkpoint)
    hidden, average = torch.randn(1, 8), predictor.count_mean.expm1()
    numbers = torch.zeros(1, len(INPUTS))
    numbers[0, [INPUTS.index(name) for name in predictor.inputs]] = average
    known = predictor.forecast(RequestRows(hidden, numbers)).survival
    numbers[0, INPUTS.index("repetition")] = torch.nan
    unknown = predictor.forecast(RequestRows(hidden, numbers)).survival
    np.testing.assert_allclose(unknown, known, atol=1e-6)
    with pytest.raises(ValueError, match=r"RequestRows needs all of generated_tokens, .*, not 3"):
        predictor.forecast(RequestRows(hidden, numbers[:, :3]))


def test_shards_of_an_earlier_version_have_vllms_default_temperature(tmp_path: Path) -> None:
    record(tmp_path / "earlier")
    record(tmp_path / "later", new_session("20250102T000000-2"), prefix="b")
    for file in requests_files(tmp_path / "earlier"):
        change_shard(file, lambda table: table.drop_columns(["temperature", "top_p"]))
    for file in requests_files(tmp_path / "later"):
        change_shard(file, with_column("temperature", lambda values: [0.5] * len(values)))
    merge([tmp_path / "earlier", tmp_path / "later"], tmp_path / "merged")
    table = load_rows(tmp_path / "merged")
    later = np.array(["-b" in name for name in table.requests.request_id])[table.request]
    temperature = table.numbers()[:, INPUTS.index("temperature")]
    assert (temperature[later] == 0.5).all() and (temperature[~later] == 1).all()
    assert later.any() and not later.all()


# What is refused.


def test_training_on_repetition_without_recorded_tokens_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Learned from nothing, its weights would be noise once an engine tells the true values."""
    record_memoryless(tmp_path / "data", n_requests=60)
    for file in requests_files(tmp_path / "data"):
        change_shard(file, with_column("output_token_ids", lambda values: [None] * len(values)))
    arguments = ["train", "fit", "--config", str(CONFIGS / "survival.yaml"), *QUIET, *TRAINED]
    arguments += ["--data.dataset", str(tmp_path / "data"), "--out", str(tmp_path / "out")]
    assert main([*arguments, *SURVIVAL, *FEW_ROWS]) == 1
    assert "repetition is known of no row: record with token ids" in capsys.readouterr().err
    inputs = "[generated_tokens, prompt_tokens]"
    assert main([*arguments, *SURVIVAL, *FEW_ROWS, "--model.init_args.inputs", inputs]) == 0


@pytest.mark.parametrize(
    ("predictor", "option", "value", "message"),
    [
        ("survival", "data.cut_requests", "leave_out", "give --data.cut_requests censor"),
        ("survival", "data.cut_requests", "as_ended", "give --data.cut_requests censor"),
        ("star", "data.cut_requests", "censor", "give --data.cut_requests leave_out or as_ended"),
        ("star", "data.batch_size", "0", "batch_size must be at least 1"),
        ("survival", "model.init_args.inputs", "[age]", f"unknown input 'age'; known: {INPUTS[0]}"),
    ],
)
def test_what_a_training_cannot_use_is_refused(
    memoryless: Path,
    tmp_path: Path,
    predictor: str,
    option: str,
    value: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["train", "fit", "--config", str(CONFIGS / f"{predictor}.yaml"), *QUIET]
    arguments += ["--data.dataset", str(memoryless), "--out", str(tmp_path / "out")]
    assert main([*arguments, f"--{option}", value]) in (1, 2)
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_a_dataset_of_cut_requests_only_cannot_be_trained_on(tmp_path: Path) -> None:
    record(tmp_path / "cut", finish_reason="length")
    data = RowsDataModule(tmp_path / "cut")
    with pytest.raises(DatasetError, match="no row with a known remaining length"):
        data.setup("fit")


@pytest.mark.slow
def test_a_predictor_learns_from_one_adapter_s_requests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The states of a LoRA adapter's requests are of another model in all but name."""
    dataset = tmp_path / "dataset"
    for number, adapter in enumerate(["", "poet"]):
        session = new_session(f"2025010{1 + number}T000000-{number}")
        record(dataset, session, prefix="ab"[number], adapter=adapter)
    assert len(load_rows(dataset)) == len(load_rows(dataset, "poet")) > 0
    assert not set(load_rows(dataset).request) & set(load_rows(dataset, "poet").request)
    validate(dataset)
    out = fit("star", dataset, tmp_path / "out", *TRAINED, "--data.adapter", "poet")
    assert load_predictor(str(out)).adapter == "poet"
    assert "`abc123`, LoRA adapter poet |" in (out / "README.md").read_text()
    evaluate(dataset, str(out), tmp_path / "evaluation")
    with pytest.raises(DatasetError, match=r"no rows of adapter pet, but of poet, the base model"):
        load_rows(dataset, "pet")
    only = tmp_path / "only"
    record(only, adapter="poet")
    arguments = ["train", "fit", "--config", str(CONFIGS / "star.yaml"), *QUIET]
    assert main([*arguments, "--data.dataset", str(only), "--out", str(tmp_path / "none")]) == 1
    said = capsys.readouterr().err
    assert "no rows of the base model, but of poet: choose by --data.adapter NAME" in said


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


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ([1], "not a whole checkpoint"),
        ({"state_dict": {}}, "not a whole checkpoint"),
        ({"loops": {}, "hyper_parameters": {"averaging_half_life": 30.0}}, "an earlier version"),
    ],
)
def test_a_file_that_no_training_can_go_on_from_is_refused(
    folder: Path, saved: Any, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "other.ckpt"
    torch.save(saved, path)
    arguments = ["train", "fit", "--config", "survival", "--data.dataset", str(folder / "data")]
    assert main([*arguments, "--ckpt-path", str(path), *SMALL]) in (1, 2)
    said = capsys.readouterr().err
    assert message in said and str(path) in said


def test_states_of_single_tokens_are_trained_on_with_a_note(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit("survival", folder / "data", folder / "noted", *SMALL, "--trainer.max_epochs=1")
    assert "collect with --record.state_half_life 30" in capsys.readouterr().err
