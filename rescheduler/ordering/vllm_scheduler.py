"""vLLM's scheduler that serves its queue in another order than that of arrival.

Given to vLLM as ``--scheduler-cls rescheduler.ordering.vllm_scheduler.OrderedHeadwayScheduler``,
configured by the ``headway`` section of ``--additional-config`` (see `EngineOrderConfig`).
"""

from predictor.live.vllm_scheduler import LiveHeadwayScheduler
from rescheduler.ordering.engine_order import EngineOrder


class OrderedHeadwayScheduler(LiveHeadwayScheduler):
    """Knows the forecasts of its requests, and keeps its queue in the order of service."""

    part_types = (*LiveHeadwayScheduler.part_types, EngineOrder)
