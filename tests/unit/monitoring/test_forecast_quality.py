"""Errors and coverage of the forecasts that engines publish, and their recalibration."""

import json
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from published_telemetry import Engine, GivenTelemetry, endpoint_of, frames, publisher

from predictor.forecasts.kaplan_meier import Recalibration, survival_edges
from predictor.live.telemetry_messages import FinishedEvent, encode_survival
from predictor.models.checkpoint import export_checkpoint, load_predictor
from predictor.models.hidden_state_mlp import RemainingLengthMLP
from predictor.models.survival_mlp import SurvivalMLP
from rescheduler.monitoring.forecast_quality import (
    ForecastMetrics,
    ForecastQuality,
    ForecastScores,
    LastHour,
    score,
)
from rescheduler.monitoring.recalibrate import FinishedLog, read_finished_log, recalibrate
from rescheduler.telemetry.telemetry_view import FinishedForecasts, InstanceKey, KeptForecast

EDGES = survival_edges(4096)
K = 20
MAX_TOKENS = 600
IDENTITY = Recalibration([0.0, 1.0], [0.0, 1.0])
NETWORK: dict[str, Any] = {"model": "acme/small", "model_revision": "r", "hidden_size": 4}
NETWORK |= {"k": K, "widths": [8]}


def finished_requests(
    n: int,
    wrong_by: float = 1.0,
    seed: int = 0,
    served_with: Recalibration = IDENTITY,
    reason: str | None = None,
) -> list[FinishedForecasts]:
    """Requests that end without memory: their true curve is known at any age.

    The forecast mean length is ``wrong_by`` times the true one. All ended for the reason, or truly.
    """
    rng = np.random.default_rng(seed)
    requests = []
    for i in range(n):
        mean = rng.choice([40, 150, 400])
        length = int(rng.geometric(1 / mean))
        total = min(length, MAX_TOKENS)
        true_reason = "stop" if length <= MAX_TOKENS else "length"
        curve = served_with.apply((1 - 1 / (mean * wrong_by)) ** EDGES[None])
        (coded,) = encode_survival(curve)
        requests.append(
            FinishedForecasts(
                instance=InstanceKey("gpu0", 0),
                model="acme/small",
                checkpoint="",
                event=FinishedEvent(f"request-{i}", reason or true_reason, 9, total, MAX_TOKENS),
                edges=tuple(EDGES.tolist()),
                forecasts=[KeptForecast(at, MAX_TOKENS - at, coded) for at in range(0, total, K)],
            )
        )
    return requests


def quality_of(requests: list[FinishedForecasts]) -> ForecastQuality:
    quality = ForecastQuality()
    for scored in map(score, requests):
        if scored is not None:
            quality.add(scored.figures())
    return quality


def test_calibrated_forecasts_cover_what_they_say() -> None:
    quality = quality_of(finished_requests(500))
    figures = quality.figures()
    for level, share in figures.coverage().items():
        assert share == pytest.approx(level / 100, abs=0.05)
    assert quality.alarm() is None
    assert quality.scored == figures.requests == 500


@pytest.mark.parametrize("wrong_by", [4.0, 0.25])
def test_a_shift_raises_the_alarm_and_says_what_to_do(wrong_by: float) -> None:
    quality = quality_of(finished_requests(49, wrong_by))
    assert quality.alarm() is None  # too few
    quality.add(score(finished_requests(1, wrong_by, seed=7)[0]).figures())
    alarm = quality.alarm()
    assert "headway evaluate recalibrate" in alarm
    assert "too narrow" in alarm
    bias = quality.figures().bias_by_age()
    assert all((tokens > 0) == (wrong_by > 1) for tokens in bias.values())


def test_the_figures_are_of_the_window() -> None:
    last = finished_requests(500, seed=3)
    quality = quality_of([*finished_requests(200, wrong_by=5.0), *last])
    figures, fresh = quality.figures(), quality_of(last).figures()
    assert figures.coverage() == fresh.coverage()
    assert figures.mae() == fresh.mae()
    assert (quality.scored, figures.requests) == (700, 500)


