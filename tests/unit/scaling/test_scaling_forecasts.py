"""Days of requests, forecasts of their arrivals, and what is known of their lengths."""

import sys

import numpy as np
import pytest

from rescheduler.scaling.arrivals import forecast_rates, known_rates, last_rates
from rescheduler.scaling.days import Day, DayProfile, made_up_day, recorded_day
from rescheduler.scaling.lengths import LengthKnowledge, length_forecast, still_running
from rescheduler.simulator.workloads.trace import ResampledTrace, TraceBlock, lengths_block

HOUR = 3600.0
EVEN = DayProfile(irregular=0.0, bursts=0.0, history=3)


def trace_of(n: int = 2000, arrival: np.ndarray | None = None) -> ResampledTrace:
    generator = np.random.default_rng(0)
    block = lengths_block(generator.integers(1, 900, n), generator.geometric(1 / 200, n))
    if arrival is not None:
        block = block._replace(arrival=arrival)
    return ResampledTrace("made.csv", block, n)


def day_of(counts: np.ndarray, history: np.ndarray, period: int = 60) -> Day:
    nothing = TraceBlock(*(np.empty(0) for _ in range(5)))  # type: ignore[arg-type]
    return Day(nothing, 60.0 * len(counts), period, history, counts)


def test_a_made_up_day_has_the_season_that_it_says() -> None:
    day = made_up_day(trace_of(), EVEN, mean=20.0, period=24 * HOUR, seed=1)
    assert len(day.block.prompt) == day.counts.sum() and len(day.history) == 3 * 1440
    assert (np.diff(day.block.arrival) >= 0).all() and day.block.arrival[-1] < day.seconds
    rate = day.counts / 60
    assert rate.mean() == pytest.approx(20.0, rel=0.01)
    assert rate[:60].mean() == pytest.approx(20 * 0.4, rel=0.05)  # at night
    assert rate[690:750].mean() == pytest.approx(20 * 1.6, rel=0.05)
    minute = np.bincount((day.block.arrival // 60).astype(int), minlength=1440)
    assert (minute == day.counts).all()


def test_a_seed_gives_one_day() -> None:
    days = [made_up_day(trace_of(), DayProfile(), 1.0, HOUR, seed) for seed in (1, 1, 2)]
    assert (days[0].block.arrival == days[1].block.arrival).all()
    assert (days[0].block.output == days[1].block.output).all()
    assert len(days[0].block.arrival) != len(days[2].block.arrival)


def test_surges_come_at_the_same_time_every_day_and_bursts_do_not() -> None:
    generator = np.random.default_rng(3)
    surging = DayProfile(swing=0, irregular=0, surges=3, bursts=0)
    days = surging.rates(1.0, 1440, 4, generator).reshape(4, 1440)
    assert (days == days[0]).all() and set(np.unique(days)) == {1.0, 2.0}
    assert 30 <= np.count_nonzero(days[0] == 2.0) <= 90
    bursting = DayProfile(swing=0, irregular=0, bursts=6, burst=0.5)
    days = bursting.rates(1.0, 1440, 4, generator).reshape(4, 1440)
    assert (days != days[0]).any() and set(np.unique(days)) == {1.0, 1.5}


def test_too_large_and_empty_days_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 20,000,000 are simulated"):
        made_up_day(trace_of(), EVEN, 1e4, 24 * HOUR, 0)
    with pytest.raises(ValueError, match="an empty day"):
        made_up_day(trace_of(), EVEN, 1e-9, HOUR, 0)


def test_a_recorded_day_is_the_last_period_of_a_trace() -> None:
    arrival = np.arange(10_000) * 1.0  # 166 minutes
    trace = trace_of(10_000, arrival)
    day = recorded_day(trace, trace.rate, HOUR)
    assert (len(day.history), len(day.counts)) == (106, 60)
    assert (day.block.arrival == np.arange(3600)).all()
    assert (day.block.output == trace.recorded.output[6360:9960]).all()
    assert (day.counts == 60).all() and (day.history == 60).all()
    doubled = recorded_day(trace, 2 * trace.rate, HOUR)
    assert (doubled.counts == 120).all()
    halved = recorded_day(trace, trace.rate / 2, HOUR)
    assert halved.counts.sum() == pytest.approx(1800, abs=1)
    with pytest.raises(ValueError, match=r"made\.csv: no arrival times"):
        recorded_day(trace_of(), 1.0, HOUR)


def test_a_season_is_forecast_from_the_days_before() -> None:
    season = 100 + 80 * (np.arange(60) // 20 == 1)  # a jump that the last minute cannot tell
    day = day_of(season.astype(float), np.tile(season, 4).astype(float))
    expected, known, last = (make(day, 8) for make in (forecast_rates, known_rates, last_rates))
    assert expected.shape == known.shape == last.shape == (60, 9)
    assert np.abs(expected - known)[:50].max() < 0.02 * known.max()
    assert last[15, 8] == 100 / 60 and known[15, 8] == 180 / 60


def test_a_forecast_knows_only_the_minutes_before() -> None:
    generator = np.random.default_rng(0)
    history, counts = generator.poisson(100, 180) * 1.0, generator.poisson(100, 60) * 1.0
    changed = counts.copy()
    changed[30:] *= 3
    one, other = (forecast_rates(day_of(c, history), 5) for c in (counts, changed))
    assert (one[:31] == other[:31]).all()
    assert other[40].mean() > 1.5 * one[40].mean(), "the level follows"


def test_minutes_without_requests_have_a_season_too() -> None:
    season = np.where(np.arange(60) < 30, 0.0, 60.0)
    expected = forecast_rates(day_of(season, np.tile(season, 3)), 3)
    assert expected.min() >= 0 and expected[40, 0] == pytest.approx(1.0, rel=0.1)


def test_a_season_needs_two_periods_of_history() -> None:
    with pytest.raises(ValueError, match="a season of 1 h is learnt from two of them"):
        forecast_rates(day_of(np.ones(60), np.ones(119)), 3)


def test_what_statsmodels_is_for_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "statsmodels.tsa.holtwinters", None)
    with pytest.raises(ValueError, match=r"pip install 'headway\[scale\]'"):
        forecast_rates(day_of(np.ones(60), np.ones(120)), 3)


def chances(knowledge: LengthKnowledge, generated: float, steps: float) -> np.ndarray:
    """P(still running) of those that have generated so much, and whether they are."""
    output = np.random.default_rng(5).geometric(1 / 300, 4000)
    past = np.random.default_rng(6).geometric(1 / 300, 4000)
    forecast = length_forecast(knowledge, past, output, 7)
    return np.array(
        [
            (still_running(forecast, i, generated, steps, float(o)), o > generated + steps)
            for i, o in enumerate(output)
            if o > generated
        ]
    )


@pytest.mark.parametrize("generated", [0.0, 200.0])
def test_forecasts_are_right_as_often_as_they_say_and_the_better_the_sharper(
    generated: float,
) -> None:
    errors = {}
    for knowledge in ("age", "recorded", "exact"):
        said, came = chances(knowledge, generated, 150.0).T
        for low, high in ((0.0, 0.5), (0.5, 1.01)):
            group = (said >= low) & (said < high)
            if group.any():
                assert said[group].mean() == pytest.approx(came[group].mean(), abs=0.05)
        errors[knowledge] = ((said - came) ** 2).mean()
    assert errors["exact"] == 0 < errors["recorded"] < errors["age"]


def test_age_alone_is_a_kaplan_meier_curve() -> None:
    forecast = length_forecast("age", np.array([10, 20, 30, 40]), [50], 0)
    assert still_running(forecast, 0, 0.0, 25.0, 50.0) == pytest.approx(0.5)
    assert still_running(forecast, 0, 25.0, 10.0, 50.0) == pytest.approx(0.5)
    assert still_running(forecast, 0, 45.0, 1.0, 50.0) == 0.0
