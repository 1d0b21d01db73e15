"""What the page is told to expect of requests and of instances."""

import math

import numpy as np
import pytest

from predictor.forecasts.forecast import Forecast, PointForecast, SurvivalForecast
from rescheduler.cluster.cluster_view import UNLIMITED, ClusterView
from rescheduler.page.expectations import expectations, known, remaining_interval
from rescheduler.page.snapshot import UNKNOWN

HALF_BY_100 = ([0, 100, 200], [1.0, 0.5, 0.0])


def view(forecast: Forecast | None, where: list[int], context: list[int], *kv: int) -> ClusterView:
    n, nothing = len(kv), np.empty(0, dtype=np.int64)
    return ClusterView(
        slots=np.full(n, 8),
        kv_capacity=np.array(kv, dtype=np.int64),
        queued=np.zeros(n, dtype=np.int64),
        instance=np.array(where, dtype=np.int64),
        prompt_tokens=np.array(context, dtype=np.int64),
        generated_tokens=np.zeros(len(where), dtype=np.int64),
        forecast=forecast,
        waiting_prompt_tokens=nothing,
        waiting_generated_tokens=nothing,
        waiting_forecast=None,
        waited_steps=nothing,
    )


def curves(n: int) -> SurvivalForecast:
    edges, survival = HALF_BY_100
    return SurvivalForecast.new(edges, [survival] * n)


def test_the_interval_holds_80_percent_of_the_ends() -> None:
    low, median, high = remaining_interval(curves(1), 1)[0].tolist()
    assert (low, median, high) == (20, 100, 180)


def test_nothing_is_made_up_without_forecasts() -> None:
    assert remaining_interval(None, 2).tolist() == [[UNKNOWN] * 3] * 2
    of = expectations(view(None, [0], [10], 100), remaining_interval(None, 1)).of(0)
    assert of == ([], [], [])


def test_loads_ahead_are_those_of_requests_that_still_run() -> None:
    """S(h) is linear here, so that at h = 50 three of four still run, each with h more tokens."""
    interval = remaining_interval(curves(2), 2)
    expected = expectations(view(curves(2), [0, 0], [300, 100], 1000, 500), interval)
    assert expected.points[0] == 0
    assert expected.points[-1] == 256, "the power of two from 180 on"
    at = expected.points.tolist().index(48)
    alive = 1 - 48 / 200
    assert expected.mean[0, 0] == 400
    assert expected.mean[0, at] == pytest.approx(alive * (348 + 148))
    variance = alive * (1 - alive) * (348**2 + 148**2)
    assert expected.deviation[0, at] == pytest.approx(math.sqrt(variance))
    assert expected.mean[1].tolist() == [0.0] * len(expected.points)


def test_the_probability_of_an_overflow() -> None:
    forecast = curves(3)
    interval = remaining_interval(forecast, 3)
    kv = [350, 410, int(UNLIMITED)]
    expected = expectations(view(forecast, [0, 1, 2], [400, 400, 400], *kv), interval)
    assert expected.overflow[0, 0] == 1, "it is over its capacity now"
    assert expected.overflow[1, 0] == 0, "and it is not"
    at = expected.points.tolist().index(96)
    z = (expected.mean[1, at] - 410) / expected.deviation[1, at]
    assert expected.overflow[1, at] == pytest.approx(0.5 * math.erfc(-z / math.sqrt(2)))
    assert 0 < expected.overflow[1, at] < 1
    assert expected.of(2)[2] == [], "without a capacity there is no overflow"


def test_known_ends_are_looked_at_as_they_are() -> None:
    forecast = PointForecast.new([30.0])
    interval = remaining_interval(forecast, 1)
    assert interval.tolist() == [[30, 30, 30]]
    ahead, deviation, overflow = expectations(view(forecast, [0], [100], 120), interval).of(0)
    assert ahead[:3] == [100, 102, 104]
    assert set(ahead[-10:]) == {0}
    assert set(deviation) == {0}
    assert max(overflow) == 1, "its last tokens have no room"


def test_no_request_is_no_load() -> None:
    nothing = SurvivalForecast.new([0, 1], np.empty((0, 2)))
    expected = expectations(view(nothing, [], [], 100), remaining_interval(nothing, 0))
    assert set(expected.of(0)[0]) == {0}


def test_limits_that_nobody_knows() -> None:
    assert known(UNLIMITED) == UNKNOWN
    assert known(UNLIMITED - 1000) == UNKNOWN, "less what is on its way out"
    assert known(4608) == 4608