def test_errors_are_of_the_capped_median_by_age() -> None:
    (coded,) = encode_survival(np.array([[1.0, 0.5, 0.0]]))  # median 100
    event = FinishedEvent("a", "stop", 9, 150, 200)
    forecasts = [KeptForecast(0, 200, coded), KeptForecast(130, 70, coded)]
    request = FinishedForecasts(InstanceKey("e", 0), "m", "", event, (0, 100, 1000), forecasts)
    quality, scored = quality_of([request]), score(request)
    np.testing.assert_allclose(scored.medians, [100, 70], atol=0.1)  # the second is capped
    np.testing.assert_allclose(scored.remaining, [150, 20])
    np.testing.assert_allclose(scored.levels, [0.5 + 0.5 * 49.5 / 900, 0.5 * 0.195], atol=1e-4)
    figures = quality.figures()
    assert figures.bias_by_age() == pytest.approx({"0": -50, "128-511": 50}, abs=0.1)
    assert figures.mae() == pytest.approx(50, abs=0.1)


def test_only_requests_that_ran_to_their_end_are_scored() -> None:
    quality = quality_of(finished_requests(5, reason="abort"))
    never_forecast = finished_requests(1)[0]
    never_forecast.forecasts.clear()
    assert score(never_forecast) is None
    assert quality.scored == 0
    assert quality.figures() is quality.alarm() is None


def write_log(path: Path, requests: list[FinishedForecasts], served_by: Path | None = None) -> None:
    served = load_predictor(str(served_by)) if served_by else None
    checkpoint = served.fingerprint() if isinstance(served, SurvivalMLP) else ""
    with closing(FinishedLog(path)) as log:
        for request in requests:
            scored = score(replace(request, checkpoint=checkpoint))
            if scored is not None:
                log.append(scored)


def test_the_log_is_read_as_it_was_written(tmp_path: Path) -> None:
    path, requests = tmp_path / "finished.jsonl", finished_requests(20)
    write_log(path, [*requests[:10], *finished_requests(3, reason="abort")])
    write_log(path, requests[10:])
    read = list(read_finished_log(path))
    assert len(read) == len(path.read_text().splitlines()) == 20
    for logged, request in zip(read, requests, strict=True):
        named = (logged.request_id, logged.instance, logged.model)
        assert named == (request.event.request_id, "gpu0", "acme/small")
        assert logged.generated == list(range(0, request.event.total_tokens, K))
        assert logged.cut == (logged.finish_reason == "length")
        scored = score(request)
        np.testing.assert_allclose(logged.levels, scored.levels, atol=1e-6)
        np.testing.assert_allclose(logged.medians, scored.medians, atol=0.051)


def test_half_a_line_at_the_end_is_ignored_and_overwritten(tmp_path: Path) -> None:
    path, requests = tmp_path / "finished.jsonl", finished_requests(4)
    write_log(path, requests[:3])
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    assert len(list(read_finished_log(path))) == 2
    write_log(path, requests[3:])
    read = [logged.request_id for logged in read_finished_log(path)]
    assert read == ["request-0", "request-1", "request-3"]
    path.write_bytes(whole[:8])  # not even one
    write_log(path, requests[:1])
    assert len(list(read_finished_log(path))) == 1


@pytest.mark.parametrize("content", ["a diary", "a diary\n", '{"request_id": "a"}\n'])
def test_another_file_is_not_appended_to(tmp_path: Path, content: str) -> None:
    path = tmp_path / "diary.txt"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"diary.txt.*no log of finished requests"):
        FinishedLog(path)
    assert path.read_text() == content


