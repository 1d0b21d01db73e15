"""A scheduler that forms batches by the slack of their requests; otherwise vLLM's own.

Given to vLLM as ``--scheduler-cls rescheduler.batching.vllm_scheduler.FairBatchingScheduler``,
configured by the ``headway`` section of ``--additional-config`` (see `batching_config`).
"""

import logging
import time
from collections import deque
from math import inf
from pathlib import Path
from typing import Any

import msgspec
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.request import Request

from data_collection.capture.requests import parse_request_id
from data_collection.vllm_scheduler import SyncOrAsyncScheduler
from predictor.live.engine_forecasts import GAUGES_ATTRIBUTE
from predictor.live.vllm_scheduler import AsyncLiveHeadwayScheduler, SyncLiveHeadwayScheduler
from rescheduler.batching.admission import rejection_reason, retry_seconds
from rescheduler.batching.batch_formation import (
    BatchPlan,
    RequestRow,
    RequestTable,
    plan_batch,
)
from rescheduler.batching.batch_times import BatchTimes, StepClock
from rescheduler.batching.batching_config import VLLM_ORDER, read_batching_config
from rescheduler.batching.garbage_collection import GarbageCollection
from rescheduler.batching.objectives import Objectives, read_objectives
from rescheduler.batching.prefill_budget import table_prefill_budget
from rescheduler.batching.vllm_adapter import (
    add_output,
    is_new_prompt,
    move_to_front,
    no_room_for,
    objectives_given,
    rank_path,
    read_table,
    refuse_other_version,
    refuse_unsupported,
    reject,
    room,
    step_tokens,
)
from rescheduler.step_time.engine_description import describe_engine
from rescheduler.step_time.profile import load_profile
from rescheduler.step_time.step_log import StepLog

__all__ = ["AsyncFairBatchingScheduler", "FairBatchingScheduler", "SyncFairBatchingScheduler"]

logger = logging.getLogger("vllm.headway.batching")  # with vLLM's handler

_REMEMBERED = 256
"""Clients' requests that were rejected last, whose further prompts and samples are too."""


