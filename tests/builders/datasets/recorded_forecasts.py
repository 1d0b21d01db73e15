"""A recording of forecasts that is small enough to work out by hand."""

import numpy as np

from predictor.forecasts.forecast_recording import ForecastRecording

OF_THREE = ForecastRecording(
    model="m",
    predictor="p",
    part="test",
    interval=2,
    edges=np.array([0.0, 4.0, 8.0]),
    prompt=np.array([5, 5, 5]),
    output=np.array([4, 1, 3]),
    max_tokens=np.array([100, 100, 3]),
    cut=np.array([False, False, True]),
    curves=np.array([[1.0, 0.5, 0.0]] * 5, dtype=np.float32),
    first_row=np.array([0, 2, 3]),
    n_rows=np.array([2, 1, 2]),
)
