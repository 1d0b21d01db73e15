"""The survival model from the command line: training, checkpoint, evaluation, search."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from memoryless_dataset import record_memoryless, true_median
from recorded_dataset import change_shard, new_session, record
from training_runs import CONFIGS, FEW_ROWS, QUIET, SURVIVAL, fit

from data_collection.dataset.dataset_schema import requests_files
from data_collection.dataset.merge_datasets import merge
from predictor import CheckpointError, RemainingLengthMLP, RequestRows, SurvivalMLP, load_predictor
from predictor.evaluation.comparators import Regressor
from predictor.evaluation.result import LABELS, OWN_NAME
from predictor.forecasts.kaplan_meier import survival_edges
from predictor.forecasts.recalibration import Recalibration
from predictor.models.hidden_state_mlp import INPUTS
from predictor.training.row_table import RowTable, load_rows
from predictor.training.rows_data_module import RowsDataModule, request_rows
from predictor.training.survival_training import SurvivalTraining
from rescheduler.commands.command_line import main

TRAINED = ("--trainer.max_epochs", "2")
"""Enough where only what is written, or refused, matters."""

IDENTITY = ((0.0, 1.0), (0.0, 1.0))


def load_survival(folder: Path) -> SurvivalMLP:
    predictor = load_predictor(str(folder))
    assert isinstance(predictor, SurvivalMLP)
    return predictor


def config_of(folder: Path) -> dict[str, object]:
    loaded: dict[str, object] = json.loads((folder / "config.json").read_text())
    return loaded


def curves(folder: Path, table: RowTable) -> np.ndarray:
    return load_survival(folder).forecast(request_rows(table)).survival


# Training and the checkpoint.


def test_fit_writes_a_survival_checkpoint_with_its_card(
    memoryless: Path, survival_checkpoint: Path
) -> None:
    config = config_of(survival_checkpoint)
    assert config["kind"] == "survival"
    assert config["edges"] == survival_edges(512).tolist()
    inputs = ["generated_tokens", "prompt_tokens", "temperature", "repetition", "repeated_suffix"]
    assert config["inputs"] == inputs
    assert config["averaging_half_life"] == 30
    provenance = config["provenance"]
    assert isinstance(provenance, dict)
    cut = int(load_rows(memoryless).censored.sum())
    assert provenance["rows of cut requests"] == f"{cut} (censor)"
    assert provenance["val_nll"] > 0 and provenance["split_seed"] == 0
    card = (survival_checkpoint / "README.md").read_text()
    bins = len(survival_edges(512)) - 1
    assert "Survival forecasts for acme/small-model" in card and f"13→32→{bins}" in card
    assert "generated_tokens, prompt_tokens, temperature" in card and "val_nll" in card
    assert (survival_checkpoint / "dataset_card.md").read_text().startswith("---")


def test_the_curve_is_capped_by_max_tokens_and_tells_long_from_short(
    memoryless: Path, survival_checkpoint: Path
) -> None:
    table = load_rows(memoryless)
    forecast = load_survival(survival_checkpoint).forecast(request_rows(table))
    assert len(forecast) == len(table)
    assert (forecast.at_each(table.tokens_left()) == 0).all()
    assert (forecast.median() <= table.tokens_left()).all()
    x = table.vectors()[:, 0]
    assert np.corrcoef(forecast.uncapped().median(), true_median(x))[0, 1] > 0.8


def test_a_survival_checkpoint_predicts_the_same_after_a_round_trip(
    memoryless: Path, survival_checkpoint: Path, tmp_path: Path
) -> None:
    table = load_rows(memoryless)
    predictor = load_survival(survival_checkpoint)
    predictor.save_pretrained(tmp_path)
    np.testing.assert_array_equal(curves(tmp_path, table), curves(survival_checkpoint, table))
    assert load_survival(tmp_path).config() == predictor.config()


def test_the_recalibration_is_kept_in_the_checkpoint(
    memoryless: Path, survival_checkpoint: Path, tmp_path: Path
) -> None:
    config, predictor = config_of(survival_checkpoint), load_survival(survival_checkpoint)
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


def test_shards_of_an_earlier_version_have_vllms_default_temperature(tmp_path: Path) -> None:
    record(tmp_path / "earlier")
    record(tmp_path / "later", new_session("20250102T000000-2"), prefix="b")
    for file in requests_files(tmp_path / "earlier"):
        change_shard(file, lambda table: table.drop_columns(["temperature", "top_p"]))
    for file in requests_files(tmp_path / "later"):
        change_shard(file, _sampled_at_half)
    merge([tmp_path / "earlier", tmp_path / "later"], tmp_path / "merged")
    table = load_rows(tmp_path / "merged")
    later = np.array(["-b" in name for name in table.requests.request_id])[table.request]
    temperature = table.numbers()[:, INPUTS.index("temperature")]
    assert (temperature[later] == 0.5).all() and (temperature[~later] == 1).all()
    assert later.any() and not later.all()


def _sampled_at_half(table: pa.Table) -> pa.Table:
    column = table.schema.get_field_index("temperature")
    return table.set_column(column, "temperature", pa.array([0.5] * len(table), pa.float64()))


def test_training_on_repetition_without_recorded_tokens_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Learned from nothing, its weights would be noise once an engine tells the true values."""
    record_memoryless(tmp_path / "data", n_requests=60)

    def without_tokens(table: pa.Table) -> pa.Table:
        column = table.schema.get_field_index("output_token_ids")
        field = table.schema.field(column)
        return table.set_column(column, field, pa.nulls(len(table), field.type))

    for file in requests_files(tmp_path / "data"):
        change_shard(file, without_tokens)
    arguments = ["train", "fit", "--config", str(CONFIGS / "survival.yaml"), *QUIET, *TRAINED]
    arguments += ["--data.dataset", str(tmp_path / "data"), "--out", str(tmp_path / "out")]
    assert main([*arguments, *SURVIVAL, *FEW_ROWS]) == 1
    assert "repetition is known of no row: record with token ids" in capsys.readouterr().err
    inputs = "[generated_tokens, prompt_tokens]"
    assert main([*arguments, *SURVIVAL, *FEW_ROWS, "--model.init_args.inputs", inputs]) == 0


