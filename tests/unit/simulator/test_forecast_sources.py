"""What simulated policies get: sources of forecasts, and recordings of real ones."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from recorded_dataset import change_shard, with_column

from data_collection.dataset.dataset_schema import SplitName, split_requests
from predictor.evaluation.evaluate import evaluate
from predictor.evaluation.record_forecasts import LeftOut, record_forecasts
from predictor.forecasts.forecast import Forecast, PointForecast, SurvivalForecast
from predictor.forecasts.forecast_recording import ForecastRecording, read_recording
from predictor.forecasts.forecast_sensitivity import binned, renewed_every, star_bins
from predictor.models.checkpoint import export_checkpoint, load_predictor
from predictor.models.hidden_state_mlp import ModelMismatchError
from predictor.models.survival_mlp import SurvivalMLP
from predictor.prompts.prompt_predictor import PromptEmbedding, PromptPredictor
from predictor.training.row_table import RowTable, load_rows
from predictor.training.rows_data_module import request_rows
from rescheduler.simulator.forecasts.forecast_arrays import (
    ForecastArrays,
    expected_remaining,
    splitmix64,
    survival_row,
)
from rescheduler.simulator.forecasts.forecast_sources import SOURCES, Classified, create_forecast
from rescheduler.simulator.workloads.trace import ReplayTrace, first_requests
from rescheduler.simulator.workloads.trace_files import create_trace

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

POINTS = np.array([0, 1, 3, 10, 40])
RECORDINGS = Path(__file__).parents[3] / "recordings"


def arrays(
    name: str, lengths: IntArray | None = None, seed: int = 0, **options: object
) -> ForecastArrays:
    return create_forecast(name, **options).arrays(lengths, seed)


def survival(f: ForecastArrays, generated: int, output: int = 0, template: int = -1) -> FloatArray:
    out = np.empty(len(POINTS))
    survival_row(f, 0, template, generated, output, POINTS, out)
    return out


def remaining(f: ForecastArrays, generated: int, output: int, number: int = 0) -> float:
    return float(expected_remaining(f, number, -1, generated, output))


def test_draws_are_those_of_splitmix64() -> None:
    assert splitmix64(np.uint64(0)) == 0xE220A8397B1DCDAF  # its published first number


def test_an_oracle_knows_the_length_and_nothing_is_known_without_one() -> None:
    oracle = arrays("oracle")
    for generated in (0, 7, 99):
        assert remaining(oracle, generated, 100) == 100 - generated
    assert survival(oracle, 95, 100).tolist() == [1, 1, 1, 0, 0]
    assert remaining(arrays("none"), 3, 100) == 0


def test_an_oracle_that_ages_stays_one() -> None:
    for k in (1, 20, 100):
        stale = arrays("interval", k=k)
        assert [remaining(stale, n, 250) for n in (0, 19, 21, 99, 249)] == [250, 231, 229, 151, 1]


def test_noise_is_lognormal_new_at_each_prediction_and_repeatable() -> None:
    noisy = arrays("noisy", seed=5, sigma=0.4, interval=20)
    first = np.array([remaining(noisy, 0, 10_000, number) for number in range(4000)])
    assert np.log(first / 10_000).mean() == pytest.approx(0, abs=0.02)
    assert np.log(first / 10_000).std() == pytest.approx(0.4, rel=0.04)
    assert remaining(noisy, 19, 10_000, 3) == pytest.approx(first[3] - 19)  # it ages
    assert remaining(noisy, 20, 10_000, 3) != pytest.approx(first[3] - 20)  # and is renewed
    again = arrays("noisy", seed=5, sigma=0.4, interval=20)
    other = arrays("noisy", seed=6, sigma=0.4, interval=20)
    assert remaining(again, 0, 10_000, 3) == first[3] != remaining(other, 0, 10_000, 3)


def test_bins_are_those_of_the_predictors_sensitivity_study() -> None:
    outputs = np.array([90, 5_000, 20_000, 32_000])
    for bins in (2, 4, 6):
        edges = star_bins(bins, 32_768)

        def predicted(generated: IntArray, edges: IntArray = edges) -> Forecast:
            return binned(PointForecast.new(outputs - generated), edges)

        coarse = arrays("binned", bins=bins, context=32_768, interval=100)
        for generated in (0, 50, 89):
            expected = renewed_every(predicted, 100)(np.full(4, generated)).mean()
            found = [remaining(coarse, generated, output) for output in outputs.tolist()]
            assert found == expected.tolist()


def test_own_edges_bin_too() -> None:
    coarse = arrays("binned", edges=[0, 10, 50], interval=1)
    assert [remaining(coarse, 0, output) for output in (4, 10, 49, 4000)] == [5, 30, 30, 30]


def test_kaplan_meier_knows_the_lengths_of_others_at_the_same_age() -> None:
    trace = create_trace("geometric", requests=40_000, mean_output=50)
    sample = first_requests(trace, np.random.default_rng(0), 40_000).output
    marginal = arrays("kaplan_meier", sample)
    # Geometric lengths have no memory: whatever the age, 50 tokens are to come.
    for generated in (0, 30, 100):
        assert remaining(marginal, generated, 0) == pytest.approx(50, rel=0.06)
        expected = (1 - 1 / 50) ** POINTS
        np.testing.assert_allclose(survival(marginal, generated), expected, rtol=0.06)
    few = arrays("kaplan_meier", np.array([2, 2, 5, 9]))
    assert few.table.tolist() == [1, 1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25, 0]
    assert survival(few, 2).tolist() == [1, 1, 0.5, 0, 0]
    assert survival(few, 40).tolist() == [1, 0, 0, 0, 0]


LENGTHS = np.array([100] * 6 + [200] * 2 + [500] * 3 + [3000])
MEANS = {0: 125.0, 1: 500.0, 2: 3000.0}


def named(source: Classified, outputs: list[int], seed: int = 0) -> list[float]:
    arrays = source.arrays(LENGTHS, seed)
    return [expected_remaining(arrays, i, 0, 0, output) for i, output in enumerate(outputs)]


def test_a_bucket_is_represented_by_the_mean_of_its_requests() -> None:
    source = Classified(accuracy=1.0)
    assert (
        named(source, [1, 255, 256, 2047, 2048, 4000]) == [125.0] * 2 + [500.0] * 2 + [3000.0] * 2
    )


def test_the_named_bucket_stays_and_ages() -> None:
    arrays = Classified(accuracy=0.5).arrays(LENGTHS, 1)
    for number in range(40):
        first = expected_remaining(arrays, number, 0, 0, 200)
        assert first in MEANS.values()
        later = [expected_remaining(arrays, number, 0, n, 200) for n in (50, 100, 199)]
        assert later == [max(first - n, 1.0) for n in (50, 100, 199)]


def test_accuracy_is_as_set_and_errors_follow_bucket_frequencies() -> None:
    outputs = [500] * 20_000
    said = np.array(named(Classified(accuracy=0.79), outputs, seed=7))
    assert np.mean(said == 500.0) == pytest.approx(0.79, abs=0.01)
    wrong = said[said != 500.0]
    assert np.mean(wrong == 125.0) == pytest.approx(8 / 9, abs=0.02)


def test_what_learns_from_lengths_says_that_it_needs_them() -> None:
    needing = [name for name, source in SOURCES.items() if source.needs_lengths]
    assert needing == ["classified", "kaplan_meier"]
    for name in needing:
        for lengths in (None, np.empty(0, dtype=np.int64)):
            with pytest.raises(ValueError, match="needs output lengths of other requests"):
                create_forecast(name).arrays(lengths, 0)


def recorded_by(
    dataset: Path, checkpoint: Path, out: Path, part: SplitName = "test"
) -> tuple[ForecastRecording, LeftOut]:
    predictor, table = load_predictor(str(checkpoint)), load_rows(dataset)
    requests = split_requests(table.requests.group, 0)[part]
    return record_forecasts(predictor, table, requests, out, part)


@pytest.fixture(scope="module")
def recording(
    memoryless: Path, survival_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """What the small survival model forecasts of its test requests."""
    out = tmp_path_factory.mktemp("recording") / "new" / "forecasts.parquet"
    recorded_by(memoryless, survival_checkpoint, out)
    return out


def recorded_rows(dataset: Path) -> RowTable:
    """Return the rows of the test requests that ran to their end, in the recording's order."""
    table = load_rows(dataset)
    chosen = split_requests(table.requests.group, 0)["test"]
    rows = table.select(np.isin(table.request, chosen)).ran_to_their_end()
    return rows.select(np.lexsort((rows.generated_tokens, rows.request)))


