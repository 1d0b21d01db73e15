"""vLLM's scheduler, which reports how requests end, and with parts of Headway plugged in.

Given to vLLM as ``--scheduler-cls data_collection.vllm_scheduler.HeadwayScheduler``.
"""

from typing import Any, ClassVar, TypeVar

from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from data_collection.capture.requests import FinishedRequest
from data_collection.vllm_adapter.requests import finished_request
from data_collection.vllm_adapter.scheduling import arrival, bind_cache_manager
from data_collection.vllm_adapter.steps import FINISHED_ATTRIBUTE

Part = TypeVar("Part", bound="SchedulerPart")


class SchedulerPart:
    """Something that looks at every step of an engine's scheduler, or has a say in it.

    Its methods are called on the engine's thread, in their order here; what it does not define does
    nothing. An order of service would be a part that puts the waiting requests in its order
    `before_scheduling`, as `move_to_front` does.

    Args:
        scheduler: vLLM's, which has just been made.
    """

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def before_scheduling(self) -> None:
        """Look at the requests as a step is about to be scheduled."""

    def most_tokens(self, request: Request, tokens: int) -> int:
        """Return how many of a request's tokens may be computed in this step; 0: it waits."""
        return tokens

    def preempted(self, request: Request) -> None:
        """Look at a request that has just been preempted."""

    def scheduled(self, output: SchedulerOutput, prefills_throttled: bool) -> None:
        """Look at a step that was scheduled, or add to it for the workers."""

    def computed(self, output: Any) -> None:
        """Take what the workers' output of the oldest step brings, before the scheduler does."""

    def updated(self, step: SchedulerOutput, outputs: Any) -> None:
        """Look at the requests after that step, or add to the outputs for their clients."""

    def ended(self, request: Request) -> None:
        """Forget a request."""

    def shutdown(self) -> None:
        """Close what is open; the engine stops."""


class HeadwayScheduler(Scheduler):  # type: ignore[misc]
    """The scheduler that vLLM itself would choose, with parts.

    True lengths and finish reasons are the scheduler's knowledge; the rows are the worker's. Both
    meet in the worker, in order, on the message that goes there anyway.

    Attributes:
        failures: times that a part failed, and left its decision to vLLM.
    """

    part_types: ClassVar[tuple[type[SchedulerPart], ...]] = ()

    def __new__(cls, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> Any:
        """Derive from vLLM's asynchronous scheduler where steps are scheduled ahead."""
        kind = cls
        if vllm_config.scheduler_config.async_scheduling:
            kind = type(f"Async{cls.__name__}", (cls, AsyncScheduler), {})
        return super().__new__(kind)

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        bind_cache_manager(self)
        self._ended: list[FinishedRequest] = []
        self.failures = 0
        self._parts = [part(self) for part in self.part_types]
        limits = SchedulerPart.most_tokens
        self._limiting = [part for part in self._parts if type(part).most_tokens is not limits]

    def part(self, kind: type[Part]) -> Part:
        """Return the part of a kind."""
        return next(part for part in self._parts if isinstance(part, kind))

    def add_request(self, request: Request) -> None:
        """Take a request as usual, and note when it came."""
        arrival(request)
        super().add_request(request)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Schedule a step as usual, and add for the workers what ended and what the parts have."""
        for part in self._parts:
            part.before_scheduling()
        output = super().schedule(throttle_prefills)
        if self._ended:
            setattr(output, FINISHED_ATTRIBUTE, self._ended)
            self._ended = []
        for part in self._parts:
            part.scheduled(output, throttle_prefills)
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: Any
    ) -> Any:
        """Take the output of the oldest step as usual."""
        for part in self._parts:
            part.computed(model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for part in self._parts:
            part.updated(scheduler_output, outputs)
        return outputs

    def shutdown(self) -> None:
        """Close the parts, then shut down as usual."""
        for part in self._parts:
            part.shutdown()
        super().shutdown()

    def _reserve_prefill_lookahead(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        """Return how many tokens of a request may be computed now.

        vLLM asks for every running request (0: it sits this step out) and for every waiting one
        (0: it, and those behind it, wait on).
        """
        tokens: int = super()._reserve_prefill_lookahead(
            request, num_computed_tokens, num_new_tokens
        )
        for part in self._limiting:
            tokens = part.most_tokens(request, tokens)
        return tokens

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)
        for part in self._parts:
            part.preempted(request)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._ended.append(finished_request(request))
        for part in self._parts:
            part.ended(request)
        return super()._free_request(request, *args, **kwargs)