def test_a_broken_line_of_a_log_is_named(tmp_path: Path) -> None:
    path = tmp_path / "finished.jsonl"
    write_log(path, finished_requests(2))
    first, second = path.read_text().splitlines()
    entry = json.loads(second)
    entry["levels"].append(0.5)
    path.write_text(f"{first}\n{json.dumps(entry)}\n")
    with pytest.raises(ValueError, match=r"line 2.*as many of"):
        list(read_finished_log(path))
    with pytest.raises(ValueError, match="no such file; give --telemetry"):
        list(read_finished_log(tmp_path / "none.jsonl"))


def survival_checkpoint(folder: Path) -> Path:
    predictor = SurvivalMLP(EDGES.tolist(), **NETWORK)
    export_checkpoint(predictor, folder, {"commit": "abc", "dataset": "demo"})
    return folder


def coverage_80_of(recalibration: Recalibration, wrong_by: float) -> float:
    """Return the coverage on requests that nothing was fitted to."""
    fresh = finished_requests(500, wrong_by, seed=99, served_with=recalibration)
    return quality_of(fresh).figures().coverage()[80]


def test_recalibrating_mends_the_coverage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, log = survival_checkpoint(tmp_path / "served"), tmp_path / "finished.jsonl"
    (checkpoint / "dataset_card.md").write_text("about the data")
    assert coverage_80_of(IDENTITY, wrong_by=4.0) < 0.7
    write_log(log, finished_requests(500, wrong_by=4.0), checkpoint)
    recalibrate(str(checkpoint), log, tmp_path / "recalibrated")
    printed = capsys.readouterr().out
    assert "flatters" in printed
    assert all(f"{level}%" in printed for level in (50, 80, 90))

    recalibrated = load_predictor(str(tmp_path / "recalibrated"))
    assert coverage_80_of(recalibrated.recalibration, wrong_by=4.0) == pytest.approx(0.8, abs=0.06)
    assert recalibrated.provenance["commit"] == "abc"
    assert recalibrated.provenance["recalibrated"]["requests"] == 500
    card = (tmp_path / "recalibrated" / "README.md").read_text()
    assert "| recalibrated |" in card
    assert (tmp_path / "recalibrated" / "dataset_card.md").read_text() == "about the data"

    # The length of answers changes once more, under the recalibrated predictor.
    again, served_with = tmp_path / "again.jsonl", recalibrated.recalibration
    served = finished_requests(500, wrong_by=0.5, served_with=served_with)
    write_log(again, served, tmp_path / "recalibrated")
    recalibrate(str(tmp_path / "recalibrated"), again, tmp_path / "recalibrated twice")
    twice = load_predictor(str(tmp_path / "recalibrated twice"))
    assert coverage_80_of(twice.recalibration, wrong_by=0.5) == pytest.approx(0.8, abs=0.06)


def test_an_engine_is_listened_to_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint, log = survival_checkpoint(tmp_path / "served"), tmp_path / "finished.jsonl"
    predictor = load_predictor(str(checkpoint))
    engine, done = Engine(), threading.Event()
    with publisher(bind=True) as sender:

        def serve() -> None:
            while not done.wait(0.01):
                sender.send_multipart(frames(engine.start()))
                engine.decode(10)
                snapshot = engine.snapshot()
                snapshot = msgspec.structs.replace(snapshot, checkpoint=predictor.fingerprint())
                sender.send_multipart(frames(snapshot))
                if len(engine.running) > 3:
                    sender.send_multipart(frames(engine.finish()))

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            out = tmp_path / "out"
            recalibrate(str(checkpoint), log, out, last=40, telemetry=endpoint_of(sender))
        finally:
            done.set()
            thread.join()
    logged = list(read_finished_log(log))
    assert len({request.request_id for request in logged}) == len(logged) >= 40
    printed = capsys.readouterr().out
    assert "0 of 40 requests have ended" in printed
    assert "coverage on the 40 requests" in printed
    assert isinstance(load_predictor(str(out)), SurvivalMLP)