def test_a_recording_holds_lengths_and_forecasts_of_the_test_requests(
    memoryless: Path, survival_checkpoint: Path, recording: Path
) -> None:
    recorded = read_recording(recording)
    predictor = load_predictor(str(survival_checkpoint))
    assert isinstance(predictor, SurvivalMLP)
    rows = recorded_rows(memoryless)
    requests = np.unique(rows.request)
    assert (recorded.model, recorded.part) == (predictor.serving_model, "test")
    assert (recorded.predictor, recorded.interval) == (predictor.fingerprint(), 5)
    np.testing.assert_array_equal(recorded.output, rows.requests.total_tokens[requests])
    reasons = np.array(rows.requests.finish_reason)[requests]
    np.testing.assert_array_equal(recorded.cut, reasons == "length")
    assert (recorded.output[recorded.cut] == recorded.max_tokens[recorded.cut]).all()
    assert (recorded.output[~recorded.cut] <= recorded.max_tokens[~recorded.cut]).all()
    expected = predictor.forecast(request_rows(rows))
    np.testing.assert_allclose(recorded.curves, expected.survival, atol=0.6 / 65_535)
    SurvivalForecast.new(recorded.edges, recorded.curves)  # starts at 1, never rises


def test_a_replayed_forecast_is_the_predictors_aged_and_capped(
    memoryless: Path, survival_checkpoint: Path, recording: Path
) -> None:
    recorded = read_recording(recording)
    rows = recorded_rows(memoryless)
    live = load_predictor(str(survival_checkpoint)).forecast(request_rows(rows))
    replayed = arrays("replay", recording=recording)
    ages = 0
    for template in range(0, len(recorded), 7):
        for generated in range(recorded.output[template]):
            row = recorded.first_row[template] + generated // 5
            now = live.select(np.array([row])).aged(generated % 5)
            found = survival(replayed, generated, template=template)
            np.testing.assert_allclose(found, now.at(POINTS)[0], atol=2e-4)
            mean = expected_remaining(replayed, 0, template, generated, 0)
            assert mean == pytest.approx(now.mean()[0], abs=0.02)
            ages += 1
    assert ages > 100


