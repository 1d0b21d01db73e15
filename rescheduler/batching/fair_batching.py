"""FairBatching inside vLLM's scheduler: every step is planned, and vLLM is held to the plan."""

import gc
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from data_collection.capture.requests import parse_request_id
from data_collection.vllm_adapter import scheduling
from data_collection.vllm_adapter.requests import client_arguments, is_new_prompt
from data_collection.vllm_adapter.steps import step_tokens
from data_collection.vllm_adapter.support import refuse_other_version, refuse_unsupported
from data_collection.vllm_scheduler import SchedulerPart
from predictor.live.engine_forecasts import GAUGES_ATTRIBUTE
from rescheduler.batching.admission import rejection_reason, retry_seconds
from rescheduler.batching.batch_formation import (
    DECODE_FIRST,
    FORMATIONS,
    BatchPlan,
    BatchRules,
    RequestRow,
    RequestTable,
    plan_batch,
    table_prefill_budget,
)
from rescheduler.batching.batching_config import VLLM_ORDER, BatchingConfig, read_batching_config
from rescheduler.batching.objectives import Objectives, read_objectives
from rescheduler.step_time.profile import (
    BatchTime,
    Recalibration,
    StepLog,
    describe_engine,
    load_profile,
)


class MeasuredStep(NamedTuple):
    """A step that has been computed.

    Attributes:
        new: tokens computed in it.
        context: tokens of context of its requests, once those are computed.
        seconds: that it took.
    """

    new: int
    context: int
    seconds: float


class StepClock:
    """Measures steps between their scheduling and their output, in the order of both.

    With asynchronous scheduling a step is scheduled while the one before it still runs. Its time
    then counts from that one's output on: it could not begin before.
    """

    def __init__(self) -> None:
        self._in_flight: deque[tuple[float, int, int]] = deque()
        self._free_at = 0.0
        self._last_output = 0.0

    def begins(self, now: float) -> float:
        """Return when a step that is scheduled now can begin, as far as that is known.

        Args:
            now: seconds of a monotonic clock, as in all methods.
        """
        return max(now, self._free_at) if self._in_flight else now

    def scheduled(self, now: float, new: int, context: int, estimate: float) -> None:
        """Note a step, also an empty one.

        Args:
            now: when its scheduling began.
            new: tokens computed in it.
            context: tokens of context of its requests, once those are computed.
            estimate: seconds it will take, 0 when nothing is known.
        """
        self._free_at = self.begins(now) + estimate
        self._in_flight.append((now, new, context))

    def output(self, now: float) -> MeasuredStep | None:
        """Note that the output of the oldest step has come; return it unless it was empty."""
        scheduled, new, context = self._in_flight.popleft()
        seconds = now - max(scheduled, self._last_output)
        self._last_output = now
        return MeasuredStep(new, context, seconds) if new else None


class BatchTimes:
    """Starts from a profile and, if asked, learns from every step.

    Args:
        config: formation and budget.
        profile: a, b and c as they were measured; None when nothing is known.
        max_tokens: most tokens of a batch.

    Attributes:
        rules: of the next batch.
        known: whether anything is known of the seconds of a batch.
    """

    def __init__(self, config: BatchingConfig, profile: BatchTime | None, max_tokens: int) -> None:
        self.known = profile is not None
        batch = profile or BatchTime(0.0, 0.0, 0.0)
        self.rules = BatchRules(
            formation=FORMATIONS.get(config.formation, DECODE_FIRST),
            constant=batch.constant,
            per_new=batch.per_new,
            per_context=batch.per_context,
            max_tokens=max_tokens,
            token_budget=min(config.token_budget or max_tokens, max_tokens),
        )
        learns = self.known and config.recalibrate
        self._recalibration = Recalibration(batch) if learns else None

    def seconds(self, new: int, context: int) -> float:
        """Return the estimated seconds of a batch, 0 when nothing is known or it is empty."""
        _, a, b, c, *_ = self.rules
        return BatchTime(a, b, c).seconds(new, context) if new else 0.0

    def learn(self, step: MeasuredStep) -> None:
        """Take a step into account."""
        if self._recalibration is None:
            return
        self._recalibration.update(step.new, step.context, step.seconds)
        a, b, c = self._recalibration.batch
        if a != self.rules.constant or b != self.rules.per_new or c != self.rules.per_context:
            self.rules = self.rules._replace(constant=a, per_new=b, per_context=c)


