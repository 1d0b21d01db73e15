"""A scheduler that reports how requests end; otherwise vLLM's own.

Given to vLLM as ``--scheduler-cls data_collection.vllm_scheduler.HeadwayScheduler``.
"""

from typing import Any, ClassVar

from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from data_collection.capture.requests import FinishedRequest
from data_collection.capture.vllm_adapter import FINISHED_ATTRIBUTE, finished_request

__all__ = [
    "AsyncHeadwayScheduler",
    "HeadwayScheduler",
    "SyncHeadwayScheduler",
    "SyncOrAsyncScheduler",
]


class _ReportsFinished:
    """Attach the requests that ended to the next step's `SchedulerOutput`.

    True lengths and finish reasons are the scheduler's knowledge; the rows are the
    worker's. Both meet in the worker, in order, on the message that goes there anyway.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._headway_finished: list[FinishedRequest] = []
        super().__init__(*args, **kwargs)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        output: SchedulerOutput = super().schedule(*args, **kwargs)  # type: ignore[misc]
        if self._headway_finished:
            setattr(output, FINISHED_ATTRIBUTE, self._headway_finished)
            self._headway_finished = []
        return output

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._headway_finished.append(finished_request(request))
        return super()._free_request(request, *args, **kwargs)  # type: ignore[misc]


class SyncHeadwayScheduler(_ReportsFinished, Scheduler):  # type: ignore[misc]
    """For engines that schedule a step after the last one's tokens are known."""


class AsyncHeadwayScheduler(_ReportsFinished, AsyncScheduler):  # type: ignore[misc]
    """For engines that schedule a step ahead of the last one's tokens."""


class SyncOrAsyncScheduler:
    """Becomes the one of its two classes that an engine needs.

    Attributes:
        sync_class: for engines that schedule a step after the last one's tokens are known.
        async_class: for engines that schedule a step ahead of the last one's tokens.
    """

    sync_class: ClassVar[type]
    async_class: ClassVar[type]

    def __new__(cls, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> Any:
        """Build the scheduler for this configuration."""
        is_async = vllm_config.scheduler_config.async_scheduling
        return (cls.async_class if is_async else cls.sync_class)(vllm_config, *args, **kwargs)


class HeadwayScheduler(SyncOrAsyncScheduler):
    """Reports how requests end."""

    sync_class = SyncHeadwayScheduler
    async_class = AsyncHeadwayScheduler