class _FormsBatches:
    """Plans every step before vLLM schedules it, and holds vLLM to the plan.

    vLLM asks `_reserve_prefill_lookahead` how many of a request's tokens may be computed now,
    for every running request (0: it sits this step out) and for every waiting one (0: it, and
    those behind it, wait on). All else stays vLLM's: the prefix cache, preemption, KV connectors.

    Attributes:
        prefill_budget: tokens of new prompts that fit within a TTFT, at the last step; None
            without a profile.
        batch_plan: of the last step; None when it was left to vLLM.
        rejected: requests that were refused for want of budget.
    """

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        refuse_other_version()
        config = read_batching_config(vllm_config.additional_config)
        self._plans = config.formation != VLLM_ORDER
        if self._plans:
            refuse_unsupported(vllm_config)
        profile, self._log = None, None
        if config.profile is not None:
            profile = load_profile(config.profile)
            profile.check(describe_engine(vllm_config))
        super().__init__(vllm_config, *args, **kwargs)  # type: ignore[call-arg]
        self._config = config
        self._planned = config.objectives.less(config.reserve)
        if config.steps is not None:
            path = rank_path(Path(config.steps), vllm_config)
            self._log = StepLog(path, describe_engine(vllm_config))
        tokens: int = self.max_num_scheduled_tokens  # type: ignore[attr-defined]
        self._times = BatchTimes(config, profile.batch if profile else None, tokens)
        self._clock = StepClock()
        self._garbage = GarbageCollection() if config.collect_garbage else None
        self._objectives: dict[str, Objectives] = {}
        self._begun: set[str] = set()
        self._considered: set[str] = set()
        self._refused: deque[str] = deque(maxlen=_REMEMBERED)
        self._rejections: list[tuple[int, EngineCoreOutput]] = []
        self._full: tuple[int, int] | None = None
        self._admits = True
        self._prompts_wait, self._due = False, inf
        self._binding: BatchPlan | None = None
        self.prefill_budget: float | None = None
        self.batch_plan: BatchPlan | None = None
        self.rejected = 0
        self._compile()

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        if self._garbage is not None:
            self._garbage.start()
        began = time.monotonic()
        now = time.time() + self._clock.begins(began) - began
        self._admits = self._has_room()
        table = self._look(now)
        if self._plans:
            plan = plan_batch(self._times.rules, table)
            # Not even one token fits: the objectives cannot be met, and idling does not help.
            self._binding = plan if any(plan.tokens.values()) else None
            begun = self._to_begin(plan)
            move_to_front(self, begun)
        self.batch_plan = self._binding
        output: SchedulerOutput = super().schedule(throttle_prefills)  # type: ignore[misc]
        if self._binding is not None and self._admits and not throttle_prefills:
            self._full = room(self) if no_room_for(self, begun) else None
        self._binding = None
        gauges = getattr(output, GAUGES_ATTRIBUTE)
        reported = msgspec.structs.replace(gauges, prefill_budget=self.prefill_budget)
        setattr(output, GAUGES_ATTRIBUTE, reported)
        new, context = step_tokens(self, output)
        self._clock.scheduled(began, new, context, self._times.seconds(new, context))
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: Any
    ) -> Any:
        step = self._clock.output(time.monotonic())
        if step is not None:
            self._times.learn(step)
            if self._log is not None:
                self._log.add(step.new, step.context, step.seconds)
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        if self._config.deadlines == "first_token":
            self._note_first_tokens(scheduler_output, time.time())
        for client, rejection in self._rejections:
            add_output(outputs, client, rejection)
        self._rejections.clear()
        if self._garbage is not None:
            self._garbage.between_steps(self._prompts_wait, self._due - time.time())
        return outputs

    def shutdown(self) -> None:
        """Close the log of steps, report the garbage collection, then shut down as usual."""
        if self._log is not None:
            self._log.close()
        if self._garbage is not None:
            self._garbage.stop()
        super().shutdown()  # type: ignore[misc]

    def _reserve_prefill_lookahead(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        tokens: int = super()._reserve_prefill_lookahead(  # type: ignore[misc]
            request, num_computed_tokens, num_new_tokens
        )
        if self._binding is None:
            return tokens
        return min(tokens, self._binding.tokens.get(request.request_id, 0))

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._objectives.pop(request.request_id, None)
        self._begun.discard(request.request_id)
        self._considered.discard(request.request_id)
        return super()._free_request(request, *args, **kwargs)  # type: ignore[misc]

    def _look(self, now: float) -> RequestTable:
        """Read the requests, reject new ones without budget, and count them."""
        table = read_table(self, self._objectives_of, now, self._admits)
        if self._config.admission and self._reject_new(table):
            table = read_table(self, self._objectives_of, now, self._admits)
        if self._times.known:
            self.prefill_budget = self._budget(table, self._planned)
        self._prompts_wait = not table.decoding.all()
        self._due = now + float(table.slack.min(initial=inf))
        return table

    def _has_room(self) -> bool:
        """Whether a waiting prompt may begin; once one found no room, not before there is more.

        Else time would be set aside in every step for what then cannot be computed.
        """
        if self._full is None or not self.running:  # type: ignore[attr-defined]
            return True
        return any(now > before for now, before in zip(room(self), self._full, strict=True))

    def _to_begin(self, plan: BatchPlan) -> list[str]:
        """Return the planned requests that wait, in the order of the plan."""
        running = {request.request_id for request in self.running}  # type: ignore[attr-defined]
        return [name for name, tokens in plan.tokens.items() if tokens and name not in running]

    def _objectives_of(self, request: Request) -> Objectives:
        name = request.request_id
        if name not in self._objectives:
            default = self._config.objectives
            try:
                asked = read_objectives(objectives_given(request), default)
            except ValueError as error:  # the API server would have refused it
                logger.warning("%s gets the default objectives: %s", name, error)
                asked = default
            self._objectives[name] = asked.less(self._config.reserve)
        return self._objectives[name]

    def _note_first_tokens(self, scheduler_output: SchedulerOutput, now: float) -> None:
        """Count the deadlines of a request that has begun from its first token on.

        They are those of a request whose TTFT was promised as it came out.
        """
        for name in scheduler_output.num_scheduled_tokens:
            request: Request | None = self.requests.get(name)  # type: ignore[attr-defined]
            if name in self._begun or request is None or request.num_output_tokens == 0:
                continue
            self._begun.add(name)
            promised = self._objectives_of(request)
            self._objectives[name] = promised._replace(ttft=now - request.arrival_time)

    def _budget(self, table: RequestTable, objectives: Objectives) -> float:
        rules, whole_steps = self._times.rules, self._config.whole_steps
        return table_prefill_budget(rules, table, objectives, whole_steps)

    def _reject_new(self, table: RequestTable) -> bool:
        """Reject, of those that have just arrived, whose prompt exceeds the budget.

        Never when nothing else is being served; and the prompts and samples of one client's
        request go together.
        """
        waiting: list[Request] = list(self.waiting)  # type: ignore[attr-defined]
        arrived = [request for request in waiting if request.request_id not in self._considered]
        if not arrived:
            return False
        names = {request.request_id for request in arrived}
        self._considered |= names
        known = table.without(names)
        served = {parse_request_id(name).external_id for name in known.names}
        taken, rejected = 0, self.rejected
        for request in arrived:
            client_request = parse_request_id(request.request_id).external_id
            prompt: int = request.num_prompt_tokens
            if served and client_request not in served and is_new_prompt(request):
                budget = self._budget(known, self._objectives_of(request)) - taken
                if prompt > budget or client_request in self._refused:
                    self._refused.append(client_request)
                    seconds = retry_seconds(prompt - budget, self._times.seconds_a_token)
                    self._rejections.append(reject(self, request, rejection_reason(seconds)))
                    self.rejected += 1
                    continue
            served.add(client_request)
            taken += prompt
        return self.rejected > rejected

    def _compile(self) -> None:
        """Have the machine code ready before the first step."""
        started = time.monotonic()
        table = RequestTable.of([RequestRow("warm-up", 1.0, 1.0, False, 1, 1, True)])
        plan_batch(self._times.rules, table)
        self._budget(table, self._planned)
        logger.info("batch formation is ready after %.1f s", time.monotonic() - started)


class SyncFairBatchingScheduler(_FormsBatches, SyncLiveHeadwayScheduler):
    """For engines that schedule a step after the last one's tokens are known."""


class AsyncFairBatchingScheduler(_FormsBatches, AsyncLiveHeadwayScheduler):
    """For engines that schedule a step ahead of the last one's tokens."""


class FairBatchingScheduler(SyncOrAsyncScheduler):
    """Forms batches by the slack of their requests."""

    sync_class = SyncFairBatchingScheduler
    async_class = AsyncFairBatchingScheduler
