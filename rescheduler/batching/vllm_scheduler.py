"""vLLM's scheduler that forms batches by the slack of their requests.

Given to vLLM as ``--scheduler-cls rescheduler.batching.vllm_scheduler.FairBatchingScheduler``,
configured by the ``headway`` section of ``--additional-config`` (see `batching_config`).
"""

from predictor.live.vllm_scheduler import LiveHeadwayScheduler
from rescheduler.batching.fair_batching import FairBatching


class FairBatchingScheduler(LiveHeadwayScheduler):
    """Knows the forecasts of its requests, and forms batches by their slack."""

    part_types = (*LiveHeadwayScheduler.part_types, FairBatching)
