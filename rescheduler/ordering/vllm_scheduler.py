"""vLLM's schedulers that choose whom they suspend, and in which order they serve.

Given to vLLM as ``--scheduler-cls rescheduler.ordering.vllm_scheduler.OrderedHeadwayScheduler`` or
``SuspendingHeadwayScheduler``, configured by the ``headway`` section of ``--additional-config``
(see `EngineOrderConfig` and `read_victim`).
"""

from predictor.live.vllm_scheduler import LiveHeadwayScheduler
from rescheduler.ordering.engine_order import EngineOrder
from rescheduler.ordering.victims import Victims


class SuspendingHeadwayScheduler(LiveHeadwayScheduler):
    """Knows the forecasts of its requests, and suspends the one that is expected to run longest."""

    part_types = (*LiveHeadwayScheduler.part_types, Victims)


class OrderedHeadwayScheduler(LiveHeadwayScheduler):
    """Knows the forecasts of its requests, and keeps its queue in the order of service."""

    part_types = (*LiveHeadwayScheduler.part_types, EngineOrder)


class OrderedSuspendingHeadwayScheduler(LiveHeadwayScheduler):
    """Does both."""

    part_types = (*LiveHeadwayScheduler.part_types, EngineOrder, Victims)
