"""The figures of the last hour, and whether they become worse within it."""

import pytest
from test_forecast_quality import figures_of, finished_requests, quality_of

from rescheduler.monitoring.forecast_quality import LastHour, score
from rescheduler.telemetry.telemetry_view import FinishedForecasts

MINUTE = 60.0


def spread(
    hour: LastHour, requests: list[FinishedForecasts], begin: float, minutes: float
) -> LastHour:
    """Let requests end evenly within some minutes."""
    for i, request in enumerate(requests):
        scored = score(request)
        assert scored is not None
        hour.add(scored.figures(), MINUTE * (begin + minutes * i / len(requests)))
    return hour


def test_they_are_those_that_prometheus_gets_of_the_same_requests() -> None:
    requests = finished_requests(200, wrong_by=0.25)
    figures = spread(LastHour(), requests, 3.0, 50.0).figures(54 * MINUTE)
    quality = quality_of(requests)
    watched = figures_of(quality)
    assert figures is not None
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
    assert figures is not None
    assert figures.requests == 70
    assert figures.mae() == pytest.approx(figures_of(quality_of(recent)).mae())
    assert hour.figures(160 * MINUTE) is None
    assert hour.drift(160 * MINUTE) is None


@pytest.mark.parametrize(
    ("wrong_by", "low", "high"), [(1.0, 0.45, 0.55), (0.25, 0.7, 1), (4, 0, 0.3)]
)
def test_biased_forecasts_do_not_halve_the_ends(wrong_by: float, low: float, high: float) -> None:
    figures = spread(LastHour(), finished_requests(400, wrong_by), 0.0, 10.0).figures(10 * MINUTE)
    assert figures is not None
    assert low <= figures.late_share() <= high
    if wrong_by > 1:
        assert figures.bias() > 0
    elif wrong_by < 1:
        assert figures.bias() < 0


def test_worse_forecasts_are_drift_and_equal_ones_are_not() -> None:
    steady = spread(LastHour(), finished_requests(400), 0.0, 40.0)
    assert steady.drift(40 * MINUTE) == ""
    worse = spread(LastHour(), finished_requests(200), 0.0, 25.0)
    spread(worse, finished_requests(100, wrong_by=8.0, seed=1), 26.0, 14.0)
    drift = worse.drift(40 * MINUTE)
    assert drift is not None
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
