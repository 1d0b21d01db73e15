"""Forecasts on their way out of the engine's step: to its scheduler and to the telemetry."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from predictor.forecasts.forecast import SurvivalForecast

__all__ = [
    "FORECASTS_ATTRIBUTE",
    "GAUGES_ATTRIBUTE",
    "REPETITION_ATTRIBUTE",
    "EngineForecasts",
]

FORECASTS_ATTRIBUTE = "headway_forecasts"
"""Name under which the worker adds a list of `EngineForecasts` to vLLM's `ModelRunnerOutput`."""

GAUGES_ATTRIBUTE = "headway_gauges"
"""Name under which the scheduler adds its `Gauges` to vLLM's `SchedulerOutput`."""

REPETITION_ATTRIBUTE = "headway_repetition"
"""Name under which the scheduler, which alone knows the tokens, adds to vLLM's `SchedulerOutput`
what `repetition` says of each request's answer."""


@dataclass(frozen=True, slots=True)
class EngineForecasts:
    """The predictions of one engine step, as a struct of arrays.

    Attributes:
        step: engine step after whose forward pass they were made.
        request_ids: [n_requests] ids inside the engine.
        prompt_tokens: [n_requests].
        generated_tokens: [n_requests] n when they were made.
        tokens_left: [n_requests] tokens to ``max_tokens`` from there.
        edges: [n_edges] the grid in tokens.
        survival: [n_requests, n_edges] the curves, recalibrated.
    """

    step: int
    request_ids: list[str]
    prompt_tokens: list[int]
    generated_tokens: list[int]
    tokens_left: list[int]
    edges: npt.NDArray[np.float64]
    survival: npt.NDArray[Any]

    def forecast(self) -> SurvivalForecast:
        """Return the curves as a forecast of age 0."""
        return SurvivalForecast.new(self.edges, self.survival, self.tokens_left)
