"""Buckets of answer lengths, and the survival curves that their probabilities stand for."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.forecasts.forecast import ForecastError, PointForecast
from rescheduler.papers.prompt_length import BucketCurve, LengthBuckets
from rescheduler.papers.prompt_length.buckets import BucketOptions, Shape

PAPER = LengthBuckets((0, 250, 1000))


@st.composite
def curves(draw: st.DrawFn) -> BucketCurve:
    inner = draw(st.lists(st.integers(2, 3000), min_size=1, max_size=7, unique=True))
    buckets = LengthBuckets((0, *sorted(inner)))
    return BucketCurve(
        buckets,
        tail_mean=draw(st.floats(0.5, 5000)),
        limit=buckets.edges[-1] + draw(st.integers(1, 9000)),
        shape=draw(st.sampled_from(["linear", "geometric"])),
    )


@st.composite
def forecast_masses(draw: st.DrawFn) -> tuple[BucketCurve, list[list[float]]]:
    curve = draw(curves())
    mass = st.one_of(st.just(0.0), st.floats(1e-9, 1.0))
    row = st.lists(mass, min_size=len(curve.buckets), max_size=len(curve.buckets)).filter(any)
    return curve, draw(st.lists(row, min_size=1, max_size=4))


@given(forecast_masses())
def test_probabilities_become_a_proper_curve(drawn: tuple[BucketCurve, list[list[float]]]) -> None:
    curve, masses = drawn
    forecast = curve.forecast(masses)
    tokens = np.arange(0, curve.limit + 2, max(1, curve.limit // 400))
    survival = forecast.at(tokens)
    assert (survival[:, 0] == 1).all()
    assert ((survival >= 0) & (survival <= 1)).all()
    assert (np.diff(survival, axis=1) <= 0).all()
    assert (forecast.at(float(curve.limit)) == 0).all()
    assert (forecast.mean() >= 1).all()


@given(forecast_masses())
def test_every_bucket_keeps_its_probability(drawn: tuple[BucketCurve, list[list[float]]]) -> None:
    curve, masses = drawn
    shares = np.array(masses) / np.sum(masses, axis=1, keepdims=True)
    np.testing.assert_allclose(curve.buckets.masses(curve.forecast(masses)), shares, atol=1e-9)


@given(forecast_masses(), st.integers(0, 4000), st.integers(0, 4000))
def test_a_running_request_is_conditioned_on_its_age(
    drawn: tuple[BucketCurve, list[list[float]]], age: int, h: int
) -> None:
    curve, masses = drawn
    fresh = curve.forecast(masses)
    alive, later = fresh.at(float(age)), fresh.at(float(age + h))
    known = alive > 1e-12
    aged = fresh.aged(age).at(float(h))
    expected = later[known] / alive[known] if h else np.ones(int(known.sum()))
    np.testing.assert_allclose(aged[known], expected, rtol=1e-6, atol=1e-12)


def test_a_passed_bucket_has_no_mass_left() -> None:
    curve = BucketCurve(PAPER, tail_mean=100, limit=8192)
    forecast = curve.forecast([[0.6, 0.3, 0.1]]).aged(249)  # whatever runs yet is 250 or longer
    np.testing.assert_allclose(forecast.at([0, 750]), [[1, 0.25]])


@pytest.mark.parametrize(
    ("shape", "survival"),
    [("linear", [1, 2 / 3, 1 / 3, 0]), ("geometric", [1, 1 / 2, 1 - np.log(3) / np.log(4), 0])],
)
def test_the_first_bucket_by_hand(shape: Shape, survival: list[float]) -> None:
    # Lengths 1, 2 and 3: alike; or so that 1 and 2-3 tokens, one doubling each, are alike.
    curve = BucketCurve(LengthBuckets((0, 4)), tail_mean=10, limit=100, shape=shape)
    np.testing.assert_allclose(curve.forecast([[1.0, 0.0]]).at([0, 1, 2, 3])[0], survival)


def test_a_closed_bucket_by_hand() -> None:
    linear = BucketCurve(PAPER, tail_mean=100, limit=8192).forecast([[0.5, 0.5, 0.0]])
    np.testing.assert_allclose(linear.at([249, 624, 999])[0], [0.5, 0.25, 0])
    geometric = BucketCurve(PAPER, 100, 8192, "geometric").forecast([[0.5, 0.5, 0.0]])
    # 250 to 500 and 500 to 1000 are one doubling each.
    np.testing.assert_allclose(geometric.at([249, 499, 999])[0], [0.5, 0.25, 0], atol=2e-3)


def test_the_tail_is_exponential() -> None:
    curve = BucketCurve(PAPER, tail_mean=300, limit=30_000)
    forecast = curve.forecast([[0.0, 0.0, 1.0]])
    np.testing.assert_allclose(forecast.at([999, 1299, 1599])[0], [1, np.exp(-1), np.exp(-2)], 1e-2)
    np.testing.assert_allclose(forecast.mean(), 999 + 300 + 0.5, rtol=5e-3)


def test_the_tail_is_fitted_with_cut_requests_as_cut() -> None:
    # Beyond 999: 1 + 501 + 25 tokens, of which two requests are known to have ended.
    totals, cut = np.array([10, 1000, 1500, 1024]), np.array([False, False, False, True])
    assert BucketCurve.fit(PAPER, totals, cut, 8192).tail_mean == 527 / 2
    all_cut = BucketCurve.fit(PAPER, np.array([1024, 1024]), np.array([True, True]), 8192)
    assert all_cut.tail_mean == 50
    nobody = BucketCurve.fit(PAPER, np.array([5, 300]), np.array([False, False]), 8192)
    assert nobody.tail_mean == 1000


def test_max_tokens_caps_the_forecast() -> None:
    forecast = BucketCurve(PAPER, 100, 8192).forecast([[0.2, 0.8, 0.0]] * 2, [400, 8192])
    assert forecast.at(400.0)[0] == 0
    assert forecast.at(399.0)[0] == forecast.at(399.0)[1] > 0


def test_other_forecasts_have_bucket_masses_too() -> None:
    masses = PAPER.masses(PointForecast.new([10.0, 250.0, 1000.0, 1200.0]))
    assert masses.tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 1]]


@given(curves(), st.lists(st.integers(1, 20_000), min_size=1, max_size=30))
def test_each_length_is_in_the_bucket_around_it(curve: BucketCurve, lengths: list[int]) -> None:
    edges = (*curve.buckets.edges, 10**9)
    for length, bucket in zip(lengths, curve.buckets.of(np.array(lengths)), strict=True):
        assert edges[bucket] <= length < edges[bucket + 1]


def test_ways_to_give_buckets() -> None:
    by_time = BucketOptions(seconds=(0.5, 2.0, 8.0), tokens_per_second=500)
    assert by_time.buckets().edges == (0, 250, 1000, 4000)
    assert BucketOptions(edges=(256, 2048)).buckets().names == ("0–255", "256–2047", "≥2048")
    assert BucketOptions(width=250, until=1000).buckets().edges == (0, 250, 500, 750, 1000)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (BucketOptions(), "given by edges"),
        (BucketOptions(edges=(250,), width=250, until=1000), "given by edges"),
        (BucketOptions(width=250), "given by edges"),
        (BucketOptions(seconds=(1.0,)), "given by edges"),
        (BucketOptions(edges=()), "begin at 0"),
        (BucketOptions(edges=(1, 5)), "begin at 0, then at 2"),
        (BucketOptions(edges=(500, 250)), "must ascend"),
        (BucketOptions(width=0, until=10), "no buckets of 0"),
        (BucketOptions(seconds=(1.0,), tokens_per_second=0), "must be positive"),
        (BucketOptions(seconds=(2.0, 1.0), tokens_per_second=10), "must ascend"),
    ],
)
def test_invalid_buckets_are_refused(options: BucketOptions, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        options.buckets()


@pytest.mark.parametrize(
    "masses", [[[0.5, 0.5]], [[0.0, 0.0, 0.0]], [[0.5, -0.1, 0.6]], [[np.nan, 0.5, 0.5]], [0.5]]
)
def test_invalid_probabilities_are_refused(masses: list[list[float]]) -> None:
    with pytest.raises(ForecastError, match="probabilities"):
        BucketCurve(PAPER, tail_mean=100, limit=8192).forecast(masses)


@pytest.mark.parametrize(("tail_mean", "limit"), [(0.0, 8192), (np.inf, 8192), (100.0, 1000)])
def test_an_invalid_curve_is_refused(tail_mean: float, limit: int) -> None:
    with pytest.raises(ForecastError):
        BucketCurve(PAPER, tail_mean, limit)