def test_training_the_survival_model_is_deterministic_given_the_seed(
    memoryless: Path, survival_checkpoint: Path, tmp_path: Path
) -> None:
    fit("survival", memoryless, tmp_path / "again", *SURVIVAL, *FEW_ROWS)
    fit("survival", memoryless, tmp_path / "other", *SURVIVAL, *FEW_ROWS, "--seed_everything=1")
    table = load_rows(memoryless)
    first = curves(survival_checkpoint, table)
    np.testing.assert_array_equal(curves(tmp_path / "again", table), first)
    assert (curves(tmp_path / "other", table) != first).any()


def test_without_recalibration_the_learned_curves_are_used(
    memoryless: Path, tmp_path: Path
) -> None:
    options = ("--model.init_args.recalibrate", "false", "--model.init_args.edges", "[0, 9, 90]")
    fit("survival", memoryless, tmp_path / "raw", *SURVIVAL, *FEW_ROWS, *TRAINED, *options)
    predictor = load_survival(tmp_path / "raw")
    assert (
        predictor.recalibration.nominal,
        predictor.recalibration.observed,
    ) == IDENTITY
    assert predictor.edges.tolist() == [0, 9, 90], "a grid of one's own"


def test_training_starts_from_the_hazards_of_all_rows(
    tmp_path: Path,
) -> None:
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