logger = logging.getLogger("vllm.headway.batching")  # with vLLM's handler

_AMPLE = 3.0
"""Collections that must fit into the least slack."""

_PATIENCE_SECONDS = 10.0
_MOST_OBJECTS = 500_000
_REPORT_SECONDS = 60.0


class GarbageCollection:
    """Collects when no prefill waits, every decode has ample slack, and some time has passed.

    Left to itself Python stops the engine whenever enough objects have been made. Here automatic
    collection is off, what is there after warm-up is frozen, and never looked at again, and a
    collection takes place between two steps. If such a moment does not come, memory is bounded
    by collecting anyway.

    Source: Lyu et al. 2025, §4.

    Attributes:
        pauses: seconds of every collection since `start`.
        untimely: how many of them took place because too many objects had piled up.
    """

    def __init__(
        self, patience: float = _PATIENCE_SECONDS, most_objects: int = _MOST_OBJECTS
    ) -> None:
        """Set when to collect.

        Args:
            patience: least seconds between two collections.
            most_objects: objects made, less those freed, before one takes place in any case.
        """
        self.pauses: list[float] = []
        self.untimely = 0
        self._patience, self._most_objects = patience, most_objects
        self._began = self._collected = self._reported = time.monotonic()
        self._running = False

    def start(self) -> None:
        """Freeze what is there, and switch automatic collection off; only once."""
        if self._running:
            return
        self._running = True
        gc.collect()
        gc.freeze()
        gc.disable()
        gc.callbacks.append(self._note)
        self._collected = time.monotonic()

    def between_steps(self, prefills_wait: bool, least_slack: float) -> None:
        """Collect if it is the time.

        Args:
            prefills_wait: whether a prompt waits to be computed.
            least_slack: seconds until the next token of any request is due.
        """
        crowded = gc.get_count()[0] > self._most_objects
        rested = time.monotonic() - self._collected > self._patience
        last = self.pauses[-1] if self.pauses else 0.0
        if crowded or (rested and not prefills_wait and least_slack > _AMPLE * last):
            self.untimely += crowded
            gc.collect()
            if self._collected - self._reported > _REPORT_SECONDS:
                self._tell()

    def stop(self) -> None:
        """Hand collection back to Python, and say how long the pauses were."""
        if not self._running:
            return
        self._running = False
        gc.callbacks.remove(self._note)
        gc.unfreeze()
        gc.enable()
        if self.pauses:
            self._tell()

    def _tell(self) -> None:
        self._reported = time.monotonic()
        logger.info(
            "garbage collection: %d pauses, %.1f ms in all, the longest %.1f ms; %d of them "
            "because too much had piled up",
            len(self.pauses),
            1e3 * sum(self.pauses),
            1e3 * max(self.pauses),
            self.untimely,
        )

    def _note(self, phase: str, info: Mapping[str, Any]) -> None:
        now = time.monotonic()
        if phase == "start":
            self._began = now
        else:
            self.pauses.append(now - self._began)
            self._collected = now


_REMEMBERED = 256
"""Clients' requests that were rejected last, whose further prompts and samples are too."""