def test_only_the_last_requests_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint, log = survival_checkpoint(tmp_path / "served"), tmp_path / "finished.jsonl"
    requests = [*finished_requests(50, wrong_by=5.0), *finished_requests(40, seed=1)]
    write_log(log, requests, checkpoint)
    recalibrate(str(checkpoint), log, tmp_path / "out", last=40)
    assert "40 requests" in capsys.readouterr().out


def test_what_cannot_be_recalibrated_is_refused(tmp_path: Path) -> None:
    checkpoint, log = survival_checkpoint(tmp_path / "served"), tmp_path / "finished.jsonl"
    new = tmp_path / "new"
    write_log(log, finished_requests(29), checkpoint)
    with pytest.raises(ValueError, match="29 requests ran to their end, at least 30"):
        recalibrate(str(checkpoint), log, new)
    with pytest.raises(ValueError, match="last must be at least 30"):
        recalibrate(str(checkpoint), log, new, last=10)
    with pytest.raises(ValueError, match="already exists"):
        recalibrate(str(checkpoint), log, checkpoint)
    other, elsewhere = survival_checkpoint(tmp_path / "other"), tmp_path / "elsewhere.jsonl"
    write_log(elsewhere, finished_requests(40), other)
    with pytest.raises(ValueError, match="was forecast by the predictor"):
        recalibrate(str(checkpoint), elsewhere, new)
    with log.open("a") as file:
        line = log.read_text().splitlines()[0].replace("acme/small", "other/large")
        file.write(f"{line}\n")
    with pytest.raises(ValueError, match=r"request-0 ran on other/large.*reads acme/small"):
        recalibrate(str(checkpoint), log, new)
    export_checkpoint(RemainingLengthMLP(**NETWORK), tmp_path / "regression", {})
    with pytest.raises(ValueError, match="no probabilities to recalibrate"):
        recalibrate(str(tmp_path / "regression"), log, new)
    assert not new.exists()


def samples_of(metrics: ForecastMetrics) -> dict[str, float]:
    """Return what Prometheus would read, by name and values of labels."""
    registry = CollectorRegistry()
    registry.register(metrics)
    samples = [sample for family in registry.collect() for sample in family.samples]
    return {f"{s.name}{list(s.labels.values()) or ''}": s.value for s in samples}


def test_prometheus_reads_scores_and_telemetry() -> None:
    now, engine = [10.0], Engine()
    engine.start()  # lost
    end, late = engine.finish(name="a"), engine.start()
    snapshot = engine.snapshot()
    gauges = msgspec.structs.replace(snapshot.gauges, prefill_budget=96.5, failures=3)
    snapshot = msgspec.structs.replace(snapshot, gauges=gauges)
    with GivenTelemetry() as telemetry:
        telemetry.hear(*map(frames, (end, snapshot, snapshot)), [b"junk"], at=10.0)
        scores = ForecastScores(telemetry)
        scores.quality = quality_of(finished_requests(60, wrong_by=5.0))
        metrics = ForecastMetrics(telemetry, scores, clock=lambda: now[0])
        first = samples_of(metrics)
        telemetry.hear(frames(late), at=10.0)  # no longer lost
        now[0] = 14.0
        second = samples_of(metrics)
    figures = scores.quality.figures()
    assert first["headway_forecast_mae_tokens"] == figures.mae()
    assert first["headway_forecast_coverage_ratio['0.8']"] == figures.coverage()[80]
    assert first["headway_forecast_bias_tokens['1-127']"] == figures.bias_by_age()["1-127"]
    assert first["headway_forecast_miscalibrated"] == 1
    assert first["headway_forecast_scored_requests_total"] == 60
    errors = {"malformed": 1, "lost": 1, "duplicated": 1, "outdated": 0, "foreign": 0}
    for kind, count in errors.items():
        assert first[f"headway_telemetry_message_errors_total['{kind}']"] == count
    said = {"num_requests_running": 2, "num_requests_waiting": 2, "kv_cache_usage_ratio": 0.25}
    said |= {"prefill_budget_tokens": 96.5, "scheduler_failures_total": 3, "stale": 0}
    for name, value in said.items():
        assert first[f"headway_instance_{name}['gpu0', '0']"] == value
    assert second["headway_instance_stale['gpu0', '0']"] == 1
    assert second["headway_telemetry_message_errors_total['lost']"] == 1  # a counter never falls


