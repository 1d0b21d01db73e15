"""`headway evaluate`: what is measured, on which rows, what it writes and refuses."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from recorded_dataset import change_shard, new_session, record, with_column
from training_runs import FEW_ROWS, fit

from data_collection.dataset.dataset_schema import requests_files
from predictor.evaluation.report import LABELS, OWN_NAME
from predictor.evaluation.survival_metrics import LEVELS, WITHIN
from predictor.forecasts.forecast_recording import read_recording
from predictor.training.rows_data_module import RowsDataModule
from rescheduler.commands.command_line import main


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["evaluate", *arguments]) == 1
    return capsys.readouterr().err.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def evaluation(
    memoryless: Path,
    survival_checkpoint: Path,
    regressor_checkpoint: Path,
    as_ended_checkpoint: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    out = tmp_path_factory.mktemp("evaluation")
    comparators = {
        "regressor": {"checkpoint": str(regressor_checkpoint)},
        "regressor_cut_as_ended": {"checkpoint": str(as_ended_checkpoint)},
        "kaplan_meier": {},
        "constant_median": {},
    }
    arguments = ["evaluate", str(memoryless), str(survival_checkpoint), "--out", str(out)]
    assert main([*arguments, "--comparators", json.dumps(comparators)]) == 0
    return out


def test_evaluate_writes_the_headline_figures_and_each_methods_own(evaluation: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    metrics = json.loads((evaluation / "metrics.json").read_text(), parse_constant=refuse)
    found = metrics["comparators"]
    assert list(found) == ["regressor", "regressor_cut_as_ended", "kaplan_meier", "constant_median"]
    assert metrics["mae_median"] == metrics["mae"]
    assert metrics["mae_regressor"] == min(found[name]["mae"] for name in list(found)[:2])
    assert metrics["ibs_kaplan_meier"] == found["kaplan_meier"]["ibs"]
    assert set(metrics["coverage"]) == {str(level) for level in LEVELS} == {"50", "80", "90"}
    assert set(metrics["auc_within"]) == {str(h) for h in WITHIN} == {"20", "80", "320"}
    assert metrics["brier_within"]["320"] is None, "no request may generate 320 more"
    assert found["regressor"]["coverage"] is None and found["kaplan_meier"]["coverage"]
    own = {"mae", "median_ae", "p90_ae", "mae_ended", "mae_mean", "pinball", "concordance"}
    own |= {"parameters", "latency_ms_batch1", "latency_ms_batch10"}
    for result in (metrics, *found.values()):
        assert own <= set(result)
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


def test_a_regressor_is_measured_beside_what_needs_no_checkpoint(
    memoryless: Path, regressor_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(memoryless), str(regressor_checkpoint), "--out", str(tmp_path)]
    assert main(["evaluate", *arguments]) == 0
    printed = capsys.readouterr().out
    assert f"| {LABELS[OWN_NAME]} |" in printed and "Kaplan–Meier" in printed
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["coverage"] is None, "a point forecast has no interval"
    assert set(metrics["comparators"]) == {"constant_median", "kaplan_meier"}
    assert not (tmp_path / "calibration.png").exists()


# On another dataset.


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A dataset of 20 requests, and a regressor that was trained on it."""
    folder = tmp_path_factory.mktemp("small")
    record(folder / "dataset")
    options = ("--model.init_args.widths=[32]", "--trainer.max_epochs=2")
    return folder / "dataset", fit("star", folder / "dataset", folder / "star", *options)


def test_names_in_files_of_others_are_printed_as_text(
    small: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset, checkpoint = (shutil.copytree(one, tmp_path / one.name) for one in small)
    for file in (*(dataset / "sessions").glob("*.json"), checkpoint / "config.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"model": "a\x1b[2Jb"}))
    arguments = str(dataset), str(checkpoint), "--comparators", "{}"
    assert main(["evaluate", *arguments]) == 0
    printed = capsys.readouterr().out
    assert "forecasts for a\\x1b[2Jb" in printed
    assert all(line.isprintable() for line in printed.splitlines())
    config = json.loads((checkpoint / "config.json").read_text())
    config["provenance"]["split_seed"] = [[]]
    (checkpoint / "config.json").write_text(json.dumps(config))
    assert "split_seed must be a whole number from 0, not [[]]" in error_of(capsys, *arguments)


def test_a_dataset_collected_later_is_measured_in_place_of_the_test_part(
    small: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (dataset, checkpoint), later = small, tmp_path / "later"
    record(later, prefix="b")
    arguments = [str(dataset), str(checkpoint), "--out", str(tmp_path), "--on"]
    for part in ("validation", "all"):
        message = f"--on measures a whole dataset, --part {part}"
        assert message in error_of(capsys, *arguments, str(later), "--part", part)
    assert "no request with a prompt of its own" in error_of(capsys, *arguments, str(later))
    same = str(dataset / ".." / dataset.name)
    assert "--on must be another dataset" in error_of(capsys, *arguments, same)
    known, *others = requests_files(later)
    own = with_column("prompt_token_ids", lambda values: [[i] for i, _ in enumerate(values)])
    for file in others:
        change_shard(file, own)
    forecasts = tmp_path / "forecasts.parquet"
    assert main(["evaluate", *arguments, str(later), "--forecasts", str(forecasts)]) == 0
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    left_out = pq.read_metadata(known).num_rows
    assert metrics["n_requests"] == 20 - left_out
    assert metrics["notes"][0].startswith(f"{left_out} requests of later are left out")
    assert metrics["provenance"]["part"] == "later"
    assert 0 < len(read_recording(forecasts)) <= metrics["n_requests"]
    assert {"constant_median", "kaplan_meier"} == set(metrics["comparators"])


@pytest.mark.parametrize("which", ["dataset", "later"])
def test_prompts_that_were_not_recorded_are_not_taken_for_new_ones(
    small: tuple[Path, Path], tmp_path: Path, which: str
) -> None:
    later, copied = tmp_path / "later", tmp_path / "dataset"
    record(later, prefix="b")
    shutil.copytree(small[0], copied)
    for file in requests_files({"dataset": copied, "later": later}[which]):
        change_shard(file, with_column("prompt_token_ids", lambda values: [None] * len(values)))
    arguments = ["evaluate", str(copied), str(small[1]), "--out", str(tmp_path)]
    assert main([*arguments, "--on", str(later)]) == 0
    said, *_ = json.loads((tmp_path / "metrics.json").read_text())["notes"]
    assert said == (
        f"The prompts of 20 requests of {which} were not recorded, so that requests of later "
        "may be among those that the predictor learned from."
    )


def test_a_dataset_of_another_model_is_refused_with_both_names(
    small: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path / "other", new_session(model="Qwen/Qwen3-0.6B"))
    error = error_of(capsys, str(tmp_path / "other"), str(small[1]))
    assert "trained on hidden states of acme/small-model" in error
    assert "these are of Qwen/Qwen3-0.6B" in error


# The regressor beside it.


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
    arguments = [str(memoryless), str(survival_checkpoint), "--out", str(tmp_path)]
    error = error_of(capsys, *arguments, "--comparators", json.dumps({"regressor": filled}))
    assert error.startswith("headway evaluate: ") and message in error
    assert not (tmp_path / "metrics.json").exists()


@pytest.fixture(scope="module")
def other_split(memoryless: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A regressor that was trained on another split of the same dataset."""
    out = tmp_path_factory.mktemp("other_split") / "checkpoint"
    few = (*FEW_ROWS, "--trainer.max_epochs", "2")
    return fit("star", memoryless, out, *few, "--data.split_seed", "5")