class FairBatching(SchedulerPart):
    """Decides how many tokens of each request are computed in a step, and which are rejected.

    All else stays vLLM's: the prefix cache, preemption, KV connectors. It comes after the part that
    reports gauges, to which it adds the prefill budget.

    Attributes:
        prefill_budget: tokens of new prompts that fit within a TTFT, at the last step; None
            without a profile.
        batch_plan: of the last step; None when it was left to vLLM.
        rejected: requests that were refused for want of budget.
        times: estimated and measured seconds of steps.
    """

    def __init__(self, scheduler: Any) -> None:
        super().__init__(scheduler)
        vllm_config = scheduler.vllm_config
        refuse_other_version()
        self._config = config = read_batching_config(vllm_config.additional_config)
        self._plans = config.formation != VLLM_ORDER
        if self._plans:
            refuse_unsupported("batching", vllm_config)
        profile, self._log = None, None
        if config.profile is not None:
            profile = load_profile(config.profile)
            profile.check(describe_engine(vllm_config))
        if config.steps is not None:
            path = rank_path(Path(config.steps), vllm_config)
            self._log = StepLog(path, describe_engine(vllm_config))
        self._planned = config.objectives.less(config.reserve)
        tokens: int = scheduler.max_num_scheduled_tokens
        self.times = BatchTimes(config, profile.batch if profile else None, tokens)
        self._clock = StepClock()
        self._garbage = GarbageCollection()
        self._objectives: dict[str, Objectives] = {}
        self._begun: set[str] = set()
        self._considered: set[str] = set()
        self._refused: deque[str] = deque(maxlen=_REMEMBERED)
        self._rejections: list[tuple[int, Any]] = []
        self._full: tuple[int, int] | None = None
        self._began, self._admits = 0.0, True
        self._prompts_wait, self._due = False, inf
        self._to_begin: list[str] = []
        self.prefill_budget: float | None = None
        self.batch_plan: BatchPlan | None = None
        self.rejected = 0
        self._compile()

    def before_scheduling(self) -> None:
        """Plan the step."""
        self._garbage.start()
        self._began = time.monotonic()
        self._admits = self._has_room()
        table = self._look(self._clock.begins(self._began))
        self.batch_plan = None
        if self._plans:
            plan = plan_batch(self.times.rules, table)
            # Not even one token fits: the objectives cannot be met, and idling does not help.
            self.batch_plan = plan if any(plan.tokens.values()) else None
            running = {request.request_id for request in self.scheduler.running}
            self._to_begin = [
                name for name, tokens in plan.tokens.items() if tokens and name not in running
            ]
            scheduling.move_to_front(self.scheduler, self._to_begin)

    def most_tokens(self, request: Any, tokens: int) -> int:
        """Return the planned tokens of a request."""
        if self.batch_plan is None:
            return tokens
        return min(tokens, self.batch_plan.tokens.get(request.request_id, 0))

    def scheduled(self, output: Any, prefills_throttled: bool) -> None:
        """Note what became of the plan, and report the budget."""
        if self.batch_plan is not None and self._admits and not prefills_throttled:
            found_none = scheduling.no_room_for(self.scheduler, self._to_begin)
            self._full = scheduling.room(self.scheduler) if found_none else None
        gauges = getattr(output, GAUGES_ATTRIBUTE)
        reported = msgspec.structs.replace(gauges, prefill_budget=self.prefill_budget)
        setattr(output, GAUGES_ATTRIBUTE, reported)
        new, context = step_tokens(self.scheduler, output)
        self._clock.scheduled(self._began, new, context, self.times.seconds(new, context))

    def computed(self, output: Any) -> None:
        """Learn from the seconds that the oldest step took."""
        step = self._clock.output(time.monotonic())
        if step is not None:
            self.times.learn(step)
            if self._log is not None:
                self._log.add(step.new, step.context, step.seconds)

    def updated(self, step: Any, outputs: Any) -> None:
        """Send rejections, and collect garbage if it is the time."""
        if self._config.deadlines == "first_token":
            self._note_first_tokens(step, time.monotonic())
        for client, rejection in self._rejections:
            scheduling.add_output(outputs, client, rejection)
        self._rejections.clear()
        self._garbage.between_steps(self._prompts_wait, self._due - time.monotonic())

    def ended(self, request: Any) -> None:
        """Forget a request."""
        self._objectives.pop(request.request_id, None)
        self._begun.discard(request.request_id)
        self._considered.discard(request.request_id)

    def shutdown(self) -> None:
        """Close the log of steps, and report the garbage collection."""
        if self._log is not None:
            self._log.close()
        self._garbage.stop()

    def objectives_of(self, request: Any) -> Objectives:
        """Return what is planned for a request, less the reserve."""
        name = request.request_id
        if name not in self._objectives:
            default = self._config.objectives
            try:
                asked = read_objectives(client_arguments(request), default)
            except ValueError as error:  # the API server would have refused it
                logger.warning("%s gets the default objectives: %s", name, error)
                asked = default
            self._objectives[name] = asked.less(self._config.reserve)
        return self._objectives[name]

    def _look(self, now: float) -> RequestTable:
        """Read the requests, reject new ones without budget, and count them."""
        table = read_table(self.scheduler, self.objectives_of, now, self._admits)
        if self._config.admission and self._reject_new(table):
            table = read_table(self.scheduler, self.objectives_of, now, self._admits)
        if self.times.known:
            self.prefill_budget = self._budget(table, self._planned)
        self._prompts_wait = not table.decoding.all()
        self._due = now + float(table.slack.min(initial=inf))
        return table

    def _has_room(self) -> bool:
        """Whether a waiting prompt may begin; once one found no room, not before there is more.

        Else time would be set aside in every step for what then cannot be computed.
        """
        if self._full is None or not self.scheduler.running:
            return True
        now = scheduling.room(self.scheduler)
        return any(more > before for more, before in zip(now, self._full, strict=True))

    def _note_first_tokens(self, step: Any, now: float) -> None:
        """Count the deadlines of a request that has begun from its first token on.

        They are those of a request whose TTFT was promised as it came out.
        """
        for name in step.num_scheduled_tokens:
            request = self.scheduler.requests.get(name)
            if name in self._begun or request is None or request.num_output_tokens == 0:
                continue
            self._begun.add(name)
            promised = self.objectives_of(request)
            self._objectives[name] = promised._replace(ttft=now - scheduling.arrival(request))

    def _budget(self, table: RequestTable, objectives: Objectives) -> float:
        whole_steps = self._config.whole_steps
        return table_prefill_budget(self.times.rules, table, objectives, whole_steps)

    def _reject_new(self, table: RequestTable) -> bool:
        """Reject, of those that have just arrived, whose prompt exceeds the budget.

        Never when nothing else is being served; and the prompts and samples of one client's
        request go together.
        """
        waiting = list(self.scheduler.waiting)
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
                budget = self._budget(known, self.objectives_of(request)) - taken
                if prompt > budget or client_request in self._refused:
                    self._refused.append(client_request)
                    a_token = self.times.rules.per_new + self.times.rules.per_context
                    seconds = retry_seconds(prompt - budget, a_token)
                    reason = rejection_reason(seconds)
                    self._rejections.append(scheduling.reject(self.scheduler, request, reason))
                    self.rejected += 1
                    continue
            served.add(client_request)
            taken += prompt
        return self.rejected > rejected

    def _compile(self) -> None:
        """Have the machine code ready before the first step."""
        started = time.monotonic()
        table = RequestTable.of([RequestRow("warm-up", 1.0, 1.0, False, 1, 1, True)])
        plan_batch(self.times.rules, table)
        self._budget(table, self._planned)
        logger.info("batch formation is ready after %.1f s", time.monotonic() - started)