def write_reader_of_prompts(folder: Path, smollm2: Path) -> None:
    """Write an untrained predictor of prompts."""
    embedding = PromptEmbedding.fit(str(smollm2), [list(range(11)), [50, 60]], dimension=8)
    torch.manual_seed(0)
    model = {"model": "acme/small-model", "model_revision": "abc123", "layer": "prompt"}
    sizes = {"hidden_size": embedding.size, "widths": (8,), "trained_remaining_tokens": (1, 90)}
    reader = SurvivalMLP([0, 4, 16, 100], **model, **sizes, k=1)
    export_checkpoint(reader, folder, {})
    embedding.save(folder)


def test_prompts_are_read_also_where_states_of_an_earlier_layer_are_averaged(
    memoryless: Path, survival_checkpoint: Path, smollm2: Path, tmp_path: Path
) -> None:
    write_reader_of_prompts(tmp_path, smollm2)
    predictor, table = load_predictor(str(survival_checkpoint)), load_rows(memoryless)
    session = replace(table.session, layer="20", state_half_life=30.0)
    averaged = replace(table, session=session)
    with pytest.raises(ModelMismatchError, match="averaged with a half-life of 30 tokens"):
        predictor.refuse_other_model(session)
    requests = split_requests(table.requests.group, 0)["test"]
    prompts = PromptPredictor.load(str(tmp_path))
    out = tmp_path / "forecasts.parquet"
    recorded, _ = record_forecasts(predictor, averaged, requests, out, "test", prompts)
    assert recorded.prompt_curves is not None


def test_what_was_forecast_of_prompts_is_known_before_the_first_token(
    memoryless: Path, survival_checkpoint: Path, smollm2: Path, tmp_path: Path
) -> None:
    """The recording has what an untrained model forecasts of the prompts, too."""
    write_reader_of_prompts(tmp_path, smollm2)
    with_prompts = tmp_path / "forecasts.parquet"
    given = memoryless, str(survival_checkpoint), tmp_path / "evaluation"
    asked = {"forecasts": with_prompts, "prompt_checkpoint": str(tmp_path)}
    evaluate(*given, part="all", **asked)
    recorded = read_recording(with_prompts)
    assert recorded.prompt_curves is not None
    assert recorded.prompt_predictor
    assert recorded.part == "all"
    of_prompts = SurvivalForecast.new(
        recorded.edges, recorded.prompt_curves, recorded.max_tokens.astype(float)
    )
    states = create_forecast("replay", recording=with_prompts, reads="hidden_states")
    both = create_forecast("replay", recording=with_prompts)
    alone = arrays("replay", recording=with_prompts, reads="prompts")
    lengths = recorded.output
    known = both.before_prefill(both.arrays(None, 0), lengths)
    unread = states.before_prefill(states.arrays(None, 0), lengths)
    marginal = expected_remaining(unread, 0, 3, 0, 0)
    for template in (0, 3, 60):
        mean = of_prompts.mean()[template]
        assert expected_remaining(known, 0, template, 0, 0) == pytest.approx(mean, abs=0.02)
        assert expected_remaining(alone, 0, template, 0, 0) == pytest.approx(mean, abs=0.02)
        assert expected_remaining(unread, 0, template, 0, 0) == marginal
        expected = of_prompts.at(POINTS)[template]
        np.testing.assert_allclose(survival(known, 0, template=template), expected, atol=2e-4)
    long = int(recorded.output.argmax())
    later = arrays("replay", recording=with_prompts, reads="hidden_states")
    for generated in (1, 7):
        same = survival(later, generated, template=long)
        np.testing.assert_array_equal(survival(known, generated, template=long), same)
        aged = of_prompts.aged(float(generated)).at(POINTS)[long]
        np.testing.assert_allclose(survival(alone, generated, template=long), aged, atol=2e-3)


