"""What the page is told to expect of requests and of instances."""

import math
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest

from predictor.forecasts.forecast import Forecast, PointForecast, SurvivalForecast
from rescheduler.cluster.cluster_view import UNLIMITED, ClusterView
from rescheduler.page.expectations import expectations, known, remaining_interval
from rescheduler.page.live_snapshots import Look
from rescheduler.page.snapshot import UNKNOWN, Instance, Phase, Requests, Snapshot

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


def instance(name: str, role: Literal["prefill", "decode"], kv: int, held: int) -> Instance:
    limits = {"slots": 8, "kv_capacity": kv, "kv_tokens": held}
    return Instance(name=name, role=role, in_service=True, draining=False, **limits)


def test_forecasts_and_loads_are_put_where_they_belong() -> None:
    """Two requests on the second decode instance, one waits, one is being prefilled."""
    running = SurvivalForecast.new([0, 10, 1000], [[1, 1, 0], [1, 0.5, 0]])
    nothing_waits = view(running, [1, 1], [100, 30], int(UNLIMITED), 500)
    seen_view = replace(
        nothing_waits,
        generated_tokens=np.array([50, 20]),
        waiting_prompt_tokens=np.array([40]),
        waiting_generated_tokens=np.array([1]),
        waiting_forecast=SurvivalForecast.new([0, 100], [[1, 0]]),
        waited_steps=np.array([3]),
        step_seconds=0.04,
    )
    requests = Requests(
        number=[7, 8, 9, 10],
        name=["a", "b", "c", "d"],
        phase=[Phase.DECODING, Phase.PLACED, Phase.WAITING, Phase.PREFILLING],
        instance=[2, 2, UNKNOWN, 1],
        target=[UNKNOWN] * 4,
        prompt=[100, 30, 40, 60],
        generated=[50, 20, 1, 0],
        **dict.fromkeys(("low", "median", "high"), [UNKNOWN] * 4),
    )
    instances = [
        instance("decode-0", "decode", UNKNOWN, 0),
        instance("prefill-0", "prefill", UNKNOWN, 60),
        instance("decode-1", "decode", 500, 0),
    ]
    unforeseen = Snapshot(
        time=12.5,
        step_seconds=0.04,
        points=[],
        instances=instances,
        requests=requests,
        further_waiting=2,
    )
    seen = Look(seen_view, ["decode-0", "decode-1"], unforeseen).snapshot()
    assert (seen.time, seen.step_seconds, seen.further_waiting) == (12.5, 0.04, 2)
    assert seen.requests.low == [109, 2, 10, UNKNOWN]
    assert seen.requests.median == [505, 10, 50, UNKNOWN]
    assert seen.requests.high == [901, 802, 90, UNKNOWN]
    assert seen.requests.name == ["a", "b", "c", "d"]
    first, prefill, second = seen.instances
    assert (first.kv_tokens, prefill.kv_tokens, second.kv_tokens) == (0, 60, 200)
    assert prefill.ahead == []
    assert set(first.ahead) == {0}
    assert first.overflow == [], "its capacity is not known"
    assert second.ahead[0] == 200
    assert len(second.overflow) == len(seen.points)
    assert seen.points[-1] == 1024
