"""vLLM's scheduler that knows the forecasts of its requests, and the part that keeps them.

Given to vLLM as ``--scheduler-cls predictor.live.vllm_scheduler.LiveHeadwayScheduler``.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from data_collection.capture.capture_config import SECTION, read_capture_config
from data_collection.vllm_adapter.requests import known_answer
from data_collection.vllm_adapter.scheduling import fullness
from data_collection.vllm_scheduler import HeadwayScheduler, SchedulerPart
from predictor.forecasts.forecast import SurvivalForecast
from predictor.live.engine_forecasts import (
    FORECASTS_ATTRIBUTE,
    GAUGES_ATTRIBUTE,
    REPETITION_ATTRIBUTE,
    EngineForecasts,
    LiveConfig,
)
from predictor.live.telemetry_messages import Gauges
from predictor.models.checkpoint import load_predictor
from predictor.models.hidden_state_mlp import NO_REPETITION
from predictor.models.repetition import MEMORY, repetition


class KnownForecasts(SchedulerPart):
    """Keeps the latest forecast of every request, and passes on what the worker cannot know.

    That is how full the engine is, in every step, and in every k-th, where the worker's predictor
    reads it, how much the answers repeat themselves.

    Attributes:
        latest: request id -> the step's forecasts it is in, and its row there.
    """

    def __init__(self, scheduler: Any) -> None:
        super().__init__(scheduler)
        self.latest: dict[str, tuple[EngineForecasts, int]] = {}
        given = scheduler.vllm_config.additional_config
        config = read_capture_config(given, LiveConfig) if SECTION in given else LiveConfig()
        forecast = config.forecast
        inputs = () if forecast is None else load_predictor(forecast.checkpoint).inputs
        self._k = 0 if {"repetition", "repeated_suffix"}.isdisjoint(inputs) else config.k
        self._steps = 0
        if self._k:
            repetition(np.zeros(0, dtype=np.int64))  # compiled before the first request comes

    def scheduled(self, output: Any, prefills_throttled: bool) -> None:
        """Pass the engine's load, and how repetitive its answers are, to the workers."""
        setattr(output, GAUGES_ATTRIBUTE, self._gauges())
        self._steps += 1
        if self._k and self._steps % self._k == 0:
            requests = self.scheduler.requests
            found = {name: _repetition(requests[name]) for name in output.num_scheduled_tokens}
            setattr(output, REPETITION_ATTRIBUTE, found)

    def _gauges(self) -> Gauges:
        return Gauges(**fullness(self.scheduler), failures=self.scheduler.failures)

    def computed(self, output: Any) -> None:
        """Keep the forecasts that have arrived."""
        for forecasts in getattr(output, FORECASTS_ATTRIBUTE, []):
            for row, name in enumerate(forecasts.request_ids):
                if name in self.scheduler.requests:
                    self.latest[name] = (forecasts, row)

    def ended(self, request: Any) -> None:
        """Forget a request's forecast."""
        self.latest.pop(request.request_id, None)

    def remaining(self, request: Any) -> SurvivalForecast | None:
        """Return what is expected of a request now, or None before its first forecast."""
        known = self.latest.get(request.request_id)
        if known is None:
            return None
        forecasts, row = known
        since = max(0, request.num_output_tokens - forecasts.generated_tokens[row])
        fresh = SurvivalForecast.new(
            forecasts.edges, forecasts.survival[row : row + 1], forecasts.tokens_left[row]
        )
        return fresh.aged(since)

    def means(self, requests: Sequence[Any]) -> npt.NDArray[np.float64]:
        """Return the tokens that each is expected to generate, [n]; nan before its forecast."""
        means = np.full(len(requests), np.nan)
        together: dict[int, list[int]] = {}
        for i, request in enumerate(requests):
            known = self.latest.get(request.request_id)
            if known is not None:
                together.setdefault(id(known[0]), []).append(i)
        for of_a_step in together.values():
            named = [requests[i] for i in of_a_step]
            forecasts = self.latest[named[0].request_id][0]
            rows = np.array([self.latest[request.request_id][1] for request in named])
            fresh = SurvivalForecast.new(
                forecasts.edges,
                np.asarray(forecasts.survival)[rows],
                np.asarray(forecasts.tokens_left)[rows],
            )
            at = np.asarray(forecasts.generated_tokens)[rows]
            now = np.fromiter((request.num_output_tokens for request in named), np.int64, len(rows))
            means[of_a_step] = fresh.aged(np.maximum(now - at, 0)).mean()
        return means


def _repetition(request: Any) -> tuple[float, float]:
    tokens = known_answer(request, MEMORY)
    if not tokens:
        return NO_REPETITION
    found: tuple[float, float] = repetition(np.array(tokens, dtype=np.int64))
    return found


class LiveHeadwayScheduler(HeadwayScheduler):
    """Knows the forecasts of its requests."""

    part_types: ClassVar[tuple[type[SchedulerPart], ...]] = (KnownForecasts,)

    def remaining_forecast(self, request: Any) -> SurvivalForecast | None:
        """Return what is expected of a request now, or None before its first forecast."""
        return self.part(KnownForecasts).remaining(request)
