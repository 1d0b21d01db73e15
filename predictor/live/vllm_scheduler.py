"""vLLM's scheduler that knows the forecasts of its requests.

Given to vLLM as ``--scheduler-cls predictor.live.vllm_scheduler.LiveHeadwayScheduler``.
"""

from typing import Any, ClassVar

from data_collection.vllm_scheduler import HeadwayScheduler, SchedulerPart
from predictor.forecasts.forecast import SurvivalForecast
from predictor.live.known_forecasts import KnownForecasts


class LiveHeadwayScheduler(HeadwayScheduler):
    """Knows the forecasts of its requests."""

    part_types: ClassVar[tuple[type[SchedulerPart], ...]] = (KnownForecasts,)

    def remaining_forecast(self, request: Any) -> SurvivalForecast | None:
        """Return what is expected of a request now, or None before its first forecast."""
        return self.part(KnownForecasts).remaining(request)