# What is refused.


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 1
    return capsys.readouterr().err.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("predictor", "cut_requests", "message"),
    [
        ("survival", "leave_out", "give --data.cut_requests censor"),
        ("survival", "as_ended", "give --data.cut_requests censor"),
        ("star", "censor", "give --data.cut_requests leave_out or as_ended"),
    ],
)
def test_cut_requests_that_a_training_cannot_use_are_refused(
    memoryless: Path,
    tmp_path: Path,
    predictor: str,
    cut_requests: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["train", "fit", "--config", str(CONFIGS / f"{predictor}.yaml")]
    arguments += ["--data.dataset", str(memoryless), "--data.cut_requests", cut_requests]
    error = error_of(capsys, *arguments, "--out", str(tmp_path / "out"), *QUIET)
    assert error.startswith("headway train: ") and message in error
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_an_unknown_input_is_refused_with_those_there_are(
    memoryless: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train", "fit", "--config", str(CONFIGS / "survival.yaml"), *QUIET]
    arguments += ["--data.dataset", str(memoryless), "--out", str(tmp_path)]
    error = error_of(capsys, *arguments, "--model.init_args.inputs", "[age]")
    assert "unknown input 'age'; known: generated_tokens, prompt_tokens, tokens_left" in error


def test_a_checkpoint_of_the_other_kind_is_refused(
    survival_checkpoint: Path, regressor_checkpoint: Path
) -> None:
    kinds = [load_predictor(str(f)).kind for f in (survival_checkpoint, regressor_checkpoint)]
    assert kinds == ["survival", "regression"]
    survival, regression = config_of(survival_checkpoint), config_of(regressor_checkpoint)
    with pytest.raises(CheckpointError, match=r"'survival' checkpoint .* is no remaining-length"):
        RemainingLengthMLP(**survival)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="'regression' checkpoint holds no survival"):
        SurvivalMLP(edges=[0, 5], **regression)  # type: ignore[arg-type]


# Evaluation.


def comparators_of(**options: dict[str, str]) -> str:
    return json.dumps(options)


@pytest.fixture(scope="module")
def evaluation(
    memoryless: Path,
    survival_checkpoint: Path,
    regressor_checkpoint: Path,
    as_ended_checkpoint: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    out = tmp_path_factory.mktemp("evaluation")
    comparators = comparators_of(
        regressor={"checkpoint": str(regressor_checkpoint)},
        regressor_cut_as_ended={"checkpoint": str(as_ended_checkpoint)},
        kaplan_meier={},
        constant_median={},
    )
    arguments = ["evaluate", str(memoryless), str(survival_checkpoint), "--out", str(out)]
    assert main([*arguments, "--comparators", comparators]) == 0
    return out


def test_evaluate_writes_the_headline_figures_and_each_methods_own(evaluation: Path) -> None:
    metrics = json.loads((evaluation / "metrics.json").read_text())
    found = metrics["comparators"]
    assert list(found) == ["regressor", "regressor_cut_as_ended", "kaplan_meier", "constant_median"]
    assert metrics["mae_median"] == metrics["mae"]
    assert metrics["mae_regressor"] == min(found[name]["mae"] for name in list(found)[:2])
    assert metrics["ibs_kaplan_meier"] == found["kaplan_meier"]["ibs"]
    assert set(metrics["coverage"]) == {"50", "80", "90"}
    assert set(metrics["auc_within"]) == {"20", "80", "320"}
    assert found["regressor"]["coverage"] is None and found["kaplan_meier"]["coverage"]
    for result in (metrics, *found.values()):
        assert {"mae", "mae_ended", "mae_mean", "pinball", "concordance", "parameters"} <= set(
            result
        )
        ages = result["by_generated"]
        assert sum(age["rows"] for age in ages) == metrics["n_rows"]
        assert {"low", "high", "mae", "ibs", "auc_within", "coverage"} <= set(ages[0])


def test_evaluate_measures_the_rows_whose_tokens_came(memoryless: Path, evaluation: Path) -> None:
    metrics = json.loads((evaluation / "metrics.json").read_text())
    data = RowsDataModule(memoryless, cut_requests="censor")
    data.setup("test")
    test = data.parts["test"]
    came = test.ran_to_their_end()
    assert metrics["n_rows"] == len(came)
    assert metrics["n_requests"] == len(np.unique(came.request))
    assert metrics["rows_cut_at_max_tokens"] == came.censored.sum() > 0
    assert metrics["rows_left_out"] == len(test) - len(came) > 0


def test_the_survival_model_beats_what_does_not_read_the_request(evaluation: Path) -> None:
    metrics = json.loads((evaluation / "metrics.json").read_text())
    found = metrics["comparators"]
    assert metrics["ibs"] < min(result["ibs"] for result in found.values())
    assert metrics["mae_median"] < found["constant_median"]["mae"]
    assert metrics["auc_within"]["20"] > found["kaplan_meier"]["auc_within"]["20"]
    assert metrics["coverage"]["80"] == pytest.approx(0.8, abs=0.1)


def test_metrics_are_json_that_every_parser_reads(evaluation: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    text = (evaluation / "metrics.json").read_text()
    metrics = json.loads(text, parse_constant=refuse)
    assert metrics["brier_within"]["320"] is None, "no request may generate 320 more"


def test_the_calibration_is_measured_with_and_without_the_recalibration(evaluation: Path) -> None:
    found = json.loads((evaluation / "metrics.json").read_text())["calibration"]
    nominal = np.array(found["nominal"])
    assert len(found["observed"]) == len(found["observed_raw"]) == len(nominal)
    assert np.abs(np.array(found["observed"]) - nominal).max() < 0.12
    assert found["observed"] != found["observed_raw"]
    assert sum(found["d_shares"]) == pytest.approx(1) and len(found["d_shares"]) == 10
    assert 0 <= found["d_p_value"] <= 1


def test_the_report_shows_every_method_and_every_figure(evaluation: Path) -> None:
    report = (evaluation / "report.md").read_text()
    for name in (OWN_NAME, "regressor", "regressor_cut_as_ended", "kaplan_meier"):
        assert f"| {LABELS[name]} |" in report
    assert "the best comparator's" in report and "chi-squared test p = " in report
    for name in ("mae", "by_age", "predicted_against_true", "calibration"):
        assert f"![{name}]({name}.png)" in report
        assert (evaluation / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"checkpoint": "{other}"}, "it may have seen the test requests"),
        ({"checkpoint": "{survival}"}, "holds a survival model, no regressor"),
        ({"checkpoint": "{none}"}, "neither a folder nor a readable model of the hub"),
        ({}, "comparator regressor: "),
        ({"chekpoint": "{other}"}, "comparator regressor: "),
    ],
    ids=["another split", "another kind", "nowhere", "not given", "misspelt"],
)
def test_a_regressor_that_cannot_be_compared_is_refused(
    memoryless: Path,
    survival_checkpoint: Path,
    other_split: Path,
    tmp_path: Path,
    options: dict[str, str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    places = {"other": other_split, "survival": survival_checkpoint, "none": tmp_path / "none"}
    filled = {name: value.format(**places) for name, value in options.items()}
    arguments = ["evaluate", str(memoryless), str(survival_checkpoint), "--out", str(tmp_path)]
    error = error_of(capsys, *arguments, "--comparators", comparators_of(regressor=filled))
    assert error.startswith("headway evaluate: ") and message in error
    assert not (tmp_path / "metrics.json").exists()


@pytest.fixture(scope="module")
def other_split(memoryless: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A regressor that was trained on another split of the same dataset."""
    out = tmp_path_factory.mktemp("other_split") / "checkpoint"
    return fit("star", memoryless, out, *FEW_ROWS, *TRAINED, "--data.split_seed", "5")


def test_a_regressor_of_the_same_split_is_accepted(
    memoryless: Path, regressor_checkpoint: Path, as_ended_checkpoint: Path
) -> None:
    data = RowsDataModule(memoryless, cut_requests="censor")
    data.setup("fit")
    test = data.parts["test"]
    for folder in (regressor_checkpoint, as_ended_checkpoint):
        comparator = Regressor(str(folder))
        assert comparator.parameters == 0
        comparator.fit(data.parts["train"], data.parts["validation"])
        predictor = load_predictor(str(folder))
        assert isinstance(predictor, RemainingLengthMLP)
        np.testing.assert_array_equal(comparator.predict(test), predictor.predict(test.vectors()))
        assert comparator.parameters == sum(weights.numel() for weights in predictor.parameters())


# The search.


def test_tune_searches_the_survival_model_and_writes_its_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path / "dataset")
    arguments = ["train", "tune", str(tmp_path / "dataset"), "--predictor", "survival"]
    arguments += ["--limit", "128", "--out", str(tmp_path / "tune"), "--max_epochs", "1"]
    arguments += ["--trials", "1"]
    assert main(arguments) == 0
    head, trial = (tmp_path / "tune" / "trials.csv").read_text().splitlines()
    assert head == "trial,state,depth,width,batch_size,lr,noise,epochs,validation_figure"
    assert float(trial.split(",")[-1]) > 0
    printed = capsys.readouterr().out
    assert (tmp_path / "tune" / "trials.md").read_text() in printed
    assert "--config configs/predictor/survival.yaml" in printed
    assert "--model.init_args.noise" in printed
