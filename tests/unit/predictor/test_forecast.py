"""Every forecast is a proper survival curve, and ageing composes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from predictor.forecasts.curve import aged_mean, aged_survival, tokens_left
from predictor.forecasts.forecast import Forecast, ForecastError, PointForecast, SurvivalForecast

EDGES = [0, 1, 2, 5, 10, 40, 200]

limits = st.one_of(st.just(np.inf), st.integers(1, 300).map(float))


@st.composite
def survival_forecasts(draw: st.DrawFn) -> SurvivalForecast:
    n = draw(st.integers(1, 4))
    hazards = draw(arrays(np.float64, (n, len(EDGES) - 1), elements=st.floats(0, 1)))
    curves = np.concatenate([np.ones((n, 1)), np.cumprod(1 - hazards, axis=1)], axis=1)
    return SurvivalForecast.new(EDGES, curves, draw(limits))


point_forecasts = st.builds(
    lambda tokens, limit: PointForecast.new(tokens, limit),
    st.lists(st.floats(-5, 300), min_size=1, max_size=4),
    limits,
)
forecasts = st.one_of(survival_forecasts(), point_forecasts)


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


@pytest.mark.parametrize(
    ("edges", "survival", "message"),
    [
        ([1, 2], [[1, 0.5]], "ascend from 0"),
        ([0, 2, 2], [[1, 0.5, 0.2]], "ascend from 0"),
        ([0, 1.5], [[1, 0.5]], "whole token counts"),
        ([0, 2], [[1, 0.5, 0.2]], "2 edges"),
        ([0, 2], [[0.9, 0.5]], "start at 1"),
        ([0, 2], [[1, np.nan]], "stay in"),
        ([0, 2, 3], [[1, 0.5, 0.6]], "never rise"),
    ],
)
def test_an_invalid_survival_curve_is_refused(
    edges: list[float], survival: list[list[float]], message: str
) -> None:
    with pytest.raises(ForecastError, match=message):
        SurvivalForecast.new(edges, survival)


@pytest.mark.parametrize(
    "misuse",
    [
        lambda f: f.aged(-1),
        lambda f: f.aged([1, 2, 3]),
        lambda f: f.at(-1),
        lambda f: f.quantile(1.2),
        lambda f: f.capped(-3),
    ],
)
def test_impossible_tokens_are_refused(misuse: object) -> None:
    for forecast in (SurvivalForecast.new([0, 5], [[1, 0]]), PointForecast.new([4])):
        with pytest.raises(ForecastError):
            misuse(forecast)  # type: ignore[operator]


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
