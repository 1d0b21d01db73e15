"""The order of service inside vLLM's scheduler: which of the requests that wait there goes first.

For engines that are served without a proxy, or that are given more requests than they can run.
"""

import logging
import time
from contextlib import suppress
from math import inf
from typing import Any

import numpy as np
import numpy.typing as npt

from data_collection.models import name_of
from data_collection.vllm_adapter.requests import ended_by_itself
from data_collection.vllm_adapter.scheduling import (
    QueuedRequest,
    arrival,
    fullness,
    move_to_front,
    queued_requests,
)
from data_collection.vllm_adapter.support import refuse_other_version
from data_collection.vllm_scheduler import SchedulerPart
from predictor.live.vllm_scheduler import KnownForecasts
from predictor.prompts.prompt_predictor import PromptPredictor
from rescheduler.ordering.engine_past import EnginePast
from rescheduler.ordering.service_order import Line, Room, read_engine_order
from rescheduler.step_time.profile import MeanStepTime

logger = logging.getLogger("vllm.headway.order")  # with vLLM's handler

_SECONDS, _REST, _RETRY = 0.1, 20.0, 60.0
"""Seconds between two times that the queue is put in order, at least; how many times as long as
that took they are, at least; and seconds after a failure."""

_FORECAST_AT_ONCE = 64
"""Prompts; of more that have come meanwhile the rest are forecast later."""

_FIRST_MEAN, _MEAN_WEIGHT = 256.0, 0.02


class EngineOrder(SchedulerPart):
    """Keeps vLLM's queue in the order of service; all else stays vLLM's.

    A waiting request is expected to generate what its prompt suggests, or what earlier answers to
    the same prefix do, or as much as recently finished requests; a preempted one what was last
    forecast of it, or what is left of that.

    Raises:
        ValueError: the order is invalid, or vLLM's own policy is another than ``fcfs``.
    """

    def __init__(self, scheduler: Any) -> None:
        super().__init__(scheduler)
        vllm_config = scheduler.vllm_config
        refuse_other_version()
        config = read_engine_order(vllm_config.additional_config)
        if vllm_config.scheduler_config.policy != "fcfs":
            raise ValueError(
                f"headway.order and --scheduling-policy {vllm_config.scheduler_config.policy} both "
                "say who goes first; drop one of them"
            )
        self._line, self._orders = Line(config.order), config.order.needs_lengths
        self._line.compile()
        self._prompts: PromptPredictor | None = None
        model = name_of(vllm_config.model_config.model)
        if config.prompt_checkpoint is not None:
            self._prompts = PromptPredictor.load(config.prompt_checkpoint)
            self._prompts.warn_of_other_model(model, logger)
        self._past: EnginePast | None = None
        if self._prompts is None and config.past and self._orders:
            file, rank = config.past_file, vllm_config.parallel_config.data_parallel_index
            if file is not None and rank:  # each keeps its own
                file += f".rank{rank}"
            self._past = EnginePast(model, config.past, file)
        self._slots = float(vllm_config.scheduler_config.max_num_seqs)
        self._expected: dict[str, float] = {}
        self._stages = float(vllm_config.parallel_config.pipeline_parallel_size)
        self._mean, self._step = _FIRST_MEAN, MeanStepTime()
        self._order_at, self._stepped_at = -inf, inf
        self._failed = False

    def before_scheduling(self) -> None:
        """Put the queue in order, now and then."""
        began = time.monotonic()
        if not self._orders or began < self._order_at:
            return
        try:
            if self._past is not None:
                self._past.keep()
            self._order()
        except Exception:  # an engine ends by one
            self.scheduler.failures += 1
            if not self._failed:
                logger.exception("the queue cannot be put in order; it is served as it came")
            self._failed = True
            self._order_at = began + _RETRY
        else:
            now = time.monotonic()
            self._order_at = now + max(_SECONDS, _REST * (now - began))

    def updated(self, step: Any, outputs: Any) -> None:
        """Learn how long a token of a request takes."""
        now = time.monotonic()
        if now > self._stepped_at:
            self._step.took(self._stages * (now - self._stepped_at))
        self._stepped_at = now if self.scheduler.running else inf

    def ended(self, request: Any) -> None:
        """Learn from a request that has ended by itself."""
        self._expected.pop(request.request_id, None)
        by_itself = ended_by_itself(request)
        cut = str(request.get_finished_reason()) == "length"  # it would have gone on
        if self._past is not None:
            try:
                self._past.ended(request, by_itself, cut)
            except Exception:  # an engine ends by one
                logger.exception("nothing is learned from a request")
        if by_itself:
            more = request.num_output_tokens - self._mean
            self._mean += _MEAN_WEIGHT * (max(0.0, more) if cut else more)
            self._line.ended(time.monotonic() - arrival(request))

    def shutdown(self) -> None:
        """Keep what is known of the past."""
        if self._past is not None:
            self._past.close()

    def _order(self) -> None:
        queue = queued_requests(self.scheduler)
        if len(queue) < 2:
            return
        capacity = fullness(self.scheduler)["kv_capacity_tokens"]
        order, _ = self._line.put_in_order(
            waited=time.monotonic() - np.array([one.arrived for one in queue]),
            left=self._expected_left(queue),
            context=np.array([float(one.context) for one in queue]),
            latest=inf,
            room=Room(self._slots, capacity, self._step.seconds),
        )
        move_to_front(self.scheduler, [queue[i].request.request_id for i in order])

    def _expected_left(self, queue: list[QueuedRequest]) -> npt.NDArray[np.float64]:
        """Return the tokens that each is expected to generate, [n], at least 1."""
        if self._prompts is not None:
            self._forecast(self._prompts, queue)
        elif self._past is not None:
            for one in self._new(queue):
                self._expected[one.request.request_id] = self._by_past(self._past, one.request)
        means = self.scheduler.part(KnownForecasts).means([one.request for one in queue])
        known, learned = self._expected, self._mean
        expected = [known.get(one.request.request_id, learned) - one.generated for one in queue]
        without = np.minimum(expected, [float(one.left) for one in queue])
        left: npt.NDArray[np.float64] = np.maximum(np.where(np.isnan(means), without, means), 1.0)
        return left

    def _new(self, queue: list[QueuedRequest]) -> list[QueuedRequest]:
        """Return those that have come since, a few at a time."""
        return [
            one
            for one in queue
            if one.prompt is not None and one.request.request_id not in self._expected
        ][:_FORECAST_AT_ONCE]

    def _by_past(self, past: EnginePast, request: Any) -> float:
        try:
            return past.expected(request) or self._mean
        except Exception:  # it is expected to be like the others
            logger.exception("a request cannot be forecast by the past")
            return self._mean

    def _forecast(self, prompts: PromptPredictor, queue: list[QueuedRequest]) -> None:
        new = self._new(queue)
        if not new:
            return
        try:
            self._expected.update(_expected(prompts, new))
        except Exception:  # one of them: it is expected to be like the others
            logger.exception("a prompt cannot be forecast")
            for one in new:
                self._expected[one.request.request_id] = self._mean
                with suppress(Exception):
                    self._expected.update(_expected(prompts, [one]))


def _expected(prompts: PromptPredictor, queue: list[QueuedRequest]) -> dict[str, float]:
    """Return the tokens that requests are expected to generate by their prompts."""
    forecast = prompts.forecast(
        [one.prompt or [] for one in queue],
        [one.temperature for one in queue],
        [min(one.left, prompts.longest) for one in queue],
    )
    names = [one.request.request_id for one in queue]
    return dict(zip(names, forecast.mean().tolist(), strict=True))
