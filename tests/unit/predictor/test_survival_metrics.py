"""What survival forecasts are measured by, their recalibration, and the grid they live on."""

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import mean_pinball_loss

from predictor import ForecastError, PointForecast, SurvivalForecast
from predictor.evaluation.survival_metrics import (
    LEVELS,
    WITHIN,
    Outcomes,
    concordance,
    coverage,
    d_calibration,
    error_by_bin,
    integrated_brier,
    levels_of,
    pinball_loss,
    summarise_errors,
    survival_scores,
    within,
)
from predictor.forecasts.kaplan_meier import (
    KaplanMeierCurve,
    Recalibration,
    fit_recalibration,
    observed_levels,
    observed_share,
    survival_edges,
)

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

N = 6_000
IDENTITY = Recalibration([0, 1], [0, 1])


def outcomes(remaining: list[int], cut: list[bool] | None = None, left: int = 1000) -> Outcomes:
    """Return what came; requests that were cut were cut at their ``max_tokens``."""
    flags = np.array(cut or [False] * len(remaining))
    came = np.array(remaining)
    return Outcomes(came, flags, np.where(flags, came, left))


def curves(*middle: float, limit: float = np.inf) -> SurvivalForecast:
    """Return curves 1, middle, 0 at 0, 10 and 20 tokens."""
    return SurvivalForecast.new([0, 10, 20], [[1, value, 0] for value in middle], limit)


def drawn_from_its_forecast(power: float = 1.0, seed: int = 0) -> tuple[SurvivalForecast, Outcomes]:
    """Return forecasts S^power of requests that end by S and are cut at random caps.

    S falls exponentially with a mean of each request's own, 30 to 300 tokens, on the grid;
    with a power above 1 the forecasts are too short, below 1 too long.
    """
    rng = np.random.default_rng(seed)
    edges = survival_edges(1024)
    scale = np.exp(rng.uniform(np.log(30), np.log(300), N))
    true = np.exp(-edges / scale[:, None])
    true[:, -1] = 0
    left = rng.integers(20, 500, N)
    # The smallest whole r with S(r) <= v, v uniform, is drawn from S.
    uniform = rng.random(N)
    drawn = [np.interp(-v, -curve, edges) for v, curve in zip(uniform, true, strict=True)]
    length = np.ceil(drawn).astype(np.int64)
    came = Outcomes(np.minimum(length, left), length > left, left)
    return SurvivalForecast.new(edges, true**power, left), came


def level_error(forecast: SurvivalForecast, came: Outcomes) -> float:
    """Return by how much the share of requests below a level is off, at the worst level."""
    nominal = np.linspace(0.05, 0.95, 19)
    levels = levels_of(forecast, came)
    return float(np.abs(observed_share(levels, came.cut, nominal) - nominal).max())


def coverages(forecast: SurvivalForecast, came: Outcomes) -> list[float]:
    levels = levels_of(forecast, came)
    return [coverage(levels, came.cut, level / 100) for level in LEVELS]


# Discrimination and error.


def test_within_counts_the_rows_that_may_generate_more() -> None:
    # S(10) = 0.2 and 0.8: one ended at 4, one was cut at 15; the third had 10 tokens left.
    came = Outcomes(np.array([4, 15, 10]), np.array([False, True, True]), np.array([30, 15, 10]))
    assert within(curves(0.2, 0.8, 0.5), came, 10) == pytest.approx((0.04, 1))
    assert within(curves(0.8, 0.2, 0.5), came, 10) == pytest.approx((0.64, 0))
    brier, auc = within(curves(0.5, 0.5), outcomes([5, 5], [True, True]), 10)
    assert np.isnan(brier) and auc is None, "without rows it is unknown"
    brier, auc = within(curves(0.5, 0.7), outcomes([5, 5]), 10)
    assert brier == pytest.approx((0.5**2 + 0.7**2) / 2) and auc is None, "of one class"


def test_the_integrated_brier_score_by_hand() -> None:
    # At h = 1 both rows count, S = 0.95; at h = 9 the second has left, S = 0.55 and the first
    # has ended. The largest cap is 12.
    came = Outcomes(np.array([4, 5]), np.array([False, True]), np.array([12, 5]))
    expected = (0.05**2 + 0.55**2) / 2
    assert integrated_brier(curves(0.5, 0.5), came) == pytest.approx(expected)
    assert integrated_brier(PointForecast.new([4, 99], came.left), came) == 0
    assert np.isnan(integrated_brier(curves(0.5), Outcomes(*map(np.array, ([1], [True], [1])))))


