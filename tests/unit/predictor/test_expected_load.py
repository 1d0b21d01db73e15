"""The expected load is the plain sum over `Forecast.at`, however it was reached."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from predictor.forecasts.expected_load import ExpectedLoad, expected_load
from predictor.forecasts.forecast import Forecast, ForecastError, PointForecast, SurvivalForecast

EDGES = [0, 1, 2, 5, 10, 40, 200]
N_INSTANCES = 3

IntArray = npt.NDArray[np.int64]

tokens = st.integers(0, 250)
limits = st.one_of(st.just(np.inf), st.integers(1, 300).map(float))


def lists_of(n: int, elements: st.SearchStrategy[float]) -> st.SearchStrategy[list[float]]:
    return st.lists(elements, min_size=n, max_size=n)


@st.composite
def survival_forecasts(draw: st.DrawFn, n: int) -> SurvivalForecast:
    hazards = draw(arrays(np.float64, (n, len(EDGES) - 1), elements=st.floats(0, 1)))
    curves = np.concatenate([np.ones((n, 1)), np.cumprod(1 - hazards, axis=1)], axis=1)
    kept = curves.astype(draw(st.sampled_from([np.float32, np.float64])))
    return SurvivalForecast.new(EDGES, kept, draw(lists_of(n, limits)))


@st.composite
def point_forecasts(draw: st.DrawFn, n: int) -> PointForecast:
    return PointForecast.new(draw(lists_of(n, st.floats(-5, 300))), draw(lists_of(n, limits)))


@st.composite
def running_requests(draw: st.DrawFn) -> tuple[Forecast, IntArray, IntArray]:
    n = draw(st.integers(0, 6))
    forecast: Forecast = draw(st.one_of(survival_forecasts(n), point_forecasts(n)))
    instance = draw(arrays(np.int64, n, elements=st.integers(0, N_INSTANCES - 1)))
    context = draw(arrays(np.int64, n, elements=st.integers(0, 10_000)))
    return forecast.aged(draw(lists_of(n, tokens))), instance, context


def plain_sum(
    forecast: Forecast, instance: IntArray, context: IntArray, horizon: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    mean, variance = np.zeros((2, N_INSTANCES, horizon + 1))
    for h in range(horizon + 1):
        survival = forecast.at(h)
        np.add.at(mean[:, h], instance, survival * (context + h))
        np.add.at(variance[:, h], instance, survival * (1 - survival) * (context + h) ** 2)
    return mean, variance


def assert_loads_agree(load: ExpectedLoad, mean: npt.ArrayLike, variance: npt.ArrayLike) -> None:
    np.testing.assert_allclose(load.mean, mean, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(load.variance, variance, rtol=1e-9, atol=1e-6)
    assert (load.mean >= 0).all()
    assert (load.variance >= 0).all()


@given(running_requests(), st.integers(0, 260))
def test_the_load_is_the_plain_sum(
    requests: tuple[Forecast, IntArray, IntArray], horizon: int
) -> None:
    load = expected_load(*requests, N_INSTANCES, horizon)
    assert_loads_agree(load, *plain_sum(*requests, horizon))
    np.testing.assert_array_equal(load.mean[:, 0], np.bincount(requests[1], requests[2], 3))
    assert (load.variance[:, 0] == 0).all()
    np.testing.assert_array_equal(load.requests, np.bincount(requests[1], minlength=3))


def test_arrays_may_be_read_only_strided_or_of_half_precision() -> None:
    curves = np.array([[1.0, 0.5, 0.25], [1.0, 0.75, 0.0]])
    edges, ages, unlimited = np.array([0.0, 8.0, 64.0]), np.array([3.0, 9.0]), np.full(2, np.inf)
    where, context = np.array([0, 2]), np.array([7, 11])
    expected = plain_sum(SurvivalForecast(edges, curves, ages, unlimited), where, context, 20)
    read_only = curves.copy()
    read_only.flags.writeable = False
    for same in (read_only, np.asfortranarray(curves), curves.astype(np.float16)):
        forecast = SurvivalForecast(edges, same, ages, unlimited)
        unsigned, strided = where.astype(np.uint8), np.repeat(context, 2)[::2]
        assert_loads_agree(expected_load(forecast, unsigned, strided, 3, 20), *expected)


@pytest.mark.parametrize(
    ("instance", "context", "n_instances", "horizon", "message"),
    [
        ([0], [1, 2], 2, 4, r"instance has shape \(1,\), the forecast is of 2"),
        ([0, 1], [1], 2, 4, r"context_tokens has shape \(1,\)"),
        ([[0, 1]], [1, 2], 2, 4, "instance has shape"),
        ([0, 2], [1, 2], 2, 4, "instance 2 is not one of 2"),
        ([-1, 0], [1, 2], 2, 4, "instance -1 is not one of 2"),
        ([0, 1], [1, -2], 2, 4, "context of -2 tokens"),
        ([0, 1], [1.0, 2.0], 2, 4, "context_tokens must be integers, not float64"),
        ([0, 1], [1, 2], 2, -1, "over -1 steps"),
        ([0, 1], [1, 2], -1, 4, "load of -1 instances"),
    ],
)
def test_an_invalid_cluster_is_refused(
    instance: list[int], context: list[int], n_instances: int, horizon: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        expected_load(
            PointForecast.new([3.0, 4.0]),
            np.array(instance),
            np.array(context),
            n_instances,
            horizon,
        )


def test_curves_that_do_not_fit_their_ages_are_refused() -> None:
    forecast = SurvivalForecast(np.array([0.0, 5.0]), np.ones((1, 3)), np.zeros(1), np.ones(1))
    with pytest.raises(ForecastError, match="2 edges, 1 ages and 1 limits"):
        expected_load(forecast, np.array([0]), np.array([0]), 1, 4)
