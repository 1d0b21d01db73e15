"""A scheduler that knows the forecasts of its requests; otherwise vLLM's own.

Given to vLLM as ``--scheduler-cls predictor.live.vllm_scheduler.LiveHeadwayScheduler``.
"""

from typing import Any

import numpy as np
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from data_collection.capture.capture_config import SECTION, read_capture_config
from data_collection.vllm_scheduler import (
    AsyncHeadwayScheduler,
    SyncHeadwayScheduler,
    SyncOrAsyncScheduler,
)
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

__all__ = ["AsyncLiveHeadwayScheduler", "LiveHeadwayScheduler", "SyncLiveHeadwayScheduler"]


class _KnowsForecasts:
    """Keeps the latest forecast of every request, and passes on what the worker cannot know.

    That is how full the engine is, in every step, and in every k-th, where the worker's predictor
    reads it, how much the answers repeat themselves.

    Attributes:
        headway_forecasts: request id -> the step's forecasts it is in, and its row there.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.headway_forecasts: dict[str, tuple[EngineForecasts, int]] = {}
        super().__init__(*args, **kwargs)
        given = self.vllm_config.additional_config  # type: ignore[attr-defined]
        config = read_capture_config(given, LiveConfig) if SECTION in given else LiveConfig()
        forecast = config.forecast
        reads = forecast is not None and _reads_repetition(forecast.checkpoint)
        self._headway_k = config.k if reads else 0
        self._headway_steps = 0
        if self._headway_k:
            repetition(np.zeros(0, dtype=np.int64))  # compiled before the first request comes

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        output: SchedulerOutput = super().schedule(*args, **kwargs)  # type: ignore[misc]
        setattr(output, GAUGES_ATTRIBUTE, scheduler_gauges(self))
        self._headway_steps += 1
        if self._headway_k and self._headway_steps % self._headway_k == 0:
            requests = self.requests  # type: ignore[attr-defined]
            setattr(
                output,
                REPETITION_ATTRIBUTE,
                {name: _repetition(requests[name]) for name in output.num_scheduled_tokens},
            )
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: Any
    ) -> Any:
        for forecasts in getattr(model_runner_output, FORECASTS_ATTRIBUTE, []):
            for row, name in enumerate(forecasts.request_ids):
                if name in self.requests:  # type: ignore[attr-defined]
                    self.headway_forecasts[name] = (forecasts, row)
        return super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]

    def remaining_forecast(self, request: Request) -> SurvivalForecast | None:
        """Return what is expected of a request now, or None before its first forecast."""
        known = self.headway_forecasts.get(request.request_id)
        if known is None:
            return None
        forecasts, row = known
        since = max(0, request.num_output_tokens - forecasts.generated_tokens[row])
        fresh = SurvivalForecast.new(
            forecasts.edges, forecasts.survival[row : row + 1], forecasts.tokens_left[row]
        )
        return fresh.aged(since)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self.headway_forecasts.pop(request.request_id, None)
        return super()._free_request(request, *args, **kwargs)  # type: ignore[misc]


def _reads_repetition(checkpoint: str) -> bool:
    return not {"repetition", "repeated_suffix"}.isdisjoint(load_predictor(checkpoint).inputs)


def _repetition(request: Request) -> tuple[float, float]:
    """Return what `repetition` says of an answer at the end of the step just scheduled.

    Without its newest token, which is still being sampled where steps are scheduled ahead.
    """
    known = request.num_computed_tokens - request.num_prompt_tokens - 1
    if known < 1:
        return NO_REPETITION
    tokens = request.output_token_ids[max(0, known - MEMORY) : known]
    found: tuple[float, float] = repetition(np.array(tokens, dtype=np.int64))
    return found


def scheduler_gauges(scheduler: Any) -> Gauges:
    """Read how full an engine is from vLLM's scheduler."""
    cache = scheduler.cache_config
    return Gauges(
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        kv_usage=float(scheduler.kv_cache_manager.usage),
        kv_capacity_tokens=int(cache.num_gpu_blocks) * int(scheduler.block_size),
    )


class SyncLiveHeadwayScheduler(_KnowsForecasts, SyncHeadwayScheduler):
    """For engines that schedule a step after the last one's tokens are known."""


class AsyncLiveHeadwayScheduler(_KnowsForecasts, AsyncHeadwayScheduler):
    """For engines that schedule a step ahead of the last one's tokens."""


class LiveHeadwayScheduler(SyncOrAsyncScheduler):
    """Knows the forecasts of its requests."""

    sync_class = SyncLiveHeadwayScheduler
    async_class = AsyncLiveHeadwayScheduler