def test_the_pinball_loss_is_scikit_learns_of_the_tokens_under_the_cap() -> None:
    forecast, came = drawn_from_its_forecast()
    assert came.cut.any()
    for some in (forecast, PointForecast.new(forecast.median(), came.left)):
        theirs = [
            mean_pinball_loss(came.remaining, some.quantile(q), alpha=q)
            for q in np.arange(1, 10) / 10
        ]
        assert pinball_loss(some, came) == pytest.approx(np.mean(theirs))


@pytest.mark.parametrize(
    ("means", "remaining", "cut", "expected"),
    [
        ([1, 2, 3], [5, 10, 20], None, 1),
        ([3, 2, 1], [5, 10, 20], None, 0),
        ([1, 3, 2], [5, 10, 20], None, 2 / 3),
        # Of the request cut at 5 it is not known whether it would have outlived the others.
        ([3, 1, 2], [5, 10, 20], [True, False, False], 1),
        # Cut at 20, it outlived those that ended at 5 and 10.
        ([2, 3, 1], [5, 10, 20], [False, False, True], 1 / 3),
        ([1, 2, 3], [5, 10, 20], [True, True, True], None),
        ([1, 2, 3], [5, 10, 20], [True, True, False], None),
        ([1, 2, 3], [7, 7, 7], None, None),
        ([1], [7], None, None),
    ],
)
def test_concordance_is_the_share_of_comparable_pairs_in_order(
    means: list[float], remaining: list[int], cut: list[bool] | None, expected: float | None
) -> None:
    for limit in (np.inf, 2.0):  # it looks at the forecasts without their caps
        found = concordance(PointForecast.new(means, limit), outcomes(remaining, cut))
        assert found == (None if expected is None else pytest.approx(expected))


def test_all_scores_are_given_by_horizon_and_level() -> None:
    forecast, came = drawn_from_its_forecast()
    scores = survival_scores(forecast, came)
    assert set(scores.brier_within) == set(scores.auc_within) == {str(h) for h in WITHIN}
    assert scores.coverage is not None
    assert list(scores.coverage.values()) == coverages(forecast, came)
    for h in WITHIN:
        brier, auc = scores.brier_within[str(h)], scores.auc_within[str(h)]
        assert within(forecast, came, h) == (brier, auc)
    point = survival_scores(PointForecast.new(forecast.median(), came.left), came)
    assert point.coverage is None, "a point forecast has no interval"
    assert point.ibs > scores.ibs


def test_the_errors_are_numpys_by_bins_that_are_half_open() -> None:
    rng = np.random.default_rng(0)
    remaining, predicted = rng.integers(1, 99, 50), rng.uniform(1, 99, 50)
    errors, summary = np.abs(predicted - remaining), summarise_errors(predicted, remaining)
    expected = (errors.mean(), np.median(errors), np.percentile(errors, 90))
    assert (summary.mae, summary.median_ae, summary.p90_ae) == pytest.approx(expected)
    three, key = np.array([5, 5, 5]), np.array([0, 9, 20])
    bins = error_by_bin(np.array([5.0, 6.0, 9.0]), three, key, [0, 10, 20, 30])
    assert [(b.low, b.high, b.rows, b.mae) for b in bins] == [(0, 10, 2, 0.5), (20, 30, 1, 4.0)]
    for bad, message in ((np.array([]), "predictions for"), (np.array([np.nan]), "not finite")):
        with pytest.raises(ValueError, match=message):
            summarise_errors(bad, np.arange(len(bad)))


# Calibration.


def test_levels_are_what_the_curve_says_of_the_tokens_that_came() -> None:
    # The curve falls by 0.05 a token: half a token before the end, or where it was cut.
    forecast = curves(0.5, 0.5, 0.5)
    levels = observed_levels(forecast, np.array([1, 10, 10]), np.array([False, False, True]))
    np.testing.assert_allclose(levels, [0.025, 0.475, 0.5])
    capped = levels_of(curves(0.5, limit=10.0), outcomes([10], [True]))
    np.testing.assert_allclose(capped, [0.5])


