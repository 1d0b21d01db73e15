"""Forecasts are proper survival curves, age as one, and sum to the load that is expected."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from predictor.forecasts.curve import aged_mean, aged_survival, tokens_left
from predictor.forecasts.expected_load import ExpectedLoad, expected_load
from predictor.forecasts.forecast import Forecast, ForecastError, PointForecast, SurvivalForecast
from predictor.forecasts.forecast_sensitivity import IntArray, binned, renewed_every, star_bins

EDGES = [0, 1, 2, 5, 10, 40, 200]
N_INSTANCES = 3

limits = st.one_of(st.just(np.inf), st.integers(1, 300).map(float))


def lists_of(n: int, elements: st.SearchStrategy[float]) -> st.SearchStrategy[list[float]]:
    return st.lists(elements, min_size=n, max_size=n)


@st.composite
def survival_forecasts(
    draw: st.DrawFn, n: int | None = None, kept: Sequence[type] = (np.float64,)
) -> SurvivalForecast:
    n = draw(st.integers(1, 4)) if n is None else n
    hazards = draw(arrays(np.float64, (n, len(EDGES) - 1), elements=st.floats(0, 1)))
    curves = np.concatenate([np.ones((n, 1)), np.cumprod(1 - hazards, axis=1)], axis=1)
    curves = curves.astype(draw(st.sampled_from(kept)))
    return SurvivalForecast.new(EDGES, curves, draw(lists_of(n, limits)))


@st.composite
def point_forecasts(draw: st.DrawFn, n: int | None = None) -> PointForecast:
    n = draw(st.integers(1, 4)) if n is None else n
    return PointForecast.new(draw(lists_of(n, st.floats(-5, 300))), draw(lists_of(n, limits)))


forecasts = st.one_of(survival_forecasts(), point_forecasts())


@given(forecasts, st.integers(0, 250))
def test_the_curve_starts_at_one_and_never_rises(forecast: Forecast, age: int) -> None:
    survival = forecast.aged(age).at(np.arange(0, 300))
    assert (survival[:, 0] == 1).all()
    assert (np.diff(survival, axis=1) <= 1e-12).all()
    assert (survival >= 0).all()


@given(survival_forecasts(), st.integers(0, 60), st.integers(0, 60))
def test_ageing_composes_and_is_conditional_probability(
    forecast: SurvivalForecast, a: int, b: int
) -> None:
    h = np.arange(0, 220)
    twice, once = forecast.aged(a).aged(b), forecast.aged(a + b)
    np.testing.assert_array_equal(twice.at(h), once.at(h))
    np.testing.assert_array_equal(twice.mean(), once.mean())
    alive = forecast.at(float(a + b))
    running = alive > 1e-9
    conditional = forecast.at(h + a + b)[running] / alive[running, None]
    expected = once.at(h)[running]
    np.testing.assert_allclose(expected[:, 1:], conditional[:, 1:], rtol=1e-9, atol=1e-12)


@given(survival_forecasts(), st.integers(0, 250))
def test_compiled_code_reads_curves_as_forecasts_do(forecast: SurvivalForecast, age: int) -> None:
    aged = forecast.aged(age)
    points = np.arange(0, 220, 3)
    survival = np.empty(len(points))
    edges, curves, ages, limits = aged.arrays()
    for i in range(len(aged)):
        aged_survival(edges, curves[i], ages[i], limits[i], points, survival)
        np.testing.assert_allclose(survival, aged.at(points)[i], rtol=1e-9, atol=1e-9)
        left = tokens_left(edges, ages[i], limits[i])
        mean = min(aged_mean(edges, curves[i], ages[i], limits[i]), left)
        np.testing.assert_allclose(mean, aged.mean()[i], rtol=1e-6)


@given(forecasts, st.integers(1, 50))
def test_a_cap_ends_the_request(forecast: Forecast, limit: int) -> None:
    capped = forecast.capped(limit)
    assert (capped.at(float(limit)) == 0).all()
    assert (capped.mean() <= limit + 1e-9).all()
    assert (capped.quantile([0.05, 0.5, 0.95]) <= limit).all()
    before = np.arange(0, limit)
    np.testing.assert_array_equal(capped.at(before), forecast.at(before))


@given(survival_forecasts(), st.integers(0, 100))
def test_the_mean_is_the_sum_of_the_curve(forecast: SurvivalForecast, age: int) -> None:
    aged = forecast.aged(age)
    np.testing.assert_allclose(aged.mean(), aged.at(np.arange(0, 201)).sum(axis=1), rtol=1e-9)


@given(survival_forecasts(), st.floats(0.01, 0.99), st.integers(0, 100))
def test_the_quantile_inverts_the_curve(forecast: SurvivalForecast, q: float, age: int) -> None:
    aged = forecast.aged(age)
    h = aged.quantile(q)
    after, before = aged.at_each(h), aged.at_each(np.maximum(h - 1e-6, 0))
    outlived = aged.at(1.0) == 0  # then every quantile is the next token, or none
    assert ((after <= 1 - q + 1e-6) | (h == 0) | outlived).all()
    assert ((before >= 1 - q - 1e-6) | outlived).all()


@given(forecasts, st.integers(0, 100))
def test_each_request_may_ask_its_own_horizon(forecast: Forecast, age: int) -> None:
    aged, h = forecast.aged(age), np.arange(len(forecast)) * 7
    np.testing.assert_array_equal(aged.at_each(h), np.diag(aged.at(h)))


@given(forecasts)
def test_a_grid_of_every_token_keeps_the_curve(forecast: Forecast) -> None:
    h = np.arange(0, 301)
    np.testing.assert_allclose(forecast.on_grid(h).at(h), forecast.at(h), atol=1e-12)


def test_hand_computed_curves() -> None:
    forecast = SurvivalForecast.new([0, 10, 20], [[1.0, 0.5, 0.0]])
    np.testing.assert_allclose(forecast.at([0, 5, 10, 15, 20, 30]), [[1, 0.75, 0.5, 0.25, 0, 0]])
    assert forecast.mean()[0] == pytest.approx(10.5)  # the sum 1 + .95 + ... + .05
    assert (forecast.median()[0], forecast.aged(25).mean()[0]) == (pytest.approx(10), 1)
    outlived = PointForecast.new([7.0, 100.0]).aged(50)
    assert outlived.mean().tolist() == [1, 50]
    assert outlived.at([0, 1, 49, 50]).tolist() == [[1, 0, 0, 0], [1, 1, 1, 0]]


def test_quantiles_of_requests_that_have_nearly_surely_ended() -> None:
    """However small what is left of the curve is, its shape counts."""
    forecast = SurvivalForecast.new([0, 50, 100], [[1, 1e-34, 1e-36]]).aged(np.array([60]))
    level = 1 - forecast.at(20)[0]
    assert forecast.quantile(level) == pytest.approx([20.0])


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=80), st.integers(0, 40))
def test_what_will_generate_at_least_so_many_tokens_ends_no_earlier(
    tokens: list[int], age: int
) -> None:
    edges = np.array([0.0, 16, 64, 256, 1024, 4096])
    curve = np.exp(-edges / 300)
    curve[0], curve[-1] = 1.0, 0.0
    forecast = SurvivalForecast.new(edges, np.tile(curve, (len(tokens), 1))).aged(age)
    bound = forecast.at_least(tokens)
    few = len(set(tokens)) <= 64
    for i, least in enumerate(tokens):
        alive = bound.at(np.arange(0, 4000, 37))[i]
        assert (np.diff(alive) <= 1e-12).all()
        if least == 0:
            np.testing.assert_allclose(alive, forecast.at(np.arange(0, 4000, 37))[i])
        elif few:
            assert bound.at([least])[i, 0] == 1.0
            after = least + 100
            expected = forecast.at([after])[i, 0] / forecast.at([least])[i, 0]
            assert bound.at([after])[i, 0] == pytest.approx(expected)


# The load that is expected: the plain sum over `Forecast.at`, however it was reached.


@st.composite
def running_requests(draw: st.DrawFn) -> tuple[Forecast, IntArray, IntArray]:
    n = draw(st.integers(0, 6))
    forecast: Forecast = draw(
        st.one_of(survival_forecasts(n, (np.float32, np.float64)), point_forecasts(n))
    )
    instance = draw(arrays(np.int64, n, elements=st.integers(0, N_INSTANCES - 1)))
    context = draw(arrays(np.int64, n, elements=st.integers(0, 10_000)))
    return forecast.aged(draw(lists_of(n, st.integers(0, 250)))), instance, context


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


# Coarser and staler forecasts, for the sensitivity studies of STAR §6.5.

TOTALS = np.array([90, 4_000, 20_000, 32_000])


def oracle(generated: IntArray) -> Forecast:
    return PointForecast.new(TOTALS - generated)


@pytest.mark.parametrize(
    ("n", "edges"),
    [
        (2, [0, 8192, 32768]),
        (4, [0, 4096, 8192, 16384, 32768]),
        (6, [0, 2048, 4096, 6144, 8192, 16384, 32768]),
    ],
)
def test_the_bins_are_those_of_the_paper(n: int, edges: list[int]) -> None:
    assert star_bins(n, 32768).tolist() == edges


def test_a_binned_forecast_knows_only_the_bin() -> None:
    coarse = binned(oracle(np.zeros(4, dtype=np.int64)), star_bins(2, 32768))
    assert coarse.median().tolist() == [4096, 4096, 20480, 20480]
    curve = SurvivalForecast.new([0, 10, 20], [[1, 0.4, 0]])
    assert binned(curve, [0, 5, 30]).mean().tolist() == [17.5]


def test_a_forecast_renewed_rarely_ages_in_between() -> None:
    asked: list[int] = []

    def source(generated: IntArray) -> Forecast:
        asked.extend(generated.tolist())
        return SurvivalForecast.new([0, 100, 200], [[1, 0.5, 0]])

    stale = renewed_every(source, 20)
    forecast = stale(np.array([57]))
    assert asked == [40]
    expected = source(np.array([40])).aged(17)
    np.testing.assert_array_equal(forecast.at(np.arange(50)), expected.at(np.arange(50)))


# What cannot be.

ODD_CURVES: list[tuple[list[float], list[list[float]], str]] = [
    ([1, 2], [[1, 0.5]], "ascend from 0"),
    ([0, 2, 2], [[1, 0.5, 0.2]], "ascend from 0"),
    ([0, 1.5], [[1, 0.5]], "whole token counts"),
    ([0, 2], [[1, 0.5, 0.2]], "2 edges"),
    ([0, 2], [[0.9, 0.5]], "start at 1"),
    ([0, 2], [[1, np.nan]], "stay in"),
    ([0, 2, 3], [[1, 0.5, 0.6]], "never rise"),
]
ODD_CLUSTERS: list[tuple[Any, ...]] = [
    ([0], [1, 2], 2, 4, r"instance has shape \(1,\), the forecast is of 2"),
    ([0, 1], [1], 2, 4, r"context_tokens has shape \(1,\)"),
    ([[0, 1]], [1, 2], 2, 4, "instance has shape"),
    ([0, 2], [1, 2], 2, 4, "instance 2 is not one of 2"),
    ([-1, 0], [1, 2], 2, 4, "instance -1 is not one of 2"),
    ([0, 1], [1, -2], 2, 4, "context of -2 tokens"),
    ([0, 1], [1.0, 2.0], 2, 4, "context_tokens must be integers, not float64"),
    ([0, 1], [1, 2], 2, -1, "over -1 steps"),
    ([0, 1], [1, 2], -1, 4, "load of -1 instances"),
]


def test_what_cannot_be_is_refused() -> None:
    for edges, survival, message in ODD_CURVES:
        with pytest.raises(ForecastError, match=message):
            SurvivalForecast.new(edges, survival)
    misfit = SurvivalForecast(np.array([0.0, 5.0]), np.ones((1, 3)), np.zeros(1), np.ones(1))
    with pytest.raises(ForecastError, match="2 edges, 1 ages and 1 limits"):
        expected_load(misfit, np.array([0]), np.array([0]), 1, 4)
    for instance, context, n_instances, horizon, message in ODD_CLUSTERS:
        forecast, where = PointForecast.new([3.0, 4.0]), np.array(instance)
        with pytest.raises(ValueError, match=message):
            expected_load(forecast, where, np.array(context), n_instances, horizon)
    with pytest.raises(ValueError, match="no 3 bins"):
        star_bins(3, 32768)
    with pytest.raises(ValueError, match="ascend from 0"):
        binned(oracle(np.zeros(4, dtype=np.int64)), [0, 5, 5])
    with pytest.raises(ValueError, match="every 0 tokens"):
        renewed_every(oracle, 0)


@pytest.mark.parametrize(
    "forecast", [SurvivalForecast.new([0, 5], [[1, 0]]), PointForecast.new([4])]
)
def test_impossible_tokens_are_refused(forecast: Forecast) -> None:
    impossible = [("aged", -1), ("aged", [1, 2, 3]), ("at", -1), ("quantile", 1.2), ("capped", -3)]
    for misuse, tokens in impossible:
        with pytest.raises(ForecastError):
            getattr(forecast, misuse)(tokens)
