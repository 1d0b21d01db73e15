"""How far a recorded predictor's forecasts were from the truth, as one spread to simulate with."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from predictor.forecasts.forecast import SurvivalForecast
from rescheduler.simulator.workloads.forecast_recording import ForecastRecording

__all__ = ["MEASURED_INTERVAL", "MEASURED_SIGMA", "forecast_error"]

MEASURED_SIGMA = 1.25
"""Spread over all ages of the forecasts in recordings/smollm2-135m-instruct.parquet."""

MEASURED_INTERVAL = 20
"""Tokens between two of those forecasts."""

_AGES = (0, 1, 100, 200, 400, 800)


class ForecastError(NamedTuple):
    r"""The error :math:`\log(\hat r / r)` of the median remaining length, over all forecasts.

    Attributes:
        sigma: its standard deviation, which `forecast_sources.Noisy` takes.
        bias: its mean, which is above 0 where forecasts are too long.
        interval: tokens between two forecasts of a request.
        ages: [A] generated tokens from which each part counts, up to the next.
        sigma_by_age: [A] the standard deviation there, NaN where there are fewer than two.
        requests: that the forecasts are of.
    """

    sigma: float
    bias: float
    interval: int
    ages: tuple[int, ...]
    sigma_by_age: npt.NDArray[np.float64]
    requests: int


def forecast_error(recording: ForecastRecording) -> ForecastError:
    """Return the spread of a recording's forecasts around what came.

    Requests that were cut at their max_tokens count for nothing: how long they would have been
    is not known.

    Raises:
        ValueError: fewer than two forecasts of requests that ended on their own.
    """
    owner = np.repeat(np.arange(len(recording)), recording.n_rows)
    age = recording.interval * (np.arange(len(owner)) - recording.first_row[owner])
    ended = ~recording.cut[owner]
    limit = recording.max_tokens[owner] - age
    forecast = SurvivalForecast.new(recording.edges, recording.curves, limit)
    median = np.maximum(forecast.median(), 1.0)
    error = np.log(median / (recording.output[owner] - age))[ended]
    if len(error) < 2:
        raise ValueError("the recording has too few forecasts of requests that ended on their own")
    part = np.searchsorted(_AGES, age[ended], side="right") - 1
    by_age = [error[part == i] for i in range(len(_AGES))]
    spreads = [float(e.std(ddof=1)) if len(e) > 1 else np.nan for e in by_age]
    return ForecastError(
        sigma=float(error.std(ddof=1)),
        bias=float(error.mean()),
        interval=recording.interval,
        ages=_AGES,
        sigma_by_age=np.array(spreads),
        requests=int(np.count_nonzero(~recording.cut)),
    )