def test_coverage_by_hand() -> None:
    levels = np.array([0.05, 0.3, 0.5, 0.97])
    assert coverage(levels, np.zeros(4, dtype=bool), 0.8) == pytest.approx(2 / 4)
    # Cut at 0.5, its end is spread over (0.5, 1], of which 4/5 lie below 0.9.
    assert coverage(levels, np.array([0, 0, 1, 0], dtype=bool), 0.8) == pytest.approx(1.8 / 4)
    # Cut at once it says nothing: each interval covers as much as it claims.
    for level in (0.5, 0.8, 0.9):
        assert coverage(np.zeros(3), np.ones(3, dtype=bool), level) == pytest.approx(level)


def test_d_calibration_by_hand() -> None:
    even = np.arange(0.05, 1, 0.1)
    shares, p_value = d_calibration(even, np.zeros(10, dtype=bool))
    np.testing.assert_allclose(shares, np.full(10, 0.1))
    assert p_value == pytest.approx(1)
    shares, p_value = d_calibration(np.full(100, 0.25), np.zeros(100, dtype=bool))
    np.testing.assert_allclose(shares, [0, 0, 1, *[0] * 7])
    assert p_value < 1e-9
    # Ten of twenty were cut at 0.75: half a decile and two deciles share them.
    levels, cut = np.append(even, np.full(10, 0.75)), np.repeat([False, True], 10)
    shares, _ = d_calibration(levels, cut)
    np.testing.assert_allclose(shares, np.array([1] * 7 + [1 + 2, 1 + 4, 1 + 4]) / 20)


@given(
    st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=30),
    st.lists(st.floats(0, 1), min_size=2, max_size=10),
)
def test_the_observed_share_never_falls_and_ends_at_one(
    rows: list[tuple[float, bool]], nominal: list[float]
) -> None:
    levels, cut = (np.array(column) for column in zip(*rows, strict=True))
    shares = observed_share(levels, cut, sorted(nominal))
    assert (np.diff(shares) >= -1e-12).all() and (shares >= 0).all()
    np.testing.assert_allclose(observed_share(levels, cut, 1.0), 1)


def test_a_calibrated_forecast_covers_what_it_claims_and_is_rarely_rejected() -> None:
    p_values = []
    for seed in range(10):
        forecast, came = drawn_from_its_forecast(seed=seed)
        p_values.append(d_calibration(levels_of(forecast, came), came.cut)[1])
        assert 0.1 < came.cut.mean() < 0.6
        for found, level in zip(coverages(forecast, came), LEVELS, strict=True):
            claimed = level / 100
            assert abs(found - claimed) < 4 * np.sqrt(claimed * (1 - claimed) / N)
        assert level_error(forecast, came) < 0.025
    assert min(p_values) > 0.001 and np.median(p_values) > 0.2


@pytest.mark.parametrize("power", [0.6, 1.0, 1.5])
def test_recalibration_on_one_half_restores_coverage_on_the_other(power: float) -> None:
    forecast, came = drawn_from_its_forecast(power)
    half, other = np.arange(0, N, 2), np.arange(1, N, 2)
    fitted = fit_recalibration(levels_of(forecast, came)[half], came.cut[half])
    recalibrated = SurvivalForecast.new(
        forecast.edges, fitted.apply(forecast.survival[other]), came.left[other]
    )
    raw, unseen = forecast.select(other), came.select(other)
    for found, level in zip(coverages(recalibrated, unseen), LEVELS, strict=True):
        assert found == pytest.approx(level / 100, abs=0.025)
    assert level_error(recalibrated, unseen) < 0.03
    if power == 1:
        np.testing.assert_allclose(fitted.observed, fitted.nominal, atol=0.04)
    else:
        assert level_error(raw, unseen) > 0.1
        assert integrated_brier(recalibrated, unseen) < integrated_brier(raw, unseen)


def test_recalibration_maps_what_was_forecast_to_what_was_observed() -> None:
    with pytest.raises(ForecastError, match="no request ended by itself"):
        fit_recalibration(np.array([0.3, 0.4]), np.array([True, True]))
    mapped = Recalibration([0, 0.5, 1], [0, 0.8, 1])
    survival = np.array([[1.0, 0.75, 0.5, 0.25, 0]])
    np.testing.assert_allclose(mapped.apply(survival), [[1, 0.6, 0.2, 0.1, 0]])
    np.testing.assert_array_equal(IDENTITY.apply(survival), survival)


