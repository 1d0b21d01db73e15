"""Coarser and staler forecasts for the sensitivity studies of STAR §6.5."""

import numpy as np
import pytest

from predictor.forecasts.forecast import Forecast, PointForecast, SurvivalForecast
from predictor.forecasts.forecast_sensitivity import IntArray, binned, renewed_every, star_bins

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


def test_impossible_variants_are_refused() -> None:
    with pytest.raises(ValueError, match="no 3 bins"):
        star_bins(3, 32768)
    with pytest.raises(ValueError, match="ascend from 0"):
        binned(oracle(np.zeros(4, dtype=np.int64)), [0, 5, 5])
    with pytest.raises(ValueError, match="every 0 tokens"):
        renewed_every(oracle, 0)
