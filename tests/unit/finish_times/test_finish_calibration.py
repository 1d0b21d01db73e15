"""Intervals that are corrected by what came."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rescheduler.finish_times.finish_times import Calibration, Interval

TOLD = Interval(5.0, 10.0, 20.0)
seconds = st.floats(1e-3, 1e6)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def tried(
    calibration: Calibration, clock: Clock, expected: Interval, actual: float
) -> tuple[bool, bool]:
    """Forecast something that comes at once; return whether it was below and above."""
    told = calibration.interval(expected)
    trial = calibration.begin(expected, told)
    clock.now += 1.0
    calibration.came(trial, actual)
    return actual < told.low, actual > told.high


def test_without_outcomes_intervals_stay_as_they_are() -> None:
    calibration = Calibration(Clock())
    assert not calibration.learned
    for told, meant in zip(calibration.interval(TOLD), TOLD, strict=True):
        assert told == pytest.approx(meant, rel=0.1)
    assert calibration.probability(TOLD, 10.0) == pytest.approx(0.5, abs=0.05)
    assert calibration.probability(TOLD, 20.0) == pytest.approx(0.9, abs=0.05)


@pytest.mark.parametrize(("scale", "spread"), [(1.0, 0.5), (3.0, 0.5), (0.3, 1.5), (1.0, 0.05)])
def test_whatever_the_errors_are_8_of_10_come_to_be_within(scale: float, spread: float) -> None:
    generator, clock = np.random.default_rng(1), Clock()
    calibration = Calibration(clock)
    outside = [
        tried(calibration, clock, TOLD, float(10 * scale * np.exp(spread * generator.normal())))
        for _ in range(1_500)
    ]
    early, late = np.mean(outside[500:], axis=0)
    assert early == pytest.approx(0.1, abs=0.03)
    assert late == pytest.approx(0.1, abs=0.03)
    actual = 10 * scale * np.exp(spread * generator.normal(size=2_000))
    within = 10 * scale * np.exp(spread * 1.2816)
    assert calibration.probability(TOLD, float(within)) == pytest.approx(0.9, abs=0.04)
    promised = calibration.quantile(TOLD, 0.95)
    assert np.mean(actual <= promised) == pytest.approx(0.95, abs=0.03)


def test_what_still_runs_counts_for_the_time_that_it_has_taken() -> None:
    """Half of the requests take 100 times as long, and are not over when the others are."""
    clock = Clock()
    calibration = Calibration(clock)
    short = [calibration.begin(TOLD, TOLD) for _ in range(100)]
    for _ in range(100):
        calibration.begin(TOLD, TOLD)
    clock.now = 10.0
    for trial in short:
        calibration.came(trial, 10.0)
    clock.now = 500.0
    assert calibration.probability(TOLD, 11.0) == pytest.approx(0.5, abs=0.05)
    assert calibration.quantile(TOLD, 0.9) >= 20.0, "not 10 s, as of all that ended"


def test_of_forecasts_that_nothing_came_of_nothing_is_learnt() -> None:
    clock = Clock()
    calibration = Calibration(clock)
    before = calibration.interval(TOLD)
    for _ in range(50):
        calibration.drop(calibration.begin(TOLD, TOLD))
    clock.now = 1_000.0
    assert calibration.interval(TOLD) == before


def test_what_was_late_and_then_refused_leaves_no_trace() -> None:
    clock = Clock()
    calibration = Calibration(clock)
    before = calibration.interval(TOLD)
    trials = [calibration.begin(TOLD, TOLD) for _ in range(20)]
    clock.now = 100.0
    assert calibration.interval(TOLD).high > before.high, "it is late"
    for trial in trials:
        calibration.drop(trial, unlearn=True)
    clock.now = 101.0
    assert calibration.interval(TOLD) == pytest.approx(before)


def test_ten_thousand_awaited_forecasts_are_not_kept() -> None:
    calibration = Calibration(Clock())
    for _ in range(10_000):
        calibration.begin(TOLD, TOLD)
    assert len(calibration._trials) <= 2_000
    assert calibration.quantile(TOLD, 0.5) > 0


@given(bounds=st.tuples(seconds, seconds, seconds), actual=st.lists(seconds, max_size=60))
def test_intervals_are_in_order_and_agree_with_probabilities(
    bounds: tuple[float, float, float], actual: list[float]
) -> None:
    expected, clock = Interval(*sorted(bounds)), Clock()
    calibration = Calibration(clock)
    for one in actual:
        tried(calibration, clock, expected, one)
    told = calibration.interval(expected)
    assert 0 < told.low <= told.median <= told.high
    levels = [calibration.probability(expected, most) for most in (0.0, *told, 1e9)]
    assert levels == sorted(levels)
    assert levels[0] == 0.0 and levels[-1] <= 1.0
