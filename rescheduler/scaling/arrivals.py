"""Forecasts of arrivals: Holt and Winters' season of the day, from counts a minute."""

from typing import Any

import numpy as np
import numpy.typing as npt

from rescheduler.scaling.days import MINUTE, Day

__all__ = ["forecast_rates", "known_rates", "last_rates"]

FloatArray = npt.NDArray[np.float64]

_SEASON_MINUTES = 5
"""Minutes that share a value of the season, so that it is not the noise of a minute a day."""


def forecast_rates(day: Day, ahead: int) -> FloatArray:
    r"""Return the rates that are expected, as each minute ends.

    Holt and Winters' exponential smoothing with a season, on counts of 5 minutes:

    .. math:: \hat y_{t+h} = \ell_t\, s_{t+h-P}, \quad
        \ell_t = \alpha\, y_t / s_{t-P} + (1 - \alpha)\, \ell_{t-1}, \quad
        s_t = \gamma\, y_t / \ell_{t-1} + (1 - \gamma)\, s_{t-P}

    (sums instead of products where a count is 0). :math:`\alpha` and :math:`\gamma` are fitted to
    the history; the day then only moves the level and the season on. Between two values of the
    season the level follows every minute, with an :math:`\alpha` that simple exponential smoothing
    of the history without its season has.

    Args:
        day: with two periods of history or more, each an hour or more, in multiples of five
            minutes.
        ahead: minutes.

    Returns:
        [n_minutes, ahead + 1] requests a second in the minute that begins then, and in those after
        it. Row i knows the counts of minutes before i.

    Raises:
        ValueError: there is too little history, or statsmodels is not installed.

    Source: Winters 1960, 'Forecasting Sales by Exponentially Weighted Moving Averages'.
    """
    if len(day.history) < 2 * day.period:
        raise ValueError(
            f"a season of {day.period / 60:g} h is learnt from two of them, but before the "
            f"simulated day there are {len(day.history) / 60:.3g} h: a longer trace, a shorter "
            "--period-hours, or no --times recorded would do"
        )
    try:
        from statsmodels.tsa.holtwinters import ExponentialSmoothing, SimpleExpSmoothing
    except ImportError as error:
        raise ValueError(
            "forecasts of arrivals need statsmodels: pip install 'headway[scale]'"
        ) from error
    whole = day.history[-(len(day.history) // day.period) * day.period :]
    fives = _fives(whole)
    multiplied = bool((fives > 0).all())
    fitted = ExponentialSmoothing(
        fives,
        seasonal="mul" if multiplied else "add",
        seasonal_periods=day.period // _SEASON_MINUTES,
        initialization_method="heuristic",
    ).fit()
    seasons = np.asarray(fitted.season, dtype=np.float64)
    without = _without_season(
        _SEASON_MINUTES * whole, np.repeat(seasons, _SEASON_MINUTES), multiplied
    )
    smoothed = SimpleExpSmoothing(without, initialization_method="heuristic").fit()
    return _followed(
        day,
        ahead,
        level=float(smoothed.level[-1]),
        season=seasons[-(day.period // _SEASON_MINUTES) :].copy(),
        alpha=float(smoothed.params["smoothing_level"]),
        gamma=float(fitted.params["smoothing_seasonal"]),
        multiplied=multiplied,
    )


def _followed(
    day: Day,
    ahead: int,
    level: float,
    season: FloatArray,
    alpha: float,
    gamma: float,
    multiplied: bool,
) -> FloatArray:
    """Move the level on every minute and the season every five, and forecast as each begins."""
    minutes = len(day.counts)
    found = np.empty((minutes, ahead + 1))
    before = level  # of the five minutes' beginning
    for i in range(minutes):
        at = (i + np.arange(ahead + 1)) // _SEASON_MINUTES % len(season)
        expected = level * season[at] if multiplied else level + season[at]
        found[i] = np.maximum(expected, 0.0) / (_SEASON_MINUTES * MINUTE)
        k = i // _SEASON_MINUTES % len(season)
        apart = _without_season(_SEASON_MINUTES * day.counts[i], season[k], multiplied)
        level = float(alpha * apart + (1 - alpha) * level)
        if (i + 1) % _SEASON_MINUTES == 0:
            five = day.counts[i + 1 - _SEASON_MINUTES : i + 1].sum()
            own = _without_season(five, max(before, 1e-9) if multiplied else before, multiplied)
            season[k] = gamma * own + (1 - gamma) * season[k]
            before = level
    return found


def _without_season(counts: Any, season: Any, multiplied: bool) -> Any:
    return counts / season if multiplied else counts - season


def _fives(counts: FloatArray) -> FloatArray:
    return np.asarray(counts.reshape(-1, _SEASON_MINUTES).sum(axis=1), dtype=np.float64)


def known_rates(day: Day, ahead: int) -> FloatArray:
    """Return the rates that come, in the shape of `forecast_rates`: what nobody can know."""
    padded = np.append(day.counts, np.full(ahead, day.counts[-1])) / MINUTE
    return np.lib.stride_tricks.sliding_window_view(padded, ahead + 1).copy()


def last_rates(day: Day, ahead: int) -> FloatArray:
    """Return the rate of the last minute as that of all to come, in the same shape."""
    before = day.history[-1] if len(day.history) else day.counts[0]
    last = np.append(before, day.counts[:-1]) / MINUTE
    return np.repeat(last[:, None], ahead + 1, axis=1)
