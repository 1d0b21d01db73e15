"""What survival forecasts are measured by, their recalibration, and the grid they live on."""

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from predictor import Forecast, ForecastError, PointForecast, SurvivalForecast
from predictor.evaluation.survival_metrics import (
    LEVELS,
    WITHIN,
    Outcomes,
    concordance,
    coverage,
    d_calibration,
    integrated_brier,
    levels_of,
    pinball_loss,
    survival_scores,
    within,
)
from predictor.forecasts.kaplan_meier import KaplanMeierCurve, survival_edges
from predictor.forecasts.recalibration import (
    Recalibration,
    fit_recalibration,
    observed_levels,
    observed_share,
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
    forecast = curves(0.2, 0.8, 0.5)
    came = Outcomes(np.array([4, 15, 10]), np.array([False, True, True]), np.array([30, 15, 10]))
    brier, auc = within(forecast, came, 10)
    assert brier == pytest.approx((0.2**2 + 0.2**2) / 2)
    assert auc == 1
    reversed_brier, reversed_auc = within(curves(0.8, 0.2, 0.5), came, 10)
    assert reversed_brier == pytest.approx((0.8**2 + 0.8**2) / 2)
    assert reversed_auc == 0


def test_within_is_unknown_without_rows_and_has_no_auc_of_one_class() -> None:
    brier, auc = within(curves(0.5, 0.5), outcomes([5, 5], [True, True]), 10)
    assert np.isnan(brier) and auc is None
    brier, auc = within(curves(0.5, 0.7), outcomes([5, 5]), 10)
    assert brier == pytest.approx((0.5**2 + 0.7**2) / 2) and auc is None


def test_the_integrated_brier_score_by_hand() -> None:
    # At h = 1 both rows count, S = 0.95; at h = 9 the second has left, S = 0.55 and the first
    # has ended. The largest cap is 12.
    came = Outcomes(np.array([4, 5]), np.array([False, True]), np.array([12, 5]))
    expected = (0.05**2 + 0.55**2) / 2
    assert integrated_brier(curves(0.5, 0.5), came) == pytest.approx(expected)
    assert integrated_brier(PointForecast.new([4, 99], came.left), came) == 0


def test_the_integrated_brier_score_needs_a_cap_beyond_one_token() -> None:
    assert np.isnan(integrated_brier(curves(0.5), Outcomes(*map(np.array, ([1], [True], [1])))))


def test_the_integrated_brier_score_is_torchsurvs_without_cuts() -> None:
    from torchsurv.metrics.brier_score import BrierScore

    forecast, came = drawn_from_its_forecast()
    some = np.flatnonzero(~came.cut)[:500]
    uncut = Outcomes(came.remaining[some], came.cut[some], np.full(500, 401))
    free = forecast.select(some).uncapped()
    horizons = np.arange(1, 401, 8)
    score = BrierScore()
    theirs = score(
        torch.from_numpy(free.at(horizons)),
        torch.ones(500, dtype=torch.bool),
        torch.from_numpy(uncut.remaining.astype(np.float64)),
        torch.from_numpy(horizons.astype(np.float64)),
    )
    assert integrated_brier(free, uncut) == pytest.approx(float(theirs.mean()), rel=1e-6)


def test_the_truth_has_the_best_brier_score() -> None:
    scores = {}
    for power in (0.5, 1, 2):
        forecast, came = drawn_from_its_forecast(power)
        scores[power] = integrated_brier(forecast, came)
    assert scores[1] < min(scores[0.5], scores[2])


def test_the_pinball_loss_by_hand() -> None:
    forecast = PointForecast.new([10.0])
    assert pinball_loss(forecast, outcomes([14])) == pytest.approx(4 * 0.5)
    assert pinball_loss(forecast, outcomes([6])) == pytest.approx(4 * 0.5)
    # Deciles of an even spread over 20 tokens are 2, 4, ..., 18; 12 came.
    losses = [q * (12 - 20 * q) for q in np.arange(1, 7) / 10]
    losses += [(q - 1) * (12 - 20 * q) for q in np.arange(7, 10) / 10]
    assert pinball_loss(curves(0.5), outcomes([12])) == pytest.approx(np.mean(losses))


def test_the_pinball_loss_of_a_cut_request_is_of_the_tokens_under_its_cap() -> None:
    came = outcomes([6], [True])
    assert pinball_loss(PointForecast.new([50.0], came.left), came) == 0


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
    found = concordance(PointForecast.new(means), outcomes(remaining, cut))
    assert found == (None if expected is None else pytest.approx(expected))


def test_concordance_looks_at_the_forecasts_without_their_caps() -> None:
    came = outcomes([5, 6, 9], [False, True, False])
    forecast: Forecast = PointForecast.new([30, 80, 50], 10.0)
    assert concordance(forecast, came) == 1


def test_all_scores_are_given_by_horizon_and_level() -> None:
    forecast, came = drawn_from_its_forecast()
    scores = survival_scores(forecast, came)
    assert set(scores.brier_within) == set(scores.auc_within) == {str(h) for h in WITHIN}
    assert scores.coverage is not None
    assert list(scores.coverage.values()) == coverages(forecast, came)
    for h in WITHIN:
        assert within(forecast, came, h) == (
            scores.brier_within[str(h)],
            scores.auc_within[str(h)],
        )
    point = survival_scores(PointForecast.new(forecast.median(), came.left), came)
    assert point.coverage is None, "a point forecast has no interval"
    assert point.ibs > scores.ibs


# Calibration.


def test_levels_are_what_the_curve_says_of_the_tokens_that_came() -> None:
    # The curve falls by 0.05 a token: half a token before the end, or where it was cut.
    forecast = curves(0.5, 0.5, 0.5)
    levels = observed_levels(forecast, np.array([1, 10, 10]), np.array([False, False, True]))
    np.testing.assert_allclose(levels, [0.025, 0.475, 0.5])


def test_levels_of_capped_forecasts_are_those_without_the_cap() -> None:
    came = outcomes([10], [True])
    np.testing.assert_allclose(levels_of(curves(0.5, limit=10.0), came), [0.5])


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


def test_a_calibrated_forecast_covers_what_it_claims() -> None:
    forecast, came = drawn_from_its_forecast()
    assert 0.1 < came.cut.mean() < 0.6
    for found, level in zip(coverages(forecast, came), LEVELS, strict=True):
        claimed = level / 100
        assert abs(found - claimed) < 3 * np.sqrt(claimed * (1 - claimed) / N)
    assert level_error(forecast, came) < 0.025


def test_the_test_of_calibration_rarely_rejects_a_calibrated_forecast() -> None:
    p_values = []
    for seed in range(10):
        forecast, came = drawn_from_its_forecast(seed=seed)
        p_values.append(d_calibration(levels_of(forecast, came), came.cut)[1])
    assert min(p_values) > 0.001 and np.median(p_values) > 0.2


@pytest.mark.parametrize("power", [0.6, 1.5])
def test_a_miscalibrated_forecast_is_found_out(power: float) -> None:
    forecast, came = drawn_from_its_forecast(power)
    assert level_error(forecast, came) > 0.1
    _, p_value = d_calibration(levels_of(forecast, came), came.cut)
    assert p_value < 1e-9


def test_intervals_do_not_cover_when_cut_counts_as_ended() -> None:
    forecast, came = drawn_from_its_forecast()
    as_ended = Outcomes(came.remaining, np.zeros(N, dtype=bool), came.left)
    _, p_value = d_calibration(levels_of(forecast, as_ended), as_ended.cut)
    assert p_value < 1e-9


@pytest.mark.parametrize("power", [0.6, 1.5])
def test_recalibration_on_one_half_restores_coverage_on_the_other(power: float) -> None:
    forecast, came = drawn_from_its_forecast(power)
    half, other = np.arange(0, N, 2), np.arange(1, N, 2)
    levels = levels_of(forecast, came)
    fitted = fit_recalibration(levels[half], came.cut[half])
    recalibrated = SurvivalForecast.new(
        forecast.edges, fitted.apply(forecast.survival[other]), came.left[other]
    )
    unseen = came.select(other)
    for found, level in zip(coverages(recalibrated, unseen), LEVELS, strict=True):
        assert found == pytest.approx(level / 100, abs=0.025)
    assert level_error(forecast.select(other), unseen) > 0.1
    assert level_error(recalibrated, unseen) < 0.03
    assert integrated_brier(recalibrated, unseen) < integrated_brier(forecast.select(other), unseen)


def test_recalibrating_a_calibrated_forecast_changes_little() -> None:
    forecast, came = drawn_from_its_forecast()
    fitted = fit_recalibration(levels_of(forecast, came), came.cut)
    np.testing.assert_allclose(fitted.observed, fitted.nominal, atol=0.03)


def test_there_is_nothing_to_recalibrate_from_where_all_were_cut() -> None:
    with pytest.raises(ForecastError, match="no request ended by itself"):
        fit_recalibration(np.array([0.3, 0.4]), np.array([True, True]))


def test_recalibration_maps_what_was_forecast_to_what_was_observed() -> None:
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


def test_the_kaplan_meier_curve_by_hand() -> None:
    # At risk 5, 3, 2 at 10, 30, 40: the cut at 20 counts at 10 only, that at 30 at 30 too.
    values, cut = np.array([10, 20, 30, 30, 40]), np.array([0, 1, 0, 1, 0], dtype=bool)
    curve = KaplanMeierCurve.estimate(values, cut)
    assert curve.times.tolist() == [10, 30, 40]
    np.testing.assert_allclose(curve.survival, [4 / 5, 4 / 5 * 2 / 3, 0])
    np.testing.assert_allclose(
        curve.at([0, 9.9, 10, 29, 30, 39, 40, 99]), [1, 1, 0.8, 0.8, 8 / 15, 8 / 15, 0, 0]
    )
    assert curve.last_observed == 40


def test_the_kaplan_meier_curve_stays_at_one_where_all_were_cut() -> None:
    curve = KaplanMeierCurve.estimate(np.array([7, 3]), np.array([True, True]))
    assert curve.at([0, 3, 7, 100]).tolist() == [1, 1, 1, 1]
    assert (len(curve.times), curve.last_observed) == (0, 7)


def test_no_observations_have_no_kaplan_meier_curve() -> None:
    with pytest.raises(ValueError, match="there are no observations"):
        KaplanMeierCurve.estimate(np.zeros(0), np.zeros(0, dtype=bool))


@given(st.lists(st.tuples(st.integers(1, 200), st.booleans()), min_size=1, max_size=60))
def test_the_kaplan_meier_curve_agrees_with_torchsurv(observed: list[tuple[int, bool]]) -> None:
    from torchsurv.stats.kaplan_meier import KaplanMeierEstimator

    values, cut = (np.array(column) for column in zip(*observed, strict=True))
    curve = KaplanMeierCurve.estimate(values, cut)
    if cut.all():
        return  # torchsurv takes no such data
    estimator = KaplanMeierEstimator()
    estimator(torch.from_numpy(~cut), torch.from_numpy(values.astype(np.float64)))
    np.testing.assert_allclose(curve.at(estimator.time.numpy()), estimator.km_est, atol=1e-5)


@given(st.lists(st.integers(1, 200), min_size=1, max_size=60))
def test_kaplan_meier_without_cuts_is_the_share_that_lived_longer(
    totals: list[int],
) -> None:
    values = np.array(totals)
    curve = KaplanMeierCurve.estimate(values, np.zeros(len(values), dtype=bool))
    at = np.arange(0, 202)
    longer = (values[:, None] > at).mean(axis=0)
    np.testing.assert_allclose(curve.at(at), longer, atol=1e-12)


# The grid.

grids = st.tuples(
    st.integers(2, 20_000), st.integers(1, 50), st.integers(1, 200), st.integers(1, 12)
).filter(lambda grid: grid[0] > grid[2])


@given(grids)
def test_the_grid_ascends_in_whole_tokens_from_0_to_the_limit(
    grid: tuple[int, int, int, int],
) -> None:
    edges = survival_edges(*grid)
    assert edges.dtype == np.int64
    assert (edges[0], edges[-1]) == (0, grid[0])
    assert (np.diff(edges) > 0).all()


@given(grids)
def test_the_grid_is_dense_near_0_and_relatively_even_beyond(
    grid: tuple[int, int, int, int],
) -> None:
    limit, first, dense_until, octave = grid
    edges = survival_edges(*grid)
    near = edges[edges <= dense_until]
    assert near[-1] == dense_until and (np.diff(near) <= first).all()
    far = edges[edges >= dense_until]
    # No more than half a bin a doubling fewer than asked for, and a rounded token.
    doublings = np.log2(limit / dense_until)
    step = 2 ** (doublings / max(1, round(octave * doublings)))
    assert (far[1:] <= far[:-1] * step + 1.5).all()


def test_the_grid_of_a_long_context_has_few_bins() -> None:
    assert survival_edges(8192)[:6].tolist() == [0, 5, 10, 15, 20, 22]
    assert len(survival_edges(8192)) < 64
    assert len(survival_edges(131_072)) < 90


@pytest.mark.parametrize("grid", [(20,), (0,), (100, 0), (100, 5, 0), (100, 5, 20, 0), (10, 5, 20)])
def test_a_grid_that_cannot_be_is_refused(grid: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="no grid to"):
        survival_edges(*grid)