@pytest.mark.parametrize(
    ("nominal", "observed"),
    [
        ([0, 1], [0, 0.5, 1]),
        ([0], [0]),
        ([0.1, 1], [0, 1]),
        ([0, 1], [0, 0.9]),
        ([0, 0.5, 0.5, 1], [0, 0.2, 0.3, 1]),
        ([0, 0.4, 0.6, 1], [0, 0.5, 0.4, 1]),
        ([0, float("nan"), 1], [0, 0.5, 1]),
    ],
)
def test_an_invalid_map_of_probabilities_is_refused(
    nominal: list[float], observed: list[float]
) -> None:
    with pytest.raises(ForecastError, match="recalibration"):
        Recalibration(nominal, observed)


@st.composite
def recalibrations(draw: st.DrawFn) -> Recalibration:
    inside = st.integers(1, 99).map(lambda percent: percent / 100)
    nominal = sorted(draw(st.lists(inside, max_size=5, unique=True)))
    observed = sorted(draw(st.lists(inside, min_size=len(nominal), max_size=len(nominal))))
    return Recalibration([0, *nominal, 1], [0, *observed, 1])


@given(recalibrations(), recalibrations())
def test_one_recalibration_after_another_is_one(
    earlier: Recalibration, later: Recalibration
) -> None:
    survival = np.linspace(1, 0, 101)[None]
    both = later.after(earlier).apply(survival)
    np.testing.assert_allclose(both, later.apply(earlier.apply(survival)), atol=1e-9)


@given(recalibrations(), st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_a_recalibrated_curve_is_a_survival_curve(
    recalibration: Recalibration, survival: list[float]
) -> None:
    curve = [[1, *sorted(survival, reverse=True)]]
    SurvivalForecast.new(np.arange(len(survival) + 1), recalibration.apply(np.array(curve)))


# The Kaplan-Meier curve.


@given(st.lists(st.tuples(st.integers(1, 200), st.booleans()), min_size=1, max_size=60))
def test_the_kaplan_meier_curve_agrees_with_torchsurv(observed: list[tuple[int, bool]]) -> None:
    from torchsurv.stats.kaplan_meier import KaplanMeierEstimator

    values, cut = (np.array(column) for column in zip(*observed, strict=True))
    curve = KaplanMeierCurve.estimate(values, cut)
    assert curve.times.tolist() == sorted(set(values[~cut].tolist()))
    assert curve.last_observed == values.max()
    if cut.all():  # torchsurv takes no such data
        assert (curve.at(np.arange(202)) == 1).all()
        return
    estimator = KaplanMeierEstimator()
    estimator(torch.from_numpy(~cut), torch.from_numpy(values.astype(np.float64)))
    at = estimator.time.numpy()
    np.testing.assert_allclose(curve.at(at), estimator.km_est, atol=1e-5)
    np.testing.assert_array_equal(curve.at(at[1:] - 0.1), curve.at(at[:-1]), "it is a step")


# The grid.


@given(st.integers(21, 200_000))
def test_the_grid_ascends_dense_near_0_and_relatively_even_beyond(limit: int) -> None:
    edges = survival_edges(limit)
    assert (edges[0], edges[-1], edges.dtype) == (0, limit, np.int64)
    assert (np.diff(edges) > 0).all()
    assert edges[:5].tolist() == [0, 5, 10, 15, 20]
    far = edges[4:]
    # No more than half a bin a doubling fewer than six, and a rounded token.
    doublings = np.log2(limit / 20)
    step = 2 ** (doublings / max(1, round(6 * doublings)))
    assert (far[1:] <= far[:-1] * step + 1.5).all()
    assert len(edges) < 90


def test_a_grid_and_a_curve_that_cannot_be_are_refused() -> None:
    for limit in (20, 0):
        with pytest.raises(ValueError, match="no grid to"):
            survival_edges(limit)
    with pytest.raises(ValueError, match="there are no observations"):
        KaplanMeierCurve.estimate(np.zeros(0), np.zeros(0, dtype=bool))
