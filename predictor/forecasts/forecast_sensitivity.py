"""Coarser and staler forecasts, to see what accuracy and freshness are worth (STAR §6.5)."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from predictor.forecasts.forecast import Forecast, PointForecast

IntArray = npt.NDArray[np.int64]

ForecastSource = Callable[[IntArray], Forecast]
"""Forecasts n requests given the tokens that each has generated, [n]."""

STAR_BINS: dict[int, tuple[float, ...]] = {
    2: (0, 1 / 4, 1),
    4: (0, 1 / 8, 1 / 4, 1 / 2, 1),
    6: (0, 1 / 16, 1 / 8, 3 / 16, 1 / 4, 1 / 2, 1),
}
"""Edges of STAR's 2, 4 and 6 bins of remaining length, as parts of the model's context: for
32K tokens they are [0, 8K), [8K, 32K]; and so on (STAR §6.5)."""


def star_bins(n_bins: int, context: int) -> IntArray:
    """Return the edges of STAR's bins for a model's context, [n_bins + 1] tokens.

    Raises:
        ValueError: STAR has no such partition.
    """
    if n_bins not in STAR_BINS:
        raise ValueError(f"STAR has no {n_bins} bins; known: {', '.join(map(str, STAR_BINS))}")
    return (np.array(STAR_BINS[n_bins]) * context).round().astype(np.int64)


def binned(forecast: Forecast, edges: npt.ArrayLike) -> PointForecast:
    """Return what is left when only the bin of the remaining length is forecast.

    The bin that holds the median stands for every length in it; its middle is taken, which the
    paper leaves open. Lengths past the last of the ascending edges belong to the last bin.

    Raises:
        ValueError: fewer than one bin, or edges that do not ascend from 0.
    """
    bounds = np.asarray(edges, dtype=np.float64)
    if bounds.ndim != 1 or len(bounds) < 2 or bounds[0] != 0 or (np.diff(bounds) <= 0).any():
        raise ValueError("bins need edges that ascend from 0")
    within = np.searchsorted(bounds, forecast.median(), side="right") - 1
    low = np.clip(within, 0, len(bounds) - 2)
    return PointForecast.new((bounds[low] + bounds[low + 1]) / 2)


def renewed_every(source: ForecastSource, interval: int) -> ForecastSource:
    """Return a source that predicts only each ``interval`` tokens and ages in between.

    STAR tries 1, 20 and 100.

    Raises:
        ValueError: the interval is below 1.
    """
    if interval < 1:
        raise ValueError(f"a prediction every {interval} tokens is none")

    def forecast(generated: IntArray) -> Forecast:
        since = generated % interval
        return source(generated - since).aged(since)

    return forecast