def test_forecasts_may_be_replayed_at_longer_intervals(recording: Path) -> None:
    recorded = read_recording(recording)
    every = arrays("replay", recording=recording)
    thinned = arrays("replay", recording=recording, interval=15)
    assert (every.interval, thinned.interval) == (5, 15)
    assert thinned.n_rows.tolist() == (-(-recorded.output // 15)).tolist()
    long = int(recorded.output.argmax())
    for generated in (0, 15, 30):
        same = survival(every, generated, template=long)
        np.testing.assert_array_equal(survival(thinned, generated, template=long), same)
    for template in range(len(recorded)):
        first = every.curves[every.first_row[template]]
        np.testing.assert_array_equal(thinned.curves[thinned.first_row[template]], first)
    with pytest.raises(ValueError, match="every 5 tokens, so that interval must be a multiple"):
        create_forecast("replay", recording=recording, interval=12)


def test_replayed_requests_are_the_recorded_ones(recording: Path) -> None:
    recorded = read_recording(recording)
    trace = create_trace("replay", recording=str(recording), requests=70_000)
    sizes = [len(block.prompt) for block in trace.blocks(np.random.default_rng(0))]
    block = first_requests(trace, np.random.default_rng(0), 70_000)
    assert sizes == [65_536, 4464]
    np.testing.assert_array_equal(block.output, recorded.output[block.template])
    np.testing.assert_array_equal(block.prompt, recorded.prompt[block.template])
    drawn = np.bincount(block.template, minlength=len(recorded)) / 70_000 * len(recorded)
    assert drawn.min() > 0.7
    assert drawn.max() < 1.3


def test_replayed_forecasts_refuse_other_requests(
    recording: Path,
    memoryless: Path,
    survival_checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ValueError, match="has no forecasts of prompts"):
        create_forecast("replay", recording=recording, reads="prompts")
    source = create_forecast("replay", recording=recording)
    source.refuse_other_trace(ReplayTrace(recording=recording))
    out, given = tmp_path / "other", (memoryless, str(survival_checkpoint), tmp_path / "evaluation")
    evaluate(*given, comparators={}, part="validation", forecasts=out)
    other, printed = read_recording(out), capsys.readouterr().out
    assert f"{len(other)} validation requests, {len(other.curves)} forecasts" in printed
    assert "left out" in printed
    for trace in (create_trace("star"), ReplayTrace(recording=out)):
        with pytest.raises(ValueError, match="are of its own requests"):
            source.refuse_other_trace(trace)
    create_forecast("oracle").refuse_other_trace(create_trace("star"))


def test_a_regressors_number_is_recorded_as_a_step(
    memoryless: Path, regressor_checkpoint: Path, tmp_path: Path
) -> None:
    out = tmp_path / "forecasts.parquet"
    recorded, _ = recorded_by(memoryless, regressor_checkpoint, out)
    rows = recorded_rows(memoryless)
    predicted = load_predictor(str(regressor_checkpoint)).forecast(request_rows(rows)).uncapped()
    middle = SurvivalForecast.new(recorded.edges, recorded.curves).median()
    bins = np.searchsorted(recorded.edges, predicted.median(), "right") - 1
    inside = bins < len(recorded.edges) - 1
    assert inside.mean() > 0.9
    widths = np.diff(recorded.edges)[bins[inside]]
    assert (np.abs(middle - predicted.median())[inside] <= widths).all()
    assert set(np.unique(recorded.curves).tolist()) == {0.0, 1.0}


def test_requests_without_all_their_rows_are_left_out_and_counted(
    memoryless: Path, survival_checkpoint: Path, tmp_path: Path
) -> None:
    dataset = tmp_path / "dataset"
    shutil.copytree(memoryless, dataset)
    rows = recorded_rows(memoryless)
    at_0, at_10, last = (rows.requests.request_id[i] for i in np.unique(rows.request)[[2, 8, 11]])

    def drop(table: pa.Table) -> pa.Table:
        names = np.array(table.column("request_id").to_pylist())
        n, left = (table.column(c).to_numpy() for c in ("generated_tokens", "remaining_tokens"))
        gone = ((names == at_0) & (n == 0)) | ((names == at_10) & (n == 10))
        return table.filter(pa.array(~(gone | ((names == last) & (left <= 5)))))

    for shard in sorted((dataset / "data").glob("rows-*.parquet")):
        change_shard(shard, drop)
    checkpoint = survival_checkpoint
    whole, complete = recorded_by(memoryless, checkpoint, tmp_path / "whole")
    recorded, left_out = recorded_by(dataset, checkpoint, tmp_path / "less")
    assert complete.incomplete == 0 < complete.unfinished == left_out.unfinished
    assert left_out.incomplete == len(whole) - len(recorded) == 3
    for shard in (dataset / "data").glob("rows-*.parquet"):
        change_shard(shard, lambda table: table.filter(pc.field("generated_tokens") > 0))
    with pytest.raises(ValueError, match=r"no test request can be recorded: \d+ did not run"):
        recorded_by(dataset, checkpoint, tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_an_unknown_max_tokens_caps_no_forecast(
    memoryless: Path, survival_checkpoint: Path, tmp_path: Path
) -> None:
    dataset = tmp_path / "dataset"
    shutil.copytree(memoryless, dataset)
    for shard in (dataset / "data").glob("rows-*.parquet"):
        change_shard(shard, with_column("max_tokens", lambda values: [0] * len(values)))
    recorded, _ = recorded_by(dataset, survival_checkpoint, tmp_path / "recording")
    assert set(recorded.max_tokens.tolist()) == {int(recorded.edges[-1])}


def test_an_invalid_recording_is_refused(recording: Path, tmp_path: Path) -> None:
    path = tmp_path / "forecasts.parquet"
    path.write_bytes(recording.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"forecasts\.parquet: cannot be read as Parquet"):
        read_recording(path)
    pq.write_table(pa.table({"a": [1]}), path)
    with pytest.raises(ValueError, match="no recording of forecasts; `headway evaluate"):
        read_recording(path)
    for described in (b"[]", b"null", b"[" * 100_000):
        pq.write_table(pa.table({"a": [1]}, metadata={b"headway": described}), path)
        with pytest.raises(ValueError, match=r"forecasts\.parquet: (no|a) recording of"):
            read_recording(path)
    pq.write_table(pa.table([[1], [2]], names=["a", "a"]), path)
    with pytest.raises(ValueError, match=r"forecasts\.parquet: it has column 'a' more than once"):
        read_recording(path)
    table = pq.read_table(recording)
    metadata = table.schema.metadata
    newer = {b"headway": metadata[b"headway"].replace(b'"version": 1', b'"version": 2')}
    pq.write_table(table.replace_schema_metadata(newer), path)
    with pytest.raises(ValueError, match="a recording of version 2, not 1"):
        read_recording(path)
    for damaged in (
        table.drop_columns(["survival"]),
        table.set_column(1, "output_tokens", pa.array([1] * len(table), pa.int32())),
        table.slice(0, 0),
        with_column("max_tokens", lambda values: [None, *values[1:]])(table),
    ):
        pq.write_table(damaged.replace_schema_metadata(metadata), path)
        with pytest.raises(ValueError, match=r"forecasts\.parquet: a damaged recording"):
            read_recording(path)
    with pytest.raises(ValueError, match=r"a Parquet file, not a trace; .* `name: replay`"):
        create_trace(path=recording)
    with pytest.raises(ValueError, match="replay: requests must be at least 1, not 0"):
        create_trace("replay", recording=recording, requests=0)


def test_the_shipped_recording_is_what_its_readme_says() -> None:
    path = RECORDINGS / "smollm2-135m-instruct.parquet"
    recorded = read_recording(path)
    [row] = [
        line
        for line in (RECORDINGS / "README.md").read_text().splitlines()
        if line.startswith(f"| `{path.name}` |")
    ]
    assert f"| {len(recorded)} of {recorded.model.split('/')[-1]}" in row
    assert f"`{recorded.predictor}`" in row
    assert (recorded.part, int(recorded.max_tokens.max())) == ("test", 1024)
    assert len(recorded.curves) == 12_258
    assert path.stat().st_size < 2_000_000