def read_table(
    scheduler: Any, objectives_of: Callable[[Any], Objectives], now: float, admits: bool
) -> RequestTable:
    """Read the requests of an engine.

    Those that wait for a grammar, for a remote cache, or for more input are not eligible, nor
    those that wait beyond the free slots: who holds a cache comes first, then the least slack.
    Unless it admits, none that holds no cache may begin.
    """
    slots = scheduling.slots_to_begin(scheduler)

    def row(held: scheduling.HeldRequest) -> RequestRow:
        due = objectives_of(held.request)
        return RequestRow(
            name=held.request.request_id,
            slack=due.deadline(scheduling.arrival(held.request), held.generated) - now,
            tpot=due.tpot,
            decoding=held.decoding,
            wanted=held.wanted,
            context=held.context,
            eligible=held.ready,
        )

    requests = scheduling.held_requests(scheduler, admits)
    table = RequestTable.of([row(held) for held in requests])
    n_running = sum(held.runs for held in requests)  # they come first
    ready = n_running + np.flatnonzero(table.eligible[n_running:])
    if len(ready) > slots:
        without_cache = np.array([not requests[i].holds_cache for i in ready])
        ranked = ready[np.lexsort((table.slack[ready], without_cache))]
        table.eligible[ranked[slots:]] = False
    return table


def rank_path(path: Path, vllm_config: Any) -> Path:
    """Return a file of this engine's own among data-parallel ones: ``steps-1.csv`` of rank 1."""
    rank = vllm_config.parallel_config.data_parallel_rank
    return path.with_stem(f"{path.stem}-{rank}") if rank else path