def test_prometheus_finds_no_figures_before_the_first_request() -> None:
    with GivenTelemetry() as telemetry:
        samples = samples_of(ForecastMetrics(telemetry, ForecastScores(telemetry)))
    assert {name.partition("[")[0] for name in samples} == {
        "headway_forecast_miscalibrated",
        "headway_forecast_scored_requests_total",
        "headway_telemetry_message_errors_total",
    }


MINUTE = 60.0


def spread(
    hour: LastHour, requests: list[FinishedForecasts], begin: float, minutes: float
) -> LastHour:
    """Let requests end evenly within some minutes."""
    for i, request in enumerate(requests):
        hour.add(score(request).figures(), MINUTE * (begin + minutes * i / len(requests)))
    return hour


def test_they_are_those_that_prometheus_gets_of_the_same_requests() -> None:
    requests = finished_requests(200, wrong_by=0.25)
    figures = spread(LastHour(), requests, 3.0, 50.0).figures(54 * MINUTE)
    quality = quality_of(requests)
    watched = quality.figures()
    assert figures.requests == watched.requests == 200
    assert figures.mae() == pytest.approx(watched.mae())
    assert figures.coverage() == pytest.approx(watched.coverage())
    assert figures.bias_by_age() == pytest.approx(watched.bias_by_age())
    assert figures.alarm() == quality.alarm() is not None


def test_what_ended_earlier_does_not_count() -> None:
    hour = spread(LastHour(), finished_requests(60, wrong_by=5.0), 0.0, 30.0)
    recent = finished_requests(70, seed=1)
    spread(hour, recent, 80.0, 9.0)
    figures = hour.figures(90 * MINUTE)
    assert figures.requests == 70
    assert figures.mae() == pytest.approx(quality_of(recent).figures().mae())
    assert hour.figures(160 * MINUTE) is None
    assert hour.drift(160 * MINUTE) is None


@pytest.mark.parametrize(
    ("wrong_by", "low", "high"), [(1.0, 0.45, 0.55), (0.25, 0.7, 1), (4, 0, 0.3)]
)
def test_biased_forecasts_do_not_halve_the_ends(wrong_by: float, low: float, high: float) -> None:
    figures = spread(LastHour(), finished_requests(400, wrong_by), 0.0, 10.0).figures(10 * MINUTE)
    assert low <= figures.late_share() <= high
    assert wrong_by == 1 or (figures.bias() > 0) == (wrong_by > 1)


def test_worse_forecasts_are_drift_and_equal_ones_are_not() -> None:
    steady = spread(LastHour(), finished_requests(400), 0.0, 40.0)
    assert steady.drift(40 * MINUTE) == ""
    worse = spread(LastHour(), finished_requests(200), 0.0, 25.0)
    spread(worse, finished_requests(100, wrong_by=8.0, seed=1), 26.0, 14.0)
    drift = worse.drift(40 * MINUTE)
    assert "the forecasts have become worse" in drift
    better = spread(LastHour(), finished_requests(200, wrong_by=8.0), 0.0, 25.0)
    spread(better, finished_requests(100, seed=1), 26.0, 14.0)
    assert better.drift(40 * MINUTE) == ""


def test_drift_is_not_judged_from_little() -> None:
    soon = spread(LastHour(), finished_requests(100), 0.0, 12.0)
    spread(soon, finished_requests(100, wrong_by=8.0), 13.0, 12.0)
    assert soon.drift(25 * MINUTE) is None, "the first minutes have the short requests"
    few = spread(LastHour(), finished_requests(100), 0.0, 25.0)
    spread(few, finished_requests(49, wrong_by=8.0), 30.0, 9.0)
    assert few.drift(40 * MINUTE) is None
